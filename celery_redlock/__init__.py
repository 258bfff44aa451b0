"""Celery tasks that must not run twice: a quorum lock around every execution."""

from __future__ import annotations

from celery_redlock.errors import (
    ConfigurationError,
    DuplicateTask,
    LockKeyError,
    LockLost,
    LockNotAcquired,
    LockTaken,
    QuorumUnavailable,
    RedlockError,
)
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.redlock import Redlock, ReleaseOutcome
from celery_redlock.task.base import RedlockTask
from celery_redlock.task.current import current_lock
from celery_redlock.task.policies import Fail, Reschedule, Retry, RunUnlocked, Skip
from celery_redlock.task.refused import Skipped
from celery_redlock.task.result import UniqueResult

__all__ = [
    "ConfigurationError",
    "DuplicateTask",
    "Fail",
    "HeldLock",
    "Lease",
    "LockKeyError",
    "LockLost",
    "LockNotAcquired",
    "LockTaken",
    "QuorumUnavailable",
    "Redlock",
    "RedlockError",
    "RedlockTask",
    "ReleaseOutcome",
    "Reschedule",
    "Retry",
    "RunUnlocked",
    "Skip",
    "Skipped",
    "UniqueResult",
    "current_lock",
]

__version__ = "0.1.0"
