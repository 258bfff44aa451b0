"""
The queued marker: keep a second message of a task out of the queue. Sans I/O, and its driver.

    trigger --RESERVE--> nobody stands for the name     --> Reserved: publish, the token goes along
                         somebody does                  --> Duplicate: publish nothing
                         somebody does, merging:
                           and has not started yet      --> Duplicate, newest arguments handed over
                           and runs, nobody is next     --> Reserved as the next one
                           and runs, somebody is next   --> Duplicate, newest arguments handed over
                           but that one may expire      --> Duplicate, nothing handed over
    worker  --START-->   the marker lives on as long as the task's lock, or by itself
            --END-->     it is taken away, by the token that the message carries

A marker protects nobody: that is what the lock is for. It is written to a quorum like a
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
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from celery_redlock.errors import QuorumUnavailable
from celery_redlock.events import LockUnavailable, Notify
from celery_redlock.lock import clock
from celery_redlock.lock.driver import Driver
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.requests import HOST, Request, encode_info, quarantine_ms
from celery_redlock.lock.rounds import Ask, Client, Pause, Tell, fresh_token, new_owner
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts import Keys, ms, record_key
from celery_redlock.lock.votes import (
    TOKEN_LENGTH,
    Ballot,
    Vote,
    VoteKind,
    count,
    quarantine_left,
    read_holder,
    told,
)
from celery_redlock.unique.scripts import END, RESERVE, START, ReservationVote

if TYPE_CHECKING:
    from typing_extensions import Self

    from celery_redlock.lock.redlock import Redlock

__all__ = [
    "AS_IT_IS",
    "OVER",
    "Duplicate",
    "NotStarted",
    "Reservations",
    "Reserved",
    "Start",
    "Started",
    "Trigger",
]

#: How often triggers that met half-way try again.
SPLIT_TRIES = 8
#: How often a version is proposed anew before what a majority stores has to do.
VERSION_TRIES = 3
#: How long a node keeps the marker of a task that runs; it counts only while its lock is held.
RETENTION = 7 * 24 * 3600.0
#: The votes of nodes that are not in quarantine.
ANSWERS = (VoteKind.GRANTED, VoteKind.REFUSED, ReservationVote.NEXT, ReservationVote.MERGED)
#: For a marker that is not to change when its task starts, and for one that then ends.
AS_IT_IS, OVER = "as it is", "over"


@dataclass(frozen=True)
class Trigger:
    """
    Somebody wants a task to run.

    Attributes:
        name: Lock name.
        life: How long the marker is to stand by itself [s].
        info: What the owner tells of itself; plain JSON values, among them ``task_id``.
        window: How long it is to stand after a failure, counted from the publish [s].
        expires: Whether its message may end unrun, so that nobody else can rely on it.
        arguments: Of the call, as JSON, where a duplicate is to hand them over to the task that
            is queued; empty where it is not.
    """

    name: str
    life: float
    info: dict[str, Any]
    window: float = 0.0
    expires: bool = False
    arguments: bytes = b""


@dataclass(frozen=True)
class Reserved:
    """
    The marker is ours: publish.

    Attributes:
        token: Proof of that; the message has to carry it.
        before: Whose end the task has to wait for, as in `LockTaken.holder`; empty if nobody's.
    """

    token: str
    before: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Duplicate:
    """
    Somebody else stands for the name: publish nothing.

    Attributes:
        holder: Who, as in `LockTaken.holder`.
        merged: How many triggers have been handed over to it, this one included; 0 for none.
        votes: What each node answered, by node label.
    """

    holder: dict[str, Any]
    merged: int = 0
    votes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """
    A task runs under its lock now.

    Attributes:
        info: What it tells of itself, for a marker that has lapsed while nobody else stands for
            the name.
        lock_token: Of the lock.
        execution: Which execution of the task it is; merged arguments are for the first.
        alone: For how long the marker is to stand by itself from now on [s], 0.0 for as long as
            the lock is held; `AS_IT_IS`; or `OVER`.
        life: How long a marker of this task stands by itself from its publish [s].
    """

    info: dict[str, Any]
    lock_token: str
    execution: str
    alone: float | str
    life: float


@dataclass(frozen=True)
class Started:
    """
    The task may run in its marker's name.

    Attributes:
        arguments: Of the newest trigger that was merged into it, as JSON; empty for none.
        merged: How many were.
    """

    arguments: bytes = b""
    merged: int = 0


@dataclass(frozen=True)
class NotStarted:
    """
    It is not the task's turn yet, or no quorum told whose it is.

    Attributes:
        holder: Who stands before it, as in `LockTaken.holder`; empty if no quorum told.
        votes: What each node answered, by node label.
    """

    holder: dict[str, Any]
    votes: dict[str, str]


# --- what is put to a node -------------------------------------------------------------


def reservation_keys(rules: Rules, name: str) -> tuple[bytes, bytes]:
    """Return the keys of the markers of *name*: who is queued or runs, and who is next."""
    return record_key(rules.prefix, "queued", name), record_key(rules.prefix, "next", name)


def end_all(rules: Rules, name: str, token: str) -> Request:
    """Return what takes back whatever an attempt with *token* may have left behind."""
    return end_request(rules, name, token, OVER, 0.0)


def reserve_request(rules: Rules, trigger: Trigger, token: str, version: int) -> Request:
    """Return what takes the marker for *token*, or merges *trigger* into who has it."""
    keys = Keys.of(rules.prefix, trigger.name)
    return Request(
        RESERVE,
        (*reservation_keys(rules, trigger.name), keys.lock, keys.boot, keys.quarantine),
        (
            token.encode(),
            encode_info(trigger.info),
            ms(trigger.life),
            ms(trigger.window),
            b"-" if trigger.expires else b"",
            trigger.arguments,
            b"%d" % version,
            ms(RETENTION),
            quarantine_ms(rules),
        ),
    )


def start_request(rules: Rules, name: str, token: str, begun: Start) -> Request:
    """Return what notes that the task of *token* runs."""
    alone = begun.alone if isinstance(begun.alone, str) else f"{begun.alone * 1000:.0f}"
    return Request(
        START,
        (*reservation_keys(rules, name), Keys.of(rules.prefix, name).lock),
        (
            token.encode(),
            encode_info(begun.info),
            begun.lock_token.encode(),
            begun.execution.encode(),
            alone.encode(),
            ms(begun.life),
            ms(max(RETENTION, begun.life)),
        ),
    )


def end_request(rules: Rules, name: str, token: str, how: str, life: float) -> Request:
    """Return what ends the marker of *token*; *how* and *life* as of `Reservations.end`."""
    keys = (*reservation_keys(rules, name), Keys.of(rules.prefix, name).lock)
    return Request(END, keys, (token.encode(), how.encode(), ms(life)))


# --- the algorithm -----------------------------------------------------------------------

#: What a node's answer says, and whom it names.
Answer = tuple[enum.Enum, bytes]


def answer_of(vote: Vote) -> Answer | None:
    """Return what *vote* says, None if it says nothing."""
    if vote.kind in (VoteKind.GRANTED, ReservationVote.NEXT):
        return vote.kind, b""
    if vote.kind in (ReservationVote.MERGED, VoteKind.REFUSED):
        return vote.kind, vote.value[:TOKEN_LENGTH]
    return None


def verdict(ballot: Ballot) -> list[Vote]:
    """Return the votes of a majority that say the same; none if there is no such majority."""
    votes: dict[Answer, list[Vote]] = {}
    for vote in ballot:
        answer = None if vote is None else answer_of(vote)
        if vote is not None and answer is not None:
            votes.setdefault(answer, []).append(vote)
    largest = max(votes.values(), key=len, default=[])
    return largest if len(largest) >= quorum(len(ballot)) else []


def is_decided(ballot: Ballot) -> bool:
    """Return whether further answers could not change what to do."""
    return bool(verdict(ballot))


def has_met_others(ballot: Ballot) -> bool:
    """Return whether a majority answered, but not the same: others are at it, or were."""
    answers = sum(1 for vote in ballot if vote is not None and answer_of(vote))
    return answers >= quorum(len(ballot))


def without_ours(ballot: Ballot) -> frozenset[int]:
    """Return the positions of nodes that certainly stored no marker of ours."""
    certain = (VoteKind.REFUSED, ReservationVote.MERGED, VoteKind.QUARANTINED)
    return frozenset(i for i, v in enumerate(ballot) if v is not None and v.kind in certain)


Steps = Generator["Ask | Tell | Pause", Any, "Reserved | Duplicate"]


def reserve(client: Client, trigger: Trigger) -> Steps:
    """
    Take the marker, or find out who has it.

    Raises:
        QuorumUnavailable: No quorum could decide.
    """
    owner = new_owner()
    host = {"host": HOST, "pid": os.getpid(), "since": round(client.wall(), 3)}
    known = replace(trigger, info={**trigger.info, **host})
    version = 0
    for tries in range(SPLIT_TRIES):
        token = fresh_token(client, owner)
        try:
            version = max(client.propose(), version + 1)
            ballot = yield Ask(reserve_request(client.rules, known, token, version), is_decided)
            votes, clean = verdict(ballot), without_ours(ballot)
            for _ in range(VERSION_TRIES):
                if holds(votes, version, ballot):
                    break
                version = max(vote.fence for vote in votes) + 1
                larger = reserve_request(client.rules, known, token, version)
                ballot = yield Ask(larger, is_decided)
                votes, clean = verdict(ballot), clean & without_ours(ballot)
            if not holds(votes, version, ballot):
                votes = []
            is_placed = votes and votes[0].kind in (VoteKind.GRANTED, ReservationVote.NEXT)
            if not is_placed and len(clean) < len(ballot):
                # A node that stored it all the same had forgotten the others' marker: rare.
                yield Tell(end_all(client.rules, trigger.name, token), clean)
        except GeneratorExit:  # dropped by its driver: nobody is there to tell the nodes
            raise
        except BaseException:
            yield Tell(end_all(client.rules, trigger.name, token))
            raise
        if votes:
            return outcome(votes, token, ballot, client.labels)
        if not has_met_others(ballot):
            break
        yield Pause(client.chance(0.0, min(0.06, 0.002 * 2**tries)))
    why = told(ballot, client.labels)
    raise QuorumUnavailable(trigger.name, why, quarantine_left(ballot, ANSWERS))


def holds(votes: list[Vote], version: int, ballot: Ballot) -> bool:
    """Return whether what *votes* say is so: for a merge, a majority stores *version*."""
    if not votes or votes[0].kind is not ReservationVote.MERGED:
        return True
    return sum(1 for vote in votes if vote.fence == version) >= quorum(len(ballot))


def outcome(
    votes: list[Vote], token: str, ballot: Ballot, labels: Sequence[str]
) -> Reserved | Duplicate:
    """Return what the votes of a majority of *ballot* mean."""
    first = votes[0]
    if first.kind is VoteKind.GRANTED:
        return Reserved(token)
    holder = {**read_holder(first.value), "ttl": max(vote.ttl for vote in votes)}
    if first.kind is ReservationVote.NEXT:
        return Reserved(token, holder)
    return Duplicate(holder, max(vote.merged for vote in votes), told(ballot, labels))


# --- its driver --------------------------------------------------------------------------


class Reservations:
    """
    The queued markers on the nodes of one process. Safe from any thread.

    Args:
        client: What this client of the cluster knows.
        driver: Does the I/O.
        notify: Is told when no quorum could decide.
    """

    def __init__(self, client: Client, driver: Driver, notify: Notify) -> None:
        self._client = client
        self._driver = driver
        self._notify = notify

    @classmethod
    def on(cls, locks: Redlock) -> Self:
        """Return the markers on the nodes of *locks*."""
        return cls(locks.client, locks.driver, locks.notify)

    def reserve(self, trigger: Trigger) -> Reserved | Duplicate:
        """
        Take the marker, or find out who has it; one round.

        Raises:
            QuorumUnavailable: No quorum could decide.
        """
        started = clock.now()
        try:
            return self._driver.drive(reserve(self._client, trigger))
        except QuorumUnavailable as error:
            self._notify(LockUnavailable(trigger.name, error.votes, clock.now() - started))
            raise

    def start(self, name: str, token: str, begun: Start, *, wait: bool) -> Started | NotStarted:
        """
        Note that the task of the marker runs under its lock now.

        Args:
            name: Lock name.
            token: Of the marker.
            begun: What there is to note.
            wait: Whether to wait for all answers.

        Returns:
            What was merged into the task; or why it may not start.
        """
        request = start_request(self._client.rules, name, token, begun)
        if not wait:
            self._driver.tell(request)
            return Started()
        # All of them: after a restart one node of the majority that knows may know nothing.
        ballot = self._driver.ask(Ask(request, lambda _: False))
        majority = quorum(len(ballot))
        granted = [v for v in ballot if v is not None and v.kind is VoteKind.GRANTED]
        refused = [v for v in ballot if v is not None and v.kind is VoteKind.REFUSED]
        passed = count(ballot, ReservationVote.PASSED)
        if len(granted) + len(refused) + passed < majority:
            return NotStarted({}, told(ballot, self._driver.labels))
        if len(refused) >= majority or (refused and len(granted) + passed < majority):
            holder = {**read_holder(refused[0].value), "ttl": max(vote.ttl for vote in refused)}
            return NotStarted(holder, told(ballot, self._driver.labels))
        merged = max((vote.merged for vote in granted), default=0)
        if any(vote.merged and not vote.value for vote in granted):
            return Started(merged=merged)  # who knows what was merged knows an execution before it
        newest = max(granted, key=lambda vote: vote.fence, default=Vote(VoteKind.GRANTED))
        return Started(newest.value, merged)

    def end(
        self, name: str, token: str, how: str, *, life: float = 0.0, wait: bool = False
    ) -> None:
        """
        End the marker of *token*; another's stays what it is.

        Args:
            name: Lock name.
            token: Of the marker.
            how: ``"over"``; ``"idle"`` for that unless its task runs, ``"unstarted"`` unless it
                has ever run; ``"wait"`` if its task is queued again, for *life* at most; ``"hand"``
                while a worker has it in hand and could lose it, for *life*; ``"window"`` if it
                failed and is to stand for its window; ``"ran"`` if it is to stand as it does, but
                no trigger can be merged into it any more.
            life: How long it is to stand by itself from now on [s].
            wait: Whether to wait for the answers of a majority, and for connections before.
        """
        request = end_request(self._client.rules, name, token, how, life)
        if not wait:
            self._driver.tell(request)
            return
        majority = quorum(len(self._driver.labels))

        def has_told(ballot: Ballot) -> bool:
            return count(ballot, VoteKind.GRANTED) + count(ballot, VoteKind.REFUSED) >= majority

        self._driver.ask(Ask(request, has_told))
