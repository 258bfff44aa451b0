"""
Forecast of what would happen to another call of a task now, in words: from its options alone.

The order is that of a call's life: what ``apply_async`` would do, then what a worker would.
"""

from __future__ import annotations

from typing import Any

from celery_redlock.lock.scripts.votes import Verdict
from celery_redlock.ops.text import LONGEST, one_line, scalar
from celery_redlock.reading.stored import StoredReservation
from celery_redlock.task.execution.plan import Plan, SetAside, Situation, plan
from celery_redlock.task.options import LockOptions
from celery_redlock.task.policies import (
    Fail,
    Queue,
    Reschedule,
    Retry,
    RunUnlocked,
    Skip,
    no_branch_for,
)
from celery_redlock.words import counted

__all__ = ["GETS_IT", "at_publish", "at_run"]

GETS_IT = "A worker that starts it now gets the lock."
STARTS_IT = "A worker that gets it now runs it: lock_rate allows the start."


def at_publish(
    options: LockOptions,
    queued: StoredReservation | None,
    following: StoredReservation | None,
    *,
    is_quorate: bool = True,
) -> str | None:
    """
    Return what ``apply_async`` would do with another call now; None where it just publishes.

    *queued* is who is queued or runs, for a majority of the nodes, *following* who waits for its
    end.
    """
    if options.debounce:
        latest = f"{options.longest_burst:g} s after the first call of its burst"
        return (
            f"apply_async publishes it for in {options.debounce:g} s, {latest} at the latest; it "
            "runs unless a newer one comes."
        )
    if options.unique_until is None:
        return None
    stands, deed = following or queued, "publishes it: none is queued."
    if not is_quorate and isinstance(options.on_unavailable, Fail):
        deed = "raises QuorumUnavailable (on_unavailable)."
    elif not is_quorate:
        deed = "publishes it, queued already or not: no quorum could say."
    elif stands is not None:
        deed = at_duplicate(options, stands, is_next=stands is following)
    return f"apply_async {deed}"


def at_duplicate(options: LockOptions, stands: StoredReservation, *, is_next: bool) -> str:
    first = f"task {one_line(scalar(stands.info.get('task_id')) or '?', LONGEST)}"
    if options.on_duplicate == "fail":
        return f"raises DuplicateTask: {first} stands for it."
    if options.on_duplicate == "join":
        return f"publishes nothing and returns the result of {first}."
    if is_next or stands.waiting:
        return f"publishes nothing; its arguments are handed over to {first}."
    return f"publishes it as the next run, which waits for the end of {first}."


def at_run(
    task: Any,
    options: LockOptions,
    verdict: Verdict,
    places: int = 1,
    *,
    is_over_rate: bool = False,
) -> str:
    """
    Return what a worker would do with another call now.

    Args:
        task: Of the call.
        options: Of the task.
        verdict: On its locks, and on its start.
        places: How many the lock has of which it has most.
        is_over_rate: Whether it would get its locks, and not its start.
    """
    if verdict is Verdict.GRANTED:
        return GETS_IT if options.limit else STARTS_IT
    situation = Situation.TAKEN if verdict is Verdict.TAKEN else Situation.UNAVAILABLE
    situation = Situation.OVER_RATE if is_over_rate else situation
    waits_for = "a start is allowed" if is_over_rate else "the lock is released"
    planned = plan(options, situation, is_last=bool(options.debounce))
    deed = in_words(task, options, planned, waits_for)
    if isinstance(planned, SetAside):
        return f"A worker that gets it now {deed}."
    option = "on_conflict" if verdict is Verdict.TAKEN else "on_unavailable"
    patience = "does not wait (lock_wait is 0); it"
    if options.wait:
        patience = f"tries for {options.wait:g} s (lock_wait); then it"
    full = f", and finds none of {places} places free," if places > 1 else ""
    if is_over_rate:
        full = ", and finds as many starts as lock_rate allows,"
    return f"A worker that gets it now{full} {patience} {deed} ({option})."


def in_words(  # noqa: PLR0911  one for each plan
    task: Any, options: LockOptions, planned: Plan, waits_for: str
) -> str:
    """Return the rest of a sentence that begins with "it"; *waits_for* is what ends a wait."""
    match planned:
        case Skip():
            chain = "ends there" if options.stops_chain else "goes on with that value"
            return (
                "is skipped: its body does not run, it succeeds with a Skipped value, and a chain "
                f"that it is part of {chain}"
            )
        case Fail():
            return "fails, visibly to its caller"
        case Retry():
            return retried(task, planned)
        case Reschedule():
            pace = f"after {planned.base:g} s at first and {planned.cap:g} s at most"
            return f"is rescheduled, {pace}, {times(planned.max_reschedules, '; then it fails')}"
        case Queue():
            waits = f"waits as a message until {waits_for}"
            end = "fails" if planned.then == "fail" else "is skipped"
            most = planned.max_waiting
            return waits if most is None else f"{waits}, unless {most} wait already; then it {end}"
        case RunUnlocked():
            return "runs WITHOUT a lock"
        case SetAside():
            return "sets it aside until the one before it has ended"
        case _:
            return no_branch_for(planned)


def retried(task: Any, policy: Retry) -> str:
    if task.max_retries == 0:
        return "fails at once, as its max_retries is 0"
    pace = f"in {float(task.default_retry_delay):g} s"
    if policy.countdown is not None:
        pace = f"in {policy.countdown:g} s"
    elif getattr(task, "retry_backoff", None):
        pace = "by its retry_backoff"
    return f"is retried {pace}, {times(task.max_retries, ' at most')}"


def times(limit: int | None, then: str) -> str:
    return "without end" if limit is None else f"{counted(limit, 'time')}{then}"
