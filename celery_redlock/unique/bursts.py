"""
The debounce: of a burst of calls of one lock name, the last one runs.

    publisher --LOOK-->  how long the burst may last yet, and the number of its newest call
              message with a countdown and a larger number
              --CALL-->  this one is the newest now
    worker    --CLAIM--> it is the last of its burst --> it runs, and the next call begins a burst
                         a newer one was published   --> superseded, by that one

A call is noted when its message is published, and not before: a publisher that fails or dies in
between supersedes nobody. The number is the publisher's, and the same on all nodes, so that of any
calls one is the newest everywhere. Only a majority can supersede; in doubt a call runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from celery_redlock.errors import QuorumUnavailable
from celery_redlock.events import LockUnavailable, Notify
from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.driver import Driver
from celery_redlock.lock.records import marker_key, ms, record_key
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import Request
from celery_redlock.lock.scripts.scripting import LARGEST
from celery_redlock.lock.scripts.votes import (
    Ballot,
    VoteKind,
    agreeing,
    has_majority,
    prevents_majority,
    votes_by_node,
    votes_of,
)
from celery_redlock.process.log import cut
from celery_redlock.unique.burst_scripts import CALL, CLAIM, LOOK, BurstVote

if TYPE_CHECKING:
    from typing_extensions import Self

    from celery_redlock.lock.redlock import Redlock

__all__ = ["RETENTION", "Burst", "Bursts", "Call", "call_request", "claim_request", "look_request"]

#: How long a node knows the newest call after its burst [s]: older ones may wait as long in queues.
RETENTION = 24 * 3600.0
#: Calls that find the same number in the same moment choose one of so many larger ones.
SPREAD = 4095


@dataclass(frozen=True)
class Call:
    """
    A call of a lock name.

    Attributes:
        id: Of its publish.
        number: A larger one is newer.
    """

    id: str
    number: int


class Burst(NamedTuple):
    """
    The burst that a call finds.

    Attributes:
        left: How long it may last yet [s]; 0.0 if none is open.
        newest: Task id of its newest call; empty if none is open.
        next_number: For one that is newer.
    """

    left: float
    newest: str
    next_number: int


def burst_key(rules: Rules, name: str) -> bytes:
    return record_key(rules.prefix, "debounce", name)


def look_request(rules: Rules, name: str) -> Request:
    return Request(LOOK, (burst_key(rules, name),), ())


def call_request(
    rules: Rules,
    name: str,
    call: Call,
    task_id: str,
    longest: float,
    *,
    begins: bool,
    kept: float = RETENTION,
) -> Request:
    """
    Return what makes *call* the newest one.

    Args:
        rules: Of the cluster.
        name: Lock name.
        call: Whose message is published.
        task_id: Of its task.
        longest: How long a burst may last that begins with it [s].
        begins: Whether it has found none.
        kept: How long a node knows of it [s].
    """
    begun, life = b"1" if begins else b"0", ms(kept)
    told = cut(task_id).encode(errors="replace")  # its message is published: this must not fail
    arguments = call.id.encode(), told, b"%d" % call.number, ms(longest), begun, life
    return Request(CALL, (burst_key(rules, name),), arguments)


def claim_request(rules: Rules, name: str, call: Call, execution: str) -> Request:
    keys = burst_key(rules, name), marker_key(rules.prefix, execution)
    return Request(CLAIM, keys, (call.id.encode(), b"%d" % call.number))


def is_seen(ballot: Ballot) -> bool:
    return has_majority(ballot, VoteKind.GRANTED)


def is_claimed(ballot: Ballot) -> bool:
    is_superseded = has_majority(ballot, BurstVote.SUPERSEDED)
    return is_superseded or prevents_majority(ballot, VoteKind.GRANTED)


class Bursts:
    """The bursts on the nodes of one process. Safe from any thread."""

    def __init__(self, participant: Participant, driver: Driver, notify: Notify) -> None:
        self._participant = participant
        self._driver = driver
        self._notify = notify

    @classmethod
    def on(cls, locks: Redlock) -> Self:
        return cls(locks.participant, locks.driver, locks.notify)

    def look(self, name: str, ends: float | None = None) -> Burst:
        """Return the burst that is open, by *ends* [s, our clock]; raises QuorumUnavailable."""
        started, participant = clock.now(), self._participant
        ballot = self._driver.ask(Ask(look_request(participant.rules, name), is_seen), ends)
        if not is_seen(ballot):
            votes = votes_by_node(ballot, self._driver.labels)
            self._notify(LockUnavailable(name, votes, clock.now() - started))
            raise QuorumUnavailable(name, votes)
        votes_seen = votes_of(ballot, VoteKind.GRANTED)
        newest = max(votes_seen, key=lambda vote: vote.fence)
        number = max(participant.propose(), newest.fence + 1)
        # At most what nodes can tell, whatever one of them has told.
        number = min(LARGEST, number + int(participant.chance(0.0, SPREAD)))
        left = min((vote.ttl for vote in votes_seen if vote.ttl), default=0.0)
        return Burst(left, newest.value.decode("utf-8", "replace"), number)

    def call(
        self,
        name: str,
        call: Call,
        task_id: str,
        longest: float,
        *,
        begins: bool,
        kept: float = RETENTION,
    ) -> None:
        """Have the nodes note *call* as the newest, as of `call_request`; waits for nothing."""
        rules = self._participant.rules
        self._driver.tell(
            call_request(rules, name, call, task_id, longest, begins=begins, kept=kept)
        )

    def superseded_by(self, name: str, call: Call, execution: str) -> str | None:
        """
        Claim *call* when its message is delivered; return who has superseded it.

        That is the task id of a newer call, perhaps an empty one; None for one that is to run.
        """
        request = claim_request(self._participant.rules, name, call, execution)
        ballot = self._driver.ask(Ask(request, is_claimed))
        if not has_majority(ballot, BurstVote.SUPERSEDED):
            return None
        named = [vote for vote in votes_of(ballot, BurstVote.SUPERSEDED) if vote.value]
        newest = agreeing(named, lambda vote: vote.value)
        return newest[0].value.decode("utf-8", "replace") if newest else ""
