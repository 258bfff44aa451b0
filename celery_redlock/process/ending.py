"""What has to be done before a process ends, once: at its exit, and when a pool's child ends."""

from __future__ import annotations

import atexit
from collections.abc import Callable

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
