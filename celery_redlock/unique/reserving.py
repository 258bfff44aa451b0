"""
The reservation: keep a second message of a task out of the queue. Sans I/O.

    trigger --RESERVE--> nobody stands for the name     --> Reserved: publish, the token goes along
                         somebody does                  --> Duplicate: publish nothing
                         somebody does, merging:
                           and has not started yet      --> Duplicate, newest arguments handed over
                           and runs, nobody is next     --> Reserved as the next one
                           and runs, somebody is next   --> Duplicate, newest arguments handed over
                           but that one may expire      --> Duplicate, nothing handed over
    worker  --START-->   the reservation lives on as long as the task's lock, or by itself
            --END-->     it is removed, by the token that the message carries

A reservation protects nobody: that is what the lock is for. It is written to a quorum like a
lock, but may live longer than ``max_ttl``; a majority of nodes that loses its memory forgets
it, which costs a second message, never an overlap.

Arguments that are merged have versions, made like fencing numbers: a trigger counts as
accepted when a majority stores one and the same version for it, so whoever reads a majority
afterwards finds it, and nothing older wins.

Source:
    DESIGN section 5.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_redlock.errors import QuorumUnavailable
from celery_redlock.lock.algorithm.effects import Ask, Send, Sleep
from celery_redlock.lock.algorithm.participant import Participant, fresh_token, new_owner
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import TOKEN_LENGTH, holder_payload
from celery_redlock.lock.scripts.votes import (
    Ballot,
    Vote,
    VoteKind,
    agreed,
    count,
    has_majority,
    holder_named_by,
    holder_of,
    positions_of,
    quarantine_left,
    votes_by_node,
    votes_of,
)
from celery_redlock.unique.requests import Trigger, end_request, reserve_request
from celery_redlock.unique.scripts import ReservationVote

__all__ = ["Duplicate", "NotStarted", "Reserved", "Started", "is_decided", "reserve", "turn_in"]

#: How often triggers that split the vote try again.
SPLIT_TRIES = 8
#: How often a version is proposed anew before the attempt is given up.
VERSION_TRIES = 3
#: The votes of nodes that store our reservation.
OURS = (VoteKind.GRANTED, ReservationVote.NEXT)
#: The votes of nodes that are not in quarantine.
ANSWERS = (*OURS, VoteKind.REFUSED, ReservationVote.MERGED)


@dataclass(frozen=True)
class Reserved:
    """The reservation is ours: publish."""

    token: str = field(repr=False)  # proof of that; the message has to carry it
    #: Whose end the task waits for, as in `LockTaken.holder`; empty for none.
    before: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Duplicate:
    """Another message has reserved the name: publish nothing."""

    holder: dict[str, Any]  # as in `LockTaken.holder`
    merged: int = 0  # how many triggers have been handed over to it, this one included
    votes: dict[str, str] = field(default_factory=dict)  # by node label


@dataclass(frozen=True)
class Started:
    """The task may run in its reservation's name."""

    arguments: bytes = b""  # of the newest trigger that was merged into it, as JSON
    merged: int = 0  # how many were


@dataclass(frozen=True)
class NotStarted:
    """It is not the task's turn yet, or no quorum could say."""

    holder: dict[str, Any]  # who comes first, as in `LockTaken.holder`; empty without a quorum
    votes: dict[str, str]  # by node label


# --- what the votes mean -----------------------------------------------------------------

#: Kind of an answer, and the token that it names.
Answer = tuple[enum.Enum, bytes]


def answer_of(vote: Vote) -> Answer | None:
    if vote.kind in OURS:
        return vote.kind, b""
    return (vote.kind, vote.value[:TOKEN_LENGTH]) if vote.kind in ANSWERS else None


def is_decided(ballot: Ballot) -> bool:
    return bool(agreed(ballot, answer_of))


