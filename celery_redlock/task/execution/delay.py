"""The delay after which a task that was not granted its lock is delivered again."""

from __future__ import annotations

import math

from celery.utils.time import get_exponential_backoff_interval

from celery_redlock.errors import QuorumUnavailable
from celery_redlock.task.execution.begun import Refused, holder_in
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.execution.outcome import Outcome
from celery_redlock.task.execution.plan import PutOff, SetAside
from celery_redlock.task.messages.broker import delays_in_broker, longest_countdown
from celery_redlock.task.messages.waiting import Waiting
from celery_redlock.task.policies import Queue, Reschedule, Retry, at_the_end, no_later

__all__ = ["UNTIL_THAT_ENDS", "delay"]

#: When a copy comes that no release wakes, as the end of another execution is to be awaited.
UNTIL_THAT_ENDS = Reschedule(cap=10.0)


def delay(refused: Refused, plan: PutOff, waiting: Waiting) -> float:
    """Return when the task is delivered again if nobody wakes it [s from now]."""
    claim, times = refused.claim, waiting.times - 1
    longest, delays = longest_countdown(claim.task.app), delays_in_broker(claim.task.app)
    # In a worker that hears the nodes.
    is_woken = claim.plugin.locks.listener is not None and not delays
    error = refused.error
    ends = error.retry_after if isinstance(error, QuorumUnavailable) else None
    match plan:
        case Reschedule() if ends is not None and is_woken:
            return at_the_end(ends)
        case Retry():
            # Not at once: Celery stores RETRY after the publish, and would write it over what
            # came next.
            countdown = max(1, retry_delay(claim, plan))
        case Reschedule():
            countdown = plan.countdown(claim.delivery.copy.reschedules, longest)
        case Queue():  # where nothing wakes it, as often as if it were rescheduled
            by_itself, often = waiting.comes_by_itself, Reschedule().countdown
            return by_itself(longest) if is_woken else often(times, longest)
        case SetAside():
            lasts: float | None = holder_in(refused).get("ttl")
            is_urgent = plan.outcome is Outcome.REQUEUED and not is_woken
            if lasts is None or is_urgent:
                return UNTIL_THAT_ENDS.countdown(times, longest)
            return lasts
    return no_later(countdown, ends)


def retry_delay(claim: Claim, policy: Retry) -> int:
    """Return the delay of the policy, or of the task [whole s]."""
    task, countdown = claim.task, policy.countdown
    if countdown is None and getattr(task, "retry_backoff", None):
        countdown = get_exponential_backoff_interval(
            factor=int(max(1.0, float(task.retry_backoff))),
            retries=claim.request.retries,
            maximum=getattr(task, "retry_backoff_max", 600),
            full_jitter=getattr(task, "retry_jitter", True),
        )
    return math.ceil(task.default_retry_delay if countdown is None else countdown)
