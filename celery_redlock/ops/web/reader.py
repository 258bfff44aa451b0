"""What is read from the nodes for the page: the only place here that asks them anything."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

from celery_redlock.lock.rules import Rules
from celery_redlock.ops.web.cache import Cached
from celery_redlock.ops.why import Explanation, explained
from celery_redlock.reading.all_locks import AllLocks
from celery_redlock.reading.journal import JournalReader
from celery_redlock.reading.nodes import NodeStatus, node_statuses
from celery_redlock.reading.one_lock import OneLock, read_lock, release_seen
from celery_redlock.reading.search import (
    LONGEST,
    Found,
    Search,
    find_locks,
    name_pattern,
    together,
)
from celery_redlock.reading.stored import LockView

__all__ = ["Page", "Reader", "Records"]

#: Longest wait of a page for what was never read, and for something newer than what is there [s].
PATIENCE = 4.0
PATIENCE_FOR_NEWER = 1.5
#: How many searches are remembered, and run at the same time.
SEARCHES = 16
SEARCHING = 2
#: How many records are kept, of things that happened and of hold times.
RECORDS = 2000


@dataclass(frozen=True)
class Records:
    """
    What the journals of the nodes tell, oldest first.

    Attributes:
        happened: What happened.
        holds: How long locks were held.
    """

    happened: Sequence[dict[str, Any]]
    holds: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Page:
    """
    All that a page is made of; None for what could not be read in time.

    Attributes:
        nodes: How each node is.
        found: The locks that match the search.
        records: The journal.
        age: Of the oldest of these readings [s].
    """

    nodes: list[NodeStatus] | None
    found: Found | None
    records: Records | None
    age: float


class Reader:
    """
    Reads the lock nodes for all pages.

    Args:
        nodes: As the setting ``redlock_nodes``.
        rules: As all clients have them.
        app: Knows the tasks; None: nobody says what would become of another call.
    """

    def __init__(self, nodes: Sequence[Any], rules: Rules, app: Any = None) -> None:
        self._nodes = nodes
        self._rules = rules
        self._app = app
        # Two pools, so that no search keeps the nodes or the journal waiting.
        self._threads = ThreadPoolExecutor(2, "redlock-web")
        self._scanners = ThreadPoolExecutor(SEARCHING, "redlock-web-search")
        self._statuses = Cached(lambda: node_statuses(nodes, rules), self._threads)
        self._journal = Cached(JournalTail(nodes, rules).read, self._threads)
        # A third one for what the main page shows, so that no number of searches starves it.
        self._walker = ThreadPoolExecutor(1, "redlock-web-all")
        self._all = Cached(lambda: self._find(Search()), self._walker)
        self._searches: OrderedDict[Search | str, Cached[Any]] = OrderedDict()
        self._mutex = threading.Lock()

    def page(self, search: Search) -> Page:
        """Return what a page with *search* shows; takes no longer than `PATIENCE`, about."""
        (nodes, found, records), age = self._read(
            self._statuses, self._found(search), self._journal
        )
        return Page(nodes, found, records, age)

    def explain(self, name: str) -> tuple[Explanation | None, float]:
        """Return what is known of the lock *name*, None if it was not read, and its age [s]."""
        seen = self._searched(name, lambda: read_lock(self._nodes, self._rules, name))
        (lock, records), age = self._read(seen, self._journal)
        recent = records.happened if records else ()
        return (explained(self._app, lock, recent) if lock else None), age

    def lock(self, name: str) -> OneLock:
        """Return what the nodes have of the lock *name* at this moment."""
        return read_lock(self._nodes, self._rules, name)

    def release(self, name: str, seen: str) -> dict[str, str]:
        """Release what `celery_redlock.reading.one_lock.release_seen` would."""
        answers = release_seen(self._nodes, self._rules, name, seen)
        with self._mutex:
            for cached in (self._all, *self._searches.values()):
                cached.expire()
        return answers

    def close(self) -> None:
        """Begin no further reading."""
        for threads in (self._threads, self._scanners, self._walker):
            threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, *parts: Cached[Any]) -> tuple[list[Any], float]:
        """Return the values of *parts*, None for what was not read in time; and their age [s]."""
        for part in parts:
            part.ask()
        started = time.monotonic()
        readings = []
        for part in parts:
            spent = time.monotonic() - started
            reading = part.get(PATIENCE_FOR_NEWER - spent)
            readings.append(reading or part.get(PATIENCE - (time.monotonic() - started)))
        age = max((time.monotonic() - it.at for it in readings if it is not None), default=0.0)
        return [None if it is None else it.value for it in readings], age

    def _found(self, search: Search) -> Cached[Found]:
        of_locks = Search(search.words, task=search.task)  # the rest is about records
        if of_locks == Search():
            return self._all
        return self._searched(of_locks, lambda: self._find(of_locks))

    def _searched(self, what: Search | str, read: Callable[[], Any]) -> Cached[Any]:
        """Return what is read for *what*, a search or the name of a lock."""
        with self._mutex:
            cached = self._searches.setdefault(what, Cached(read, self._scanners))
            self._searches.move_to_end(what)
            if len(self._searches) > SEARCHES:  # whose page is closed, most likely
                self._searches.popitem(last=False)[1].cancel()
            return cached

    def _find(self, search: Search) -> Found:
        """Search names first: it is fast, and what most people look for."""
        if not search.words:
            return self._go_through(b"*", search)
        by_name = self._go_through(name_pattern(search.words), search)
        return by_name if by_name.more else together(by_name, self._go_through(b"*", search))

    def _go_through(self, like: bytes, search: Search) -> Found:
        locks = AllLocks(self._nodes, self._rules, like, LONGEST)
        in_pages = cast("Generator[LockView, None, None]", iter(locks))
        with contextlib.closing(in_pages) as views:  # and with them the connections
            found = find_locks(views, search)
        return replace(found, complete=found.complete and not locks.is_cut, silent=locks.silent)


class JournalTail:
    """The newest records; only what is new is asked for after the first time."""

    def __init__(self, nodes: Sequence[Any], rules: Rules) -> None:
        self._reader = JournalReader(nodes, rules)
        self._happened: deque[dict[str, Any]] = deque(maxlen=RECORDS)
        self._holds: deque[dict[str, Any]] = deque(maxlen=RECORDS)
        self._has_begun = False

    def read(self) -> Records:
        """Return all that is known; called by one thread at a time."""
        records = self._reader.new() if self._has_begun else self._reader.recent(RECORDS)
        self._has_begun = True
        for record in records:
            of_kind = self._holds if record.get("event") == "Holds" else self._happened
            of_kind.append(record)
        return Records(list(self._happened), list(self._holds))
