"""
Acquire the locks of an execution, and the places that count its start.

The locks come first, in the order of their names; then the place among the starts of its message
(``max_deliveries``) and those by its rates. All are granted, or none is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from celery_redlock.errors import (
    LockNotAcquired,
    LockTaken,
    QuorumUnavailable,
    RateExceeded,
    TooManyDeliveries,
)
from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.request import LockRequest, MarkerStands
from celery_redlock.lock.held import HeldLock, NotLocked
from celery_redlock.lock.records import RATE, STARTS, rate_name, shorten, starts_name
from celery_redlock.lock.scripts.requests import Marker
from celery_redlock.lock.waiting.waiting import MOST_PLACES
from celery_redlock.task.execution.begun import Finished, Granted, Refused
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.execution.outcome import DONE
from celery_redlock.task.execution.plan import Situation
from celery_redlock.task.execution.waiting_line import leave_line

__all__ = ["OnLost", "take"]

#: How long the start of a message is remembered [s]: for longer than brokers wait before they
#: deliver it again.
START_KEPT = 24 * 3600.0
#: What a body sees in place of a lock where only its rate is limited.
ONLY_RATE = "lock_limit is None: only the rate of its starts is limited"
#: Called when the lock is lost.
OnLost = Callable[[], None]


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
    except LockNotAcquired as error:
        return refusal(claim, error)
    if claim.delivery.envelope.waiting is not None:
        leave_line(claim, claim.delivery.envelope.waiting.name)
    return Granted(claim, held, None if isinstance(held, NotLocked) else held)


def refusal(claim: Claim, error: LockNotAcquired) -> Refused:
    """Return that *claim* was refused, and its situation, by what was asked for."""
    if not isinstance(error, LockTaken):
        return Refused(claim, error, Situation.UNAVAILABLE)
    if error.name.endswith(STARTS):
        who = claim.task.name, str(claim.request.id), claim.options.max_deliveries or 0
        return Refused(claim, TooManyDeliveries(*who), Situation.TOO_OFTEN)
    if error.name.endswith(RATE):
        name = next(name for name in claim.rates if rate_name(name) == error.name)
        exceeded = RateExceeded(name, error.votes, error.holder)
        return Refused(claim, exceeded, Situation.OVER_RATE)
    is_own = error.holder.get("execution") == claim.delivery.execution
    if is_own and not claim.delivery.may_be_repeated:
        claim = claim.of_second_publish()
    return Refused(claim, error, Situation.TAKEN)


def acquire(claim: Claim, wait: float, on_lost: OnLost, ends: float | None) -> HeldLock:
    """Acquire what `requests_for` asks for; return the lock, or what stands in for it."""
    options, delivery, locks = claim.options, claim.delivery, claim.locks
    marker = delivery.execution if options.dedup_ttl else None
    asked = None if delivery.is_second_publish else marker
    wanted = requests_for(claim, wait, asked, ends)
    lost = (lambda _held: on_lost()) if options.aborts_on_loss else None
    if len(wanted) == 1 and not wanted[0].stands:
        held = locks.take(wanted[0], lost)
    else:
        try:
            granted = locks.take_all(wanted, lost)
        except QuorumUnavailable as error:
            if not error.name.endswith(STARTS):
                raise
            # In doubt it runs: who cannot be counted was not started too often.
            granted = locks.take_all([one for one in wanted if one.name != error.name], lost)
        claim.starts = {name: granted[name] for name in granted if name not in claim.limits}
        all_held = {name: granted[name] for name in granted if name in claim.limits}
        if not all_held:
            return NotLocked(claim.name, ONLY_RATE, clock.wall())
        held = all_held.pop(claim.name)
        held.others = tuple(all_held.values())
    if asked != marker:  # or this one could not be delivered again
        locks.mark(Marker(delivery.execution, DONE, 0.0))
    return held


def requests_for(
    claim: Claim, wait: float, marker: str | None, ends: float | None
) -> list[LockRequest]:
    """Return the requests for the locks of an execution, and last for its start."""
    options, delivery = claim.options, claim.delivery
    waiting = delivery.envelope.waiting
    looks_at = MOST_PLACES if delivery.is_redelivered and options.is_by_call else 0

    def request(name: str, limit: int) -> LockRequest:
        is_waited_for = waiting is not None and waiting.name == shorten(name)
        return LockRequest(
            name,
            options.ttl,
            wait,
            options.fence,
            claim.info,
            marker,
            delivery.owner,
            limit,
            None if waiting is None else waiting.since,
            delivery.was_woken,
            delivery.execution if is_waited_for else None,
            ends,
            looks_at=looks_at,
        )

    wanted = [request(name, limit) for name, limit in claim.limits.items()]
    if claim.counts_deliveries and options.max_deliveries:
        one = start_of(request(starts_name(delivery.execution), options.max_deliveries))
        wanted.append(replace(one, ttl=START_KEPT, wait=0.0))
    for name, rate in claim.rates.items():
        one = start_of(request(rate_name(name), rate.burst))
        wanted.append(replace(one, ttl=rate.stands_for, within=rate.within))
    return wanted


def start_of(one: LockRequest) -> LockRequest:
    """Return *one* as the request for a place that counts a start, and nobody writes with."""
    return replace(one, fence=False, marker=None, stands=True, looks_at=0)
