"""
Ask for the locks of an execution: all of its names, or none.

    begin --> Granted     it runs under its lock, or under what stands in for one
          --> Finished    it has finished before, or may have
          --> Superseded  a newer call has come, of a debounced task
          --> Refused     another one holds the lock, or no quorum could decide
"""

from __future__ import annotations

from celery_redlock.lock import clock
from celery_redlock.lock.held import NotLocked
from celery_redlock.lock.records import place_name
from celery_redlock.plugin import locking
from celery_redlock.process.log import get_logger
from celery_redlock.task.execution.begun import (
    Begun,
    Finished,
    Granted,
    Refused,
    Superseded,
    holder_in,
)
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.execution.plan import Situation
from celery_redlock.task.execution.take import OnLost, take
from celery_redlock.task.policies import RunUnlocked
from celery_redlock.unique.bursts import Bursts, Call

__all__ = ["begin", "has_previous"]

logger = get_logger(__name__)

#: How long to wait for the task's previous execution to release the lock [s].
PREVIOUS_GRACE = 2.0


def begin(claim: Claim, outer: Granted | None, on_lost: OnLost) -> Begun:
    """Ask for the lock of *claim*; *outer* has begun whose body called ``apply()``, if any."""
    if locking.disabled:
        return unlocked(claim, "locks are disabled in this process")
    if outer is not None and has_replaced(claim, outer):
        return Granted(claim, outer.held)
    if claim.delivery.envelope.debounced:
        newest = superseded_by(claim)
        if newest is not None:
            return Superseded(claim, newest)
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


def superseded_by(claim: Claim) -> str | None:
    envelope = claim.delivery.envelope
    call = Call(str(envelope.publish_id), envelope.debounced)
    return Bursts.on(claim.locks).superseded_by(claim.name, call, claim.delivery.execution)


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


def has_previous(refused: Refused, ends: float | None = None) -> bool:
    """
    Return whether the execution before this one has the lock, or one of its places.

    Args:
        refused: Because it is taken.
        ends: Wait for no answer after that [s, our clock]; None for no such limit.
    """
    claim, name = refused.claim, refused.line
    delivery, holders = claim.delivery, [holder_in(refused)]
    limit = claim.limits[name]
    if limit > 1 and delivery.may_have_previous:
        places = [place_name(name, place) for place in range(limit)]
        asked = claim.locks.inspect_all(places, ends)
        holders += [view.holder for views in asked for view in views]
    return any(map(delivery.is_previous_execution, holders))
