"""The options of a task: its attributes over the app's settings, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from celery_redlock.errors import ConfigurationError, LockKeyError
from celery_redlock.lock.rules import flag, in_seconds, positive
from celery_redlock.lock.waiting.waiting import MOST_PLACES
from celery_redlock.settings import MODES, PREFIX, Settings, one_of, report_prefix
from celery_redlock.task.option_names import BUILT_IN, OPTIONS
from celery_redlock.task.policies import Policy, policy_of

__all__ = [
    "BUILT_IN",
    "CHECKS",
    "LONGEST_UNIQUE_FOR",
    "OPTIONS",
    "OVERLAP",
    "LockOptions",
    "overlap_word",
]

UNIQUE_UNTIL = ("started", "finished", "success", "expired")
#: What beat does with a slot while the run of an earlier one has not ended.
OVERLAP = ("skip", "buffer_one", "allow")
#: How long a reservation lasts by itself where the task does not say [s], and at most.
UNIQUE_FOR, LONGEST_UNIQUE_FOR = 3600.0, 366 * 24 * 3600.0


def one_of_words(*words: str) -> Callable[[str, object], str]:
    return lambda where, value: one_of(where, value, words)


def unique_time(where: str, value: Any) -> float:
    seconds = positive(where, value)
    if seconds > LONGEST_UNIQUE_FOR:
        raise ConfigurationError(
            f"{where} must be at most {LONGEST_UNIQUE_FOR:g} s, a year; got {value!r}"
        )
    return seconds


overlap_word = one_of_words(*OVERLAP)


def limit_of(where: str, value: Any) -> tuple[int, ...]:
    limits = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for one in limits or (None,):
        if type(one) is not int or not 1 <= one <= MOST_PLACES:
            raise ConfigurationError(
                f"{where} must be a whole number from 1 to {MOST_PLACES}, or one for each name "
                f"that lock_key makes, got {value!r}"
            )
    return limits


#: Task attribute -> what checks its value: returns it, or raises ConfigurationError that begins
#: with the first argument, where the value was found. The others make the lock name.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "lock_ttl": positive,
    "lock_wait": in_seconds,
    "lock_limit": limit_of,
    "lock_mode": one_of_words(*MODES),
    "on_conflict": policy_of,
    "on_unavailable": policy_of,
    "on_lock_lost": one_of_words("abort", "warn"),
    "fence": flag,
    "min_hold": in_seconds,
    "dedup_ttl": in_seconds,
    "chain_on_skip": one_of_words("stop", "continue"),
    "unique_until": one_of_words(*UNIQUE_UNTIL),
    "unique_for": unique_time,
    "on_duplicate": one_of_words("join", "fail", "rerun"),
    "overlap": overlap_word,
}


@dataclass(frozen=True, kw_only=True)
class LockOptions:
    """
    The options of one task, settings filled in; they mean what those of `RedlockTask` do.

    Attributes:
        limit: One number for all names that the task has, or one for each.
        only_reports: Whether bodies run and messages are published whatever the nodes say.
        aborts_on_loss: Whether `LockLost` is raised in the running body.
        stops_chain: Whether a skip ends the chain that the task is part of.
        unique_until: What ends the reservation; None for a task that takes none.
    """

    ttl: float
    wait: float
    limit: tuple[int, ...] = (1,)
    only_reports: bool = False
    on_conflict: Policy
    on_unavailable: Policy
    aborts_on_loss: bool
    fence: bool
    min_hold: float
    dedup_ttl: float
    stops_chain: bool
    unique_until: str | None
    unique_for: float
    on_duplicate: str
    overlap: str

    def limits(self, names: Sequence[str]) -> dict[str, int]:
        """Return each of *names*, in their order, and how many places its lock has."""
        if len(self.limit) == 1:
            return dict.fromkeys(names, self.limit[0])
        if len(self.limit) != len(names):
            raise LockKeyError(
                f"lock_limit has {len(self.limit)} numbers and lock_key made {len(names)} names; "
                "give one number for each name, or one for all"
            )
        return dict(zip(names, self.limit, strict=True))

    @property
    def reruns(self) -> bool:
        return self.on_duplicate == "rerun"

    @classmethod
    def of(cls, task: Any, settings: Settings) -> LockOptions:
        """Raises ConfigurationError: an option is out of range, or does not fit the others."""
        rules = settings.rules

        def valid(option: str) -> Any:
            own, setting = getattr(task, option), OPTIONS[option]
            if own is None and setting:
                return CHECKS[option](f"{PREFIX}{setting}", settings.default(setting))
            return CHECKS[option](f"{task.name}: {option}", own)

        check_backend(task)
        only_reports = valid("lock_mode") == "report"
        if only_reports:
            report_prefix(rules.prefix)
        min_hold = valid("min_hold")
        if min_hold > rules.max_ttl:
            raise ConfigurationError(
                f"{task.name}: min_hold must be at most redlock_max_ttl ({rules.max_ttl:g} s), "
                f"got {min_hold:g}"
            )
        return cls(
            ttl=rules.check_ttl(valid("lock_ttl"), f"{task.name}: lock_ttl"),
            wait=valid("lock_wait"),
            limit=valid("lock_limit"),
            only_reports=only_reports,
            on_conflict=valid("on_conflict"),
            on_unavailable=valid("on_unavailable"),
            aborts_on_loss=valid("on_lock_lost") == "abort",
            fence=valid("fence"),
            min_hold=min_hold,
            dedup_ttl=valid("dedup_ttl"),
            stops_chain=valid("chain_on_skip") == "stop",
            unique_until=None if task.unique_until is None else valid("unique_until"),
            unique_for=UNIQUE_FOR if task.unique_for is None else valid("unique_for"),
            on_duplicate=valid("on_duplicate"),
            overlap=valid("overlap"),
        )


def check_backend(task: Any) -> None:
    """Raise ConfigurationError if a duplicate's caller could not read the result it is given."""
    named = str(task.app.conf.result_backend or "")
    is_private = named.startswith("rpc") or "celery.backends.rpc" in named
    if is_private and task.unique_until is not None and task.on_duplicate != "fail":
        raise ConfigurationError(
            f"{task.name}: on_duplicate={task.on_duplicate!r} needs a result backend that all can "
            "read, and result_backend='rpc://' keeps each result for the process that published "
            "the task; use another backend (Redis, a database), or on_duplicate='fail'"
        )
