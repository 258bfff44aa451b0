"""Clocks that are wrong; nobody but the world knows the true time."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BEGIN", "Clock", "NodeClock"]

#: Wall-clock time at which worlds begin [s, Unix time].
BEGIN = 1_700_000_000.0
#: A quarter of the period in which a node's clock gains and loses time [s].
SWING = 0.5


@dataclass(frozen=True)
class Clock:
    """
    A clock that is wrong.

    Attributes:
        offset: What it shows at the beginning [s].
        rate: How fast it runs [1, 1.0 is right].
    """

    offset: float
    rate: float = 1.0

    def read(self, now: float) -> float:
        """Return what it shows at the true time *now* [s]."""
        return self.offset + self.rate * now

    def when(self, shown: float) -> float:
        """Return the true time at which it shows *shown* [s]."""
        return (shown - self.offset) / self.rate


@dataclass
class NodeClock:
    """
    A wall clock that is kept right on the whole: too fast for a while, then too slow.

    Attributes:
        offset: What it shows at the beginning, about [s].
        rate: How wrong its pace is at any moment [1].
        phase: Where in its swing it begins [s].
    """

    offset: float
    rate: float
    phase: float = 0.0

    def read(self, now: float) -> float:
        """Return what it shows at the true time *now* [s]."""
        swing = (now + self.phase) % (4 * SWING)
        return self.offset + now + self.rate * abs(swing - 2 * SWING)

    def step(self, seconds: float) -> None:
        """Set it forward, or back."""
        self.offset += seconds
