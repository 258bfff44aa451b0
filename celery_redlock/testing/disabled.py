"""Switch locks off in tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from celery_redlock.plugin import locking

__all__ = ["locks_disabled"]


@contextlib.contextmanager
def locks_disabled() -> Iterator[None]:
    """
    Switch locking off in this process, for test suites without servers.

    Works as a context manager and as a decorator. Bodies run as with a lock; in them
    `current_lock` returns a `NotLocked`.
    """
    locking.disabled += 1
    try:
        yield
    finally:
        locking.disabled -= 1
