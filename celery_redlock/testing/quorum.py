"""Locks on nodes in memory: the library's own code above, no sockets and no threads below."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from celery_redlock.events import Observer
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.nodes.address import Address
from celery_redlock.lock.nodes.fanout import Fanout
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.testing.apps import app_on, rules_of
from celery_redlock.testing.asserting import name_of
from celery_redlock.testing.clock import TickedClock, TickedWatchdog
from celery_redlock.testing.fanout import MemoryFanout
from celery_redlock.testing.faults import MemoryNode

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

__all__ = ["MemoryQuorum", "OtherHolder", "memory_quorum"]


class MemoryLocks(Redlock):
    """Locks on the nodes of a memory quorum, of this process or of another one."""

    def __init__(
        self,
        servers: MemoryQuorum,
        rules: Rules,
        observers: Iterable[Observer] = (),
        *,
        is_other: bool = False,
    ) -> None:
        self._servers = servers
        clock = servers.clock
        self._is_other = is_other
        super().__init__(servers.urls, rules, observers, sleep=clock.tick)
        self.participant.now, self.participant.wall = clock.now, clock.wall

    def connected(self) -> Self:
        """Connect to all nodes: what they lose later is noticed when they lose it."""
        self.fanout.settle()
        return self

    def abandon(self, held: HeldLock) -> None:
        self._watchdog.unwatch(held)

    def _new_listener(self, addresses: Sequence[Address]) -> None:
        """Wake nobody: in memory who waits asks again."""

    def _new_watchdog(self) -> TickedWatchdog:
        clock, notify = self._servers.clock, self._tell_renewal
        return TickedWatchdog(clock, self._extend_all, notify, is_of_others=self._is_other)

    def _new_fanout(self, addresses: Sequence[Address]) -> Fanout:
        servers = self._servers
        return MemoryFanout(servers.nodes, servers.clock, addresses, self.rules, self.notify)


class OtherHolder:
    """
    Another holder of a lock of a `MemoryQuorum`. Also a context manager.

    Attributes:
        held: The lock as that holder sees it.
    """

    def __init__(self, locks: MemoryLocks, held: HeldLock) -> None:
        self._locks = locks
        self.held = held

    def __repr__(self) -> str:
        return f"<OtherHolder of {self.held!r}>"

    def release(self) -> None:
        """Release the lock; calling it twice is no error."""
        self._locks.give_back(self.held)

    def die(self) -> None:
        """End without releasing the lock: its lease expires."""
        self._locks.abandon(self.held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class MemoryQuorum:
    """
    In-memory lock nodes that you can break, with a clock you control. A context manager.

    In its ``with`` the time of all locks in this process stands still except in ``clock.tick()``,
    and locks on real servers are refused. Only code of this process can use it, so the commands of
    ``celery redlock`` do not see it. Its nodes run the scripts that servers run: tasks, their
    queue and beat's slots do there what they do in production.

    Args:
        nodes: How many nodes; an odd number.
        **settings: Fields of `Rules`, as of `Redlock.from_urls`.

    Attributes:
        nodes: The nodes, which you can break.
        clock: The time of leases and nodes.
        rules: What all its clients agree on.
        urls: As the setting ``redlock_nodes``.
        locks: A `Redlock` on these nodes, for code that locks without Celery.

    Raises:
        ConfigurationError: The nodes or settings are impossible.
    """

    def __init__(self, nodes: int = 5, **settings: Any) -> None:
        self.clock = TickedClock()
        self.nodes = tuple(MemoryNode(position, self.clock) for position in range(nodes))
        self.urls: Sequence[str] = [node.url for node in self.nodes]
        self.rules = Redlock.from_urls(self.urls, **settings).rules
        self.locks = MemoryLocks(self, self.rules)
        self._others = MemoryLocks(self, self.rules, is_other=True)
        self._stack = contextlib.ExitStack()

    def __repr__(self) -> str:
        return f"<MemoryQuorum of {', '.join(node.state for node in self.nodes)}>"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.clock.in_use())
            self.locks.connected()
            self._others.connected()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def used_by(self, app: Any) -> AbstractContextManager[None]:
        """
        Lock the tasks of *app* here for the body of a ``with``, whatever its settings.

        Locks are on meanwhile, also within `locks_disabled`.

        Args:
            app: A Celery app; its ``redlock_max_ttl`` and ``redlock_prefix`` have to be those of
                this quorum, as `memory_quorum` sees to.
        """
        return app_on(app, self)

    def locks_on(
        self,
        nodes: Sequence[Any],  # noqa: ARG002  its own are meant
        rules: Rules,
        observers: Iterable[Observer],
        sleep: Callable[[float], None],  # noqa: ARG002  here a pause ticks the clock
    ) -> Redlock:
        """Return further locks on these nodes; for `celery_redlock.plugin.Plugin`."""
        return MemoryLocks(self, rules, observers)

    def hold(self, what: Any, *, ttl: float | None = None) -> OtherHolder:
        """
        Let another process hold a lock until it is released or that holder dies.

        Args:
            what: A lock name, or a call like ``bill.s(7)``.
            ttl: Of the lease, which is renewed [s]; as in the rules by default.

        Raises:
            LockTaken: It is held already.
            QuorumUnavailable: Too many nodes are broken.
        """
        lasting = self.rules.ttl if ttl is None else self.rules.check_ttl(ttl)
        wanted = LockRequest(name_of(what), lasting, 0.0, self.rules.fence)
        return OtherHolder(self._others, self._others.take(wanted))

    def holder(self, what: Any) -> dict[str, Any] | None:
        """
        Return who holds a lock on a majority of the nodes, None if nobody does.

        Nodes that do not answer are not counted.

        Args:
            what: A lock name, or a call like ``bill.s(7)``.

        Returns:
            As `LockTaken.holder`: ``task``, ``task_id``, ``since`` ... as far as they are known.
        """
        views = self.locks.inspect(name_of(what))
        tokens = [view.holder.get("token") for view in views]
        found = (view.holder for view in views if view.holder)
        needed = quorum(len(views))
        return next((one for one in found if tokens.count(one["token"]) >= needed), None)


@contextlib.contextmanager
def memory_quorum(*apps: Any, nodes: int = 5, **settings: Any) -> Iterator[MemoryQuorum]:
    """
    Lock the tasks of *apps* on nodes in memory for the body of a ``with``.

    Args:
        *apps: Celery apps; the ``redlock_*`` settings of the first hold for the quorum.
        nodes: How many nodes; an odd number.
        **settings: Fields of `Rules`, where there is no app.

    Yields:
        The quorum, with all nodes up and empty.

    Raises:
        ConfigurationError: The settings are impossible.
        RuntimeError: Another memory quorum is in use.
    """
    if apps:
        settings = {**vars(rules_of(apps[0])), **settings}
    with MemoryQuorum(nodes, **settings) as quorum, contextlib.ExitStack() as stack:
        for app in apps:
            stack.enter_context(quorum.used_by(app))
        yield quorum
