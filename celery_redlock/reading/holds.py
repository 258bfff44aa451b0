"""Lengths of holds, counted in classes, so that the counts of many processes add up."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["HOLD_BOUNDS", "PER_DECADE", "Holds", "class_of"]

#: Into how many classes each power of ten is cut; the longest of a class are half as long again as
#: the shortest.
PER_DECADE = 6
#: Upper bounds of the classes in which hold times are counted [s], from a millisecond to some
#: hours; one more class is above the last.
HOLD_BOUNDS = tuple(10 ** (step / PER_DECADE) for step in range(-18, 25))


def class_of(held: float) -> int:
    return bisect_left(HOLD_BOUNDS, held)


@dataclass(frozen=True)
class Holds:
    counts: Sequence[int] = (0,) * (len(HOLD_BOUNDS) + 1)  # per class of `HOLD_BOUNDS`
    total: float = 0.0  # [s]
    longest: float = 0.0  # [s]
    ttl: float = 0.0  # of the lease, the newest known [s]; 0.0 for unknown

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """
        Return the length that this *share* of the holds did not exceed [s]; 0.0 without any.

        Never less than it was, and no more than half as long again; never more than the longest.
        """
        rank = max(1, math.ceil(share * self.count))
        for place, count in enumerate(self.counts):
            rank -= count
            if rank <= 0:
                return min((*HOLD_BOUNDS, math.inf)[place], self.longest)
        return 0.0
