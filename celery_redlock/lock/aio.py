"""
The lock in asyncio: the verbs of `Redlock`, awaited.

The algorithm is the same, and so are keys, settings and guarantees: a holder in a worker and one in
an event loop exclude each other. Renewal stays with the watchdog's thread, which goes on while a
loop is blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from celery_redlock.events import LeaderElected, Observer
from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.algorithm.results import (
    NodeView,
    ReleaseOutcome,
    release_is_decided,
    release_outcome,
    views,
)
from celery_redlock.lock.held import HeldLock, this_process
from celery_redlock.lock.lead import request_to_lead, resign
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.lock_events import of_release
from celery_redlock.lock.loop_driver import LoopDriver, LoopWaiting
from celery_redlock.lock.nodes.loop_rounds import do_for
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts import requests
from celery_redlock.process.mutex import run_elsewhere

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

__all__ = ["AsyncRedlock"]


class Frame:
    """Gives *held* back when it is dropped: no loop that was closed ends its generators."""

    def __init__(self, held: HeldLock, give_back: Callable[[HeldLock], None]) -> None:
        self.held: HeldLock | None = held
        self._give_back = give_back

    def __del__(self) -> None:
        if self.held is not None:
            self._give_back(self.held)


class AsyncRedlock:
    """
    Locks on independent Redis or Valkey nodes for the tasks of an event loop.

    Of any loop of the process, one after another or at once, and after a fork. A task that is
    cancelled while it waits for a lock leaves nothing behind.

    Arguments and errors are those of `Redlock`.
    """

    def __init__(
        self, nodes: Sequence[Any], rules: Rules | None = None, observers: Iterable[Observer] = ()
    ) -> None:
        self._share(Redlock(nodes, rules, observers))

    def _share(self, locks: Redlock) -> None:
        self._locks = locks
        self._driver = LoopDriver(locks.driver, locks.fanout)
        self._participant = locks.participant
        if self._driver.is_native:
            self._participant = replace(locks.participant, waiting=LoopWaiting)

    @classmethod
    def from_urls(cls, urls: Sequence[Any], **options: Any) -> Self:
        """Return locks on the nodes at *urls*; arguments and errors as of `Redlock.from_urls`."""
        return cls.of(Redlock.from_urls(urls, **options))

    @classmethod
    def of(cls, locks: Redlock) -> Self:
        """Return the same *locks*, awaited; they share settings, connections and watchdog."""
        if not isinstance(locks, Redlock):
            msg = f"AsyncRedlock.of() takes a Redlock, not {type(locks).__name__}"
            raise TypeError(msg)
        found = cls.__new__(cls)
        found._share(locks)  # noqa: SLF001  of this class
        return found

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {', '.join(self.labels)}>"

    @property
    def rules(self) -> Rules:
        """What all clients of the nodes agree on."""
        return self._locks.rules

    @property
    def labels(self) -> tuple[str, ...]:
        """One label per node, in their order, without passwords."""
        return self._locks.labels

    @contextlib.asynccontextmanager
    async def hold(
        self,
        name: str,
        *,
        ttl: float | timedelta | None = None,
        wait: float | timedelta | None = None,
    ) -> AsyncIterator[HeldLock]:
        """
        Hold the lock *name* for the body of an ``async with``, renewing it as long as that takes.

        Arguments and errors are those of `Redlock.hold`.
        """
        held = await self._take(self._locks.request(name, ttl, wait))
        try:
            yield held
            held.ensure_held()
            await self._released(held)
        except BaseException:  # perhaps struck as it was released, before a byte was sent
            try:
                self._give_back(held)
            except BaseException:
                self._give_back(held)
                raise
            raise

    async def lead(
        self, name: str, *, ttl: float | timedelta | None = None
    ) -> AsyncIterator[HeldLock]:
        """
        Wait until this process leads, and go on as long as it does, as `Redlock.lead`.

            async for term in locks.lead("billing"):
                await send_what_is_due(fence=term.fence)

        A loop that ends early gives the lock up when its generator is closed; where that has to be
        at once, close it with `contextlib.aclosing`.
        """
        while True:
            held = await self._take(request_to_lead(self._locks, name, ttl))
            frame = Frame(held, self._give_back)
            try:
                self._locks.notify(LeaderElected(held.name, held.fence))
                while not held.is_lost:
                    yield held
                    await asyncio.sleep(0)  # a body that awaits nothing must not block the loop
            finally:
                try:
                    resign(self._locks, held, self._give_back)
                except BaseException:  # interrupted, perhaps before a byte was sent
                    self._give_back(held)
                    raise
                finally:
                    frame.held = None

    async def acquire(
        self,
        name: str,
        *,
        ttl: float | timedelta | None = None,
        wait: float | timedelta | None = None,
    ) -> Lease:
        """Acquire the lock *name*, as `Redlock.acquire`; the caller extends and releases it."""
        return await self._acquire(self._locks.request(name, ttl, wait))

    async def extend(self, lease: Lease) -> Lease:
        """Return a new lease in place of *lease*, as `Redlock.extend`."""
        return await self._driver.drive(self._locks.extension(lease))

    async def release(self, lease: Lease, *, wait: bool = True) -> ReleaseOutcome:
        """Release *lease* on all nodes, as `Redlock.release`. Never raises but when cancelled."""
        request = requests.release_request(self.rules, lease.name, lease.token, place=lease.place)
        try:
            outcome = ReleaseOutcome.UNKNOWN
            if wait:
                outcome = release_outcome(await self._driver.ask(Ask(request, release_is_decided)))
            else:
                self._locks.let_go(lease)
        except BaseException:  # cancelled, perhaps before a byte was sent
            self._locks.let_go(lease)
            raise
        self._locks.notify(of_release(lease, max(0.0, clock.wall() - lease.since)))
        return outcome

    async def inspect(self, name: str) -> list[NodeView]:
        """Return what each node knows of the lock *name*, in the order of the nodes."""
        ballot = await self._driver.ask(Ask(requests.inspect_request(self.rules, name)))
        return views(ballot, self.labels)

    async def close(self) -> None:
        """Drop all connections; leases that are held go on."""
        if not await self._is_done_elsewhere(self._locks.close):
            self._locks.close()
        self._driver.look_away()

    def _give_back(self, held: HeldLock) -> None:
        """Release *held*, where nothing may be awaited; a renewal under way is waited for."""
        is_renewing = self._locks.is_renewing(held)
        if not (is_renewing and run_elsewhere(self._locks.give_back, held)):
            self._locks.give_back(held)

    async def _released(self, held: HeldLock) -> None:
        give_back = partial(self._locks.give_back, held)
        is_renewing = self._locks.is_renewing(held)
        if not (is_renewing and await self._is_done_elsewhere(give_back)):
            give_back()

    async def _is_done_elsewhere(self, work: Callable[[], None]) -> bool:
        """Have a thread do *work*, which may wait, and return whether one could be had."""
        done = asyncio.get_running_loop().create_future()
        if not run_elsewhere(do_for, done, work):
            return False
        await asyncio.shield(done)  # cancelled, it is done all the same
        return True

    async def _take(self, request: LockRequest) -> HeldLock:
        began_in = this_process()
        lease = await self._acquire(request)
        try:
            return self._locks.watch(lease)
        except BaseException:
            self._locks.take_back(lease, began_in)
            raise

    async def _acquire(self, request: LockRequest) -> Lease:
        return await self._driver.drive(self._locks.acquisition(self._participant, request))
