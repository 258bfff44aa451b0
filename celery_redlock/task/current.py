"""What the body of a task sees of its lock."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from celery_redlock.lock.held import HeldLock

if TYPE_CHECKING:
    from celery_redlock.task.execution import Execution

__all__ = ["current_lock"]

_current: ContextVar[HeldLock | None] = ContextVar("celery_redlock_current", default=None)
#: The execution that runs here, or has just run and waits for its result to be stored.
_running: ContextVar[Execution | None] = ContextVar("celery_redlock_running", default=None)


def current_lock() -> HeldLock:
    """
    Return the lock of the task that runs here and now.

    Where a task runs without one by policy, or locks are switched off in tests, this is a
    `NotLocked` that says why.

    Raises:
        RuntimeError: No task with a lock runs here: outside a task, in a task called
            directly, or in another thread than the task's.
    """
    held = _current.get()
    if held is None:
        msg = (
            "No lock is held here: current_lock() works in the body of a RedlockTask that a worker "
            "or apply() runs, in the body's own thread; a direct call takes no lock"
        )
        raise RuntimeError(msg)
    return held
