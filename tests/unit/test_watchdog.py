"""The watchdog renews in time, tells of losses, and nothing that goes wrong makes it stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from dataclasses import replace
from unittest import mock

import pytest

from celery_redlock.lock import watchdog as module
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.watchdog import BATCH, STALE, NotRenewed, Watchdog
from celery_redlock.process import forks
from support.fakes import FakeClock, lease_of
from support.waiting import eventually

#: How long a test waits for a thread before it fails [s].
PATIENCE = 60.0
VOTES = {"lock-1:6379/0": "granted", "lock-2:6379/0": "refused (3.0 s left)"}


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr("celery_redlock.lock.clock.now", fake)
    return fake


class Nodes:
    """Answers renewals with "renew", None, the reason of a loss, or an error, as a test says."""

    def __init__(self, clock):
        self.clock = clock
        self.asked = []
        self.answer = "renew"
        self.takes = 0.0

    def __call__(self, leases):
        self.asked.append((self.clock(), [lease.name for lease in leases]))
        started = self.clock()
        self.clock.advance(self.takes)
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer != "renew":
            return [NotRenewed(self.answer, VOTES)] * len(leases)
        return [lease.renewed(started + lease.ttl * 0.95, 1.0) for lease in leases]


class Threadless(Watchdog):
    def _start(self):
        """Start nothing."""

    def tick(self):
        """Do what the thread would do now, and return how many leases were due."""
        batch = self.take_due()
        if batch:
            self.renew(batch)
        return len(batch)

    def next_due(self):
        return self._due[0][0]


@pytest.fixture
def nodes(clock):
    return Nodes(clock)


@pytest.fixture
def told():
    """What the watchdog told: lock name and margin, None for a loss."""
    return []


@pytest.fixture
def watchdog(clock, nodes, told):
    return Threadless(nodes, lambda held, margin: told.append((held.name, margin)), clock)


@pytest.fixture
def take(watchdog, clock):
    def taken(name="k", on_lost=None, ttl=30.0):
        held = HeldLock(lease_of(clock, name, ttl=ttl, valid_until=clock() + ttl * 0.95), on_lost)
        watchdog.watch(held, clock())
        return held

    return taken


# -- in time ---------------------------------------------------------------------------


def test_a_lease_is_renewed_at_a_third_of_its_ttl(take, watchdog, clock, nodes):
    held, begun = take(), clock()
    nodes.takes = 0.5
    clock.time = begun + 9.99
    assert not watchdog.tick()
    clock.time = begun + 10.0
    assert watchdog.tick()
    assert watchdog.next_due() == begun + 20.0
    clock.time = begun + 20.0
    assert watchdog.tick()
    assert [at for at, _ in nodes.asked] == [begun + 10.0, begun + 20.0]
    assert (held.renewals, held.lease.valid_until) == (2, begun + 20.0 + 28.5)


def test_a_renewal_is_told_with_what_was_left(take, watchdog, clock, nodes, told):
    take()
    clock.advance(10.0)
    nodes.takes = 0.5
    watchdog.tick()
    assert told == [("k", 18.0)]


def test_an_undecided_renewal_is_tried_again_soon(take, watchdog, clock, nodes, told):
    held, begun = take(), clock()
    clock.advance(10.0)
    nodes.answer = None
    pauses = []
    while watchdog.next_due() < begun + 28.5:
        before, clock.time = clock.time, watchdog.next_due()
        pauses.append(clock.time - before)
        watchdog.tick()
        assert not held.is_lost
    assert all(2.5 * 0.75 <= pause <= 2.5 * 1.25 for pause in pauses[1:])
    assert len(set(pauses)) == len(pauses) > 4
    assert told == []


def test_retries_end_with_the_lease(take, watchdog, clock, nodes, told):
    lost = []
    held, begun = take(on_lost=lost.append), clock()
    nodes.answer = None
    while watchdog._due:
        clock.time = watchdog.next_due()
        watchdog.tick()
    assert clock.time == begun + 28.5
    assert (held.lost_reason, lost, told) == ("deadline", [held], [("k", None)])
    assert watchdog.held == []


def test_a_renewal_that_succeeds_at_last_goes_on_as_usual(take, watchdog, clock, nodes):
    """If nothing is asked from then on, no node is to blame for the loss."""
    held, begun = take(), clock()
    nodes.answer = None
    clock.advance(10.0)
    watchdog.tick()
    nodes.answer = "renew"
    clock.time = worked = watchdog.next_due()
    watchdog.tick()
    assert worked > begun + 10.0
    assert watchdog.next_due() == worked + 10.0
    assert held.renewals == 1
    clock.advance(1000.0)
    assert (held.loss().reason, held.loss().votes) == ("deadline", {})


def test_a_lease_that_ended_is_not_renewed(take, watchdog, clock, nodes):
    """A thread that got to run too late asks nobody: nothing may be set again."""
    held = take()
    clock.advance(28.5)
    watchdog.tick()
    assert nodes.asked == []
    assert held.lost_reason == "deadline"


def test_an_answer_after_the_deadline_revives_nothing(take, watchdog, clock, nodes, told):
    held = take()
    clock.advance(28.0)
    nodes.takes = 1.0
    watchdog.tick()
    assert (held.lost_reason, told, watchdog.held) == ("deadline", [("k", None)], [])


@pytest.mark.parametrize("answer", [None, "stolen", "deadline"])
def test_a_loss_tells_what_each_node_answered(take, watchdog, clock, nodes, answer):
    held = take()
    nodes.answer = answer
    while watchdog._due:
        clock.time = watchdog.next_due()
        watchdog.tick()
    assert (held.loss().reason, held.loss().votes) == (answer or "deadline", VOTES)


@pytest.mark.parametrize("reason", ["stolen", "deadline"])
def test_a_loss_is_told_at_once_and_for_ever(take, watchdog, clock, nodes, told, reason):
    lost = []
    held = take(on_lost=lost.append)
    nodes.answer = reason
    clock.advance(10.0)
    watchdog.tick()
    assert (held.lost_reason, lost, told) == (reason, [held], [("k", None)])
    clock.advance(1000.0)
    assert not watchdog.tick()
    assert len(nodes.asked) == 1


# -- given back ------------------------------------------------------------------------


def test_a_lease_given_back_early_is_never_renewed(take, watchdog, clock, nodes, told):
    held = take()
    clock.advance(9.0)
    watchdog.unwatch(held)
    clock.advance(100.0)
    assert not watchdog.tick()
    assert (nodes.asked, told, watchdog.held) == ([], [], [])


def test_giving_back_twice_is_no_error(take, watchdog):
    held = take()
    watchdog.unwatch(held)
    watchdog.unwatch(held)
    assert watchdog.held == []


@pytest.mark.parametrize("answer", ["renew", None, "stolen"])
def test_a_lock_given_back_during_its_renewal_is_left_alone(watchdog, take, clock, told, answer):
    held = take(on_lost=told.append)

    def extend(leases):
        watchdog._held.pop(held)  # as another thread would
        held.released()
        if answer == "renew":
            return [leases[0].renewed(clock() + 28.5, 1.0)]
        return [NotRenewed(answer, VOTES)]

    watchdog._extend = extend
    clock.advance(10.0)
    watchdog.tick()
    assert (told, watchdog._due, held.lost_reason) == ([], [], "released")
    assert held.loss().votes == {}


def test_a_lock_given_back_just_before_its_renewal_is_not_renewed(watchdog, take, clock, nodes):
    """It was due and taken off the heap, and still nothing is sent for it."""
    held, other = take(), take("other")
    clock.advance(10.0)
    batch = watchdog.take_due()
    watchdog.unwatch(held)
    watchdog.renew(batch)
    assert nodes.asked == [(clock(), ["other"])]
    assert (other.renewals, held.renewals) == (1, 0)


def test_the_heap_is_swept(take, watchdog):
    kept = [take(f"kept-{i}") for i in range(3)]
    for i in range(20 * STALE):
        watchdog.unwatch(take(f"gone-{i}"))
    assert len(watchdog._due) <= STALE + 2 * len(kept) + 1
    assert set(watchdog.held) == set(kept)
    assert {held for _, _, held in watchdog._due} >= set(kept)
    assert watchdog._due[0] == min(watchdog._due, key=lambda entry: entry[:2])


# -- many at once ------------------------------------------------------------------------


def test_what_is_nearly_due_goes_along(take, watchdog, clock, nodes):
    begun, held = clock(), []
    for number, name in enumerate("abc"):
        clock.time = begun + 0.2 * number
        held.append(take(name))
    clock.time = begun + 10.0
    assert [watchdog.tick(), watchdog.tick()] == [2, 0]
    assert [names for _, names in nodes.asked] == [["a", "b"]]
    assert [one.lag for one in held] == [0.0, 0.0, 0.0]


def test_what_is_due_together_is_renewed_together(take, watchdog, clock, nodes):
    locks = [take(f"k{i}") for i in range(BATCH + 7)]
    clock.advance(5.0)
    take("later")
    clock.advance(5.0)
    assert [watchdog.tick(), watchdog.tick(), watchdog.tick()] == [BATCH, 7, 0]
    names = [name for _, asked in nodes.asked for name in asked]
    assert names == [held.name for held in locks]


def test_each_lock_has_its_own_outcome(take, watchdog, clock, told):
    locks = {name: take(name) for name in ("renewed", "stolen", "unknown")}

    def extend(leases):
        outcomes = {
            "renewed": leases[0].renewed(clock() + 28.5, 1.0),
            "stolen": NotRenewed("stolen", VOTES),
            "unknown": NotRenewed(None, VOTES),
        }
        return [outcomes[lease.name] for lease in leases]

    watchdog._extend = extend
    clock.advance(10.0)
    watchdog.tick()
    assert {name: held.lost_reason for name, held in locks.items()} == {
        "renewed": None,
        "stolen": "stolen",
        "unknown": None,
    }
    assert told == [("renewed", 18.5), ("stolen", None)]
    assert watchdog.next_due() < clock() + 4.0


def test_locks_of_all_ttls_come_up_in_their_time(take, watchdog, clock, nodes):
    take("long", ttl=60.0)
    take("short", ttl=3.0)
    clock.advance(1.0)
    watchdog.tick()
    assert nodes.asked[0][1] == ["short"]


# -- what goes wrong ---------------------------------------------------------------------


def test_a_holders_callback_that_fails_harms_no_other_lock(watchdog, take, clock, nodes, told):
    def fails(held):
        raise ValueError("no such thread")

    first, second, third = take("first"), take("second", on_lost=fails), take("third")

    def extend(leases):
        stolen = NotRenewed("stolen", VOTES)
        return [stolen if x.name == "second" else nodes([x])[0] for x in leases]

    watchdog._extend = extend
    clock.advance(10.0)
    watchdog.tick()
    assert (first.renewals, third.renewals, second.lost_reason) == (1, 1, "stolen")
    assert told == [("first", 18.5), ("second", None), ("third", 18.5)]
    assert len(watchdog._due) == 2


@pytest.mark.parametrize(
    ("late", "said"), [(5.1, "5.1 s late"), (4.9, "")], ids=["late", "nearly in time"]
)
def test_a_late_thread_says_so(take, watchdog, clock, caplog, late, said):
    """More than a sixth of the TTL behind, leases are at risk: something starves the process."""
    take()
    clock.advance(10.0 + late)
    with caplog.at_level(logging.WARNING):
        watchdog.tick()
    assert said in caplog.text
    assert bool(caplog.text) is bool(said)


# -- the thread ----------------------------------------------------------------------------


@pytest.fixture
def start(monkeypatch):
    threads, made = [], []
    real, ended = threading.Thread, threading.Event()

    def thread(*args, **kwargs):
        threads.append(real(*args, **kwargs))
        return threads[-1]

    monkeypatch.setattr(module.threading, "Thread", thread)

    class Mortal(Watchdog):
        def _run(self):
            with contextlib.suppress(SystemExit):
                super()._run()

        def take_due(self):
            if ended.is_set():
                raise SystemExit
            return super().take_due()

    def started(extend, told=lambda held, margin: None):
        made.append(Mortal(extend, told, time.monotonic))
        return made[-1]

    yield started
    ended.set()
    for watchdog in made:
        with watchdog._changed:
            watchdog._changed.notify_all()
    for each in threads:
        each.join(PATIENCE)
        assert not each.is_alive()


def due_now(watchdog, name="k"):
    held = HeldLock(lease_of(time.monotonic, name, valid_until=float("inf")))
    watchdog.watch(held, time.monotonic() - 10.0)
    return held


def test_the_thread_starts_with_the_first_lease(start):
    renewed = threading.Event()
    before = set(threading.enumerate())
    watchdog = start(
        lambda leases: [replace(x, ttl=1e6, renewals=1) for x in leases],
        lambda held, margin: renewed.set(),
    )
    assert set(threading.enumerate()) <= before
    held = due_now(watchdog)
    assert renewed.wait(PATIENCE)
    assert held.renewals == 1


def test_a_sleeping_thread_is_woken_for_an_earlier_lease(start):
    asked = threading.Event()

    def extend(leases):
        if leases[0].name == "soon":
            asked.set()
        return [NotRenewed("stolen", VOTES)] * len(leases)

    watchdog = start(extend)
    watchdog.watch(HeldLock(lease_of(time.monotonic, "late", ttl=3e5)), time.monotonic())
    due_now(watchdog, "soon")
    assert asked.wait(PATIENCE)


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError])
def test_an_error_in_a_round_does_not_kill_the_thread(start, caplog, error):
    rounds, worked = [], threading.Event()

    def extend(leases):
        rounds.append(len(leases))
        if len(rounds) == 1:
            raise error("no file descriptors")
        worked.set()
        return [NotRenewed("stolen", VOTES)] * len(leases)

    held = HeldLock(lease_of(time.monotonic, ttl=0.001, valid_until=float("inf")))
    start(extend).watch(held, 0.0)
    assert worked.wait(PATIENCE)
    assert "no file descriptors" in caplog.text


def test_a_thread_that_died_is_replaced(start, monkeypatch):
    asked = threading.Event()

    def extend(leases):
        asked.set()
        return [NotRenewed("stolen", VOTES)] * len(leases)

    watchdog = start(extend)
    with monkeypatch.context() as patch:
        patch.setattr(watchdog, "take_due", mock.Mock(side_effect=SystemExit))
        due_now(watchdog, "killer")
        eventually(lambda: watchdog._thread is None, "end of the thread")
    due_now(watchdog, "next")
    assert asked.wait(PATIENCE)


def test_a_thread_that_cannot_start_is_tried_again(watchdog, clock, monkeypatch):
    """A process out of threads fails this lease, and not all that follow."""
    started = []

    def start():
        started.append(1)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(watchdog, "_start", start)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            watchdog.watch(HeldLock(lease_of(clock)), clock())
    assert len(started) == 2


def test_giving_back_waits_for_a_renewal_under_way(start):
    """Sent after the release, the renewal would set the key again, and nobody would hold it."""
    log = []
    asking, may_answer = threading.Event(), threading.Event()

    def extend(leases):
        asking.set()
        assert may_answer.wait(PATIENCE)
        log.append("renewal sent")
        return [NotRenewed(None, VOTES)] * len(leases)

    watchdog = start(extend)
    held = due_now(watchdog)
    assert asking.wait(PATIENCE)

    def give_back():
        watchdog.unwatch(held)
        log.append("release sent")

    giver = threading.Thread(target=give_back)
    giver.start()
    while giver.is_alive() and not watchdog._changed._waiters:
        pass
    may_answer.set()
    giver.join(PATIENCE)
    assert log == ["renewal sent", "release sent"]


def test_all_watchdogs_are_reset_by_a_fork(take, watchdog):
    take()
    forks._stages["watchdog"].in_child()
    assert (watchdog.held, watchdog._due, watchdog._thread) == ([], [], None)
