"""Carry out the effects of an algorithm in an asyncio event loop, which never waits."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.effects import Ask, Send, Sleep
from celery_redlock.lock.driver import Driver
from celery_redlock.lock.held import ensure_not_forked, this_process
from celery_redlock.lock.nodes.fanout import Fanout
from celery_redlock.lock.nodes.loop_rounds import LoopRounds
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.scripts.votes import Ballot
from celery_redlock.lock.waiting.room import ThreadWaiting

__all__ = ["LoopDriver", "LoopWaiting"]

T = TypeVar("T")


def nobody() -> None:
    """Return nobody who sleeps."""


def end_sleep(rung: asyncio.Future[None] | None) -> None:
    if rung is not None and not rung.done():
        rung.set_result(None)


class LoopWaiting(ThreadWaiting):
    """A task of an event loop that waits; it sleeps in `wait_in_loop`."""

    def __init__(
        self, line: bytes, since: float, now: Callable[[], float] = clock.now, who: str = ""
    ) -> None:
        super().__init__(line, since, now, who)
        # Neither is kept: of a loop that was closed amid its tasks they would be for good.
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._rung: Callable[[], asyncio.Future[None] | None] = nobody

    def _ring(self) -> None:
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed, and nobody sleeps
                loop.call_soon_threadsafe(self._end_sleep)

    def _end_sleep(self) -> None:
        end_sleep(self._rung())

    async def wait_in_loop(self, seconds: float) -> bool:
        """
        Sleep until woken, at most so long [s]; return whether it was woken.

        Not by `asyncio.wait_for`, which before Python 3.12 may swallow a cancellation.
        """
        ends, loop = self._now() + seconds, asyncio.get_running_loop()
        while (left := self.seconds_left(ends)) > 0:
            rung = loop.create_future()
            self._rung = weakref.ref(rung)
            # The timer keeps it, or a task that nobody else knows would be collected as it sleeps.
            timer = loop.call_later(left, end_sleep, rung)
            try:
                await rung
            finally:
                timer.cancel()
        return self.was_woken()


class LoopDriver:
    """
    Drives algorithms over the connections of one process, for tasks of any event loop.

    An algorithm that is interrupted, as its task is cancelled, sends what leaves nothing behind;
    that waits for nothing.
    """

    def __init__(self, driver: Driver, fanout: Fanout) -> None:
        self._driver = driver
        self._fanout = fanout
        self._nodes = len(fanout.labels)
        #: Whether a loop can wait for the nodes; those in memory answer at once.
        self.is_native = fanout.fileno() is not None
        self._of_loops: dict[asyncio.AbstractEventLoop, LoopRounds] = {}

    async def drive(self, steps: Generator[Ask | Send | Sleep, Any, T]) -> T:
        """Do what *steps* say; nothing more in a forked child, as `Driver.drive`."""
        began_in = this_process()
        if not self.is_native:
            return self._driver.drive(steps)
        answer: Ballot | bool | None = None
        problem: BaseException | None = None
        dropped: GeneratorExit | None = None
        while True:
            try:
                while True:
                    ensure_not_forked(began_in)
                    step = steps.send(answer) if problem is None else steps.throw(problem)
                    answer = problem = None
                    answer = await self._do(step)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            except BaseException as error:
                if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:  # its own last word
                    if dropped is not None:
                        raise dropped from None
                    raise
                if this_process() is not began_in:
                    steps.close()
                    raise
                problem = error
                if isinstance(error, GeneratorExit):  # waits for nothing, but it can send
                    dropped, problem = error, asyncio.CancelledError()

    async def _do(self, step: Ask | Send | Sleep) -> Ballot | bool | None:
        if isinstance(step, Ask):
            return (await self.ask_all([step]))[0]
        if isinstance(step, Send):
            self._driver.tell(step.request, step.skip)
            return None
        if isinstance(step.waiting, LoopWaiting):
            return await step.waiting.wait_in_loop(step.seconds)
        await asyncio.sleep(step.seconds)
        return None

    async def ask(self, step: Ask) -> Ballot:
        """Return the ballot of one question."""
        return (await self.ask_all([step]))[0]

    async def ask_all(self, steps: Sequence[Ask]) -> list[Ballot]:
        """Return the ballots of several, asked at once."""
        if not self.is_native:
            return self._driver.ask_all(steps)
        rounds = [Round(step.request, self._nodes, step.decided) for step in steps]
        await self._rounds_of(asyncio.get_running_loop()).ask(rounds)
        return [a_round.ballot for a_round in rounds]

    def look_away(self) -> None:
        """Have this loop no longer watch connections that nobody waits for."""
        rounds = self._of_loops.get(asyncio.get_running_loop())
        if rounds is not None:
            rounds.watch()

    def _rounds_of(self, loop: asyncio.AbstractEventLoop) -> LoopRounds:
        found = self._of_loops.get(loop)
        if found is None or found.pid != os.getpid():
            if found is not None:
                found.leave()
            for other in list(self._of_loops):  # a view may have a loop of its own for each request
                if other.is_closed():
                    self._of_loops.pop(other, None)
            found = self._of_loops[loop] = LoopRounds(self._fanout, loop)
        return found
