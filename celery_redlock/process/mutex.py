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

import _thread
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["is_stuck", "new_mutex", "run_elsewhere"]


def new_mutex() -> threading.RLock:
    """
    Return an unlocked `threading.RLock`; where signals raise, take it by ``with`` only.

    Where we take it this thread does not hold it (``_is_owned``, which conditions use, too), unless
    what runs was run by the collector, amid our own work: a finaliser, or the end of a generator.
    There, nothing may be waited for, nor changed.
    """
    if sys.version_info[:2] != (3, 14):
        return threading.RLock()
    return undoing(type(threading.RLock()))()


def is_stuck(mutex: threading.RLock) -> bool:
    """Return whether nobody will unlock it: as the interpreter ends, other threads stand still."""
    if not sys.is_finalizing():
        return False
    if mutex.acquire(blocking=False):
        mutex.release()
        return False
    return True


def run_elsewhere(work: Callable[..., Any], *args: Any) -> bool:
    """
    Have another thread do *work*, which may wait there; return whether one could be had.

    None can be had as the interpreter ends, and so does the lease. Not by `threading.Thread`, whose
    start takes locks that this thread may hold.
    """
    try:
        _thread.start_new_thread(work, args)
    except RuntimeError:
        return False
    return True


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
