"""
Report mode: the body runs whatever the nodes say, and an event says what would have happened.

    names --> one bounded round, on keys of its own --> granted:  noted until its end, as if locked
                                                    --> refused:  the event of its policy
                                                    --> no answer, or any error: the same
          --> body, in any case

An enforced lock never meets such a note, and a note never meets an enforced lock.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery.exceptions import SoftTimeLimitExceeded

from celery_redlock.errors import LockKeyError, LockNotAcquired, LockTaken
from celery_redlock.events import (
    TaskEvent,
    TaskQueued,
    TaskRefused,
    TaskRescheduled,
    TaskRetried,
    TaskSkipped,
)
from celery_redlock.lock import clock
from celery_redlock.lock.held import NotLocked
from celery_redlock.lock.wanted import MarkerStands
from celery_redlock.log import get_logger
from celery_redlock.task.begin import has_previous
from celery_redlock.task.policies import (
    Fail,
    Policy,
    Queue,
    Reschedule,
    Retry,
    RunUnlocked,
    Skip,
    no_branch_for,
)
from celery_redlock.task.refused import description, policy_for
from celery_redlock.task.taking import leave_line, take
from celery_redlock.task.task_lock import names_of_call
from celery_redlock.task.waiting import FIRST_BY_ITSELF

if TYPE_CHECKING:
    from celery_redlock.task.execution import Execution

__all__ = ["report", "warn_once"]

logger = get_logger(__name__)

#: What a body sees in place of its lock.
WHY = "report mode"
_warned: set[str] = set()


def report(execution: Execution, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """
    Note on the nodes that *execution* runs; report it if it would have been refused.

    Takes no longer than ``redlock_node_timeout``, and never fails.
    """
    task = execution.task
    execution.held = NotLocked(task.name, WHY, clock.wall())
    try:
        execution.names = names_of_call(task, args, kwargs, execution.delivery)
        execution.name = execution.names[0]
        execution.held = NotLocked(execution.name, WHY, clock.wall())
        leave_queue(execution)
        event = refusal_of(execution)
        if event is not None:
            execution.plugin.notify(event)
    except SoftTimeLimitExceeded:  # of the task
        raise
    except LockKeyError:
        warn_once(task.name, "%s runs; enforced, it would fail", execution)
        about = {"name": task.name, "task": task.name, "task_id": execution.request.id}
        execution.plugin.notify(TaskRefused(**about, cause="unnamed", report=True))
    except Exception:  # noqa: BLE001  with any error the body runs
        warn_once(task.name, "%s runs, and nothing is reported of it", execution)


def leave_queue(execution: Execution) -> None:
    """Let others have the enforced lock that a worker in the other mode had it wait for."""
    waiting = execution.delivery.envelope.waiting
    if waiting is not None:
        leave_line(execution, waiting)


def refusal_of(execution: Execution) -> TaskEvent | None:
    """Ask once for the lock; return what to report if it was refused."""
    options, task, request = execution.options, execution.task, execution.request
    ends = clock.now() + execution.plugin.settings.rules.node_timeout
    try:
        try:
            take(execution, 0.0, ends=ends)
        except LockTaken as error:
            if not has_previous(execution, error, ends):
                raise
            take(execution, max(0.0, ends - clock.now()), ends=ends)  # that one may just end
    except MarkerStands as marker:
        cause = "finished" if marker.state else "unavailable"
        about = {"name": execution.name, "task": task.name, "task_id": request.id}
        return TaskSkipped(**about, cause=cause, report=True)
    except LockNotAcquired as error:
        about = description(task, request, error)
        if isinstance(error, LockTaken):
            if has_previous(execution, error, ends):
                return None  # it would wait a moment, until that one has released
            if execution.delivery.is_same_execution(error.holder):
                return TaskSkipped(**{**about, "cause": "redelivered"}, report=True)
        waits = isinstance(error, LockTaken) and options.reruns
        policy = Reschedule() if waits else policy_for(error, options)
        return event_of(policy, about, task.default_retry_delay, is_eager=request.is_eager)
    return None


def event_of(  # noqa: PLR0911  one for each policy
    policy: Policy, about: dict[str, Any], retry_delay: float, *, is_eager: bool
) -> TaskEvent | None:
    """
    Return what *policy* would have made of a task that was refused for the first time.

    Args:
        policy: Of the task, for the cause.
        about: Fields of every such event.
        retry_delay: Of the task, for a retry whose policy has no countdown [s].
        is_eager: Whether nothing could come later.

    Returns:
        The event; None if the body would have run in any case.
    """
    match policy:
        case RunUnlocked():
            return None
        case Skip():
            return TaskSkipped(**about, report=True)
        case Retry(countdown=countdown) if not is_eager:
            in_seconds = float(retry_delay if countdown is None else countdown)
            return TaskRetried(**about, countdown=in_seconds, report=True)
        case Queue() if not is_eager:
            first, since = float(FIRST_BY_ITSELF), clock.wall()
            return TaskQueued(**about, countdown=first, times=1, since=since, report=True)
        case Reschedule() if not is_eager and policy.max_reschedules != 0:
            return TaskRescheduled(**about, countdown=policy.base, times=1, report=True)
        case Fail() | Retry() | Queue() | Reschedule():
            return TaskRefused(**about, report=True)
        case _:
            return no_branch_for(policy)


def warn_once(task: str, words: str, *args: Any) -> None:
    """Log the error that is being handled: as a warning the first time for *task*."""
    level = logging.DEBUG if task in _warned else logging.WARNING
    _warned.add(task)
    logger.log(level, words, *args, exc_info=True)
