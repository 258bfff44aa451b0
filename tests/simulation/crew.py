"""What clients do all day: take the lock, hold it for a while, renew, give it back."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery_redlock.errors import LockNotAcquired
from celery_redlock.lock.algorithm.acquiring import acquire
from celery_redlock.lock.algorithm.effects import Ask, Send, Sleep
from celery_redlock.lock.algorithm.renewal import Renewal
from celery_redlock.lock.algorithm.request import LockRequest, MarkerStands
from celery_redlock.lock.algorithm.several import acquire_all
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import Lease, renew_at
from celery_redlock.lock.records import line_key
from celery_redlock.lock.scripts.requests import release_request
from celery_redlock.lock.waiting.room import NEVER, ThreadWaiting
from celery_redlock.lock.waiting.waiting import (
    InLine,
    free_places,
    has_answered,
    leave_request,
    wait_request,
    waits_since,
)
from celery_redlock.task.rate import Rate
from simulation.hosts import GRAIN, Host, Interrupted, Process

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["NAME", "Crew", "start_of"]

NAME = "k"
#: How often a worker's main process has the nodes note again who waits in it [s].
LOOK_EVERY = 1.0
#: Longest wait for the lock when all is well again [ttl], and besides [s].
PATIENCE = 20.0


def start_of(name: str, rate: Rate, wait: float = 0.0) -> LockRequest:
    """Return what a client asks for to start something."""
    return LockRequest(
        name,
        rate.stands_for,
        wait,
        fence=False,
        limit=rate.burst,
        stands=True,
        within=rate.within,
    )


def lock_of(lease: Lease) -> str:
    """Return the name of the lock of which *lease* has a place."""
    return lease.name.partition("#")[0]


class Crew:
    """
    What clients do all day.

    Args:
        world: Where they live.
        until: When they stop [s, true time]; afterwards each takes the lock once more.
        fence: Whether they ask for fences.
        hold: How long they hold the lock on average [ttl].
        rest: How long they rest in between at most [ttl]; 0.0 for as long as they hold it.
        wait: How long they try to get it at most [ttl].
        names: Of the locks, of which they take one each time; all of them take the first one last.
        limit: How many places each lock has.
        together: How often they take all locks at once [1].
        queue: How often they wait as a message does [1].
        forgets: How often they do not release [1].
        rate: Of starts, with or without a lock; None for no starts.
        starts: How often they start something [1].
    """

    def __init__(
        self,
        world: World,
        until: float,
        *,
        fence: bool = True,
        hold: float = 1.0,
        rest: float = 0.0,
        wait: float = 1.0,
        names: Sequence[str] = (NAME,),
        limit: int = 1,
        together: float = 0.0,
        queue: float = 0.0,
        forgets: float = 0.1,
        rate: Rate | None = None,
        starts: float = 0.0,
    ) -> None:
        self.world = world
        self.until = until
        self.fence = fence
        self.length = hold * world.rules.ttl
        self.rest = (rest or hold) * world.rules.ttl
        self.patience = wait * world.rules.ttl
        self.names, self.limit = tuple(names), limit
        self.together, self.queue, self.forgets = together, queue, forgets
        self.rate, self.starts = rate, starts

    def work(self, host: Host) -> Process:
        """Yield what one client does."""
        world, chance, ttl = self.world, self.world.chance, self.world.rules.ttl
        while world.now < self.until:
            yield Sleep(chance.uniform(0.0, self.rest))
            wait = chance.uniform(0.0, self.patience)
            if self.starts and chance.random() < self.starts:
                locks = self.names if chance.random() < 0.5 else ()
                yield from self.start(host, wait, locks)
                continue
            if self.together and chance.random() < self.together:
                yield from self.work_under_all(host, wait)
                continue
            name = chance.choice(self.names) if len(self.names) > 1 else self.names[0]
            way = self.take_in_line if self.queue and chance.random() < self.queue else self.take
            lease = yield from way(host, wait, name=name)
            if lease is not None:
                yield from self.hold(host, lease, chance.expovariate(1.0 / self.length))
        # All is well again, and whatever was left behind has lapsed.
        yield Sleep(world.rules.quarantine + 2 * ttl)
        lease = yield from self.take(host, PATIENCE * (1.0 + ttl))
        if lease is not None:
            self.end(lease)
            yield self.release(host, lease)
            world.progressed.add(host.number)

    def work_under_all(self, host: Host, wait: float) -> Process:
        """Take the locks of all names in one order, or none, and hold them for a moment."""
        wanted = [self.wanted(host, name, wait=wait) for name in self.names]
        held = yield from self.take_all(host, wanted)
        yield from self.hold_all(host, held)

    def hold_all(self, host: Host, held: Sequence[Lease]) -> Process:
        """Hold locks for a moment, and give them back."""
        if held:
            length = self.world.chance.expovariate(1.0 / self.length)
            yield Sleep(min(length, self.world.rules.ttl / 4))  # so that it needs no renewal
        for lease in held:
            self.end(lease)
            yield self.release(host, lease)

    def start(self, host: Host, wait: float, locks: Sequence[str] = ()) -> Process:
        """Start something under the locks of some names, as soon as the rate of all allows it."""
        rate = self.rate
        assert rate is not None
        counted = [self.starts_of(host, name) for name in self.names]
        held = yield from self.take_all(
            host,
            [
                *(self.wanted(host, name, wait=wait) for name in locks),
                *(start_of(name, rate, wait) for name in counted),
            ],
        )
        starts = [lease for lease in held if lock_of(lease) in counted]
        for name in self.names if starts else ():
            self.world.started(name)
        yield from self.hold_all(host, [lease for lease in held if lease not in starts])
        yield from self.leave(host, starts)

    def starts_of(self, _host: Host, name: str) -> str:
        """Return the name under which starts are counted."""
        return f"{name}.rate"

    def leave(self, _host: Host, _starts: Sequence[Lease]) -> Process:
        """End what has started: it was a start all the same."""
        yield from ()

    def take_all(
        self, host: Host, wanted: Sequence[LockRequest]
    ) -> Generator[Any, Any, list[Lease]]:
        """Acquire the locks of all names; none of them if that fails."""
        host.is_acquiring = True
        try:
            leases = yield from acquire_all(host.kernel, wanted)
        except (LockNotAcquired, Interrupted, MarkerStands):
            return []
        finally:
            host.is_acquiring = False
        for one in wanted:
            if not one.stands:
                lease = leases[one.name]
                self.world.granted(host, lease, self.trusted_until(host, lease))
        return list(leases.values())

    def take_in_line(
        self, host: Host, wait: float, name: str = NAME
    ) -> Generator[Any, Any, Lease | None]:
        """
        Acquire the lock as a task does that queues: it asks once, and then whenever it is woken.

        Or by itself after *wait* [s]; None if it is refused then.
        """
        came, since, ends = self.world.now, host.kernel.wall(), host.now() + wait
        assert host.ears is not None
        one = InLine(
            name, f"{host.number:032x}", since, {}, host.ears.channel(), self.limit, asks=True
        )
        lease = yield from self.acquire(host, self.wanted(host, name))
        while lease is None and host.now() < ends:
            yield from self.wait_in_line(host, one, ends)
            lease = yield from self.acquire(host, self.wanted(host, name))
        yield Send(leave_request(host.rules, name, one.who))
        self.world.waited(host, name, came, is_granted=lease is not None)
        return lease

    def wait_in_line(self, host: Host, one: InLine, ends: float) -> Process:
        """Wait until woken, or time *ends* [s]; as a worker's main process does."""
        ears, rules = host.ears, host.rules
        assert ears is not None
        waiting = ThreadWaiting(line_key(rules.prefix, one.name), one.since, host.now)
        waiting.ran_at = NEVER  # a message, which a worker runs whenever it is woken
        ears.enter(waiting)
        is_woken = False
        while not is_woken and host.now() < ends:
            waiting.is_to_register = False
            ballot = yield Ask(wait_request(rules, one), has_answered)
            since = waits_since(ballot)
            if since is not None:
                ears.room.has_waited_since(waiting, since)
            ears.room.free(waiting.line, free_places(ballot))
            is_woken = yield Sleep(min(LOOK_EVERY, ends - host.now()), waiting)
        ears.leave(waiting)
        yield Send(wait_request(rules, replace(one, channel="", asks=False)))

    def take(
        self, host: Host, wait: float, marker: str | None = None, name: str = NAME
    ) -> Generator[Any, Any, Lease | None]:
        """Acquire the lock unless a marker stands, None if that fails."""
        came = self.world.now
        lease = yield from self.acquire(host, self.wanted(host, name, wait=wait, marker=marker))
        self.world.waited(host, name, came, is_granted=lease is not None)
        return lease

    def wanted(self, host: Host, name: str, **more: Any) -> LockRequest:
        """Return what a client asks for."""
        return LockRequest(name, host.rules.ttl, fence=self.fence, limit=self.limit, **more)

    def acquire(self, host: Host, wanted: LockRequest) -> Generator[Any, Any, Lease | None]:
        """Acquire what is wanted, None if that fails."""
        host.is_acquiring = True
        try:
            lease = yield from acquire(host.kernel, wanted)
        except (LockNotAcquired, Interrupted, MarkerStands):
            return None
        finally:
            host.is_acquiring = False
        self.world.granted(host, lease, self.trusted_until(host, lease))
        return lease

    def hold(self, host: Host, lease: Lease, length: float) -> Process:
        """Hold the lock for *length* [s], renewing it as the watchdog would, or not at all."""
        habit = self.world.chance.random()
        held = HeldLock(lease)
        ends = host.now() + length
        due = renew_at(host.now(), lease.ttl) if habit < 0.8 else float("inf")
        while host.now() < ends and not held.is_lost:
            if host.now() >= due:
                due = yield from self.renew(host, held)
            now, changes = host.now(), (due, ends, held.lease.valid_until)
            ahead = [when for when in changes if now < when < float("inf")]
            yield Sleep(min(ahead, default=now) - now + GRAIN)
        self.end(lease)
        if habit <= 1.0 - self.forgets:
            yield self.release(host, lease)

    def renew(self, host: Host, held: HeldLock) -> Generator[Any, Any, float]:
        """Renew once, as the watchdog does; return when to do so again [s]."""
        renewal = Renewal(host.kernel, held.lease)
        ballot = yield Ask(renewal.request(), renewal.decided)
        outcome = renewal.outcome(ballot)
        if isinstance(outcome, Lease) and held.renewed(outcome):
            self.world.renewed(outcome, self.trusted_until(host, outcome))
            return renew_at(renewal.started, held.ttl)
        if outcome is not None:
            held.lose(outcome if isinstance(outcome, str) else "deadline")
            self.end(held.lease)
            return float("inf")
        return renewal.started + held.ttl / 12.0 * self.world.chance.uniform(0.75, 1.25)

    def trusted_until(self, host: Host, lease: Lease) -> float:
        """Return when the holder stops on its own [s, true time]."""
        return host.clock.when(lease.valid_until)

    def end(self, lease: Lease) -> None:
        """Note that the holder trusts its lock no longer."""
        self.world.ended(lease.token)

    def release(self, host: Host, lease: Lease) -> Send:
        """Return what gives the lock back."""
        name, token, place = lease.name, lease.token, lease.place
        return Send(release_request(host.rules, name, token, place=place))
