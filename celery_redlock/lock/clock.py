"""
Clocks: ours, and how a node's clock moves against it; and the jitter that pauses need.

Leases are counted on a clock that goes on while the machine is suspended
(`CLOCK_BOOTTIME`); `time.monotonic` stops there on Linux, and a laptop that
wakes up would trust a lease that ended hours ago.
"""

from __future__ import annotations

import random
import time
from typing import NamedTuple

__all__ = ["ClockReading", "jitter", "jump_between", "now", "wall"]

#: Draws a number between two bounds. From the system, so that forked children differ, and that
#: a background thread does not disturb the sequence that a user has seeded.
jitter = random.SystemRandom().uniform

#: Returns the wall clock [s, Unix time]. As `now`, to be called by its module's name:
#: `celery_redlock.testing` puts a clock that is ticked in the place of both.
wall = time.time

#: How much a node's clock may disagree with ours before it counts as a jump [s].
JUMP_TOLERANCE = 0.05
#: To what a node tells its time [s].
RESOLUTION = 0.001


if hasattr(time, "CLOCK_BOOTTIME"):

    def now() -> float:
        """Return the time on a clock that never stops nor steps [s, arbitrary zero]."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:  # macOS counts suspended time in its monotonic clock already

    def now() -> float:
        """Return the time on a clock that never stops nor steps [s, arbitrary zero]."""
        return time.monotonic()


class ClockReading(NamedTuple):
    """
    What one reply tells of a node's clock.

    The node looked at its clock somewhere between our send and our receive, so
    its offset from ours lies in an interval, not at a point.

    Attributes:
        earliest: Smallest possible ``node clock - our clock`` [s].
        latest: Largest possible one [s].
        at: When the reply was received [s, our clock].
    """

    earliest: float
    latest: float
    at: float

    @classmethod
    def of(cls, sent: float, received: float, node_now: float) -> ClockReading:
        """
        Return the reading of a node that said *node_now* between *sent* and *received* [s].

        Nodes tell whole milliseconds, cut off: theirs may be up to one later.
        """
        return cls(node_now - received, node_now + RESOLUTION - sent, received)


def jump_between(before: ClockReading, after: ClockReading, drift_factor: float) -> float:
    """
    Return how far the node's clock jumped between two readings [s, 0.0 for not at all].

    Positive is forward: keys expired early. Readings are intervals, so a slow
    reply widens the allowance by itself and never raises a false alarm.

    Source:
        PROTOCOL 3.5, "Node clock jumps".
    """
    allowed = JUMP_TOLERANCE + drift_factor * (after.at - before.at)
    if after.earliest > before.latest + allowed:
        return after.earliest - before.latest
    if after.latest < before.earliest - allowed:
        return after.latest - before.earliest
    return 0.0


def sharper(before: ClockReading, after: ClockReading, drift_factor: float) -> ClockReading:
    """Return whichever reading pins the node's offset down better as of *after*."""
    age = drift_factor * (after.at - before.at)
    width_before = before.latest - before.earliest + 2 * age
    return before if width_before < after.latest - after.earliest else after
