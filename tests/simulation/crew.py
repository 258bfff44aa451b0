"""What clients do all day: take the lock, hold it for a while, renew, give it back."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from celery_redlock.errors import LockNotAcquired
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import Lease, renew_at
from celery_redlock.lock.renewal import Renewal
from celery_redlock.lock.requests import release_request
from celery_redlock.lock.rounds import Ask, MarkerStands, Pause, Tell, Wanted, acquire
from simulation.hosts import GRAIN, Host, Interrupted, Process

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["NAME", "Crew"]

NAME = "k"
#: Longest wait for the lock when all is well again [ttl], and besides [s].
PATIENCE = 20.0


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
    ) -> None:
        self.world = world
        self.until = until
        self.fence = fence
        self.length = hold * world.rules.ttl
        self.rest = (rest or hold) * world.rules.ttl
        self.patience = wait * world.rules.ttl

    def work(self, host: Host) -> Process:
        """Yield what one client does."""
        world, chance, ttl = self.world, self.world.chance, self.world.rules.ttl
        while world.now < self.until:
            yield Pause(chance.uniform(0.0, self.rest))
            lease = yield from self.take(host, chance.uniform(0.0, self.patience))
            if lease is not None:
                yield from self.hold(host, lease, chance.expovariate(1.0 / self.length))
        # All is well again, and whatever was left behind has lapsed.
        yield Pause(world.rules.quarantine + 2 * ttl)
        lease = yield from self.take(host, PATIENCE * (1.0 + ttl))
        if lease is not None:
            self.end(lease)
            yield Tell(release_request(host.rules, lease.name, lease.token))
            world.progressed.add(host.number)

    def take(
        self, host: Host, wait: float, marker: str | None = None
    ) -> Generator[Any, Any, Lease | None]:
        """Acquire the lock unless a marker stands, None if that fails."""
        host.is_acquiring = True
        wanted = Wanted(NAME, host.rules.ttl, wait, fence=self.fence, marker=marker)
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
            yield Pause(min(ahead, default=now) - now + GRAIN)
        self.end(lease)
        if habit <= 0.9:  # or it forgets to
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

    def release(self, host: Host, lease: Lease) -> Tell:
        """Return what gives the lock back."""
        request = release_request(host.rules, lease.name, lease.token)
        return Tell(request)
