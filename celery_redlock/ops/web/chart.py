"""Counts as bars, for a template to draw as SVG."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from celery_redlock.ops.web.format import seconds
from celery_redlock.reading.holds import HOLD_BOUNDS, PER_DECADE, Holds
from celery_redlock.words import duration

__all__ = ["PARTS", "Bar", "Chart", "hold_chart", "time_chart"]

#: Into how many parts time is cut.
PARTS = 24
#: Two bars for each power of ten, from 10 ms to 3000 s: so many classes each.
STEP, FIRST = PER_DECADE // 2, PER_DECADE
BOUNDS = HOLD_BOUNDS[FIRST : -PER_DECADE // 2 : STEP]


@dataclass(frozen=True)
class Bar:
    """One class of what is counted; *label* stands below its end."""

    name: str
    label: str
    count: int


@dataclass(frozen=True)
class Chart:
    bars: Sequence[Bar]
    line_at: float | None = None  # where a line crosses them, in bars from the left
    line: str = ""  # what the line is

    @property
    def most(self) -> int:
        return max(bar.count for bar in self.bars)

    def __str__(self) -> str:
        return "; ".join(f"{it.name}: {it.count}" for it in self.bars if it.count) or "nothing"


def hold_chart(holds: Holds) -> Chart:
    bounds = [f"{rounded(it)} s" if it >= 1 else f"{rounded(it * 1000)} ms" for it in BOUNDS]
    between = (f"{lower} to {upper}" for lower, upper in pairwise(bounds))
    names = [f"up to {bounds[0]}", *between, f"over {bounds[-1]}"]
    labels = [bound if i % 2 == 0 else "" for i, bound in enumerate(bounds)]
    # The classes up to the first bound, then those up to each further one, and the last.
    edges = [0, *range(FIRST + 1, len(HOLD_BOUNDS), STEP), len(holds.counts)]
    counts = [sum(holds.counts[begin:end]) for begin, end in pairwise(edges)]
    drawn = list(map(Bar, names, [*labels, ""], counts))
    return Chart(drawn, place_of(holds.ttl) if holds.ttl else None, f"lease {seconds(holds.ttl)}")


def rounded(value: float) -> str:
    return f"{float(f'{value:.2g}'):g}"


def time_chart(counts: Sequence[int], length: float) -> Chart:
    parts = len(counts)
    ago = [f"{duration((parts - i) * length / parts)} ago" for i in range(parts)]
    ends = [*ago[1:], "now"]
    labels = [end if (i + 1) % (parts // 4) == 0 else "" for i, end in enumerate(ends)]
    return Chart(list(map(Bar, ago, labels, counts)))


def place_of(length: float) -> float:
    """Return where a hold of *length* [s] is, in bars from the left."""
    index = bisect_left(BOUNDS, length)
    if index == len(BOUNDS):
        return index + 0.5
    lower = BOUNDS[index - 1] if index else 0.0
    return index + (length - lower) / (BOUNDS[index] - lower)
