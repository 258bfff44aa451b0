"""
Publish a delivery again for when its lock may be free, and end this one without a state.

    refused, policy "queue"     --> waits in line, unless enough wait already
    held by this same execution --> a copy that is set aside
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from celery_redlock.errors import LockTaken
from celery_redlock.events import TaskQueued
from celery_redlock.lock.rounds import Ask
from celery_redlock.lock.votes import Ballot, VoteKind, has_majority
from celery_redlock.lock.waiting import Ticket, leave_request, wait_request
from celery_redlock.log import get_logger
from celery_redlock.task import refused
from celery_redlock.task.outcome import DeliveryOver, Outcome
from celery_redlock.task.policies import Queue, Reschedule
from celery_redlock.task.redelivery import delays_in_broker, longest_countdown, requeue
from celery_redlock.task.waiting import Waiting

if TYPE_CHECKING:
    from celery_redlock.lock.redlock import Redlock
    from celery_redlock.task.execution import Execution
    from celery_redlock.task.options import LockOptions

__all__ = ["join_queue", "set_aside"]

logger = get_logger(__name__)


def join_queue(
    execution: Execution, error: LockTaken, options: LockOptions, policy: Queue
) -> LockOptions:
    """
    Have the task wait for its lock as a message.

    Returns:
        The options of a task that may not, as enough wait already.

    Raises:
        DeliveryOver: It waits.
    """
    delivery, plugin, task = execution.delivery, execution.plugin, execution.task
    before = delivery.envelope.waiting
    limits = options.limits(execution.names)
    waiting = Waiting.again(before, error.name, limits[error.name])
    if policy.max_waiting is not None and before is None:
        ticket = waiting.ticket(execution.task, delivery)
        if not may_wait(plugin.locks, ticket, policy.max_waiting):
            plugin.locks.driver.tell(leave_request(plugin.locks.rules, ticket))  # some noted it
            return replace(options, on_conflict=policy.overflow)
    longest = longest_countdown(task.app)
    # Where nothing can wake it, it is delivered as often as if it were rescheduled.
    countdown = (
        waiting.comes_by_itself(longest)
        if plugin.locks.listener is not None and not delays_in_broker(task.app)
        else Reschedule().countdown(waiting.times - 1, longest)
    )
    copy = delivery.copy._replace(waiting=waiting)
    over = requeue(
        task,
        execution.request,
        copy,
        countdown,
        reason="waits for its lock",
        outcome=Outcome.REQUEUED,
        otherwise=error,
    )
    about = refused.description(task, execution.request, error)
    plugin.notify(
        TaskQueued(**about, countdown=countdown, times=waiting.times, since=waiting.since)
    )
    raise over


def may_wait(locks: Redlock, ticket: Ticket, most: int) -> bool:
    """Note that *ticket* waits unless *most* do already; return whether it may."""
    ballot = locks.driver.ask(Ask(wait_request(locks.rules, ticket, most), has_answered))
    return not has_majority(ballot, VoteKind.REFUSED)


def has_answered(ballot: Ballot) -> bool:
    """Return whether a majority says that the task may wait, or that it may not."""
    return any(has_majority(ballot, kind) for kind in (VoteKind.GRANTED, VoteKind.REFUSED))


def set_aside(
    execution: Execution,
    after: float,
    reason: str,
    outcome: Outcome,
    otherwise: Exception | None = None,
) -> DeliveryOver:
    """Requeue a copy and return what to raise; arguments as of `requeue`."""
    over = requeue(
        execution.task,
        execution.request,
        execution.delivery.copy,
        after,
        reason=reason,
        outcome=outcome,
        otherwise=otherwise,
    )
    logger.info("%s set aside for %d s: %s", execution, over.comes_in, reason)
    return over
