"""When a lease goes on, when it is lost, and when nobody can tell yet."""

from __future__ import annotations

import json
from itertools import combinations_with_replacement, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.algorithm.renewal import Renewal
from celery_redlock.lock.lease import Lease, quorum
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import lease_arguments
from celery_redlock.lock.scripts.scripts import RENEW
from celery_redlock.lock.scripts.votes import VoteKind, count
from support.fakes import (
    SILENT,
    FakeClock,
    granted,
    lease_of,
    quarantined,
    refused,
    repaired,
    unreachable,
)

LETTERS = {
    "G": granted(),
    "R": repaired(),
    "Q": quarantined(),
    "U": unreachable(),
    "-": SILENT,
    "x": refused("x"),
    "y": refused("y"),
}


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def lease(clock):
    lease = lease_of(clock)
    clock.advance(10.0)
    return lease


@pytest.fixture
def renewal(clock, lease):
    return Renewal(Participant(Rules(), ("a", "b", "c"), now=clock), lease)


def ballot_of(word):
    return [LETTERS[letter] for letter in word]


@pytest.mark.parametrize(
    "word", ["GGG", "GG-", "GGU", "GGx", "GGQ", "GGR", "GGGRR", "GGGR-", "GGG--"]
)
def test_a_quorum_that_keeps_our_token_renews(word, renewal, lease):
    """Nodes that extended the key count; those that set it again do from the next renewal on."""
    for ballot in permutations(ballot_of(word)):
        assert renewal.decided(ballot)
        renewed = renewal.outcome(ballot)
        assert isinstance(renewed, Lease)
        assert renewed.valid_until == pytest.approx(lease.valid_until + 10.0)
        assert (renewed.token, renewed.fence) == (lease.token, lease.fence)


@pytest.mark.parametrize(
    "word",
    ["GQQ", "GQU", "GUU", "G--", "QQQ", "UUU", "RQQ", "GxU", "GxQ", "GRU", "GR-", "GRQ", "GRx"],
)
def test_without_a_quorum_nobody_can_tell(word, renewal):
    for ballot in permutations(ballot_of(word)):
        assert renewal.outcome(ballot) is None


@pytest.mark.parametrize("word", ["xxx", "xx-", "xxU", "xxG", "xyQ", "xyR", "RRR", "RRU", "RR-"])
def test_a_quorum_out_of_reach_is_a_lock_stolen(word, renewal):
    for ballot in permutations(ballot_of(word)):
        assert renewal.decided(ballot)
        assert renewal.outcome(ballot) == "stolen"


@pytest.mark.parametrize("word", ["GGG", "RRR", "GR-", "xxx", "---", "UUU"])
@pytest.mark.parametrize("late", [0.0, 0.001, 3600.0])
def test_after_the_deadline_nothing_revives_a_lease(word, late, renewal, lease, clock):
    """Not even yes votes of all nodes: somebody else may have had the lock in between."""
    clock.time = lease.valid_until + late
    assert renewal.outcome(ballot_of(word)) == "deadline"


def test_a_lease_is_renewed_to_the_last_moment_before_the_deadline(renewal, lease, clock):
    """Until then a majority stores our token, so nobody else can have had one."""
    clock.time = lease.valid_until - 0.001
    assert isinstance(renewal.outcome(ballot_of("GGR")), Lease)


def test_a_slow_renewal_counts_from_its_beginning(renewal, clock):
    at_once = renewal.outcome(ballot_of("GGG"))
    clock.advance(5.0)
    assert renewal.outcome(ballot_of("GGG")) == at_once


@pytest.mark.parametrize(
    "word", ["GU-", "G--", "---", "R--", "Q--", "x--", "GR-", "GGR--", "GGRU-", "Gx-"]
)
def test_a_renewal_that_can_go_either_way_is_waited_for(word, renewal):
    assert not renewal.decided(ballot_of(word))


@pytest.mark.parametrize("nodes", [1, 3, 5, 7])
def test_what_is_decided_does_not_depend_on_who_answers_first(nodes, renewal):
    for told in range(nodes):
        for first in combinations_with_replacement("GRQUx", told):
            ballot = ballot_of(first)
            if not renewal.decided([*ballot, *ballot_of("-" * (nodes - told))]):
                continue
            early = renewal.outcome([*ballot, *ballot_of("-" * (nodes - told))])
            for later in combinations_with_replacement("GRQUx", nodes - told):
                assert renewal.outcome([*ballot, *ballot_of(later)]) == early, (first, later)


@given(
    started=st.floats(0, 28), ttl=st.floats(1, 60), drift=st.floats(0, 0.49), left=st.floats(0, 60)
)
def test_a_renewal_never_shortens_a_lease(started, ttl, drift, left):
    clock = FakeClock(started)
    rules = Rules(ttl=ttl, drift_factor=drift)
    lease = lease_of(clock, ttl=ttl, valid_until=started + left + 0.001)
    renewed = Renewal(Participant(rules, ("a",), now=clock), lease).outcome([granted()])
    assert renewed.valid_until >= lease.valid_until


@pytest.mark.parametrize("nodes", [1, 3, 4])
def test_every_ballot_has_an_outcome(nodes, lease, clock):
    labels = tuple("abcd"[:nodes])
    renewal = Renewal(Participant(Rules(), labels, now=clock), lease)
    for ballot in product(LETTERS.values(), repeat=nodes):
        gone = count(ballot, VoteKind.REFUSED) > nodes - quorum(nodes)
        missing = count(ballot, VoteKind.REPAIRED) >= quorum(nodes)
        outcome = renewal.outcome(ballot)
        assert isinstance(outcome, Lease) is (count(ballot, VoteKind.GRANTED) >= quorum(nodes))
        assert (outcome == "stolen") is (gone or missing)
        assert renewal.decided(ballot) is (outcome is not None)


def test_a_renewal_asks_to_extend_and_repair_under_the_old_token(renewal, lease):
    request = renewal.request()
    token, _, ttl, fence, _, _, repair, _ = request.arguments
    assert request.script is RENEW
    assert (token, ttl, fence, repair) == (lease.token.encode(), b"30000", b"7", b"1")


def test_a_renewal_tells_the_smallest_margin_there_was():
    """Not the latest: one narrow escape is what an operator wants to see."""
    lease = Lease("n", "t" * 40, None, 30.0, 130.0, 0.0, {"task": "bill"})
    assert not json.loads(lease_arguments(Rules(), lease)[1]).keys() & {"renewals", "margin"}
    for margin, times, smallest in ((5.0, 1, 5.0), (19.0, 2, 5.0), (0.25, 3, 0.25)):
        lease = lease.renewed(130.0, margin)
        told = json.loads(lease_arguments(Rules(), lease)[1])
        assert (told["task"], told["renewals"], told["margin"]) == ("bill", times, smallest)
