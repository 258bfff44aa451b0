"""The lock nodes of the simulation: those of `celery_redlock.testing` that may also stand still."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from celery_redlock.testing.model import NodeModel, Store

__all__ = ["SimulatedNode", "Store"]


class SimulatedNode(NodeModel):
    """
    One lock node of a simulated world.

    Attributes:
        frozen_until: When it goes on if it stands still [s, true time].
        is_flushed: Whether its data were wiped since it was started.
        aged: By how much its process looks older than it is, as its clock was set [s].
        policy: Its maxmemory-policy if that evicts; "" if not.
        has_succeeded: Whether another server was the node before, as in a cluster it may be.
        lies: What it makes of a reply.
    """

    def __init__(self, position: int, wall: Callable[[], float]) -> None:
        super().__init__(position, wall)
        self.frozen_until = self.aged = 0.0
        self.started, self.is_flushed = wall(), False
        self.policy = ""
        self.has_succeeded = False
        self.lies: Callable[[Any], Any] = lambda reply: reply

    @property
    def uptime(self) -> float:
        """What it says of its process: a difference of whole seconds of its wall clock [s]."""
        return self.aged + math.floor(self.wall()) - math.floor(self.started)

    def start(self) -> None:
        """Be there again, as another process."""
        self.is_up, self.is_flushed, self.started = True, False, self.wall()

    def flush(self) -> None:
        """Lose all data on command, as it remembers."""
        super().flush()
        self.is_flushed = True

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
        self.ask(b"DEL", key)
