"""The selector for the nodes' sockets: the platform's, except in green threads."""

from __future__ import annotations

import select
import selectors
import sys
import time
from collections.abc import Mapping
from typing import Any

from celery_redlock.lock import clock

__all__ = ["new_selector"]

SHORTEST_PAUSE = 0.0002
LONGEST_PAUSE = 0.002


def new_selector() -> selectors.BaseSelector:
    eventlet, gevent = sys.modules.get("eventlet.patcher"), sys.modules.get("gevent.monkey")
    if eventlet is not None and eventlet.is_monkey_patched("select"):
        return Looking(eventlet.original("select").poll)
    if gevent is not None and gevent.is_module_patched("select"):
        return Complete(gevent.get_original("select", "poll"))
    return selectors.DefaultSelector()


#: What a selector has registered, and what it answers.
Registered = Mapping[Any, selectors.SelectorKey]
Ready = list[tuple[selectors.SelectorKey, int]]


def look(registered: Registered, poll: Any) -> Ready:
    keys = list(registered.values())
    poller = poll()
    for key in keys:
        writes = select.POLLOUT if key.events & selectors.EVENT_WRITE else 0
        poller.register(key.fd, select.POLLIN | writes)
    ready = dict(poller.poll(0))
    return [(key, events_of(ready[key.fd])) for key in keys if key.fd in ready]


def events_of(found: int) -> int:
    reads = selectors.EVENT_READ if found & ~select.POLLOUT else 0
    return reads | (selectors.EVENT_WRITE if found & select.POLLOUT else 0)


class Complete(selectors.SelectSelector):
    """
    A selector that waits as gevent does, and looks with the system's own *poll*.

    gevent's reports a socket when its loop came by there. Asked not to wait it may miss some
    that have been readable for long: a node whose answer lies there would count as late.
    """

    def __init__(self, poll: Any) -> None:
        super().__init__()
        self._poll = poll
        self._gevents = selectors.DefaultSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._gevents.register(fileobj, events, data)
        return super().register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        self._gevents.unregister(fileobj)
        return super().unregister(fileobj)

    def select(self, timeout: float | None = None) -> Ready:
        ready = look(self.get_map(), self._poll)
        if ready or timeout == 0:
            return ready
        self._gevents.select(timeout)
        return look(self.get_map(), self._poll)

    def close(self) -> None:
        self._gevents.close()
        super().close()


class Looking(selectors.SelectSelector):
    """
    A selector that only ever looks, with the system's own *poll*, and sleeps in between.

    eventlet's own `select` wakes its green thread once more for every further socket that was
    ready with the first, wherever it waits by then: a task's `time.sleep` would end early. And
    no two green threads may wait for one socket.
    """

    def __init__(self, poll: Any) -> None:
        super().__init__()
        self._poll = poll

    def select(self, timeout: float | None = None) -> Ready:
        until = float("inf") if timeout is None else clock.now() + timeout
        pause = SHORTEST_PAUSE
        while not (ready := look(self.get_map(), self._poll)):
            left = until - clock.now()
            if left <= 0:
                break
            time.sleep(min(pause, left))  # in green threads this lets the others run
            pause = min(2 * pause, LONGEST_PAUSE)
        return ready
