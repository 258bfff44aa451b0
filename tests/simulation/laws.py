"""
The laws, checked on the `Hold`s that a run leaves behind.

- `overlaps` (exclusion): nobody trusts a lock while another does, by the true time.
- `crowd` (places): no more trust one of its places at once than a lock has, by the same time.
- `disorder` (fences): unique, and growing from each holder to the next.
- `rush` (rates): in no window start more than may, by the same time.

And on the world when all faults are over: `World.progressed` (everybody gets the lock),
`World.leftovers` (no lock is left), `World.immortal` (no key without an end).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

__all__ = ["Hold", "Wait", "crowd", "disorder", "left_idle", "overlaps", "overtaken", "rush"]

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
        name: What was locked; another one for each place.
    """

    token: str
    fence: int
    asked: float
    granted: float
    until: float
    ended: float = float("inf")
    name: str = ""

    @property
    def end(self) -> float:
        """When the holder stopped trusting it."""
        return min(self.until, self.ended)


@dataclass(frozen=True)
class Wait:
    """
    Somebody who wanted a lock; times are true times [s].

    Attributes:
        name: Of the lock.
        came: When it asked first.
        until: When it got the lock, or gave up.
        is_granted: Whether it got it.
        stops: From when until when its process stood still, each time.
    """

    name: str
    came: float
    until: float
    is_granted: bool
    stops: tuple[tuple[float, float], ...] = ()

    @property
    def spells(self) -> list[tuple[float, float]]:
        """From when until when it waited and did not stand still."""
        spells, since = [], self.came
        for begins, ends in sorted(self.stops):
            if since < begins:
                spells.append((since, min(begins, self.until)))
            since = max(since, ends)
        return [(a, b) for a, b in [*spells, (since, self.until)] if a < b]


def overlaps(holds: Iterable[Hold]) -> list[tuple[Hold, Hold]]:
    """Return the pairs of holds that were trusted at the same time; there must be none."""
    return [pair for alike in by_name(holds) for pair in overlaps_of_one(alike)]


def by_name(holds: Iterable[Hold]) -> list[list[Hold]]:
    """Return the holds of each name, in the order of their grants."""
    names: dict[str, list[Hold]] = {}
    for hold in sorted(holds, key=lambda hold: hold.granted):
        names.setdefault(hold.name, []).append(hold)
    return list(names.values())


def overlaps_of_one(holds: Iterable[Hold]) -> list[tuple[Hold, Hold]]:
    """Return the same of one name, in the order of their grants."""
    found = []
    latest: Hold | None = None
    for hold in holds:
        if latest is not None and hold.granted < latest.end - GRAIN:
            found.append((latest, hold))
        if latest is None or hold.end > latest.end:
            latest = hold
    return found


def crowd(holds: Iterable[Hold], limit: int) -> list[Hold]:
    """Return the holds with which more than *limit* trusted a place of the same lock at once."""
    found, ends = [], dict[str, list[float]]()
    for hold in sorted(holds, key=lambda hold: hold.granted):
        others = ends.setdefault(lock_of(hold), [])
        while others and others[0] <= hold.granted + GRAIN:
            heappop(others)
        heappush(others, hold.end)
        if len(others) > limit:
            found.append(hold)
    return found


def lock_of(hold: Hold) -> str:
    """Return the name of the lock of which *hold* has a place."""
    return hold.name.partition("#")[0]


def rush(starts: Iterable[float], most: int, window: float) -> list[tuple[float, float]]:
    """Return the first and the last of each *most* + 1 starts that came in less than a window."""
    in_order = sorted(starts)
    pairs = zip(in_order, in_order[most:], strict=False)
    return [(first, last) for first, last in pairs if last - first < window - GRAIN]


def larger(one: Hold, other: Hold) -> Hold:
    """Return whichever has the larger fence."""
    return one if one.fence > other.fence else other


def disorder(holds: Iterable[Hold]) -> list[tuple[Hold, Hold]]:
    """
    Return pairs with one fence, or with a smaller one for who was granted the lock later.

    Of each hold one such pair is told, if there is any: a run of an hour has many holds.
    """
    return [pair for alike in by_name(holds) for pair in disorder_of_one(alike)]


def disorder_of_one(in_order: Sequence[Hold]) -> list[tuple[Hold, Hold]]:
    """Return the same of one name, in the order of their grants."""
    when = [hold.granted for hold in in_order]
    largest: list[Hold] = list(accumulate(in_order, larger))
    first: dict[int, Hold] = {}
    found = []
    for hold in in_order:
        before = bisect_left(when, hold.granted)
        if first.setdefault(hold.fence, hold) is not hold:
            found.append((first[hold.fence], hold))
        elif before and largest[before - 1].fence > hold.fence:
            found.append((largest[before - 1], hold))
    return found


def left_idle(holds: Iterable[Hold], waits: Iterable[Wait]) -> float:
    """
    Return for how long at most a lock of one place was free while somebody waited for it [s].

    Not while all who did stood still.
    """
    longest, held = 0.0, {alike[0].name: alike for alike in by_name(holds)}
    for one in waits:
        for since, until in one.spells:
            free_since = since
            for hold in held.get(one.name, []):
                if hold.granted >= until:
                    break
                if hold.end > free_since:
                    longest = max(longest, hold.granted - free_since)
                    free_since = hold.end
            longest = max(longest, until - free_since)
    return longest


def overtaken(waits: Iterable[Wait]) -> int:
    """Return how many got a lock before somebody who had come earlier, at most."""
    granted = sorted((wait for wait in waits if wait.is_granted), key=lambda wait: wait.until)
    return max(
        (
            sum(
                earlier.came > wait.came for earlier in granted[:place] if earlier.name == wait.name
            )
            for place, wait in enumerate(granted)
        ),
        default=0,
    )
