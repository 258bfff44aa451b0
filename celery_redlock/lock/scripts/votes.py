"""
Votes of nodes, and the verdict on a set of them: granted, taken or unavailable.

Pure functions, total over every combination of votes. A vote that has not come
in (yet) is None.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import TOKEN_LENGTH, read_holder

__all__ = [
    "Ballot",
    "Verdict",
    "Vote",
    "VoteKind",
    "acquire_is_decided",
    "agreed",
    "agreeing",
    "count",
    "has_majority",
    "holder_named_by",
    "holder_of",
    "is_in_doubt",
    "judge",
    "lapses_in",
    "marker_in",
    "positions_of",
    "prevents_majority",
    "votes_by_node",
    "votes_of",
]

T = TypeVar("T")


class VoteKind(enum.Enum):
    """What a node answered to one request; scripts of other rooms have answers of their own."""

    GRANTED = "granted"
    REPAIRED = "repaired"
    REFUSED = "refused"
    QUARANTINED = "quarantined"
    UNREACHABLE = "unreachable"
    MARKED = "marked"


class Vote(NamedTuple):
    """One node's answer."""

    kind: enum.Enum
    fence: int = 0  # the node's fencing number, 0 for none
    ttl: float = 0.0  # what is left of the other holder's lease, or of the quarantine [s]
    value: bytes = b""  # the other holder's lock value, or the marker's
    node_now: float = 0.0  # the node's wall clock [s, Unix time]; 0.0 if unknown
    reason: str = ""  # why there is no vote, in plain words
    amount: int = 0  # of what the record of a feature counts
    lapses: float = 0.0  # when a place that is held lapses, if nobody renews it [s]; 0.0 if none

    def __repr__(self) -> str:  # without the token: error trackers store the locals of frames
        return f"<Vote {self.in_words()}, fence={self.fence}>"

    def in_words(self) -> str:
        if self.reason:
            return f"{self.kind.value} ({self.reason})"
        if self.kind in (VoteKind.REFUSED, VoteKind.QUARANTINED):
            return f"{self.kind.value} ({self.ttl:.1f} s left)"
        return str(self.kind.value)


#: One entry per configured node, in their order; None for an answer that is still out.
Ballot = Sequence["Vote | None"]


class Verdict(enum.Enum):
    GRANTED = "granted"
    TAKEN = "taken"
    SPLIT = "split"
    MARKED = "marked"
    UNAVAILABLE = "unavailable"


def votes_of(ballot: Ballot, *kinds: enum.Enum) -> list[Vote]:
    return [vote for vote in ballot if vote is not None and vote.kind in kinds]


def count(ballot: Ballot, *kinds: enum.Enum) -> int:
    found = 0
    for vote in ballot:
        found += vote is not None and vote.kind in kinds
    return found


def has_majority(ballot: Ballot, *kinds: enum.Enum) -> bool:
    return count(ballot, *kinds) >= quorum(len(ballot))


def prevents_majority(ballot: Ballot, kind: enum.Enum) -> bool:
    """Return whether so many nodes answered with *kind* that the rest is no majority."""
    return count(ballot, kind) > len(ballot) - quorum(len(ballot))


def agreeing(said: Iterable[T | None], answer: Callable[[T], Hashable | None]) -> list[T]:
    """Return the largest group of *said* with the same *answer*; None is no answer."""
    groups: dict[Hashable, list[T]] = {}
    for one in said:
        if one is not None and (key := answer(one)) is not None:
            groups.setdefault(key, []).append(one)
    return max(groups.values(), key=len, default=[])


def agreed(said: Collection[T | None], answer: Callable[[T], Hashable | None]) -> list[T]:
    """Return what `agreeing` does if that is a majority of all; otherwise nothing."""
    largest = agreeing(said, answer)
    return largest if len(largest) >= quorum(len(said)) else []


def refused_for(vote: Vote) -> bytes | None:
    """Return the token for which a node refused us; None if it did not."""
    return vote.value[:TOKEN_LENGTH] if vote.kind is VoteKind.REFUSED else None


def marker_in(ballot: Ballot) -> bytes | None:
    """
    Return what a majority of nodes says in the marker, None if no majority has it.

    Empty where a majority has it, but no majority says the same: one node's word is nobody's.
    """
    if not has_majority(ballot, VoteKind.MARKED):
        return None
    votes = agreed(ballot, lambda vote: vote.value if vote.kind is VoteKind.MARKED else None)
    return votes[0].value if votes else b""


