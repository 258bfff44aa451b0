"""
The tasks that wait for their locks in a worker's main process, and how they are woken.

Celery holds a message that is to come later in a timer. Here it gets a ticket on the lock nodes;
when a release says that its turn has come, it is taken out of the timer and runs.

    message received --> ticket --> WAIT, again every second for the oldest of each lock, in turn
    the turn has come --> out of the timer --> a child, which acquires the lock with the ticket
    it comes by itself, or the connection breaks --> LEAVE
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import time
import weakref
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery.worker.state import reserved_requests, revoked

from celery_redlock.events import TasksWaiting
from celery_redlock.lock.records import OWNER_LENGTH, TOKEN_LENGTH
from celery_redlock.lock.waiting import (
    HEARD_FOR,
    Ticket,
    leave_request,
    place_of,
    wait_request,
)
from celery_redlock.lock.wanted import Turn
from celery_redlock.log import get_logger
from celery_redlock.plugin import Plugin, plugin_for
from celery_redlock.task.delivery import Delivery, give_turn
from celery_redlock.task.timer import find, take_out

if TYPE_CHECKING:
    from celery_redlock.task.forced_ends import RedlockRequest

__all__ = ["LOOK_EVERY", "WaitingRoom", "room_of"]

logger = get_logger(__name__)

#: How often the longest waiting task of each lock is noted again [s], with up to `MOST_TOLD` locks:
#: that wakes it if the lock has become free without a release, and if a wake-up was lost.
LOOK_EVERY = 1.0
#: How often the others are [s].
TELL_EVERY = HEARD_FOR / 5
#: How many are noted at once, or all of them would not be within `TELL_EVERY`.
MOST_TOLD = 200
#: How often it is looked whether a woken task can run, and how long it is paused before [s]. What
#: wakes it may be the end of a task whose process is free in a moment.
PAUSES, PAUSE = 20, 0.01
#: How long a task that cannot run lets others pass [s]. Then it runs when it is woken, as soon as
#: there is a process for it: one that is always busy would not run it at all.
PASSES_FOR = 10.0
#: Before any moment [s].
NEVER = float("-inf")
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
        #: When each ticket was noted last [s, our clock]; longest ago first.
        self._told: dict[str, float] = {}
        #: Who has let others pass, as no process was free, and until when it does [s, our clock].
        self._passed: dict[bytes, float] = {}
        self._is_full = False
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
        token, channel = fresh_token(delivery.owner), locks.listener.channel()
        ticket = waiting.ticket(request.task, delivery, token, channel)
        self._admit(request, ticket)
        self._count()
        self._tell(ticket)
        return ticket

    def _admit(self, request: RedlockRequest, ticket: Ticket) -> None:
        token, listener = ticket.token, self._plugin.locks.listener
        self._tickets[token], self._in_timer[token] = ticket, request
        self._told[token] = NEVER
        if listener is not None:
            listener.expect(token, functools.partial(self._call, token))

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
        self._in_timer.pop(ticket.token, None)
        self._count()
        self._forget(ticket.token)
        self._tell_off(ticket)

    def clear(self) -> None:
        """Have the nodes forget all: the broker delivers their messages again."""
        self._in_timer.clear()
        for token in list(self._tickets):
            self.leave(token)

    def _forget(self, token: str) -> Ticket | None:
        ticket = self._tickets.pop(token, None)
        self._told.pop(token, None)
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
            if ticket is not None:
                self._run(ticket, free, PAUSES)

    def _run(self, ticket: Ticket, free: bytes, pauses: int) -> None:
        """Run one whose turn has come; if that takes too long, the next one has its turn."""
        try:
            if not self._has_run(ticket, free):
                self._wait_a_moment(ticket, free, pauses)
        except Exception:  # it comes by itself; Celery's own work must go on
            logger.exception("A task that waits for lock %r was not run", ticket.name)

    def _has_run(self, ticket: Ticket, free: bytes) -> bool:
        """Run it unless it is not in the timer yet, or no process could take it."""
        request, timer = self._in_timer.get(ticket.token), self._consumer.timer
        if request is None:  # gone, or come by itself
            self._tell_off(ticket)
            return True
        scheduled = find(timer, request)
        if scheduled is None or (self._is_busy() and ticket.waits not in self._passed):
            return False
        self._in_timer.pop(ticket.token, None)
        self._count()
        place = place_of(self._plugin.locks.rules, ticket, free)
        give_turn(request.request_dict, Turn(ticket.token, place))
        take_out(timer, scheduled)
        entry = scheduled.entry
        try:  # some nodes may not have said that its turn has come, or on another place
            self._tell_off(ticket, keeps=place)
        finally:
            entry.fun(*entry.args, **entry.kwargs)
        if self._autoscaler is not None:  # it looks when a message is received, or every 30 s
            self._autoscaler.maybe_scale()
        return True

    @property
    def _autoscaler(self) -> Any:
        """What adds processes to the pool (``--autoscale``); None if nothing does."""
        return getattr(getattr(self._consumer, "controller", None), "autoscaler", None)

    def _is_busy(self) -> bool:
        """Whether another task would wait for a process: one may be about to be free."""
        processes = getattr(self._consumer.pool, "num_processes", 0)  # none once it has stopped
        if processes and self._autoscaler is not None:
            processes = self._autoscaler.max_concurrency
        is_busy: bool = len(reserved_requests) >= processes
        self._is_full = self._is_full and is_busy
        return is_busy

    def _wait_a_moment(self, ticket: Ticket, free: bytes, pauses: int) -> None:
        if pauses and not self._is_full:
            self._consumer.timer.call_after(PAUSE, self._run, (ticket, free, pauses - 1))
        else:
            self._is_full = self._is_busy()
            self._let_pass(ticket)

    def _let_pass(self, ticket: Ticket) -> None:
        """Have the next one get the lock, and this one be woken later, with another ticket."""
        request = self._in_timer.pop(ticket.token, None)
        self._tell_off(ticket)
        if request is None:
            return
        again = replace(ticket, token=fresh_token(ticket.token[:OWNER_LENGTH]))
        self._admit(request, again)
        request.wait_with(again)
        self._passed[again.waits] = time.monotonic() + PASSES_FOR
        locks = self._plugin.locks
        locks.driver.tell(wait_request(locks.rules, replace(again, token="")))  # it is counted

    def look(self) -> None:
        """Tell the nodes who still waits, some at a time; called every `LOOK_EVERY`."""
        now, is_busy = time.monotonic(), self._is_busy()
        oldest: dict[str, Ticket] = {}
        to_wake: set[str] = set()
        for token, ticket in list(self._tickets.items()):
            request = self._in_timer.get(token)
            if request is None:
                self._withdraw(token)
            elif request.maybe_expire() or request.id in revoked:
                self._end(token, request)
            elif not is_busy or now >= self._passed.get(ticket.waits, NEVER):
                to_wake.add(token)
                if ticket.since < oldest.setdefault(ticket.name, ticket).since:
                    oldest[ticket.name] = ticket
        first = {ticket.token for ticket in oldest.values()}
        told = list(self._told.items())  # in a green pool it may change meanwhile
        due = [t for t, at in told if t in first or (t in to_wake and at < now - TELL_EVERY)]
        for token in due[: max(MOST_TOLD, math.ceil(len(told) * LOOK_EVERY / TELL_EVERY))]:
            ticket_now = self._tickets.get(token)
            if ticket_now is not None:
                self._tell(ticket_now)
        self._report()

    def _end(self, token: str, request: RedlockRequest) -> None:
        """Have Celery end what is revoked or has expired, whether or not a process is free."""
        scheduled = find(self._consumer.timer, request)
        if scheduled is None:  # it has come by itself
            self._withdraw(token)
            return
        if request.revoked():  # which has it leave
            take_out(self._consumer.timer, scheduled)
            self._consumer.qos.decrement_eventually()  # as Celery does with what leaves its timer

    def _report(self) -> None:
        """Notify observers where another number of tasks waits than at the last look."""
        waiting = Counter(str(it.info.get("task")) for it in list(self._tickets.values()))
        before, self._reported = self._reported, waiting
        for task in {*before, *waiting}:
            if waiting[task] != before[task]:
                self._plugin.notify(TasksWaiting(task, waiting[task]))

    def _tell(self, ticket: Ticket) -> None:
        self._told.pop(ticket.token, None)
        self._told[ticket.token] = time.monotonic()
        locks = self._plugin.locks
        locks.driver.tell(wait_request(locks.rules, ticket))

    def _tell_off(self, ticket: Ticket, keeps: int | None = None) -> None:
        self._passed.pop(ticket.waits, None)
        locks = self._plugin.locks
        locks.driver.tell(leave_request(locks.rules, ticket, keeps=keeps))

    # -- the worker --------------------------------------------------------------------

    def open(self, consumer: Any) -> None:
        """Wake tasks of this *consumer* from now on."""
        self._consumer, self._uncounted = consumer, 0

    def ring(self, bell: int | None) -> None:
        """Have the worker's event loop woken by a byte written to *bell*; None if it has none."""
        self._bell = bell


def fresh_token(owner: str) -> str:
    """Return a token that begins with *owner*."""
    return owner + secrets.token_hex((TOKEN_LENGTH - OWNER_LENGTH) // 2)


_rooms: weakref.WeakKeyDictionary[Any, WaitingRoom] = weakref.WeakKeyDictionary()


def room_of(app: Any) -> WaitingRoom:
    """Return the waiting room of *app*, made on first use."""
    room = _rooms.get(app)
    if room is None:
        room = _rooms.setdefault(app, WaitingRoom(plugin_for(app)))
    return room
