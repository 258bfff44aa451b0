"""The options of a task: its attributes over the app's settings, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from celery import Task

from celery_redlock.errors import ConfigurationError, LockKeyError
from celery_redlock.lock.records import rate_name
from celery_redlock.lock.rules import flag, in_seconds, positive
from celery_redlock.lock.waiting.waiting import MOST_PLACES
from celery_redlock.settings import MODES, PREFIX, Settings, deliveries, one_of, report_prefix
from celery_redlock.task.option_names import BUILT_IN, OPTIONS
from celery_redlock.task.policies import Policy, policy_of
from celery_redlock.task.rate import Rate, rate_of

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
#: How many places of a lock are looked at where only a call says how many it has.
MOST_BY_CALL = 100
#: How long a burst lasts at most where the task does not say, in terms of its ``debounce``.
DEBOUNCES = 6


def one_of_words(*words: str) -> Callable[[str, object], str]:
    return lambda where, value: one_of(where, value, words)


def long_time(where: str, value: Any) -> float:
    seconds = positive(where, value)
    if seconds > LONGEST_UNIQUE_FOR:
        raise ConfigurationError(
            f"{where} must be at most {LONGEST_UNIQUE_FOR:g} s, a year; got {value!r}"
        )
    return seconds


overlap_word = one_of_words(*OVERLAP)


def limit_of(where: str, value: Any) -> int:
    if type(value) is int and 1 <= value <= MOST_PLACES:
        return value
    raise ConfigurationError(
        f"{where} must be a whole number from 1 to {MOST_PLACES}, a callable "
        "(task, args, kwargs) -> int, a template like '{plan.seats}', a tuple with one for each "
        f"name that lock_key makes, or None beside lock_rate; got {value!r}"
    )


def is_by_call(value: Any) -> bool:
    return (callable(value) and not isinstance(value, type)) or (
        isinstance(value, str) and "{" in value
    )


def unbound(value: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a task's attribute is: it comes back bound to the task."""
    if inspect.ismethod(value) and isinstance(value.__self__, Task):
        return value.__func__
    return value


def check_by_call(where: str, value: Any) -> None:
    """Raise ConfigurationError if *value* is a callable that cannot be called as it will be."""
    if callable(value):
        try:
            inspect.signature(unbound(value)).bind(None, (), {})
        except TypeError as error:
            raise ConfigurationError(
                f"{where}={value!r} must take (task, args, kwargs): {error}"
            ) from None
        except ValueError:
            return  # written in C, without a signature; the first call will tell


def each(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def check_each(check: Callable[[str, Any], Any]) -> Callable[[str, Any], None]:
    """Return what checks an option that has one value for all names, or one for each."""

    def check_value(where: str, value: Any) -> None:
        for one in each(value) or (None,):
            if is_by_call(one):
                check_by_call(where, one)
            else:
                check(where, one)

    return check_value


def for_names(option: str, values: tuple[Any, ...], names: Sequence[str]) -> dict[str, Any]:
    """Return each of *names*, in their order, and its value of *option*."""
    if len(values) == 1:
        return dict.fromkeys(names, values[0])
    if len(values) != len(names):
        raise LockKeyError(
            f"{option} has {len(values)} values and lock_key made {len(names)} names; "
            "give one value for each name, or one for all"
        )
    return dict(zip(names, values, strict=True))


def in_call(value: Any, args: Any, kwargs: Any) -> Any:
    return value(args, kwargs) if callable(value) else value


#: Task attribute -> what checks its value: returns it, or raises ConfigurationError that begins
#: with the first argument, where the value was found. The others make the lock name.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "lock_ttl": positive,
    "lock_wait": in_seconds,
    "lock_limit": check_each(limit_of),
    "lock_rate": check_each(rate_of),
    "max_deliveries": deliveries,
    "lock_mode": one_of_words(*MODES),
    "on_conflict": policy_of,
    "on_unavailable": policy_of,
    "on_lock_lost": one_of_words("abort", "warn"),
    "fence": flag,
    "min_hold": in_seconds,
    "dedup_ttl": in_seconds,
    "chain_on_skip": one_of_words("stop", "continue"),
    "unique_until": one_of_words(*UNIQUE_UNTIL),
    "unique_for": long_time,
    "on_duplicate": one_of_words("join", "fail", "rerun"),
    "overlap": overlap_word,
    "debounce": long_time,
    "debounce_max": long_time,
}


