"""A lock in the hand of its holder: trusted by the clock alone, and once lost lost for ever."""

from __future__ import annotations

import pytest

from celery_redlock.errors import LockLost
from celery_redlock.lock.held import HeldLock, NotLocked
from support.fakes import FakeClock, lease_of


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr("celery_redlock.lock.clock.now", fake)
    return fake


@pytest.fixture
def told():
    return []


@pytest.fixture
def held(clock, told):
    return HeldLock(lease_of(clock, valid_until=clock() + 10.0), told.append)


def later(held, seconds):
    return held.lease.renewed(held.lease.valid_until + seconds, 1.0)


def test_a_held_lock_tells_its_lease(held, clock):
    lease = held.lease
    assert (held.name, held.token, held.fence) == (lease.name, lease.token, lease.fence)
    assert (held.ttl, held.since, held.remaining()) == (lease.ttl, lease.since, 10.0)
    assert (held.is_lost, held.lost_reason, held.renewals) == (False, None, 0)


def test_a_held_lock_is_held_to_its_deadline(held, clock):
    clock.advance(9.999)
    held.ensure_held()


def test_the_clock_alone_tells_that_a_lock_is_lost(held, clock):
    """Nobody has to run for a lease to end: the holder reads it off the clock."""
    clock.advance(10.0)
    assert (held.is_lost, held.lost_reason, held.remaining()) == (True, "deadline", 0.0)
    with pytest.raises(LockLost) as raised:
        held.ensure_held()
    assert (raised.value.name, raised.value.reason) == ("k", "deadline")


def test_a_renewal_moves_the_deadline(held, clock):
    clock.advance(9.0)
    assert held.renewed(later(held, 10.0))
    clock.advance(9.0)
    held.ensure_held()
    assert (held.renewals, held.remaining()) == (1, 2.0)


def test_a_renewal_that_comes_too_late_revives_nothing(held, clock):
    clock.advance(10.0)
    assert not held.renewed(later(held, 1000.0))
    assert (held.lost_reason, held.renewals) == ("deadline", 0)


def test_a_lock_that_was_seen_to_be_lost_stays_lost(held, clock):
    """A clock that were set back changes nothing any more."""
    clock.advance(10.0)
    assert held.is_lost
    clock.advance(-10.0)
    assert held.lost_reason == "deadline"


def test_the_holder_is_told_of_a_loss_once(held, told):
    held.lose("stolen")
    held.lose("deadline")
    assert told == [held]
    assert held.lost_reason == "stolen"


def test_the_holder_is_told_of_a_loss_it_has_seen_itself(held, told, clock):
    """Having looked at the clock does not keep the word from coming."""
    clock.advance(10.0)
    assert held.is_lost
    held.lose("deadline")
    assert told == [held]


def test_the_holder_is_not_told_after_it_gave_the_lock_back(held, told):
    """A lock given back is lost in the sense that it cannot be used, and to nobody's surprise."""
    held.released()
    held.lose("stolen")
    assert told == []
    assert held.lost_reason == "released"
    with pytest.raises(LockLost, match="released"):
        held.ensure_held()


def test_a_lock_given_back_is_not_renewed(held):
    held.released()
    assert not held.renewed(later(held, 10.0))


def test_a_loss_tells_what_the_nodes_last_answered(held, clock):
    held.not_renewed({"lock-1": "refused (3.0 s left)"})
    held.renewed(later(held, 1.0))
    held.not_renewed({"lock-1": "unreachable"})
    clock.advance(11.0)
    with pytest.raises(LockLost, match=r"deadline.*lock-1: unreachable") as raised:
        held.ensure_held()
    assert raised.value.votes == {"lock-1": "unreachable"}


def test_no_node_is_named_where_the_holder_gave_it_back(held):
    """What the nodes answer to a renewal that was under way is not why."""
    held.not_renewed({"lock-1": "unreachable"})
    held.released()
    held.not_renewed({"lock-1": "refused (3.0 s left)"})
    assert held.loss().votes == {}


def test_no_node_is_named_in_a_forked_child(held, monkeypatch):
    """What the nodes answered to its parent says nothing of why it holds no lock."""
    held.not_renewed({"lock-1": "unreachable"})
    monkeypatch.setattr("celery_redlock.lock.held.process", object())
    assert (held.loss().reason, held.loss().votes) == ("fork", {})


def test_giving_back_a_lost_lock_keeps_the_reason(held, clock):
    """Why it was lost is of more use than that it was released."""
    clock.advance(10.0)
    assert held.is_lost
    held.released()
    assert held.lost_reason == "deadline"


def test_a_forked_child_holds_nothing(held, monkeypatch):
    """The lock is the parent's, who goes on renewing and releases it."""
    monkeypatch.setattr("celery_redlock.lock.held.process", object())
    assert (held.lost_reason, held.remaining()) == ("fork", 0.0)
    assert not held.renewed(later(held, 10.0))


def test_a_held_lock_shows_its_state_and_not_its_token(held, clock):
    assert repr(held) == "<HeldLock 'k' fence=7 10.0 s left>"
    held.lose("stolen")
    assert repr(held) == "<HeldLock 'k' fence=7 lost: stolen>"


def test_running_without_a_lock_says_so_and_never_ends(clock):
    held = NotLocked("k", "no quorum, and the policy is run_unlocked", since=1.7e9)
    clock.advance(1e9)
    held.ensure_held()
    held.released()
    assert (held.fence, held.token, held.is_lost, held.lost_reason) == (None, "", False, None)
    assert held.remaining() == float("inf")
    assert "run_unlocked" in repr(held)


def test_how_long_it_is_held_is_not_read_off_the_wall_clock(held, clock):
    """That may be set while a task runs."""
    clock.advance(3.0)
    assert held.held_for == 3.0
