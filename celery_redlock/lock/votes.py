"""
Votes of nodes, and what a set of them means: granted, taken or unavailable.

Pure functions, total over every combination of votes. A vote that has not come
in (yet) is None.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from celery_redlock.lock.foreign import object_in
from celery_redlock.lock.lease import quorum

__all__ = [
    "Ballot",
    "Verdict",
    "Vote",
    "VoteKind",
    "acquire_is_decided",
    "holder_of",
    "is_in_doubt",
    "is_ours",
    "judge",
    "marker_in",
    "told",
]

TOKEN_LENGTH = 40
#: How much of a token tells whose it is, where several attempts have one owner.
OWNER_LENGTH = 32
PUBLIC_TOKEN_LENGTH = 8
#: How the value of a lock of ours begins.
TOKEN = re.compile(rb"[0-9a-f]{%d}" % TOKEN_LENGTH)


class VoteKind(enum.Enum):
    """What a node answered to one request; scripts of other rooms have answers of their own."""

    GRANTED = "granted"
    REPAIRED = "repaired"
    REFUSED = "refused"
    QUARANTINED = "quarantined"
    UNREACHABLE = "unreachable"
    MARKED = "marked"


class Vote(NamedTuple):
    """
    One node's answer.

    Attributes:
        kind: Which answer.
        fence: The node's fencing number, 0 when there is none.
        ttl: What is left of the other holder's lease, or of the quarantine [s].
        value: The other holder's lock value, or the marker's.
        node_now: The node's wall clock [s, Unix time]; 0.0 when it did not tell.
        reason: Why there is no vote, in plain words.
        merged: How many triggers were merged into a queued task.
    """

    kind: enum.Enum
    fence: int = 0
    ttl: float = 0.0
    value: bytes = b""
    node_now: float = 0.0
    reason: str = ""
    merged: int = 0

    def in_words(self) -> str:
        """Return the vote in plain words, without the token."""
        if self.reason:
            return f"{self.kind.value} ({self.reason})"
        if self.kind in (VoteKind.REFUSED, VoteKind.QUARANTINED):
            return f"{self.kind.value} ({self.ttl:.1f} s left)"
        return str(self.kind.value)


#: One entry per configured node, in their order; None for an answer that is still out.
Ballot = Sequence["Vote | None"]


class Verdict(enum.Enum):
    """What a ballot means for the one who asked."""

    GRANTED = "granted"
    TAKEN = "taken"
    SPLIT = "split"
    MARKED = "marked"
    UNAVAILABLE = "unavailable"


def count(ballot: Ballot, kind: enum.Enum) -> int:
    """Return how many votes of *kind* there are."""
    return len([1 for vote in ballot if vote is not None and vote.kind is kind])


def largest_holder(ballot: Ballot) -> int:
    """Return on how many nodes the holder seen most often was seen."""
    seen: dict[bytes, int] = {}
    for vote in ballot:
        if vote is not None and vote.kind is VoteKind.REFUSED:
            token = vote.value[:TOKEN_LENGTH]
            seen[token] = seen.get(token, 0) + 1
    return max(seen.values(), default=0)


def marker_in(ballot: Ballot) -> bytes | None:
    """
    Return what a majority of nodes says in the marker, None if no majority has it.

    Empty where a majority has it, but no majority says the same: one node's word is nobody's.
    """
    majority = quorum(len(ballot))
    told = [v.value for v in ballot if v is not None and v.kind is VoteKind.MARKED]
    if len(told) < majority:
        return None
    most = max(told, key=told.count)
    return most if told.count(most) >= majority else b""


def is_in_doubt(ballot: Ballot) -> bool:
    """
    Return whether a node has the marker, and neither a majority grants nor one refuses.

    Then the others may have it, too: those that do not answer, or that a release has yet to reach.
    """
    majority = quorum(len(ballot))
    is_granted = count(ballot, VoteKind.GRANTED) >= majority
    is_refused = count(ballot, VoteKind.REFUSED) > len(ballot) - majority
    return count(ballot, VoteKind.MARKED) > 0 and not is_granted and not is_refused


def acquire_is_decided(ballot: Ballot) -> bool:
    """
    Return whether further answers could not change what to do.

    Granted by a quorum; one marker, or one other holder, seen on so many nodes
    that it stands, or has the lock. Refusals by several holders are waited out: it
    takes all answers to tell a split vote from a lock that is taken.
    """
    majority = quorum(len(ballot))
    return (
        count(ballot, VoteKind.GRANTED) >= majority
        or bool(marker_in(ballot))
        or largest_holder(ballot) >= majority
    )


def judge(ballot: Ballot) -> Verdict:
    """
    Return what *ballot* means; answers that never came count for nobody.

    The quorum is over all *configured* nodes, whoever is up. Unavailable is
    never called taken, nor the reverse: taken needs so many refusals that a
    quorum is out of reach whatever the silent nodes would say.
    """
    majority = quorum(len(ballot))
    if marker_in(ballot) is not None:
        return Verdict.MARKED
    if count(ballot, VoteKind.GRANTED) >= majority:
        return Verdict.GRANTED
    refused = count(ballot, VoteKind.REFUSED)
    if largest_holder(ballot) < majority and is_split(ballot, refused):
        return Verdict.SPLIT
    return Verdict.TAKEN if refused > len(ballot) - majority else Verdict.UNAVAILABLE


def is_split(ballot: Ballot, refused: int) -> bool:
    """
    Return whether contenders may have kept each other from a quorum.

    So when we were granted some nodes and refused others, or several holders
    refused us, and the nodes that answered would suffice for a quorum.
    """
    granted = count(ballot, VoteKind.GRANTED)
    contended = refused > 0 and (granted > 0 or largest_holder(ballot) < refused)
    return contended and granted + refused >= quorum(len(ballot))


def verdict_when_split(ballot: Ballot) -> Verdict:
    """Return what a vote that stays split is called in the end."""
    refused = count(ballot, VoteKind.REFUSED)
    return Verdict.TAKEN if refused > len(ballot) - quorum(len(ballot)) else Verdict.UNAVAILABLE


def earliest_free(ballot: Ballot) -> float | None:
    """
    Return when a quorum could be free if nobody renews [s from now], None if unknown.

    The k-th smallest of the leases that refused us, k being how many more nodes we need.
    """
    leases = sorted(v.ttl for v in ballot if v is not None and v.kind is VoteKind.REFUSED and v.ttl)
    missing = quorum(len(ballot)) - count(ballot, VoteKind.GRANTED)
    return leases[missing - 1] if 0 < missing <= len(leases) else None


def quarantine_left(
    ballot: Ballot, answers: Sequence[enum.Enum] = (VoteKind.GRANTED, VoteKind.REFUSED)
) -> float | None:
    """
    Return when enough quarantines end for a quorum [s from now], None if they are no cause.

    Args:
        ballot: What the nodes answered.
        answers: The votes of nodes that are not in quarantine.
    """
    waits = sorted(v.ttl for v in ballot if v is not None and v.kind is VoteKind.QUARANTINED)
    missing = quorum(len(ballot)) - sum(count(ballot, kind) for kind in answers)
    return waits[missing - 1] if 0 < missing <= len(waits) else None


def holder_of(ballot: Ballot) -> dict[str, Any]:
    """
    Return what is known of the holder that most nodes named; empty if none did.

    Returns:
        Plain JSON values: ``token`` (its public part), ``ttl`` [s], and whatever
        the holder told of itself (``task_id``, ``execution``, ``host``, ``pid``, ``since`` ...).
    """
    refusals = [v for v in ballot if v is not None and v.kind is VoteKind.REFUSED and v.value]
    if not refusals:
        return {}
    tokens = [v.value[:TOKEN_LENGTH] for v in refusals]
    token = max(tokens, key=tokens.count)
    votes = [v for v in refusals if v.value.startswith(token)]
    return {**read_holder(votes[0].value), "ttl": max(v.ttl for v in votes)}


def read_holder(value: bytes) -> dict[str, Any]:
    """Return what a lock's value tells of its holder; the token only by its public part."""
    # Of somebody else's nothing is told: the key is taken all the same.
    public = value[:PUBLIC_TOKEN_LENGTH].decode("ascii", "replace")
    return {**object_in(value[TOKEN_LENGTH:]), "token": public}


def is_ours(value: bytes) -> bool:
    """Return whether *value* begins with a token, so that celery-redlock may have written it."""
    return TOKEN.match(value) is not None


def told(ballot: Ballot, labels: Sequence[str]) -> dict[str, str]:
    """Return every node's answer in plain words, by node label."""
    return {
        label: "not waited for" if vote is None else vote.in_words()
        for label, vote in zip(labels, ballot, strict=True)
    }
