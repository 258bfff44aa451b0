"""
Checks of what a user's class, or another base beside ours, overrides.

Everything that Celery offers may be overridden, with or without ``super()``. A ``__call__`` that
would bypass the lock is wrapped; whatever else would cost the lock is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from celery import Task
from kombu.utils.imports import symbol_by_name

from celery_redlock.errors import ConfigurationError
from celery_redlock.process.log import get_logger
from celery_redlock.task.declared import METHODS, classes_before
from celery_redlock.task.execution.calls import call
from celery_redlock.task.options import OPTIONS

__all__ = ["check_bases", "check_body", "check_request", "protect", "warn_of_replaced"]

logger = get_logger(__name__)

#: Bodies that have not begun when they return -> how such a one is called.
UNBEGUN = {
    inspect.iscoroutinefunction: "a coroutine (async def)",
    inspect.isasyncgenfunction: "an asynchronous generator (async def with yield)",
    inspect.isgeneratorfunction: "a generator (it has a yield)",
}


def protect(cls: Any, base: type) -> None:
    """Put the lock around a ``__call__`` that stands before ours, and may never call it."""
    theirs = inspect.getattr_static(cls, "__call__")
    if theirs is vars(base)["__call__"] or getattr(theirs, "__globals__", None) is globals():
        return  # a function of this file has the lock around it
    if not callable(theirs):
        raise ConfigurationError(
            f"{cls.name or cls.__qualname__}: __call__ must be a method, got {theirs!r}"
        )
    cls.__call__ = locked(theirs)


def locked(theirs: Any) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  it is one
        is_descriptor = hasattr(theirs, "__get__")  # a function is, a partial() is not
        inherited = theirs.__get__(self, type(self)) if is_descriptor else theirs
        return call(self, inherited, args, kwargs)

    return __call__


def check_bases(task: Any, base: type) -> None:
    bases = type(task).__mro__
    for cls in classes_before(task, base):
        check_before(task.name, cls, base)
    for cls in bases[bases.index(base) + 1 :]:
        check_behind(task.name, cls, base)


def check_before(task: str, cls: type, base: type) -> None:
    for attribute in filter(vars(cls).__contains__, METHODS):
        if attribute == "lock_name":
            check_lock_name(task, vars(cls)[attribute])
        else:
            raise ConfigurationError(
                f"{task}: {attribute} is what {base.__name__} needs for itself; rename yours"
            )


def check_lock_name(task: str, value: Any) -> None:
    try:
        inspect.signature(value).bind("self", (), {})
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"{task}: lock_name is a method (self, args, kwargs) -> str, got {value!r}; "
            "did you mean lock_key?"
        ) from None


def check_behind(task: str, cls: type, base: type) -> None:
    for attribute in filter(vars(cls).__contains__, (*OPTIONS, *METHODS)):
        raise ConfigurationError(
            f"{task}: {cls.__qualname__}.{attribute} has no effect behind {base.__name__}, "
            f"which has it too; name {cls.__qualname__} before {base.__name__}"
        )


def check_body(task: Any, base: Any) -> None:
    """
    Check that the body of *task* has ended when it returns, unless a ``__call__`` runs it.

    A coroutine or a generator runs later, after the release.
    """
    if type(task).__call__ is not base.__call__:  # it may wait for the end of its body
        return
    body = task.run
    while is_celerys(body) and hasattr(body, "__wrapped__"):
        body = body.__wrapped__  # for autoretry and pydantic; they return what the body does
    for is_of, what in UNBEGUN.items():
        if is_of(body):
            raise ConfigurationError(
                f"{task.name}: its body is {what}, which runs after it has returned, without the "
                "lock; make it a plain function, which waits for the end, as by asyncio.run()"
            )


def is_celerys(function: Any) -> bool:
    """Whether *function* is of Celery's own code, whatever it says of itself."""
    home: dict[str, Any] = getattr(function, "__globals__", {})
    return str(home.get("__name__")).startswith("celery.")


def check_request(task: Any, base: Any) -> None:
    """Check that executions of *task* come to us, and a worker can release for dead children."""
    if task.Strategy != base.Strategy:
        where = next(cls for cls in type(task).__mro__ if "Strategy" in vars(cls))
        raise ConfigurationError(
            f"{task.name}: {where.__qualname__}.Strategy runs the task in its own way, past the "
            "lock, as that of celery-batches does"
        )
    if task.Request == base.Request:
        return  # not looked up where it is unchanged: that imports Celery's worker
    ours, theirs = symbol_by_name(base.Request), symbol_by_name(task.Request)
    if not (inspect.isclass(theirs) and issubclass(theirs, ours)):
        where = next(cls for cls in type(task).__mro__ if "Request" in vars(cls))
        raise ConfigurationError(
            f"{task.name}: {where.__qualname__}.Request = {task.Request!r} would not release the "
            f"lock of a process that is killed; derive it from {ours.__module__}."
            f"{ours.__qualname__}"
        )


def warn_of_replaced(app: Any, tasks: Iterable[Any]) -> None:
    """
    Warn of *tasks* without the ``__call__`` of their app's own class.

    ``base=`` takes the place of ``task_cls=``. That of Flask's factory opens the app context.
    """
    own = next(cls for cls in app.Task.__mro__ if "__call__" in vars(cls))
    names = [task.name for task in tasks if not isinstance(task, own)]
    if names and own is not Task:
        logger.warning(
            "base= takes the place of the app's own class: %s run(s) without the __call__ of %s. "
            "Derive %s from RedlockTask, or have a base that is both",
            ", ".join(names),
            own.__qualname__,
            own.__name__,
        )
