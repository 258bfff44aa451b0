"""
The observer that is on by default: one log record per thing an operator wants to read.

Every record has two attributes beside its prose, for whoever counts or stores records: ``redlock``,
the name of the event, and ``redlock_event``, a flat dict of what is known: ``lock``, ``task``,
``task_id``, ``cause``, ``holder_task_id``, ``holder_host``, ``holder_pid``, ``holder_since`` [s,
Unix time] and the other fields of the event.

A task that is refused its lock is one line at WARNING, which says what becomes of it and who holds
the lock. What led to it is at INFO, grants and releases are at DEBUG.
"""

from __future__ import annotations

import logging
from typing import Any

from celery_redlock import events
from celery_redlock.log import get_logger
from celery_redlock.observers.records import record_of
from celery_redlock.reading.sentences import sentence

__all__ = ["log_event"]

logger = get_logger("celery_redlock")

#: What is not here is at DEBUG.
LEVELS: dict[type[events.Event], int] = {
    events.TaskSkipped: logging.WARNING,
    events.TaskRefused: logging.WARNING,
    events.TaskRetried: logging.WARNING,
    events.TaskRescheduled: logging.WARNING,
    events.DuplicatePublished: logging.INFO,
    events.LockUnavailable: logging.WARNING,
    events.LeaderElected: logging.INFO,
    events.LeaderDeposed: logging.INFO,
    events.SlotPublished: logging.INFO,
    events.SlotSkipped: logging.WARNING,
    events.LeaseLost: logging.ERROR,
    events.NodeDown: logging.WARNING,
    events.NodeUp: logging.INFO,
    events.NodeQuarantined: logging.WARNING,
    events.NodeClockJump: logging.ERROR,
}


def log_event(event: events.Event) -> None:
    """Write *event* to the logger ``celery_redlock``."""
    level = LEVELS.get(type(event), logging.DEBUG)
    if isinstance(event, events.LockUnavailable) and event.task:
        level = logging.INFO  # what becomes of the task is said next
    if logger.isEnabledFor(level):
        record = record_of(event)
        extra = {"redlock": record["event"], "redlock_event": fields_of(record)}
        logger.log(level, "%s", sentence(record), extra=extra)


def fields_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of an event, in one flat dict of plain values; no token."""
    told = dict(record)
    del told["event"], told["at"], told["host"], told["pid"]  # a log record has these by itself
    holder = told.pop("holder", {})
    if "name" in told:
        told["lock"] = told.pop("name")
    return {**told, **{f"holder_{key}": value for key, value in holder.items()}}
