"""
What was read is kept for a moment, so that many pages cost the nodes no more than one.

A reading is made in a thread of its own, by one at a time. Whoever asks waits for it, but not
for long, and gets an older one if there is any: no page hangs because a node does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from celery_redlock.log import get_logger

__all__ = ["Cached", "Reading"]

logger = get_logger(__name__)
T = TypeVar("T")
#: For how long a reading is as good as a new one [s].
FRESH = 1.0


@dataclass(frozen=True)
class Reading(Generic[T]):
    """
    What was read.

    Attributes:
        value: What.
        at: When it was complete [s, monotonic].
    """

    value: T
    at: float


class Cached(Generic[T]):
    """
    One thing that is read again and again.

    Args:
        read: Returns what there is; may be slow. What it raises is logged, and the older reading
            stays.
        threads: Where it runs.
        now: The clock [s].
    """

    def __init__(
        self, read: Callable[[], T], threads: Executor, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._threads = threads
        self._now = now
        self._mutex = threading.Lock()
        self._running: Future[None] | None = None
        self._reading: Reading[T] | None = None
        self._fresh_until = float("-inf")

    def ask(self) -> None:
        """Have it read again unless that is under way, or was a moment ago."""
        with self._mutex:
            if self._running is None and self._now() >= self._fresh_until:
                self._running = self._threads.submit(self._run)

    def get(self, patience: float) -> Reading[T] | None:
        """Return the newest reading, after at most *patience* [s]; None if there is none yet."""
        self.ask()
        with self._mutex:
            running = self._running
        if running is not None:
            wait([running], timeout=max(0.0, patience))
        return self._reading

    def expire(self) -> None:
        """Have it read again by whoever asks next: what was read is known to have changed."""
        with self._mutex:
            self._fresh_until = float("-inf")

    def cancel(self) -> None:
        """Do not begin to read any more; what is under way ends by itself."""
        with self._mutex:
            if self._running is not None and self._running.cancel():
                self._running = None

    def _run(self) -> None:
        started = self._now()
        try:
            self._reading = Reading(self._read(), self._now())
        except Exception:  # whatever it is, the page has to say that it knows nothing new
            logger.exception("Could not read the lock nodes")
        finally:
            with self._mutex:
                # At least as much rest as work, however slow the nodes or many the locks.
                self._fresh_until = self._now() + max(FRESH, self._now() - started)
                self._running = None
