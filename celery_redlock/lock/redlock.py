"""
The lock and its verbs: acquire, extend, release, hold, inspect.

Drives the algorithm of `celery_redlock.lock.algorithm.acquiring` over the connections of
`celery_redlock.lock.nodes.fanout`. The guarantee, and what it rests on:

    While a majority of lock nodes is up and keeps its data (or is quarantined after
    losing it), clocks run within the drift factor, and the process is not stopped longer
    than its lease, at most one holder per name is between its grant and its release.

    t0                               quorum                 valid_until   keys expire
    |-- send to all nodes at once ------|----- trusted --------|-- drift ----|
    '<-------------------------- ttl on every node ------------------------->'

For writes that must not happen twice even then, pass the fence to the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from celery_redlock.errors import (
    ConfigurationError,
    LockLost,
    QuorumUnavailable,
)
from celery_redlock.events import LeaderElected, Observer
from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.acquiring import Steps
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.algorithm.renewal import Renewal
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.algorithm.results import (
    NodeView,
    ReleaseOutcome,
)
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lead import request_to_lead, resign
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.lock_events import of_release
from celery_redlock.lock.locks import Locks
from celery_redlock.lock.nodes.credentials import with_credentials
from celery_redlock.lock.nodes.urls import rules_for
from celery_redlock.lock.rules import Rules, in_seconds
from celery_redlock.lock.scripts.votes import votes_by_node
from celery_redlock.process.deferral import defer_signals
from celery_redlock.process.ending import end

__all__ = ["Redlock"]


class Redlock(Locks):
    """
    Locks on independent Redis or Valkey nodes. Safe from any thread, and after a fork.

    Nodes are connected by the first call, in each process.

    Args:
        nodes: URLs or Sentinel services, as the setting ``redlock_nodes``; an odd number.
        rules: What all clients of these nodes agree on.
        observers: Receive events.
        sleep: Waits between two attempts [s].

    Raises:
        ConfigurationError: The nodes are impossible.
    """

    @classmethod
    def from_urls(
        cls,
        urls: Sequence[Any],
        *,
        username: str | None = None,
        password: str | None = None,
        observers: Iterable[Observer] = (),
        **settings: Any,
    ) -> Redlock:
        """
        Return locks on the nodes at *urls*.

        Args:
            urls: As *nodes* above.
            username: For all nodes that have none of their own; None for the default user.
            password: Likewise; None for none.
            observers: As above.
            **settings: Fields of `Rules`: ``ttl``, ``wait``, ``max_ttl``, ``node_timeout``,
                ``drift_factor``, ``restart_guard``, ``prefix``, ``fence`` ...

        Raises:
            ConfigurationError: A setting is unknown or out of range.
        """
        unknown = set(settings) - set(Rules.__dataclass_fields__)
        if unknown:
            known = ", ".join(sorted(Rules.__dataclass_fields__))
            msg = f"unknown setting {min(unknown)!r}; known are {known}"
            raise ConfigurationError(msg)
        nodes = with_credentials(urls, username, password)
        return cls(nodes, rules_for(nodes, **settings), observers)

    @contextlib.contextmanager
    def hold(
        self,
        name: str,
        *,
        ttl: float | timedelta | None = None,
        wait: float | timedelta | None = None,
    ) -> Iterator[HeldLock]:
        """
        Hold the lock *name* for the body of a ``with``, renewing it as long as that takes.

        Args:
            name: Lock name.
            ttl: Lease written to every node [s, or a timedelta]; as in the rules by default.
            wait: How long to keep trying [likewise]; as in the rules by default.

        Raises:
            LockTaken: Another holder has it.
            QuorumUnavailable: No quorum could decide.
            LockLost: The body ended without an error, but the lock was lost on the way.
        """
        held = self.take(self.request(name, ttl, wait))
        try:
            yield held
            held.ensure_held()
        finally:
            try:
                self.give_back(held)
            except BaseException:  # interrupted, perhaps before a byte was sent
                self.give_back(held)
                raise

    def lead(self, name: str, *, ttl: float | timedelta | None = None) -> Iterator[HeldLock]:
        """
        Wait until this process leads, and go on as long as it does; then wait again.

            for term in locks.lead("billing"):
                send_what_is_due(fence=term.fence)

        The lock is kept from one round to the next, and is given up at the end of the loop. What
        takes long within a round calls ``term.ensure_held()``, or looks at ``term.is_lost``.

        Args:
            name: Lock name.
            ttl: Lease written to every node [s, or a timedelta]: how long others wait for a leader
                that was killed; as in the rules by default.

        Yields:
            The lock that is held, whose fence grows with each term.
        """
        while True:
            held = self.take(request_to_lead(self, name, ttl))
            try:
                self.notify(LeaderElected(held.name, held.fence))
                while not held.is_lost:
                    yield held
            finally:
                try:
                    resign(self, held, self.give_back)
                except BaseException:  # interrupted, perhaps before a byte was sent
                    self.give_back(held)
                    raise

    def acquire(
        self,
        name: str,
        *,
        ttl: float | timedelta | None = None,
        wait: float | timedelta | None = None,
    ) -> Lease:
        """
        Acquire the lock *name*; the caller extends and releases it.

        Args:
            name: Lock name.
            ttl: Lease written to every node [s, or a timedelta]; as in the rules by default.
            wait: How long to keep trying [likewise]; as in the rules by default.

        Raises:
            LockTaken: Another holder has it.
            QuorumUnavailable: No quorum could decide.
            ConfigurationError: *ttl* is longer than ``max_ttl``, or no number.
        """
        return self._acquire(self.request(name, ttl, wait))

    def extend(self, lease: Lease) -> Lease:
        """
        Return a new lease in place of *lease*, which may not be used again.

        Raises:
            LockLost: It has ended, or a quorum no longer holds its token.
            QuorumUnavailable: Too few nodes answered; *lease* stays what it was, and may
                be extended again until it ends.
        """
        return self.driver.drive(self.extension(lease))

    def extension(self, lease: Lease) -> Steps:
        """Extend *lease*, whoever drives this."""
        renewal = Renewal(self.participant, lease)
        if renewal.started >= lease.valid_until:  # nobody needs the keys that this would restore
            raise LockLost(lease.name, "deadline")
        ballot = yield Ask(renewal.request(), renewal.decided)
        outcome = renewal.outcome(ballot)
        if isinstance(outcome, str):
            self.let_go(lease)
            raise LockLost(lease.name, outcome, votes_by_node(ballot, self.labels))
        if outcome is None:
            raise QuorumUnavailable(lease.name, votes_by_node(ballot, self.labels))
        return outcome

    def release(self, lease: Lease, *, wait: bool = True) -> ReleaseOutcome:
        """
        Release *lease* on all nodes. Never raises.

        Args:
            lease: Of this process or another; only its own token is deleted.
            wait: Whether to wait for the nodes' answers; False writes and returns UNKNOWN.
        """
        try:
            outcome = (
                self._release(lease.name, lease.token, place=lease.place)
                if wait
                else self.let_go(lease)
            )
        except BaseException:  # interrupted, perhaps before a byte was sent
            self.let_go(lease)
            raise
        self.notify(of_release(lease, max(0.0, clock.wall() - lease.since)))
        return outcome

    def inspect(self, name: str) -> list[NodeView]:
        """Return what each node knows of the lock *name*, in the order of the nodes."""
        return self.inspect_all([name])[0]

    def close(self) -> None:
        """
        Drop all connections, once what was told has arrived; leases that are held go on.

        What a node that is away was told waits for the next connection to it, if there is one.
        """
        end()
        with defer_signals():  # or a thread might wait for good for an event that is half set
            self.fanout.close()
            if self.listener is not None:
                self.listener.close()

    def request(
        self,
        name: str,
        ttl: float | timedelta | None = None,
        wait: float | timedelta | None = None,
    ) -> LockRequest:
        """Return the request for a lock, as `acquire` makes it of these."""
        return LockRequest(name, *self._ttl_and_wait(ttl, wait), self.rules.fence)

    def _ttl_and_wait(
        self, ttl: float | timedelta | None, wait: float | timedelta | None
    ) -> tuple[float, float]:
        return (
            self.rules.ttl if ttl is None else self.rules.check_ttl(ttl),
            self.rules.wait if wait is None else in_seconds("wait", wait),
        )
