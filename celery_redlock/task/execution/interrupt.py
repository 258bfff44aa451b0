"""
Tell a running body that its lock is lost, by raising in the thread or greenlet that runs it.

    fire() --> struck in the body's thread --> LockInterrupt is raised in the body, once
       '-- held back: our own I/O, in the body of a task that the body called --> raised after it
       '-- the body is over --> nothing

How it is raised, and how soon, depends on the pool: `celery_redlock.task.execution.raising`, and
docs/lost-leases.md for users.

What is raised is a BaseException, so that an ``except Exception`` of the body does not
swallow it; `celery_redlock.task.execution.body` turns it into `LockLost`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from celery_redlock.process.deferral import defer_signals
from celery_redlock.process.mutex import new_mutex
from celery_redlock.task.execution.raising import Strike, way_here

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

__all__ = ["Interrupt", "LockInterrupt", "defer_interrupts"]


class LockInterrupt(BaseException):
    """
    The lock of the running body is lost. Never leaves `RedlockTask.__call__`.

    Attributes:
        interrupt: Of the body that is meant.
    """

    interrupt: Interrupt

    def __init__(self) -> None:
        super().__init__()
        self.interrupt.has_raised = True


class Here(threading.local):
    """
    What is armed in this thread, or greenlet.

    Attributes:
        interrupt: The innermost one.
    """

    interrupt: Interrupt | None = None


here = Here()


class Interrupt:
    """
    Raises `LockInterrupt` where it was armed, as long as it is armed, at most once.

    Use as a context manager around the body; `fire` may be called from any thread. Bodies
    can be nested (``apply()`` in a task): what is raised for the outer one passes through
    the inner one.

    Attributes:
        outer: What was armed before in the same thread.
        error: What to raise.
        is_armed: Whether the body runs.
        has_raised: Whether it was raised in the body.
    """

    def __init__(self) -> None:
        self._mutex = new_mutex()
        self.is_armed = self._fired = self._held_back = False
        self._strike: Strike | None = None
        self.error: type[LockInterrupt] = LockInterrupt
        self.outer: Interrupt | None = None
        self.has_raised = False

    def __enter__(self) -> Self:
        self._strike, self.outer = way_here(self), innermost()
        try:
            here.interrupt = self
            self.is_armed = True
            return self  # noqa: TRY300  in the try, since a soft time limit may strike here
        except BaseException:  # there will be no __exit__
            self.disarm()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            with self._mutex:
                self.is_armed = False
            self._let_it_come()
        finally:
            self.disarm()
        if self.outer is not None:
            self.outer.remind()  # of two that were fired at once, one may have hidden the other

    def disarm(self) -> None:
        """Raise nothing from now on; may be called again."""
        self.is_armed = False
        self._strike = None  # a reference cycle, which the garbage collector need not break
        if here.interrupt is self:
            here.interrupt = self.outer

    def fire(self) -> None:
        """Raise where this was armed, unless the body is over."""
        with self._mutex:
            if not self.is_armed or self._fired:
                return
            # A class, because that is all that can be raised in another thread; one that tells
            # whose it is.
            self.error = type("LockInterrupt", (LockInterrupt,), {"interrupt": self})
            self._fired = True
        self.remind()

    def remind(self) -> None:
        """Strike, or strike again, for what is due of this and those around it."""
        for each in self.and_outer():
            if each.is_due:
                each.strike()

    def strike(self) -> None:
        """Raise this, unless the body is over."""
        with self._mutex:
            if self.is_due and self._strike is not None:
                self._strike(self.error)

    @property
    def is_due(self) -> bool:
        """Whether it was fired, nothing was raised yet, and nothing is against it."""
        return self.is_armed and self._fired and not (self.has_raised or self._held_back)

    def due(self) -> type[LockInterrupt] | None:
        """Return what is to be raised in the thread of the body at this moment, if anything."""
        return next((each.error for each in self.and_outer() if each.is_due), None)

    def and_outer(self) -> Iterator[Interrupt]:
        """Yield this and those around it, from the inside out."""
        interrupt: Interrupt | None = self
        while interrupt is not None:
            yield interrupt
            interrupt = interrupt.outer

    def hold_back(self) -> None:
        """Raise nothing until `let_through`; called in the thread of the body."""
        with self._mutex:
            self._held_back = True
        self._let_it_come()

    def let_through(self) -> None:
        """End what `hold_back` began; the caller asks for what is `due` then."""
        with self._mutex:
            self._held_back = False

    def _let_it_come(self) -> None:
        """
        Wait for what has struck and is still to come, which hits this line.

        It must not hit what comes after, and in a thread it cannot be taken back: Python up
        to 3.12 would look for it from then on, in all threads.
        """
        try:
            for _ in range(1000):
                if not self._fired or self.has_raised:
                    return
        except LockInterrupt as error:
            if error.interrupt is not self or self.is_armed:
                raise


def innermost() -> Interrupt | None:
    """Return the innermost interrupt that is armed in this thread."""
    while here.interrupt is not None and not here.interrupt.is_armed:
        here.interrupt = here.interrupt.outer  # a soft time limit struck in its __exit__
    return here.interrupt


def defer_interrupts() -> contextlib.AbstractContextManager[None]:
    """
    Keep signals and interrupts out of our own I/O, for the body of a ``with``.

    Around that I/O nothing is armed but the interrupts of tasks which called this one with
    ``apply()`` in their bodies. What arrives for them is raised right after.
    """
    inner = innermost()
    return defer_signals() if inner is None else _defer(inner)


@contextlib.contextmanager
def _defer(inner: Interrupt) -> Iterator[None]:
    armed = list(inner.and_outer())
    with defer_signals():
        try:
            for each in armed:
                each.hold_back()
            yield
        finally:
            for each in armed:
                each.let_through()
            error = inner.due()
            if error is not None:
                raise error
