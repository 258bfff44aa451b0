"""
The laws, checked on the `Hold`s that a run leaves behind.

- `overlaps` (exclusion): nobody trusts a lock while another does, by the true time.
- `disorder` (fences): unique, and growing for whoever asks after a grant.

And on the world when all faults are over: `World.progressed` (everybody gets the lock),
`World.leftovers` (no lock is left), `World.immortal` (no key without an end).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Hold", "disorder", "overlaps"]

#: Rounding of floating-point times [s].
GRAIN = 1e-9


@dataclass
class Hold:
    """
    One grant, as its holder saw it; times are true times [s].

    Attributes:
        token: Whose.
        fence: Its fencing number.
        asked: When its acquire was sent.
        granted: When it was granted.
        until: When its lease ended, by the holder's own clock.
        ended: When the holder gave it back, learnt that it is lost, or was killed, or when an
            operator took it away.
    """

    token: str
    fence: int
    asked: float
    granted: float
    until: float
    ended: float = float("inf")

    @property
    def end(self) -> float:
        """When the holder stopped trusting it."""
        return min(self.until, self.ended)


def overlaps(holds: Iterable[Hold]) -> list[tuple[Hold, Hold]]:
    """Return the pairs of holds that were trusted at the same time; there must be none."""
    found = []
    latest: Hold | None = None
    for hold in sorted(holds, key=lambda hold: hold.granted):
        if latest is not None and hold.granted < latest.end - GRAIN:
            found.append((latest, hold))
        if latest is None or hold.end > latest.end:
            latest = hold
    return found


def larger(one: Hold, other: Hold) -> Hold:
    """Return whichever has the larger fence."""
    return one if one.fence > other.fence else other


def disorder(holds: Iterable[Hold]) -> list[tuple[Hold, Hold]]:
    """
    Return pairs with one fence, or with a smaller one for who asked after the grant.

    Of each hold one such pair is told, if there is any: a run of an hour has many holds.
    """
    in_order = sorted(holds, key=lambda hold: hold.granted)
    when = [hold.granted for hold in in_order]
    largest: list[Hold] = list(accumulate(in_order, larger))
    first: dict[int, Hold] = {}
    found = []
    for hold in in_order:
        before = bisect_left(when, hold.asked)
        if first.setdefault(hold.fence, hold) is not hold:
            found.append((first[hold.fence], hold))
        elif before and largest[before - 1].fence > hold.fence:
            found.append((largest[before - 1], hold))
    return found
