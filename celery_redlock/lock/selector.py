"""How a round waits for its sockets: with the platform's selector, except under eventlet."""

from __future__ import annotations

import selectors
import sys
import time
from typing import Any

from celery_redlock.lock import clock

__all__ = ["new_selector"]

SHORTEST_PAUSE = 0.0002
LONGEST_PAUSE = 0.002


def new_selector() -> selectors.BaseSelector:
    """Return a selector that is safe in this process, be its threads green or not."""
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("select"):
        return Looking(patcher.original("select"))
    return selectors.DefaultSelector()


class Looking(selectors.SelectSelector):
    """
    A selector for reading that only ever looks, and sleeps in between.

    eventlet's own `select` wakes its green thread once more for every further socket that was
    ready with the first, wherever it waits by then: a task's `time.sleep` would end early. And
    no two green threads may wait for one socket.

    Args:
        real: The module `select` as it was before eventlet came.
    """

    def __init__(self, real: Any) -> None:
        super().__init__()
        self._real = real

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what can be read, waiting for at most *timeout* [s]; None is for ever."""
        until = float("inf") if timeout is None else clock.now() + timeout
        pause = SHORTEST_PAUSE
        while not (ready := self._look()):
            left = until - clock.now()
            if left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)
        return ready

    def _look(self) -> list[tuple[selectors.SelectorKey, int]]:
        keys = list(self.get_map().values())
        poller = self._real.poll()
        for key in keys:
            poller.register(key.fd, self._real.POLLIN)
        readable = {fd for fd, _ in poller.poll(0)}
        return [(key, selectors.EVENT_READ) for key in keys if key.fd in readable]
