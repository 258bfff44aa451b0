"""
Tell a running body that its lock is lost, by raising in the thread that runs it.

In a main thread (prefork, solo) a signal ends even a blocking call. In another thread
(the threads pool) Python raises between two bytecodes, so a call that blocks in C goes on
until it returns. In greenlets nothing is raised yet: ask `current_lock().ensure_held()`.

What is raised is a BaseException, so that an ``except Exception`` of the body does not
swallow it; `celery_redlock.task.execution` turns it into `LockLost`.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

from celery_redlock.deferral import SIGNAL, in_main_thread

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

__all__ = ["Interrupt", "LockInterrupt"]

#: Modules in whose own frames a body has not begun yet, or is over.
AROUND_BODY = (
    "celery_redlock.deferral",
    "celery_redlock.task.execution",
    "celery_redlock.task.interrupt",
)
#: When to try again to raise in a body that was in one of those [s].
AGAIN = 0.02


class LockInterrupt(BaseException):
    """
    The lock of the running body is lost. Never leaves `RedlockTask.__call__`.

    Attributes:
        interrupt: Whose body is meant.
    """

    interrupt: Interrupt

    def __init__(self) -> None:
        super().__init__()
        self.interrupt.has_raised = True


class Interrupt:
    """
    Raises `LockInterrupt` in the current thread while it is armed, at most once.

    Use as a context manager around the body; `fire` may be called from any thread. Bodies
    can be nested (``apply()`` in a task): what is raised for the outer one passes through
    the inner one.

    Attributes:
        outer: What was armed before, in the main thread.
        has_raised: Whether the body was told.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._armed = self._fired = False
        self._thread = threading.get_ident()
        self._by_signal = SIGNAL is not None and in_main_thread()
        self._error: type[LockInterrupt] = LockInterrupt
        self.outer: Interrupt | None = None
        self.has_raised = False

    def __enter__(self) -> Self:
        if self._by_signal:
            self.outer, _Main.interrupt = _Main.interrupt, self
            install_handler()
        self._armed = True
        return self

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            self._armed = False
        if not self._by_signal:
            self._let_it_come()
            return
        _Main.interrupt = self.outer
        if self.outer is not None and self.outer.is_due:
            self.outer.fire_again_soon()  # two signals at once may have reached us as one

    def _let_it_come(self) -> None:
        """
        Wait for what was fired and is still to come, and drop it.

        It must not hit what comes after the body, and cannot be taken back: Python up to 3.12
        would look for it for ever, in all threads.
        """
        try:
            for _ in range(1000):
                if not self._fired or self.has_raised:
                    return
        except LockInterrupt as error:
            if error.interrupt is not self:
                raise

    def fire(self) -> None:
        """Raise in the thread that armed this, unless its body is over."""
        with self._mutex:
            if not self._armed or self._fired or is_green():
                return
            # Where no signal can be sent, only a class can be raised, and has to tell whose it is.
            self._error = type("LockInterrupt", (LockInterrupt,), {"interrupt": self})
            self._fired = True
            if self._by_signal:
                signal.pthread_kill(self._thread, SIGNAL)  # type: ignore[arg-type]
            else:
                raise_in_thread(self._thread, self._error)

    def fire_again_soon(self) -> None:
        """Send the signal once more, after it came in a moment in which nothing may be raised."""
        again = threading.Timer(AGAIN, self._fire_again)
        again.daemon = True
        again.start()

    def _fire_again(self) -> None:
        with self._mutex:
            if self.is_due:
                signal.pthread_kill(self._thread, SIGNAL)  # type: ignore[arg-type]

    @property
    def is_due(self) -> bool:
        """Whether it was fired, nothing was raised yet, and the body still runs."""
        return self._armed and self._fired and not self.has_raised

    def interrupt(self) -> None:
        """Raise; called in the thread of the body."""
        raise self._error


class _Main:
    """The innermost interrupt that the main thread has armed."""

    interrupt: Interrupt | None = None


def install_handler() -> None:
    """Let our signal raise in the main thread; cheap when that is so already."""
    if signal.getsignal(SIGNAL) is not on_signal:  # type: ignore[arg-type]
        signal.signal(SIGNAL, on_signal)  # type: ignore[arg-type]


def on_signal(_number: int, frame: FrameType | None) -> None:
    """Raise in the body whose lock is lost, but not while our own code around it runs."""
    interrupt = _Main.interrupt
    while interrupt is not None and not interrupt.is_due:
        interrupt = interrupt.outer
    if interrupt is None:
        return
    if frame is not None and frame.f_globals.get("__name__") in AROUND_BODY:
        interrupt.fire_again_soon()
    else:
        interrupt.interrupt()


def raise_in_thread(thread: int, error: type[BaseException]) -> None:
    """Raise *error* in *thread* at its next bytecode."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def is_green() -> bool:
    """Return whether threads here are greenlets, in which nothing can be raised from outside."""
    gevent = sys.modules.get("gevent.monkey")
    eventlet = sys.modules.get("eventlet.patcher")
    return bool(
        (gevent is not None and gevent.is_module_patched("threading"))
        or (eventlet is not None and eventlet.is_monkey_patched("thread"))
    )
