"""
One lock, or some, as every node has it: who holds it, who waits for it, and taking it away.

What the nodes store is judged as if somebody asked for the lock at this moment
(`OneLock.verdict`), without anybody asking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from celery_redlock.lock.address import Address, addresses_of
from celery_redlock.lock.guard import Greeting, exchange, read_as
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import PUBLIC_TOKEN_LENGTH, TOKEN_LENGTH, Keys, is_ours, shorten
from celery_redlock.lock.requests import Request, release_request
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.votes import Ballot, Verdict, Vote, VoteKind, judge, verdict_when_split
from celery_redlock.reading.nodes import (
    NodeStatus,
    ask_all,
    ask_fit,
    connected,
    failed,
    node_statuses,
)
from celery_redlock.reading.stored import (
    READ,
    LockView,
    ReservationView,
    StoredLock,
    StoredReservation,
    arguments_of_read,
    read_stored,
    reservation_views,
    views_of,
)
from celery_redlock.reading.waiters import Waiter, waiters_of
from celery_redlock.unique.requests import end_request

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["OneLock", "read_lock", "read_locks", "release_seen"]

#: How many of those who wait are read from each node.
MOST_WAITERS = 1000
#: For how many locks a node is asked at once.
PAGE = 100


@dataclass(frozen=True)
class OneLock:
    """
    What the nodes have of one lock at this moment.

    Attributes:
        name: Lock name.
        nodes: How each node is, in their order.
        stored: What each stores of the lock, by its label; none of those that did not answer.
    """

    name: str
    nodes: Sequence[NodeStatus]
    stored: Mapping[str, StoredLock]

    @cached_property
    def views(self) -> list[LockView]:
        """Who holds it on any node, the one on most nodes first; usually one or none."""
        return views_of(shorten(self.name), self.stored)

    @property
    def silent(self) -> list[str]:
        """Labels of the nodes that did not answer."""
        return [node.node for node in self.nodes if node.node not in self.stored]

    @property
    def voting(self) -> int:
        """How many nodes would vote."""
        return sum(1 for node in self.nodes if node.state == "up" and node.node in self.stored)

    @property
    def verdict(self) -> Verdict:
        """What a request for the lock would find now: granted, taken or neither."""
        ballot: Ballot = [vote_of(node, self.stored.get(node.node)) for node in self.nodes]
        verdict = judge(ballot)
        return verdict_when_split(ballot) if verdict is Verdict.SPLIT else verdict

    @property
    def waiting(self) -> int:
        """How many are known to wait for it, as in `LockView.waiting`; also while it is free."""
        return max((one.waiting for one in self.stored.values()), default=0)

    @cached_property
    def waiters(self) -> list[Waiter]:
        """
        Who waits for it as a message or in ``lock_wait``, the oldest first.

        Of more than a thousand, the oldest.
        """
        return waiters_of(it for one in self.stored.values() for it in one.waiters)

    @property
    def queued(self) -> StoredReservation | None:
        """Who is queued or runs, for a majority of the nodes; None for nobody."""
        return majority_of([one.queued for one in self.stored.values()], len(self.nodes))

    @property
    def next(self) -> StoredReservation | None:
        """Who waits for that one to end, likewise."""
        return majority_of([one.next for one in self.stored.values()], len(self.nodes))

    @cached_property
    def reservations(self) -> list[ReservationView]:
        """Who has its name reserved on any node; who is queued or runs comes first."""
        return reservation_views(shorten(self.name), self.stored)


def vote_of(node: NodeStatus, stored: StoredLock | None) -> Vote:
    """Return what *node* would say to somebody who asked for the lock now."""
    if stored is None or node.state in ("down", "unfit"):
        return Vote(VoteKind.UNREACHABLE, reason=node.problem)
    if node.state != "up":
        return Vote(VoteKind.QUARANTINED, ttl=node.quarantine)
    if stored.value is None:
        return Vote(VoteKind.GRANTED)
    return Vote(VoteKind.REFUSED, ttl=stored.ttl or 0.0, value=stored.value)


def majority_of(found: Sequence[StoredReservation | None], nodes: int) -> StoredReservation | None:
    """Return the reservation that a majority of so many *nodes* has; None for none."""
    tokens = [one.token for one in found if one is not None]
    token = max(tokens, key=tokens.count, default=b"")
    if tokens.count(token) < quorum(nodes):
        return None
    same = [one for one in found if one is not None and one.token == token]
    return max(same, key=lambda one: (one.merged, one.left))


def read_lock(nodes: Sequence[Any], rules: Rules, name: str) -> OneLock:
    """Return what each of *nodes* has of the lock *name*; all are asked at once."""
    return read_locks(nodes, rules, [name])[0]


def read_locks(nodes: Sequence[Any], rules: Rules, names: Sequence[str]) -> list[OneLock]:
    """Return what each of *nodes* has of the locks *names*, in their order; likewise."""
    addresses = addresses_of(nodes)
    statuses = dict(zip(addresses, node_statuses(nodes, rules), strict=True))

    def ask(address: Address) -> tuple[NodeStatus, list[StoredLock]]:
        try:
            with connected(address) as connection:
                return statuses[address], stored_on(connection, rules, names)
        except (RedisError, OSError) as error:
            status = statuses[address]
            return status if status.problem else failed(address, error), []

    answers = ask_all(addresses, ask)
    seen = [status for status, _ in answers]
    return [
        OneLock(name, seen, {status.node: locks[i] for status, locks in answers if locks})
        for i, name in enumerate(names)
    ]


def stored_on(
    connection: AbstractConnection, rules: Rules, names: Sequence[str]
) -> list[StoredLock]:
    """Return what a node stores of the locks *names*; raises redis-py's errors."""
    found: list[StoredLock] = []
    for begin in range(0, len(names), PAGE):
        keys = [Keys.of(rules.prefix, name).lock for name in names[begin : begin + PAGE]]
        arguments = arguments_of_read(keys, rules.prefix, MOST_WAITERS)
        (reply,) = exchange(connection, (b"EVAL", READ.source, *arguments))
        found += read_stored(reply, len(keys))
    return found


