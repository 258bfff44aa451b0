"""Assertions about the lock that code runs under."""

from __future__ import annotations

from typing import Any

from celery_redlock.lock.held import HeldLock, NotLocked
from celery_redlock.task.execution.execution import current_lock
from celery_redlock.task.naming.task_lock import names_of

__all__ = ["assert_locked", "name_of"]


def assert_locked(what: Any = None) -> HeldLock:
    """
    Assert that the task that runs here and now holds its lock, and return that lock.

    For a collaborator of a task, or its stand-in, that must not be called without one.

    Args:
        what: Which lock it has to be: a lock name, or a call like ``bill.s(7)``; None for any.

    Raises:
        AssertionError: It holds none, another one, or has lost it; says which.
    """
    wanted = None if what is None else name_of(what)
    expected = "a lock is held here" if wanted is None else f"lock {wanted!r} is held here"
    held, problem = held_here()
    if held is not None and wanted not in (None, held.name):
        problem = f"it is {held.name!r}"
    if held is None or problem:
        raise AssertionError(f"expected that {expected}, but {problem}")
    return held


def held_here() -> tuple[HeldLock | None, str]:
    """Return the current lock, and why it does not count; empty if it does."""
    try:
        held = current_lock()
    except RuntimeError as error:
        return None, f"none is: {error}"
    if isinstance(held, NotLocked):
        return held, f"the body runs without: {held.why}"
    return held, f"{held.name!r} is lost: {held.lost_reason}" if held.is_lost else ""


def name_of(what: Any) -> str:
    """
    Return the lock name that *what* is, or that of a call like ``bill.s(7)``.

    Raises:
        TypeError: It is neither.
        LockKeyError: The call makes no lock name.
    """
    if isinstance(what, str):
        return what
    task = getattr(what, "type", None)
    if not hasattr(task, "lock_name"):
        msg = f"a lock name, or a call of a RedlockTask like bill.s(7), is wanted; got {what!r}"
        raise TypeError(msg)
    return names_of(task, what.args, what.kwargs, what.options.get("headers") or {})[0]
