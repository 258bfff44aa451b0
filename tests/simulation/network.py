"""
The way from a client to a node: the *real* `Node` of the library, over a connection that is not.

A `Wire` looks like a connection of redis-py to it: bytes go in, replies come out, each way first
in, first out. `Link` does for one node what `celery_redlock.lock.nodes.fanout` and its connector
do: send, read, give a dead connection up, and connect again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from redis.exceptions import ConnectionError as Lost
from redis.exceptions import RedisError

from celery_redlock.lock.nodes.guard import (
    Greeting,
    Unfit,
    boot_marker,
    check_enrolment,
    quarantine_of_new,
)
from celery_redlock.lock.nodes.link import Gone
from celery_redlock.lock.nodes.node import Node
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.nodes.steps import Finding
from celery_redlock.lock.records import Keys, ms
from celery_redlock.lock.scripts.scripts import ENROL
from simulation.nodes import SimulatedNode

if TYPE_CHECKING:
    from celery_redlock.events import Event
    from simulation.hosts import Host
    from simulation.world import World

__all__ = ["Link", "Wire"]

#: How long a full buffer takes to go out [s].
EMPTIED = 0.0001
#: How soon a client tries again to connect [s].
AGAIN = 0.02


def commands(data: bytes) -> Iterator[list[bytes]]:
    """Yield the commands in what a client wrote (RESP)."""
    parts = data.split(b"\r\n")  # which no key and no argument of ours contains
    at = 0
    while at < len(parts) - 1:
        end = at + 1 + 2 * int(parts[at][1:])
        yield parts[at + 2 : end : 2]
        at = end


class Wire:
    """
    One connection, to one life of a node.

    Attributes:
        inbox: Replies that have come; the last one may be that there is no more.
    """

    protocol = 2  # of redis, for `celery_redlock.lock.nodes.replies`

    def __init__(self, link: Link) -> None:
        self.link = link
        self.world = link.world
        self.server = link.server
        self.boots = self.server.boots
        self.inbox: deque[Any] = deque()
        self.is_closed = False
        self._written = b""  # of commands that have not been written to their ends
        self.last_up = self.last_down = 0.0
        self._sock = self._parser = self

    # -- as the client's socket and parser ----------------------------------------

    def settimeout(self, _seconds: float) -> None:
        """Never block; nothing here does."""

    def send(self, data: bytes) -> int:
        """Take what a client writes, as far as there is room; the node hears of it later."""
        taken = data[: self.world.room]
        self._written += taken
        if len(taken) < len(data):
            self.world.at(self.world.now + EMPTIED, self._has_room)
            return len(taken)
        whole, self._written = self._written, b""
        for command in commands(whole):
            self.last_up = self.link.arrival(self.last_up, command)
            self.world.at(self.last_up, self._arrive, command)
        return len(taken)

    def _has_room(self) -> None:
        if not self.is_closed:
            self.link.flush()

    def read_response(self, *, disable_decoding: bool) -> Any:
        """Return a reply that has come, or raise as a socket does that would block."""
        if not self.inbox:
            raise BlockingIOError
        if isinstance(self.inbox[0], Lost):
            raise self.inbox[0]
        return self.inbox.popleft()

    def disconnect(self) -> None:
        """Hang up. What was written may be read by the server all the same."""
        self.is_closed = True

    # -- between the two -------------------------------------------------------------

    def _arrive(self, command: list[bytes]) -> None:
        server, world = self.server, self.world
        if not server.is_up or server.boots != self.boots:
            return  # it was sent to a process that is no more
        if self.is_closed and world.chance.random() >= world.still_read:
            return
        if server.frozen_until > world.now:
            world.at(server.frozen_until, self._arrive, command)
            return
        reply = server.execute(command)
        world.hits(self.server, command, reply)
        if not self.is_closed:
            self.last_down = self.link.arrival(self.last_down, None)
            world.at(self.last_down, self._come, reply)

    def end(self, *, after: float) -> None:
        """Have the client learn that the connection has ended, in *after* [s]."""
        self.last_down = max(self.last_down, self.world.now + after)
        self.world.at(self.last_down, self._come, Lost("Connection closed by server."))

    def _come(self, reply: Any) -> None:
        if not self.is_closed:
            self.inbox.append(reply)
            self.link.host.hear(self.link)


class Link:
    """
    One client's way to one node.

    Attributes:
        node: As the client knows it.
        server: As it is.
        is_barred: Whether connecting fails until somebody calls `connect`.
    """

    def __init__(self, host: Host, server: SimulatedNode, label: Any) -> None:
        self.world: World = host.world
        self.host = host
        self.server = server
        self.news: deque[Event] = deque()
        self.node = Node(server.position, label, host.rules, self.news)
        self.up_cut_until = self.down_cut_until = 0.0
        self.is_barred = False
        self._is_connecting = False

    @property
    def position(self) -> int:
        return self.server.position

    def arrival(self, last: float, command: list[bytes] | None) -> float:
        """Return when a message sent now arrives, after the *last* one; None for a reply."""
        cut_until = self.down_cut_until if command is None else self.up_cut_until
        under_way: float = self.world.delay(self, command)
        return max(max(self.world.now, cut_until) + under_way, last)

    def send(self, call: Round) -> None:
        """Send a call, as the fan-out does."""
        node, now = self.node, self.host.now()
        if node.is_late(now):
            self.read()  # or its answers lie unread since long
        try:
            node.send([call], now)
        except Gone as error:
            self.lose(error)
            node.send([call], now)
        if node.connection is None:
            self.reconnect()

    def flush(self) -> None:
        """Send more of what waits to be sent."""
        try:
            self.node.flush()
        except Gone as error:
            self.lose(error)

    def read(self) -> None:
        """Take what has come."""
        if self.node.connection is None:
            return
        try:
            self.node.read()
        except Gone as error:
            self.lose(error)

    def settle_clock(self, finding: Finding) -> None:
        """Act on what was found about clocks that are in doubt."""
        try:
            self.node.settle_clock(finding, self.host.now())
        except Gone as error:
            self.lose(error)

    def lose(self, error: Gone) -> None:
        """Give the connection up: yes votes that came through it are void until it is decided."""
        self.node.detach(error)
        call = self.host.call
        if call is not None:
            call.withdraw(self.position, str(error))
        self.host.look()
        self.reconnect()

    def reset(self) -> None:
        """Break the connection; the client learns of it when it reads."""
        wire: Any = self.node.connection
        if wire is not None:
            wire.end(after=0.0)

    def sever(self) -> None:
        """Have no connection from now on, until `connect` is called."""
        self.is_barred = True
        if self.node.connection is not None:
            self.lose(Gone("severed"))

    # -- connecting ------------------------------------------------------------------

    def reconnect(self) -> None:
        """Connect in a while, in the background."""
        if not self._is_connecting:
            self._is_connecting = True
            self.world.at(self._soon(), self._try)

    def _soon(self) -> float:
        under_way: float = self.world.delay(self, [])
        return self.world.now + AGAIN + under_way

    def _try(self) -> None:
        now, server = self.world.now, self.server
        is_away = not server.is_up or server.frozen_until > now
        is_cut = max(self.up_cut_until, self.down_cut_until) > now
        if self.is_barred or is_away or is_cut:
            self.host.found.setdefault(self.position, "unreachable")
        if self.is_barred:
            self._is_connecting = False
        elif is_away or is_cut or self.host.stopped_until > now:
            self.world.at(self._soon(), self._try)
        else:
            self._is_connecting = False
            self.connect()

    def connect(self) -> None:
        """Begin a new connection: greet the node, enrol it, and send what it has missed."""
        self.is_barred = False
        server = self.server
        run_id = server.run_id.decode()
        server.greet()
        flushed, policy = server.is_flushed, server.policy
        greeting = Greeting(run_id, server.uptime, flushed, 0, "simulated", eviction=policy)
        greeting = replace(greeting, succeeded=server.has_succeeded)
        if self.host.rules.restart_guard:
            left = self._enrol(greeting)
            if left is None:
                self.reconnect()
                return
            greeting = replace(greeting, quarantine=max(0, left) / 1000.0)
        wire: Any = Wire(self)
        self.node.attach(wire, greeting, self.host.fingerprint)
        self._deliver()

    def _enrol(self, greeting: Greeting) -> int | None:
        """Return what is left of a quarantine [ms], or None for trying again in a while."""
        found = self.host.found
        try:
            state, left = self._ask_to_enrol(b"look")
            found[self.position] = state.decode()
            if state == b"unmarked" and len(found) == len(self.host.labels):
                check_enrolment(self.host.labels, found)
                quarantine = quarantine_of_new(greeting, len(found), self.host.rules)
                asked = [b"quarantine", ms(quarantine)] if quarantine else [b"trust"]
                state, left = self._ask_to_enrol(*asked)
        except (RedisError, Unfit):  # it takes no writes; or another list has a node of ours
            return None
        return left if state == b"enrolled" else None

    def _ask_to_enrol(self, *mode: bytes) -> tuple[bytes, int]:
        rules, server = self.host.rules, self.server
        keys = Keys.of(rules.prefix, "")
        boot_id = boot_marker(server.run_id.decode(), self.host.fingerprint)
        asked = (b"2", keys.boot, keys.quarantine, boot_id, ms(rules.quarantine), *mode)
        state, _, left, _ = server.ask(b"EVALSHA", ENROL.sha, *asked)
        return state, left

    def _deliver(self) -> None:
        try:
            self.node.deliver(self.host.now())
        except Gone as error:
            self.lose(error)

    def crashed(self, *, after: float) -> None:
        """Have the client learn, in *after* [s], that the process at the other end is gone."""
        wire = cast("Wire | None", self.node.connection)
        if wire is not None:
            wire.end(after=after)