def release_seen(
    nodes: Sequence[Any], rules: Rules, name: str, token: str, place: int = 0
) -> dict[str, str]:
    """
    Release the lock *name* of the holder that an operator has seen, and of no other.

    Its watchdog notices at the next renewal, and the task gets `LockLost`. A reservation of the
    name ends likewise, by its token: the next publish is none's duplicate any more.

    Args:
        nodes: As the setting ``redlock_nodes``.
        rules: As all clients have them.
        name: Lock name.
        token: Beginning of the token of the holder, as `LockView.holder` has it, or of a
            reservation, as `StoredReservation.seen` [>= 8 characters].
        place: Which place of a lock with several *name* is. Without it, whoever waits for any
            place finds out within a second.

    Returns:
        Node label -> ``"released"``, ``"free"`` (nobody holds it there), ``"held by another"``,
        ``"not written by us"`` (a value that is no token), or why it could not be asked.
    """
    begin = token.encode()

    def is_seen(token: bytes) -> bool:
        return len(begin) >= PUBLIC_TOKEN_LENGTH and token[:TOKEN_LENGTH].startswith(begin)

    def ask(connection: AbstractConnection, _: Greeting) -> str:
        stored = stored_on(connection, rules, [name])[0]
        reserved = next((it.token for it in stored.reservations if is_seen(it.token)), None)
        if reserved is not None:
            return asked(connection, end_request(rules, name, reserved.decode("latin-1")))
        if stored.value is None:
            return "free"
        if not is_ours(stored.value):
            return "not written by us"
        if not is_seen(stored.value):
            return "held by another"
        owner = stored.value[:TOKEN_LENGTH].decode("latin-1")
        return asked(connection, release_request(rules, name, owner, place=place))

    def asked(connection: AbstractConnection, request: Request) -> str:
        keys = request.keys
        command = (b"EVAL", request.script.source, b"%d" % len(keys), *keys, *request.arguments)
        (reply,) = exchange(connection, command)
        released = read_as("a release", lambda it: int(it[0]), reply)
        return "released" if released else "held by another"

    addresses = addresses_of(nodes)
    answers = ask_all(addresses, lambda address: ask_fit(address, ask, str))
    return {address.label: answer for address, answer in zip(addresses, answers, strict=True)}
