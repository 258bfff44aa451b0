"""
The tasks that wait for their locks in a worker's main process, and how they are woken.

Celery holds a message that is to come later in a timer. Here it is in the room of all who wait in
this process; when a hint says that its lock may be free, it is taken out of the timer and runs.

    message received --> enters --> WAIT, again every second for the oldest of each lock
    a hint, or the lock is free --> out of the timer --> a child, which tries like everybody
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from celery_redlock.events import TasksWaiting
from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.algorithm.waiter import COMES_EVERY, NOTED_EVERY
from celery_redlock.lock.records import line_key, shorten
from celery_redlock.lock.scripts.requests import Request
from celery_redlock.lock.scripts.votes import VoteKind, has_majority
from celery_redlock.lock.waiting.room import Waiting
from celery_redlock.lock.waiting.waiting import (
    InLine,
    free_places,
    has_answered,
    leave_request,
    wait_request,
    waited_for,
)
from celery_redlock.plugin import Plugin, plugin_for
from celery_redlock.process.log import get_logger
from celery_redlock.process.mutex import new_mutex, run_elsewhere
from celery_redlock.task.messages.delivery import Delivery
from celery_redlock.task.messages.delivery_info import is_woken, note_woken
from celery_redlock.task.messages.waiting import Wakes
from celery_redlock.task.naming.task_lock import lock_of
from celery_redlock.task.policies import Queue
from celery_redlock.task.worker.revokes import is_revoked
from celery_redlock.task.worker.timer import ahead_of_others, find, take_out

__all__ = ["LOOK_EVERY", "WaitingRoom", "WaitingTask", "room_of"]

logger = get_logger(__name__)

#: How often the longest waiting task of each lock is noted again [s], with up to `MOST_NOTED`
#: locks: that wakes it if the lock has become free without a release, and if a hint was lost.
LOOK_EVERY = COMES_EVERY
#: How many are noted at once, or all of them would not be within `NOTED_EVERY`.
MOST_NOTED = 200
#: For how long one that was woken is waited for before the next one of its line is [s]: a process
#: may be about to be free. It may have to wait for more than that, as for its rate limit.
TAKES_TO_BEGIN = LOOK_EVERY / 2
#: Before any moment [s].
NEVER = float("-inf")
#: How many waiting tasks do not count for ``worker_eta_task_limit``. With those that do, a worker
#: would soon take no messages at all.
UNCOUNTED = 1000


class WaitingTask(Waiting):
    """
    A task that waits as a message.

    Attributes:
        one: As the nodes know it.
        most: How many may wait for the lock; 0 for any number.
        noted_at: When they were told last [s, our clock].
        woken_at: When it was given to a process [likewise].
    """

    def __init__(
        self, room: WaitingRoom, one: InLine, most: int, line: bytes, request: Any
    ) -> None:
        super().__init__(line, clock.wall())  # until the nodes say since when
        self.takes_free = one.asks
        self.one, self.most = one, most
        self.noted_at = self.woken_at = NEVER
        self._room = room
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
        self._room.ring_for(self, after)


class WaitingRoom:
    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._waiting: dict[WaitingTask, None] = {}
        self._woken: deque[tuple[WaitingTask, float]] = deque()
        self._last_woken: list[WaitingTask] = []
        self._to_note: deque[WaitingTask] = deque()
        self._is_noting = False
        self._mutex = new_mutex()
        self._reported: Counter[str] = Counter()
        self._uncounted = 0
        self._bell: int | None = None
        self._consumer: Any = None

    # -- coming and going --------------------------------------------------------------

    def enter(self, request: Any, delivery: Delivery) -> WaitingTask | None:
        """
        Have *request*, which is to come later, woken when its lock is free; None if nothing can.

        Raises LockKeyError: its arguments make no lock name.
        """
        waiting, locks = delivery.envelope.waiting, self._plugin.locks
        if waiting is None or waiting.wakes_it is Wakes.NOTHING or locks.listener is None:
            return None
        options = delivery.adjust(lock_of(request.task).options)
        limits = options.limits(request.lock_names)
        limit = {shorten(name): limit for name, limit in limits.items()}.get(waiting.name)
        if limit is None:  # anybody can publish a message that says so
            return None
        known_as = request.task.name, delivery.task_id, delivery.execution
        one = waiting.in_line(*known_as, locks.listener.channel(), limit)
        line = line_key(locks.rules.prefix, one.name)
        policy = options.on_conflict
        most = policy.max_waiting or 0 if isinstance(policy, Queue) else 0
        task = WaitingTask(self, one, most, line, request)
        self._waiting[task] = None
        locks.listener.enter(task)
        self._count()
        self._note(task)
        return task

    def leave(self, task: WaitingTask) -> bool:
        """
        Have one woken no more, as it tries now or goes elsewhere; return whether it was here.

        The nodes remember since when it waits.
        """
        was_here = self._drop(task)
        if was_here:
            unreachable = replace(task.one, channel="", asks=False)
            self._tell(wait_request(self._plugin.locks.rules, unreachable, task.most))
        return was_here

    def withdraw(self, task: WaitingTask) -> None:
        self._drop(task)
        self._tell(leave_request(self._plugin.locks.rules, task.one.name, task.one.who))

    def clear(self) -> None:
        """Have none woken any more: the broker delivers their messages again."""
        for task in list(self._waiting):
            self.leave(task)

    def _drop(self, task: WaitingTask) -> bool:
        """Return whether it was here: to one thread alone."""
        was_here = self._waiting.pop(task, False) is None
        self._count()
        listener = self._plugin.locks.listener
        if listener is not None:
            listener.leave(task)
        return was_here

    def _count(self) -> None:
        """Let waiting tasks, as far as they are `UNCOUNTED`, not count for the worker's limit."""
        qos: Any = getattr(self._consumer, "qos", None)
        if getattr(qos, "max_prefetch", None) is None:
            return
        with self._mutex:
            uncounted = min(len(self._waiting), UNCOUNTED)
            qos.max_prefetch += uncounted - self._uncounted
            self._uncounted = uncounted

    # -- what the nodes know -----------------------------------------------------------

    def _note(self, task: WaitingTask) -> None:
        """Have the nodes know of it, and run if the lock is free; in a thread that may wait."""
        task.noted_at = time.monotonic()
        self._to_note.append(task)
        with self._mutex:
            starts, self._is_noting = not self._is_noting, True
        if not starts:
            return
        thread = threading.Thread(target=self._note_all, name="redlock-waiting", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: with the next look
            self._to_note.clear()
            self._is_noting = False

    def _note_all(self) -> None:
        while True:
            with self._mutex:
                some = min(len(self._to_note), MOST_NOTED)
                batch = [self._to_note.popleft() for _ in range(some)]
                self._is_noting = bool(batch)
            if not batch:
                return
            try:
                self._note_some([task for task in batch if task in self._waiting])
            except Exception:
                logger.exception("The nodes may not know of tasks that wait")

    def _note_some(self, tasks: Sequence[WaitingTask]) -> None:
        locks = self._plugin.locks
        told = [wait_request(locks.rules, task.one, task.most) for task in tasks]
        asked = [Ask(request, has_answered) for request in told]
        if locks.listener is None:
            return
        for task, ballot in zip(tasks, locks.driver.ask_all(asked), strict=True):
            if task not in self._waiting:  # this may have come after what it left with
                self._tell(leave_request(locks.rules, task.one.name, task.one.who))
                continue
            if has_majority(ballot, VoteKind.REFUSED):
                # As many wait as may: the nodes have forgotten this one, or its header is forged.
                self.ring_for(task, 0.0)  # it ends as its policy says, unless the lock is free
                continue
            waited = waited_for(ballot)
            if waited is not None:
                locks.listener.room.has_waited_since(task, clock.wall() - waited)
            if task.one.asks:
                free = free_places(ballot) - self._about_to_try(task.line)
                locks.listener.room.free(task.line, max(0, free))

    def _about_to_try(self, line: bytes) -> int:
        with self._mutex:
            self._last_woken = [task for task in self._last_woken if task.is_about_to_begin]
            return sum(task.line == line for task in self._last_woken)

    def _tell(self, request: Request) -> None:
        self._plugin.locks.driver.tell(request)

    # -- waking ------------------------------------------------------------------------

    def ring_for(self, task: WaitingTask, after: float) -> None:
        """Have one that was woken run after so long [s]; called in any thread."""
        self._woken.append((task, after))
        if self._bell is None:  # not here, with the room's mutex: the pool may be full
            run_elsewhere(self.wake)
        else:
            with contextlib.suppress(BlockingIOError):  # it rings already
                os.write(self._bell, b"!")

    def wake(self) -> None:
        """Run those that were woken; in the thread that runs tasks which come later."""
        while True:
            try:
                task, after = self._woken.popleft()
            except IndexError:  # or without an event loop, another thread was quicker
                return
            if after:
                self._consumer.timer.call_after(after, self._run, (task,))
            else:
                self._run(task)

    def _run(self, task: WaitingTask) -> None:
        try:
            self._run_now(task)
        except Exception:  # it comes by itself; Celery's own work must go on
            logger.exception("A task that waits for lock %r was not run", task.one.name)

    def _run_now(self, task: WaitingTask) -> None:
        """Run it unless it has run, or is not in the timer yet: then it is registered again."""
        request, worker = task.request, getattr(self._consumer, "controller", None)
        if request is None:
            return
        scheduled = find(self._consumer.timer, request)
        if scheduled is None:
            task.is_woken, task.noted_at = False, NEVER
            return
        if not self.leave(task):  # without an event loop, another thread was quicker
            return
        if not take_out(self._consumer.timer, scheduled):  # its time has come just now
            return
        task.woken_at = time.monotonic()
        with self._mutex:
            self._last_woken.append(task)
        note_woken(request.request_dict)
        entry = scheduled.entry
        with ahead_of_others(worker, is_woken):
            entry.fun(*entry.args, **entry.kwargs)
        autoscaler = getattr(worker, "autoscaler", None)
        if autoscaler is not None:  # it looks when a message is received, or every 30 s
            autoscaler.maybe_scale()

    def look(self) -> None:
        """Tell the nodes who still waits, some at a time; called every `LOOK_EVERY`."""
        now, due = time.monotonic(), []
        for task in list(self._waiting):
            request = task.request
            if request is None:
                self.withdraw(task)
            elif request.maybe_expire() or is_revoked(request):
                self._end(task, request)
            elif task.noted_at == NEVER and find(self._consumer.timer, request) is None:
                self.leave(task)  # it came by itself, and waits for its rate limit
            elif task.noted_at < now - NOTED_EVERY or self._is_oldest(task):
                due.append(task)
        most = max(MOST_NOTED, math.ceil(len(self._waiting) * LOOK_EVERY / NOTED_EVERY))
        for task in sorted(due, key=attrgetter("noted_at"))[:most]:  # longest ago first
            task.is_woken = False  # if it was, it did not run
            self._note(task)
        self._report()

    def _is_oldest(self, task: WaitingTask) -> bool:
        listener = self._plugin.locks.listener
        return listener is not None and listener.room.is_oldest(task)

    def _end(self, task: WaitingTask, request: Any) -> None:
        """Have Celery end what is revoked or has expired, whether or not a process is free."""
        scheduled = find(self._consumer.timer, request)
        if scheduled is None:  # it has come by itself
            self.leave(task)
        elif request.revoked() and take_out(self._consumer.timer, scheduled):  # withdrawn by then
            self._consumer.qos.decrement_eventually()  # as Celery does with what leaves its timer

    def _report(self) -> None:
        waiting = Counter(str(task.one.info.get("task")) for task in list(self._waiting))
        before, self._reported = self._reported, waiting
        for name in {*before, *waiting}:
            if waiting[name] != before[name]:
                self._plugin.notify(TasksWaiting(name, waiting[name]))

    # -- the worker --------------------------------------------------------------------

    def open(self, consumer: Any) -> None:
        self._consumer, self._uncounted = consumer, 0

    def ring(self, bell: int | None) -> None:
        """Have the worker's event loop woken by a byte written to *bell*; None if it has none."""
        self._bell = bell


_rooms: weakref.WeakKeyDictionary[Any, WaitingRoom] = weakref.WeakKeyDictionary()


def room_of(app: Any) -> WaitingRoom:
    room = _rooms.get(app)
    if room is None:
        room = _rooms.setdefault(app, WaitingRoom(plugin_for(app)))
    return room
