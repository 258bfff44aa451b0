"""Do what a policy says with a task that was not granted its lock."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from celery.utils.time import get_exponential_backoff_interval

from celery_redlock.errors import LockNotAcquired, LockTaken, QuorumUnavailable
from celery_redlock.events import (
    Notify,
    TaskRefused,
    TaskRescheduled,
    TaskRetried,
    TaskSkipped,
)
from celery_redlock.log import get_logger
from celery_redlock.task.envelope import MOST_RESCHEDULES
from celery_redlock.task.followers import fail_followers, stop_chain
from celery_redlock.task.outcome import Outcome
from celery_redlock.task.policies import (
    Fail,
    Policy,
    Queue,
    Reschedule,
    Retry,
    RunUnlocked,
    Skip,
    no_branch_for,
    no_later,
)
from celery_redlock.task.redelivery import (
    headers_of,
    longest_countdown,
    requeue,
    way_back,
)

if TYPE_CHECKING:
    from celery_redlock.task.delivery import Delivery
    from celery_redlock.task.options import LockOptions

__all__ = ["Skipped", "policy_for", "refuse"]

logger = get_logger(__name__)


class Skipped(dict[str, Any]):
    """
    The result of a task whose body did not run: plain JSON, like any dict.

    Keys:
        skipped: ``"conflict"`` or ``"unavailable"``.
        lock: Lock name.
        holder: Who holds it, as in `LockTaken.holder`; empty if nobody knows.
    """


def cause_of(error: LockNotAcquired) -> str:
    """Return the cause in one word: ``"conflict"`` or ``"unavailable"``."""
    return "conflict" if isinstance(error, LockTaken) else "unavailable"


def policy_for(error: LockNotAcquired, options: LockOptions) -> Policy:
    """Return the policy that *options* have for *error*."""
    return options.on_conflict if isinstance(error, LockTaken) else options.on_unavailable


def refuse(
    task: Any,
    request: Any,
    delivery: Delivery,
    error: LockNotAcquired,
    options: LockOptions,
    notify: Notify,
) -> Skipped:
    """
    Act on *error* by policy, and end what would have followed, so that nobody waits for it.

    In eager mode nothing can be published for later, so retry and reschedule fail there.

    Returns:
        The result of the task, if it is to end as a success.

    Raises:
        LockTaken, QuorumUnavailable: The task is to fail.
        celery.exceptions.Retry, Ignore, Reject: It is delivered again.
    """
    policy = policy_for(error, options)
    if request.is_eager and isinstance(policy, (Retry, Reschedule)):
        policy = Fail()
    try:
        match policy:
            case Skip():
                return skip(task, request, error, options, notify)
            case Retry():
                retry(task, request, delivery, error, policy, notify)
            case Reschedule():
                reschedule(task, request, delivery, error, policy, notify)
            case Fail() | Queue() | RunUnlocked():  # the last two where they cannot be obeyed
                pass
            case _:
                no_branch_for(policy)
    except LockNotAcquired:  # it was rescheduled as often as it may be
        fail(task, request, error, notify)
        raise
    fail(task, request, error, notify)
    raise error


def description(task: Any, request: Any, error: LockNotAcquired) -> dict[str, Any]:
    """Return the fields of every event about a refused task."""
    who = {"name": error.name, "task": task.name, "task_id": request.id}
    return {**who, "cause": cause_of(error), "holder": holder_of(error)}


def holder_of(error: LockNotAcquired) -> dict[str, Any]:
    """Return who holds the lock, as in `LockTaken.holder`; empty if nobody knows."""
    return error.holder if isinstance(error, LockTaken) else {}


def quarantine_of(error: LockNotAcquired) -> float | None:
    """Return how long the quarantine lasts that *error* is due to [s]; None if it is not."""
    return error.retry_after if isinstance(error, QuorumUnavailable) else None


def fail(task: Any, request: Any, error: LockNotAcquired, notify: Notify) -> None:
    """Fail all successors of the task with it."""
    if request.is_eager and isinstance(error, QuorumUnavailable):
        hint_at_tests()
    notify(TaskRefused(**description(task, request, error)))
    fail_followers(task, request, error)


@cache
def hint_at_tests() -> None:
    """Say once how tests do without lock servers."""
    logger.warning(
        "A task that runs eagerly found no quorum of lock nodes. In tests that have none, "
        "celery_redlock.testing.locks_disabled() lets tasks run without locks, and memory_quorum() "
        "keeps locks in memory"
    )


def skip(
    task: Any, request: Any, error: LockNotAcquired, options: LockOptions, notify: Notify
) -> Skipped:
    """End the task with a value, so that a chord, chain, group or ``get()`` always ends."""
    holder, cause = holder_of(error), cause_of(error)
    if options.stops_chain:
        stop_chain(task, request, f"{task.name}[{request.id}] was skipped: {cause}")
    notify(TaskSkipped(**description(task, request, error)))
    return Skipped(skipped=cause, lock=error.name, holder=holder)


def retry(
    task: Any,
    request: Any,
    delivery: Delivery,
    error: LockNotAcquired,
    policy: Retry,
    notify: Notify,
) -> NoReturn:
    """Retry as the task itself would, with the delay of the policy or of the task."""
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
    headers = {**headers_of(request), **delivery.retry.header(request.id)}
    again = {"headers": headers, **way_back(task.app, request)}
    # Not at once: Celery stores RETRY after the publish, and would write it over what came next.
    countdown = no_later(max(1, math.ceil(countdown)), quarantine_of(error))
    comes_again = task.retry(exc=error, countdown=countdown, throw=False, **again)
    notify(TaskRetried(**description(task, request, error), countdown=float(countdown)))
    raise comes_again


def reschedule(
    task: Any,
    request: Any,
    delivery: Delivery,
    error: LockNotAcquired,
    policy: Reschedule,
    notify: Notify,
) -> NoReturn:
    """Reschedule the task, or fail it once that was done often enough."""
    envelope = delivery.copy
    times = envelope.reschedules
    if policy.max_reschedules is not None and times >= policy.max_reschedules:
        raise error
    longest = longest_countdown(task.app)
    countdown = no_later(policy.countdown(times, longest), quarantine_of(error))
    again = envelope._replace(reschedules=min(times + 1, MOST_RESCHEDULES))
    over = requeue(
        task,
        request,
        again,
        countdown,
        reason="rescheduled",
        outcome=Outcome.REQUEUED,
        otherwise=error,
    )
    about = description(task, request, error)
    notify(TaskRescheduled(**about, countdown=countdown, times=times + 1))
    raise over
