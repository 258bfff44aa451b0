"""
Leadership: whoever holds a lock leads, until the lock is lost or given up.

    wait for the lock, for good --> a term: the held lock, renewed --> lost --> wait again

Beat has an election of its own: its scheduler looks in between two ticks, and may not wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta

from celery_redlock.events import LeaderDeposed
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.locks import Locks

__all__ = ["request_to_lead", "resign"]


def request_to_lead(locks: Locks, name: str, ttl: float | timedelta | None) -> LockRequest:
    """Return the request of one who waits for good; its terms are numbered by the fence."""
    seconds = locks.rules.ttl if ttl is None else locks.rules.check_ttl(ttl)
    return LockRequest(name, seconds, math.inf, fence=True)


def resign(locks: Locks, held: HeldLock, give_back: Callable[[HeldLock], None]) -> None:
    """Give up the leadership, and tell observers of the end of the term."""
    reason = held.lost_reason or "resigned"
    give_back(held)
    if reason != "fork":  # the parent leads on
        locks.notify(LeaderDeposed(held.name, reason, held.held_for))
