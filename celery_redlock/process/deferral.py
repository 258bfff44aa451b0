"""
Defer signals during our own I/O, briefly and without losing any.

A soft time limit or a terminate that arrives while a lock is acquired or released takes
effect right after: raised in between, it would leave a lock that nobody releases.
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
#: What stands for a handler where none of Python's is called.
NO_HANDLER = (signal.SIG_DFL, signal.SIG_IGN, None)
NOTHING_TO_DO = contextlib.nullcontext()
ENDS = ("SIGUSR1", "SIGTERM", "SIGINT", "SIGQUIT")
#: What ends a task from outside, and would tear our own I/O apart.
DEFERRED = [getattr(signal, name) for name in ENDS if hasattr(signal, name)]
if SIGNAL is not None:
    DEFERRED.append(SIGNAL)


def in_main_thread() -> bool:
    """Return whether Python runs signal handlers in this thread."""
    return threading.get_ident() == threading.main_thread().ident


class _Deferral:
    """Signals held back in the main thread for the body of a ``with``, to be let through later."""

    current: _Deferral | None = None

    def __init__(self, max_wait: float) -> None:
        self._handlers: dict[int, Any] = {}
        self._arrived: list[int] = []
        self._max_wait = max_wait
        self.let_through_at = NEVER
        self._alarm: threading.Timer | None = None

    def __enter__(self) -> None:
        self._outer = _Deferral.current
        try:
            self.begin()
            _Deferral.current = self
            if self._max_wait < NEVER:
                self.let_through(self._max_wait)
        except BaseException:  # there will be no __exit__
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        _Deferral.current = self._outer
        self.end()

    def begin(self) -> None:
        hold_back = self._hold_back
        for number in DEFERRED:
            handler = raw_signal.getsignal(number)
            if handler not in NO_HANDLER and handler != hold_back:
                self._handlers[number] = handler
                raw_signal.signal(number, hold_back)

    def _hold_back(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= self.let_through_at:
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
        if self._arrived and self.let_through_at != NEVER and self._alarm is None:
            left = max(0.0, self.let_through_at - time.monotonic())
            self._alarm = threading.Timer(left, os.kill, (os.getpid(), self._arrived[0]))
            self._alarm.daemon = True
            self._alarm.start()

    def let_through(self, after: float) -> None:
        """Let signals through from *after* [s from now] on, or `NEVER`."""
        self.let_through_at = time.monotonic() + after
        alarm, self._alarm = self._alarm, None
        if alarm is not None:
            alarm.cancel()
            alarm.join()  # one that is on its way would come when the handlers are back, once more
        self._set_alarm()

    def end(self) -> None:
        """Restore every handler and call it for what has arrived, whatever any of them raises."""
        try:
            self.let_through_at = NEVER
            if self._alarm is not None:
                self.let_through(NEVER)
            for number in self._handlers:
                raw_signal.signal(number, self._handlers[number])
            while self._arrived:
                signal.raise_signal(self._arrived.pop(0))
        except BaseException:
            self.end()  # those that are still to come must not be lost
            raise


def defer_signals(max_wait: float = NEVER) -> contextlib.AbstractContextManager[None]:
    """
    Hold signals back for the body of a ``with``; they take effect after it.

    Blocking them in the kernel would not do: with a second thread about, Python still runs
    their handlers in the main thread. With *max_wait* they are let through after so long [s]: what
    is not our own I/O may hang. Inside of another deferral, this holds for that one meanwhile.
    """
    outer = _Deferral.current
    is_held_back = outer is not None and outer.let_through_at == NEVER and max_wait == NEVER
    if is_held_back or not in_main_thread():
        return NOTHING_TO_DO
    if outer is not None and max_wait < NEVER:
        return _let_through(outer, max_wait)
    return _Deferral(max_wait)


@contextlib.contextmanager
def _let_through(outer: _Deferral, after: float) -> Iterator[None]:
    outer.let_through(after)
    try:
        yield
    finally:
        outer.let_through(NEVER)


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
        if deferral is _Deferral.current:  # else it is over: a signal has torn this context apart
            deferral.begin()


def pause(seconds: float) -> None:
    """Sleep so long [s]; a pending signal may end it early."""
    with allow_signals():
        time.sleep(seconds)  # what the caller asked for, with signals let through
