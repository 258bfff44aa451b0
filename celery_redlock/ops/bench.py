"""Measures the app's own lock nodes with a lock that nobody else wants."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from celery_redlock.errors import LockNotAcquired, LockTaken, RedlockError
from celery_redlock.lock.address import Address, addresses_of
from celery_redlock.lock.guard import exchange
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.health import check
from celery_redlock.reading.nodes import ask_all, connected

__all__ = ["Bench", "RoundTrips", "share"]

#: How many requests a node is measured with.
PINGS = 100
#: Share of the time that goes to cycles; the rest to refusals.
CYCLES = 0.7
#: After so many failures in a row there is nothing to measure.
HOPELESS = 3


@dataclass(frozen=True)
class RoundTrips:
    """
    How near one node is.

    Attributes:
        node: Its label.
        times: Of a small request each, its answer included [s].
        problem: Why it did not answer; "" if it did.
    """

    node: str
    times: Sequence[float] = ()
    problem: str = ""


def share(times: Sequence[float], part: float) -> float | None:
    """Return what *part* [1] of *times* do not exceed [s]; None without any."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None


@dataclass
class Bench:
    """
    One measurement; `run` fills it.

    Attributes:
        nodes: As the setting ``redlock_nodes``.
        rules: As all clients have them.
        name: Of the lock.
        trips: Round trips per node.
        acquired: How long each grant took [s].
        released: How long each release took, the answers of a majority included [s].
        refused: How long each refusal of a held lock took [s].
        failed: How often no quorum could decide, or a vote was split.
    """

    nodes: Sequence[Any]
    rules: Rules
    name: str = field(default_factory=lambda: f"bench:{secrets.token_hex(4)}")
    trips: list[RoundTrips] = field(default_factory=list)
    acquired: list[float] = field(default_factory=list)
    released: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def cycles(self) -> list[float]:
        """How long each grant and its release took together [s]."""
        return [taken + given for taken, given in zip(self.acquired, self.released, strict=True)]

    def run(self, seconds: float, is_over: Callable[[], bool], tell: Callable[[int], None]) -> None:
        """
        Measure.

        Args:
            seconds: For how long, about.
            is_over: Whether the user wants no more.
            tell: Is told how many requests were made.
        """
        self.trips = ask_all(addresses_of(self.nodes), round_trips)
        ours, theirs = Redlock(self.nodes, self.rules), Redlock(self.nodes, self.rules)
        try:
            for locks in (ours, theirs):
                check(locks)
            self._measure_cycles(ours, time.monotonic() + CYCLES * seconds, is_over, tell)
            if self.acquired:
                until = time.monotonic() + (1 - CYCLES) * seconds
                self._measure_refusals(ours, theirs, until, is_over, tell)
        finally:
            ours.close()
            theirs.close()

    def _measure_cycles(
        self,
        locks: Redlock,
        until: float,
        is_over: Callable[[], bool],
        tell: Callable[[int], None],
    ) -> None:
        in_a_row = 0
        while time.monotonic() < until and in_a_row < HOPELESS and not is_over():
            begun = time.perf_counter()
            try:
                lease = locks.acquire(self.name)
            except LockNotAcquired:
                in_a_row, self.failed = in_a_row + 1, self.failed + 1
                continue
            in_a_row, had = 0, time.perf_counter()
            locks.release(lease)
            self.acquired.append(had - begun)
            self.released.append(time.perf_counter() - had)
            tell(len(self.acquired))

    def _measure_refusals(
        self,
        ours: Redlock,
        theirs: Redlock,
        until: float,
        is_over: Callable[[], bool],
        tell: Callable[[int], None],
    ) -> None:
        try:
            with ours.hold(self.name):
                while time.monotonic() < until and not is_over():
                    begun = time.perf_counter()
                    try:
                        theirs.release(theirs.acquire(self.name, wait=0.0))
                    except LockTaken:
                        self.refused.append(time.perf_counter() - begun)
                        tell(len(self.acquired) + len(self.refused))
                    except LockNotAcquired:
                        self.failed += 1
        except RedlockError:  # the nodes went away in the middle; what was measured stands
            self.failed += 1


def round_trips(address: Address) -> RoundTrips:
    """Return how near a node is."""
    times = []
    try:
        with connected(address) as connection:
            for _ in range(PINGS):
                begun = time.perf_counter()
                exchange(connection, (b"PING",))
                times.append(time.perf_counter() - begun)
    except (RedisError, OSError) as error:
        return RoundTrips(address.label, times, str(error) or type(error).__name__)
    return RoundTrips(address.label, times)
