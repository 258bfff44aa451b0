"""
What a user's class, or another base beside ours, must not take from under a task.

Everything that Celery offers may be overridden with or without ``super()``. What would cost
the lock is put right where that is possible (``__call__``), and refused where it is not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from kombu.utils.imports import symbol_by_name

from celery_redlock.errors import ConfigurationError
from celery_redlock.task.calls import call
from celery_redlock.task.options import OPTIONS, classes_before

__all__ = ["check_bases", "check_request", "protect"]


def protect(cls: Any, base: type) -> None:
    """
    Put the lock around a ``__call__`` that stands before ours, and may never reach it.

    Args:
        cls: A task's class.
        base: Our class among its bases.

    Raises:
        ConfigurationError: It is nothing that can be called.
    """
    theirs = inspect.getattr_static(cls, "__call__")
    if theirs is vars(base)["__call__"] or getattr(theirs, "__globals__", None) is globals():
        return  # a function of this file has the lock around it
    if not callable(theirs):
        msg = f"{cls.name or cls.__qualname__}: __call__ must be a method, got {theirs!r}"
        raise ConfigurationError(msg)
    cls.__call__ = locked(theirs)


def locked(theirs: Any) -> Callable[..., Any]:
    """Return a ``__call__`` that runs *theirs* under the lock."""

    @functools.wraps(theirs)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  it is one
        is_descriptor = hasattr(theirs, "__get__")  # a function is, a partial() is not
        inherited = theirs.__get__(self, type(self)) if is_descriptor else theirs
        return call(self, inherited, args, kwargs)

    return __call__


def check_bases(task: Any, base: type) -> None:
    """
    Check what the classes of *task* have under the names of ours.

    Args:
        task: A registered task.
        base: Our class among its bases.

    Raises:
        ConfigurationError: Something of ours is hidden by theirs, or the reverse.
    """
    bases = type(task).__mro__
    check_before(task.name, classes_before(task, base), base)
    check_behind(task.name, bases[bases.index(base) + 1 :], base)


def check_before(task: str, bases: Iterable[type], base: type) -> None:
    """Check that *bases*, which stand before *base*, leave it what it needs."""
    for attribute, value in [item for cls in bases for item in vars(cls).items()]:
        if attribute == "lock_name":
            check_lock_name(task, value)
        elif is_ours(attribute, base) and attribute not in OPTIONS:
            msg = f"{task}: {attribute} is what {base.__name__} needs for itself; rename yours"
            raise ConfigurationError(msg)


def check_lock_name(task: str, value: Any) -> None:
    """Check that *value* can be called as ``RedlockTask.lock_name`` is."""
    try:
        inspect.signature(value).bind("self", (), {})
    except (TypeError, ValueError):
        msg = (
            f"{task}: lock_name is a method (self, args, kwargs) -> str, got {value!r}; "
            "did you mean lock_key?"
        )
        raise ConfigurationError(msg) from None


def check_behind(task: str, bases: Iterable[type], base: type) -> None:
    """Check that nothing in *bases*, which stand behind *base*, is hidden by it."""
    for cls in bases:
        for attribute in filter(lambda name: is_ours(name, base), vars(cls)):
            msg = (
                f"{task}: {cls.__qualname__}.{attribute} has no effect behind {base.__name__}, "
                f"which has it too; name {cls.__qualname__} before {base.__name__}"
            )
            raise ConfigurationError(msg)


def is_ours(attribute: str, base: type) -> bool:
    """Return whether *attribute* is a name that *base* has added to those of Celery's task."""
    is_named_so = attribute in vars(base) and not attribute.startswith("__")
    return is_named_so and not hasattr(base.__base__, attribute)


def check_request(task: Any, base: Any) -> None:
    """
    Make sure that the worker's main process can release for a child of *task* that is killed.

    Raises:
        ConfigurationError: A class of the task has a `Request` that is not ours.
    """
    if task.Request == base.Request:
        return  # not looked up where nobody changed it: that imports Celery's worker
    ours, theirs = symbol_by_name(base.Request), symbol_by_name(task.Request)
    if not (inspect.isclass(theirs) and issubclass(theirs, ours)):
        where = next(cls for cls in type(task).__mro__ if "Request" in vars(cls))
        msg = (
            f"{task.name}: {where.__qualname__}.Request = {task.Request!r} would not release the "
            f"lock of a process that is killed; derive it from {ours.__module__}."
            f"{ours.__qualname__}"
        )
        raise ConfigurationError(msg)
