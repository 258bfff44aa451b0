"""Events of a lock: refused, granted, renewed, released."""

from __future__ import annotations

from typing import Any

from celery_redlock.errors import LockNotAcquired, LockTaken, QuorumUnavailable
from celery_redlock.events import (
    Event,
    LeaseLost,
    LockAcquired,
    LockConflict,
    LockReleased,
    LockRenewed,
    LockUnavailable,
)
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import Lease

__all__ = ["of_grant", "of_refusal", "of_release", "of_renewal", "who"]


def who(info: dict[str, Any]) -> dict[str, Any]:
    return {field: info[field] for field in ("task", "task_id") if field in info}


def of_refusal(error: LockNotAcquired, info: dict[str, Any], waited: float) -> Event:
    if isinstance(error, LockTaken):
        return LockConflict(error.name, error.holder, waited, **who(info))
    ends = error.retry_after if isinstance(error, QuorumUnavailable) else None
    return LockUnavailable(error.name, error.votes, waited, retry_after=ends, **who(info))


def of_grant(lease: Lease, request: LockRequest, waited: float) -> Event:
    event, since = who(request.info), request.queued_since
    if since is not None:
        event["queued_for"] = max(0.0, lease.since - since)
        event["was_woken"] = request.was_woken
    return LockAcquired(request.name, lease.fence, waited, **event)


def of_renewal(held: HeldLock, margin: float | None) -> Event:
    """Return the event of a renewal in time, by a margin [s]; None: it is lost."""
    whose = who(held.lease.info)
    if margin is None:
        loss = held.loss()
        return LeaseLost(held.name, loss.reason, votes=loss.votes, **whose)
    return LockRenewed(held.name, margin, ttl=held.ttl, lag=held.lag, **whose)


def of_release(lease: Lease, held: float, lost: str = "") -> Event:
    return LockReleased(lease.name, held, ttl=lease.ttl, lost=lost, **who(lease.info))
