"""What a client hears from the nodes: the *real* `Room`, and a `Listener` without its threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import CHANNEL_LENGTH, channel
from celery_redlock.lock.waiting.listener import Listener
from celery_redlock.lock.waiting.room import Room, Waiting

if TYPE_CHECKING:
    from simulation.hosts import Host
    from simulation.nodes import SimulatedNode

__all__ = ["Ears"]

#: How soon a client tries again to listen to a node [s].
AGAIN = 0.2
#: What clients take a round trip for [s]: the longest of those that are not late.
ROUND_TRIP = 0.008


class Ears(Listener):
    """
    What one life of a client hears.

    Args:
        host: The client.

    Attributes:
        heard_by: Position of a node -> in which of its lives it has this client as a subscriber.
    """

    def __init__(self, host: Host) -> None:
        super().__init__([], host.rules.prefix, lambda _: ROUND_TRIP)
        self._host = host
        self.room = Room(quorum(len(host.servers)), lambda _: ROUND_TRIP, host.now)
        self._missing = set(range(len(host.servers)))
        self._process = f"{host.number:x}-{host.lives}".rjust(CHANNEL_LENGTH, "0")
        self.heard_by: dict[int, int] = {}

    def enter(self, waiting: Waiting) -> None:
        """Have *waiting* woken by what is heard; the first time a client subscribes."""
        self.room.enter(waiting)
        missing, self._missing = self._missing, set()
        for position in missing:
            self.subscribe(position)

    def subscribe(self, position: int) -> None:
        """Begin to listen to a node, as soon as it can be reached."""
        host = self._host
        link = host.links[position]
        host.world.at(link.arrival(0.0, []), self._is_heard, host.servers[position])

    def _is_heard(self, server: SimulatedNode) -> None:
        host = self._host
        if host.ears is not self:
            return
        if server.is_up and server.frozen_until <= host.world.now:
            self.heard_by[server.position] = server.boots
            link = host.links[server.position]
            host.world.at(link.arrival(0.0, None), self._hears)
        else:
            host.world.at(host.world.now + AGAIN, self.subscribe, server.position)

    def _hears(self) -> None:
        """Learn that a node says from now on what it publishes."""
        host = self._host
        if host.ears is not self:
            return
        if host.stopped_until > host.world.now:
            host.world.at(host.stopped_until, self._hears)
            return
        self.room.register_all()
        host.may_be_woken()

    def lose(self, position: int) -> None:
        """Learn that a node has ended the connection; listen to it again in a while."""
        if self.heard_by.pop(position, None) is not None:
            self._host.world.at(self._host.world.now + AGAIN, self.subscribe, position)

    def is_subscribed(self, server: SimulatedNode, to: bytes) -> bool:
        """Return whether *server* sends this client what is published *to* a channel."""
        own = to == channel(self._prefix, self._process)
        return own and self.heard_by.get(server.position) == server.boots

    def hear(self, position: int, message: bytes) -> None:
        """Hear what a node has published; whoever waits for that goes on."""
        host = self._host
        if host.ears is not self:
            return
        if host.stopped_until > host.world.now:
            host.world.at(host.stopped_until, self.hear, position, message)
            return
        self.room.hear(position, message)
        host.may_be_woken()
