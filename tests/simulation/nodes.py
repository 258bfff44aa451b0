"""The lock nodes of the simulation: those of `celery_redlock.testing` that may also stand still."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from celery_redlock.testing.model import NodeModel, Store

__all__ = ["SimulatedNode", "Store"]


class SimulatedNode(NodeModel):
    """
    One lock node of a simulated world.

    Attributes:
        frozen_until: When it goes on if it stands still [s, true time].
        uptime: What it says of its process [s]; of several nodes nobody is to believe that.
        has_succeeded: Whether another server was the node before, as in a cluster it may be.
        lies: What it makes of a reply.
    """

    def __init__(self, position: int, wall: Callable[[], float]) -> None:
        super().__init__(position, wall)
        self.frozen_until = self.uptime = 0.0
        self.has_succeeded = False
        self.lies: Callable[[Any], Any] = lambda reply: reply

    def execute(self, command: Sequence[bytes]) -> Any:
        """As `NodeModel.execute`, or what a node that lies makes of it."""
        return self.lies(super().execute(command))

    def crash(self, kept: Store | None = None) -> None:
        """As `NodeModel.crash`; whoever stands still goes on as another process."""
        super().crash(kept)
        self.frozen_until = 0.0

    # -- what somebody does by hand ----------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        """Return a value, None if there is none any more."""
        value: bytes | None = self.ask(b"GET", key)
        return value

    def put(self, key: bytes, value: bytes, ttl: bytes) -> None:
        """Store a value for *ttl* [ms]."""
        self.ask(b"SET", key, value, b"PX", ttl)

    def delete(self, key: bytes) -> None:
        """Take a key away."""
        self.ask(b"DEL", key)
