"""The nodes of a memory quorum, and their faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from celery_redlock.lock.rules import in_seconds
from celery_redlock.testing.clock import TickedClock
from celery_redlock.testing.model import NodeModel
from celery_redlock.testing.wire import Wire

__all__ = ["Client", "MemoryNode"]


class Client(Protocol):
    """A client connected to nodes, by their positions."""

    def lose_connection(self, position: int) -> None:
        """Notice that a node has hung up."""

    def connect_missing(self, position: int) -> None:
        """Notice that a node may be connected again."""


class MemoryNode:
    """
    One lock node in memory. Every client notices at once what goes wrong.

    Args:
        position: Among the nodes, from 0.
        clock: Of the quorum.

    Attributes:
        url: As in ``redlock_nodes``.
        model: What it stores, and what it does with a command.
        clients: The connections of all clients.
    """

    def __init__(self, position: int, clock: TickedClock) -> None:
        self.url = f"redis://memory-{position + 1}/0"
        self.position = position
        self.model = NodeModel(position, clock.wall)
        self.clients: list[Client] = []
        self._clock = clock
        self._delay = 0.0
        self._is_hanging = False
        self._unheard: list[tuple[Wire, Sequence[bytes]]] = []

    def __repr__(self) -> str:
        return f"<MemoryNode {self.url}: {self.state}>"

    @property
    def state(self) -> str:
        """``"up"``, or what is wrong: ``"down"``, ``"hanging"``, ``"busy"``, ``"full"`` ..."""
        states = {
            "down": not self.model.is_up,
            "hanging": self._is_hanging,
            "busy": self.model.is_busy,
            "full": self.model.is_full,
            "denying": bool(self.model.denied),
            "slow": bool(self._delay),
        }
        return next((state for state, is_so in states.items() if is_so), "up")

    @property
    def is_reachable(self) -> bool:
        """Whether a client could connect."""
        return self.model.is_up and not self._is_hanging

    def down(self) -> None:
        """Refuse connections, and end those that there are. It keeps what it stores."""
        self._recover()
        self.model.is_up = False
        self._hang_up()

    def hang(self) -> None:
        """Answer nothing until `up`, as after a SIGSTOP; requests are done then."""
        self._recover()
        self._is_hanging = True

    def slow(self, seconds: float) -> None:
        """
        Answer late; requests are done at once.

        Args:
            seconds: By how much [>= 0].
        """
        self._recover()
        self._delay = in_seconds("seconds", seconds)

    def fill(self) -> None:
        """Have no memory left, and refuse to write."""
        self._recover()
        self.model.is_full = True

    def busy(self) -> None:
        """Refuse everything, as while another client's script never ends."""
        self._recover()
        self.model.is_busy = True

    def deny(self, *commands: str) -> None:
        """
        Refuse some commands, as to a user whose ACL leaves them out.

        Args:
            *commands: Such as ``"set"``; with ``"evalsha"`` no script runs at all.
        """
        self._recover()
        self.model.denied = frozenset(command.upper().encode() for command in commands)

    def up(self) -> None:
        """Repair whatever is wrong; nothing is forgotten."""
        self._recover()
        for client in self.clients:
            client.connect_missing(self.position)

    def forget(self) -> None:
        """Restart with an empty memory, and be quarantined."""
        self._unheard.clear()
        self.model.crash()
        self._hang_up()
        self.up()

    def _recover(self) -> None:
        self.model.is_up, self.model.denied = True, frozenset()
        self.model.is_full = self.model.is_busy = False
        self._delay, self._is_hanging = 0.0, False
        unheard, self._unheard = self._unheard, []
        for wire, command in unheard:
            self.hear(wire, command)

    def _hang_up(self) -> None:
        for client in self.clients:
            client.lose_connection(self.position)

    def hear(self, wire: Wire, command: Sequence[bytes]) -> None:
        if self._is_hanging and not wire.is_greeting:
            self._unheard.append((wire, command))
        elif self.model.is_up:
            wire.bring(self.model.execute(command), self._clock.now() + self._delay)
