"""
Policies for a task that was not granted its lock, as values.

A policy does nothing itself: `celery_redlock.task.execution.plan` says what it means.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.clock import jitter
from celery_redlock.lock.rules import in_seconds
from celery_redlock.settings import one_of

__all__ = [
    "Fail",
    "Policy",
    "Queue",
    "Reschedule",
    "Retry",
    "RunUnlocked",
    "Skip",
    "at_the_end",
    "no_branch_for",
    "no_later",
    "policy_of",
]


@dataclass(frozen=True)
class Skip:
    """The body does not run; the task succeeds with a `Skipped` value."""


@dataclass(frozen=True)
class Fail:
    """The task fails with `LockTaken` or `QuorumUnavailable`."""


@dataclass(frozen=True)
class Retry:
    """
    Celery's own retry: state RETRY, counts toward ``max_retries``.

    Attributes:
        countdown: When [s from now, >= 0, or a timedelta]; None for the task's ``retry_backoff`` or
            ``default_retry_delay``. In whole seconds, and not before 1 s has passed.
    """

    countdown: float | None = None

    def __init__(self, countdown: float | timedelta | None = None) -> None:
        seconds = None if countdown is None else in_seconds("Retry(countdown=...)", countdown)
        object.__setattr__(self, "countdown", seconds)  # as frozen dataclasses set their fields


@dataclass(frozen=True)
class Reschedule:
    """
    The same task is published again for later; costs none of its retries.

    Attributes:
        base: Longest delay of the first time [s, > 0, or a timedelta]; doubles each time.
        cap: Longest delay [likewise, >= base]. The end of a quarantine is waited for at once.
        max_reschedules: How often before the task fails [>= 0]; None for no limit.
    """

    base: float = 1.0
    cap: float = 60.0
    max_reschedules: int | None = None

    def __init__(
        self,
        base: float | timedelta = 1.0,
        cap: float | timedelta = 60.0,
        max_reschedules: int | None = None,
    ) -> None:
        object.__setattr__(self, "base", in_seconds("Reschedule(base=...)", base))
        object.__setattr__(self, "cap", in_seconds("Reschedule(cap=...)", cap))
        object.__setattr__(self, "max_reschedules", max_reschedules)
        if not 0 < self.base <= self.cap:
            raise ConfigurationError(
                f"Reschedule: 0 < base <= cap must hold, got base={base!r}, cap={cap!r}"
            )
        limit = max_reschedules
        if limit is not None and (type(limit) is not int or limit < 0):
            raise ConfigurationError(
                "Reschedule(max_reschedules=...) must be a whole number >= 0 or None, "
                f"got {limit!r}"
            )

    def countdown(
        self, times: int, longest: float, chance: Callable[[float, float], float] = jitter
    ) -> int:
        """
        Return when to try again [whole s, >= 1]: exponential backoff with full jitter.

        Args:
            times: How often the task was rescheduled before.
            longest: What the broker can bear [s].
            chance: Draws a number between two bounds.

        Source:
            AWS Architecture Blog, "Exponential Backoff And Jitter" (2015), "full jitter".
        """
        ceiling = min(self.cap, longest, self.base * 2.0 ** min(times, 30))
        return max(1, math.floor(min(self.cap, longest, math.ceil(chance(0.0, ceiling)))))


@dataclass(frozen=True)
class Queue:
    """
    The same task waits until the lock is released; costs none of its retries.

    Whoever has waited longest is woken first, as far as can be. Only for ``on_conflict``.

    Attributes:
        max_waiting: How many tasks may wait for one lock [>= 1]; None for any number.
        then: What happens to a task when so many wait already: ``"fail"`` or ``"skip"``.
    """

    max_waiting: int | None = None
    then: str = "fail"

    def __post_init__(self) -> None:
        most = self.max_waiting
        if most is not None and (type(most) is not int or most < 1):
            raise ConfigurationError(
                f"Queue(max_waiting=...) must be a whole number >= 1 or None, got {most!r}"
            )
        one_of("Queue(then=...)", self.then, ("fail", "skip"))

    @property
    def overflow(self) -> Fail | Skip:
        """What happens to a task when enough wait already."""
        return Skip() if self.then == "skip" else Fail()


@dataclass(frozen=True)
class RunUnlocked:
    """The body runs without a lock, with a warning. Only where no quorum could decide."""


#: How much later than the end of a quarantine a task may come [s]: not all at once.
JITTER_AFTER_QUARANTINE = 0.5


def no_later(
    countdown: int, ends: float | None, chance: Callable[[float, float], float] = jitter
) -> int:
    """
    Return *countdown*, or when the quarantine is over that the task waits for if that is sooner.

    *ends* is when asking again may help, as in `QuorumUnavailable.retry_after`; None if unknown.
    """
    if ends is None:
        return countdown
    return min(countdown, at_the_end(ends, chance))


def at_the_end(ends: float, chance: Callable[[float, float], float] = jitter) -> int:
    """Return when to try again that cannot succeed before *ends* [whole s, >= 1]."""
    return max(1, math.ceil(ends + chance(0.0, JITTER_AFTER_QUARANTINE)))


Policy = Skip | Fail | Retry | Reschedule | Queue | RunUnlocked


def no_branch_for(policy: NoReturn) -> NoReturn:
    """End a match over all policies; a type checker finds the one that has no branch."""
    raise AssertionError(f"no branch for {policy!r}")


WORDS: dict[str, Callable[[], Policy]] = {
    "skip": Skip,
    "fail": Fail,
    "retry": Retry,
    "reschedule": Reschedule,
    "queue": Queue,
    "run_unlocked": RunUnlocked,
}


def policy_of(option: str, value: object) -> Policy:
    """
    Return the policy that *value* stands for: a policy, its class, or one of the words.

    Raises ConfigurationError: it is none, or `RunUnlocked` where somebody holds the lock, or
    `Queue` where nobody may.
    """
    policy = value() if isinstance(value, type) and value in WORDS.values() else value
    if not isinstance(policy, Policy):
        policy = WORDS[one_of(option, policy, tuple(WORDS))]()
    if isinstance(policy, RunUnlocked) and option.endswith("on_conflict"):
        raise ConfigurationError(
            f"{option} = 'run_unlocked' would run beside the holder; "
            "it goes with on_unavailable only"
        )
    if isinstance(policy, Queue) and not option.endswith("on_conflict"):
        raise ConfigurationError(
            f"{option} = 'queue' has nobody to wait for where no quorum could decide; it goes with "
            "on_conflict only, use 'reschedule' here"
        )
    return policy