def is_in_doubt(ballot: Ballot) -> bool:
    """
    Return whether a node has the marker, and neither a majority grants nor one refuses.

    Then the others may have it, too: those that do not answer, or that a release has yet to reach.
    """
    is_granted = has_majority(ballot, VoteKind.GRANTED)
    is_refused = prevents_majority(ballot, VoteKind.REFUSED)
    return count(ballot, VoteKind.MARKED) > 0 and not is_granted and not is_refused


def acquire_is_decided(ballot: Ballot) -> bool:
    """
    Return whether further answers could not change what to do.

    Granted by a quorum; one marker, or one other holder, seen on so many nodes
    that it stands, or has the lock. Refusals by several holders are waited out: it
    takes all answers to distinguish a split vote from a lock that is taken.
    """
    return (
        has_majority(ballot, VoteKind.GRANTED)
        or bool(marker_in(ballot))
        or bool(agreed(ballot, refused_for))
    )


def judge(ballot: Ballot) -> Verdict:
    """
    Return what *ballot* means; answers that never came count for nobody.

    The quorum is over all *configured* nodes, whoever is up. Unavailable is
    never called taken, nor the reverse: taken needs so many refusals that a
    quorum is out of reach whatever the silent nodes would say.
    """
    if has_majority(ballot, VoteKind.GRANTED):
        return Verdict.GRANTED
    if marker_in(ballot) is not None:
        return Verdict.MARKED
    if is_split(ballot) and not agreed(ballot, refused_for):
        return Verdict.SPLIT
    return verdict_when_split(ballot)


def is_split(ballot: Ballot) -> bool:
    """
    Return whether contenders may have kept each other from a quorum.

    So when we were granted some nodes and refused others, or several holders
    refused us, and the nodes that answered would suffice for a quorum.
    """
    granted, refused = count(ballot, VoteKind.GRANTED), count(ballot, VoteKind.REFUSED)
    contended = refused > 0 and (granted > 0 or len(agreeing(ballot, refused_for)) < refused)
    return contended and granted + refused >= quorum(len(ballot))


def verdict_when_split(ballot: Ballot) -> Verdict:
    is_taken = prevents_majority(ballot, VoteKind.REFUSED)
    return Verdict.TAKEN if is_taken else Verdict.UNAVAILABLE


def earliest_free(ballot: Ballot) -> float | None:
    """Return when a quorum could be free if nobody renews [s from now], None if unknown."""
    leases = sorted(v.ttl for v in votes_of(ballot, VoteKind.REFUSED) if v.ttl)
    missing = quorum(len(ballot)) - count(ballot, VoteKind.GRANTED)
    return leases[missing - 1] if 0 < missing <= len(leases) else None


def lapses_in(ballot: Ballot) -> float:
    """Return when a place that is held lapses by what a majority says [s]; 0.0 if none does."""
    said = sorted(vote.lapses for vote in votes_of(ballot, VoteKind.GRANTED))
    majority = quorum(len(ballot))
    return said[majority - 1] if len(said) >= majority else 0.0


def quarantine_left(
    ballot: Ballot, answers: Sequence[enum.Enum] = (VoteKind.GRANTED, VoteKind.REFUSED)
) -> float | None:
    """
    Return when enough quarantines end for a quorum [s from now], None if they are no cause.

    *answers* are the votes of nodes that are not in quarantine.
    """
    waits = sorted(v.ttl for v in votes_of(ballot, VoteKind.QUARANTINED))
    missing = quorum(len(ballot)) - count(ballot, *answers)
    return waits[missing - 1] if 0 < missing <= len(waits) else None


def holder_of(ballot: Ballot) -> dict[str, Any]:
    """Return what is known of the holder that most nodes named, as `LockTaken.holder`."""
    return holder_named_by(agreeing(ballot, lambda vote: refused_for(vote) or None))


def positions_of(ballot: Ballot, *kinds: enum.Enum) -> frozenset[int]:
    return frozenset(i for i, vote in enumerate(ballot) if vote is not None and vote.kind in kinds)


def holder_named_by(votes: Sequence[Vote]) -> dict[str, Any]:
    return {**read_holder(votes[0].value), "ttl": max(v.ttl for v in votes)} if votes else {}


def votes_by_node(ballot: Ballot, labels: Sequence[str]) -> dict[str, str]:
    return {
        label: "not waited for" if vote is None else vote.in_words()
        for label, vote in zip(labels, ballot, strict=True)
    }
