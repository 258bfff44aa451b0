"""
Hold times per task as bars: where they stand, for a template to draw as SVG.

Everything is in units of the drawing's own `viewBox`, so a page scales it as it likes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from celery_redlock.observers.journal import HOLD_BOUNDS
from celery_redlock.ops.web.finding import Holds
from celery_redlock.ops.web.words import Text, seconds, text_of

__all__ = ["HEIGHT", "WIDTH", "Bar", "Chart", "charts"]

#: How many tasks are drawn.
SHOWN = 12
WIDTH, HEIGHT = 390, 156
LEFT, TOP, BOTTOM = 6, 30, 22
STEP = (WIDTH - 2 * LEFT) / (len(HOLD_BOUNDS) + 1)
GAP = 4
#: Least height of a bar that counts anything.
LEAST = 2.0


@dataclass(frozen=True)
class Bar:
    """
    One class of hold times.

    Attributes:
        x: Left edge.
        y: Upper edge.
        width: Of the bar.
        height: Of the bar; 0 for an empty class.
        middle: Where its texts are centred.
        count: How many holds.
        number: The same in few characters.
        between: From how long to how long, in words.
        label: Upper bound in short, to stand below it; "" to leave it out.
    """

    x: float
    y: float
    width: float
    height: float
    middle: float
    count: int
    number: str
    between: str
    label: str


@dataclass(frozen=True)
class Chart:
    """
    Hold times of one task.

    Attributes:
        task: Its name.
        bars: One for each class.
        count: How many holds in all.
        mean: In words.
        longest: In words.
        ttl: Length of the lease, in words.
        ttl_x: Where the lease ends among the bars; None for nowhere.
        in_words: All of it, for those who do not see it.
    """

    task: Text
    bars: Sequence[Bar]
    count: int
    mean: str
    longest: str
    ttl: str
    ttl_x: float | None
    in_words: str


def charts(tasks: Sequence[Holds]) -> list[Chart]:
    """Return what to draw for the first of *tasks*."""
    return [chart(holds) for holds in tasks[:SHOWN] if holds.count]


def chart(holds: Holds) -> Chart:
    """Return what to draw for one task."""
    drawn = bars(holds.counts)
    counted = [f"{bar.between}: {bar.count}" for bar in drawn if bar.count]
    return Chart(
        task=text_of(holds.task),
        bars=drawn,
        count=holds.count,
        mean=seconds(holds.total / holds.count),
        longest=seconds(holds.longest),
        ttl=seconds(holds.ttl) if holds.ttl else "",
        ttl_x=where(holds.ttl) if holds.ttl else None,
        in_words="; ".join(counted),
    )


def bars(counts: Sequence[int]) -> list[Bar]:
    """Return a bar for each of *counts*, the highest as high as there is room."""
    most, room = max(counts) or 1, HEIGHT - TOP - BOTTOM
    drawn = []
    for index, count in enumerate(counts):
        height = max(LEAST, room * count / most) if count else 0.0
        drawn.append(
            Bar(
                x=round(LEFT + index * STEP + GAP / 2, 1),
                y=round(HEIGHT - BOTTOM - height, 1),
                width=round(STEP - GAP, 1),
                height=round(height, 1),
                middle=round(LEFT + (index + 0.5) * STEP, 1),
                count=count,
                number=rounded(count),
                between=between(index),
                label=short(HOLD_BOUNDS[index]) if index < len(HOLD_BOUNDS) else "",
            )
        )
    return drawn


def rounded(count: int) -> str:
    """Return *count* in so few characters that it fits over a bar."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.2g}{unit}" if count < 100 * size else f"{count // size}{unit}"
    return str(count)


def between(index: int) -> str:
    """Return which hold times the class at *index* counts."""
    if index == 0:
        return f"up to {short(HOLD_BOUNDS[0])}"
    if index == len(HOLD_BOUNDS):
        return f"over {short(HOLD_BOUNDS[-1])}"
    return f"{short(HOLD_BOUNDS[index - 1])} to {short(HOLD_BOUNDS[index])}"


def short(bound: float) -> str:
    """Return *bound* [s] in as few characters as can be."""
    if bound < 1:
        return f"{bound * 1000:g} ms"
    return f"{bound:g} s"


def where(length: float) -> float:
    """Return where a hold of *length* [s] stands among the bars, within its class by share."""
    index = bisect_left(HOLD_BOUNDS, length)
    if index == len(HOLD_BOUNDS):
        return round(LEFT + (index + 0.5) * STEP, 1)
    lower = HOLD_BOUNDS[index - 1] if index else 0.0
    share = (length - lower) / (HOLD_BOUNDS[index] - lower)
    return round(LEFT + (index + share) * STEP, 1)
