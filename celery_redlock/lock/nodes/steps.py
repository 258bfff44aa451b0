"""
Detection of clock steps: a node's, or our own.

Redis expires keys by its wall clock, so a node whose clock is set forward loses leases. A
client sees only how that clock goes against its own, which may be the one to blame: a virtual
machine that stood still finds all nodes ahead. A node whose clock moved is in doubt and does
not vote for us, until later readings of the others decide:

    most nodes moved alike             it was our clock: it is corrected, so that our leases
                                       end sooner; nothing is written to any node
    fewer did, others went on          it was theirs: they are quarantined, for everybody
    neither, or both                   they do not vote for *us* until every lease of before
                                       has ended; nobody else is affected

Pure decisions; `celery_redlock.lock.nodes.fanout` asks, writes and notifies.

Source:
    PROTOCOL 3.5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from celery_redlock.lock.clock import ClockReading, Move, move_between, sharper
from celery_redlock.lock.lease import quorum

__all__ = ["Doubt", "Finding", "NodeClock", "whose"]

#: How far apart are readings that later ones are compared with [s], and how many they are.
APART = 1.0
READINGS = 16


class Doubt(NamedTuple):
    """That a node's clock has moved against ours."""

    move: Move
    before: float  # when it last went as ours did [s, our clock]
    at: float  # when it was seen to have moved [s, our clock]
    is_reported: bool = False  # whether observers know


class NodeClock:
    """The readings of a node's clock, and the doubt about it: None while it goes as ours does."""

    __slots__ = ("_best", "_drift_factor", "_past", "doubt", "latest")

    def __init__(self, drift_factor: float) -> None:
        self._drift_factor = drift_factor
        self._past: deque[ClockReading] = deque(maxlen=READINGS)
        self.forget()

    def forget(self) -> None:
        self._past.clear()
        self._best: ClockReading | None = None
        self.latest: ClockReading | None = None
        self.doubt: Doubt | None = None

    def take(self, reading: ClockReading) -> bool:
        """Record *reading*; return whether the clock still goes as ours does."""
        before, self.latest = self.latest, reading
        if self.doubt is not None:
            return False
        best = reading
        if before is not None and self._best is not None:
            sharpest = sharper(self._best, reading, self._drift_factor)
            if sharpest is None:
                move = move_between(self._best, reading, self._drift_factor)
                self.doubt = Doubt(move, before.at, reading.at)
                return False
            best = sharpest
        self._best = best
        if not self._past or best.at - self._past[-1].at >= APART:
            self._past.append(best)
        return True

    def went_on(self, doubt: Doubt) -> bool:
        """
        Return whether this clock has not moved as the one in *doubt*, which rules ours out.

        What was asked for before that clock was read may have waited while ours stood still,
        so it has to be read since; and compared with what it showed before.
        """
        if self.doubt is not None or self.latest is None or self.latest.sent < doubt.at:
            return False
        before = [r for r in (*self._past, self._best) if r and r.sent <= doubt.before]
        if not before:
            return False
        last = max(before, key=lambda reading: reading.at)
        return not move_between(last, self.latest, self._drift_factor).is_like(doubt.move)


class Finding(NamedTuple):
    """Whose clocks have moved."""

    ours: float | None  # how far ours fell behind [s]; None if it was theirs that moved
    positions: tuple[int, ...]  # of the nodes that moved, or seem to


def whose(clocks: Sequence[NodeClock]) -> Finding:
    """Return whose clocks have moved; no position while that is undecided."""
    doubts = {i: one.doubt for i, one in enumerate(clocks) if one.doubt is not None}
    theirs = []
    for position, doubt in doubts.items():
        alike = [i for i, other in doubts.items() if other.move.is_like(doubt.move)]
        others_went_on = any(one.went_on(doubt) for one in clocks)
        is_most = len(alike) >= quorum(len(clocks))
        if is_most and len(alike) > 1 and not others_went_on:
            return Finding(_fell_behind([doubts[i].move for i in alike]), tuple(alike))
        if others_went_on and not is_most:
            theirs.append(position)
    return Finding(None, tuple(theirs))


def _fell_behind(moves: Sequence[Move]) -> float:
    """Return by how much our clock must have moved to make the nodes seem to, at most."""
    return min(move.most for move in moves) if moves[0].jump > 0 else moves[0].jump
