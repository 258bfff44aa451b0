"""
Report mode: the body runs whatever the nodes say, and an event says what would have happened.

    names --> bounded rounds, on keys of its own --> granted:  noted until its end, as if locked
                                                 --> refused:  the event of its policy
                                                 --> no answer, or any error: the same
          --> body, in any case

An enforced lock never meets such a note, and a note never meets an enforced lock.
"""

from __future__ import annotations

import logging
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from celery_redlock.errors import LockKeyError
from celery_redlock.events import (
    TaskEvent,
    TaskQueued,
    TaskRefused,
    TaskRescheduled,
    TaskRetried,
    TaskSkipped,
)
from celery_redlock.lock import clock
from celery_redlock.lock.held import HeldLock, NotLocked
from celery_redlock.process.log import get_logger
from celery_redlock.task.execution.begin import has_previous
from celery_redlock.task.execution.begun import Finished, Granted, Refused
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.execution.delay import UNTIL_THAT_ENDS
from celery_redlock.task.execution.plan import Plan, SetAside, Situation
from celery_redlock.task.execution.refused import about
from celery_redlock.task.execution.take import take
from celery_redlock.task.execution.waiting_line import leave_line
from celery_redlock.task.messages.waiting import FIRST_BY_ITSELF
from celery_redlock.task.policies import (
    Fail,
    Queue,
    Reschedule,
    Retry,
    RunUnlocked,
    Skip,
    no_branch_for,
)

__all__ = ["report", "report_unnamed", "warn_once"]

logger = get_logger(__name__)

#: What a body sees in place of its lock.
WHY = "report mode"
_warned: set[str] = set()


def report(claim: Claim) -> Granted:
    """
    Note on the nodes that an execution runs; report it if it would have been refused.

    Takes no longer than ``redlock_node_timeout`` for the locks, and as long for each count of its
    start. Never fails.
    """
    own = None
    try:
        if claim.delivery.envelope.waiting is not None:  # by a worker in the other mode
            leave_line(claim, claim.delivery.envelope.waiting.name)
        own, event = ask(claim)
        if event is not None:
            claim.plugin.notify(event)
    except SoftTimeLimitExceeded:  # of the task
        raise
    except Exception:  # noqa: BLE001  with any error the body runs
        warn_once(claim.task.name, "%s runs, and nothing is reported of it", claim)
    return Granted(claim, NotLocked(claim.name, WHY, clock.wall()), own)


def report_unnamed(claim: Claim, error: Exception) -> Granted:
    """Report that an execution has no lock name, as *error* says, and so would fail."""
    task = claim.task
    if isinstance(error, LockKeyError):
        warn_once(task.name, "%s runs; enforced, it would fail", claim)
        who = {"name": task.name, "task": task.name, "task_id": claim.request.id}
        claim.plugin.notify(TaskRefused(**who, cause="unnamed", report=True))
    else:
        warn_once(task.name, "%s runs, and nothing is reported of it", claim)
    return Granted(claim, NotLocked(task.name, WHY, clock.wall()))


def ask(claim: Claim) -> tuple[HeldLock | None, TaskEvent | None]:
    """Ask once for the lock; return the note, and what to report if it was refused."""
    rounds = 1 + len(claim.rates) + claim.counts_deliveries
    ends = clock.now() + rounds * claim.plugin.settings.rules.node_timeout
    begun = take(claim, 0.0, nothing, ends)
    if isinstance(begun, Refused) and is_behind_previous(begun, ends):
        begun = take(claim, max(0.0, ends - clock.now()), nothing, ends)  # that one may just end
    match begun:
        case Granted():
            return begun.own, None
        case Finished():
            cause = "finished" if begun.is_certain else "unavailable"
            who = {"name": claim.name, "task": claim.task.name, "task_id": claim.request.id}
            return None, TaskSkipped(**who, cause=cause, report=True)
        case Refused():
            return None, refusal_of(begun, ends)


def nothing() -> None:
    """A body that runs without a lock does not lose it."""


def is_behind_previous(refused: Refused, ends: float) -> bool:
    """Return whether the execution before this one has the lock: enforced, this would wait."""
    return refused.situation is Situation.TAKEN and has_previous(refused, ends)


def refusal_of(refused: Refused, ends: float) -> TaskEvent | None:
    if is_behind_previous(refused, ends):
        return None  # it would wait a moment, until that one has released
    claim, told, is_taken = refused.claim, about(refused), refused.situation is Situation.TAKEN
    if is_taken and claim.delivery.is_same_execution(told["holder"]):
        return TaskSkipped(**{**told, "cause": "redelivered"}, report=True)
    return event_of(refused.plan, told, claim.task.default_retry_delay)


def event_of(  # noqa: PLR0911  one for each plan
    plan: Plan, told: dict[str, Any], retry_delay: float
) -> TaskEvent | None:
    """Return what *plan* would have made of a task that was refused for the first time."""
    match plan:
        case RunUnlocked():
            return None
        case Skip():
            return TaskSkipped(**told, report=True)
        case Fail():
            return TaskRefused(**told, report=True)
        case Retry(countdown=countdown):
            in_seconds = float(retry_delay if countdown is None else countdown)
            return TaskRetried(**told, countdown=in_seconds, report=True)
        case Queue():
            first, since = float(FIRST_BY_ITSELF), clock.wall()
            return TaskQueued(**told, countdown=first, times=1, since=since, report=True)
        case Reschedule(base=base):
            return TaskRescheduled(**told, countdown=base, times=1, report=True)
        case SetAside():
            return TaskRescheduled(**told, countdown=UNTIL_THAT_ENDS.base, times=1, report=True)
        case _:
            return no_branch_for(plan)


def warn_once(task: str, words: str, *args: Any) -> None:
    """Log the error that is being handled: as a warning the first time for *task*."""
    level = logging.DEBUG if task in _warned else logging.WARNING
    _warned.add(task)
    logger.log(level, words, *args, exc_info=True)
