"""
Counts as bars: where they stand, for a template to draw as SVG.

Everything is in units of the drawing's own `viewBox`, so a page scales it as it likes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from celery_redlock.ops.web.format import seconds
from celery_redlock.reading.holds import HOLD_BOUNDS, Holds
from celery_redlock.words import duration

__all__ = ["BASE", "HEIGHT", "PARTS", "WIDTH", "Bar", "Chart", "hold_chart", "time_chart"]

WIDTH, HEIGHT = 390, 156
LEFT, TOP, BOTTOM = 6, 30, 22
#: Where the bars stand.
BASE = HEIGHT - BOTTOM
#: Share of a step that a bar leaves free [1].
GAP = 0.14
#: Least height of a bar that counts anything.
LEAST = 2.0
#: Into how many parts time is cut.
PARTS = 24


@dataclass(frozen=True)
class Bar:
    """
    One class of what is counted.

    Attributes:
        x: Left edge.
        y: Upper edge.
        width: Of the bar.
        height: Of the bar; 0 for an empty class.
        middle: Where its number is centred.
        end: Where the next one begins.
        number: How many, in few characters; "" for none.
        label: To stand below its end; "" for nothing.
    """

    x: float
    y: float
    width: float
    height: float
    middle: float
    end: float
    number: str
    label: str


@dataclass(frozen=True)
class Chart:
    """
    Bars.

    Attributes:
        bars: One for each class.
        in_words: All of it, for those who do not see it.
        line_x: Where a line is drawn across the bars; None for nowhere.
        line: What the line is.
    """

    bars: Sequence[Bar]
    in_words: str
    line_x: float | None = None
    line: str = ""


def hold_chart(holds: Holds) -> Chart:
    """Return what to draw for the hold times of one task."""
    bounds = [short(bound) for bound in HOLD_BOUNDS]
    classes = [f"up to {bounds[0]}", *(f"{a} to {b}" for a, b in pairwise(bounds))]
    classes.append(f"over {bounds[-1]}")
    labels = [bound if i % 2 == 0 else "" for i, bound in enumerate(bounds)]
    drawn = bars(holds.counts, [*labels, ""])
    line_x = where(holds.ttl) if holds.ttl else None
    return Chart(drawn, in_words(holds.counts, classes), line_x, f"lease {seconds(holds.ttl)}")


def time_chart(counts: Sequence[int], length: float) -> Chart:
    """Return what to draw for *counts* over the last *length* [s]."""
    step = length / len(counts)
    ago = [duration((len(counts) - i) * step) for i in range(len(counts) + 1)]
    classes = [f"{ago[i]} ago" for i in range(len(counts))]
    every = len(counts) // 4
    labels = [ago[i + 1] + " ago" if (i + 1) % every == 0 else "" for i in range(len(counts))]
    return Chart(bars(counts, [*labels[:-1], "now"]), in_words(counts, classes))


def in_words(counts: Sequence[int], classes: Sequence[str]) -> str:
    """Return which of *classes* count how many."""
    told = zip(classes, counts, strict=True)
    return "; ".join(f"{name}: {count}" for name, count in told if count) or "nothing"


def bars(counts: Sequence[int], labels: Sequence[str]) -> list[Bar]:
    """Return a bar for each of *counts*, the highest as high as there is room."""
    most, room = max(counts) or 1, BASE - TOP
    step = (WIDTH - 2 * LEFT) / len(counts)
    drawn = []
    for index, (count, label) in enumerate(zip(counts, labels, strict=True)):
        height = max(LEAST, room * count / most) if count else 0.0
        begin = LEFT + index * step
        drawn.append(
            Bar(
                x=round(begin + step * GAP / 2, 1),
                y=round(BASE - height, 1),
                width=round(step * (1 - GAP), 1),
                height=round(height, 1),
                middle=round(begin + step / 2, 1),
                end=round(begin + step, 1),
                number=rounded(count) if count else "",
                label=label,
            )
        )
    return drawn


def rounded(count: int) -> str:
    """Return *count* in so few characters that it fits over a bar."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.2g}{unit}" if count < 100 * size else f"{count // size}{unit}"
    return str(count)


def short(bound: float) -> str:
    """Return *bound* [s] in as few characters as can be."""
    if bound < 1:
        return f"{bound * 1000:g} ms"
    return f"{bound:g} s"


def where(length: float) -> float:
    """Return where a hold of *length* [s] stands among the bars, within its class by share."""
    step = (WIDTH - 2 * LEFT) / (len(HOLD_BOUNDS) + 1)
    index = bisect_left(HOLD_BOUNDS, length)
    if index == len(HOLD_BOUNDS):
        return round(LEFT + (index + 0.5) * step, 1)
    lower = HOLD_BOUNDS[index - 1] if index else 0.0
    share = (length - lower) / (HOLD_BOUNDS[index] - lower)
    return round(LEFT + (index + share) * step, 1)
