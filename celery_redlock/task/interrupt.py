"""
Tell a running body that its lock is lost, by raising in the thread that runs it.

In a main thread (prefork, solo) a signal ends even a blocking call. In another thread
(the threads pool) Python raises between two bytecodes, so a call that blocks in C goes on
until it returns. In greenlets nothing is raised yet: ask `current_lock().ensure_held()`.

What is raised is a BaseException, so that an ``except Exception`` of the body does not
swallow it; `celery_redlock.task.execution` turns it into `LockLost`.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["Interrupt", "LockInterrupt", "signals_deferred"]

#: Modules in whose own frames the body has not begun yet, or is over.
AROUND_BODY = ("celery_redlock.task.execution", "celery_redlock.task.interrupt")
#: Not among those that billiard maps to an exit of its children.
SIGNAL = getattr(signal, "SIGRTMIN", 0) + 7 if hasattr(signal, "SIGRTMIN") else None
#: What ends a task from outside, and would tear our own I/O apart.
DEFERRED = tuple(
    getattr(signal, name)
    for name in ("SIGUSR1", "SIGTERM", "SIGINT", "SIGQUIT")
    if hasattr(signal, name)
)


class LockInterrupt(BaseException):
    """The lock of the running body is lost. Never leaves `RedlockTask.__call__`."""


class Interrupt:
    """
    Raises `LockInterrupt` in the current thread while it is armed, at most once.

    Use as a context manager around the body; `fire` may be called from any thread.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._armed = self._fired = False
        self._thread = threading.get_ident()
        self._by_signal = SIGNAL is not None and threading.current_thread() is threading.main_thread()
        self._outer: Interrupt | None = None

    def __enter__(self) -> Interrupt:
        if self._by_signal:
            self._outer, _Main.interrupt = _Main.interrupt, self
            install_handler()
        self._armed = True
        return self

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            self._armed = False
            if self._fired and not self._by_signal:
                raise_in_thread(self._thread, None)  # in case it is still to come
        if self._by_signal:
            _Main.interrupt = self._outer

    def fire(self) -> None:
        """Raise in the thread that armed this, unless its body is over."""
        with self._mutex:
            if not self._armed or self._fired or is_green():
                return
            self._fired = True
            if self._by_signal:
                signal.pthread_kill(self._thread, SIGNAL)  # type: ignore[arg-type]
            else:
                raise_in_thread(self._thread, LockInterrupt)

    @property
    def is_due(self) -> bool:
        """Whether it was fired and the body still runs."""
        return self._armed and self._fired


class _Main:
    """The interrupt that the main thread has armed."""

    interrupt: Interrupt | None = None


def install_handler() -> None:
    """Let our signal raise in the main thread; cheap when that is so already."""
    if signal.getsignal(SIGNAL) is not on_signal:  # type: ignore[arg-type]
        signal.signal(SIGNAL, on_signal)  # type: ignore[arg-type]


def on_signal(_number: int, frame: FrameType | None) -> None:
    """Raise if the body is still running, which it is not while our own code around it runs."""
    interrupt = _Main.interrupt
    if interrupt is None or not interrupt.is_due:
        return
    if frame is not None and frame.f_globals.get("__name__") in AROUND_BODY:
        return
    raise LockInterrupt


def raise_in_thread(thread: int, error: type[BaseException] | None) -> None:
    """Raise *error* in *thread* at its next bytecode; None takes back what was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


def is_green() -> bool:
    """Return whether threads here are greenlets, in which nothing can be raised from outside."""
    gevent = sys.modules.get("gevent.monkey")
    eventlet = sys.modules.get("eventlet.patcher")
    return bool(
        (gevent is not None and gevent.is_module_patched("threading"))
        or (eventlet is not None and eventlet.is_monkey_patched("thread"))
    )


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """
    Hold signals back for the body of a ``with``: a short stretch of our own I/O.

    A soft time limit or a terminate that arrives in it takes effect right after. Blocking
    them in the kernel would not do: with a second thread about, Python still runs their
    handlers in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    handlers: dict[int, Any] = {}

    def note(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    try:
        swap(handlers, note)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


def swap(handlers: dict[int, Any], note: Callable[[int, FrameType | None], None]) -> None:
    """Put *note* in the place of every Python handler, and remember those in *handlers*."""
    for number in DEFERRED:
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
            signal.signal(number, note)
