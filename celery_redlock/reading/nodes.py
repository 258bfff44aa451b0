"""
Visits to the lock nodes: how they are, and what else a question needs, over one connection each.

These connections are apart from those that locks are taken on: a visit may be slow, and must not
stand in the way of a round. Each exchange is bounded (`celery_redlock.lock.nodes.bounded`), and all
nodes are visited at once: one that hangs or lies costs its own answers only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from redis.exceptions import RedisError, ResponseError

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.nodes.address import Address, addresses_of
from celery_redlock.lock.nodes.guard import Greeting, Unfit, enrol, greet, replies
from celery_redlock.lock.nodes.node import without_echo
from celery_redlock.lock.records import probe_key
from celery_redlock.lock.rules import Rules

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = [
    "NodeStatus",
    "Visit",
    "ask_all",
    "ask_fit",
    "bootstrap",
    "connected",
    "enrolment",
    "failed",
    "is_voting",
    "node_statuses",
    "visit_all",
    "write_of",
]

Answer = TypeVar("Answer")
Command = Sequence[Any]
SAME_SERVER = "is the same server as another node; every node must be one of its own"


@dataclass(frozen=True)
class NodeStatus:
    node: str  # its label
    state: str  # "up", "quarantined", "unmarked" (no client has used it yet), "unfit" or "down"
    version: str = ""  # of the server; "" where it was not asked
    uptime: float = 0.0  # of the server process [s]; 0.0 where it was not asked
    quarantine: float = 0.0  # how long it does not vote yet [s]
    problem: str = ""  # why it does not vote, in plain words; empty if it does
    latency: float | None = None  # from a request to its answer [s]; None where there was none
    #: How far its wall clock is ahead of ours [s]; None if unknown
    clock_offset: float | None = None
    eviction: str = ""  # its maxmemory-policy if that may evict keys; "" where it was not asked


class Visit(NamedTuple):
    status: NodeStatus
    replies: Sequence[Any]  # to the commands; the error in place of each that is missing


# --- visits --------------------------------------------------------------------------------


def visit_all(nodes: Sequence[Any], rules: Rules, *commands: Command) -> list[Visit]:
    """
    Visit each of *nodes*, in their order; leaves a key for a second on each.

    Of those that are one server, only the first is fit. A node that must not vote is asked
    the *commands* all the same.
    """
    addresses, seen = addresses_of(nodes, rules.prefix), set[str]()
    labels = [address.label for address in addresses]

    def visit(address: Address) -> tuple[str, Visit]:
        try:
            with connected(address) as connection:
                return visited(connection, address.label, rules, labels, commands)
        except (RedisError, OSError, ConfigurationError) as error:
            return "", Visit(failed(address.label, error), [error] * len(commands))

    found = []
    for run_id, one in ask_all(addresses, visit):
        is_same = bool(run_id) and run_id in seen
        status = failed(one.status.node, Unfit(SAME_SERVER)) if is_same else one.status
        found.append(one._replace(status=status))
        seen.add(run_id)
    return found


def node_statuses(nodes: Sequence[Any], rules: Rules) -> list[NodeStatus]:
    return [visit.status for visit in visit_all(nodes, rules)]


def visited(
    connection: AbstractConnection,
    label: str,
    rules: Rules,
    labels: Sequence[str],
    commands: Sequence[Command],
) -> tuple[str, Visit]:
    """Return the run id of a node that may vote, "" of another, and what it says."""
    try:
        sent = time.monotonic()
        greeting = greet(connection, len(labels))
        if rules.restart_guard:
            sent = time.monotonic()
        state, left = enrolment(connection, rules, greeting.run_id, rules.fingerprint(labels))
        latency = time.monotonic() - sent
    except (ResponseError, ConfigurationError) as error:  # it may answer the rest
        return "", Visit(failed(label, error), replies(connection, *commands))
    write, *answers = replies(connection, write_of(rules), *commands)
    if isinstance(write, ResponseError):
        write = Unfit(f"takes no writes: {write}")
    if isinstance(write, Exception):
        return "", Visit(failed(label, write), answers)
    state = "quarantined" if left else {"enrolled": "up"}.get(state, state)
    status = NodeStatus(label, state, greeting.version, greeting.uptime, left, latency=latency)
    return greeting.run_id, Visit(status, answers)


def failed(label: str, error: Exception) -> NodeStatus:
    state = "unfit" if isinstance(error, Unfit) else "down"
    return NodeStatus(label, state, problem=without_echo(error) or type(error).__name__)


# --- connections ---------------------------------------------------------------------------


@contextlib.contextmanager
def connected(address: Address, via: str = "") -> Iterator[AbstractConnection]:
    """Connect to a node for the body of a ``with``; by one of its network addresses, if given."""
    connection = address.connection()
    if via:
        connection.via = via  # type: ignore[attr-defined]
    try:
        connection.connect()
        yield connection
    finally:
        connection.disconnect()


def ask_all(addresses: Sequence[Address], ask: Callable[[Address], Answer]) -> list[Answer]:
    """Return what *ask* returns for each of *addresses*, all of them asked at once."""
    with ThreadPoolExecutor(max(1, len(addresses)), "redlock-ask") as threads:
        return list(threads.map(ask, addresses))


def ask_fit(
    address: Address, nodes: int, ask: Callable[[AbstractConnection, Greeting], str]
) -> str:
    """Return what *ask* makes of a node, one of *nodes*, if it may be one, or its error's text."""
    try:
        with connected(address) as connection:
            return ask(connection, greet(connection, nodes))
    except (RedisError, OSError, ConfigurationError) as error:
        return without_echo(error)


# --- enrolment -----------------------------------------------------------------------------


def bootstrap(nodes: Sequence[Any], rules: Rules) -> dict[str, str]:
    """
    Enrol all *nodes* at once, quarantined or not, on the word that no lock is held on them.

    Returns:
        Node label -> ``"enrolled"``, or why it could not be.
    """
    addresses, seen = addresses_of(nodes, rules.prefix), set[str]()
    fingerprint = rules.fingerprint(address.label for address in addresses)

    def ask(connection: AbstractConnection, greeting: Greeting) -> str:
        if greeting.run_id in seen:
            raise Unfit(SAME_SERVER)
        seen.add(greeting.run_id)
        return enrol(connection, rules, greeting.run_id, fingerprint, "bootstrap")[0]

    return {address.label: ask_fit(address, len(addresses), ask) for address in addresses}


def enrolment(
    connection: AbstractConnection, rules: Rules, run_id: str, fingerprint: str
) -> tuple[str, float]:
    if not rules.restart_guard:
        return "enrolled", 0.0
    state, left, _ = enrol(connection, rules, run_id, fingerprint, "look")
    return state, left


def is_voting(connection: AbstractConnection, rules: Rules, labels: Sequence[str]) -> bool:
    """Return whether a node grants locks; not if it will not tell this user."""
    try:
        run_id = greet(connection, len(labels)).run_id
        found = enrolment(connection, rules, run_id, rules.fingerprint(labels))
    except (ConfigurationError, ResponseError):
        return False
    return found == ("enrolled", 0.0)


def write_of(rules: Rules) -> Command:
    """Return a write that does no harm, to see whether a node takes any."""
    return b"SET", probe_key(rules.prefix), b"1", b"PX", b"1000"