def has_met_others(ballot: Ballot) -> bool:
    """Return whether a majority answered, but differently: others are reserving, or were."""
    return has_majority(ballot, *ANSWERS)


def without_ours(ballot: Ballot) -> frozenset[int]:
    """Return the positions of nodes that certainly stored no reservation of ours."""
    return positions_of(ballot, VoteKind.REFUSED, ReservationVote.MERGED, VoteKind.QUARANTINED)


Steps = Generator["Ask | Send | Sleep", Any, "Reserved | Duplicate"]


def reserve(participant: Participant, trigger: Trigger, ends: float | None = None) -> Steps:
    """Take the reservation, or find out who has it, by *ends* [s, our clock]."""
    owner = new_owner()
    known = trigger._replace(info=holder_payload(trigger.info, participant.wall()))
    version = 0
    for tries in range(SPLIT_TRIES):
        token = fresh_token(participant, owner)
        try:
            version = max(participant.propose(), version + 1)
            clean = frozenset(range(len(participant.labels)))
            for _ in range(1 + VERSION_TRIES):
                ballot = yield Ask(
                    reserve_request(participant.rules, known, token, version), is_decided
                )
                votes, clean = agreed(ballot, answer_of), clean & without_ours(ballot)
                if holds(votes, version, ballot):
                    break
                version = max(vote.fence for vote in votes) + 1
            else:
                votes = []
            is_placed = votes and votes[0].kind in OURS
            if not is_placed and len(clean) < len(ballot):
                # A node that stored it all the same had forgotten the others' reservation: rare.
                yield Send(end_request(participant.rules, trigger.name, token), clean)
        except GeneratorExit:  # dropped by its driver: nobody could send it
            raise
        except BaseException:
            yield Send(end_request(participant.rules, trigger.name, token))
            raise
        if votes:
            return outcome(votes, token, ballot, participant.labels)
        pause = participant.chance(0.0, min(0.06, 0.002 * 2**tries))
        is_too_late = ends is not None and participant.now() + pause >= ends
        if is_too_late or not has_met_others(ballot):
            break
        yield Sleep(pause)
    why = votes_by_node(ballot, participant.labels)
    raise QuorumUnavailable(trigger.name, why, quarantine_left(ballot, ANSWERS))


def holds(votes: list[Vote], version: int, ballot: Ballot) -> bool:
    """Return whether the answer in *votes* is final: for a merge, a majority stores *version*."""
    if not votes or votes[0].kind is not ReservationVote.MERGED:
        return True
    return sum(1 for vote in votes if vote.fence == version) >= quorum(len(ballot))


def outcome(
    votes: list[Vote], token: str, ballot: Ballot, labels: Sequence[str]
) -> Reserved | Duplicate:
    first = votes[0]
    if first.kind is VoteKind.GRANTED:
        return Reserved(token)
    holder = holder_named_by(votes)
    if first.kind is ReservationVote.NEXT:
        return Reserved(token, holder)
    return Duplicate(holder, max(vote.amount for vote in votes), votes_by_node(ballot, labels))


def turn_in(ballot: Ballot, labels: Sequence[str]) -> Started | NotStarted:
    granted = votes_of(ballot, VoteKind.GRANTED)
    refused, majority = count(ballot, VoteKind.REFUSED), quorum(len(ballot))
    of_no_other = len(granted) + count(ballot, ReservationVote.PASSED)
    if of_no_other + refused < majority:
        return NotStarted({}, votes_by_node(ballot, labels))
    if refused >= majority or (refused and of_no_other < majority):
        return NotStarted(holder_of(ballot), votes_by_node(ballot, labels))
    merged = max((vote.amount for vote in granted), default=0)
    if any(vote.amount and not vote.value for vote in granted):
        return Started(merged=merged)  # who knows what was merged knows an execution before it
    newest = max(granted, key=lambda vote: vote.fence, default=Vote(VoteKind.GRANTED))
    return Started(newest.value, merged)
