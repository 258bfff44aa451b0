"""
Stand-ins for what the kernel is given: a clock that is moved by hand, votes, a way to drive it.

No test of the kernel sleeps: time passes when a test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, cast

from celery_redlock.lock.algorithm.acquiring import acquire
from celery_redlock.lock.algorithm.effects import Ask, Send, Sleep
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.records import OWNER_LENGTH, line_key
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.votes import Vote, VoteKind
from celery_redlock.lock.waiting.listener import Listener
from celery_redlock.lock.waiting.room import Room, ThreadWaiting, Waiting

__all__ = [
    "SILENT",
    "Drive",
    "Ears",
    "FakeClock",
    "granted",
    "lease_of",
    "marked",
    "quarantined",
    "refused",
    "repaired",
    "token_of",
    "unreachable",
]

#: A vote that did not come in.
SILENT = None


class FakeClock:
    """A clock that shows what a test says [s]; callable like the real one."""

    def __init__(self, begin: float = 1000.0) -> None:
        self.time = begin

    def __call__(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


def granted(fence: int = 1) -> Vote:
    return Vote(VoteKind.GRANTED, fence)


def repaired(fence: int = 1) -> Vote:
    """Return a renewal's yes from a node on which the key was missing."""
    return Vote(VoteKind.REPAIRED, fence)


def refused(holder: str = "y", ttl: float = 5.0, fence: int = 0) -> Vote:
    """Return the no of a node that stores another holder's token, told by its first letter."""
    return Vote(VoteKind.REFUSED, fence, ttl, token_of(holder).encode() + b'{"pid":7}')


def quarantined(ttl: float = 5.0) -> Vote:
    return Vote(VoteKind.QUARANTINED, ttl=ttl)


def unreachable(reason: str = "refused the connection") -> Vote:
    return Vote(VoteKind.UNREACHABLE, reason=reason)


def marked(state: str = "done") -> Vote:
    return Vote(VoteKind.MARKED, value=state.encode())


def token_of(holder: object) -> str:
    """Return a token of the right length that begins with *holder*."""
    return f"{holder}".ljust(40, "0")


def lease_of(clock: Callable[[], float], name: str = "k", **changes: Any) -> Lease:
    """Return a lease of 30 s that was taken just now on *clock*."""
    lease = Lease(name, token_of(name), 7, 30.0, clock() + 28.498, since=1.7e9)
    return replace(lease, **changes)


class Ears:
    """
    A listener that hears what a test says; one node's word is enough.

    Attributes:
        room: The real one.
        waiting: Who waits in it, in the order in which they came.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self.now = now or FakeClock()
        self.room = Room(1, lambda _: 0.0, self.now)
        self.waiting: list[Waiting] = []
        self._releases = 0

    def channel(self) -> str:
        return "c" * 16

    def enter(self, waiting: Waiting) -> None:
        self.waiting.append(waiting)
        self.room.enter(waiting)

    def listen(self) -> None:
        """Hear what the test says, as always."""

    def enter_thread(self, line: bytes, since: float) -> ThreadWaiting:
        waiting = ThreadWaiting(line, since, self.now)
        self.enter(waiting)
        return waiting

    def leave(self, waiting: Waiting) -> None:
        if waiting in self.waiting:
            self.waiting.remove(waiting)
        self.room.leave(waiting)

    def hear(self, name: str, taken: str = "-" * OWNER_LENGTH) -> None:
        self._releases += 1
        release = b"%08d" % self._releases
        self.room.hear(0, release + taken.encode() + line_key("redlock", name))


class Drive:
    """
    One acquire, taken a step at a time.

    Clocks stand still unless advanced, chance always takes the longest, tokens are counted.

    Attributes:
        clock: Of the client [s].
        wall: The client's wall clock [s, Unix time].
        client: What the acquire knows of its client.
        step: What it wants done now; None once it has ended.
        told: Every `Tell` so far.
        lease: What it ended with.
        error: Or what it raised.
    """

    def __init__(
        self,
        nodes: int = 3,
        rules: Rules | None = None,
        seen: int = 0,
        ears: Ears | None = None,
        **wanted: Any,
    ) -> None:
        self.clock = FakeClock()
        self.wall = FakeClock(1.7e9)
        self.tokens = 0
        self.client = Participant(
            rules or Rules(),
            tuple(f"node-{i}" for i in range(nodes)),
            seen,
            cast("Listener | None", ears),
            now=self.clock,
            wall=self.wall,
            chance=lambda _, longest: longest,
            new_token=self._new_token,
        )
        self.told: list[Send] = []
        self.lease: Any = None
        self.error: BaseException | None = None
        self.step: Ask | Send | Sleep | None = None
        self.steps = self._steps(LockRequest(**{"name": "k", "ttl": 30.0, **wanted}))
        self._advance(lambda: next(self.steps))

    def _steps(self, wanted: LockRequest) -> Generator[Any, Any, Any]:
        return acquire(self.client, wanted)

    def _new_token(self) -> str:
        self.tokens += 1
        return token_of(f"t{self.tokens}-")

    def _advance(self, step: Callable[[], Any]) -> None:
        self.step = None
        try:
            self.step = step()
        except StopIteration as end:
            self.lease = end.value
        except BaseException as error:  # noqa: BLE001  kept for the test to look at
            self.error = error
        if isinstance(self.step, Send):
            self.told.append(self.step)

    def vote(self, *ballot: Vote | None, after: float = 0.001) -> Drive:
        """Answer the question at hand, *after* so many seconds; nodes left out are silent."""
        assert isinstance(self.step, Ask), self.step
        self.clock.advance(after)
        silent = [SILENT] * (len(self.client.labels) - len(ballot))
        self._advance(lambda: self.steps.send([*ballot, *silent]))
        return self

    def go_on(self) -> Drive:
        """Do what is neither a question nor the end: tell the nodes, or let the pause pass."""
        assert isinstance(self.step, (Send, Sleep)), self.step
        sleeps = isinstance(self.step, Sleep) and self.step.waiting is not None
        if isinstance(self.step, Sleep):
            self.clock.advance(self.step.seconds)
        self._advance(lambda: self.steps.send(False if sleeps else None))
        return self

    def wake(self) -> Drive:
        assert isinstance(self.step, Sleep), self.step
        assert self.step.waiting is not None
        self._advance(lambda: self.steps.send(True))
        return self

    def go_on_to(self, kind: type) -> Drive:
        while isinstance(self.step, (Send, Sleep)) and not isinstance(self.step, kind):
            self.go_on()
        return self

    def go_on_to_ask(self) -> Drive:
        while isinstance(self.step, (Send, Sleep)):
            self.go_on()
        return self

    def interrupt(self, error: BaseException) -> Drive:
        self._advance(lambda: self.steps.throw(error))
        return self

    @property
    def token(self) -> str:
        assert isinstance(self.step, (Ask, Send))
        return self.step.request.arguments[0].decode()

    @property
    def is_asking(self) -> bool:
        return isinstance(self.step, Ask)

    def is_decided(self, *ballot: Vote | None) -> bool:
        """Return whether the question at hand would not wait for more than *ballot*."""
        assert isinstance(self.step, Ask)
        return self.step.decided(ballot)
