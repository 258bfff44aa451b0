"""
For how long this machine has stood still, as told by a thread that does nothing but look.

    with Stalls() as stalls:
        took = measured()
    assert took - stalls.total < LIMIT

A test allows for stalls that were seen, and for no other time: where there was none, its bound is
as strict as without.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from support.events import now

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

__all__ = ["LEAST", "LONG", "Stalls"]

#: Pause between two looks [s].
PAUSE = 0.01
#: From when on a look was so late that it counts as a stall [s].
LEAST = 0.05
#: A stall that adds up: shorter ones are what every busy machine has, all the time [s].
LONG = 0.2


class Stalls:
    """
    The times for which this machine has kept a thread from going on.

    Attributes:
        found: From when until when each was, those shorter than `LEAST` aside [s, as `now`].
    """

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    @property
    def longest(self) -> float:
        """The longest one; 0 if there was none [s]."""
        return max((ended - began for began, ended in self.found), default=0.0)

    @property
    def total(self) -> float:
        """The sum of those that were `LONG` [s]."""
        return self.between(float("-inf"), float("inf"))

    def between(self, began: float, ended: float) -> float:
        """Return how much of this time those took that were `LONG` [s]."""
        total, at = 0.0, began  # what several processes saw counts once
        for a, b in sorted(self.found):
            if b - a >= LONG:
                total += max(0.0, min(b, ended) - max(a, at))
                at = max(at, b)
        return total

    def _watch(self) -> None:
        before, is_over = now(), False
        while not is_over:
            is_over = self._ends.wait(PAUSE)
            at = now()
            if at - before >= LEAST:
                self.found.append((before, at))
            before = at
