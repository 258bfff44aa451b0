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

import math
from dataclasses import replace
from functools import cache
from typing import Any

from celery.utils.time import get_exponential_backoff_interval

from celery_redlock.errors import LockNotAcquired, LockTaken, QuorumUnavailable
from celery_redlock.events import (
    TaskQueued,
    TaskRefused,
    TaskRescheduled,
    TaskRetried,
    TaskSkipped,
)
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.scripts.votes import VoteKind, has_majority
from celery_redlock.lock.waiting.waiting import has_answered, wait_request
from celery_redlock.process.log import get_logger
from celery_redlock.task.execution.begin import Finished, Refused, holder_in, leave_line
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.execution.followers import fail_followers, stop_chain
from celery_redlock.task.execution.outcome import DeliveryOver, Outcome
from celery_redlock.task.execution.plan import SetAside
from celery_redlock.task.execution.requeue import headers_of, requeue
from celery_redlock.task.messages.broker import delays_in_broker, longest_countdown, way_back
from celery_redlock.task.messages.envelope import MOST_RESCHEDULES
from celery_redlock.task.messages.waiting import Waiting, Wakes
from celery_redlock.task.policies import (
    Fail,
    Queue,
    Reschedule,
    Retry,
    RunUnlocked,
    Skip,
    no_branch_for,
    no_later,
)

__all__ = ["Skipped", "about", "end_copy", "refuse"]

logger = get_logger(__name__)

#: When a copy comes that no release wakes, as the end of another execution is to be awaited.
UNTIL_THAT_ENDS = Reschedule(cap=10.0)
#: When a copy comes back to see whether the result of what has finished is stored, as a share of
#: the lease: a marker that says "finishing" lives no longer, and its worker is then taken for dead.
SHARE_OF_LEASE = 1 / 3


