"""
A mutex that an exception from a signal handler does not leave locked.

In Python 3.14 such an exception can come after a lock's ``__enter__`` and before the ``with``
covers it, so that nobody unlocks it: the next one who wants it waits for good. A soft time limit
that strikes in a body that uses a lock itself is enough. Every mutex around our own locks and
connections is made here.

Source:
    CPython issue 148874, fixed in 3.15.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

__all__ = ["new_mutex"]


def new_mutex() -> threading.RLock:
    """Return an unlocked `threading.RLock`; where signals raise, take it by ``with`` only."""
    if sys.version_info[:2] != (3, 14):
        return threading.RLock()
    return undoing(type(threading.RLock()))()


@functools.cache
def undoing(kind: Any) -> Any:
    """
    Return a subclass of *kind*, which is what `threading.RLock` makes.

    Under gevent and eventlet that is written in Python, where an exception may come anywhere.
    """

    class Mutex(kind):  # type: ignore[misc]
        # In Python, so that what is raised in it is caught here: signals are looked for after a
        # call of C, and not after a function of Python has returned. `__exit__` stays C's: in one
        # of Python an exception could come before the release.
        def __enter__(self) -> bool:
            taken: list[bool] = []
            try:
                taken.extend(map(self.acquire, (True,)))  # one call of C: taken and noted, or not
                return True  # noqa: TRY300  in the try, as all that a signal may strike
            except BaseException:
                if taken:
                    self.release()  # the first call here, as more signals may wait
                raise

    return Mutex
