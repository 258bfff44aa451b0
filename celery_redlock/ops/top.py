"""What ``redlock top`` shows: nodes, the busiest names, and what was refused in the last minute."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery_redlock.lock.records import is_text, shorten
from celery_redlock.ops.listing import left, since_in_words
from celery_redlock.ops.text import one_line
from celery_redlock.reading.all_locks import AllLocks
from celery_redlock.reading.journal import KEPT, JournalReader
from celery_redlock.reading.journal_view import is_refusal
from celery_redlock.reading.nodes import node_statuses
from celery_redlock.reading.quorum import Quorum
from celery_redlock.reading.stored import LockView, age_of
from celery_redlock.settings import Settings
from celery_redlock.words import duration, number

__all__ = ["HEAD", "LATELY", "ORDERS", "REFUSALS", "Name", "Reader", "Snapshot"]

#: What is counted as late [s].
LATELY = 60.0
#: For how long locks are read at a time [s]; where there are more, some are left out.
LONGEST_READ = 1.0
#: So many refusals are shown.
REFUSALS = 5
HEAD = ("LOCK", "REFUSED", "WAITING", "OLDEST", "AGE", "TTL LEFT", "TASK", "TASK ID", "PROCESS")


@dataclass(frozen=True)
class Name:
    """
    A lock name that somebody holds, or was refused lately.

    Attributes:
        name: Lock name (shortened if it is long).
        refused: How often somebody was refused it in the last minute.
        lock: Who holds it; None for nobody.
    """

    name: str
    refused: int
    lock: LockView | None = None

    @property
    def age(self) -> float:
        """For how long it has been held [s]."""
        return (age_of(self.lock.holder) or 0.0) if self.lock else 0.0

    @property
    def waiting(self) -> int:
        """How many wait for it."""
        return self.lock.waiting if self.lock else 0

    @property
    def cells(self) -> tuple[str, ...]:
        """It as a row under `HEAD`."""
        oldest = since_in_words(self.lock.waiting_since) if self.lock else ""
        counts = (str(self.refused or ""), str(self.waiting or ""), oldest)
        if self.lock is None:
            return (one_line(self.name), *counts, "free", "", "", "", "")
        holder = self.lock.holder
        who = ("not ours", "", "")
        if not self.lock.is_foreign:
            process = f"{holder.get('pid', '?')} on {holder.get('host', '?')}"
            who = (str(holder.get("task", "?")), str(holder.get("task_id", "?")), process)
        times = (duration(self.age), left(self.lock.ttl))
        return (one_line(self.name), *counts, *times, *map(one_line, who))


#: What names can be sorted by -> the order; the key on the keyboard is its first letter.
ORDERS: dict[str, Callable[[Name], Any]] = {
    "busiest": lambda it: (-it.refused - it.waiting, -it.age, it.name),
    "age": lambda it: (-it.age, it.name),
    "waiting": lambda it: (-it.waiting, -it.refused, it.name),
    "name": lambda it: it.name,
}


@dataclass(frozen=True)
class Snapshot:
    """
    How everything was at one moment.

    Attributes:
        quorum: How the nodes were.
        names: Lock names that are held, or were refused lately.
        refused: Records of what was refused lately, the newest first.
        is_complete: Whether these are all locks that are held.
    """

    quorum: Quorum
    names: Sequence[Name]
    refused: Sequence[Mapping[str, Any]]
    is_complete: bool

    def sorted(self, order: str = "busiest", part: str = "") -> list[Name]:
        """Return the names with *part* in them, or in task or task id, in an order of `ORDERS`."""
        like = part.lower()
        found = (it for it in self.names if like in " ".join((it.name, *it.cells[6:8])).lower())
        return sorted(found, key=ORDERS[order])


class Reader:
    """
    Takes snapshots, with what it has read of the journal before.

    Args:
        settings: Of the app.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._journal = JournalReader(settings.nodes, settings.rules)
        self._lately: list[dict[str, Any]] | None = None

    def read(self) -> Snapshot:
        """Return how everything is now."""
        nodes, rules = self._settings.nodes, self._settings.rules
        quorum = Quorum(node_statuses(nodes, rules), rules)
        locks = AllLocks(nodes, rules, longest=LONGEST_READ)
        held = list(locks)
        if self._lately is None:
            new, self._lately = self._journal.recent(KEPT), []
        else:
            new = self._journal.new()
        since = time.time() - LATELY
        found = [*self._lately, *filter(is_refusal, new)]
        self._lately = [record for record in found if number(record.get("at")) >= since]
        is_complete = not (locks.is_cut or locks.silent)
        return Snapshot(quorum, names_of(held, self._lately), self._lately[::-1], is_complete)


def names_of(held: Sequence[LockView], refused: Sequence[Mapping[str, Any]]) -> list[Name]:
    """Return the names of the locks that are *held*, and of those that were *refused*."""
    said = (record.get("name") for record in refused)
    times = Counter(shorten(name) for name in said if isinstance(name, str) and is_text(name))
    names = {lock.name: Name(lock.name, times[lock.name], lock) for lock in reversed(held)}
    return [*names.values(), *(Name(n, times[n]) for n in times if n not in names)]
