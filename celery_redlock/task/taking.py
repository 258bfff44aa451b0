"""Take the locks of an execution: of one name or of several, all or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from celery_redlock.lock import clock
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.records import place_name, shorten
from celery_redlock.lock.requests import Marker, release_request
from celery_redlock.lock.rounds import NO_TURN, Turn, Wanted
from celery_redlock.lock.waiting import leave_request
from celery_redlock.task.interrupt import defer_interrupts
from celery_redlock.task.outcome import DONE
from celery_redlock.task.waiting import Waiting

if TYPE_CHECKING:
    from celery_redlock.lock.redlock import Redlock
    from celery_redlock.task.execution import Execution

__all__ = ["take"]


def take(execution: Execution, wait: float, turn: Turn = NO_TURN) -> None:
    """
    Acquire the lock unless the execution has finished before.

    Args:
        execution: That wants it.
        wait: How long to keep trying [s].
        turn: With what the first attempt begins.
    """
    options, delivery, locks = execution.options, execution.delivery, execution.plugin.locks
    marker = execution.id if options.dedup_ttl else None
    asked = marker if delivery.may_be_repeated else None
    info, owner, waiting = execution.info, delivery.owner, delivery.envelope.waiting
    since = None if waiting is None else waiting.since
    lock = execution.name, options.ttl, wait, options.fence, info, asked, owner
    wanted = Wanted(*lock, turn, since, options.limit[0])
    interrupt = execution.interrupt
    on_lost = (lambda _held: interrupt.fire()) if options.aborts_on_loss else None
    with defer_interrupts():  # or a lock that was granted might not be released
        if len(execution.names) == 1 == len(options.limit):
            held = locks.take(wanted, on_lost)
        else:
            held = take_all(locks, wanted, options.limits(execution.names), waiting, on_lost)
        execution.own_lock = execution.held = held
        if asked != marker:  # what an earlier publish under this task id has left
            locks.mark(Marker(execution.id, DONE, 0.0))
        if waiting is not None:
            locks.driver.tell(leave_request(locks.rules, waiting.ticket(execution.task, delivery)))


def take_all(
    locks: Redlock,
    wanted: Wanted,
    limits: Mapping[str, int],
    waiting: Waiting | None,
    on_lost: Callable[[HeldLock], None] | None,
) -> HeldLock:
    """
    Acquire the locks of all names, or none of them; each process takes them in the same order.

    Args:
        locks: On the nodes.
        wanted: As of the first name.
        limits: Each name, in their order, and how many places its lock has.
        waiting: That the task waited for one of them.
        on_lost: As of `Redlock.take`.

    Returns:
        The lock of the first name; its `others` are the rest.

    Raises:
        LockTaken, QuorumUnavailable, MarkerStands: As `Redlock.take`.
    """
    ends, held = clock.now() + wanted.wait, dict[str, HeldLock]()
    try:
        for name, limit in sorted(limits.items()):
            has_turn = waiting is not None and waiting.name == shorten(name)
            turn = wanted.turn if has_turn else NO_TURN
            wait = max(0.0, ends - clock.now())
            one = replace(wanted, name=name, wait=wait, turn=turn, limit=limit)
            held[name] = locks.take(one, on_lost)
    except BaseException:
        for lock in held.values():
            locks.give_back(lock)
        token, place = wanted.turn
        if waiting is not None and token is not None and place is not None:
            # It was woken for one name and refused another: the next one has what is kept for it.
            name = place_name(waiting.name, place)
            locks.driver.tell(release_request(locks.rules, name, token, place=place))
        raise
    first = held.pop(wanted.name)
    first.others = tuple(held.values())
    return first
