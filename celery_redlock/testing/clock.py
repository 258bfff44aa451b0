"""A clock that stands still until a test ticks it, for clients and nodes alike."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from typing import Any

from celery_redlock.lock import clock
from celery_redlock.lock.rules import in_seconds
from celery_redlock.lock.watchdog import Watchdog
from celery_redlock.task.execution.interrupt import defer_interrupts

__all__ = ["TickedClock", "TickedWatchdog"]

IN_USE = (
    "a memory quorum is in use in this process already, and the time of locks stands still: leave "
    "that one first; locks on real servers cannot be asked meanwhile. For another app: "
    "quorum.used_by(app)"
)


class TickedClock:
    """
    The time of a `MemoryQuorum`.

    While it is in use it is the time of all locks of this process; all else in the process
    (countdowns and time limits of Celery, ``time.time()``) uses the real one.
    """

    def __init__(self) -> None:
        self._now = clock.now()
        self._ahead = time.time() - self._now
        self._watchdogs: list[TickedWatchdog] = []
        self._ticking = threading.RLock()

    def __repr__(self) -> str:
        return f"<TickedClock at {self._now:.3f} s>"

    def now(self) -> float:
        """Return the time of leases [s, arbitrary zero]."""
        return self._now

    def wall(self) -> float:
        """Return the time of day, here and on the nodes [s, Unix time]."""
        return self._now + self._ahead

    def tick(self, seconds: float) -> None:
        """
        Let *seconds* pass at once: leases and quarantines end, and the watchdog renews.

        Whatever was due meanwhile is renewed at its moment, on nodes as they are now. In the
        body of a task whose lock is lost on the way the loss is raised as in a worker: with
        ``on_lock_lost="abort"`` this call does not return.

        Args:
            seconds: How many [>= 0].
        """
        self._pass(in_seconds("seconds", seconds), is_stopped=False)

    def stall(self, seconds: float) -> None:
        """
        Let *seconds* pass while this process stands still: nothing is renewed.

        So does a process in a debugger, or a machine that is suspended. The watchdog runs
        afterwards; other holders (`MemoryQuorum.hold`) go on meanwhile.

        Args:
            seconds: How many [>= 0].
        """
        self._pass(in_seconds("seconds", seconds), is_stopped=True)

    def _pass(self, seconds: float, *, is_stopped: bool) -> None:
        with defer_interrupts(), self._ticking:  # what a lost lock raises here is raised at the end
            until = self._now + seconds
            running = [w for w in self._watchdogs if w.is_of_others or not is_stopped]
            self._run(running, until)
            self.advance(until)
            self._run(self._watchdogs, until)

    def _run(self, watchdogs: list[TickedWatchdog], until: float) -> None:
        """Have *watchdogs* renew what is due *until* then, in order."""
        while watchdogs:
            first = min(watchdogs, key=lambda watchdog: watchdog.due_at)
            if first.due_at > until:
                return
            self.advance(first.due_at)
            first.renew(first.take_due())

    def advance(self, moment: float) -> None:
        """Set the clock to *moment*, and do nothing on the way; it never goes back."""
        with self._ticking:
            self._now = max(self._now, moment)

    def winds(self, watchdog: TickedWatchdog) -> None:
        self._watchdogs.append(watchdog)

    def in_use(self) -> AbstractContextManager[None]:
        """
        Use this clock for all locks of this process, and refuse those on real servers.

        Raises:
            RuntimeError: They use another one already.
        """
        return clock.replaced(self.now, self.wall, IN_USE)


class TickedWatchdog(Watchdog):
    """
    A watchdog without a thread, which runs when its clock is ticked.

    One *of others* renews for processes other than this one.
    """

    def __init__(
        self, ticked: TickedClock, extend: Any, notify: Any, *, is_of_others: bool
    ) -> None:
        super().__init__(extend, notify, ticked.now)
        self.is_of_others = is_of_others
        ticked.winds(self)

    def _start(self) -> None:
        """Start no thread."""

    @property
    def due_at(self) -> float:
        return self._due[0][0] if self._due else float("inf")
