"""
The tasks that wait for their locks in a worker's main process, and how they are woken.

Celery holds a message that is to come later in a timer. Here it is in the room of all who wait in
this process; when a hint says that its lock may be free, it is taken out of the timer and runs.

    message received --> enters --> WAIT, again every second for the oldest of each lock
    a hint, or the lock is free --> out of the timer --> a child, which tries like everybody
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from celery_redlock.events import TasksWaiting
from celery_redlock.lock.algorithm.waiter import COMES_EVERY, NOTED_EVERY
from celery_redlock.lock.clock import jitter
from celery_redlock.lock.records import line_key, shorten
from celery_redlock.lock.waiting.waiting import leave_request, wait_request
from celery_redlock.plugin import Plugin, plugin_for
from celery_redlock.process.log import get_logger
from celery_redlock.process.mutex import new_mutex, run_elsewhere
from celery_redlock.task.messages.delivery import Delivery
from celery_redlock.task.messages.delivery_info import is_woken, note_woken
from celery_redlock.task.messages.waiting import Wakes
from celery_redlock.task.naming.task_lock import lock_of
from celery_redlock.task.policies import Queue
from celery_redlock.task.worker.registration import Registration
from celery_redlock.task.worker.revokes import is_revoked
from celery_redlock.task.worker.timer import ahead_of_others, find, take_out
from celery_redlock.task.worker.waiting_task import NEVER, WaitingTask

__all__ = ["LOOK_EVERY", "WaitingRoom", "room_of"]

logger = get_logger(__name__)

#: How often the longest waiting task of each lock is registered again [s]: that wakes it if the
#: lock has become free without a release, and if a hint was lost.
LOOK_EVERY = COMES_EVERY
#: In how long after a lapse workers ask [s]: the first takes the place, and the others see that.
SPREAD = 0.02
#: How many waiting tasks do not count for ``worker_eta_task_limit``. With those that do, a worker
#: would soon take no messages at all.
UNCOUNTED = 1000
#: How many are run at once when locks can be granted again; the others come by themselves.
MOST_AT_ONCE = 100


class WaitingRoom:
    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._waiting: dict[WaitingTask, None] = {}
        self._woken: deque[Callable[[], None]] = deque()
        #: Requests that were rescheduled, and come later.
        self._rescheduled: weakref.WeakSet[Any] = weakref.WeakSet()
        self._nodes = Registration(plugin, self._waiting, self.ring_for, self.look_after)
        self._looks: set[bytes] = set()
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
        lines = options.lines(request.lock_names, request.args, request.kwargs)
        limit = {shorten(name): places for name, places in lines.items()}.get(waiting.name)
        if limit is None:  # anybody can publish a message that says so
            return None
        known_as = request.task.name, delivery.task_id, delivery.execution
        one = waiting.in_line(*known_as, locks.listener.channel(), limit)
        line = line_key(locks.rules.prefix, one.name)
        policy = options.on_conflict
        most = policy.max_waiting or 0 if isinstance(policy, Queue) else 0
        task = WaitingTask(self.ring_for, one, most, line, request)
        self._waiting[task] = None
        locks.listener.enter(task)
        self._count()
        self._nodes.register(task)
        return task

    def leave(self, task: WaitingTask) -> bool:
        """
        Have one woken no more, as it tries now or goes elsewhere; return whether it was here.

        The nodes remember since when it waits.
        """
        was_here = self._drop(task)
        if was_here:
            unreachable = replace(task.one, channel="", asks=False)
            self._nodes.tell(wait_request(self._plugin.locks.rules, unreachable, task.most))
        return was_here

    def withdraw(self, task: WaitingTask) -> None:
        self._drop(task)
        self._nodes.tell(leave_request(self._plugin.locks.rules, task.one.name, task.one.who))

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

    # -- waking ------------------------------------------------------------------------

    def ring_for(self, task: WaitingTask, after: float) -> None:
        """Have one that was woken run after so long [s]; called in any thread."""
        self._ring(partial(self._run_after, task, after))

    def note_rescheduled(self, request: Any) -> None:
        with self._mutex:
            self._rescheduled.add(request)

    def wake_rescheduled(self) -> None:
        """Run those that were rescheduled, as locks can be granted again; in any thread."""
        with self._mutex:  # no more may come amid this
            some = list(islice(self._rescheduled, MOST_AT_ONCE))
        for request in some:
            self._ring(partial(self._run_early, request))

    def _ring(self, run: Callable[[], None]) -> None:
        self._woken.append(run)
        if self._bell is None:  # not here, with the room's mutex: the pool may be full
            run_elsewhere(self.wake)
        else:
            with contextlib.suppress(BlockingIOError):  # it rings already
                os.write(self._bell, b"!")

    def wake(self) -> None:
        """Run those that were woken; in the thread that runs tasks which come later."""
        while True:
            try:
                run = self._woken.popleft()
            except IndexError:  # or without an event loop, another thread was quicker
                return
            run()

    def look_after(self, line: bytes, after: float) -> None:
        """Ask again when a place of *line* lapses, which nobody sends a hint of; in any thread."""
        self._ring(partial(self._look_after, line, jitter(after, after + SPREAD)))

    def _look_after(self, line: bytes, after: float) -> None:
        if line not in self._looks:
            self._looks.add(line)
            self._consumer.timer.call_after(after, self._look_at, (line,))

    def _look_at(self, line: bytes) -> None:
        self._looks.discard(line)
        listener = self._plugin.locks.listener
        oldest = None if listener is None else listener.room.oldest(line)
        if isinstance(oldest, WaitingTask):
            self._nodes.register(oldest)

    def _run_after(self, task: WaitingTask, after: float) -> None:
        if after:
            self._consumer.timer.call_after(after, self._run, (task,))
        else:
            self._run(task)

    def _run_early(self, request: Any) -> None:
        try:
            scheduled = find(self._consumer.timer, request)
            if scheduled is not None and take_out(self._consumer.timer, scheduled):
                scheduled.entry.fun(*scheduled.entry.args, **scheduled.entry.kwargs)
        except Exception:  # it comes by itself; Celery's own work must go on
            logger.exception("A task that was rescheduled was not run")

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
            task.is_woken, task.registered_at = False, NEVER
            return
        if not self.leave(task):  # without an event loop, another thread was quicker
            return
        if not take_out(self._consumer.timer, scheduled):  # its time has come just now
            return
        self._nodes.woken(task)
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
            elif task.registered_at == NEVER and find(self._consumer.timer, request) is None:
                self.leave(task)  # it came by itself, and waits for its rate limit
            elif task.registered_at < now - NOTED_EVERY or self._is_oldest(task):
                due.append(task)
        self._nodes.register_some(due, len(self._waiting))
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
        self._looks.clear()

    def ring(self, bell: int | None) -> None:
        """Have the worker's event loop woken by a byte written to *bell*; None if it has none."""
        self._bell = bell


_rooms: weakref.WeakKeyDictionary[Any, WaitingRoom] = weakref.WeakKeyDictionary()


def room_of(app: Any) -> WaitingRoom:
    room = _rooms.get(app)
    if room is None:
        room = _rooms.setdefault(app, WaitingRoom(plugin_for(app)))
    return room
