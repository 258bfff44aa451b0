"""
Checks that admit a node to the quorum.

Every new connection is greeted: is this a master that keeps its data, which
process is it, and does it remember being enrolled? A connection never outlives the
server process, so the run id read here holds for as long as the connection does. (Behind
a TCP proxy that reconnects by itself this premise fails: connect to nodes directly.)

A node without memory is put into quarantine by a marker in the node itself, so that all
clients see the same. It is enrolled for one list of nodes, as two lists in use at once would
have two majorities: all nodes are greeted before one is enrolled, and whoever has met a node
that is enrolled for another list enrols none.

One relief: for a server that is the only node, and was never flushed, a quarantine counts from
its start, not from when a client first saw it: leases of before the start end within it. So the
Redis one has is trusted at once if it has been up for longer. Of several nodes uptime is not
believed: it is read off a wall clock, and nodes that boot with a late one look old once it is set.
Nor is that of a server that was a replica, or is of a cluster: another may have granted the locks
until a moment ago.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from redis.exceptions import RedisError, ResponseError

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.nodes.bounded import begin_exchange
from celery_redlock.lock.records import Keys, ms
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.scripting import registered, seconds, text, whole
from celery_redlock.lock.scripts.scripts import ENROL
from celery_redlock.process.log import printable

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = [
    "Foreign",
    "Greeting",
    "Unfit",
    "boot_id_of",
    "boot_marker",
    "check_enrolment",
    "check_together",
    "enrol",
    "exchange",
    "greet",
    "policy_that_evicts",
    "quarantine_of_new",
    "read_as",
    "replies",
]

Read = TypeVar("Read")

NO_SERVER = "answers, but not as a Redis or Valkey server does (INFO names no role or run_id)"
OF_CLUSTER = (
    "runs in cluster mode: in redlock_nodes, write its URL with redis+cluster:// (or "
    "rediss+cluster://), which makes the cluster one node, or name servers with cluster-enabled no"
)
NO_CLUSTER = "does not run in cluster mode: write its URL with redis:// (or rediss://)"
#: Of INFO commandstats: what deletes our keys, or has the server forget that it did. Redis before
#: 7.0 does not count the last by itself.
FORGETS = (b"flushall:", b"flushdb:", b"swapdb:", b"config|resetstat:")
#: Digits of a number in INFO.
LONGEST_NUMBER = 15
#: By how much an uptime may be too large, being the difference of two whole seconds [s].
ROUNDED = 1.0


class Unfit(ConfigurationError):
    """A server answers but must not be a lock node."""


class Foreign(Unfit):
    """A server is the lock node of clients with other settings."""


@dataclass(frozen=True)
class Greeting:
    """A node's description of itself at connect; times are in seconds."""

    run_id: str  # of the server process; another after every restart
    uptime: float
    flushed: bool  # whether its data were ever wiped on command since it started, for all we know
    replicas: int
    version: str
    eviction: str = ""  # its maxmemory-policy if that may evict keys
    #: Whether our keys may have been on another server: it was a replica, or is of a cluster.
    succeeded: bool = False
    quarantine: float = 0.0  # for how long it must not vote
    node_now: float = 0.0  # its wall clock [Unix time]


def exchange(
    connection: AbstractConnection, *commands: Sequence[Any], may_fail: int = 0
) -> list[Any]:
    """
    Send *commands* in one write and return the replies; raise the first that is an error.

    The last *may_fail* of them may be errors.
    """
    found = replies(connection, *commands)
    musts = found[: len(found) - may_fail]
    error = next((one for one in musts if isinstance(one, Exception)), None)
    try:
        if error is not None:
            raise error
        return found
    finally:  # or the error and this frame would keep each other, and all that has come
        del error, found, musts


def replies(connection: AbstractConnection, *commands: Sequence[Any]) -> list[Any]:
    """
    Send *commands* in one write and return the replies, in place of a missing one the error.

    An error that is a node's answer costs that answer alone, any other one all that follow, too.
    """
    found: list[Any] = []
    try:
        begin_exchange(connection)
        connection.send_packed_command(connection.pack_commands(commands))
        for _ in commands:
            try:
                found.append(connection.read_response(disable_decoding=True))
            except ResponseError as error:
                found.append(without_frames(error))
    except (RedisError, OSError) as error:
        found += [without_frames(error)] * (len(commands) - len(found))
    return found


def without_frames(error: Exception) -> Exception:
    """Return *error* without the frames that it came from, which hold all that was read."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def read_as(what: str, read: Callable[[Any], Read], reply: Any) -> Read:
    """Return what *read* makes of a node's *reply* to *what*; ResponseError if it is malformed."""
    try:
        return read(reply)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        msg = f"answers, but not as a lock node does when it is asked for {what}"
        raise ResponseError(msg) from None


def greet(connection: AbstractConnection, nodes: int = 1) -> Greeting:
    """
    Load the scripts into the node and return its description; `Unfit` if it must not vote.

    As one of so many *nodes*: the only one may evict keys, as whoever has it has no other.
    """
    loads = [(b"SCRIPT", b"LOAD", script.source) for script in registered()]
    asked: list[Sequence[Any]] = [(b"INFO",), *loads, (b"INFO", b"commandstats")]
    reply, *_, stats = exchange(connection, *asked, may_fail=1)
    if not isinstance(reply, bytes):
        raise Unfit(NO_SERVER)
    info = read_info(reply)
    in_cluster = getattr(connection, "in_cluster", False)
    check_fit(info, in_cluster=in_cluster)
    eviction = policy_that_evicts(info)
    is_counted = "evicted_keys" in info
    if eviction and not (nodes == 1 and is_counted):
        more = "" if is_counted else " and does not say how many keys it has evicted"
        msg = f"may evict locks (maxmemory-policy {eviction}){more}"
        raise Unfit(f"{msg}; set maxmemory-policy noeviction")
    return Greeting(
        run_id=info["run_id"],
        uptime=float(whole_in(info, "uptime_in_seconds")),
        flushed=was_flushed(stats),
        replicas=whole_in(info, "connected_slaves"),
        version=info.get("valkey_version") or info.get("redis_version", "?"),
        eviction=eviction,
        succeeded=in_cluster or bool(info.get("master_replid2", "").strip("0")),
    )


