"""Clients: processes with a clock of their own, that drive the real algorithm over their links."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from celery_redlock.lock import clock as real_clock
from celery_redlock.lock.algorithm.effects import Ask, Send, Sleep
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.nodes import steps as whose_clock
from celery_redlock.lock.nodes.fanout import QUIET
from celery_redlock.lock.nodes.link import Gone
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.scripts.requests import inspect_request
from celery_redlock.lock.scripts.scripts import ACQUIRE
from celery_redlock.lock.waiting.room import ThreadWaiting
from simulation.clocks import Clock
from simulation.ears import Ears
from simulation.network import Link

if TYPE_CHECKING:
    from simulation.nodes import SimulatedNode
    from simulation.world import World

__all__ = ["GRAIN", "Host", "Interrupted", "Process"]

Process = Generator["Ask | Send | Sleep", Any, Any]
#: Rounding of floating-point times [s].
GRAIN = 1e-9


class Interrupted(BaseException):
    """Hits a client in the middle of an acquire, as a time limit would."""


class Host:
    """
    One client: a process on a machine with a clock of its own.

    Attributes:
        rules: That it goes by.
        servers: The nodes of its list.
        kernel: What `rounds.acquire` knows of the client.
        found: Position of a node -> the state in which it was found.
        steps: What it is doing.
        call: What it is waiting for, if anything.
        stopped_until: When it goes on if it stands still [s, true time].
        is_acquiring: Whether it may be interrupted.
        lives: How often it was started.
        ears: What it hears from the nodes; None where nobody is woken.
        waits_as: Who it pauses as, which a hint may end; None for nobody.
    """

    def __init__(self, world: World, number: int, clock: Clock, wall: Clock) -> None:
        self.world = world
        self.rules = world.rules
        self.number = number
        self.clock = clock
        self.wall = wall
        self.tokens = 0
        self.lives = 0
        self.stopped_until = 0.0
        self._ticket = 0  # of the wait that is under way: what ends another one is stale
        self.go_by(world.nodes)

    def go_by(self, servers: Sequence[SimulatedNode]) -> None:
        """Begin with a list of nodes: those of the world, or the first few of them."""
        self.servers = servers
        self.labels = tuple(f"node-{node.position}" for node in servers)
        self.fingerprint = self.rules.fingerprint(self.labels)
        self.begin()

    def begin(self) -> None:
        """Begin as a process that knows nothing."""
        world = self.world
        self.lives += 1
        self.kernel = Participant(
            self.rules,
            self.labels,
            now=self.now,
            wall=lambda: self.wall.read(world.now),
            chance=world.chance.uniform,
            new_token=self.new_token,
        )
        self.ears = self.kernel.listener = Ears(self) if world.is_woken else None
        self.waits_as: ThreadWaiting | None = None
        self._pauses_until = 0.0  # by its own clock [s]
        self.steps: Process | None = None
        self.call: Round | None = None
        self._answer: Any = None  # that waits until it is known whose clock has moved
        self.is_acquiring = False
        self.found: dict[int, str] = {}
        self._looked = self.now()
        self._ticket += 1
        self.links = [
            Link(self, node, SimpleNamespace(label=label))
            for node, label in zip(self.servers, self.labels, strict=True)
        ]
        for link in self.links:
            if link.server.is_up:
                link.connect()
            else:
                link.reconnect()

    def kill(self) -> None:
        """End at once: all that it knew is gone, and its connections break."""
        for link in self.links:
            link.is_barred = True
            if link.node.connection is not None:
                link.node.detach(Gone("killed"))
        self.steps = self.call = self._answer = self.ears = None
        self._ticket += 1

    def lose_time(self, seconds: float) -> None:
        """Have the clock stand still for so long, or go on by as much at once if negative."""
        self.clock = replace(self.clock, offset=self.clock.offset - seconds * self.clock.rate)
        self.world.trusted_for(self, seconds)

    def make_up_for(self, seconds: float) -> None:
        """Set the clock forward by what it has lost."""
        self.lose_time(-seconds / self.clock.rate)

    def now(self) -> float:
        return self.clock.read(self.world.now)

    def wake(self) -> None:
        """Have the library read this client's clock; `World.run` gives it its own back."""
        real_clock.now = self.now

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Have it do so for a while, outside of `World.run`."""
        before = real_clock.now
        self.wake()
        try:
            yield
        finally:
            real_clock.now = before

    def new_token(self) -> str:
        """Return a token that nobody else has; 40 hexadecimal digits."""
        self.tokens += 1
        return f"{self.number:02x}{self.tokens:036x}{self.number:02x}"

    def run(self, steps: Process) -> None:
        """Begin to do what *steps* say, as soon as the world runs."""
        self.steps = steps
        self.world.at(self.world.now, self._resume, self._ticket, None)

    def interrupt(self) -> None:
        """Raise `Interrupted` where the client is, if it is acquiring."""
        if self.is_acquiring and self.stopped_until <= self.world.now:
            self.call = None
            if self.world.chance.random() < 0.3:  # in the middle of a write or a read
                link = self.world.chance.choice(self.links)
                if link.node.connection is not None:
                    link.lose(Gone("interrupted"))
            self._advance(lambda: self.steps.throw(Interrupted()))  # type: ignore[union-attr]

    def hear(self, link: Link) -> None:
        """Read what has come on a link, if somebody waits; else it lies there for a while."""
        if link not in self.links:
            return  # of an earlier life
        if self.stopped_until > self.world.now:
            self.world.at(self.stopped_until, self.hear, link)
        elif self.call is not None:
            self.wake()
            link.read()
            self.look()

    def look(self) -> None:
        """Go on if what is waited for is decided."""
        if self.call is not None and not self.call.is_open:
            self.world.at(self.world.now, self._resume, self._ticket, None)

    def _resume(self, ticket: int, value: Any) -> None:
        if ticket != self._ticket:
            return
        if self.stopped_until > self.world.now:  # after all that it has yet to hear
            self.world.at(self.stopped_until + GRAIN, self._resume, ticket, value)
            return
        if self.call is not None:
            value = self._leave(self.call)
            if any(link.node.clock.doubt for link in self.links):
                value = self._compared(value)
                if value is None:
                    return
        elif self.waits_as is not None:
            if self.waits_as.seconds_left(self._pauses_until) > GRAIN:
                return  # what ends it is planned
            value = self.waits_as.was_woken()
        self.call = None
        self._advance(lambda: self.steps.send(value))  # type: ignore[union-attr]

    def may_be_woken(self) -> None:
        """Go on when its pause ends, which may be sooner by now."""
        if self.waits_as is not None:
            left = self.waits_as.seconds_left(self._pauses_until)
            self._wake_after(max(0.0, left) + 2 * GRAIN)

    def _leave(self, call: Round) -> Any:
        """Take a last look, and give up on who has not answered."""
        self.wake()
        if call.is_open:
            self._read_all()
        for link, vote in zip(self.links, tuple(call.ballot), strict=True):
            if call.is_open and vote is None:
                call.take(link.position, link.node.overdue(self.now()))
        call.is_open = False
        return call.ballot

    def _compared(self, value: Any) -> Any:
        """Return the answer once it is known whose clock has moved, None before; as the fan-out."""
        doubts = [link.node.clock.doubt for link in self.links]
        if self._answer is None and not all(doubt.is_reported for doubt in doubts if doubt):
            self._answer, self.call = value, None
            self._ask(Ask(inspect_request(self.rules, ""), lambda _: False))
            return None
        finding = whose_clock.whose([link.node.clock for link in self.links])
        for link in self.links:
            link.settle_clock(finding)
        if finding.ours is not None and finding.ours > 0:
            self.make_up_for(finding.ours)
        value, self._answer = self._answer or value, None
        return value

    def _read_all(self) -> None:
        self._looked = self.now()
        for link in self.links:
            link.read()

    def _advance(self, step: Callable[[], Any]) -> None:
        """Do steps until one takes time."""
        self._ticket += 1
        self.waits_as = None
        try:
            self.wake()
            doing = step()
            while isinstance(doing, Send):
                self._tell(doing)
                doing = self.steps.send(None)  # type: ignore[union-attr]
        except StopIteration:
            return
        if isinstance(doing, Sleep):
            self._pauses_until = self.now() + doing.seconds
            self.waits_as = doing.waiting
            if self.waits_as is None:
                self._wake_after(doing.seconds)
            self.may_be_woken()
        else:
            self._ask(doing)

    def _tell(self, step: Send) -> None:
        call = Round(step.request, len(self.links), None)
        for link in self.links:
            if link.position not in step.skip:
                link.send(call)

    def _ask(self, step: Ask) -> None:
        if step.request.script is ACQUIRE:
            self.world.asked[step.request.arguments[0].decode()] = self.world.now
        if self.now() - self._looked > QUIET:
            self._read_all()
        call = self.call = Round(step.request, len(self.links), step.decided)
        for link in self.links:
            link.send(call)
        self._wake_after(self.rules.node_timeout)
        self.look()

    def _wake_after(self, seconds: float) -> None:
        self.world.at(self.world.now + seconds / self.clock.rate, self._resume, self._ticket, None)
