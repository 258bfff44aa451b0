"""Take the locks of an execution: of one name or of several, all or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_redlock.errors import LockTaken
from celery_redlock.lock import clock
from celery_redlock.lock.records import shorten
from celery_redlock.lock.requests import Marker
from celery_redlock.lock.waiting import leave_request
from celery_redlock.lock.wanted import MarkerStands, Wanted
from celery_redlock.task.interrupt import defer_interrupts
from celery_redlock.task.outcome import DONE

if TYPE_CHECKING:
    from celery_redlock.task.execution import Execution
    from celery_redlock.task.waiting import Waiting

__all__ = ["leave_line", "take"]


def take(execution: Execution, wait: float, ends: float | None = None) -> None:
    """
    Acquire the lock unless the execution has finished before.

    Args:
        execution: That wants it.
        wait: How long to keep trying [s].
        ends: As of `Wanted`.
    """
    began = clock.now()
    try:
        take_once(execution, wait, ends)
    except MarkerStands:
        if execution.delivery.may_be_repeated:
            raise
        execution.delivery = execution.delivery.of_second_publish()
        take_once(execution, max(0.0, wait - (clock.now() - began)), ends)
    except LockTaken as error:
        if error.holder.get("execution") == execution.id and not execution.delivery.may_be_repeated:
            execution.delivery = execution.delivery.of_second_publish()
        raise


def take_once(execution: Execution, wait: float, ends: float | None) -> None:
    """
    Do what `take` does; a marker that a first publish has left is for those of its own.

    Raises:
        MarkerStands: This execution has finished before; or, of a message without a publish id
            that the broker delivers for the first time, an earlier one under its task id has.
    """
    options, delivery, locks = execution.options, execution.delivery, execution.locks
    marker = execution.id if options.dedup_ttl else None
    asked = None if delivery.is_second_publish else marker
    waiting = delivery.envelope.waiting
    wanted = [
        Wanted(
            name,
            options.ttl,
            wait,
            options.fence,
            execution.info,
            asked,
            delivery.owner,
            limit,
            None if waiting is None else waiting.since,
            delivery.was_woken,
            delivery.execution if waiting is not None and waiting.name == shorten(name) else None,
            ends,
        )
        for name, limit in options.limits(execution.names).items()
    ]
    interrupt = execution.interrupt
    on_lost = (lambda _held: interrupt.fire()) if options.aborts_on_loss else None
    with defer_interrupts():  # or a lock that was granted might not be released
        if len(wanted) == 1:
            held = locks.take(wanted[0], on_lost)
        else:
            all_held = locks.take_all(wanted, on_lost)
            held = all_held.pop(execution.name)
            held.others = tuple(all_held.values())
        execution.own_lock = held
        execution.held = execution.held or held
        if asked != marker:  # or this one could not be delivered again
            locks.mark(Marker(execution.id, DONE, 0.0))
        if waiting is not None:
            leave_line(execution, waiting)


def leave_line(execution: Execution, waiting: Waiting) -> None:
    """Have the nodes forget that the task waits as a message."""
    locks = execution.plugin.locks
    locks.driver.tell(leave_request(locks.rules, waiting.name, execution.delivery.execution))
