"""The plan for a task that was not granted its lock: what its policy means in a situation."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from celery_redlock.task.execution.outcome import Outcome
from celery_redlock.task.options import LockOptions
from celery_redlock.task.policies import Fail, Policy, Queue, Reschedule, Retry, Skip

__all__ = ["Plan", "PutOff", "SetAside", "Situation", "plan", "policy_for"]


class Situation(enum.Enum):
    """Why a task was not granted its lock."""

    #: Another execution holds it.
    TAKEN = "taken"
    #: No quorum of nodes could decide.
    UNAVAILABLE = "unavailable"
    #: Another delivery of the same execution holds it.
    ELSEWHERE = "elsewhere"
    #: The execution before it has not released it: the one it retries, or its parent in a chain.
    PREVIOUS = "previous"
    #: As many have started as its rate allows for now.
    OVER_RATE = "over rate"
    #: Its message was started as often as it may be.
    TOO_OFTEN = "too often"
    #: It is the next run, and the run before it has not ended.
    NEXT = "next"


@dataclass(frozen=True)
class SetAside:
    """
    The same execution is delivered again when the lock is released, whatever the policy.

    Attributes:
        reason: Why.
        outcome: Of this delivery.
        may_fail: Whether the task fails where no copy can be published; else another delivery
            stores its result.
    """

    reason: str
    outcome: Outcome
    may_fail: bool = True


Plan = Policy | SetAside
#: The task is delivered again.
PutOff = Retry | Reschedule | Queue | SetAside

#: To fail would stand for the result of the one that runs.
RUNS_ELSEWHERE = SetAside("the same execution runs elsewhere", Outcome.SET_ASIDE, may_fail=False)
BEHIND_PREVIOUS = SetAside("the execution before it has not ended", Outcome.SET_ASIDE)
NEXT_RUN = SetAside("the run before it has not ended", Outcome.REQUEUED)
HAS_BEGUN = SetAside("it has begun before, and its rate allows no start now", Outcome.REQUEUED)


WHATEVER_THE_POLICY: dict[Situation, Plan] = {
    Situation.ELSEWHERE: RUNS_ELSEWHERE,
    Situation.PREVIOUS: BEHIND_PREVIOUS,
    Situation.NEXT: NEXT_RUN,
    Situation.TOO_OFTEN: Fail(),
}


def policy_for(options: LockOptions, situation: Situation) -> Policy:
    if situation in {Situation.TAKEN, Situation.OVER_RATE}:
        return options.on_conflict
    return options.on_unavailable


def plan(
    options: LockOptions,
    situation: Situation,
    *,
    is_eager: bool = False,
    reschedules: int = 0,
    is_full: bool = False,
    is_last: bool = False,
    has_begun: bool = False,
) -> Plan:
    """
    Return what happens to a task that was not granted its lock.

    ==================  =============  ==============================  ===================
    situation           policy         but if                          then
    ==================  =============  ==============================  ===================
    taken               any            the task runs again (`reruns`)  set aside
    taken               skip           it is the last call of a burst  set aside
    taken, unavailable  skip           -                               skip
    taken, unavailable  fail           -                               fail
    taken, unavailable  retry          it is eager                     fail
    taken, unavailable  reschedule     it is eager, or has been        fail
                                       rescheduled as often as it may
    taken               queue          it is eager                     fail
    taken               queue          the queue is full               skip or fail
    unavailable         run_unlocked   -                               run without a lock
    too often           any            -                               fail
    any other           any            -                               set aside
    ==================  =============  ==============================  ===================

    Over its rate it is as taken, but one that has begun before is set aside where it would be
    skipped: what it lost to may be its own start.

    Args:
        options: Of the task.
        situation: Why it was not granted the lock.
        is_eager: Whether nothing can come later.
        reschedules: How often it was rescheduled.
        is_full: Whether as many tasks wait for the lock as may.
        is_last: Whether it stands for the calls of a burst that it has superseded.
        has_begun: Whether its body may have been at work before: it is a retry, was delivered
            again, or replaces itself.
    """
    if situation in WHATEVER_THE_POLICY:
        return WHATEVER_THE_POLICY[situation]
    policy = policy_for(options, situation)
    if situation is not Situation.UNAVAILABLE:
        has_to_run = (options.reruns and not is_eager) or (is_last and policy == Skip())
        if has_to_run:
            return NEXT_RUN
    may_be_its_own = situation is Situation.OVER_RATE and has_begun and not is_eager
    if may_be_its_own and policy == Skip():
        return HAS_BEGUN
    return effective(policy, is_eager=is_eager, reschedules=reschedules, is_full=is_full)


def effective(policy: Policy, *, is_eager: bool, reschedules: int, is_full: bool) -> Policy:
    match policy:
        case Retry() | Reschedule() | Queue() if is_eager:
            return Fail()
        case Queue() if is_full:
            return policy.overflow
        case Reschedule(max_reschedules=int(most)) if reschedules >= most:
            return Fail()
    return policy
