"""
Publish a delivery again for when its lock may be free, and end this one without a state.

    refused, policy "queue"         --> waits in line, unless enough wait already
    held by this same execution,
    by the one or the run before it --> waits behind that one, whatever the policy
    it may have finished            --> a copy for later, which no release wakes
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from celery_redlock.errors import LockNotAcquired, LockTaken
from celery_redlock.events import TaskQueued
from celery_redlock.lock.asks import Ask
from celery_redlock.lock.votes import VoteKind, has_majority
from celery_redlock.lock.waiting import InLine, has_answered, leave_request, wait_request
from celery_redlock.log import get_logger
from celery_redlock.task import refused
from celery_redlock.task.outcome import DeliveryOver, Outcome
from celery_redlock.task.policies import Queue, Reschedule
from celery_redlock.task.redelivery import delays_in_broker, longest_countdown, requeue
from celery_redlock.task.waiting import Waiting, Wakes

if TYPE_CHECKING:
    from celery_redlock.lock.redlock import Redlock
    from celery_redlock.task.execution import Execution
    from celery_redlock.task.options import LockOptions

__all__ = ["join_queue", "set_aside", "wait_behind", "wait_for_the_run_before"]

logger = get_logger(__name__)

#: When a copy comes if nobody says how long the lock may be held [s].
LEASE_UNKNOWN = 1.0
#: When a task looks whether the one before it has ended, if no release tells.
UNTIL_THAT_ENDS = Reschedule(cap=10.0)


def join_queue(execution: Execution, error: LockTaken, policy: Queue) -> LockOptions:
    """
    Have the task wait for its lock as a message.

    Returns:
        The options of a task that may not, as enough wait already.

    Raises:
        DeliveryOver: It waits.
    """
    delivery, plugin, task = execution.delivery, execution.plugin, execution.task
    waiting = again(execution, error.name, Wakes.FREE)
    locks, is_noted = plugin.locks, False
    leave = leave_request(locks.rules, waiting.name, delivery.execution)
    if policy.max_waiting is not None:  # who waits already is known to the nodes
        is_noted = may_wait(locks, waiting.in_line(task, delivery), policy.max_waiting)
        if not is_noted:
            locks.driver.tell(leave)  # some noted it
            return replace(execution.options, on_conflict=policy.overflow)
    longest = longest_countdown(task.app)
    # Where nothing can wake it, it is delivered as often as if it were rescheduled.
    countdown = (
        waiting.comes_by_itself(longest)
        if can_be_woken(execution)
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
    if is_noted and delivery.is_second_publish:  # its copy has an id, and is another one in line
        locks.driver.tell(leave)
    plugin.notify(
        TaskQueued(**about, countdown=countdown, times=waiting.times, since=waiting.since)
    )
    raise over


def may_wait(locks: Redlock, one: InLine, most: int) -> bool:
    """Note that *one* waits unless *most* do already; return whether it may."""
    ballot = locks.driver.ask(Ask(wait_request(locks.rules, one, most), has_answered))
    return not has_majority(ballot, VoteKind.REFUSED)


def again(execution: Execution, name: str, wakes_it: Wakes) -> Waiting:
    """Return that the task of *execution* waits for the lock *name*, one of its own."""
    return Waiting.again(execution.delivery.envelope.waiting, name, wakes_it)


def can_be_woken(execution: Execution) -> bool:
    """Return whether a release can wake a message: it waits in a worker that hears the nodes."""
    is_heard = execution.plugin.locks.listener is not None
    return is_heard and not delays_in_broker(execution.task.app)


def wait_behind(
    execution: Execution,
    error: LockTaken,
    reason: str,
    outcome: Outcome,
    otherwise: Exception | None = None,
) -> DeliveryOver:
    """Set aside a copy until the holder in *error* releases, or its lease may have ended."""
    after = error.holder.get("ttl", LEASE_UNKNOWN)
    has_others = execution.options.limits(execution.names)[error.name] > 1  # which may be free
    waiting = again(execution, error.name, Wakes.RELEASE if has_others else Wakes.FREE)
    return set_aside(execution, after, reason, outcome, otherwise, waiting)


def wait_for_the_run_before(execution: Execution, error: LockNotAcquired) -> DeliveryOver:
    """
    Requeue what has the reservation for the next run, and return what to raise.

    Args:
        execution: Of the next run.
        error: Why it does not run now, and how it fails if it could not be published.
    """
    why = "the run before it has not ended"
    if isinstance(error, LockTaken) and can_be_woken(execution):
        return wait_behind(execution, error, why, Outcome.REQUEUED, error)
    waiting = again(execution, execution.name, Wakes.RELEASE)
    longest = longest_countdown(execution.task.app)
    after = UNTIL_THAT_ENDS.countdown(waiting.times - 1, longest)
    return set_aside(execution, after, why, Outcome.REQUEUED, error, waiting)


def set_aside(
    execution: Execution,
    after: float,
    reason: str,
    outcome: Outcome,
    otherwise: Exception | None = None,
    waiting: Waiting | None = None,
) -> DeliveryOver:
    """
    Requeue a copy and return what to raise.

    Args:
        execution: That does not run now.
        after: As of `requeue`, and so are *reason*, *outcome* and *otherwise*.
        reason: Why.
        outcome: Of this delivery.
        otherwise: How it fails.
        waiting: For what the copy waits; None if nothing is to wake it.
    """
    copy = execution.delivery.copy
    if waiting is not None:
        copy = copy._replace(waiting=waiting)
    over = requeue(
        execution.task,
        execution.request,
        copy,
        after,
        reason=reason,
        outcome=outcome,
        otherwise=otherwise,
    )
    logger.info("%s set aside for %d s: %s", execution, over.comes_in, reason)
    return over
