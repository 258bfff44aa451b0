"""The library's fan-out, over wires to nodes in memory instead of sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from celery_redlock.lock.nodes.fanout import Fanout
from celery_redlock.lock.nodes.guard import Greeting, enrol
from celery_redlock.lock.nodes.link import Gone
from celery_redlock.lock.nodes.node import Node
from celery_redlock.lock.rules import Rules
from celery_redlock.testing.clock import TickedClock
from celery_redlock.testing.faults import MemoryNode
from celery_redlock.testing.wire import MemorySelector, Wire

if TYPE_CHECKING:
    from celery_redlock.events import Notify
    from celery_redlock.lock.nodes.address import Address

__all__ = ["MemoryFanout"]


class MemoryFanout(Fanout):
    def __init__(
        self,
        servers: Sequence[MemoryNode],
        clock: TickedClock,
        addresses: Sequence[Address],
        rules: Rules,
        notify: Notify,
    ) -> None:
        self._servers = servers
        self._clock = clock
        super().__init__(addresses, rules, notify)
        for server in servers:
            server.clients.append(self)

    def _start_over(self) -> None:
        super()._start_over()
        self._opened = MemorySelector(self._clock)

    @staticmethod
    def _is_idle() -> bool:
        """Nothing on the way drops what is idle."""
        return False

    @staticmethod
    def _check_clock() -> None:
        """Its nodes go by the same clock."""

    def _disconnected(self) -> None:
        super()._disconnected()
        connector: Any = MemoryConnector(self)
        self._connector = connector

    def lose_connection(self, position: int) -> None:
        node = self.nodes[position]
        with self._mutex:
            if node.connection is not None:
                self._lose(node, Gone("Connection closed by server."))
        self.publish()

    def connect_missing(self, position: int) -> None:
        with self._mutex:
            if self._has_settled:
                self.connect(self.nodes[position])
        self.publish()

    def connect(self, node: Node) -> None:
        """Connect and enrol *node* if it can be; called with the mutex held."""
        server, rules = self._servers[node.position], self._rules
        if node.connection is not None:
            return
        # To a node that hangs, clients have been connected before.
        if not (server.is_reachable or (server.state == "hanging" and not self._has_settled)):
            node.fail(Gone(f"Error connecting to {node.label}: it is {server.state}."))
            return
        wire: Any = Wire(server.hear, self._clock)
        run_id = server.model.run_id.decode()
        left = 0.0
        server.model.greet()
        if rules.restart_guard:
            try:
                left = self._enrol(server, wire, run_id)
            except Exception as error:  # noqa: BLE001  with any error the node does not vote
                node.fail(error)
                return
        wire.is_greeting = False
        self._attach(node, wire, Greeting(run_id, 0.0, False, 0, "memory", quarantine=left))

    def _enrol(self, server: MemoryNode, wire: Any, run_id: str) -> float:
        """Return for how long a node does not vote; one that never lost anything does."""

        def ask(mode: str) -> tuple[str, float, float]:
            return enrol(wire, self._rules, run_id, self._fingerprint, mode)

        state, left, _ = ask("look")
        if state == "unmarked":
            _, left, _ = ask("quarantine" if server.model.boots else "trust")
        return left


class MemoryConnector:
    """Connects at once, in place of `celery_redlock.lock.nodes.connector.Connector`."""

    def __init__(self, fanout: MemoryFanout) -> None:
        self._fanout = fanout

    def reconnect(self, node: Node) -> None:
        self._fanout.connect(node)

    def stop(self) -> None:
        """Do nothing: nothing is being connected."""
