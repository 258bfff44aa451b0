"""Locks of several places: choose one to try, and see who has the others."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from celery_redlock.lock.algorithm.attempt import Attempt
from celery_redlock.lock.algorithm.effects import Ask, Send
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.algorithm.waiter import Waiter
from celery_redlock.lock.lease import Lease, quorum
from celery_redlock.lock.scripts.requests import places_request
from celery_redlock.lock.scripts.votes import (
    Ballot,
    Verdict,
    VoteKind,
    has_majority,
    holder_of,
    votes_of,
)

__all__ = ["any_of", "try_places"]


def try_places(
    participant: Participant, request: LockRequest, waiter: Waiter
) -> Generator[Ask | Send, Any, Lease | tuple[Verdict, Ballot]]:
    """
    Make an attempt on every place that may be free; return what the last one came to.

    First on one that this execution itself holds: a message that is delivered again while it runs
    does not run beside itself.
    """
    place = 0
    tried: set[int] = set()
    free: list[int] = []
    execution = request.info.get("execution", "")
    if request.limit > 1:
        own, free = yield from seen_places(participant, request, execution)
        place = any_of(own[:1] or free or range(request.limit), participant)
    while True:
        attempt = waiter.attempt = Attempt(participant, request, place)
        answer = yield from attempt.make()
        if isinstance(answer, Lease):
            waiter.share(len(free))
            return answer
        waiter.started, waiter.attempt = attempt.started, None
        if request.limit == 1 or answer[0] is not Verdict.TAKEN:
            return answer
        if execution and holder_of(answer[1]).get("execution") == execution:
            return answer
        tried.add(place)
        own, free = yield from seen_places(participant, request, execution)
        untried = [one for one in free if one not in tried]
        own = [one for one in own if one not in tried]  # it may have begun a moment ago
        if not (own or untried):
            return answer
        place = any_of(own[:1] or untried, participant)


def any_of(places: Sequence[int], participant: Participant) -> int:
    return places[min(int(participant.chance(0.0, len(places))), len(places) - 1)]


def seen_places(
    participant: Participant, request: LockRequest, execution: str
) -> Generator[Ask, Ballot, tuple[list[int], list[int]]]:
    """
    Return the places that any node says *execution* has, and those that a majority calls free.

    Of the former first the one that most nodes name: others may have missed a release.
    """
    asked = places_request(participant.rules, request.name, request.limit, execution)
    ballot = yield Ask(asked, lambda votes: has_majority(votes, VoteKind.GRANTED))
    answers = [vote.value for vote in votes_of(ballot, VoteKind.GRANTED)]
    said = [[one[place : place + 1] for one in answers] for place in range(request.limit)]
    own = [place for place, words in enumerate(said) if b"2" in words]
    own.sort(key=lambda place: said[place].count(b"2"), reverse=True)
    majority = quorum(len(ballot))
    return own, [place for place, words in enumerate(said) if words.count(b"0") >= majority]
