"""The locks of a process on its nodes: taken, renewed by the watchdog, released."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from celery_redlock.errors import LockNotAcquired
from celery_redlock.events import LockReleased, Observer, broadcast
from celery_redlock.lock import clock
from celery_redlock.lock.algorithm import acquiring
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.algorithm.renewal import Renewal
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.algorithm.results import (
    NodeView,
    ReleaseOutcome,
    release_is_decided,
    release_outcome,
    views,
)
from celery_redlock.lock.algorithm.several import acquire_all
from celery_redlock.lock.driver import Driver
from celery_redlock.lock.held import HeldLock, ensure_not_forked, this_process
from celery_redlock.lock.lease import Lease, quorum
from celery_redlock.lock.lock_events import of_grant, of_refusal, of_release, of_renewal, who
from celery_redlock.lock.nodes.address import Address, addresses_of
from celery_redlock.lock.nodes.cluster import with_hash_tag
from celery_redlock.lock.nodes.fanout import Fanout
from celery_redlock.lock.nodes.urls import rules_for
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts import requests
from celery_redlock.lock.scripts.requests import Marker
from celery_redlock.lock.scripts.votes import Ballot, VoteKind, count, votes_by_node
from celery_redlock.lock.waiting.listener import Listener
from celery_redlock.lock.watchdog import NotRenewed, Watchdog
from celery_redlock.process.mutex import run_elsewhere

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

__all__ = ["Locks"]


class Locks:
    """
    Locks that the watchdog renews until they are released; what `Redlock` is made of.

    Arguments and errors are those of `Redlock`.
    """

    def __init__(
        self,
        nodes: Sequence[Any],
        rules: Rules | None = None,
        observers: Iterable[Observer] = (),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rules = with_hash_tag(rules or rules_for(nodes), nodes)
        self.nodes = tuple(nodes)
        self.notify = broadcast(observers)
        #: The connections of this process, what this client knows, and what does its I/O: for
        #: those who keep other records on the nodes, or ask how these are.
        addresses = addresses_of(nodes, self.rules.prefix)
        self.fanout = self._new_fanout(addresses)
        self.participant = Participant(self.rules, self.fanout.labels)
        #: Hears which of the locks may be free that somebody waits for in this process.
        self.listener = self._new_listener(addresses)
        self.driver = Driver(self.fanout, sleep)
        if self.listener is not None:
            self.participant.listener = self.listener
            self.listener.serve(self.driver)
        self._watchdog = self._new_watchdog()

    def under(self, rules: Rules, observers: Iterable[Observer]) -> Self:
        """
        Return other locks over the same connections, which neither meet these nor wake anybody.

        Args:
            rules: With another prefix, and no restart guard but that of the connections.
            observers: Receive their events; those of the nodes go where they went.
        """
        others = copy.copy(self)
        others.rules, others.notify, others.listener = rules, broadcast(observers), None
        others.participant = replace(self.participant, rules=rules, listener=None)
        others._watchdog = others._new_watchdog()  # noqa: SLF001  of this class
        return others

    # -- parts that `celery_redlock.testing` has of its own -----------------------

    def _new_fanout(self, addresses: Sequence[Address]) -> Fanout:
        return Fanout(addresses, self.rules, self.notify)

    def _new_listener(self, addresses: Sequence[Address]) -> Listener | None:
        return Listener(addresses, self.rules.prefix, self.fanout.round_trip)

    def _new_watchdog(self) -> Watchdog:
        return Watchdog(self._extend_all, self._tell_renewal)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {', '.join(self.labels)}>"

    @property
    def labels(self) -> tuple[str, ...]:
        """One label per node, in their order, without passwords."""
        return self.fanout.labels

    @property
    def held(self) -> list[HeldLock]:
        """The locks that the watchdog of this process renews."""
        return self._watchdog.held

    def is_renewing(self, held: HeldLock) -> bool:
        """Whether `give_back` would wait, for a round that renews *held*."""
        return self._watchdog.is_asking_for(held)

    # -- taken, and released ----------------------------------------------------

    def take(
        self, request: LockRequest, on_lost: Callable[[HeldLock], None] | None = None
    ) -> HeldLock:
        """
        Acquire the lock of *request* and let the watchdog renew it until `give_back`.

        *on_lost* is called once, in the watchdog's thread, when the lock is lost. Raises what
        `acquiring.acquire` does.
        """
        began_in = this_process()
        lease = self._acquire(request)
        try:
            return self.watch(lease, on_lost)
        except BaseException:
            self.take_back(lease, began_in)
            raise

    def take_all(
        self,
        lock_requests: Sequence[LockRequest],
        on_lost: Callable[[HeldLock], None] | None = None,
    ) -> dict[str, HeldLock]:
        """
        Acquire all *lock_requests*, or nothing, and have it renewed until `give_back`.

        What stands is not renewed, and `give_back` takes it back.

        For callers that defer signals: one that strikes as this returns leaves locks behind.
        Returns the locks by name, in the order in which they were granted; no two requests may
        be of one name. Otherwise as `take`.
        """
        if not lock_requests:
            return {}
        started, began_in = clock.now(), this_process()
        try:
            leases = self.driver.drive(
                acquire_all(self.participant, lock_requests), lock_requests[0].ends
            )
        except LockNotAcquired as error:
            self.notify(of_refusal(error, lock_requests[0].info, clock.now() - started))
            raise
        try:
            standing = {one.name for one in lock_requests if one.stands}
            # Where only a start was asked for, its grant is that of the execution.
            told = [one for one in lock_requests if not one.stands] or lock_requests[-1:]
            for one in told:
                self.notify(of_grant(leases[one.name], one, clock.now() - started))
            ensure_not_forked(began_in)  # by an observer
            held = {
                name: HeldLock(lease) if name in standing else self.watch(lease, on_lost)
                for name, lease in leases.items()
            }
        except BaseException:
            for lease in leases.values():
                self.take_back(lease, began_in)
            raise
        return held

    def watch(self, lease: Lease, on_lost: Callable[[HeldLock], None] | None = None) -> HeldLock:
        """Let the watchdog renew *lease* until `give_back`; `take_back` it if that fails."""
        held = HeldLock(lease, on_lost)
        started = lease.valid_until - lease.ttl * (1.0 - self.rules.drift_factor)
        self._watchdog.watch(held, started)
        return held

    def give_back(
        self,
        held: HeldLock,
        *,
        keep: float = 0.0,
        marker: Marker | None = None,
        waits: bool = False,
    ) -> None:
        """
        Release *held* on all nodes. Never fails.

        In a forked child of the holder nothing happens: the parent goes on under its lock.

        Args:
            held: From `take`.
            keep: Keep the key for so much longer instead [s].
            marker: To be set in the same step.
            waits: Whether to wait until a majority has released it, for a round trip.
        """
        if self.fanout.is_stuck() or self._watchdog.is_stuck():
            return  # what a generator's end asks for as the interpreter ends; the lease ends, too
        if self.fanout.is_in_use_here() or self._watchdog.is_in_use_here():
            run_elsewhere(partial(self.give_back, held, keep=keep, marker=marker))
            return
        lost, lease = self._watchdog.unwatch(held), held.lease
        if lost == "fork":
            return
        held.released()
        request = requests.release_request(
            self.rules, lease.name, lease.token, keep=keep, marker=marker, place=lease.place
        )
        if waits:
            self.driver.ask(Ask(request, release_is_decided))
        else:
            self.driver.tell(request)
        if held.ends():  # this may come twice: interrupted, or by a thread as well
            why = "" if lost in (None, "released") else lost
            self.notify(of_release(lease, held.held_for, why))

    def release_for(
        self,
        name: str,
        owner: str,
        *,
        since: float,
        keep: float = 0.0,
        info: dict[str, Any] | None = None,
        place: int = 0,
    ) -> ReleaseOutcome:
        """
        Release the lock for a holder that no longer can, and that *owner* is of.

        *since* [s, Unix time] and *info* are of the holder, for the event; *keep* as in
        `give_back`. Somebody else's lock stays what it is.
        """
        outcome = self._release(name, owner, keep, place)
        if outcome is ReleaseOutcome.RELEASED:
            held = max(0.0, clock.wall() - since)
            self.notify(LockReleased(name, held, **who(info or {})))
        return outcome

    def mark(self, marker: Marker, *, wait: bool = False) -> None:
        """
        Set *marker* on all nodes; with a ttl of 0, delete one of its name and state.

        Args:
            marker: What to remember.
            wait: Whether to wait for the answers of a majority, and for connections before.
        """
        request = requests.mark_request(self.rules, marker)
        if wait:
            majority = quorum(len(self.labels))
            self.driver.ask(
                Ask(request, lambda ballot: count(ballot, VoteKind.GRANTED) >= majority)
            )
        else:
            self.driver.tell(request)

    def inspect_all(self, names: Sequence[str], ends: float | None = None) -> list[list[NodeView]]:
        """
        Return what `inspect` returns, for each of *names*, asked for in one round.

        Args:
            names: Of locks.
            ends: Wait for no answer after that [s, our clock]; None for no such limit.
        """
        asked = [Ask(requests.inspect_request(self.rules, name)) for name in names]
        return [views(ballot, self.labels) for ballot in self.driver.ask_all(asked, ends)]

    # -- driving the algorithm -----------------------------------------------------

    def let_go(self, lease: Lease, *, keep: float = 0.0) -> ReleaseOutcome:
        """Release *lease* without a word of it, or *keep* it for so long [s]; wait for nothing."""
        name, token, place = lease.name, lease.token, lease.place
        self.driver.tell(requests.release_request(self.rules, name, token, keep=keep, place=place))
        return ReleaseOutcome.UNKNOWN

    def _release(self, name: str, token: str, keep: float = 0.0, place: int = 0) -> ReleaseOutcome:
        request = requests.release_request(self.rules, name, token, keep=keep, place=place)
        return release_outcome(self.driver.ask(Ask(request, release_is_decided)))

    def _acquire(self, request: LockRequest) -> Lease:
        return self.driver.drive(self.acquisition(self.participant, request), request.ends)

    def acquisition(self, participant: Participant, request: LockRequest) -> acquiring.Steps:
        """Acquire the lock of *request*, whoever drives this, and notify observers."""
        started, began_in = clock.now(), this_process()
        try:
            lease = yield from acquiring.acquire(participant, request)
        except LockNotAcquired as error:
            self.notify(of_refusal(error, request.info, clock.now() - started))
            raise
        try:
            self.notify(of_grant(lease, request, clock.now() - started))
            ensure_not_forked(began_in)  # by an observer
        except BaseException:
            self.take_back(lease, began_in)
            raise
        return lease

    def take_back(self, lease: Lease, began_in: object) -> None:
        """Release a lease that an interruption keeps from its caller, if it is not a parent's."""
        if this_process() is not began_in:
            return
        for held in self._watchdog.held:
            if held.token == lease.token:
                self._watchdog.unwatch(held)
        self.let_go(lease)

    def _extend_all(self, leases: Sequence[Lease]) -> list[Lease | NotRenewed]:
        renewals = [Renewal(self.participant, lease) for lease in leases]
        ballots = self.driver.ask_all([Ask(r.request(), r.decided) for r in renewals])
        return [self._outcome(*one) for one in zip(renewals, ballots, strict=True)]

    def _outcome(self, renewal: Renewal, ballot: Ballot) -> Lease | NotRenewed:
        outcome = renewal.outcome(ballot)
        if isinstance(outcome, Lease):
            return outcome
        return NotRenewed(outcome, votes_by_node(ballot, self.labels))

    def _tell_renewal(self, held: HeldLock, margin: float | None) -> None:
        self.notify(of_renewal(held, margin))
