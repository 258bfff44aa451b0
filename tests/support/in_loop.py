"""`AsyncRedlock` with the methods of `Redlock`: each call runs in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any

from celery_redlock.lock.aio import AsyncRedlock
from celery_redlock.lock.redlock import Redlock

__all__ = ["InLoop", "Struck", "in_loop", "loop_thread"]


@contextlib.contextmanager
def loop_thread(
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a thread of its own."""
    loop = new_loop()
    thread = threading.Thread(target=loop.run_forever, name="loop", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


class InLoop:
    """The locks *sync*, awaited in *loop*; what only `Redlock` has, is that of *sync*."""

    def __init__(self, sync: Redlock, loop: asyncio.AbstractEventLoop) -> None:
        self.sync = sync
        self.locks = AsyncRedlock.of(sync)
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sync, name)

    def run(self, work: Awaitable[Any]) -> Any:
        """Return what *work* returns, or raise what it raises; no such error ends the loop."""

        async def caught() -> tuple[Any, BaseException | None]:
            try:
                return await work, None
            except BaseException as error:  # noqa: BLE001  raised where it was asked for
                return None, error

        value, error = asyncio.run_coroutine_threadsafe(caught(), self._loop).result()
        if error is not None:
            raise error
        return value

    def acquire(self, *args: Any, **options: Any) -> Any:
        return self.run(self.locks.acquire(*args, **options))

    def extend(self, *args: Any) -> Any:
        return self.run(self.locks.extend(*args))

    def release(self, *args: Any, **options: Any) -> Any:
        return self.run(self.locks.release(*args, **options))

    def inspect(self, *args: Any) -> Any:
        return self.run(self.locks.inspect(*args))

    def close(self) -> None:
        self.run(self.locks.close())

    @contextlib.contextmanager
    def hold(self, *args: Any, **options: Any) -> Iterator[Any]:
        manager = self.locks.hold(*args, **options)
        held = self.run(manager.__aenter__())
        try:
            yield held
        except BaseException as error:
            if not self.run(manager.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            self.run(manager.__aexit__(None, None, None))


@contextlib.contextmanager
def in_loop(sync: Redlock) -> Iterator[InLoop]:
    with loop_thread() as loop:
        yield InLoop(sync, loop)


class Struck:
    """
    Awaits the coroutine *work*, and cancels it at one of its suspensions.

    Args:
        work: What is struck.
        number: Of the suspension, from 0.
        how: "cancelled" before what it waits for has come, "too late" after that, or "dropped".

    Attributes:
        was_struck: Whether it came so far.
    """

    def __init__(self, work: Any, number: int, how: str) -> None:
        self._work, self._number, self._how = work, number, how
        self.was_struck = False

    def __await__(self) -> Generator[Any, Any, Any]:
        for number in itertools.count():
            try:
                waits_for = self._work.send(None)
            except StopIteration as end:
                return end.value
            if number == self._number and self._how == "too late":
                yield waits_for
            if number == self._number:
                self._strike()
                return None
            yield waits_for

    def _strike(self) -> None:
        self.was_struck = True
        if self._how == "dropped":
            self._work.close()
            return
        try:
            self._work.throw(asyncio.CancelledError())
        except asyncio.CancelledError:
            return
        raise AssertionError("it goes on although it was cancelled")
