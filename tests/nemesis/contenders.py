"""
Who takes locks in a run: the library, and others whose weakness is known.

ours
    The library as a user has it; every other client awaits `AsyncRedlock`.
unguarded
    The library with ``restart_guard=False``: nodes that lost their memory vote at once.
careless
    The library, but its user never asks whether the lock is still held.
pottery
    Pottery's Redlock, which counts its validity and extends as its documentation says.

Each has keys of its own, so all of them live through the same faults.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import redis
from pottery import Redlock as Pottery
from pottery.exceptions import PrimitiveError

from celery_redlock import LockLost, LockTaken, QuorumUnavailable, Redlock
from celery_redlock.events import Event, NodeEvent
from celery_redlock.lock.rules import Rules
from nemesis.log import now
from support.in_loop import InLoop, loop_thread

__all__ = ["CONTENDERS", "MAX_TTL", "Contender", "Grant", "Refused", "rules_of"]

MAX_TTL = 1.5
NODE_TIMEOUT = 0.15
#: What a client that never looks at the clock trusts its lock for, each time it looks [s].
BLINK = 0.001


class Refused(Exception):
    """The lock was not granted; says why in one word."""


class Grant(Protocol):
    """
    A lock that was granted.

    Attributes:
        fence: Its fencing number, None without.
        lost: Why it cannot be trusted any more, once it cannot.
    """

    fence: int | None
    lost: str

    @property
    def renewals(self) -> int:
        """How often it was renewed."""

    def left(self) -> float:
        """Return for how long the lock may be trusted from now on [s]; 0.0 once it is lost."""

    def release(self) -> None:
        """Give it back."""


class Contender(Protocol):
    def take(self, name: str, ttl: float, wait: float) -> Grant:
        """Return a lock with a lease of *ttl* [s], after at most *wait* [s], or raise Refused."""


def rules_of(contender: str) -> Rules:
    """Return the rules of one of ours; its name is its prefix."""
    return Rules(
        ttl=MAX_TTL,
        max_ttl=MAX_TTL,
        node_timeout=NODE_TIMEOUT,
        restart_guard=contender != "unguarded",
        prefix=contender,
    )


class Ours:
    """
    The library, through what a user calls.

    Args:
        contender: ``ours``, ``unguarded`` or ``careless``.
        urls: Of the nodes.
        tell: Is told of what happens to nodes.
    """

    def __init__(self, contender: str, urls: Sequence[str], tell: Callable[[str], None]) -> None:
        self._grant = CarelessGrant if contender == "careless" else OurGrant
        self._locks: Any = Redlock(urls, rules_of(contender), [NodeNews(tell)])

    def take(self, name: str, ttl: float, wait: float) -> Grant:
        try:
            return self._grant(self._locks.hold(name, ttl=ttl, wait=wait))
        except LockTaken:
            raise Refused("taken") from None
        except QuorumUnavailable:
            raise Refused("unavailable") from None


class OursAsync(Ours):
    """The library's locks, awaited: each hold begins and ends in an event loop."""

    def __init__(self, contender: str, urls: Sequence[str], tell: Callable[[str], None]) -> None:
        super().__init__(contender, urls, tell)
        self._loop = loop_thread()  # as long as the process lives
        self._locks = InLoop(self._locks, self._loop.__enter__())


class NodeNews:
    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def __call__(self, event: Event) -> None:
        if isinstance(event, NodeEvent):
            self._tell(type(event).__name__)


class OurGrant:
    """A `Grant` of the library; its holder asks ``ensure_held`` before it acts."""

    def __init__(self, hold: Any) -> None:
        self._hold = hold
        self._held = hold.__enter__()
        self.fence: int | None = self._held.fence
        self.lost = ""

    @property
    def renewals(self) -> int:
        return int(self._held.renewals)

    def left(self) -> float:
        try:
            self._held.ensure_held()
        except LockLost as error:
            self.lost = error.reason
            return 0.0
        return float(self._held.remaining())

    def release(self) -> None:
        with contextlib.suppress(LockLost):
            self._hold.__exit__(None, None, None)


class CarelessGrant(OurGrant):
    """The same, but its holder thinks that a lock is a lock."""

    def left(self) -> float:
        return BLINK


class PotteryContender:
    """Pottery, with clients that give up on a node as fast as ours."""

    def __init__(self, urls: Sequence[str]) -> None:
        logging.disable()  # it logs each node that does not answer, with a traceback
        times = {"socket_timeout": NODE_TIMEOUT, "socket_connect_timeout": NODE_TIMEOUT}
        self._masters = frozenset(redis.Redis.from_url(url, **times) for url in urls)

    def take(self, name: str, ttl: float, wait: float) -> Grant:
        give_up = now() + wait
        while True:
            lock = Pottery(
                key=name, masters=self._masters, auto_release_time=ttl, num_extensions=10**9
            )
            started = now()
            if lock.acquire(blocking=False):
                return PotteryGrant(lock, ttl, started)
            if now() > give_up:
                raise Refused("taken")
            time.sleep(random.uniform(0.0, 0.2))  # as pottery does between two attempts


class PotteryGrant:
    """
    A `Grant` of pottery: valid for its TTL from before it was asked for, less the drift.

    Source:
        pottery/redlock.py, ``acquire`` and ``locked``.
    """

    def __init__(self, lock: Any, ttl: float, started: float) -> None:
        self._lock = lock
        self._ttl = ttl
        self.fence: int | None = None
        self.lost = ""
        self.renewals = 0
        self._granted(started)

    def _granted(self, started: float) -> None:
        self._until = started + self._ttl - (self._ttl * 0.01 + 0.002)
        self._due = started + self._ttl / 3.0

    def left(self) -> float:
        """As `Grant.left`; extends the lock when a third of its lease has passed."""
        started = now()
        if self._due <= started < self._until:
            try:
                self._lock.extend()
            except PrimitiveError:
                self._due = started + self._ttl / 12.0
            else:
                self.renewals += 1
                self._granted(started)
        left = self._until - now()
        if left <= 0.0:
            self.lost = "deadline"
        return max(0.0, left)

    def release(self) -> None:
        with contextlib.suppress(PrimitiveError):
            self._lock.release()


CONTENDERS: dict[str, Callable[[Sequence[str], Callable[[str], None]], Contender]] = {
    "ours": lambda urls, tell: Ours("ours", urls, tell),
    "ours, async": lambda urls, tell: OursAsync("ours", urls, tell),
    "unguarded": lambda urls, tell: Ours("unguarded", urls, tell),
    "careless": lambda urls, tell: Ours("careless", urls, tell),
    "pottery": lambda urls, tell: PotteryContender(urls),
}
