"""What has to be done before a process ends, once: at its exit, and when a pool's child ends."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from multiprocessing import util

__all__ = ["before_end", "end"]

_calls: list[Callable[[], object]] = []


def before_end(call: Callable[[], object]) -> None:
    """Have *call* called before this process ends. It may be called repeatedly."""
    _calls.append(call)


@atexit.register
def end() -> None:
    """Do it; a pool's child, which ends without Python's own exit, has to be told."""
    for call in _calls:
        call()


def end_with_child(_: object = None) -> None:
    """Do it at the end of a child of multiprocessing, too: up to Python 3.12 it has no exit."""
    util.Finalize(None, end, exitpriority=0)


util.register_after_fork(end, end_with_child)
end_with_child()  # where this is imported in a child
