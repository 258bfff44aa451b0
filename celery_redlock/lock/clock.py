"""
The clock of leases, readings of a node's clock, and the jitter of pauses.

Leases are counted on a clock that goes on while the machine is suspended
(`CLOCK_BOOTTIME`); `time.monotonic` stops there on Linux, and a laptop that
wakes up would trust a lease that ended hours ago. Even that clock stands still with a
virtual machine that does; the nodes' clocks show it (`celery_redlock.lock.nodes.steps`).
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

__all__ = [
    "ClockReading",
    "Move",
    "check_not_replaced",
    "jitter",
    "make_up_for",
    "move_between",
    "now",
    "replaced",
    "wall",
]

#: Draws a number between two bounds. From the system, so that forked children differ, and that
#: a background thread does not disturb the sequence that a user has seeded.
jitter = random.SystemRandom().uniform

#: How much a node's clock may disagree with ours before it counts as a jump [s].
JUMP_TOLERANCE = 0.05
#: Resolution of a node's time [s].
RESOLUTION = 0.001


def _best_clock() -> Callable[[], float]:
    if hasattr(time, "CLOCK_BOOTTIME"):
        return partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":  # there time.monotonic() stops in suspend, and this one does not
        return partial(time.clock_gettime, time.CLOCK_MONOTONIC_RAW)
    return time.monotonic


#: What the time is read from: that of leases, and the time of day. One for the whole process.
_elapsed, _wall = _best_clock(), time.time
#: What our clock is known to have lost [s].
_lost = 0.0
#: Why nothing here goes by the real time; empty if it does.
_replaced = ""


def now() -> float:
    """Return the time of a clock that never goes back [s, arbitrary zero]."""
    return _elapsed() + _lost


def wall() -> float:
    """Return the time of day [s, Unix time]."""
    return _wall()


def make_up_for(seconds: float) -> None:
    """
    Set our clock forward by what it has lost [s, >= 0]; every lease of this process ends sooner.

    Leases are facts that their owners hold, so the clock is corrected, not the leases.
    """
    global _lost  # noqa: PLW0603  one clock for the whole process
    if not _replaced:
        _lost += seconds


@contextlib.contextmanager
def replaced(elapsed: Callable[[], float], wall: Callable[[], float], why: str) -> Iterator[None]:
    """Use another clock for the body of a ``with``, as tests do; it is not replaced twice."""
    global _elapsed, _wall, _lost, _replaced
    check_not_replaced()
    before = _elapsed, _wall, _lost
    _elapsed, _wall, _lost, _replaced = elapsed, wall, 0.0, why
    try:
        yield
    finally:
        (_elapsed, _wall, _lost), _replaced = before, ""


def check_not_replaced() -> None:
    if _replaced:
        raise RuntimeError(_replaced)


class ClockReading(NamedTuple):
    """
    A node's clock, as one reply shows it.

    The node looked at its clock somewhere between our send and our receive, so its offset, ``node
    clock - our clock``, lies between *earliest* and *latest* [s]. *sent* and *at* are by our clock.
    """

    earliest: float
    latest: float
    at: float
    sent: float

    @classmethod
    def of(cls, sent: float, received: float, node_now: float) -> ClockReading:
        """Read *node_now*, whole milliseconds that are cut off: it may be up to one later."""
        return cls(node_now - received, node_now + RESOLUTION - sent, received, sent)


class Move(NamedTuple):
    """
    How far a node's clock moved against ours between two readings: from *least* to *most* [s].

    Positive is forward, and lets keys expire early. *allowed* of it, either way, is no jump.
    """

    least: float
    most: float
    allowed: float

    @property
    def jump(self) -> float:
        """How far it certainly jumped [s]; a slow reply widens the allowance by itself."""
        if self.least > self.allowed:
            return self.least
        return self.most if self.most < -self.allowed else 0.0

    def is_like(self, other: Move) -> bool:
        allowed = self.allowed + other.allowed
        return self.least - allowed <= other.most and other.least - allowed <= self.most


def move_between(before: ClockReading, after: ClockReading, drift_factor: float) -> Move:
    return Move(
        after.earliest - before.latest,
        after.latest - before.earliest,
        JUMP_TOLERANCE + drift_factor * max(0.0, after.at - before.at),
    )


def sharper(before: ClockReading, after: ClockReading, drift_factor: float) -> ClockReading | None:
    """
    Return whichever reading pins the node's offset down better as of *after*; None if it jumped.

    As `Move.jump` says, but no `Move` is made, since this is asked of every vote.
    """
    drift = drift_factor * (after.at - before.at)
    allowed = JUMP_TOLERANCE + drift if drift > 0 else JUMP_TOLERANCE
    if after.earliest - before.latest > allowed or before.earliest - after.latest > allowed:
        return None
    width_before = before.latest - before.earliest + 2 * drift
    return before if width_before < after.latest - after.earliest else after
