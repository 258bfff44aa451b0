"""
A mutex that an exception from a signal handler cannot leave locked.

From Python 3.14 on, such an exception can come after a lock's ``__enter__`` and before the ``with``
covers it, so that nobody unlocks it: the next one who wants it waits for good. A soft time limit
that strikes in a body that uses a lock itself is enough. All mutexes that the main thread takes are
made here.

Source:
    CPython issue 148874.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

__all__ = ["new_mutex"]


def new_mutex() -> threading.RLock:
    """Return an unlocked `threading.RLock`, for use by ``with`` alone."""
    mutex = threading.RLock()
    if sys.version_info >= (3, 14):
        kind: Any = type(mutex)
        mutex = undoing(kind)()
    return mutex


@functools.cache
def undoing(kind: Any) -> Any:
    """Return a subclass of *kind*, which is what `threading.RLock` makes, perhaps gevent's."""

    class Mutex(kind):  # type: ignore[misc]
        # Of Python, for what strikes in it is caught, and nothing strikes between its return and
        # the body. `__exit__` is left as it is: what strikes in one of Python's comes too early.
        def __enter__(self) -> bool:
            before = self._recursion_count()
            try:
                return bool(self.acquire())
            except BaseException:
                if self._recursion_count() > before:
                    self.release()
                raise

    return Mutex
