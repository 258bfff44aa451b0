"""
Ask for the locks of an execution: all of its names, or none.

    begin --> Granted   it runs under its lock, or under what stands in for one
          --> Finished  it has finished before, or may have
          --> Refused   another one holds the lock, or no quorum could decide
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from celery_redlock.errors import LockNotAcquired, LockTaken
from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.request import LockRequest, MarkerStands
from celery_redlock.lock.held import HeldLock, NotLocked
from celery_redlock.lock.records import place_name, shorten
from celery_redlock.lock.scripts.requests import Marker
from celery_redlock.plugin import locking
from celery_redlock.process.log import get_logger
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.execution.outcome import DONE
from celery_redlock.task.execution.plan import Plan, Situation, plan
from celery_redlock.task.execution.waiting_line import leave_line
from celery_redlock.task.policies import RunUnlocked

__all__ = [
    "Finished",
    "Granted",
    "OnLost",
    "Refused",
    "begin",
    "has_previous",
    "take",
]

logger = get_logger(__name__)

#: How long to wait for the task's previous execution to release the lock [s].
PREVIOUS_GRACE = 2.0

#: Called when the lock is lost.
OnLost = Callable[[], None]


class Granted(NamedTuple):
    """
    An execution runs.

    Attributes:
        claim: As it was asked with.
        held: Its lock, or what stands in for one.
        own: The lock that it has to release; None if there is none. In report mode that is its
            note on the nodes, which nobody waits for, and *held* is none.
    """

    claim: Claim
    held: HeldLock
    own: HeldLock | None = None


@dataclass(frozen=True)
class Finished:
    """
    An execution has finished before.

    Attributes:
        claim: As it was asked with.
        is_certain: Whether its result is stored; else it is asked again later.
    """

    claim: Claim
    is_certain: bool


@dataclass(frozen=True)
class Refused:
    """
    An execution was not granted its lock.

    Attributes:
        claim: As it was asked with.
        error: Why.
        situation: In which it is then.
        is_full: Whether as many wait for the lock as may.
    """

    claim: Claim
    error: LockNotAcquired
    situation: Situation
    is_full: bool = False

    @property
    def plan(self) -> Plan:
        claim = self.claim
        return plan(
            claim.options,
            self.situation,
            is_eager=claim.request.is_eager,
            reschedules=claim.delivery.envelope.reschedules,
            is_full=self.is_full,
        )


def begin(claim: Claim, outer: Granted | None, on_lost: OnLost) -> Granted | Finished | Refused:
    """Ask for the lock of *claim*; *outer* has begun whose body called ``apply()``, if any."""
    if locking.disabled:
        return unlocked(claim, "locks are disabled in this process")
    if outer is not None and has_replaced(claim, outer):
        return Granted(claim, outer.held)
    hold_reservation(claim)
    begun = take(claim, claim.options.wait, on_lost)
    if isinstance(begun, Granted):
        return begun
    if isinstance(begun, Refused) and begun.situation is Situation.TAKEN:
        begun = unless_its_own(begun, on_lost)
    if isinstance(begun, Refused) and isinstance(begun.plan, RunUnlocked):
        logger.warning("Running %s WITHOUT its lock: %s", claim, begun.error)
        return unlocked(begun.claim, "no quorum of lock nodes; run_unlocked")
    return begun


def unlocked(claim: Claim, why: str) -> Granted:
    return Granted(claim, NotLocked(claim.name, why, clock.wall()))


def has_replaced(claim: Claim, outer: Granted) -> bool:
    """Return whether the body of *outer* has become this one, in eager mode, and has its locks."""
    held = outer.held
    if not claim.request.is_eager:
        return False
    is_ours = held.lease.info.get("task_id") == claim.request.id
    is_first = held.name == place_name(claim.name, held.place)
    return is_ours and is_first and set(claim.names) <= set(outer.claim.names)


def hold_reservation(claim: Claim) -> None:
    """A message that was acknowledged early is in our hands alone until we have the lock."""
    reservation, options = claim.reservation, claim.options
    if reservation is not None and options.wait and not claim.task.acks_late:
        longest = options.wait + PREVIOUS_GRACE + options.ttl
        reservation.hold(claim.reservations, longest)


def unless_its_own(refused: Refused, on_lost: OnLost) -> Granted | Finished | Refused:
    """Return how it begins if it lost to itself, or to the execution before it: to neither."""
    claim = refused.claim
    if claim.request.is_eager:
        return refused
    if has_previous(refused):
        begun = take(claim, PREVIOUS_GRACE, on_lost)
        if not (isinstance(begun, Refused) and begun.situation is Situation.TAKEN):
            return begun
        refused, claim = begun, begun.claim
    if claim.delivery.is_same_execution(holder_in(refused)):
        return Refused(claim, refused.error, Situation.ELSEWHERE)
    if has_previous(refused):
        return Refused(claim, refused.error, Situation.PREVIOUS)
    return refused


def holder_in(refused: Refused) -> dict[str, Any]:
    """Return who holds the lock, as in `LockTaken.holder`; empty if nobody knows."""
    return refused.error.holder if isinstance(refused.error, LockTaken) else {}


def has_previous(refused: Refused, ends: float | None = None) -> bool:
    """
    Return whether the execution before this one has the lock, or one of its places.

    Args:
        refused: Because it is taken.
        ends: Wait for no answer after that [s, our clock]; None for no such limit.
    """
    claim, taken = refused.claim, refused.error
    delivery, holders = claim.delivery, [holder_in(refused)]
    limit = claim.limits[taken.name]
    if limit > 1 and delivery.may_have_previous:
        places = [place_name(taken.name, place) for place in range(limit)]
        asked = claim.locks.inspect_all(places, ends)
        holders += [view.holder for views in asked for view in views]
    return any(map(delivery.is_previous_execution, holders))


def take(
    claim: Claim, wait: float, on_lost: OnLost, ends: float | None = None
) -> Granted | Finished | Refused:
    """
    Acquire the locks unless the execution has finished before.

    A marker that a first publish has left is for those of its own: of a message without a publish
    id that the broker delivers for the first time, it says that another one has finished.

    Args:
        claim: Of the execution.
        wait: How long to keep trying [s].
        on_lost: As of `begin`.
        ends: As of `LockRequest`.
    """
    began = clock.now()
    try:
        held = acquire(claim, wait, on_lost, ends)
    except MarkerStands as marker:
        if claim.delivery.may_be_repeated:
            return Finished(claim, marker.state == DONE)
        wait = max(0.0, wait - (clock.now() - began))
        return take(claim.of_second_publish(), wait, on_lost, ends)
    except LockTaken as error:
        is_own = error.holder.get("execution") == claim.delivery.execution
        if is_own and not claim.delivery.may_be_repeated:
            claim = claim.of_second_publish()
        return Refused(claim, error, Situation.TAKEN)
    except LockNotAcquired as error:
        return Refused(claim, error, Situation.UNAVAILABLE)
    return Granted(claim, held, held)


def acquire(claim: Claim, wait: float, on_lost: OnLost, ends: float | None) -> HeldLock:
    options, delivery, locks = claim.options, claim.delivery, claim.locks
    marker = delivery.execution if options.dedup_ttl else None
    asked = None if delivery.is_second_publish else marker
    waiting = delivery.envelope.waiting
    wanted = [
        LockRequest(
            name,
            options.ttl,
            wait,
            options.fence,
            claim.info,
            asked,
            delivery.owner,
            limit,
            None if waiting is None else waiting.since,
            delivery.was_woken,
            delivery.execution if waiting is not None and waiting.name == shorten(name) else None,
            ends,
        )
        for name, limit in claim.limits.items()
    ]
    lost = (lambda _held: on_lost()) if options.aborts_on_loss else None
    if len(wanted) == 1:
        held = locks.take(wanted[0], lost)
    else:
        all_held = locks.take_all(wanted, lost)
        held = all_held.pop(claim.name)
        held.others = tuple(all_held.values())
    if asked != marker:  # or this one could not be delivered again
        locks.mark(Marker(delivery.execution, DONE, 0.0))
    if waiting is not None:
        leave_line(claim, waiting.name)
    return held
