"""How long locks were held: counted by the processes that held them, added up for operators."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_redlock.words import number

__all__ = ["HOLD_BOUNDS", "Holds", "holds_by_task"]

#: Upper bounds of the classes in which hold times are counted [s]; one more is above the last.
HOLD_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


@dataclass
class Holds:
    """
    How long one task's locks were held.

    Attributes:
        ttl: Of the lease, the newest known [s].
        counts: Per class of `HOLD_BOUNDS`.
        total: Of all [s].
        longest: Of any [s].
    """

    ttl: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(HOLD_BOUNDS) + 1))
    total: float = 0.0
    longest: float = 0.0

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def add(self, held: float, ttl: float) -> None:
        """Count one hold of *held* under a lease of *ttl* [s]."""
        self.ttl = ttl or self.ttl
        self.longest = max(self.longest, held)
        self.total += held
        self.counts[bisect_left(HOLD_BOUNDS, held)] += 1

    def as_record(self) -> dict[str, Any]:
        """Return plain JSON values: ``counts`` per class, ``total``, ``longest``, ``ttl`` [s]."""
        longest, total = round(self.longest, 4), round(self.total, 4)
        return {"counts": self.counts, "total": total, "longest": longest, "ttl": self.ttl}

    def add_record(self, record: Mapping[str, Any], counts: Sequence[int]) -> None:
        """Add what another process has counted: *record*, with its *counts*."""
        self.ttl = positive(record, "ttl") or self.ttl
        self.longest = max(self.longest, positive(record, "longest"))
        self.total += positive(record, "total")
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]


def holds_by_task(records: Iterable[Mapping[str, Any]]) -> dict[str, Holds]:
    """Return the sums of the ``Holds`` in *records*, oldest first; the busiest task first."""
    tasks: dict[str, Holds] = {}
    for record in records:
        counts, task = counts_in(record), record.get("task")
        if record.get("event") == "Holds" and counts is not None and isinstance(task, str):
            tasks.setdefault(task, Holds()).add_record(record, counts)
    return dict(sorted(tasks.items(), key=lambda it: (-it[1].count, it[0])))


def positive(record: Mapping[str, Any], key: str) -> float:
    """Return a number of *record*, 0.0 where there is none."""
    return max(0.0, number(record.get(key)))


def counts_in(record: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the counts in a record, None if they are not as we write them."""
    counts = record.get("counts")
    if not isinstance(counts, list) or len(counts) != len(HOLD_BOUNDS) + 1:
        return None
    return counts if all(type(it) is int and 0 <= it < 2**53 for it in counts) else None
