"""
Do what the plan says with a task that was not granted its lock.

    Refused --> plan --> skip        it succeeds with a `Skipped` value
                     --> fail        it fails with the error, and what follows it, too
                     --> retry       Celery's own retry
                     --> reschedule  the same message later
                     --> queue       the same message when the lock is released
                     --> set aside   likewise: the lock is its own, or that of the one before it
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from celery_redlock.errors import (
    LockNotAcquired,
    LockTaken,
    QuorumUnavailable,
    RateExceeded,
    TooManyDeliveries,
)
from celery_redlock.events import (
    TaskEvent,
    TaskQueued,
    TaskRefused,
    TaskRescheduled,
    TaskRetried,
    TaskSkipped,
)
from celery_redlock.process.log import cut, get_logger
from celery_redlock.task.execution.begun import Finished, Refused, Superseded, holder_in
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.execution.delay import delay
from celery_redlock.task.execution.followers import fail_followers, stop_chain
from celery_redlock.task.execution.outcome import DeliveryOver, Outcome
from celery_redlock.task.execution.plan import PutOff, SetAside, Situation
from celery_redlock.task.execution.requeue import Requeue, requeue, retry
from celery_redlock.task.execution.waiting_line import is_full, leave_line_before
from celery_redlock.task.messages.envelope import MOST_RESCHEDULES
from celery_redlock.task.messages.waiting import Waiting, Wakes
from celery_redlock.task.policies import (
    Fail,
    Queue,
    Reschedule,
    Retry,
    RunUnlocked,
    Skip,
)

__all__ = ["Skipped", "about", "end_copy", "refuse", "supersede"]

logger = get_logger(__name__)

#: When a copy comes back to see whether the result of what has finished is stored, as a share of
#: the lease: a marker that says "finishing" lives no longer, and its worker is then taken for dead.
SHARE_OF_LEASE = 1 / 3


class Skipped(dict[str, Any]):
    """
    The result of a task whose body did not run: plain JSON, like any dict.

    Keys:
        skipped: ``"conflict"``, ``"rate"`` or ``"unavailable"``; ``"debounced"`` for a newer call.
        lock: Lock name.
        holder: Who holds it, as in `LockTaken.holder`, or the newer call; empty if nobody knows.
    """


def refuse(refused: Refused) -> Any:
    """
    Do what the plan for *refused* says, and end what would have followed it.

    Returns:
        The result of the task, if it is to end as a success.

    Raises:
        LockTaken, QuorumUnavailable: The task is to fail.
        celery.exceptions.Retry, Ignore, Reject: It is delivered again.
    """
    claim, plan, wakes_it = refused.claim, refused.plan, woken_by(refused)
    waiting = Waiting.again(claim.delivery.envelope.waiting, refused.line, wakes_it)
    if isinstance(plan, Queue) and is_full(claim, waiting, plan.max_waiting):
        plan = replace(refused, is_full=True).plan
    try:
        match plan:
            case Skip():
                return skip(claim, about(refused))
            case Fail() | RunUnlocked():  # the latter has begun
                raise refused.error
            case _:
                raise put_off(refused, plan, waiting)
    except (
        LockNotAcquired,
        TooManyDeliveries,
    ) as error:  # also where it could not be published again
        fail(refused, error)
        raise


def about(refused: Refused) -> dict[str, Any]:
    claim, cause = refused.claim, cause_of(refused.error)
    who = {"name": name_in(refused), "task": claim.task.name, "task_id": claim.request.id}
    return {**who, "cause": cause, "holder": holder_in(refused)}


def name_in(refused: Refused) -> str:
    error = refused.error
    return refused.claim.name if isinstance(error, TooManyDeliveries) else error.name


def cause_of(error: LockNotAcquired | TooManyDeliveries) -> str:
    match error:
        case RateExceeded():
            return "rate"
        case LockTaken():
            return "conflict"
        case TooManyDeliveries():
            return "deliveries"
    return "unavailable"


def supersede(superseded: Superseded) -> dict[str, Any]:
    """End a call of a debounced task of which a newer one has come."""
    claim, task = superseded.claim, superseded.claim.task.name
    newest = {"task": task, "task_id": superseded.newest} if superseded.newest else {}
    who = {"name": claim.name, "task": task, "task_id": claim.request.id}
    skipped = skip(claim, {**who, "cause": "debounced", "holder": newest})
    if superseded.newest == cut(
        str(claim.request.id)
    ):  # stored, this would be the newer call's result
        raise DeliveryOver("a newer call has the same id", Outcome.SKIPPED)
    return skipped


def skip(claim: Claim, told: dict[str, Any]) -> dict[str, Any]:
    """End the task with a value, so that a chord, chain, group or ``get()`` always ends."""
    cause = told["cause"]
    if claim.options.stops_chain:
        stop_chain(claim.task, claim.request, f"{claim} was skipped: {cause}")
    claim.plugin.notify(TaskSkipped(**told))
    skipped = Skipped(skipped=cause, lock=told["name"], holder=told["holder"])
    return skipped if claim.request.is_eager else dict(skipped)  # for every result serializer


def fail(refused: Refused, error: LockNotAcquired | TooManyDeliveries) -> None:
    claim = refused.claim
    if claim.request.is_eager and isinstance(error, QuorumUnavailable):
        hint_at_tests()
    claim.plugin.notify(TaskRefused(**about(refused)))
    fail_followers(claim.task, claim.request, error)


@cache
def hint_at_tests() -> None:
    """Say once how tests do without lock servers."""
    logger.warning(
        "A task that runs eagerly found no quorum of lock nodes. In tests that have none, "
        "celery_redlock.testing.locks_disabled() lets tasks run without locks, and memory_quorum() "
        "keeps locks in memory"
    )


# --- the same task is delivered again ----------------------------------------------------------


def put_off(refused: Refused, plan: PutOff, waiting: Waiting) -> Exception:
    """Have the same task delivered again; return what ends this delivery."""
    claim, after = refused.claim, delay(refused, plan, waiting)
    if isinstance(plan, Retry):
        over: Exception = retry(claim, refused.error, after)
    else:
        over = requeue(claim, later(refused, plan, waiting, after))
        after = over.comes_in
    if isinstance(plan, (Queue, SetAside)):
        leave_line_before(claim, waiting)
    report_delay(refused, plan, waiting, after)
    return over


def later(
    refused: Refused, plan: Reschedule | Queue | SetAside, waiting: Waiting, after: float
) -> Requeue:
    envelope, error = refused.claim.delivery.copy, refused.error
    match plan:
        case Reschedule():
            times = min(envelope.reschedules + 1, MOST_RESCHEDULES)
            copy = envelope._replace(reschedules=times)
            return Requeue(copy, after, "rescheduled", Outcome.REQUEUED, error)
        case Queue():
            copy = envelope._replace(waiting=waiting)
            return Requeue(copy, after, "waits for its lock", Outcome.REQUEUED, error)
        case SetAside():
            copy = envelope._replace(waiting=waiting)
            otherwise = error if plan.may_fail else None
            return Requeue(copy, after, plan.reason, plan.outcome, otherwise)


def report_delay(refused: Refused, plan: PutOff, waiting: Waiting, after: float) -> None:
    claim, seconds = refused.claim, int(after)
    match plan:
        case Retry():
            event: TaskEvent = TaskRetried(**about(refused), countdown=float(after))
        case Reschedule():
            times = claim.delivery.envelope.reschedules + 1
            event = TaskRescheduled(**about(refused), countdown=seconds, times=times)
        case Queue():
            times, since = waiting.times, waiting.since
            event = TaskQueued(**about(refused), countdown=seconds, times=times, since=since)
        case SetAside():
            logger.info("Requeued %s for %d s: %s", claim, seconds, plan.reason)
            return
    claim.plugin.notify(event)


def woken_by(refused: Refused) -> Wakes:
    """
    Return what is to wake the task if it waits.

    Set aside where other places may be free, or the lock is no more than a part of what it waits
    for, it would be woken at once by a lock that is free.
    """
    error = refused.error
    is_held = isinstance(error, LockTaken) and refused.claim.limits.get(error.name, 1) == 1
    waits_for_all = is_held or refused.situation is Situation.OVER_RATE  # nothing is released there
    return Wakes.FREE if waits_for_all or isinstance(refused.plan, Queue) else Wakes.RELEASE


def end_copy(finished: Finished) -> DeliveryOver:
    """Return what ends a copy of an execution that has finished, is about to, or may have."""
    claim = finished.claim
    if finished.is_certain:
        logger.info("%s has finished before; this copy ends", claim)
        return DeliveryOver("this execution has finished before", Outcome.REPEATED)
    reason, after = "it may have finished", claim.options.ttl * SHARE_OF_LEASE
    over = requeue(claim, Requeue(claim.delivery.copy, after, reason, Outcome.REPEATED))
    logger.info("Requeued %s for %d s: %s", claim, over.comes_in, reason)
    return over
