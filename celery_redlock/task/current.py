"""Which execution runs here, and what its body sees of its lock."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from celery_redlock.lock.held import HeldLock

if TYPE_CHECKING:
    from celery_redlock.task.execution import Execution

__all__ = ["current_lock", "latest_execution", "running_execution"]

#: The execution that runs here, or has just run and waits for its result to be stored.
latest_execution: ContextVar[Execution | None] = ContextVar("celery_redlock_latest", default=None)


def running_execution() -> Execution | None:
    """Return the innermost execution that goes on here; None outside of any."""
    execution = latest_execution.get()
    while execution is not None and execution.is_over:
        execution = execution.outer
    return execution


def current_lock() -> HeldLock:
    """
    Return the lock of the task that runs here and now.

    Where a task runs without one by policy, or locks are switched off in tests, this is a
    `NotLocked` that says why.

    Raises:
        RuntimeError: No task with a lock runs here: outside a task, in a task called
            directly, or in another thread than the task's.
    """
    execution = latest_execution.get()
    # A thread with a copy of the context outlives a body; the lock of an outer one is not its own.
    if execution is None or execution.is_over or execution.held is None:
        msg = (
            "No lock is held here: current_lock() works in the body of a RedlockTask that a worker "
            "or apply() runs, in the body's own thread; a direct call takes no lock"
        )
        raise RuntimeError(msg)
    return execution.held
