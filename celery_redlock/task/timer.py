"""
What a worker's timer holds for a message that is to come later: find it, take it out.

Celery has three timers, and none of them has a public way to do either: that of the event loop, a
thread's, and one that has a greenlet for each entry.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator
from typing import Any

__all__ = ["ahead_of_others", "find", "take_out"]


def find(timer: Any, request: Any) -> Any:
    """Return what *timer* holds for *request*; None if nothing (any more, or yet)."""
    for scheduled in list(timer.schedule._queue):  # noqa: SLF001  its `queue` sorts all of them
        arguments = scheduled.entry.args
        if arguments and arguments[0] is request:
            return scheduled
    return None


def take_out(timer: Any, scheduled: Any) -> None:
    """Have *timer* hold *scheduled* no more: cancelled, it would be listed until it is due."""
    if hasattr(scheduled, "kill"):
        scheduled.kill()
        return
    scheduled.entry.cancel()
    queue = timer.schedule._queue  # noqa: SLF001  as above
    with getattr(timer, "mutex", contextlib.nullcontext()), contextlib.suppress(ValueError):
        queue.remove(scheduled)
        heapq.heapify(queue)


@contextlib.contextmanager
def ahead_of_others(worker: Any) -> Iterator[None]:
    """
    Have what is given to *worker* meanwhile come before what it has received and not begun.

    Where it has such a queue, before its processes. A task that was woken would wait behind all
    that a busy worker has prefetched, and the lock be free as long.
    """
    waiting: Any = getattr(getattr(worker, "semaphore", None), "_waiting", ())
    before = len(waiting)
    yield
    if len(waiting) > before:
        waiting.rotate(len(waiting) - before)
