"""
What would become of another call of a task now, in plain words: from its options, asking nobody.

The order is that of a call's life: what ``apply_async`` would do, then what a worker would.
"""

from __future__ import annotations

from typing import Any

from celery_redlock.lock.votes import Verdict
from celery_redlock.ops.listing import scalar
from celery_redlock.ops.text import LONGEST, one_line
from celery_redlock.reading.stored import StoredReservation
from celery_redlock.task.options import LockOptions
from celery_redlock.task.policies import Fail, Policy, Reschedule, Retry, Skip

__all__ = ["at_publish", "at_run"]


def at_run(task: Any, options: LockOptions, verdict: Verdict) -> str:
    """
    Return what a worker would do with another call of *task* now.

    Args:
        task: The task; asked for its retries.
        options: Of its lock.
        verdict: What the nodes would say to it.
    """
    if verdict is Verdict.GRANTED:
        return "A worker that starts it now gets the lock."
    if verdict is Verdict.TAKEN and options.reruns:
        return "A worker that gets it now sets it aside until the one before it has ended."
    policy = options.on_conflict if verdict is Verdict.TAKEN else options.on_unavailable
    option = "on_conflict" if verdict is Verdict.TAKEN else "on_unavailable"
    patience = (
        f"A worker that gets it now tries for {options.wait:g} s (lock_wait); then it "
        if options.wait
        else "A worker that gets it now does not wait (lock_wait is 0); it "
    )
    return f"{patience}{in_words(task, options, policy)} ({option})."


def in_words(task: Any, options: LockOptions, policy: Policy) -> str:
    """Return what *policy* does, as the rest of a sentence that begins with "it"."""
    if isinstance(policy, Skip):
        chain = "ends there" if options.stops_chain else "goes on with that value"
        return (
            "is skipped: its body does not run, it succeeds with a Skipped value, and a chain that "
            f"it is part of {chain}"
        )
    if isinstance(policy, Fail):
        return "fails, visibly to its caller"
    if isinstance(policy, Retry):
        if task.max_retries == 0:
            return "fails at once, as its max_retries is 0"
        return f"is retried {retry_pace(task, policy)}, {retries_of(task)}"
    if isinstance(policy, Reschedule):
        return (
            f"is rescheduled, after {policy.base:g} s at first and {policy.cap:g} s at "
            f"most, {limit_of(policy)}"
        )
    return "runs WITHOUT a lock"


def retry_pace(task: Any, policy: Retry) -> str:
    """Return when a retry comes."""
    if policy.countdown is not None:
        return f"in {policy.countdown:g} s"
    if getattr(task, "retry_backoff", None):
        return "by its retry_backoff"
    return f"in {float(task.default_retry_delay):g} s"


def retries_of(task: Any) -> str:
    """Return how often *task* may be retried."""
    return "without end" if task.max_retries is None else f"{task.max_retries} times at most"


def limit_of(policy: Reschedule) -> str:
    """Return how often *policy* puts a task off."""
    limit = policy.max_reschedules
    return "without end" if limit is None else f"{limit} times; then it fails"


def at_publish(
    options: LockOptions,
    queued: StoredReservation | None,
    following: StoredReservation | None,
    *,
    is_quorate: bool = True,
) -> str | None:
    """
    Return what ``apply_async`` would do with another call now; None where it just publishes.

    Args:
        options: Of the task.
        queued: Who is queued or runs, for a majority of the nodes.
        following: Who waits for that one to end.
        is_quorate: Whether a majority of the nodes votes.
    """
    if options.unique_until is None:
        return None
    if not is_quorate:
        if isinstance(options.on_unavailable, Fail):
            return "apply_async raises QuorumUnavailable (on_unavailable)."
        return "apply_async publishes it, queued already or not: no quorum could say."
    return where_told(options, queued, following)


def where_told(
    options: LockOptions, queued: StoredReservation | None, following: StoredReservation | None
) -> str:
    """Return what `at_publish` would, where the nodes tell who is *queued* and *following*."""
    if queued is None and following is None:
        return "apply_async publishes it: none is queued."
    stands = following or queued
    assert stands is not None
    first = f"task {one_line(scalar(stands.info.get('task_id')) or '?', LONGEST)}"
    if options.on_duplicate == "fail":
        return f"apply_async raises DuplicateTask: {first} stands for it."
    if options.on_duplicate == "join":
        return f"apply_async publishes nothing and returns the result of {first}."
    if queued is not None and not queued.waiting and following is None:
        return f"apply_async publishes it as the next run, which waits for the end of {first}."
    return f"apply_async publishes nothing; its arguments are handed over to {first}."
