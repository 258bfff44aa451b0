"""
Readings of the nodes for the page: the only place here that asks them anything.

A reading is cached for a moment, so that many pages cost the nodes no more than one. It is made in
a thread. A page waits for that, but not for long, and gets an older reading if there is any: no
page hangs because a node does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from celery_redlock.lock.rules import Rules
from celery_redlock.ops.advice import DAY
from celery_redlock.ops.why import Explanation, explained, lines_of_name
from celery_redlock.process.log import get_logger
from celery_redlock.reading.all_locks import AllLocks, AllReservations
from celery_redlock.reading.journal import JournalReader
from celery_redlock.reading.nodes import NodeStatus, node_statuses
from celery_redlock.reading.one_lock import OneLock
from celery_redlock.reading.places import read_lock, read_places
from celery_redlock.reading.release import release_seen
from celery_redlock.reading.search import (
    LONGEST,
    Found,
    Search,
    find_locks,
    name_pattern,
    together,
)
from celery_redlock.reading.stored import ReservationView
from celery_redlock.reading.tally_reader import Tallies, TallyReader

__all__ = ["PATIENCE", "Cached", "Page", "Reader"]

logger = get_logger(__name__)
T = TypeVar("T")
#: For how long a reading is as good as a new one [s].
FRESH = 1.0
#: Longest wait of a page for what was never read, and for something newer than what is there [s].
PATIENCE = 4.0
PATIENCE_FOR_NEWER = 1.5
#: How many searches are remembered, and run at the same time.
SEARCHES = 16
SEARCHING = 2
#: How many records are kept, and how many reservations.
RECORDS = RESERVATIONS = 2000


class Cached(Generic[T]):
    """
    One thing that is read again and again, by one thread of *threads* at a time.

    What *read* raises is logged, and the older reading stays. *at* is when the *value* was complete
    [s, monotonic]; None is the value before the first.
    """

    def __init__(
        self, read: Callable[[], T], threads: Executor, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._threads = threads
        self._now = now
        self._mutex = threading.Lock()
        self._newest: Future[None] | None = None
        self._fresh_until = float("-inf")
        self.value: T | None = None
        self.at = 0.0

    def ask(self) -> Future[None]:
        """Have it read again unless that is under way, or was a moment ago; done when it is."""
        with self._mutex:
            is_over = self._newest is None or self._newest.done()
            if self._newest is None or (is_over and self._now() >= self._fresh_until):
                self._newest = self._threads.submit(self._run)
            return self._newest

    def cancel(self) -> None:
        """Do not begin to read any more; what is under way ends by itself."""
        if self._newest is not None:
            self._newest.cancel()

    def _run(self) -> None:
        started = self._now()
        try:
            self.value, self.at = self._read(), self._now()
        except Exception:  # of any kind: the page has to say that it knows nothing new
            logger.exception("Could not read the lock nodes")
        finally:
            # At least as much rest as work, however slow the nodes or many the locks.
            self._fresh_until = self._now() + max(FRESH, self._now() - started)


@dataclass(frozen=True)
class Page:
    nodes: list[NodeStatus] | None
    found: Found | None  # the locks that match the search
    records: Sequence[dict[str, Any]] | None  # of the journal, oldest first
    tallies: Tallies | None  # what tasks did in the last day
    age: float  # of the oldest of these readings [s]
    #: Names that are reserved at publish, and no lock is held for
    reserved: Sequence[ReservationView] = ()

    def matching(self, search: Search) -> list[dict[str, Any]]:
        return list(filter(search.has_record, self.records or ()))

    @property
    def begin(self) -> Any:
        return self.records[0].get("at") if self.records else None


class Reader:
    def __init__(self, nodes: Sequence[Any], rules: Rules, app: Any = None) -> None:
        self._nodes = nodes
        self._rules = rules
        self.app = app
        # A thread for each of these, so that none keeps another waiting, and no search any.
        self._threads = ThreadPoolExecutor(5, "redlock-web")
        self._statuses = Cached(lambda: node_statuses(nodes, rules), self._threads)
        self._journal = Cached(JournalTail(nodes, rules).read, self._threads)
        self._tallies = Cached(partial(last_day, TallyReader(nodes, rules)), self._threads)
        self._all = Cached(lambda: self._find(Search()), self._threads)
        self._reserved = Cached(self._read_reserved, self._threads)
        self._scanners = ThreadPoolExecutor(SEARCHING, "redlock-web-search")
        self._searches: OrderedDict[Search | str, Cached[Any]] = OrderedDict()
        self._mutex = threading.Lock()

    def page(self, search: Search) -> Page:
        """Return what a page with *search* shows, within about `PATIENCE`."""
        (nodes, found, records, tallies, reserved), age = waited_for(
            self._statuses, self._found(search), self._journal, self._tallies, self._reserved
        )
        return Page(nodes, found, records, tallies, age, reserved or ())

    def tallies(self) -> tuple[Tallies | None, float]:
        """Return what tasks did in the last day, None if it was not read, and its age [s]."""
        (tallies,), age = waited_for(self._tallies)
        return tallies, age

    def explain(self, name: str, search: Search) -> tuple[Explanation | None, float]:
        """
        Return what is known of the lock *name*, None if it was not read, and its age [s].

        Of its records those that fit *search*.
        """
        limits = lines_of_name(self.app, name)
        seen = self._searched(name, lambda: read_places(self._nodes, self._rules, limits))
        (places, records), age = waited_for(seen, self._journal)
        if places is None or records is None:
            return None, age
        return explained(self.app, places, filter(search.has_record, records)), age

    def lock(self, name: str) -> OneLock:
        return read_lock(self._nodes, self._rules, name)

    def release(self, name: str, seen: str) -> dict[str, str]:
        answers = release_seen(self._nodes, self._rules, name, seen)
        with self._mutex:  # a reading under way may have begun before
            self._all = Cached(lambda: self._find(Search()), self._threads)
            self._reserved = Cached(self._read_reserved, self._threads)
            self._searches.clear()
        return answers

    def close(self) -> None:
        for threads in (self._threads, self._scanners):
            threads.shutdown(wait=False, cancel_futures=True)

    def _read_reserved(self) -> list[ReservationView]:
        found = AllReservations(self._nodes, self._rules, longest=LONGEST)
        with contextlib.closing(iter(found)) as views:
            return list(islice(views, RESERVATIONS))

    def _found(self, search: Search) -> Cached[Found]:
        of_locks = Search(search.words, task=search.task)  # the rest is about records
        if of_locks == Search():
            return self._all
        return self._searched(of_locks, lambda: self._find(of_locks))

    def _searched(self, what: Search | str, read: Callable[[], Any]) -> Cached[Any]:
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
        with contextlib.closing(iter(locks)) as views:  # and with them the connections
            found = find_locks(views, search)
        return replace(found, complete=found.complete and not locks.is_cut, silent=locks.silent)


def waited_for(*parts: Cached[Any]) -> tuple[list[Any], float]:
    """Return the values of *parts*, None for what was not read in time; and their age [s]."""
    futures = [part.ask() for part in parts]
    wait(futures, PATIENCE_FOR_NEWER)
    never_read = [it for it, part in zip(futures, parts, strict=True) if part.value is None]
    wait(never_read, PATIENCE - PATIENCE_FOR_NEWER)
    now = time.monotonic()
    ages = [now - part.at for part in parts if part.value is not None]
    return [part.value for part in parts], max(ages, default=0.0)


class JournalTail:
    """The newest records; later readings ask for new ones only. One thread at a time."""

    def __init__(self, nodes: Sequence[Any], rules: Rules) -> None:
        self._reader = JournalReader(nodes, rules)
        self._records: deque[dict[str, Any]] = deque(maxlen=RECORDS)
        self._has_begun = False

    def read(self) -> list[dict[str, Any]]:
        self._records += self._reader.new() if self._has_begun else self._reader.recent(RECORDS)
        self._has_begun = True
        return list(self._records)


def last_day(reader: TallyReader) -> Tallies:
    now = time.time()
    return reader.read(now - DAY, now)
