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
def ahead_of_others(pool: Any) -> Iterator[None]:
    """
    Have what is given to *pool* meanwhile come before what it has got and not begun.

    Where the pool has such a queue of its own: that of processes. A task that was woken would wait
    behind all that a busy worker has prefetched, and the lock be free as long.
    """
    waiting = getattr(getattr(pool, "_pool", None), "outbound_buffer", None)
    before = None if waiting is None else len(waiting)
    yield
    if waiting is not None and before is not None and len(waiting) > before:
        waiting.rotate(len(waiting) - before)
