"""
What a client makes of the answers: the library's own code, over small ballots.

A ballot here is a tuple of answers (see `exploration.nodes`). It becomes one of real votes,
goes through a real `Round`, and what is decided comes from `judge`, from the generator
`Attempt.settle`, and from `Renewal`. All is remembered, for there are few different ballots;
who patches the library has to `forget`.

A guard of the client is switched off in `settled`, which is `settle` told again; a test holds
the two to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from functools import cache
from typing import NamedTuple

from celery_redlock.lock.algorithm.attempt import CONFIRM_ROUNDS, Attempt
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.algorithm.renewal import Renewal
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.lease import Lease, quorum, valid_until
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.votes import (
    Ballot,
    Verdict,
    Vote,
    VoteKind,
    acquire_is_decided,
    count,
    judge,
)
from exploration.nodes import DEAD, LOST, NOTHING, QUARANTINED, REFUSED, WAITING, Off

__all__ = ["CLIENT_GUARDS", "Move", "acquired", "confirmed", "forget", "renewed", "withdrawn"]

NODES = 3
#: Ticks of a lease where time does not matter.
LONG = 100
OTHER = b"f" * 40
#: What may be switched off in `settled`.
CLIENT_GUARDS = frozenset({"write-back", "exact-fence", "largest-fence", "confirm-sets-nothing"})

Answers = tuple[int, ...]


class Move(NamedTuple):
    """
    What a client does next.

    Attributes:
        kind: ``"wait"`` for more answers, ``"confirm"`` the fence in one more round, ``"hold"``
            the lock, ``"again"`` when a renewal is undecided, or it is ``"over"``.
        fence: Of the confirmation or the grant.
        left: Of the lease [ticks].
    """

    kind: str
    fence: int = 0
    left: int = 0


WAIT, AGAIN, OVER = Move("wait"), Move("again"), Move("over")


def vote(answer: int) -> Vote | None:
    """Return the library's vote for an answer, None for one that has not come."""
    if answer in {WAITING, LOST}:
        return None
    if answer == REFUSED:
        return Vote(VoteKind.REFUSED, ttl=1.0, value=OTHER)
    if answer == QUARANTINED:
        return Vote(VoteKind.QUARANTINED, ttl=1.0)
    if answer == DEAD:
        return Vote(VoteKind.UNREACHABLE, reason="connection lost")
    kind = VoteKind.REPAIRED if answer % 2 else VoteKind.GRANTED
    return Vote(kind, answer // 2)


class Clock:
    """Shows what it is told [ticks]."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


def client(ttl: int, clock: Clock) -> Participant:
    """Return a client whose leases last *ttl* ticks; all clocks are right."""
    rules = Rules(ttl=ttl, max_ttl=ttl, node_timeout=0.1, drift_factor=0.0)
    return Participant(rules, labels=("A", "B", "C"), now=clock.now, wall=clock.now)


def ticks_left(lease: Lease, clock: Clock) -> int:
    """Return at how many ticks from now on a lease is still trusted."""
    return max(0, math.ceil(lease.valid_until - clock.time))


def put(ask: Ask, answers: Answers) -> Round:
    """Return the call of *ask* after these answers."""
    call = Round(ask.request, len(answers), ask.decided)
    for position, answer in enumerate(answers):
        counted = vote(answer)
        if counted is not None:
            call.take(position, counted)
    return call


def attempt(ttl: int, clock: Clock) -> Attempt:
    wanted = LockRequest("k", ttl, fence=True)
    made = Attempt(client(ttl, clock), wanted, 0)
    made.token = "0" * 40
    return made


Settling = Generator[Ask, Ballot, "Lease | None"]


def step(advance: Callable[[], Ask], clock: Clock) -> Move:
    """Return what `settle` does next."""
    try:
        ask = advance()
    except StopIteration as stop:
        lease: Lease | None = stop.value
        if lease is None:
            return OVER
        return Move("hold", lease.fence or 0, ticks_left(lease, clock))
    return Move("confirm", asked_fence(ask))


def asked_fence(ask: Ask) -> int:
    """Return the fence that a confirmation is about."""
    return int(ask.request.arguments[3])


@cache
def acquired(
    answers: Answers,
    timed_out: bool = False,  # noqa: FBT001, FBT002  remembered calls are told by position
    elapsed: int = 0,
    ttl: int = LONG,
    off: Off = NOTHING,
) -> Move:
    """Return what a client does that asked *elapsed* ticks ago and has these answers so far."""
    clock = Clock()
    trying = attempt(ttl, clock)
    call = put(Ask(trying.acquire(), acquire_is_decided), answers)
    clock.time = float(elapsed)
    if call.is_open and not timed_out:
        return WAIT
    if judge(call.ballot) is not Verdict.GRANTED:
        return OVER
    if off & CLIENT_GUARDS:
        return settled(answers, None, 0, off)
    settling = trying.settle(call.ballot)
    return step(lambda: next(settling), clock)


@cache
def confirmed(  # noqa: PLR0917
    answers: Answers,
    fence: int,
    number: int,
    timed_out: bool,  # noqa: FBT001
    elapsed: int = 0,
    ttl: int = LONG,
    off: Off = NOTHING,
) -> Move:
    """Return what a client does in confirming round *number* (from 1) about *fence*."""
    if off & CLIENT_GUARDS:
        move = settled(answers, fence, number, off)
        is_open = any(answer in {WAITING, LOST} for answer in answers) and not timed_out
        return WAIT if move.kind != "hold" and is_open else move
    clock = Clock()
    settling, ask = confirming(fence, number, ttl, clock)
    call = put(ask, answers)
    clock.time = float(elapsed)
    if call.is_open and not timed_out:
        return WAIT
    return step(lambda: settling.send(call.ballot), clock)


def confirming(fence: int, number: int, ttl: int, clock: Clock) -> tuple[Settling, Ask]:
    """Return a `settle` that is in confirming round *number* about *fence*, and what it asks."""
    first = (granted_vote(fence), granted_vote(0), None)
    settling = attempt(ttl, clock).settle(first)
    ask = next(settling)
    for _ in range(number - 1):  # rounds without an answer
        ask = settling.send([None] * NODES)
    assert asked_fence(ask) == fence
    return settling, ask


def granted_vote(fence: int) -> Vote:
    return Vote(VoteKind.GRANTED, fence)


def settled(answers: Answers, fence: int | None, number: int, off: Off) -> Move:
    """Return what `settle` does after round *number* (0 is the first), with guards *off*."""
    votes = [v for v in map(vote, answers) if v is not None]
    fences = [v.fence for v in votes if v.kind is VoteKind.GRANTED]
    of_several = min if "largest-fence" in off else max
    largest = of_several(fences, default=0)
    about = largest if fence is None else fence
    agreeing = fences.count(about)
    if fence is not None:
        if "exact-fence" in off:
            agreeing = len(fences)
        if "confirm-sets-nothing" in off:
            agreeing += sum(v.kind is VoteKind.REPAIRED and v.fence == about for v in votes)
    elif "write-back" in off:
        agreeing = len(fences)
    if agreeing >= quorum(NODES):
        return Move("hold", about, LONG)
    return OVER if number == CONFIRM_ROUNDS else Move("confirm", max(about, largest))


@cache
def renewed(
    answers: Answers,
    timed_out: bool,  # noqa: FBT001
    elapsed: int,
    left: int,
    ttl: int,
    off: Off = NOTHING,
) -> Move:
    """
    Return what a holder does that began to renew *elapsed* ticks ago.

    Args:
        answers: So far.
        timed_out: Whether no more will count.
        elapsed: Since the renewal began [ticks].
        left: Of the lease that is to be renewed [ticks]; negative once it has ended.
        ttl: Of all leases [ticks].
        off: Guards that are switched off.
    """
    clock = Clock()
    until = valid_until(float(left + elapsed - ttl), ttl, 0.0)
    renewal = Renewal(client(ttl, clock), Lease("k", "0" * 40, 1, float(ttl), until, 0.0))
    call = put(Ask(renewal.request(), lambda votes: renewal.decided(read(votes, off))), answers)
    clock.time = float(elapsed)
    if call.is_open and not timed_out:
        return WAIT
    if "renewal-deadline" in off:
        renewal._ends = math.inf
    outcome = renewal.outcome(read(call.ballot, off))
    if isinstance(outcome, Lease):
        return Move("hold", 1, ticks_left(outcome, clock))
    return AGAIN if outcome is None else OVER


def read(ballot: Ballot, off: Off) -> Ballot:
    """Return what the votes on a renewal are taken for, with guards *off*."""
    is_lost = count(ballot, VoteKind.REPAIRED) >= quorum(NODES) and "repaired-majority" not in off
    if is_lost or not off & {"repaired-majority", "repaired-later"}:
        return ballot
    counted = Vote(VoteKind.GRANTED, 0) if "repaired-later" in off else None
    return [counted if v is not None and v.kind is VoteKind.REPAIRED else v for v in ballot]


@cache
def withdrawn(answer: int) -> int:
    """Return what an answer counts for once its connection has died."""
    counted = vote(answer)
    lease = Lease("k", "0" * 40, 1, float(LONG), float(LONG), 0.0)
    ask = Ask(Renewal(client(LONG, Clock()), lease).request(), lambda _: False)
    call = put(ask, (answer, WAITING, WAITING))
    call.withdraw(0, "connection lost")
    return answer if call.ballot[0] == counted else DEAD


def forget() -> None:
    """Ask the library anew from now on: it was patched, or is as it was again."""
    for remembered in (acquired, confirmed, renewed, withdrawn):
        remembered.cache_clear()
