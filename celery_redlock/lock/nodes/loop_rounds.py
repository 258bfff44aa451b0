"""
Rounds for the tasks of an asyncio event loop, over the connections that threads use, too.

The loop watches the selector of the connections, which can itself be waited for, and reads as a
thread would: whoever comes first hands every reply to the round that it belongs to. What tasks ask
in one turn of the loop goes out in one write per node. What may wait for longer than a turn, like
the first connection, goes on in a thread, once for all who want it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence

from celery_redlock.lock import clock
from celery_redlock.lock.nodes.connections import Waiter
from celery_redlock.lock.nodes.fanout import Fanout
from celery_redlock.lock.nodes.round import Round

__all__ = ["LoopRounds", "do_for"]

#: Most rounds under way at once; the others wait. A node answers a thousand that come in one write
#: too late: it is not away, but has them to do.
MOST_AT_ONCE = 100
#: How many times in a row a loop is woken by what only threads wait for; then it looks away.
MOST_UNWANTED = 8
#: A round, and what its task waits for.
Asked = tuple[Round, "asyncio.Future[None]"]


class LoopWaiter(Waiter):
    """Rounds that tasks of a loop wait for; *look* has the loop tell those that are decided."""

    __slots__ = ("_look", "asked")
    reads = False

    def __init__(self, asked: list[Asked], deadline: float, look: Callable[[], None]) -> None:
        super().__init__([one for one, _ in asked], deadline)
        self.asked, self._look = asked, look

    @property
    def is_decided(self) -> bool:
        return not all(one.is_open for one in self.rounds)

    def rouse(self) -> None:
        self._look()

    def tell_decided(self) -> None:
        still = []
        for one, future in self.asked:
            if one.is_open and not future.done():
                still.append((one, future))
            elif not future.done():
                future.set_result(None)
        self.asked, self.rounds = still, [one for one, _ in still]

    def tell_all(self) -> None:
        for _, future in self.asked:
            if not future.done():
                future.set_result(None)


class LoopRounds:
    """The rounds of one event loop over a *fanout*. For the thread of the loop alone."""

    def __init__(self, fanout: Fanout, loop: asyncio.AbstractEventLoop) -> None:
        self._fanout, self._loop = fanout, loop
        self.pid = os.getpid()
        self._asked: list[Asked] = []
        self._open: list[LoopWaiter] = []
        self._watched: int | None = None
        self._is_reading = self._sends_soon = False
        self._unwanted = 0
        self._timer: asyncio.TimerHandle | None = None
        self._in_threads: dict[Callable[[], None], asyncio.Future[None]] = {}

    def leave(self) -> None:
        """Wait for nothing any more: in a forked child all this is the parent's."""
        if self._watched is not None:
            self._loop.remove_reader(self._watched)
        if self._timer is not None:
            self._timer.cancel()

    async def ask(self, rounds: Sequence[Round]) -> None:
        """Put *rounds* to every node, as `Fanout.ask` does."""
        if not self._fanout.is_ready:
            await self._do(self._fanout.get_ready)
        asked = [(one, self._loop.create_future()) for one in rounds]
        try:
            self._asked += asked
            if self._open or len(self._asked) > len(asked):
                self._send_soon()
            else:  # nobody else asks
                self._send()
            for _, future in asked:
                await future
        except BaseException:
            self._forget(asked)
            raise
        for _ in range(2):  # what somebody has begun may know nothing of these doubts
            if self._fanout.has_doubts():
                await self._do(self._fanout.compare_clocks)

    def _forget(self, asked: list[Asked]) -> None:
        """Never send what was not sent: it would come after the release; and wait for nothing."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            for one, future in asked:
                one.is_open = False  # a node that has forgotten the script is not asked again
                future.cancel()
            self._look()

    async def _do(self, work: Callable[[], None]) -> None:
        """
        Do *work* in a thread of its own, once for all who wait for it.

        Those of the loop's executor may all be busy, or wait for a lock of this loop. Where there
        is none to be had, the nodes are asked as they are.
        """
        doing = self._in_threads.get(work)
        if doing is None or doing.done():
            doing = self._loop.create_future()
            try:
                threading.Thread(target=do_for, args=(doing, work), daemon=True).start()
            except RuntimeError:
                return
            self._in_threads[work] = doing
        await asyncio.shield(doing)

    def _send_soon(self) -> None:
        if not self._sends_soon:
            self._sends_soon = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._sends_soon = False
        if self.pid != os.getpid():  # the parent sends it
            for _, future in self._asked:
                future.cancel()
            return
        live = [(one, future) for one, future in self._asked if not future.done()]
        room = max(0, MOST_AT_ONCE - sum(len(waiter.asked) for waiter in self._open))
        asked = live[:room]
        if not asked:
            self._asked = live
            return
        longest = self._fanout.node_timeout
        waiter = LoopWaiter(asked, clock.now() + longest, self._look_soon)
        if self._timer is None:
            self._timer = self._loop.call_later(longest, self._end_late)
        self._open.append(waiter)  # from now on they are told, whatever is raised from outside
        self._asked = live[room:]
        self._fanout.begin(waiter)
        if waiter.is_decided:  # no node can be asked
            self._look()
        self.watch()

    def _look_soon(self) -> None:
        if not self._is_reading:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                self._loop.call_soon_threadsafe(self._look)

    def _read(self) -> None:
        self._unwanted = 0 if self._open else self._unwanted + 1
        self._is_reading = True
        try:
            self._fanout.read_now()
        finally:
            self._is_reading = False
        self._look()
        if self._unwanted > MOST_UNWANTED:
            self.watch()

    def _look(self) -> None:
        for waiter in list(self._open):
            waiter.tell_decided()
            if not waiter.asked:
                self._end(waiter)

    def _end_late(self) -> None:
        """End those whose time is over; they are in the order of their deadlines."""
        self._timer = None
        try:
            while self._open and self._open[0].deadline <= clock.now():
                self._end(self._open[0])
        finally:
            if self._open:
                left = self._open[0].deadline - clock.now()
                self._timer = self._loop.call_later(left, self._end_late)
            else:
                self.watch()

    def _end(self, waiter: LoopWaiter) -> None:
        if waiter in self._open:
            self._open.remove(waiter)
            try:
                self._fanout.end(waiter)
            finally:
                waiter.tell_all()
                if self._asked:
                    self._send_soon()

    def watch(self) -> None:
        """Watch the connections if somebody waits for an answer."""
        wanted = self._fanout.fileno() if self._open else None
        if wanted == self._watched:
            return
        if self._watched is not None:
            self._loop.remove_reader(self._watched)
        if wanted is not None:
            self._loop.add_reader(wanted, self._read)
        self._watched = wanted


def do_for(future: asyncio.Future[None], work: Callable[[], None]) -> None:
    """Do *work* in this thread, and have the loop of *future* tell who waits for that."""
    tell: Callable[[], None] = functools.partial(future.set_result, None)
    try:
        work()
    except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
        tell = functools.partial(future.set_exception, error)
    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
        future.get_loop().call_soon_threadsafe(tell)
