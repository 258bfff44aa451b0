"""What is read from the nodes for the page: the only place here that asks them anything."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

from celery_redlock.lock.records import shorten
from celery_redlock.lock.rules import Rules
from celery_redlock.ops.web.finding import LONGEST, Found, find_locks, name_pattern, together
from celery_redlock.ops.web.kept import Kept, Reading
from celery_redlock.reading.all_locks import LiveLocks, LockView
from celery_redlock.reading.journal import JournalReader
from celery_redlock.reading.nodes import NodeStatus, node_statuses, release_seen
from celery_redlock.reading.one_lock import NodeLook, holders, look

__all__ = ["OneLock", "Page", "Reader", "Records"]

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


@dataclass(frozen=True)
class OneLock:
    """
    What the nodes say about one lock at this moment.

    Attributes:
        views: One for each holder, usually one or none.
        silent: Labels of the nodes that did not answer.
    """

    views: list[LockView]
    silent: list[str]


class Reader:
    """
    Reads the lock nodes for all pages.

    Args:
        nodes: As the setting ``redlock_nodes``.
        rules: As all clients have them.
    """

    def __init__(self, nodes: Sequence[Any], rules: Rules) -> None:
        self._nodes = nodes
        self._rules = rules
        # Two pools, so that no search keeps the nodes or the journal waiting.
        self._threads = ThreadPoolExecutor(2, "redlock-web")
        self._scanners = ThreadPoolExecutor(SEARCHING, "redlock-web-search")
        self._statuses = Kept(lambda: node_statuses(nodes, rules), self._threads)
        self._journal = Kept(JournalTail(nodes, rules).read, self._threads)
        # A third one for what the main page shows, so that no number of searches starves it.
        self._walker = ThreadPoolExecutor(1, "redlock-web-all")
        self._all = Kept(lambda: self._find(""), self._walker)
        self._searches: OrderedDict[str, Kept[Found]] = OrderedDict()
        self._mutex = threading.Lock()

    def page(self, search: str) -> Page:
        """Return what a page with *search* shows; takes no longer than `PATIENCE`, about."""
        parts: tuple[Kept[Any], ...] = (self._statuses, self._search(search), self._journal)
        for part in parts:
            part.ask()
        started = time.monotonic()
        readings = []
        for part in parts:
            spent = time.monotonic() - started
            reading = part.get(PATIENCE_FOR_NEWER - spent)
            readings.append(reading or part.get(PATIENCE - (time.monotonic() - started)))
        age = max((time.monotonic() - it.at for it in readings if it is not None), default=0.0)
        nodes, found, records = map(value_of, readings)
        return Page(nodes, found, records, age)

    def lock(self, name: str) -> OneLock:
        """Return who holds the lock *name* at this moment."""
        return lock_now(self._nodes, self._rules, name)

    def release(self, name: str, seen: str) -> dict[str, str]:
        """Release what `celery_redlock.reading.nodes.release_seen` would."""
        answers = release_seen(self._nodes, self._rules, name, seen)
        with self._mutex:
            for kept in (self._all, *self._searches.values()):
                kept.expire()
        return answers

    def close(self) -> None:
        """Begin no further reading."""
        for threads in (self._threads, self._scanners, self._walker):
            threads.shutdown(wait=False, cancel_futures=True)

    def _search(self, search: str) -> Kept[Found]:
        if not search:
            return self._all
        with self._mutex:
            kept = self._searches.get(search)
            if kept is None:
                kept = Kept(lambda: self._find(search), self._scanners)
                self._searches[search] = kept
            self._searches.move_to_end(search)
            if len(self._searches) > SEARCHES:  # whose page is closed, most likely
                self._searches.popitem(last=False)[1].cancel()
            return kept

    def _find(self, search: str) -> Found:
        """Search names first: it is fast, and what most people look for."""
        if not search:
            return self._go_through(b"*", search)
        by_name = self._go_through(name_pattern(search), search)
        return by_name if by_name.more else together(by_name, self._go_through(b"*", search))

    def _go_through(self, like: bytes, search: str) -> Found:
        locks = LiveLocks(self._nodes, self._rules, like, LONGEST)
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


def value_of(reading: Reading[Any] | None) -> Any:
    """Return what was read, None for nothing."""
    return None if reading is None else reading.value


def lock_now(nodes: Sequence[Any], rules: Rules, name: str) -> OneLock:
    """Return who holds the lock *name* on any of *nodes*, all of them asked at once."""
    looks = look(nodes, rules, name)
    waiting = max(waiting_at(one) for one in looks)
    views = [
        LockView(shorten(name), it.info, it.ttl, it.votes, it.fence, waiting, it.is_foreign)
        for it in holders(looks)
    ]
    return OneLock(views, [one.node for one in looks if one.problem])


def waiting_at(one: NodeLook) -> int:
    """Return how many messages a node knows to wait for a lock; as `LockView.waiting`."""
    markers = (one.queued, one.next)
    return sum(1 + it.merged for it in markers if it is not None and not it.is_running)
