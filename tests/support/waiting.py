"""Waiting for something to become true, with a limit and a clear word when it does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["eventually"]

T = TypeVar("T")


def eventually(
    condition: Callable[[], T | None], what: str, *, timeout: float = 60.0, every: float = 0.01
) -> T:
    """
    Return the first true value of *condition*.

    Args:
        condition: Asked again and again.
        what: What is waited for, for the message.
        timeout: How long [s].
        every: Pause between two tries [s].

    Raises:
        AssertionError: It did not become true in time.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} within {timeout:g} s; the last answer was {value!r}")
        time.sleep(every)
    return value
