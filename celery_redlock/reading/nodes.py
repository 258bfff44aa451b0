"""
How the lock nodes are, and enrolling them: what an operator asks, waiting for answers.

Uses connections of its own, apart from those that locks are taken on: this may be slow, and
must not stand in the way of a round.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from redis.exceptions import RedisError, ResponseError

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.address import Address, addresses_of
from celery_redlock.lock.guard import Greeting, Unfit, enrol, exchange, greet
from celery_redlock.lock.node import ECHO, without_echo
from celery_redlock.lock.records import probe_key
from celery_redlock.lock.rules import Rules

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = [
    "NodeStatus",
    "ask_all",
    "ask_fit",
    "bootstrap",
    "check_writes",
    "connected",
    "enrolment",
    "failed",
    "is_voting",
    "node_statuses",
    "several_servers",
]

#: Of a node whose name stands for several servers.
SEVERAL = (
    "is a name of several servers ({}), and clients that reach different ones would hold one lock "
    "at the same time; give each server a name of its own"
)
#: What `enrolment` says of one that votes.
VOTES = ("enrolled", 0.0)
Answer = TypeVar("Answer")
#: What a node that can be a lock node tells: its greeting, state, rest of its quarantine [s], and
#: latency [s].
Found = tuple[Greeting, str, float, float]


@dataclass(frozen=True)
class NodeStatus:
    """
    How one node is.

    Attributes:
        node: Its label.
        state: ``"up"``, ``"quarantined"``, ``"unmarked"`` (nobody has used it as a lock
            node yet), ``"unfit"`` (it answers but must not be a lock node) or ``"down"``.
        version: Of the server; "" where it was not asked.
        uptime: Of the server process [s]; likewise 0.0.
        quarantine: For how long it does not vote yet [s].
        problem: Why it does not vote, in plain words; empty if it does.
        latency: From a request to its answer [s]; None where there was none.
        clock_offset: How far its wall clock is ahead of ours [s]; None if unknown.
    """

    node: str
    state: str
    version: str = ""
    uptime: float = 0.0
    quarantine: float = 0.0
    problem: str = ""
    latency: float | None = None
    clock_offset: float | None = None


def bootstrap(nodes: Sequence[Any], rules: Rules) -> dict[str, str]:
    """
    Enrol all *nodes* at once, quarantined or not, on the word that no lock is held on them.

    Args:
        nodes: As the setting ``redlock_nodes``.
        rules: As all clients have them.

    Returns:
        Node label -> ``"enrolled"``, or why it could not be.
    """
    addresses, seen = addresses_of(nodes), set[str]()
    fingerprint = rules.fingerprint(address.label for address in addresses)

    def ask(connection: AbstractConnection, greeting: Greeting) -> str:
        check_distinct(greeting, seen)
        return enrol(connection, rules, greeting.run_id, fingerprint, "bootstrap")[0]

    return {address.label: ask_fit(address, ask, str) for address in addresses}


def check_distinct(greeting: Greeting, seen: set[str]) -> None:
    """Raise Unfit if a server is one of *seen*, by its run id: then it is no node of its own."""
    if greeting.run_id in seen:
        raise Unfit("is the same server as another node; every node must be one of its own")
    seen.add(greeting.run_id)


def node_statuses(nodes: Sequence[Any], rules: Rules) -> list[NodeStatus]:
    """
    Return how each of *nodes* is, in their order; leaves a key for a second on each.

    All are asked at once, so those that are down cost no more time than one of them. Of those that
    are one server, only the first is fit.
    """
    addresses, seen = addresses_of(nodes), set[str]()
    fingerprint = rules.fingerprint(address.label for address in addresses)

    def ask(connection: AbstractConnection, greeting: Greeting) -> Found | Exception:
        state, left = enrolment(connection, rules, greeting.run_id, fingerprint)
        sent = time.monotonic()
        check_writes(connection, rules)
        latency = time.monotonic() - sent
        state = "quarantined" if left else {"enrolled": "up"}.get(state, state)
        return greeting, state, left, latency

    def status(address: Address, answer: Found | Exception) -> NodeStatus:
        if isinstance(answer, Exception):
            return failed(address, answer)
        greeting, state, left, latency = answer
        try:
            check_distinct(greeting, seen)
        except Unfit as error:
            return failed(address, error)
        return NodeStatus(
            address.label, state, greeting.version, greeting.uptime, left, latency=latency
        )

    answers = ask_all(addresses, lambda address: ask_fit(address, ask, lambda error: error))
    return list(map(status, addresses, answers))


def enrolment(
    connection: AbstractConnection, rules: Rules, run_id: str, fingerprint: str
) -> tuple[str, float]:
    """Return whether a node is enrolled, as `enrol` has it, and how long it must not vote [s]."""
    if not rules.restart_guard:
        return "enrolled", 0.0
    state, left, _ = enrol(connection, rules, run_id, fingerprint, "look")
    return state, left


def is_voting(connection: AbstractConnection, rules: Rules, fingerprint: str) -> bool:
    """Return whether a node grants locks; not if it will not tell this user."""
    try:
        return enrolment(connection, rules, greet(connection).run_id, fingerprint) == VOTES
    except (ConfigurationError, ResponseError):
        return False


def failed(address: Address, error: Exception) -> NodeStatus:
    """Return how the node at *address* is that answered with *error*, or not at all."""
    state = "unfit" if isinstance(error, Unfit) else "down"
    return NodeStatus(address.label, state, problem=str(error) or type(error).__name__)


def ask_all(addresses: Sequence[Address], ask: Callable[[Address], Answer]) -> list[Answer]:
    """Return what *ask* returns for each of *addresses*, all of them asked at once."""
    with ThreadPoolExecutor(max(1, len(addresses)), "redlock-ask") as threads:
        return list(threads.map(ask, addresses))


def check_writes(connection: AbstractConnection, rules: Rules) -> None:
    """Raise Unfit if a node answers but takes no writes, as with its memory full."""
    try:
        exchange(connection, (b"SET", probe_key(rules.prefix), b"1", b"PX", b"1000"))
    except ResponseError as error:
        msg = f"takes no writes: {error}"
        raise Unfit(msg) from error


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


def several_servers(addresses: Sequence[Address], longest: float) -> dict[str, list[str]]:
    """
    Return which nodes have a name of several servers, label -> where these are.

    They grant one lock to as many clients, each of which has reached another. Who does not answer
    is left out, and so is a name that nobody knows in time.

    Args:
        addresses: Of the nodes.
        longest: How long to wait [s]: nobody bounds how long a name is looked up.
    """
    found: dict[str, dict[str, str]] = {address.label: {} for address in addresses}
    looks = [
        threading.Thread(
            target=look_up, args=(one, found[one.label]), name="redlock-look", daemon=True
        )
        for one in addresses
    ]
    for look in looks:
        look.start()
    ends = time.monotonic() + longest
    for look in looks:
        look.join(max(0.0, ends - time.monotonic()))
    several = {label: list(servers.copy().values()) for label, servers in found.items()}
    return {label: places for label, places in several.items() if len(places) > 1}


def look_up(address: Address, found: dict[str, str]) -> None:
    """Note in *found* the servers that a node's name stands for, run id -> network address."""
    try:
        places = address.places()
    except (OSError, UnicodeError):  # the name is not known
        places = []
    for place in places if len(places) > 1 else ():
        silent = contextlib.suppress(RedisError, OSError, ConfigurationError)
        with silent, connected(address, place) as connection:
            found.setdefault(greet(connection).run_id, place)


def ask_fit(
    address: Address,
    ask: Callable[[AbstractConnection, Greeting], Answer],
    failed: Callable[[Exception], Answer],
) -> Answer:
    """Return what *ask* makes of a node that may be a lock node, or *failed* of its error."""
    try:
        with connected(address) as connection:
            return ask(connection, greet(connection))
    except (RedisError, OSError, ConfigurationError) as error:
        return failed(type(error)(without_echo(error)) if ECHO in str(error) else error)
