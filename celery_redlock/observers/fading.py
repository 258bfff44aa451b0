"""
Values that go back by themselves once nothing is heard for a while.

For gauges that a process sets when something happens and that nobody would set back: that a
node is quarantined, how little was left of a lease.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Fading", "SmallestOfLate"]

#: How often a process looks what is due, as long as there is something to come [s].
LOOK_EVERY = 10.0


class Fading:
    """
    Runs functions at their time, in a thread that is there only while one is to come.

    Args:
        mutex: Held while one runs, and by whoever calls a method of this.
        now: The clock [s].
    """

    def __init__(self, mutex: threading.RLock, now: Callable[[], float] = time.monotonic) -> None:
        self._mutex = mutex
        self._now = now
        self.start_over()

    def start_over(self) -> None:
        """Have nothing to come. After a fork: the thread is the parent's, and not here."""
        self._due: dict[str, tuple[float, Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None

    def after(self, seconds: float, key: str, run: Callable[[], None]) -> None:
        """Call *run* after *seconds*, instead of what was to come under this *key*."""
        self._due[key] = (self._now() + seconds, run)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="redlock-fading", daemon=True)
            self._thread = thread
            try:
                thread.start()
            except RuntimeError:  # no more threads; another event will try again
                self._thread = None

    def forget(self, key: str) -> None:
        """Do not call what was to come under this *key*."""
        self._due.pop(key, None)

    def run_due(self) -> bool:
        """Call what is due; return whether there is more to come."""
        now = self._now()
        for key in [key for key, (due, _) in self._due.items() if due <= now]:
            self._due.pop(key)[1]()
        return bool(self._due)

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_EVERY)  # to the second is enough, and the thread is there for that
            with self._mutex:
                if self._thread is not threading.current_thread():
                    return
                if not self.run_due():
                    self._thread = None
                    return


class SmallestOfLate:
    """
    The smallest of the values of the last while.

    Args:
        window: For how long a value counts [s].
    """

    def __init__(self, window: float) -> None:
        self._window = window
        # Times and values both grow from left to right: a value goes when a smaller one comes.
        self._values: deque[tuple[float, float]] = deque()

    def add(self, value: float, now: float) -> None:
        """Take *value* in at *now* [s]."""
        while self._values and self._values[-1][1] >= value:
            self._values.pop()
        self._values.append((now, value))

    def smallest(self, now: float) -> float:
        """Return the smallest value at *now* [s]; infinity if there is none."""
        while self._values and self._values[0][0] + self._window <= now:
            self._values.popleft()
        return self._values[0][1] if self._values else float("inf")

    def lasts(self, now: float) -> float:
        """Return for how long the smallest value at *now* stays [s]; 0.0 if there is none."""
        self.smallest(now)
        return self._values[0][0] + self._window - now if self._values else 0.0
