"""
Messages in a worker's timer that are to come later: find one, take it out.

Celery has three timers, and none of them has a public way to do either: that of the event loop, a
thread's, and one that has a greenlet for each entry.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["ahead_of_others", "cancel", "find", "take_out"]


def find(timer: Any, request: Any) -> Any:
    """None if *timer* does not hold *request* (any more, or yet)."""
    for scheduled in list(timer.schedule._queue):  # noqa: SLF001  its `queue` sorts all of them
        arguments = scheduled.entry.args
        if arguments and arguments[0] is request:
            return scheduled
    return None


def cancel(timer: Any, repeated: Any) -> None:
    # A green timer has returned the greenlet of the first firing, which is over by then.
    timer.cancel(getattr(repeated, "entry", repeated))


def take_out(timer: Any, scheduled: Any) -> bool:
    """
    Have *timer* hold *scheduled* no more; return whether it did until now.

    Cancelled alone, it would be listed until it is due.
    """
    if hasattr(scheduled, "kill"):
        scheduled.kill()
        return True
    queue = timer.schedule._queue  # noqa: SLF001  as above
    with getattr(timer, "mutex", contextlib.nullcontext()):
        try:
            queue.remove(scheduled)
        except ValueError:  # a timer with a thread runs it just now
            return False
        heapq.heapify(queue)
    scheduled.entry.cancel()
    return True


@contextlib.contextmanager
def ahead_of_others(worker: Any, is_ahead: Callable[[Any], bool]) -> Iterator[None]:
    """
    Have what is given to *worker* meanwhile come before what it has received and not begun.

    Where it has such a queue, before its processes. A task that was woken would wait behind all
    that a busy worker has prefetched, and the lock be free as long. Requests that *is_ahead*
    says have come this way keep their place.
    """
    waiting: Any = getattr(getattr(worker, "semaphore", None), "_waiting", ())
    before = len(waiting)
    yield
    added = [waiting.pop() for _ in range(len(waiting) - before)]
    ahead = sum(1 for _ in itertools.takewhile(lambda one: any(map(is_ahead, one[1][:1])), waiting))
    for one in added:
        waiting.insert(ahead, one)
