"""Votes of the nodes on slots: the outcome of a claim, and the last slot of a record."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from celery_redlock.beat.slot_scripts import SlotVote
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import TOKEN_LENGTH
from celery_redlock.lock.scripts.scripting import NO_VOTE
from celery_redlock.lock.scripts.votes import (
    Ballot,
    Vote,
    VoteKind,
    agreed,
    agreeing,
    count,
    has_majority,
    holder_named_by,
    prevents_majority,
    votes_of,
)

__all__ = [
    "Claimed",
    "LastSlot",
    "SlotState",
    "claim_is_decided",
    "holder_in",
    "last_of",
    "state_of",
]

#: Later than any slot or date [ms, Unix time]: a larger one was written by others.
LATEST_SLOT = 253_370_764_800_000


class SlotState(enum.Enum):
    #: It is ours: publish.
    CLAIMED = "claimed"
    #: It is ours, but an earlier leader may have published it before it died.
    UNCERTAIN = "uncertain"
    #: It, or a later one, was published before.
    PUBLISHED = "published"
    #: Another scheduler, which may still believe it leads, is about to publish it.
    TAKEN = "taken"
    #: A newer leader has been here.
    DEPOSED = "deposed"
    #: The clock of this machine is too far ahead of the nodes'.
    AHEAD = "ahead"


@dataclass(frozen=True)
class Claimed:
    """*holder* is that of the lock that was asked for, as in `LockTaken.holder`; may be empty."""

    state: SlotState
    holder: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LastSlot:
    """The last slot of an entry that anybody claimed [s, Unix time], and whether it is settled."""

    due: float
    is_settled: bool


#: The votes of nodes that store our claim.
CLAIMED = (VoteKind.GRANTED, SlotVote.UNCERTAIN)


def is_ahead(vote: Vote) -> bool | None:
    """Whether a node said that our clock is too far ahead of its own, None if not."""
    return vote.reason == NO_VOTE[-5] or None


def claim_is_decided(ballot: Ballot) -> bool:
    """
    Return whether further answers could not change what to do.

    One node suffices to know that a slot was published, or that there is a newer leader. Where
    an earlier claim was seen, all are waited for: it may have reached too few to be published.
    """
    if count(ballot, SlotVote.PUBLISHED, SlotVote.DEPOSED):
        return True
    is_ours = has_majority(ballot, VoteKind.GRANTED) and not count(ballot, SlotVote.UNCERTAIN)
    return is_ours and lock_is_decided(ballot)


def lock_is_decided(ballot: Ballot) -> bool:
    most = len(agreeing(ballot, locked_for))
    silent = len(ballot) - count(ballot, *CLAIMED)
    return most >= quorum(len(ballot)) or most + silent < quorum(len(ballot))


def locked_for(vote: Vote) -> bytes | None:
    """Return the token that holds the lock on a node that granted a claim; None for none."""
    return vote.value[:TOKEN_LENGTH] or None if vote.kind in CLAIMED else None


def state_of(ballot: Ballot) -> SlotState | None:
    if count(ballot, SlotVote.DEPOSED):
        return SlotState.DEPOSED
    if count(ballot, SlotVote.PUBLISHED):
        return SlotState.PUBLISHED
    if has_majority(ballot, *CLAIMED):
        silent = len(ballot) - count(ballot, *CLAIMED)
        uncertain = count(ballot, SlotVote.UNCERTAIN)
        is_uncertain = uncertain > 0 and uncertain + silent >= quorum(len(ballot))
        return SlotState.UNCERTAIN if is_uncertain else SlotState.CLAIMED
    if prevents_majority(ballot, VoteKind.REFUSED):
        return SlotState.TAKEN
    return SlotState.AHEAD if agreed(ballot, is_ahead) else None


def holder_in(ballot: Ballot) -> dict[str, Any]:
    """Return the holder of the lock that at least half of the nodes that granted name."""
    named = agreeing(ballot, locked_for)
    return holder_named_by(named) if 2 * len(named) >= count(ballot, *CLAIMED) else {}


def last_of(ballot: Ballot) -> LastSlot | None:
    votes = [v for v in votes_of(ballot, VoteKind.GRANTED) if 0 < v.fence < LATEST_SLOT]
    due = max((v.fence for v in votes), default=0)
    settled = any(v.fence == due and v.value == b"settled" for v in votes)
    return LastSlot(due / 1000.0, settled) if due else None
