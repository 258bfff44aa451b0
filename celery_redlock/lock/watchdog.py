"""
Renew all leases that a process holds, with one thread.

    take at t0 --> due at t0 + ttl/3 --renewed--> due a third later, and so on
                        |  (with those that are due a little later)
                        |--unknown--> again after ttl/12 +- 25 %, until the deadline
                        '--stolen, or the deadline passed--> lost: call the holder back

The thread only ever makes a lease longer. That a lease has ended is read off the clock by
the holder itself (`HeldLock.ensure_held`), so a thread that never ran costs an aborted
task, not an overlap. It is started by the first lease and sleeps until the first one is
due: a lease released before a third of its TTL never wakes it.

Source:
    PROTOCOL 3.6 and 3.9.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from celery_redlock.lock import clock
from celery_redlock.lock.lease import Lease, renew_at
from celery_redlock.process.deferral import defer_signals
from celery_redlock.process.forks import members
from celery_redlock.process.log import get_logger
from celery_redlock.process.mutex import is_stuck, new_mutex

if TYPE_CHECKING:
    from celery_redlock.lock.held import HeldLock

__all__ = ["NotRenewed", "Watchdog"]


class NotRenewed(NamedTuple):
    """A lease that a round did not extend."""

    reason: str | None  # why it is lost, as in `LockLost.reason`; None while that is unknown
    votes: dict[str, str]  # what each node answered, by node label


#: Extends leases in one round: each new lease, or why there is none.
Extend = Callable[[Sequence[Lease]], Sequence["Lease | NotRenewed"]]
#: Leases renewed in one write per node: far less than a socket buffer holds.
BATCH = 50
#: A round is over within the node timeout, which is less than half a lease; more than so much of
#: a lease [1] and it was not the nodes that it waited for.
LONGEST_ROUND = 2.0 / 3.0
#: Leases due within so much of their TTL [1] are renewed when one is due: a round for each of
#: thousands would cost many times what the leases do.
COMPANY = 0.01
#: How many entries of locks that are gone the heap may hold before it is swept.
STALE = 256

logger = get_logger(__name__)
_every_watchdog: weakref.WeakSet[Watchdog] = members("watchdog")


class Watchdog:
    """
    Keeps leases alive. Safe from any thread.

    *on_outcome* is called with each outcome: the held lock, and what was left of its old lease
    when it was renewed [s], or None when it was lost.
    """

    def __init__(
        self,
        extend: Extend,
        on_outcome: Callable[[HeldLock, float | None], None],
        now: Callable[[], float] = clock.now,
    ) -> None:
        self._extend = extend
        self._on_outcome = on_outcome
        self._now = now
        self._start_over()
        _every_watchdog.add(self)

    def _start_over(self) -> None:
        """Hold nothing. After a fork: the parent's leases are the parent's."""
        self._mutex = new_mutex()
        #: As of a fanout.
        self.is_in_use_here: Callable[[], bool] = self._mutex._is_owned  # type: ignore[attr-defined]  # noqa: SLF001
        self.is_stuck: Callable[[], bool] = partial(is_stuck, self._mutex)
        self._changed = threading.Condition(self._mutex)
        self._due: list[tuple[float, int, HeldLock]] = []
        self._order = itertools.count()
        self._held: dict[HeldLock, None] = {}  # half the memory of a set
        self._asked: frozenset[HeldLock] = frozenset()  # those in the round under way
        self._thread: threading.Thread | None = None
        self._sleeps_until = 0.0
        self._warned_at = 0.0

    @property
    def held(self) -> list[HeldLock]:
        with self._mutex:
            return list(self._held)

    def is_asking_for(self, held: HeldLock) -> bool:
        return held in self._asked

    def watch(self, held: HeldLock, started: float) -> None:
        with self._mutex:
            self._held[held] = None
            self._schedule(renew_at(started, held.ttl), held)
            if self._thread is None:
                self._start()

    def unwatch(self, held: HeldLock) -> str | None:
        """
        Stop renewing *held*; return why it is lost, as in `LockLost.reason`, None if it is not.

        Waits for a round under way that renews it: sent after the release, the renewal would
        set the key again, and leave a lock that nobody holds. A lease that has ended before
        the thread got to run is reported here: its holder ran on without a lock.
        """
        lost = held.lost_reason
        if lost is not None and held in self._held:
            self._warn_if_starved()
            self._lose(held, lost)
        with self._mutex:
            self._held.pop(held, None)
            if len(self._due) > STALE and len(self._due) > STALE + 2 * len(self._held):
                swept, self._due = self._due, []  # the collector may have others come meanwhile
                for entry in swept:
                    if entry[2] in self._held:
                        heapq.heappush(self._due, entry)
            if held in self._asked and threading.current_thread() is not self._thread:
                self._changed.wait_for(lambda: held not in self._asked, held.ttl / 12.0)
        return lost

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="redlock-watchdog", daemon=True)
        with defer_signals():  # or the standard library's own locks might stay locked
            thread.start()  # perhaps there is none to be had: the next lease tries again
        self._thread = thread

    def _schedule(self, due: float, held: HeldLock) -> None:
        heapq.heappush(self._due, (due, next(self._order), held))
        if due < self._sleeps_until:
            self._changed.notify()

    def _run(self) -> None:
        pid = os.getpid()
        try:
            while os.getpid() == pid:
                batch = self._wait_for_due()
                try:
                    self.renew(batch)
                except BaseException:  # a watchdog that dies would lose every lease of the process
                    logger.exception("Renewing %d leases failed; trying again", len(batch))
                    self._put_back(batch)
        finally:
            self._thread = None  # the next lease starts another

    def _wait_for_due(self) -> list[HeldLock]:
        changed = self._changed
        with changed:
            while not (batch := self.take_due()):
                self._sleeps_until = self._due[0][0] if self._due else float("inf")
                left = self._sleeps_until - self._now()
                changed.wait(None if left == float("inf") else max(0.0, left))
                self._sleeps_until = 0.0
            return batch

    def take_due(self) -> list[HeldLock]:
        now = self._now()
        batch: list[HeldLock] = []
        while self._due and len(batch) < BATCH:
            entry = heapq.heappop(self._due)
            due, _, held = entry
            if due > now + (COMPANY * held.ttl if batch else 0.0):
                heapq.heappush(self._due, entry)
                break
            if held in self._held:
                batch.append(held)
                held.lag = max(0.0, now - due)
                if is_too_late(held.lag, held):
                    self._warn_if_starved(entry)
        return batch

    def _warn_if_starved(self, *taken: tuple[float, int, HeldLock]) -> None:
        """Warn, once per wake-up, if the thread runs so late that leases are at risk."""
        now, before = self._now(), self._warned_at
        with self._mutex:
            late = [
                (now - due, held.ttl)
                for due, _, held in (*taken, *self._due)
                if held in self._held and due > before and is_too_late(now - due, held)
            ]
        if late:
            self._warned_at = now
            warn_of_starvation(late)

    def renew(self, batch: Sequence[HeldLock]) -> None:
        started = self._now()
        live = [held for held in batch if not self._is_over(held)]
        live, outcomes = self._ask(live)
        took = self._now() - started
        late = [(took, held.ttl) for held in live if took > LONGEST_ROUND * held.ttl]
        if late:
            warn_of_starvation(late)
        for held, outcome in zip(live, outcomes, strict=True):
            self._settle(held, outcome, started)

    def _ask(self, live: list[HeldLock]) -> tuple[list[HeldLock], Sequence[Lease | NotRenewed]]:
        with self._mutex:
            live = [held for held in live if held in self._held]
            self._asked = frozenset(live)
        try:
            return live, self._extend([held.lease for held in live]) if live else []
        finally:
            with self._mutex:
                self._asked = frozenset()
                self._changed.notify_all()

    def _is_over(self, held: HeldLock) -> bool:
        reason = held.lost_reason
        if reason is not None:
            self._lose(held, reason)
        return reason is not None

    def _settle(self, held: HeldLock, outcome: Lease | NotRenewed, started: float) -> None:
        if isinstance(outcome, NotRenewed):
            held.not_renewed(outcome.votes)
            if outcome.reason is None:
                self._again(held, started)
            else:
                self._lose(held, outcome.reason)
        else:
            margin = held.lease.valid_until - self._now()
            if held.renewed(outcome):
                self._on_outcome(held, margin)
                self._at(renew_at(started, held.ttl), held)
            else:
                self._lose(held, "deadline")

    def _again(self, held: HeldLock, started: float) -> None:
        """Try an undecided renewal again soon, at the latest when the lease ends."""
        pause = held.ttl / 12.0 * clock.jitter(0.75, 1.25)
        self._at(min(started + pause, held.lease.valid_until), held)

    def _put_back(self, batch: Sequence[HeldLock]) -> None:
        for held in batch:
            self._again(held, self._now())

    def _at(self, due: float, held: HeldLock) -> None:
        with self._mutex:
            if held in self._held:
                self._schedule(due, held)

    def _lose(self, held: HeldLock, reason: str) -> None:
        with self._mutex:
            if held not in self._held:
                return  # released in the meantime
            self._held.pop(held, None)
        try:
            held.lose(reason)
        except Exception:  # the holder's own callback; the other leases must not suffer
            logger.exception("The callback for the lost lock %r failed", held.name)
        self._on_outcome(held, None)

    def after_fork_in_child(self) -> None:
        self._start_over()


def is_too_late(late: float, held: HeldLock) -> bool:
    return late > held.ttl / 6.0


def warn_of_starvation(late: Sequence[tuple[float, float]]) -> None:
    """Warn of *late* leases: of each its delay and its TTL [s]."""
    logger.warning(
        "The watchdog ran %.1f s late for %d lease%s (of %.1f s): something kept this process "
        "from switching threads or greenlets; have long computations give way (time.sleep(0)), "
        "run them in the prefork pool, or raise lock_ttl",
        max(delay for delay, _ in late),
        len(late),
        "" if len(late) == 1 else "s",
        min(ttl for _, ttl in late),
    )
