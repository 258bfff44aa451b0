"""The options of a task that sets none, for tests of what is told of a task."""

from __future__ import annotations

from celery_redlock.task.options import LockOptions
from celery_redlock.task.policies import Reschedule, Skip

__all__ = ["OPTIONS"]

OPTIONS = LockOptions(
    ttl=30.0,
    wait=0.0,
    on_conflict=Skip(),
    on_unavailable=Reschedule(),
    aborts_on_loss=True,
    fence=True,
    min_hold=0.0,
    dedup_ttl=3600.0,
    stops_chain=True,
    unique_until=None,
    unique_for=3600.0,
    on_duplicate="join",
    overlap="skip",
)
