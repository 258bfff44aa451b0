"""Results of release and inspect."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery_redlock.lock.records import read_holder, since_of
from celery_redlock.lock.scripts.votes import Ballot, VoteKind, has_majority, prevents_majority

__all__ = ["NodeView", "ReleaseOutcome", "release_is_decided", "release_outcome", "views"]


class ReleaseOutcome(str, enum.Enum):
    """The outcome of a release."""

    #: A quorum deleted our key.
    RELEASED = "RELEASED"
    #: The lease had ended before: a quorum was out of reach because our key was gone.
    EXPIRED = "EXPIRED"
    #: Too few nodes answered; the lease expires within its TTL.
    UNKNOWN = "UNKNOWN"


def release_is_decided(ballot: Ballot) -> bool:
    return release_outcome(ballot) is not ReleaseOutcome.UNKNOWN


def release_outcome(ballot: Ballot) -> ReleaseOutcome:
    if has_majority(ballot, VoteKind.GRANTED):
        return ReleaseOutcome.RELEASED
    is_gone = prevents_majority(ballot, VoteKind.REFUSED)
    return ReleaseOutcome.EXPIRED if is_gone else ReleaseOutcome.UNKNOWN


@dataclass(frozen=True)
class NodeView:
    """
    What one node knows of one lock.

    Attributes:
        node: Label of the node.
        holder: As in `LockTaken.holder`; empty if nobody holds it there.
        ttl: What is left of the holder's lease [s]; 0.0 if there is none.
        fence: Largest fencing number given out there, 0 for none.
        problem: Why the node did not answer, in plain words; empty if it did.
    """

    node: str
    holder: dict[str, Any]
    ttl: float
    fence: int
    problem: str

    @property
    def since(self) -> float | None:
        """When the holder acquired the lock [s, Unix time]; None if nobody holds it there."""
        return since_of(self.holder)


def views(ballot: Ballot, labels: Sequence[str]) -> list[NodeView]:
    return [
        NodeView(
            node=label,
            holder=read_holder(vote.value) if vote.value else {},
            ttl=vote.ttl,
            fence=vote.fence,
            problem=vote.reason,
        )
        for label, vote in zip(labels, ballot, strict=True)
        if vote is not None
    ]
