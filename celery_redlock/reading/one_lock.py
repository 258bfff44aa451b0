"""
One lock name as every node has it, for operators: who holds it, who is queued for it.

Only reads. What the nodes say is then judged as if somebody asked for the lock at this moment
(`what_would_be`), without anybody asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from celery_redlock.lock.address import Address, addresses_of
from celery_redlock.lock.guard import exchange
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import (
    TOKEN_LENGTH,
    Keys,
    is_ours,
    object_in,
    read_holder,
    record_key,
)
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.votes import Ballot, Verdict, Vote, VoteKind, judge, verdict_when_split
from celery_redlock.reading.all_locks import number
from celery_redlock.reading.nodes import NodeStatus, ask_all, connected, node_statuses

__all__ = [
    "HolderSeen",
    "NodeLook",
    "ReservationSeen",
    "holders",
    "look",
    "marker",
    "what_would_be",
]

FIELDS = (b"token", b"info", b"until", b"lock", b"started", b"merged")


@dataclass(frozen=True)
class ReservationSeen:
    """
    A queued marker on one node.

    Attributes:
        token: Of its owner; nobody's business but ours.
        info: What the owner tells of itself.
        left: For how long it stands by itself [s].
        is_running: Whether it stands because its task holds the lock.
        merged: How many triggers have been merged into it.
    """

    token: bytes = field(repr=False)
    info: dict[str, Any]
    left: float
    is_running: bool
    merged: int


@dataclass(frozen=True)
class NodeLook:
    """
    What one node has of one lock name.

    Attributes:
        status: How the node is.
        value: Of the lock's key; None if nobody holds it there.
        ttl: Rest of the lease [s]; None for a key that never expires.
        fence: Largest fencing number given out there, 0 for none.
        queued: Who is queued or runs; None for nobody.
        next: Who waits for that one to end; None for nobody.
        problem: Why the node did not tell, in plain words; empty if it did.
    """

    status: NodeStatus
    value: bytes | None = field(default=None, repr=False)
    ttl: float | None = 0.0
    fence: int = 0
    queued: ReservationSeen | None = None
    next: ReservationSeen | None = None
    problem: str = ""

    @property
    def node(self) -> str:
        """Label of the node."""
        return self.status.node

    @property
    def is_foreign(self) -> bool:
        """Whether something else than celery-redlock has written the key."""
        return self.value is not None and not is_ours(self.value)

    @property
    def holder(self) -> dict[str, Any]:
        """As in `LockTaken.holder`; empty if there is none, or none of ours."""
        return read_holder(self.value) if self.value is not None and not self.is_foreign else {}

    @property
    def vote(self) -> Vote:
        """What the node would say to somebody who asked for the lock now."""
        if self.problem or self.status.state in ("down", "unfit"):
            return Vote(VoteKind.UNREACHABLE, reason=self.problem or self.status.problem)
        if self.status.state != "up":
            return Vote(VoteKind.QUARANTINED, ttl=self.status.quarantine)
        if self.value is None:
            return Vote(VoteKind.GRANTED)
        return Vote(VoteKind.REFUSED, ttl=self.ttl or 0.0, value=self.value)


@dataclass(frozen=True)
class HolderSeen:
    """
    A holder, as the nodes tell together.

    Attributes:
        info: As in `LockTaken.holder`, from the node that was told last.
        ttl: Largest rest of the lease on any node [s]; None for a key that never expires.
        votes: Labels of the nodes that store its token.
        fence: Largest fencing number any of them has given out, 0 for none.
        is_foreign: Whether something else than celery-redlock has written the keys.
    """

    info: dict[str, Any]
    ttl: float | None
    votes: list[str]
    fence: int
    is_foreign: bool


def look(nodes: Sequence[Any], rules: Rules, name: str) -> list[NodeLook]:
    """Return what each of *nodes* has of the lock *name*, in their order."""
    statuses = dict(zip(addresses_of(nodes), node_statuses(nodes, rules), strict=True))

    def ask(address: Address) -> NodeLook:
        try:
            return read_node(address, statuses[address], rules, name)
        except (RedisError, OSError) as error:
            return NodeLook(statuses[address], problem=str(error) or type(error).__name__)

    return ask_all(list(statuses), ask)


def read_node(address: Address, status: NodeStatus, rules: Rules, name: str) -> NodeLook:
    """Ask one node; raises redis-py's errors."""
    keys = Keys.of(rules.prefix, name)
    keys_of_markers = (record_key(rules.prefix, kind, name) for kind in ("queued", "next"))
    markers = ((b"HMGET", key, *FIELDS) for key in keys_of_markers)
    asked = ((b"MGET", keys.lock, keys.fence), (b"PTTL", keys.lock), (b"TIME",), *markers)
    with connected(address) as connection:
        (value, fence), ttl, (seconds, micros), *told = exchange(connection, *asked)
    now = int(seconds) * 1000 + int(micros) // 1000
    queued, following = (marker_in(fields, now, value) for fields in told)
    left = None if ttl == -1 else max(0, ttl) / 1000.0
    return NodeLook(status, value, left, number(fence or b""), queued, following)


