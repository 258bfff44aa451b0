"""Options whose value a call decides: a callable, or a template over its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from celery_redlock.errors import ConfigurationError, LockKeyError
from celery_redlock.lock.waiting.waiting import MOST_PLACES
from celery_redlock.task.naming.arguments import Parameters, misfit
from celery_redlock.task.naming.template import Field, pieces
from celery_redlock.task.options import LockOptions, is_by_call, limit_of, unbound
from celery_redlock.task.rate import rate_of

__all__ = ["decided_by_calls"]

#: Longest text that may be a number of places [digits].
LONGEST_NUMBER = len(str(MOST_PLACES))


def decided_by_calls(task: Any, options: LockOptions) -> LockOptions:
    """Return the *options* of *task*, those that a call decides as what it is asked with."""
    limit, rate = options.limit, options.rate
    if not any(map(is_by_call, (*limit, *rate))):
        return options
    return replace(
        options,
        limit=tuple(by_call(task, "lock_limit", one, limit_of) for one in limit),
        rate=tuple(by_call(task, "lock_rate", one, rate_of) for one in rate),
    )


def by_call(task: Any, option: str, value: Any, check: Callable[[str, Any], Any]) -> Any:
    """
    Return *value*, an option of *task*; or if a call decides it, what gives it for its arguments.

    That raises LockKeyError: nothing came of it, or nothing that *check* lets pass.
    """
    if not is_by_call(value):
        return value
    kind = "rate" if check is rate_of else f"whole number from 1 to {MOST_PLACES}"
    give = from_template(task, option, value) if isinstance(value, str) else from_call(task, value)

    def checked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            given = give(args, kwargs)
        except LockKeyError:
            raise
        except Exception as error:
            raise LockKeyError(
                f"Task {task.name!r}: its {option} raised {type(error).__name__}"
            ) from error
        try:
            return check(option, given)
        except ConfigurationError:  # its text has the value
            raise LockKeyError(f"Task {task.name!r}: its {option} gave no {kind}") from None

    return checked


def from_call(task: Any, value: Callable[..., Any]) -> Callable[..., Any]:
    function = unbound(value)
    return lambda args, kwargs: function(task, tuple(args), dict(kwargs))


def from_template(task: Any, option: str, template: str) -> Callable[..., Any]:
    parameters, parts = Parameters.of_task(task), pieces(task.name, template, option)
    for part in parts:
        if isinstance(part, Field):
            parameters.check(part.root, f"{option}={template!r}")

    def give(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | int:
        values = parameters.bind(args, kwargs)
        text = "".join(
            part if isinstance(part, str) else part.render(parameters, values) for part in parts
        )
        return int(text) if text.isdecimal() and len(text) <= LONGEST_NUMBER else text

    if not any(isinstance(part, Field) for part in parts):
        raise misfit(task.name, f"{option}={template!r} has no field")
    return give
