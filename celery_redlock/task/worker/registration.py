"""Registration of waiting tasks on the nodes, in batches, in a thread that may wait for them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from operator import attrgetter

from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.algorithm.waiter import COMES_EVERY, NOTED_EVERY
from celery_redlock.lock.scripts.requests import Request
from celery_redlock.lock.scripts.votes import VoteKind, has_majority, lapses_in
from celery_redlock.lock.waiting.waiting import (
    free_places,
    has_answered,
    leave_request,
    wait_request,
    waits_since,
)
from celery_redlock.plugin import Plugin
from celery_redlock.process.log import get_logger
from celery_redlock.process.mutex import new_mutex
from celery_redlock.task.worker.waiting_task import WaitingTask

__all__ = ["Registration"]

logger = get_logger(__name__)

#: How many are registered at once, or all of them would not be within `NOTED_EVERY`.
MOST_AT_ONCE = 200


class Registration:
    """
    Registers waiting tasks on the nodes; *ring* has one run after so long [s].

    *look* has the oldest of a line registered again after so long, as a place lapses then.
    """

    def __init__(
        self,
        plugin: Plugin,
        waiting: Container[WaitingTask],
        ring: Callable[[WaitingTask, float], None],
        look: Callable[[bytes, float], None],
    ) -> None:
        self._plugin = plugin
        self._waiting = waiting
        self._ring, self._look = ring, look
        self._queue: deque[WaitingTask] = deque()
        self._is_running = False
        self._woken: list[WaitingTask] = []
        self._mutex = new_mutex()

    def tell(self, request: Request) -> None:
        self._plugin.locks.driver.tell(request)

    def woken(self, task: WaitingTask) -> None:
        """Count on it to take a free lock, once a process is free."""
        task.woken_at = time.monotonic()
        with self._mutex:
            self._woken.append(task)

    def register_some(self, due: Iterable[WaitingTask], waiting: int) -> None:
        """Register again those of *due* for whom it is longest ago; *waiting* is how many wait."""
        most = max(MOST_AT_ONCE, math.ceil(waiting * COMES_EVERY / NOTED_EVERY))
        for task in sorted(due, key=attrgetter("registered_at"))[:most]:
            task.is_woken = False  # if it was, it did not run
            self.register(task)

    def register(self, task: WaitingTask) -> None:
        """Have the nodes know of it, and run if the lock is free; in a thread that may wait."""
        task.registered_at = time.monotonic()
        self._queue.append(task)
        with self._mutex:
            starts, self._is_running = not self._is_running, True
        if not starts:
            return
        thread = threading.Thread(target=self._register_all, name="redlock-waiting", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: with the next look
            self._queue.clear()
            self._is_running = False

    def _register_all(self) -> None:
        while True:
            with self._mutex:
                some = min(len(self._queue), MOST_AT_ONCE)
                batch = [self._queue.popleft() for _ in range(some)]
                self._is_running = bool(batch)
            if not batch:
                return
            try:
                self._register_some([task for task in batch if task in self._waiting])
            except Exception:
                logger.exception("The nodes may not know of tasks that wait")

    def _register_some(self, tasks: Sequence[WaitingTask]) -> None:
        locks = self._plugin.locks
        asked = [
            Ask(wait_request(locks.rules, task.one, task.most), has_answered) for task in tasks
        ]
        if locks.listener is None:
            return
        for task, ballot in zip(tasks, locks.driver.ask_all(asked), strict=True):
            if task not in self._waiting:  # this may have come after what it left with
                self.tell(leave_request(locks.rules, task.one.name, task.one.who))
                continue
            if has_majority(ballot, VoteKind.REFUSED):
                # As many wait as may: the nodes have forgotten this one, or its header is forged.
                self._ring(task, 0.0)  # it ends as its policy says, unless the lock is free
                continue
            since = waits_since(ballot)
            if since is not None:
                locks.listener.room.has_waited_since(task, since)
            if task.one.asks:
                free = free_places(ballot) - self._about_to_try(task.line)
                locks.listener.room.free(task.line, max(0, free))
                if 0 < (lapses := lapses_in(ballot)) < COMES_EVERY:  # else by the next look
                    self._look(task.line, lapses)

    def _about_to_try(self, line: bytes) -> int:
        with self._mutex:
            self._woken = [task for task in self._woken if task.is_about_to_begin]
            return sum(task.line == line for task in self._woken)
