r"""
The algorithm, sans I/O: generators that yield the next step and are sent its result.

    acquire():   Ask(ACQUIRE) --granted by a quorum, one fence--> Lease
                     |   \--granted, fences differ--> Ask(RENEW) to agree on one --> Lease
                     |--refused / too late / split--> Send(RELEASE) -> Sleep -> again, new token
                     |           (while it waits, the nodes know of it: Send(WAIT), Send(LEAVE))
                     '--out of time--> LockTaken, QuorumUnavailable, or a marker in doubt

Whoever drives them does the I/O (`celery_redlock.lock.redlock`, or a simulator). The
safety argument, in the order of the code:

- A token is fresh for every attempt, so a late message of an earlier attempt can neither
  release nor renew this one.
- A grant needs a majority of the *configured* nodes, so two holders share a node, and
  that node keeps one token.
- Validity counts from before the send and is shortened by the drift, so ours ends
  before the keys do.
- Whatever an attempt may have left behind is released through the same connections, so
  no node sees the release before the request.
- An execution has finished where a majority has its marker. With fewer, a majority's grant is a
  grant; without that either, it may have finished, and is neither run nor refused.
- A fence is final when a majority stores it while holding our token (PROTOCOL 3.1).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from celery_redlock.errors import LockNotAcquired, LockTaken, QuorumUnavailable
from celery_redlock.lock.algorithm.effects import Ask, Send, Sleep
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.algorithm.places import try_places
from celery_redlock.lock.algorithm.request import LockRequest, MarkerStands
from celery_redlock.lock.algorithm.waiter import COMES_EVERY, Waiter
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.scripts.votes import (
    Ballot,
    Verdict,
    VoteKind,
    earliest_free,
    holder_of,
    is_in_doubt,
    judge,
    marker_in,
    quarantine_left,
    verdict_when_split,
    votes_by_node,
)

__all__ = ["Steps", "acquire", "pause_before"]

#: How often a split vote is tried again before it is called taken or unavailable.
SPLIT_TRIES = 12
SHORTEST_PAUSE = 0.01
LONGEST_PAUSE = 0.25
#: Of the first pause after a split vote [s]; of a slow round, as long as that took: contenders
#: whose requests cross in a pause would split the vote again.
SHORTEST_SPLIT_PAUSE = 0.002

Steps = Generator["Ask | Send | Sleep", Any, Lease]


def acquire(participant: Participant, request: LockRequest) -> Steps:
    """Acquire the lock as `attempts` does, and leave nothing else behind, however that ends."""
    waiter = Waiter(participant, request)
    try:
        return (yield from acquire_or_clear(participant, request, waiter))
    except GeneratorExit:  # dropped by its driver: nobody could send it
        raise
    except BaseException:  # interrupted, perhaps as it cleared; else there is nothing left to clear
        yield from waiter.clear()
        raise


def acquire_or_clear(participant: Participant, request: LockRequest, waiter: Waiter) -> Steps:
    try:
        lease = yield from attempts(participant, request, waiter)
        yield from waiter.leave()
        return lease  # noqa: TRY300  an interruption may strike here, too
    except GeneratorExit:
        raise
    except BaseException:  # refused; or interrupted, perhaps after the grant
        yield from waiter.clear()
        raise


def attempts(participant: Participant, request: LockRequest, waiter: Waiter) -> Steps:
    """
    Try until the lock is granted or *request.wait* has passed.

    Raises:
        LockTaken, QuorumUnavailable: No attempt was granted it in time.
        MarkerStands: A majority of nodes has the marker of *request*, or it is in doubt.
    """
    give_up = participant.now() + request.wait
    tries = splits = 0
    while True:
        answer = yield from try_places(participant, request, waiter)
        if isinstance(answer, Lease):
            return answer
        verdict, ballot = answer
        if verdict is Verdict.MARKED and request.marker is not None:
            state = marker_in(ballot) or b""
            raise MarkerStands(state.decode(errors="replace"))  # others may have written it
        now = participant.now()
        took = min(now - waiter.started, participant.rules.node_timeout)  # without waits to connect
        can_wait = verdict is Verdict.TAKEN and participant.listener is not None
        if can_wait and now < give_up:
            yield from waiter.join()
        most = COMES_EVERY if can_wait else LONGEST_PAUSE
        left = give_up - now
        is_draw = verdict is Verdict.SPLIT and splits < SPLIT_TRIES
        pause = None
        if is_draw:
            pause = pause_after_draw(participant, splits, took)
        elif left > 0:
            pause = pause_before(participant, tries, left, most, earliest_free(ballot))
        if pause is None or (request.ends is not None and now + pause >= request.ends):
            if request.marker is not None and is_in_doubt(ballot):
                raise MarkerStands("")
            raise refusal(request.name, ballot, participant.labels)
        splits += is_draw
        tries += not is_draw
        if can_wait:
            yield from waiter.pause(left, pause)
        else:
            yield Sleep(pause)


def pause_after_draw(participant: Participant, splits: int, took: float) -> float:
    longest = max(SHORTEST_SPLIT_PAUSE, took) * 2 ** min(splits, 5)
    return participant.chance(0.0, min(LONGEST_PAUSE, longest))


def pause_before(
    participant: Participant, tries: int, left: float, most: float, free_in: float | None
) -> float:
    """Return a pause [s]; the lock may be free *free_in* from now without a release."""
    longest = min(most, SHORTEST_PAUSE * 2 ** min(tries, 7))
    if free_in is not None:
        longest = min(longest, free_in + SHORTEST_PAUSE)
    return min(left, participant.chance(longest / 2, longest))


def refusal(name: str, ballot: Ballot, labels: tuple[str, ...]) -> LockNotAcquired:
    verdict = judge(ballot)
    if verdict is Verdict.SPLIT:
        verdict = verdict_when_split(ballot)
    if verdict is Verdict.TAKEN:
        return LockTaken(name, votes_by_node(ballot, labels), holder_of(ballot))
    votes = votes_by_node(ballot, labels)
    if verdict is Verdict.GRANTED:
        votes = dict.fromkeys(votes, "granted, but too late") | {
            label: vote for label, vote in votes.items() if vote != VoteKind.GRANTED.value
        }
    return QuorumUnavailable(name, votes, quarantine_left(ballot))