def marker_in(
    fields: Sequence[bytes | None], now: int, lock: bytes | None
) -> ReservationSeen | None:
    """Return the marker in *fields*, None if it does not stand (any more)."""
    token, info, until, under, started, merged = (value or b"" for value in fields)
    left = (number(until) - now) / 1000.0
    is_running = bool(under) and (lock or b"")[:TOKEN_LENGTH] == under
    if not token or (left <= 0 and not is_running):
        return None
    is_running = is_running or started not in (b"", b"-")
    return ReservationSeen(token, as_dict(info), max(0.0, left), is_running, number(merged))


def as_dict(info: bytes) -> dict[str, Any]:
    """Return what the owner of a marker tells of itself; nothing if it makes no sense."""
    return object_in(info)


def holders(looks: Sequence[NodeLook]) -> list[HolderSeen]:
    """Return who holds the lock on any node, the one on most nodes first."""
    groups: dict[bytes, list[NodeLook]] = {}
    for one in looks:
        if one.value is not None:
            groups.setdefault(one.value[:TOKEN_LENGTH], []).append(one)
    seen = [holder_in(group) for group in groups.values()]
    return sorted(seen, key=lambda holder: -len(holder.votes))


def holder_in(group: Sequence[NodeLook]) -> HolderSeen:
    """Return the holder whose token all of *group* store."""
    newest = max(group, key=lambda one: renewals(one.holder))
    return HolderSeen(
        info=newest.holder,
        ttl=None if any(one.ttl is None for one in group) else max(one.ttl or 0.0 for one in group),
        votes=[one.node for one in group],
        fence=max(one.fence for one in group),
        is_foreign=newest.is_foreign,
    )


def renewals(holder: dict[str, Any]) -> int:
    """Return how often *holder* has renewed its lease, as far as it tells."""
    told = holder.get("renewals", 0)
    return told if isinstance(told, int) else 0


def marker(seen: Sequence[ReservationSeen | None]) -> ReservationSeen | None:
    """Return the marker that a majority of all nodes has, of what each has; None for none."""
    tokens = [one.token for one in seen if one is not None]
    token = max(tokens, key=tokens.count, default=b"")
    if tokens.count(token) < quorum(len(seen)):
        return None
    found = [one for one in seen if one is not None and one.token == token]
    return max(found, key=lambda one: (one.merged, one.left))


def what_would_be(looks: Sequence[NodeLook]) -> Verdict:
    """Return what somebody who asked for the lock now would be told: granted, taken or neither."""
    ballot: Ballot = [one.vote for one in looks]
    found = judge(ballot)
    return verdict_when_split(ballot) if found is Verdict.SPLIT else found