def policy_that_evicts(info: Mapping[str, str]) -> str:
    """Return the maxmemory-policy in INFO; "" for one that evicts nothing."""
    policy = info.get("maxmemory_policy", "noeviction")
    return "" if policy == "noeviction" else printable(policy)


def was_flushed(stats: Any) -> bool:
    """Return whether a server was ever flushed, by its INFO commandstats; so if it shows none."""
    shown = stats if isinstance(stats, bytes) else b""
    has_stats = b"cmdstat_info:" in shown  # at least the question itself
    return not has_stats or any(b"cmdstat_" + command in shown for command in FORGETS)


def whole_in(info: Mapping[str, str], name: str) -> int:
    """Return a whole number from INFO; 0 if it is absent or malformed."""
    value = info.get(name, "")
    # isdecimal: a digit may be a superscript one. No server has run for so many seconds.
    return int(value) if value.isdecimal() and len(value) <= LONGEST_NUMBER else 0


def read_info(reply: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def check_fit(info: dict[str, str], *, in_cluster: bool = False) -> None:
    if "role" not in info or "run_id" not in info:
        raise Unfit(NO_SERVER)
    if info["role"] != "master":
        msg = (
            f"is a {info['role']}, but a lock node must be a master; "
            "name the master, or a Sentinel service"
        )
        raise Unfit(msg)
    if is_of_cluster(info) != in_cluster:
        raise Unfit(NO_CLUSTER if in_cluster else OF_CLUSTER)


def is_of_cluster(info: Mapping[str, str]) -> bool:
    return info.get("cluster_enabled") == "1" or info.get("redis_mode") == "cluster"


def enrol(
    connection: AbstractConnection,
    rules: Rules,
    run_id: str,
    fingerprint: str,
    mode: str,
    left: float | None = None,
) -> tuple[str, float, float]:
    """
    Ask the node for its enrolment, or change it.

    *mode* is ``"look"`` (quarantines a node that was another process when it was enrolled),
    ``"trust"``, ``"quarantine"`` (for one that is not enrolled: for *left* [s], if that is
    enough), or ``"bootstrap"`` (trust whatever was there, on an operator's word).

    Returns:
        State, what is left of a quarantine [s], and the node's wall clock [s].
    """
    keys = Keys.of(rules.prefix, "")
    boot_id = boot_marker(run_id, fingerprint)
    asked = [boot_id, ms(rules.quarantine), mode.encode()]
    if left is not None:
        asked.append(ms(left))
    evalsha = (b"EVALSHA", ENROL.sha, b"2", keys.boot, keys.quarantine, *asked)
    (reply,) = exchange(connection, evalsha)
    try:
        state, now, left, _ = reply
        enrolment = text(state).decode(), max(0, whole(left)) / 1000.0, seconds(now)
    except (TypeError, ValueError):
        msg = "answers, but not as our script does when it is asked to enrol"
        raise ResponseError(msg) from None
    if state == b"foreign":
        msg = (
            "is enrolled by clients with other lock nodes or another redlock_max_ttl; make "
            "them equal everywhere, or after a wanted change: stop all clients, wait for "
            "redlock_max_ttl, run 'celery -A APP redlock bootstrap'. If it is this node alone, "
            f"DEL {keys.boot.decode()} there: it votes {rules.quarantine:.0f} s later"
        )
        raise Foreign(msg)
    return enrolment


def boot_marker(run_id: str, fingerprint: str) -> bytes:
    return f"{run_id}:{fingerprint}".encode()


def boot_id_of(greeting: Greeting, fingerprint: str) -> bytes:
    """Return what a node is asked to vote with; of one that may evict, with a look at that."""
    return boot_marker(greeting.run_id, fingerprint) + (b"+" if greeting.eviction else b"")


def check_enrolment(labels: Sequence[str], found: Mapping[int, str]) -> None:
    """Raise Unfit if one of the nodes, whose states were *found*, is of another list."""
    for position, label in enumerate(labels):
        if found.get(position) == "foreign":
            msg = (
                f"is not enrolled: {label} is enrolled by clients with other lock nodes or "
                "another redlock_max_ttl, and new nodes would give them and us a majority each"
            )
            raise Unfit(msg)


def quarantine_of_new(greeting: Greeting, nodes: int, rules: Rules) -> float:
    """Return for how long a node that is not enrolled must not vote [s, >= 0]; one of *nodes*."""
    if nodes > 1 or greeting.flushed or greeting.succeeded:
        return rules.quarantine
    return max(0.0, rules.quarantine - max(0.0, greeting.uptime - ROUNDED))


def check_together(labels: Sequence[str], greetings: Sequence[Greeting | None]) -> None:
    seen: dict[str, str] = {}
    for label, greeting in zip(labels, greetings, strict=True):
        if greeting is None:
            continue
        if greeting.run_id in seen:
            msg = (
                f"redlock_nodes: {seen[greeting.run_id]} and {label} are the same server; "
                "every node must be a server of its own"
            )
            raise ConfigurationError(msg)
        seen[greeting.run_id] = label
