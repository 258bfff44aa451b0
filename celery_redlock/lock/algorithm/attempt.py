r"""
One attempt to acquire a lock, on one of its places.

    ask(ACQUIRE) --granted by a quorum, one fence--> Lease
        |   \--granted, fences differ--> ask(RENEW) to agree on one --> Lease
        '--refused, split, too late--> tell(RELEASE)

A fence is final when a majority stores it while holding our token (PROTOCOL 3.1).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from celery_redlock.lock.algorithm.effects import Ask, Send
from celery_redlock.lock.algorithm.participant import Participant, fresh_token
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.lease import Lease, fence_proposal, quorum, valid_until
from celery_redlock.lock.records import place_name
from celery_redlock.lock.scripts.requests import (
    Request,
    acquire_request,
    release_request,
    renew_request,
)
from celery_redlock.lock.scripts.scripting import NO_VOTE
from celery_redlock.lock.scripts.votes import (
    Ballot,
    Verdict,
    Vote,
    VoteKind,
    acquire_is_decided,
    judge,
    positions_of,
    votes_of,
)

__all__ = ["CONFIRM_ROUNDS", "Attempt"]

#: Of a node whose fence counts for nothing.
STRAY = Vote(VoteKind.UNREACHABLE, reason=NO_VOTE[-7])
#: How many confirming rounds a fence may take before the attempt is given up.
CONFIRM_ROUNDS = 3


class Attempt:
    """One attempt: one token, one start on our clock."""

    def __init__(self, participant: Participant, request: LockRequest, place: int) -> None:
        self.participant = participant
        self.request = request.for_grant_in(participant.grant_takes)
        self.token = fresh_token(participant, request.owner)
        self.place = place
        self.name = place_name(request.name, place)
        self.started = participant.now()
        self.since = participant.wall()

    def make(self) -> Generator[Ask | Send, Any, Lease | tuple[Verdict, Ballot]]:
        """Ask the nodes; return the lease, or why there is none, and then leave nothing behind."""
        acquire = self.acquire()
        skew = self.participant.rules.longest_skew
        ballot = yield Ask(acquire, lambda votes: acquire_is_decided(without_strays(votes, skew)))
        ballot = without_strays(ballot, skew)
        verdict = judge(ballot)
        self.participant.learn(ballot)
        if verdict is Verdict.GRANTED:
            lease = yield from self.settle(ballot)
            if lease is not None:
                return lease
            # What has to be granted soon is asked for anew, with the time that this one took.
            is_soon = self.request.within is not None
            verdict = Verdict.SPLIT if is_soon else Verdict.UNAVAILABLE
        yield Send(self.release(), refusing(ballot))
        return verdict, ballot

    def acquire(self) -> Request:
        self.asked = self.lease(self.participant.propose() if self.request.fence else 0)
        return acquire_request(self.participant.rules, self.asked, self.request.marker)

    def release(self) -> Request:
        return release_request(self.participant.rules, self.name, self.token, wakes=False)

    def lease(self, fence: int | None) -> Lease:
        request = self.request
        until = valid_until(self.started, request.ttl, self.participant.rules.drift_factor)
        if request.within is not None:
            until = self.started + request.within
        info = dict(request.info)  # our copy: the caller may change its own
        return Lease(
            self.name, self.token, fence, request.ttl, until, self.since, info, place=self.place
        )

    def settle(self, ballot: Ballot) -> Generator[Ask, Ballot, Lease | None]:
        """
        Return the lease once a majority stores one and the same fence, None if it came too late.

        One round suffices when our proposal was above all their numbers. Otherwise the largest is
        written back, on condition that the node still holds our token.
        """
        if not self.request.fence:
            return self._if_of_use(self.lease(None))
        majority = quorum(len(ballot))
        fence = largest_granted(ballot)
        for _ in range(CONFIRM_ROUNDS):
            if agreeing(ballot, fence) >= majority:
                return self._if_of_use(self.granted(fence))
            fence = max(fence, largest_granted(ballot))
            self.started = self.participant.now()
            self.asked = self.lease(fence)
            confirm = renew_request(self.participant.rules, self.asked, repair=False)
            ballot = yield Ask(confirm, lambda votes, f=fence: agreeing(votes, f) >= majority)  # type: ignore[misc]
            ballot = without_strays(ballot, self.participant.rules.longest_skew)
            self.participant.learn(ballot)
        is_agreed = agreeing(ballot, fence) >= majority
        return self._if_of_use(self.asked) if is_agreed else None

    def granted(self, fence: int) -> Lease:
        return self.asked if self.asked.fence == fence else self.lease(fence)

    def _if_of_use(self, lease: Lease) -> Lease | None:
        now = self.participant.now()
        is_late = self.request.is_late(now, lease.valid_until)
        if is_late and self.request.within is not None:
            self.participant.learn_time(now - self.started, rounds=1)
        return None if is_late else lease


def refusing(ballot: Ballot) -> frozenset[int]:
    """Return the positions of nodes that certainly stored nothing of ours."""
    return positions_of(ballot, VoteKind.REFUSED, VoteKind.QUARANTINED, VoteKind.MARKED)


def without_strays(ballot: Ballot, skew: float) -> Ballot:
    """
    Return *ballot* without votes whose fence no majority can store.

    A node that lies says any number, and the others store none that is further ahead of their
    clocks than clocks may differ, which is *skew* [s]. The votes that are left are still a
    majority, or nothing is granted: so one of them knows the largest fence that was given out.
    """
    said = -1
    for vote in ballot:
        if vote is not None and vote.kind is VoteKind.GRANTED:
            if said not in (-1, vote.fence):
                break
            said = vote.fence
    else:  # most often all say the same
        return ballot
    granted, majority = votes_of(ballot, VoteKind.GRANTED), quorum(len(ballot))
    if len(granted) < majority:
        return ballot
    fences = sorted({vote.fence for vote in granted}, reverse=True)
    storable = (f for f in fences if sum(can_store(v, f, skew) for v in granted) >= majority)
    largest = next(storable, -1)
    strays = [vote for vote in granted if vote.fence > largest]
    return [STRAY if vote in strays else vote for vote in ballot]


def can_store(vote: Vote, fence: int, skew: float) -> bool:
    """Return whether the node that granted this stores *fence*, or will if it is told to."""
    farthest = fence_proposal(round((vote.node_now + skew) * 1000), 0)
    return vote.fence <= fence and (fence == vote.fence or fence <= farthest)


def largest_granted(ballot: Ballot) -> int:
    largest = 0
    for vote in ballot:
        if vote is not None and vote.kind is VoteKind.GRANTED and vote.fence > largest:
            largest = vote.fence
    return largest


def agreeing(ballot: Ballot, fence: int) -> int:
    found = 0
    for vote in ballot:
        found += vote is not None and vote.kind is VoteKind.GRANTED and vote.fence == fence
    return found
