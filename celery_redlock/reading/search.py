"""
Search among locks and in the journal, for commands and the page.

Words may be anywhere: in the lock's name, the task's name or id, the host, the process. Patterns
are for one field, as a command's options are.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from celery_redlock.lock.records import is_text, shorten
from celery_redlock.reading.all_locks import escape
from celery_redlock.reading.stored import LockView
from celery_redlock.words import number

__all__ = ["Found", "Search", "find_locks", "name_pattern", "need", "scan_pattern", "together"]

#: How many locks a page shows, and for how long they are searched and counted [s].
SHOWN = 100
LONGEST = 1.0
#: What of a holder is searched.
HOLDER = ("task", "task_id", "execution", "host", "pid", "entry", "token")
#: What of a record is searched, beside its holder.
RECORD = (
    *("event", "name", "task", "task_id", "holder_id", "host"),
    *("pid", "node", "entry", "cause", "reason"),
)


@dataclass(frozen=True)
class Search:
    """What is looked for; all of it has to fit."""

    words: str = ""  # each has to be somewhere, whatever the case
    events: tuple[str, ...] = ()  # one of these; empty for any
    since: float = 0.0  # no older records than this [s, Unix time]
    task: str | None = None  # pattern of the task's name, with * and ?; None for any
    lock: str | None = None  # pattern of the lock's name, likewise

    def has_lock(self, view: LockView) -> bool:
        leaked = "leaked" if view.ttl is None else ""
        holder = (view.holder.get(key) for key in HOLDER)
        return (
            is_like(view.holder.get("task"), self.task)
            and is_like(view.name, self.lock)
            and self.has_words(view.name, leaked, *holder)
        )

    def has_words(self, *values: Any) -> bool:
        wanted = self.words.split()
        if not wanted:
            return True
        text = "\n".join(str(it) for it in values if isinstance(it, (str, int, float))).casefold()
        # A name that is too long for a key stands there shortened.
        return all(it.casefold() in text or shorten(it).casefold() in text for it in wanted)

    def has_record(self, record: Mapping[str, Any]) -> bool:
        holder = record.get("holder")
        of_holder = [holder.get(key) for key in HOLDER] if isinstance(holder, dict) else []
        return (
            (not self.events or record.get("event") in self.events)
            and (not self.since or number(record.get("at")) >= self.since)
            and is_like(record.get("task"), self.task)
            and is_like(record.get("name"), self.lock)
            and self.has_words(*(record.get(key) for key in RECORD), *of_holder)
        )


def is_like(value: object, pattern: str | None) -> bool:
    return pattern is None or (isinstance(value, str) and fnmatchcase(value, pattern))


# --- patterns for nodes --------------------------------------------------------------------


def scan_pattern(typed: str) -> bytes:
    """Return a pattern of SCAN: *typed* itself if it is one, else names that contain it."""
    text = typed.encode(errors="surrogateescape")
    if any(sign in text for sign in b"*?["):
        return text
    # A name that is too long for a key stands there shortened.
    return b"*" + escape(shorten(typed).encode() if is_text(typed) else text) + b"*"


def name_pattern(words: str) -> bytes:
    """
    Return a pattern of SCAN for names with the longest of *words* in them, in either case.

    Nodes pass over names without it by themselves, a hundred times faster than we could. Other
    letters than those of ASCII stand for anything: nodes know no cases of them.
    """
    longest = shorten(max(words.split(), key=len, default=""))
    return b"*" + b"".join(map(either_case, longest)) + b"*"


def either_case(char: str) -> bytes:
    if not char.isascii():
        return b"*"
    if char.isalpha():
        return f"[{char.lower()}{char.upper()}]".encode()
    return escape(char.encode())


# --- some of many locks --------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    locks: list[LockView]  # those to be shown, by name
    more: int = 0  # how many others were met
    looked: int = 0  # how many were looked at in all
    complete: bool = True  # False if time was up before all were looked at
    names_complete: bool = True  # whether at least the names of all were
    silent: list[str] = field(default_factory=list)  # labels of the nodes that did not answer


def find_locks(
    views: Iterable[LockView], search: Search, now: Callable[[], float] = time.monotonic
) -> Found:
    ends = None  # until the first is there: a node that hangs takes its time before that
    neediest: list[tuple[Need, int, LockView]] = []  # a heap; the number tells equal ones apart
    matching = looked = 0
    complete = True
    for view in views:
        looked += 1
        ends = now() + LONGEST if ends is None else ends
        if search.has_lock(view):
            matching += 1
            keep = heapq.heappush if len(neediest) < SHOWN else heapq.heappushpop
            keep(neediest, (need(view), -looked, view))
        if now() > ends:
            complete = False
            break
    shown = in_order(view for *_, view in neediest)
    return Found(shown, matching - len(shown), looked, complete)


#: Whether it never expires, whether somebody waits for it, and for how long it has been held.
Need = tuple[bool, bool, float]


def need(view: LockView) -> Need:
    """Return how much somebody has to look at *view*; more is more."""
    return view.ttl is None, view.waiting > 0, view.age or 0.0


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


def in_order(locks: Iterable[LockView]) -> list[LockView]:
    """Return *locks* by name; those that never expire come first, as somebody has to act."""
    return sorted(locks, key=lambda view: (view.ttl is not None, view.name))
