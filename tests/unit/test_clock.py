"""How a node's clock is watched: drift is forgiven, a step is seen, a slow reply proves nothing."""

from __future__ import annotations

import runpy
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.lock import clock
from celery_redlock.lock.clock import JUMP_TOLERANCE, ClockReading, move_between, sharper

DRIFT = 0.05
seconds = st.floats(0, 1)


def reading(sent, up, down, offset):
    """Return the reading of a node whose clock is *offset* ahead, *up* and *down* seconds away."""
    return ClockReading.of(sent, sent + up + down, sent + up + offset)


def test_our_clock_never_goes_back():
    looks = [clock.now() for _ in range(1000)]
    assert looks == sorted(looks)


def test_on_macos_suspended_time_counts(monkeypatch):
    """`time.monotonic` stops there while the machine sleeps; the raw clock goes on."""
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    monkeypatch.setattr(time, "CLOCK_MONOTONIC_RAW", 4, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    told = {4: 42.0}
    monkeypatch.setattr(time, "clock_gettime", told.__getitem__)
    there = runpy.run_path(clock.__file__)
    assert there["now"]() == 42.0


def test_a_reading_says_where_the_offset_can_lie():
    """The node looked between send and receive, up to a millisecond later than it says."""
    found = ClockReading.of(sent=10.0, received=12.0, node_now=111.5)
    assert found == pytest.approx((99.5, 101.501, 12.0, 10.0))


@given(up=seconds, down=seconds, offset=st.floats(-1e6, 1e6))
def test_the_true_offset_lies_within_a_reading(up, down, offset):
    seen = reading(0.0, up, down, offset)
    assert seen.earliest - 1e-6 <= offset <= seen.latest + 1e-6


@given(
    ways=st.tuples(seconds, seconds, seconds, seconds),
    between=st.floats(0, 1e5),
    rate=st.floats(-DRIFT, DRIFT),
)
def test_drift_is_no_jump(ways, between, rate):
    up, down, later_up, later_down = ways
    sent = up + down + between
    before = reading(0.0, up, down, offset=rate * up)
    after = reading(sent, later_up, later_down, offset=rate * (sent + later_up))
    assert move_between(before, after, DRIFT).jump == 0.0


@given(
    ways=st.tuples(seconds, seconds, seconds, seconds),
    between=st.floats(0, 100),
    jump=st.floats(0.001, 1e5),
    sign=st.sampled_from([-1, 1]),
)
def test_a_jump_beyond_all_doubt_is_seen(ways, between, jump, sign):
    """A step larger than drift, tolerance and both round trips together is told, with its sign."""
    up, down, later_up, later_down = ways
    doubt = JUMP_TOLERANCE + DRIFT * (between + 2.0) + sum(ways)
    before = reading(0.0, up, down, 0.0)
    after = reading(up + down + between, later_up, later_down, sign * (doubt + jump))
    seen = move_between(before, after, DRIFT).jump
    assert seen * sign > 0
    assert abs(seen) <= doubt + jump + 1e-6


@pytest.mark.parametrize("offset", [0.04, -0.04])
def test_a_small_step_is_tolerated(offset):
    before, after = reading(0.0, 0.0, 0.0, 0.0), reading(0.0, 0.0, 0.0, offset)
    assert move_between(before, after, DRIFT).jump == 0.0


def test_the_sharper_reading_is_kept():
    quick, slow = reading(0.0, 0.001, 0.001, 0.0), reading(1.0, 0.5, 0.5, 0.0)
    assert sharper(quick, slow, DRIFT) is quick
    assert sharper(slow, quick, DRIFT) is quick


def test_an_old_reading_grows_blunt():
    old, slow = reading(0.0, 0.0, 0.0, 0.0), reading(3600.0, 0.5, 0.5, 0.0)
    assert sharper(old, slow, DRIFT) is slow
