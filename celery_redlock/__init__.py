"""Celery tasks that must not run twice: a quorum lock around every execution."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_redlock.errors import (
        ConfigurationError,
        DuplicateTask,
        LockKeyError,
        LockLost,
        LockNotAcquired,
        LockTaken,
        QuorumUnavailable,
        RateExceeded,
        RedlockError,
        TooManyDeliveries,
    )
    from celery_redlock.lock.aio import AsyncRedlock
    from celery_redlock.lock.algorithm.results import ReleaseOutcome
    from celery_redlock.lock.held import HeldLock
    from celery_redlock.lock.lease import Lease
    from celery_redlock.lock.redlock import Redlock
    from celery_redlock.task.base import RedlockTask
    from celery_redlock.task.execution.execution import current_lock
    from celery_redlock.task.execution.refused import Skipped
    from celery_redlock.task.policies import Fail, Queue, Reschedule, Retry, RunUnlocked, Skip
    from celery_redlock.task.publish.result import UniqueResult
    from celery_redlock.task.rate import Rate

__all__ = [
    "AsyncRedlock",
    "ConfigurationError",
    "DuplicateTask",
    "Fail",
    "HeldLock",
    "Lease",
    "LockKeyError",
    "LockLost",
    "LockNotAcquired",
    "LockTaken",
    "Queue",
    "QuorumUnavailable",
    "Rate",
    "RateExceeded",
    "Redlock",
    "RedlockError",
    "RedlockTask",
    "ReleaseOutcome",
    "Reschedule",
    "Retry",
    "RunUnlocked",
    "Skip",
    "Skipped",
    "TooManyDeliveries",
    "UniqueResult",
    "current_lock",
]

__version__ = "0.1.0"

#: Module -> the public names that are in it.
_HOMES = {
    "errors": (
        "ConfigurationError",
        "DuplicateTask",
        "LockKeyError",
        "LockLost",
        "LockNotAcquired",
        "LockTaken",
        "QuorumUnavailable",
        "RateExceeded",
        "RedlockError",
        "TooManyDeliveries",
    ),
    "lock.aio": ("AsyncRedlock",),
    "lock.held": ("HeldLock",),
    "lock.lease": ("Lease",),
    "lock.algorithm.results": ("ReleaseOutcome",),
    "lock.redlock": ("Redlock",),
    "task.base": ("RedlockTask",),
    "task.execution.execution": ("current_lock",),
    "task.policies": ("Fail", "Queue", "Reschedule", "Retry", "RunUnlocked", "Skip"),
    "task.execution.refused": ("Skipped",),
    "task.publish.result": ("UniqueResult",),
    "task.rate": ("Rate",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
#: What needs no import of its own.
_ROOMS = ("errors", "events", "lock", "observers", "plugin", "process", "settings", "task")

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> object:
        """Import a name when it is first used, as the package `celery` does."""
        if name in _HOME_OF:
            found = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
            globals()[name] = found
            return found
        if name in _ROOMS:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Return all names, imported or not."""
        return sorted({*globals(), *__all__, *_ROOMS})
