"""
The reservations of one process, on its nodes: reserve, start, end.

Drives the algorithm of `celery_redlock.unique.reserving` over the connections that locks are
taken on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_redlock.errors import QuorumUnavailable
from celery_redlock.events import LockUnavailable, Notify
from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.driver import Driver
from celery_redlock.lock.scripts.votes import Ballot, VoteKind, has_majority
from celery_redlock.unique.requests import (
    Start,
    Trigger,
    end_request,
    start_request,
)
from celery_redlock.unique.reserving import (
    Duplicate,
    NotStarted,
    Reserved,
    Started,
    reserve,
    turn_in,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from celery_redlock.lock.redlock import Redlock

__all__ = ["Reservations"]


class Reservations:
    """The reservations on the nodes of one process. Safe from any thread."""

    def __init__(self, participant: Participant, driver: Driver, notify: Notify) -> None:
        self._participant = participant
        self._driver = driver
        self._notify = notify

    @classmethod
    def on(cls, locks: Redlock) -> Self:
        return cls(locks.participant, locks.driver, locks.notify)

    def reserve(self, trigger: Trigger, ends: float | None = None) -> Reserved | Duplicate:
        """Take the reservation by *ends* [s, our clock], or find out who has it; one round."""
        started = clock.now()
        try:
            return self._driver.drive(reserve(self._participant, trigger, ends), ends)
        except QuorumUnavailable as error:
            self._notify(LockUnavailable(trigger.name, error.votes, clock.now() - started))
            raise

    def start(self, name: str, token: str, begun: Start, *, wait: bool) -> Started | NotStarted:
        """
        Record that the task of the reservation *token* starts under its lock.

        With *wait*, for all nodes, return what was merged into the task, or why it may not start.
        """
        request = start_request(self._participant.rules, name, token, begun)
        if not wait:
            self._driver.tell(request)
            return Started()
        # All of them: after a restart one node of the majority that knows may know nothing.
        return turn_in(self._driver.ask(Ask(request)), self._driver.labels)

    def end(
        self, name: str, token: str, how: str, *, life: float = 0.0, wait: bool = False
    ) -> None:
        """
        End the reservation of *token*; others' reservations stay as they are.

        *how* it ends, *life* being how long it is then to stand by itself [s]:

            over       at once
            idle       likewise, unless its task runs
            unstarted  likewise, unless its task has ever run
            wait       its task is queued again, for *life* at most
            hand       a worker has it in hand, and could lose it, for *life*
            window     its task failed: it stands for its window
            ran        it stands as it does, but no trigger can be merged into it any more

        *wait* for the answers of a majority, and for connections before.
        """
        request = end_request(self._participant.rules, name, token, how, life)
        if wait:
            self._driver.ask(Ask(request, has_answered))
        else:
            self._driver.tell(request)


def has_answered(ballot: Ballot) -> bool:
    return has_majority(ballot, VoteKind.GRANTED, VoteKind.REFUSED)
