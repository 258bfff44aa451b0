"""
Sends what waited in vain for company.

A note that nobody waits for, a release above all, goes along with the next request: the next task
of a busy worker asks for its lock within a millisecond, and one write per node serves for both.
Where no request comes, this sends the note after `LINGER`.

    rouse --> [ sleeps for LINGER ] --> carry --nothing waits--> [ waits for rouse ]
                      '------ not long enough <------'

A busy process rouses it for every task, and wakes it no more often than its naps end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

__all__ = ["LINGER", "Courier"]

#: Longest time that a note waits for company [s]; a nap more at worst.
LINGER = 0.002

logger = logging.getLogger(__name__)


class Courier:
    """
    A thread of one process that sends what waits; begins with the first thing that does.

    Args:
        carry: Sends what has waited for `LINGER`; returns for how long to nap until more of it
            has [s], 0.0 if nothing waits. Never raises anything but an Exception.
    """

    def __init__(self, carry: Callable[[], float]) -> None:
        self._carry = carry
        self._thread: threading.Thread | None = None
        # No Event: an exception out of nowhere could leave it jammed.
        self._roused = threading.Lock()
        self._roused.acquire()

    def rouse(self) -> bool:
        """Have it look after a nap; one caller at a time. False if there is no thread for it."""
        if self._roused.locked():
            self._roused.release()
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="redlock-courier", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # none to be had, as when the interpreter ends
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            self._roused.acquire()
            nap = LINGER
            while nap > 0:
                time.sleep(nap)
                try:
                    nap = self._carry()
                except Exception:  # what waits goes with the next request
                    logger.exception("Sending what waited for company failed")
                    nap = 0.0
