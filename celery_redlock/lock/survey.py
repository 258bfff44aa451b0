"""
What an operator asks the nodes, one after the other and without hurry.

Uses connections of its own, apart from those that locks are taken on: a survey may be
slow, and must not stand in the way of a round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from redis.exceptions import RedisError

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.address import Address, addresses_of
from celery_redlock.lock.guard import Greeting, Unfit, enrol, exchange, greet
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.votes import read_holder

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["LockView", "NodeStatus", "bootstrap", "live_locks", "node_statuses"]

#: How many keys a node looks at per SCAN; it serves others in between.
SCAN_COUNT = 500

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class NodeStatus:
    """
    How one node is.

    Attributes:
        node: Its label.
        state: ``"up"``, ``"quarantined"``, ``"unmarked"`` (nobody has used it as a lock
            node yet), ``"unfit"`` (it answers but must not be a lock node) or ``"down"``.
        version: Of the server.
        uptime: Of the server process [s].
        quarantine: For how long it does not vote yet [s].
        problem: Why it is down or unfit, in plain words.
    """

    node: str
    state: str
    version: str = ""
    uptime: float = 0.0
    quarantine: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class LockView:
    """
    One lock that somebody holds.

    Attributes:
        name: Lock name (shortened if it is very long).
        holder: As in `LockTaken.holder`.
        ttl: Largest rest of the lease on any node [s].
        votes: Labels of the nodes that store this holder's token.
    """

    name: str
    holder: dict[str, Any]
    ttl: float
    votes: list[str] = field(default_factory=list)


def bootstrap(nodes: Sequence[Any], rules: Rules) -> dict[str, str]:
    """
    Enrol all *nodes* at once, quarantined or not, on the word that no lock is held on them.

    Args:
        nodes: As the setting ``redlock_nodes``.
        rules: As all clients have them.

    Returns:
        Node label -> ``"enrolled"``, or why it could not be.
    """
    addresses = addresses_of(nodes)
    fingerprint = rules.fingerprint(address.label for address in addresses)
    seen = Seen()

    def ask(connection: AbstractConnection, greeting: Greeting) -> str:
        seen.check(greeting)
        return enrol(connection, rules, greeting.run_id, fingerprint, "bootstrap")[0]

    return {address.label: each(address, ask, str) for address in addresses}


class Seen:
    """The servers met so far: two addresses of one server are one node, not two."""

    def __init__(self) -> None:
        self._run_ids: set[str] = set()

    def check(self, greeting: Greeting) -> None:
        """Raise Unfit if this server was met before."""
        if greeting.run_id in self._run_ids:
            raise Unfit("is the same server as another node; every node must be one of its own")
        self._run_ids.add(greeting.run_id)


def node_statuses(nodes: Sequence[Any], rules: Rules) -> list[NodeStatus]:
    """Return how each of *nodes* is, in their order; changes nothing on an enrolled node."""
    addresses = addresses_of(nodes)
    fingerprint = rules.fingerprint(address.label for address in addresses)
    seen = Seen()

    def status(address: Address) -> NodeStatus:
        def ask(connection: AbstractConnection, greeting: Greeting) -> NodeStatus:
            seen.check(greeting)
            state, left = "enrolled", 0.0
            if rules.restart_guard:
                state, left, _ = enrol(connection, rules, greeting.run_id, fingerprint, "look")
            shown = "quarantined" if left else {"enrolled": "up"}.get(state, state)
            return NodeStatus(address.label, shown, greeting.version, greeting.uptime, left)

        def failed(error: Exception) -> NodeStatus:
            state = "unfit" if isinstance(error, Unfit) else "down"
            return NodeStatus(address.label, state, problem=str(error))

        return each(address, ask, failed)

    return [status(address) for address in addresses]


def live_locks(nodes: Sequence[Any], rules: Rules) -> list[LockView]:
    """Return the locks that somebody holds on any of *nodes*, by name; uses SCAN, never KEYS."""
    found: dict[tuple[str, bytes], LockView] = {}
    for address in addresses_of(nodes):
        with contextlib.suppress(RedisError, OSError), connected(address) as connection:
            for name, value, ttl in scan(connection, f"{rules.prefix}:lock:"):
                view = found.get((name, value))
                votes = [*(view.votes if view else ()), address.label]
                longest = max(ttl, view.ttl if view else 0.0)
                found[name, value] = LockView(name, read_holder(value), longest, votes)
    return [found[key] for key in sorted(found)]


def scan(connection: AbstractConnection, prefix: str) -> Iterator[tuple[str, bytes, float]]:
    """Yield name, value and rest of the lease [s] of every lock on a node."""
    cursor = b"0"
    while True:
        ((cursor, keys),) = exchange(
            connection, (b"SCAN", cursor, b"MATCH", f"{prefix}*", b"COUNT", SCAN_COUNT)
        )
        if keys:
            values, *ttls = exchange(
                connection, (b"MGET", *keys), *((b"PTTL", key) for key in keys)
            )
            for key, value, ttl in zip(keys, values, ttls, strict=True):
                if value is not None:
                    yield key.decode()[len(prefix) :], value, max(0, ttl) / 1000.0
        if cursor == b"0":
            return


@contextlib.contextmanager
def connected(address: Address) -> Iterator[AbstractConnection]:
    """Connect to a node for the body of a ``with``."""
    connection = address.connection()
    try:
        connection.connect()
        yield connection
    finally:
        connection.disconnect()


def each(
    address: Address,
    ask: Callable[[AbstractConnection, Greeting], Answer],
    failed: Callable[[Exception], Answer],
) -> Answer:
    """Return what *ask* makes of the node at *address*, or what *failed* makes of its error."""
    try:
        with connected(address) as connection:
            return ask(connection, greet(connection))
    except (RedisError, OSError, ConfigurationError) as error:
        return failed(error)
