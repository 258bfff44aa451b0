"""Which locks, records and hold times belong to a search: decisions without any I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_redlock.observers.journal import HOLD_BOUNDS
from celery_redlock.ops.web.words import number
from celery_redlock.reading.all_locks import escape
from celery_redlock.reading.stored import LockView

__all__ = [
    "Found",
    "Holds",
    "find_locks",
    "holds_by_task",
    "name_pattern",
    "record_matches",
    "together",
]

#: How many locks a page shows, and for how long they are searched and counted [s].
SHOWN = 500
LONGEST = 1.0
#: What of a holder is searched.
HOLDER = ("task", "task_id", "execution", "host", "pid", "entry", "token")
#: What of a record is searched, beside its holder.
RECORD = (
    "event",
    "name",
    "task",
    "task_id",
    "holder_id",
    "host",
    "pid",
    "node",
    "entry",
    "cause",
    "reason",
)


@dataclass(frozen=True)
class Found:
    """
    Locks that a search has found.

    Attributes:
        locks: Those to be shown, by name.
        more: How many others were met.
        looked: How many were looked at in all.
        complete: Whether all were looked at; False if time was up before.
        names_complete: Whether at least the names of all were.
        silent: Labels of the nodes that did not answer.
    """

    locks: list[LockView]
    more: int = 0
    looked: int = 0
    complete: bool = True
    names_complete: bool = True
    silent: list[str] = field(default_factory=list)


@dataclass
class Holds:
    """
    How long one task's locks were held.

    Attributes:
        task: Its name.
        counts: Per class of `HOLD_BOUNDS`.
        total: Of all [s].
        longest: Of any [s].
        ttl: Of the lease, as of the newest record [s].
    """

    task: str
    counts: list[int] = field(default_factory=lambda: [0] * (len(HOLD_BOUNDS) + 1))
    total: float = 0.0
    longest: float = 0.0
    ttl: float = 0.0

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)


def find_locks(
    views: Iterable[LockView], search: str, now: Callable[[], float] = time.monotonic
) -> Found:
    """Return which of *views* match *search*; ends early when there are many."""
    ends = None  # until the first is there: a node that hangs takes its time before that
    found: list[LockView] = []
    more = looked = 0
    complete = True
    for view in views:
        looked += 1
        ends = now() + LONGEST if ends is None else ends
        if lock_matches(view, search):
            if len(found) < SHOWN:
                found.append(view)
            else:
                more += 1
        if now() > ends:
            complete = False
            break
    return Found(in_order(found), more, looked, complete)


def together(by_name: Found, by_all: Found) -> Found:
    """Return what two searches for the same have found, each lock once."""
    known = {(view.name, view.holder.get("token")) for view in by_name.locks}
    others = [view for view in by_all.locks if (view.name, view.holder.get("token")) not in known]
    locks = [*by_name.locks, *others]
    return Found(
        locks=in_order(locks[:SHOWN]),
        more=max(by_name.more, by_all.more, len(locks) - SHOWN),
        looked=by_all.looked,
        complete=by_all.complete,
        names_complete=by_name.complete,
        silent=list(dict.fromkeys([*by_name.silent, *by_all.silent])),
    )


def name_pattern(search: str) -> bytes:
    """
    Return a pattern of SCAN for names with the longest word of *search* in them.

    Nodes pass over names without it by themselves, a hundred times faster than we could. Other
    letters than those of ASCII stand for anything: nodes know no cases of them.
    """
    longest = max(search.split(), key=len, default="")
    return b"*" + b"".join(map(either_case, longest)) + b"*"


def either_case(char: str) -> bytes:
    """Return a pattern for *char* as a capital letter and as a small one."""
    if not char.isascii():
        return b"*"
    if char.isalpha():
        return f"[{char.lower()}{char.upper()}]".encode()
    return escape(char.encode())


def in_order(locks: Iterable[LockView]) -> list[LockView]:
    """Return *locks* by name; those that never expire come first, as somebody has to act."""
    return sorted(locks, key=lambda view: (view.ttl is not None, view.name))


def lock_matches(view: LockView, search: str) -> bool:
    """Return whether every word of *search* is somewhere in *view*."""
    leaked = "leaked" if view.ttl is None else ""
    return matches(search, [view.name, leaked, *(view.holder.get(key) for key in HOLDER)])


def record_matches(record: Mapping[str, Any], search: str) -> bool:
    """Return whether every word of *search* is somewhere in *record*."""
    holder = record.get("holder")
    of_holder = [holder.get(key) for key in HOLDER] if isinstance(holder, dict) else []
    return matches(search, [*(record.get(key) for key in RECORD), *of_holder])


def matches(search: str, values: Iterable[Any]) -> bool:
    """Return whether each word of *search* is in any of *values*, whatever the case."""
    words = search.casefold().split()
    if not words:
        return True
    text = "\n".join(str(it) for it in values if isinstance(it, (str, int, float))).casefold()
    return all(word in text for word in words)


def holds_by_task(records: Iterable[Mapping[str, Any]]) -> list[Holds]:
    """Return what the ``Holds`` in *records*, oldest first, add up to; the busiest task first."""
    tasks: dict[str, Holds] = {}
    for record in records:
        counts, task = counts_in(record), record.get("task")
        if counts is None or not isinstance(task, str):
            continue
        holds = tasks.setdefault(task, Holds(task))
        holds.counts = [a + b for a, b in zip(holds.counts, counts, strict=True)]
        holds.total += number(record.get("total")) or 0.0
        holds.longest = max(holds.longest, number(record.get("longest")) or 0.0)
        holds.ttl = number(record.get("ttl")) or holds.ttl
    return sorted(tasks.values(), key=lambda holds: (-holds.count, holds.task))


def counts_in(record: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the counts in a record, None if they are not as we write them."""
    counts = record.get("counts")
    if not isinstance(counts, list) or len(counts) != len(HOLD_BOUNDS) + 1:
        return None
    if not all(isinstance(it, int) and number(it) is not None for it in counts):
        return None
    return counts
