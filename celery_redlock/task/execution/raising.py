"""
Ways of raising in a body from outside, one for each kind of thread that runs bodies.

    main thread (prefork, solo)   a signal, whose handler raises; ends a call that blocks, too
    greenlet (gevent, eventlet)   its hub throws, when the greenlet waits for something
    other thread (threads)        Python raises between two bytecodes, so a call that blocks
                                  in C goes on until it returns

The handler and the hub look up what is due at the moment at which they raise it, while the
body stands still: one that has ended in the meantime is not hit. The third way cannot be
taken back; `celery_redlock.task.execution.interrupt` waits for what is under way.
"""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from celery_redlock.process.deferral import SIGNAL, in_main_thread, raw_signal

__all__ = ["Strike", "Target", "way_here"]

#: Modules in whose own frames a body has not begun yet, or is over.
AROUND_BODY = (
    "celery.app.task",
    "celery.utils.threads",
    "celery_redlock.process.deferral",
    "celery_redlock.process.mutex",
    "celery_redlock.task.base",
    "celery_redlock.task.execution.body",
    "celery_redlock.task.execution.calls",
    "celery_redlock.task.execution.end",
    "celery_redlock.task.execution.execution",
    "celery_redlock.task.execution.interrupt",
    "celery_redlock.task.execution.raising",
)
#: When to try again to raise in a body that was in one of those [s].
AGAIN = 0.02

#: Has an exception raised in one certain thread or greenlet; may be called from any other.
Strike = Callable[[type[BaseException]], None]


class Target(Protocol):
    """What to raise in a thread."""

    def due(self) -> type[BaseException] | None:
        """Return what to raise at this moment, if anything; never waits for a lock."""

    def remind(self) -> None:
        """Strike once more for what is due; from any thread."""


def way_here(target: Target) -> Strike:
    """Return how to raise in the thread that calls this what *target* says is due."""
    in_hub = hub_here()
    if in_hub is not None:
        return by_throw(target, in_hub)
    if SIGNAL is not None and in_main_thread():
        return by_signal(target, SIGNAL)
    return functools.partial(raise_in_thread, threading.get_ident())


def by_signal(target: Target, number: int) -> Strike:
    thread = threading.get_ident()

    def on_signal(_number: int, frame: FrameType | None) -> None:
        error = target.due()
        if error is None:
            return
        if frame is None or frame.f_globals.get("__name__") not in AROUND_BODY:
            raise error
        again = threading.Timer(AGAIN, target.remind)
        again.daemon = True
        again.start()

    raw_signal.signal(number, on_signal)
    return lambda _error: signal.pthread_kill(thread, number)


def by_throw(target: Target, in_hub: Callable[[Callable[[], None]], Any]) -> Strike:
    """Return how to raise in this greenlet."""
    greenlet = sys.modules["greenlet"].getcurrent()

    def throw() -> None:
        error = target.due()
        if error is not None:
            greenlet.throw(error())

    return lambda _error: in_hub(throw)


def raise_in_thread(thread: int, error: type[BaseException]) -> None:
    """Raise *error* in *thread* at its next bytecode."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def hub_here() -> Callable[[Callable[[], None]], Any] | None:
    """Return how to have a function called in our hub, where threads are greenlets; else None."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        in_hub: Callable[..., Any] = sys.modules["gevent"].get_hub().loop.run_callback_threadsafe
        return in_hub
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        return functools.partial(sys.modules["eventlet.hubs"].get_hub().schedule_call_global, 0)
    return None
