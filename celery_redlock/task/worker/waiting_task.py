"""A task that waits for its lock as a message."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.waiter import COMES_EVERY, NOTED_EVERY
from celery_redlock.lock.waiting.room import Waiting
from celery_redlock.lock.waiting.waiting import InLine

__all__ = ["NEVER", "WaitingTask"]

#: For how long one that was woken is waited for before the next one of its line is [s]: a process
#: may be about to be free. It may have to wait for more than that, as for its rate limit.
TAKES_TO_BEGIN = COMES_EVERY / 2
#: Before any moment [s].
NEVER = float("-inf")


class WaitingTask(Waiting):
    """
    A task that waits for its lock as a message; *ring* has it run after so long [s].

    Attributes:
        one: As the nodes know it.
        most: How many may wait for the lock; 0 for any number.
        registered_at: When they were last told [s, our clock].
        woken_at: When it was given to a process [likewise].
    """

    def __init__(
        self,
        ring: Callable[[WaitingTask, float], None],
        one: InLine,
        most: int,
        line: bytes,
        request: Any,
    ) -> None:
        super().__init__(line, clock.wall(), one.who)  # until the nodes say since when
        self.takes_free = one.asks
        self.one, self.most = one, most
        self.registered_at = self.woken_at = NEVER
        self._ring = ring
        self._request = weakref.ref(request)

    @property
    def request(self) -> Any:
        return self._request()

    @property
    def is_about_to_begin(self) -> bool:
        request = self._request()
        is_new = time.monotonic() < self.woken_at + TAKES_TO_BEGIN
        return is_new and request is not None and request.time_start is None

    def wake(self, after: float) -> None:
        """In a thread of its own, or of the listener."""
        self._ring(self, after)

    def register_again(self) -> None:
        """With the next looks, some at a time, those first that were registered first."""
        self.registered_at -= NOTED_EVERY