@dataclass(frozen=True, kw_only=True)
class LockOptions:
    """
    The options of one task, settings filled in; they mean what those of `RedlockTask` do.

    Attributes:
        limit: How many places the lock has: one number for all names that the task has, or one for
            each; or what gives it in a call, as `celery_redlock.task.naming.by_call` makes it.
            Empty for no lock.
        rate: How often it may start, as a `Rate`, likewise; None for any rate.
        max_deliveries: How often a message may be started; None for any number.
        only_reports: Whether bodies run and messages are published whatever the nodes say.
        aborts_on_loss: Whether `LockLost` is raised in the running body.
        stops_chain: Whether a skip ends the chain that the task is part of.
        unique_until: What ends the reservation; None for a task that takes none.
        debounce: How long a call waits for newer ones [s]; 0.0 for not at all.
        debounce_max: How long the first one of a burst waits at most [s]; 0.0 if nobody says.
    """

    ttl: float
    wait: float
    limit: tuple[Any, ...] = (1,)
    rate: tuple[Any, ...] = (None,)
    max_deliveries: int | None = None
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
    debounce: float = 0.0
    debounce_max: float = 0.0

    def limits(self, names: Sequence[str], args: Any, kwargs: Any) -> dict[str, int]:
        """
        Return each of the *names* of a call, in their order, and how many places its lock has.

        Nothing where it takes no lock. Raises LockKeyError: the call makes no number.
        """
        if not self.limit:
            return {}
        if len(self.limit) == 1 and type(self.limit[0]) is int:  # as most are: on every task's path
            return dict.fromkeys(names, self.limit[0])
        found = for_names("lock_limit", self.limit, names)
        return {name: in_call(limit, args, kwargs) for name, limit in found.items()}

    def rates(self, names: Sequence[str], args: Any, kwargs: Any) -> dict[str, Rate]:
        """Return those of *names* that have a rate in a call, and that; raises as `limits`."""
        if self.rate == (None,):
            return {}
        found = for_names("lock_rate", self.rate, names)
        rates = {name: in_call(rate, args, kwargs) for name, rate in found.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def lines(self, names: Sequence[str], args: Any, kwargs: Any) -> dict[str, int]:
        """Return all for which a call may wait: locks, and the starts of its rates; and places."""
        rates = self.rates(names, args, kwargs)
        starts = {rate_name(name): rate.burst for name, rate in rates.items()}
        return {**self.limits(names, args, kwargs), **starts}

    @property
    def most_places(self) -> int:
        """Of a lock of the task, as far as that is known without a call [>= 1]."""
        return max([MOST_BY_CALL if callable(one) else one for one in self.limit], default=1)

    @property
    def most_starts(self) -> int:
        """Of a rate of the task at once, likewise; 0 without one."""
        rates = [rate for rate in self.rate if rate is not None]
        return max([MOST_BY_CALL if callable(one) else one.burst for one in rates], default=0)

    @property
    def is_by_call(self) -> bool:
        """Whether only a call says how many places there are."""
        return any(map(callable, (*self.limit, *self.rate)))

    @property
    def longest_burst(self) -> float:
        return self.debounce_max or DEBOUNCES * self.debounce

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

        def values_of(option: str, read: Callable[[str, Any], Any]) -> tuple[Any, ...]:
            valid(option)
            values = each(getattr(task, option))
            return tuple(v if is_by_call(v) else read(option, v) for v in values)

        only_rate = task.lock_limit is None and task.lock_rate is not None
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
            limit=() if only_rate else values_of("lock_limit", limit_of),
            rate=values_of("lock_rate", rate_of),
            max_deliveries=valid("max_deliveries"),
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
            debounce=0.0 if task.debounce is None else valid("debounce"),
            debounce_max=0.0 if task.debounce_max is None else valid("debounce_max"),
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