class Skipped(dict[str, Any]):
    """
    The result of a task whose body did not run: plain JSON, like any dict.

    Keys:
        skipped: ``"conflict"`` or ``"unavailable"``.
        lock: Lock name.
        holder: Who holds it, as in `LockTaken.holder`; empty if nobody knows.
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
    plan = refused.plan
    if isinstance(plan, Queue) and not may_wait(refused, plan):
        plan = replace(refused, is_full=True).plan
    try:
        match plan:
            case Skip():
                return skip(refused)
            case Retry():
                raise retry(refused, plan)
            case Reschedule():
                raise reschedule(refused, plan)
            case Queue():
                raise queue(refused)
            case SetAside():
                raise set_aside(refused, plan)
            case Fail() | RunUnlocked():  # the latter has begun
                raise refused.error
            case _:
                no_branch_for(plan)
    except LockNotAcquired as error:  # also where it could not be published again
        fail(refused, error)
        raise


def about(refused: Refused) -> dict[str, Any]:
    """Return the fields of every event about a refused task."""
    claim, cause = refused.claim, cause_of(refused.error)
    who = {"name": refused.error.name, "task": claim.task.name, "task_id": claim.request.id}
    return {**who, "cause": cause, "holder": holder_in(refused)}


def cause_of(error: LockNotAcquired) -> str:
    """Return the cause in one word: ``"conflict"`` or ``"unavailable"``."""
    return "conflict" if isinstance(error, LockTaken) else "unavailable"


def skip(refused: Refused) -> dict[str, Any]:
    """End the task with a value, so that a chord, chain, group or ``get()`` always ends."""
    claim, cause = refused.claim, cause_of(refused.error)
    if claim.options.stops_chain:
        stop_chain(claim.task, claim.request, f"{claim} was skipped: {cause}")
    claim.plugin.notify(TaskSkipped(**about(refused)))
    skipped = Skipped(skipped=cause, lock=refused.error.name, holder=holder_in(refused))
    return skipped if claim.request.is_eager else dict(skipped)  # for every result serializer


def fail(refused: Refused, error: LockNotAcquired) -> None:
    """Fail all successors of the task with it."""
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


# --- the same message is delivered again ----------------------------------------------------------


def retry(refused: Refused, policy: Retry) -> Exception:
    """Retry as the task itself would, with the delay of the policy or of the task."""
    claim, error = refused.claim, refused.error
    task, request = claim.task, claim.request
    countdown = policy.countdown
    if countdown is None and getattr(task, "retry_backoff", None):
        countdown = get_exponential_backoff_interval(
            factor=int(max(1.0, float(task.retry_backoff))),
            retries=request.retries,
            maximum=getattr(task, "retry_backoff_max", 600),
            full_jitter=getattr(task, "retry_jitter", True),
        )
    if countdown is None:
        countdown = task.default_retry_delay
    headers = {**headers_of(request), **claim.delivery.retry.header(request.id)}
    again = {"headers": headers, **way_back(task.app, request)}
    # Not at once: Celery stores RETRY after the publish, and would write it over what came next.
    countdown = no_later(max(1, math.ceil(countdown)), quarantine_of(error))
    again_later: Exception = task.retry(exc=error, countdown=countdown, throw=False, **again)
    claim.plugin.notify(TaskRetried(**about(refused), countdown=float(countdown)))
    return again_later


def reschedule(refused: Refused, policy: Reschedule) -> DeliveryOver:
    """Requeue the task as the policy says."""
    claim, error = refused.claim, refused.error
    envelope = claim.delivery.copy
    times = envelope.reschedules
    countdown = policy.countdown(times, longest_countdown(claim.task.app))
    over = requeue(
        claim,
        envelope._replace(reschedules=min(times + 1, MOST_RESCHEDULES)),
        no_later(countdown, quarantine_of(error)),
        reason="rescheduled",
        outcome=Outcome.REQUEUED,
        otherwise=error,
    )
    claim.plugin.notify(
        TaskRescheduled(**about(refused), countdown=int(over.comes_in), times=times + 1)
    )
    return over


def quarantine_of(error: LockNotAcquired) -> float | None:
    """Return how long the quarantine lasts that *error* is due to [s]; None if it is not."""
    return error.retry_after if isinstance(error, QuorumUnavailable) else None


def may_wait(refused: Refused, policy: Queue) -> bool:
    """Return whether the task may wait for its lock; with `Queue.max_waiting` it is noted."""
    most = policy.max_waiting
    if most is None:
        return True
    claim = refused.claim
    delivery, waiting = claim.delivery, again(refused, Wakes.FREE)
    one = waiting.in_line(claim.task.name, delivery.task_id, delivery.execution)
    locks = claim.plugin.locks
    ballot = locks.driver.ask(Ask(wait_request(locks.rules, one, most), has_answered))
    may = not has_majority(ballot, VoteKind.REFUSED)
    if not may:
        leave_line(claim, one.name)  # on some it is noted
    return may


def queue(refused: Refused) -> DeliveryOver:
    """Requeue the task until its lock is released."""
    claim, waiting = refused.claim, again(refused, Wakes.FREE)
    longest = longest_countdown(claim.task.app)
    # Where nothing can wake it, it is delivered as often as if it were rescheduled.
    after = (
        waiting.comes_by_itself(longest)
        if can_be_woken(claim)
        else Reschedule().countdown(waiting.times - 1, longest)
    )
    over = requeue(
        claim,
        claim.delivery.copy._replace(waiting=waiting),
        after,
        reason="waits for its lock",
        outcome=Outcome.REQUEUED,
        otherwise=refused.error,
    )
    if claim.delivery.is_second_publish:  # its copy has an id, and is another one in line
        leave_line(claim, waiting.name)
    event = TaskQueued(
        **about(refused), countdown=int(over.comes_in), times=waiting.times, since=waiting.since
    )
    claim.plugin.notify(event)
    return over


def set_aside(refused: Refused, plan: SetAside) -> DeliveryOver:
    """Requeue a copy until the other execution has released, or its lease may have ended."""
    claim, error = refused.claim, refused.error
    # Where other places may be free, or the lock is no more than a part of what it waits for, a
    # lock that is free would wake it at once.
    is_held = isinstance(error, LockTaken) and claim.limits.get(error.name, 1) == 1
    waiting = again(refused, Wakes.FREE if is_held else Wakes.RELEASE)
    over = requeue(
        claim,
        claim.delivery.copy._replace(waiting=waiting),
        until_that_ends(refused, plan, waiting),
        reason=plan.reason,
        outcome=plan.outcome,
        otherwise=error if plan.may_fail else None,
    )
    logger.info("%s set aside for %d s: %s", claim, over.comes_in, plan.reason)
    return over


def until_that_ends(refused: Refused, plan: SetAside, waiting: Waiting) -> float:
    """Return when a copy comes if nobody wakes it [s]; the next run soon, where nobody can."""
    claim = refused.claim
    left: float | None = holder_in(refused).get("ttl")
    is_urgent = plan.outcome is Outcome.REQUEUED and not can_be_woken(claim)
    if left is not None and not is_urgent:
        return left
    return UNTIL_THAT_ENDS.countdown(waiting.times - 1, longest_countdown(claim.task.app))


def again(refused: Refused, wakes_it: Wakes) -> Waiting:
    """Return that the task waits for the lock that it was refused, and for no other any more."""
    claim = refused.claim
    before = claim.delivery.envelope.waiting
    waiting = Waiting.again(before, refused.error.name, wakes_it)
    if before is not None and before.name != waiting.name:
        leave_line(claim, before.name)
    return waiting


def can_be_woken(claim: Claim) -> bool:
    """Return whether a release can wake a message: it waits in a worker that hears the nodes."""
    is_heard = claim.plugin.locks.listener is not None
    return is_heard and not delays_in_broker(claim.task.app)


def end_copy(finished: Finished) -> DeliveryOver:
    """Return what ends a copy of an execution that has finished, is about to, or may have."""
    claim = finished.claim
    if finished.is_certain:
        logger.info("%s has finished before; this copy ends", claim)
        return DeliveryOver("this execution has finished before", Outcome.REPEATED)
    reason, after = "it may have finished", claim.options.ttl * SHARE_OF_LEASE
    over = requeue(claim, claim.delivery.copy, after, reason=reason, outcome=Outcome.REPEATED)
    logger.info("%s set aside for %d s: %s", claim, over.comes_in, reason)
    return over
