"""
What an operator asks the nodes, without hurry.

Uses connections of its own, apart from those that locks are taken on: a survey may be
slow, and must not stand in the way of a round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from redis.exceptions import RedisError, ResponseError

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.address import Address, addresses_of
from celery_redlock.lock.guard import Greeting, Unfit, enrol, exchange, greet
from celery_redlock.lock.node import ECHO, without_echo
from celery_redlock.lock.records import PUBLIC_TOKEN_LENGTH, TOKEN_LENGTH, Keys, is_ours, probe_key
from celery_redlock.lock.requests import release_request
from celery_redlock.lock.rules import Rules

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["NodeStatus", "ask_all", "bootstrap", "connected", "node_statuses", "release_seen"]

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
    """
    Return how each of *nodes* is, in their order; leaves a key for a second on each.

    All are asked at once, so those that are down cost no more time than one of them.
    """
    addresses = addresses_of(nodes)
    fingerprint = rules.fingerprint(address.label for address in addresses)

    def status(address: Address) -> tuple[Greeting | None, NodeStatus]:
        def ask(
            connection: AbstractConnection, greeting: Greeting
        ) -> tuple[Greeting | None, NodeStatus]:
            state, left = "enrolled", 0.0
            if rules.restart_guard:
                state, left, _ = enrol(connection, rules, greeting.run_id, fingerprint, "look")
            check_writes(connection, rules)
            shown = "quarantined" if left else {"enrolled": "up"}.get(state, state)
            return greeting, NodeStatus(
                address.label, shown, greeting.version, greeting.uptime, left
            )

        return each(address, ask, lambda error: (None, failed(address, error)))

    return each_once(addresses, ask_all(addresses, status))


def failed(address: Address, error: Exception) -> NodeStatus:
    """Return how the node at *address* is that answered with *error*, or not at all."""
    state = "unfit" if isinstance(error, Unfit) else "down"
    return NodeStatus(address.label, state, problem=str(error))


def each_once(
    addresses: Sequence[Address], found: Sequence[tuple[Greeting | None, NodeStatus]]
) -> list[NodeStatus]:
    """Return the statuses in *found*; of those of one server, only the first is fit."""
    seen, statuses = Seen(), []
    for address, (greeting, status) in zip(addresses, found, strict=True):
        try:
            if greeting is not None:
                seen.check(greeting)
            statuses.append(status)
        except Unfit as error:
            statuses.append(failed(address, error))
    return statuses


def release_seen(nodes: Sequence[Any], rules: Rules, name: str, seen: str) -> dict[str, str]:
    """
    Take the lock *name* away from the holder that an operator has seen, and from no other.

    Its watchdog finds that out at the next renewal, and tells the task that its lock is lost.

    Args:
        nodes: As the setting ``redlock_nodes``.
        rules: As all clients have them.
        name: Lock name.
        seen: Beginning of the holder's token, as `LockView.holder` tells it [>= 8 characters].

    Returns:
        Node label -> ``"released"``, ``"free"`` (nobody holds it there), ``"held by another"``,
        ``"not written by us"`` (a value that is no token), or why it could not be asked.
    """
    key = Keys.of(rules.prefix, name).lock
    begin = seen.encode()

    def ask(connection: AbstractConnection, _: Greeting) -> str:
        (value,) = exchange(connection, (b"GET", key))
        if value is None:
            return "free"
        if not is_ours(value):
            return "not written by us"
        if len(begin) < PUBLIC_TOKEN_LENGTH or not value[:TOKEN_LENGTH].startswith(begin):
            return "held by another"
        request = release_request(rules, name, value[:TOKEN_LENGTH].decode("latin-1"))
        command = (b"EVALSHA", request.script.sha, b"2", *request.keys, *request.arguments)
        ((released, _now),) = exchange(connection, command)
        return "released" if released else "held by another"

    addresses = addresses_of(nodes)
    answers = ask_all(addresses, lambda address: each(address, ask, str))
    return {address.label: answer for address, answer in zip(addresses, answers, strict=True)}


def ask_all(addresses: Sequence[Address], ask: Callable[[Address], Answer]) -> list[Answer]:
    """Return what *ask* returns for each of *addresses*, all of them asked at once."""
    with ThreadPoolExecutor(len(addresses), "redlock-survey") as threads:
        return list(threads.map(ask, addresses))


def check_writes(connection: AbstractConnection, rules: Rules) -> None:
    """Raise Unfit if a node answers but takes no writes, as with its memory full."""
    try:
        exchange(connection, (b"SET", probe_key(rules.prefix), b"1", b"PX", b"1000"))
    except ResponseError as error:
        msg = f"takes no writes: {error}"
        raise Unfit(msg) from error


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
        return failed(type(error)(without_echo(error)) if ECHO in str(error) else error)
