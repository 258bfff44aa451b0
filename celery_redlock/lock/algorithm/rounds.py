r"""
The algorithm, sans I/O: generators that yield the next step and are sent its result.

    acquire():   Ask(ACQUIRE) --granted by a quorum, one fence--> Lease
                     |   \--granted, fences differ--> Ask(RENEW) to agree on one --> Lease
                     |--refused / too late / split--> Tell(RELEASE) -> Pause -> again, new token
                     |           (while it waits, the nodes know of it: Tell(WAIT), Tell(LEAVE))
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
from celery_redlock.lock.algorithm.asks import Ask, Pause, Tell
from celery_redlock.lock.algorithm.client import Client
from celery_redlock.lock.algorithm.places import try_places
from celery_redlock.lock.algorithm.waiter import COMES_EVERY, Waiter
from celery_redlock.lock.algorithm.wanted import MarkerStands, Wanted
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

__all__ = ["acquire", "pause_before"]

#: How often a split vote is tried again before it is called taken or unavailable.
SPLIT_TRIES = 12
SHORTEST_PAUSE = 0.01
LONGEST_PAUSE = 0.25
#: Of the first pause after a split vote [s]; of a slow round, as long as that took: contenders
#: whose requests cross in a pause would split the vote again.
SHORTEST_SPLIT_PAUSE = 0.002

Steps = Generator["Ask | Tell | Pause", Any, Lease]


def acquire(client: Client, wanted: Wanted) -> Steps:
    """Acquire the lock as `attempts` does, and leave nothing else behind, however that ends."""
    waiter = Waiter(client, wanted)
    try:
        return (yield from acquire_or_clear(client, wanted, waiter))
    except GeneratorExit:  # dropped by its driver: nobody could send it
        raise
    except BaseException:  # interrupted, perhaps as it cleared; else there is nothing left to clear
        yield from waiter.clear()
        raise


def acquire_or_clear(client: Client, wanted: Wanted, waiter: Waiter) -> Steps:
    """Do so unless it is interrupted at its end."""
    try:
        lease = yield from attempts(client, wanted, waiter)
        yield from waiter.leave()
        return lease  # noqa: TRY300  an interruption may strike here, too
    except GeneratorExit:
        raise
    except BaseException:  # refused; or interrupted, perhaps after the grant
        yield from waiter.clear()
        raise


def attempts(client: Client, wanted: Wanted, waiter: Waiter) -> Steps:
    """
    Acquire the lock, trying until it is granted or *wanted.wait* has passed.

    Returns:
        The lease, with at least a third of its TTL left.

    Raises:
        LockTaken: Somebody else holds it.
        QuorumUnavailable: No quorum could decide.
        MarkerStands: A majority of nodes has the marker of *wanted*, or it is in doubt.
    """
    give_up = client.now() + wanted.wait
    tries = splits = 0
    while True:
        answer = yield from try_places(client, wanted, waiter)
        if isinstance(answer, Lease):
            return answer
        verdict, ballot = answer
        if verdict is Verdict.MARKED and wanted.marker is not None:
            state = marker_in(ballot) or b""
            raise MarkerStands(state.decode(errors="replace"))  # others may have written it
        now = client.now()
        took = min(now - waiter.started, client.rules.node_timeout)  # without waits to connect
        can_wait = verdict is Verdict.TAKEN and client.listener is not None
        if can_wait and now < give_up:
            yield from waiter.join()
        most = COMES_EVERY if can_wait else LONGEST_PAUSE
        pause = pause_after(client, verdict, ballot, tries, splits, give_up - now, took, most)
        if pause is None or (wanted.ends is not None and now + pause >= wanted.ends):
            if wanted.marker is not None and is_in_doubt(ballot):
                raise MarkerStands("")
            raise refusal(wanted.name, ballot, client.labels)
        is_draw = verdict is Verdict.SPLIT and splits < SPLIT_TRIES
        splits += is_draw
        tries += not is_draw
        if can_wait:
            yield from waiter.pause(give_up - now, pause)
        else:
            yield Pause(pause)


def pause_after(  # noqa: PLR0917  all that there is to know of an attempt
    client: Client,
    verdict: Verdict,
    ballot: Ballot,
    tries: int,
    splits: int,
    left: float,
    took: float,
    most: float,
) -> float | None:
    """Return how long to wait before the next attempt [s]; None to give up."""
    if verdict is Verdict.SPLIT and splits < SPLIT_TRIES:
        longest = max(SHORTEST_SPLIT_PAUSE, took) * 2 ** min(splits, 5)
        return client.chance(0.0, min(LONGEST_PAUSE, longest))
    return None if left <= 0 else pause_before(client, tries, left, most, earliest_free(ballot))


def pause_before(
    client: Client, tries: int, left: float, most: float, free_in: float | None
) -> float:
    """
    Return how long to wait before the next attempt on a lock that is taken [s].

    Args:
        client: Has the jitter.
        tries: How many attempts were in vain.
        left: How long it may take at all [s].
        most: Longest pause [s].
        free_in: When the lock may be free without a release [s from now]; None if unknown.
    """
    longest = min(most, SHORTEST_PAUSE * 2 ** min(tries, 7))
    if free_in is not None:
        longest = min(longest, free_in + SHORTEST_PAUSE)
    return min(left, client.chance(longest / 2, longest))


def refusal(name: str, ballot: Ballot, labels: tuple[str, ...]) -> LockNotAcquired:
    """Return the error that says why *ballot* did not grant the lock."""
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
