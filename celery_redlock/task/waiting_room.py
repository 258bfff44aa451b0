"""
The tasks that wait for their locks in a worker's main process, and how they are woken.

Celery holds a message that is to come later in a timer. Here it gets a ticket on the lock nodes;
when a release says that its turn has come, it is taken out of the timer and runs.

    message received --> ticket --> WAIT, again every second for the oldest of each lock
    the turn has come --> out of the timer --> a child, which acquires the lock with the ticket
    it comes by itself, or the connection breaks --> LEAVE
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
import weakref
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.worker.state import revoked

from celery_redlock.events import TasksWaiting
from celery_redlock.lock.records import OWNER_LENGTH, TOKEN_LENGTH, place_name
from celery_redlock.lock.requests import release_request
from celery_redlock.lock.rounds import Turn
from celery_redlock.lock.waiting import (
    HEARD_FOR,
    Ticket,
    leave_request,
    place_of,
    wait_request,
)
from celery_redlock.log import get_logger
from celery_redlock.plugin import Plugin, locking, plugin_for
from celery_redlock.task.delivery import Delivery, give_turn

if TYPE_CHECKING:
    from celery_redlock.task.forced_ends import RedlockRequest

__all__ = ["WaitingRoom", "WakeTasks", "room_of"]

logger = get_logger(__name__)

#: How often the longest waiting task of each lock is noted again [s]: that wakes it if the
#: lock has become free without a release, and if a wake-up was lost.
LOOK_EVERY = 1.0
#: How often the others are [s].
TELL_EVERY = HEARD_FOR / 5
#: How many waiting tasks do not count for ``worker_eta_task_limit``. With those that do, a worker
#: would soon take no messages at all.
UNCOUNTED = 1000


class WaitingRoom:
    """The tasks that wait for their locks in one worker's main process."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._tickets: dict[str, Ticket] = {}
        self._in_timer: weakref.WeakValueDictionary[str, RedlockRequest]
        self._in_timer = weakref.WeakValueDictionary()
        self._turns: deque[tuple[str, bytes]] = deque()
        self._told_at = 0.0
        self._reported: Counter[str] = Counter()
        self._uncounted = 0
        self._bell: int | None = None
        self._consumer: Any = None

    # -- coming and going --------------------------------------------------------------

    def enter(self, request: RedlockRequest, delivery: Delivery) -> Ticket | None:
        """
        Have *request*, which is to come later, woken when its lock is free.

        Returns:
            The ticket that it is woken by; None if nothing can wake it.
        """
        waiting, locks = delivery.envelope.waiting, self._plugin.locks
        if waiting is None or delivery.owner is None or locks.listener is None:
            return None
        token = delivery.owner + secrets.token_hex((TOKEN_LENGTH - OWNER_LENGTH) // 2)
        ticket = waiting.ticket(request.task, delivery, token, locks.listener.channel())
        self._tickets[token], self._in_timer[token] = ticket, request
        self._count()
        locks.listener.expect(token, functools.partial(self._call, token))
        self._tell(ticket)
        return ticket

    def leave(self, token: str) -> None:
        """Have the nodes forget one that has not been woken, and is not in the timer any more."""
        self._in_timer.pop(token, None)
        self._count()
        self._withdraw(token)

    def _withdraw(self, token: str) -> None:
        """Have the nodes forget one; Celery counts it for as long as it is in the timer."""
        ticket = self._forget(token)
        if ticket is not None:
            self._tell_off(ticket)

    def decline(self, ticket: Ticket) -> None:
        """Have the next one get the lock, which may be kept for *ticket*, which is not to run."""
        self.leave(ticket.token)
        self._hand_on(ticket)

    def _hand_on(self, ticket: Ticket) -> None:
        locks = self._plugin.locks
        for place in range(ticket.limit):
            name = place_name(ticket.name, place)
            locks.driver.tell(release_request(locks.rules, name, ticket.token, place=place))

    def clear(self) -> None:
        """Have the nodes forget all: the broker delivers their messages again."""
        self._in_timer.clear()
        for token in list(self._tickets):
            self.leave(token)

    def _forget(self, token: str) -> Ticket | None:
        ticket = self._tickets.pop(token, None)
        listener = self._plugin.locks.listener
        if ticket is not None and listener is not None:
            listener.forget(token)
        return ticket

    def _count(self) -> None:
        """Let waiting tasks, as far as they are `UNCOUNTED`, not count for the worker's limit."""
        qos: Any = getattr(self._consumer, "qos", None)
        if getattr(qos, "max_prefetch", None) is None:
            return
        uncounted = min(len(self._in_timer), UNCOUNTED)
        qos.max_prefetch += uncounted - self._uncounted
        self._uncounted = uncounted

    # -- waking ------------------------------------------------------------------------

    def _call(self, token: str, free: bytes) -> None:
        """Have one whose turn has come run; called in a thread of the listener."""
        self._turns.append((token, free))
        if self._bell is None:
            self.wake()
        else:
            with contextlib.suppress(BlockingIOError):  # it rings already
                os.write(self._bell, b"!")

    def wake(self) -> None:
        """Run those whose turn has come; in the thread that runs tasks which come later."""
        while True:
            try:
                token, free = self._turns.popleft()
            except IndexError:  # or without an event loop, another node's thread was quicker
                return
            ticket = self._forget(token)
            if ticket is None:
                continue
            try:
                self._run(ticket, free)
            except Exception:  # it comes by itself; Celery's own work must go on
                logger.exception("A task that waits for lock %r was not run", ticket.name)

    def _run(self, ticket: Ticket, free: bytes) -> None:
        request = self._in_timer.pop(ticket.token, None)
        self._count()
        self._tell_off(ticket)  # some nodes may not have said that its turn has come
        if request is None:
            self._hand_on(ticket)
        else:
            place = place_of(self._plugin.locks.rules, ticket, free)
            bring_forward(self._consumer.timer, request, Turn(ticket.token, place))

    def look(self) -> None:
        """Tell the nodes who still waits; called every `LOOK_EVERY`."""
        tells_all = time.monotonic() > self._told_at + TELL_EVERY
        oldest: dict[str, Ticket] = {}
        for token, ticket in list(self._tickets.items()):
            request = self._in_timer.get(token)
            if request is None or request.maybe_expire() or request.id in revoked:
                self._withdraw(token)
            elif tells_all:
                self._tell(ticket)
            else:
                known = oldest.setdefault(ticket.name, ticket)
                if ticket.since < known.since:
                    oldest[ticket.name] = ticket
        for ticket in oldest.values():
            self._tell(ticket)
        if tells_all:
            self._told_at = time.monotonic()
        self._report()

    def _report(self) -> None:
        """Notify observers where another number of tasks waits than at the last look."""
        waiting = Counter(str(it.info.get("task")) for it in list(self._tickets.values()))
        before, self._reported = self._reported, waiting
        for task in {*before, *waiting}:
            if waiting[task] != before[task]:
                self._plugin.notify(TasksWaiting(task, waiting[task]))

    def _tell(self, ticket: Ticket) -> None:
        locks = self._plugin.locks
        locks.driver.tell(wait_request(locks.rules, ticket))

    def _tell_off(self, ticket: Ticket) -> None:
        locks = self._plugin.locks
        locks.driver.tell(leave_request(locks.rules, ticket))

    # -- the worker --------------------------------------------------------------------

    def open(self, consumer: Any) -> None:
        """Wake tasks of this *consumer* from now on."""
        self._consumer, self._uncounted = consumer, 0

    def ring(self, bell: int | None) -> None:
        """Have the worker's event loop woken by a byte written to *bell*; None if it has none."""
        self._bell = bell


def bring_forward(timer: Any, request: RedlockRequest, turn: Turn) -> None:
    """Do now what *timer* holds for *request*, whose *turn* has come."""
    for scheduled in list(timer.queue):
        entry = scheduled.entry
        if entry.args and entry.args[0] is request:
            give_turn(request.request_dict, turn)
            getattr(scheduled, "kill", entry.cancel)()  # a green timer has a greenlet for each
            entry.fun(*entry.args, **entry.kwargs)
            return


_rooms: weakref.WeakKeyDictionary[Any, WaitingRoom] = weakref.WeakKeyDictionary()


def room_of(app: Any) -> WaitingRoom:
    """Return the waiting room of *app*, made on first use."""
    room = _rooms.get(app)
    if room is None:
        room = _rooms.setdefault(app, WaitingRoom(plugin_for(app)))
    return room


class WakeTasks(bootsteps.StartStopStep):
    """
    Has a worker wake tasks that wait for their locks.

    A step of the consumer: with each connection to the broker all messages are delivered anew.
    """

    requires = ("celery_redlock.task.forced_ends:NoteRevokes",)
    _entry: Any = None
    _bell: tuple[int, int] | None = None

    def start(self, consumer: Any) -> None:
        """Set the timer."""
        if locking.disabled:
            return
        room = room_of(consumer.app)
        room.open(consumer)
        self._entry = consumer.timer.call_repeatedly(LOOK_EVERY, room.look)

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:
        """Have the event loop woken when the turn of a task has come."""
        if self._bell is None:
            self._bell = os.pipe()
            for end in self._bell:
                os.set_blocking(end, False)
        heard, bell = self._bell
        room = room_of(consumer.app)

        def answer() -> None:
            os.read(heard, 4096)
            room.wake()

        hub.add_reader(heard, answer)
        room.ring(bell)

    def stop(self, consumer: Any) -> None:
        """Wake nobody any more, before the next connection."""
        entry, self._entry = self._entry, None
        if entry is None:
            return
        # A green timer returns the greenlet of the first firing, which is over by then.
        consumer.timer.cancel(getattr(entry, "entry", entry))
        room = room_of(consumer.app)
        room.ring(None)
        try:
            room.clear()
        except Exception:  # the tickets end by themselves; the worker's own work must go on
            logger.exception("Tasks that waited for their locks may be waited for")
