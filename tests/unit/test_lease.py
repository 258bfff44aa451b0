"""The arithmetic of a lease holds for all numbers, not only for those of an example."""

from __future__ import annotations

import dataclasses
import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.lock.lease import (
    Lease,
    fence_proposal,
    least_validity,
    quarantine_for,
    quorum,
    renew_at,
    valid_until,
)
from support.fakes import FakeClock, lease_of

counts = st.integers(1, 99)
instants = st.floats(0, 1e6)
ttls = st.floats(0.1, 3600)
drifts = st.floats(0, 0.49)


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr("celery_redlock.lock.clock.now", fake)
    return fake


@pytest.mark.parametrize(("nodes", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (7, 4)])
def test_a_quorum_is_more_than_half(nodes, needed):
    assert quorum(nodes) == needed


@given(nodes=counts)
def test_two_quorums_overlap(nodes):
    assert 2 * quorum(nodes) > nodes >= quorum(nodes)


@given(nodes=counts)
def test_no_smaller_number_would_do(nodes):
    """One node less than a quorum may be found twice: the lock asks for no more than it must."""
    assert 2 * (quorum(nodes) - 1) <= nodes


@given(started=instants, ttl=ttls, drift=drifts, slow=st.floats(0, 10), slower=st.floats(0, 10))
def test_a_slower_round_leaves_less(started, ttl, drift, slow, slower):
    until = valid_until(started, ttl, drift)
    left = [until - (started + took) for took in sorted((slow, slower))]
    assert left[0] >= left[1]


@given(started=instants, ttl=ttls, drift=drifts)
def test_a_lease_is_trusted_for_less_than_its_keys_stand(started, ttl, drift):
    assert valid_until(started, ttl, drift) < started + ttl


@given(ttl=ttls, drift=drifts, fast=st.floats(0, 1), slow=st.floats(0, 1))
def test_the_drift_factor_covers_what_it_says(ttl, drift, fast, slow):
    """Our clock slow and the node's fast, together by the drift factor: ours still ends first."""
    share = fast / (fast + slow) if fast + slow else 0.5
    ours, node = 1 - drift * (1 - share), 1 / (1 - drift * share)
    trusted = valid_until(0.0, ttl, drift) / ours
    assert trusted <= ttl / node + 1e-9


@given(started=instants, ttl=ttls, drift=drifts)
def test_renewal_is_due_while_the_lease_is_good(started, ttl, drift):
    assert started < renew_at(started, ttl) < valid_until(started, ttl, drift)


@given(ttl=ttls)
def test_a_useful_lease_outlives_a_third(ttl):
    """What is left of a fresh lease must bear one renewal interval."""
    assert least_validity(ttl) == pytest.approx(renew_at(0.0, ttl))


@given(max_ttl=ttls, drift=drifts)
def test_quarantine_outlives_every_forgotten_lease(max_ttl, drift):
    assert quarantine_for(max_ttl, drift) / (1 + drift) > valid_until(0.0, max_ttl, drift)


@given(wall=st.integers(0, 2**41 - 1), seen=st.integers(0, 2**53 - 2))
def test_a_fence_proposal_grows(wall, seen):
    proposal = fence_proposal(wall, seen)
    assert proposal > seen
    assert proposal >= wall << 12


@given(wall=st.integers(0, 2**41 - 1), later=st.integers(0, 10**6), seen=st.integers(0, 2**53 - 2))
def test_a_later_proposal_is_no_smaller(wall, later, seen):
    first = fence_proposal(wall, seen)
    assert fence_proposal(wall + later, seen) >= first
    assert fence_proposal(wall + later, first) > first


def test_fences_fit_a_double_until_2039():
    """Lua counts in doubles: a fence stays below 2**53 to the end of August 2039."""
    end = dt.datetime(2039, 9, 1, tzinfo=dt.timezone.utc)
    assert fence_proposal(int(end.timestamp() * 1000), 0) < 2**53


def test_a_lease_tells_what_remains(clock):
    lease = lease_of(clock, valid_until=clock() + 10.0)
    clock.advance(4.0)
    assert lease.remaining() == 6.0
    clock.advance(60.0)
    assert lease.remaining() == 0.0


def test_a_lease_cannot_be_changed(clock):
    with pytest.raises(dataclasses.FrozenInstanceError):
        lease_of(clock).valid_until = 2e9


def test_a_lease_hides_its_token(clock):
    lease = lease_of(clock, info={"pid": 7})
    assert lease.token not in repr(lease)


def test_leases_with_info_can_be_members_of_a_set(clock):
    """What the holder tells of itself is no part of what a lease is."""
    one, other = lease_of(clock, info={"pid": 7}), lease_of(clock, info={})
    assert {one, other} == {one}
    assert isinstance(one, Lease)
