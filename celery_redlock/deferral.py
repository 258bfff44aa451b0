"""
Defer signals during our own I/O, briefly and without losing any.

A soft time limit or a terminate that arrives while a lock is acquired or released takes
effect right after: raised in between, it would leave a lock that nobody gives back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

#: What `signal` wraps, whose enums take ten times as long as the system does. It is private, and
#: may go.
raw_signal: Any = sys.modules.get("_signal", signal)

__all__ = [
    "SIGNAL",
    "allow_signals",
    "defer_signals",
    "in_main_thread",
    "pause",
    "raw_signal",
]

#: Ours, by which a body learns that its lock is lost; billiard maps others to an exit.
SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
NEVER = float("inf")
ENDS = ("SIGUSR1", "SIGTERM", "SIGINT", "SIGQUIT")
#: What ends a task from outside, and would tear our own I/O apart.
DEFERRED = [getattr(signal, name) for name in ENDS if hasattr(signal, name)]
if SIGNAL is not None:
    DEFERRED.append(SIGNAL)


def in_main_thread() -> bool:
    """Return whether Python runs signal handlers in this thread."""
    return threading.current_thread() is threading.main_thread()


class _Deferral:
    """Signals held back in the main thread, to be let through later."""

    current: _Deferral | None = None

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._arrived: list[int] = []
        self._ends = NEVER
        self._alarm: threading.Timer | None = None

    def begin(self) -> None:
        """Replace every Python handler with ours, and remember them."""
        for number in DEFERRED:
            handler = raw_signal.getsignal(number)
            if callable(handler) and handler != self._note:
                self._handlers[number] = handler
                raw_signal.signal(number, self._note)

    @property
    def holds_back(self) -> bool:
        """Whether nothing is let through, now or later."""
        return self._ends == NEVER

    def _note(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= self._ends:
            self._arrived = [other for other in self._arrived if other != number]
            self._alarm = None
            self._set_alarm()  # for those that are left; the handler may raise
            self._handlers[number](number, frame)
            return
        if number not in self._arrived:  # as in the kernel, one stands for all of its kind
            self._arrived.append(number)
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Raise what has arrived again once it may be let through."""
        if self._arrived and self._ends != NEVER and self._alarm is None:
            left = max(0.0, self._ends - time.monotonic())
            self._alarm = threading.Timer(left, os.kill, (os.getpid(), self._arrived[0]))
            self._alarm.daemon = True
            self._alarm.start()

    def let_through(self, after: float) -> None:
        """Let signals through from *after* [s from now] on, or `NEVER`."""
        self._ends = time.monotonic() + after
        alarm, self._alarm = self._alarm, None
        if alarm is not None:
            alarm.cancel()
            alarm.join()  # one that is on its way would come when the handlers are back, once more
        self._set_alarm()

    def end(self) -> None:
        """Restore every handler and call it for what has arrived, whatever any of them raises."""
        try:
            self.let_through(NEVER)
            for number, handler in self._handlers.items():
                raw_signal.signal(number, handler)
            while self._arrived:
                signal.raise_signal(self._arrived.pop(0))
        except BaseException:
            self.end()  # those that are still to come must not be lost
            raise


@contextlib.contextmanager
def defer_signals(max_wait: float = NEVER) -> Iterator[None]:
    """
    Hold signals back for the body of a ``with``; they take effect after it.

    Blocking them in the kernel would not do: with a second thread about, Python still runs
    their handlers in the main thread.

    Args:
        max_wait: Let them through after so long [s]: what is not our own I/O may hang, and a stop
            must not wait for it. Inside of another deferral, this holds for that one meanwhile.
    """
    outer = _Deferral.current
    if not in_main_thread() or (outer is not None and outer.holds_back and max_wait == NEVER):
        yield
    elif outer is not None and max_wait < NEVER:
        outer.let_through(max_wait)
        try:
            yield
        finally:
            outer.let_through(NEVER)
    else:
        deferral = _Deferral()
        try:
            deferral.begin()
            _Deferral.current = deferral
            if max_wait < NEVER:
                deferral.let_through(max_wait)
            yield
        finally:
            _Deferral.current = outer
            deferral.end()


@contextlib.contextmanager
def allow_signals() -> Iterator[None]:
    """Let signals through for the body of a ``with`` that is inside of `defer_signals`."""
    deferral = _Deferral.current if in_main_thread() else None
    if deferral is None:
        yield
        return
    try:
        deferral.end()
        yield
    finally:
        deferral.begin()


def pause(seconds: float) -> None:
    """Sleep; a pending signal may end it early."""
    with allow_signals():
        time.sleep(seconds)
