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
    lapses_in,
    votes_of,
)

__all__ = ["any_of", "try_places"]


def try_places(
    participant: Participant, request: LockRequest, waiter: Waiter
) -> Generator[Ask | Send, Any, Lease | tuple[Verdict, Ballot]]:
    """
    Make an attempt on every place that may be free; return what the last one came to.

    First on one that this execution itself holds: a message that is delivered again while it runs
    does not run beside itself. A start, which is no matter of who it is, looks for a free one only
    where the first has been taken.
    """
    place = any_of(range(request.limit), participant) if request.stands else 0
    tried: set[int] = set()
    free: list[int] = []
    refused: tuple[Verdict, Ballot] = Verdict.TAKEN, []
    execution = "" if request.stands else request.info.get("execution", "")
    if max(request.limit, request.looks_at) > 1 and not request.stands:
        own, free, _ = yield from seen_places(participant, request, execution)
        place = any_of(own[:1] or free or range(request.limit), participant)
    while True:
        attempt = waiter.attempt = Attempt(participant, request, place)
        answer = yield from attempt.make()
        is_beyond = place >= request.limit  # none is there any more: only its own is looked for
        if isinstance(answer, Lease) and not is_beyond:
            waiter.share(len(free))
            return answer
        if isinstance(answer, Lease):  # of its own, which ended meanwhile
            yield Send(attempt.release())
        waiter.started, waiter.attempt = attempt.started, None
        if not isinstance(answer, Lease):
            refused = answer
            if is_last_word(request, refused, execution, is_beyond=is_beyond):
                return refused
        tried.add(place)
        own, free, lapses = yield from seen_places(participant, request, execution)
        # Where it tried beyond the limit, nothing is known yet of who has the others.
        left = [one for one in (range(request.limit) if is_beyond else free) if one not in tried]
        own = [one for one in own if one not in tried]  # it may have begun a moment ago
        if not (own or left):
            return refused[0], lapsing(refused[1], lapses)
        place = any_of(own[:1] or [one for one in left if one in free] or left, participant)


def is_last_word(
    request: LockRequest, refused: tuple[Verdict, Ballot], execution: str, *, is_beyond: bool
) -> bool:
    """Return whether no other place is to be tried once one has *refused*."""
    verdict, ballot = refused
    if verdict is not Verdict.TAKEN or (request.limit == 1 and not is_beyond):
        return True
    return bool(execution) and holder_of(ballot).get("execution") == execution


def any_of(places: Sequence[int], participant: Participant) -> int:
    return places[min(int(participant.chance(0.0, len(places))), len(places) - 1)]


def seen_places(
    participant: Participant, request: LockRequest, execution: str
) -> Generator[Ask, Ballot, tuple[list[int], list[int], float]]:
    """
    Return the places that any node says *execution* has, and those that a majority calls free.

    And when the first that is held lapses [s]; 0.0 if none is, or nobody knows.

    Of the former first the one that most nodes name: others may have missed a release. One beyond
    the limit only if a majority names it, as it is not to be granted.
    """
    looks_at = max(request.limit, request.looks_at)
    asked = places_request(
        participant.rules, request.name, looks_at, execution, lapses=request.stands
    )
    ballot = yield Ask(asked, lambda votes: has_majority(votes, VoteKind.GRANTED))
    answers = [vote.value for vote in votes_of(ballot, VoteKind.GRANTED)]
    said = [[one[place : place + 1] for one in answers] for place in range(looks_at)]
    majority = quorum(len(ballot))
    own = [
        place
        for place, words in enumerate(said)
        if words.count(b"2") >= (1 if place < request.limit else majority)
    ]
    own.sort(key=lambda place: said[place].count(b"2"), reverse=True)
    places = enumerate(said[: request.limit])
    free = [place for place, words in places if words.count(b"0") >= majority]
    return own, free, lapses_in(ballot)


def lapsing(ballot: Ballot, lapses: float) -> Ballot:
    """Return *ballot*, in which those who refuse say when the first place lapses."""
    return [
        vote._replace(ttl=min(vote.ttl, lapses))
        if lapses and vote is not None and vote.kind is VoteKind.REFUSED
        else vote
        for vote in ballot
    ]
