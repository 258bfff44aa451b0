"""One participant of the quorum: its rules, its clocks, and the largest fence it has seen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_redlock.lock import clock
from celery_redlock.lock.lease import fence_proposal
from celery_redlock.lock.records import OWNER_LENGTH
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.votes import Ballot
from celery_redlock.lock.waiting.room import ThreadWaiting

if TYPE_CHECKING:
    from celery_redlock.lock.waiting.listener import Listener

__all__ = ["Participant", "fresh_token", "new_owner"]


@dataclass
class Participant:
    """One process that takes locks; clocks and chance can be replaced."""

    rules: Rules
    labels: tuple[str, ...]
    seen: int = 0  # the largest fence that any node ever reported
    listener: Listener | None = None  # None where nobody is woken
    waiting: type[ThreadWaiting] = ThreadWaiting  # what one waits in for a hint
    now: Callable[[], float] = clock.now
    wall: Callable[[], float] = time.time
    chance: Callable[[float, float], float] = clock.jitter
    new_token: Callable[[], str] = lambda: os.urandom(20).hex()
    grant_takes: float = 0.0  # what has to be granted soon took so long of late [s]

    def propose(self) -> int:
        """
        Return the fencing number to propose next.

        What was seen counts only while it is near our own clock: nodes refuse numbers that
        are far ahead of theirs, and one fast participant must not bring that upon all others. A
        node never goes back anyway; the proposal only saves a round.
        """
        wall_ms = int(self.wall() * 1000)
        ours = fence_proposal(wall_ms, 0)
        if self.seen < ours:
            return ours
        too_far = fence_proposal(wall_ms + int(self.rules.longest_skew * 500), 0)
        return fence_proposal(wall_ms, self.seen) if self.seen < too_far else ours

    def learn(self, ballot: Ballot) -> None:
        for vote in ballot:
            if vote is not None and vote.fence > self.seen:
                self.seen = vote.fence

    def learn_time(self, took: float, rounds: int) -> None:
        """
        Learn for how long one waits for what has to be granted soon, in so many *rounds*.

        No more than nodes may take for them counts, as this process may have stood still. What was
        learned before is halved each time.
        """
        took = min(took, rounds * self.rules.node_timeout)
        self.grant_takes = max(took, (self.grant_takes + took) / 2)


def new_owner() -> str:
    """Return what all tokens of a `LockRequest.owner` begin with: 128 random bits."""
    return os.urandom(OWNER_LENGTH // 2).hex()


def fresh_token(participant: Participant, owner: str | None) -> str:
    token = participant.new_token()
    return token if owner is None else owner + token[OWNER_LENGTH:]
