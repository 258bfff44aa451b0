"""
One lock as every node stores it: its holder, who waits for it, who has its name reserved.

`OneLock.verdict` judges this as if somebody asked for the lock now, without anybody asking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import place_name, shorten
from celery_redlock.lock.scripts.votes import (
    Ballot,
    Verdict,
    Vote,
    VoteKind,
    judge,
    verdict_when_split,
)
from celery_redlock.reading.nodes import NodeStatus
from celery_redlock.reading.stored import (
    LockView,
    ReservationView,
    StoredLock,
    StoredReservation,
    burst_views,
    most_waiting,
    newest_reservation,
    reservation_views,
    views_of,
)
from celery_redlock.reading.waiters import Waiter, waiters_of

__all__ = ["OneLock"]


@dataclass(frozen=True)
class OneLock:
    """What the nodes have of one lock, or of one place of it, at this moment."""

    name: str  # as a call makes it
    nodes: Sequence[NodeStatus]
    stored: Mapping[str, StoredLock]  # by label; without nodes that did not answer
    number: int = 0  # of its place under that name, from 0

    @property
    def stored_name(self) -> str:
        return place_name(self.name, self.number)

    @cached_property
    def views(self) -> list[LockView]:
        """Who holds it on any node, the one on most nodes first; usually one or none."""
        return views_of(shorten(self.stored_name), self.stored)

    @property
    def holder(self) -> LockView | None:
        most = next(iter(self.views), None)
        return most if most and most.is_held(len(self.nodes)) else None

    @property
    def state(self) -> str:
        """``"held"``, ``"free"``, or ``"unavailable"`` if no quorum could say."""
        if self.holder is not None or self.verdict is Verdict.TAKEN:
            return "held"
        return "free" if self.verdict is Verdict.GRANTED else "unavailable"

    @property
    def silent(self) -> list[str]:
        return [node.node for node in self.nodes if node.node not in self.stored]

    @property
    def is_known(self) -> bool:
        """Whether a majority of the nodes answered."""
        return len(self.stored) >= quorum(len(self.nodes))

    @property
    def voting(self) -> int:
        return sum(1 for node in self.nodes if node.state == "up" and node.node in self.stored)

    @property
    def verdict(self) -> Verdict:
        """What a request for the lock would find now: granted, taken or neither."""
        ballot: Ballot = [vote_of(node, self.stored.get(node.node)) for node in self.nodes]
        verdict = judge(ballot)
        return verdict_when_split(ballot) if verdict is Verdict.SPLIT else verdict

    @property
    def waiting(self) -> int:
        return most_waiting(self.stored.values())

    @cached_property
    def waiters(self) -> list[Waiter]:
        """Who waits for it as a message or in ``lock_wait``, the oldest 1000, the oldest first."""
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
        return reservation_views(shorten(self.stored_name), self.stored)

    @property
    def burst(self) -> StoredReservation | None:
        """The newest call of the burst of its name, on most nodes; None if none is open."""
        views = burst_views(shorten(self.stored_name), self.stored)
        return views[0].reservation if views else None


def vote_of(node: NodeStatus, stored: StoredLock | None) -> Vote:
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
    return newest_reservation(one for one in found if one is not None and one.token == token)
