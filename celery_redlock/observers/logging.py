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
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from celery_redlock import events
from celery_redlock.lock.records import since_of
from celery_redlock.log import get_logger, printable
from celery_redlock.observers.records import record_of

__all__ = ["log_event"]

logger = get_logger("celery_redlock")


def log_event(event: events.Event) -> None:
    """Write *event* to the logger ``celery_redlock``."""
    level, words = LINES.get(type(event), (logging.DEBUG, None))
    if isinstance(event, events.LockUnavailable) and event.task:
        level = logging.INFO  # what becomes of the task is said next
    if logger.isEnabledFor(level):
        line = repr(event) if words is None else words(event)
        extra = {"redlock": type(event).__name__, "redlock_event": fields_of(event)}
        logger.log(level, "%s", line, extra=extra)


def fields_of(event: events.Event) -> dict[str, Any]:
    """Return what is known of *event*, in one flat dict of plain values; no token."""
    told = record_of(event)
    del told["event"], told["at"], told["host"], told["pid"]  # a record has these by itself
    holder = told.pop("holder", {})
    if "name" in told:
        told["lock"] = told.pop("name")
    return {**told, **{f"holder_{key}": value for key, value in holder.items()}}


def who(holder: dict[str, Any]) -> str:
    """Return *holder* in plain words: task, host, process and since when."""
    if not holder:
        return "an unknown holder"
    # Anybody who may write to the nodes chose these words.
    told = [f"task {printable(holder['task_id'])}"] if "task_id" in holder else []
    told += [f"process {printable(holder.get('pid', '?'))} on {printable(holder.get('host', '?'))}"]
    since = since_of(holder)
    if since is not None:
        told.append(f"for {max(0.0, time.time() - since):.1f} s")
    return ", ".join(told)


def why(event: events.TaskEvent) -> str:
    """Return what *event* was refused for, in plain words."""
    cause = "no quorum of lock nodes"
    if event.cause == "conflict":
        cause = f"held by {who(event.holder)}"
    return f"lock {event.name!r}: {cause}"


def skipped(event: events.TaskSkipped) -> str:
    return f"Skipped task {event.task}[{event.task_id}]: {why(event)}"


def refused(event: events.TaskRefused) -> str:
    return f"Task {event.task}[{event.task_id}] fails: {why(event)}"


def retried(event: events.TaskRetried) -> str:
    return f"Task {event.task}[{event.task_id}] is retried in {event.countdown:g} s: {why(event)}"


def rescheduled(event: events.TaskRescheduled) -> str:
    return (
        f"Rescheduled task {event.task}[{event.task_id}] in {event.countdown:g} s "
        f"(attempt {event.times}): {why(event)}"
    )


def duplicate(event: events.DuplicatePublished) -> str:
    merged = f"; {event.merged} merged into the next run" if event.merged else ""
    return (
        f"Duplicate of task {event.task}[{event.holder_id}] at publish ({event.on_duplicate}): "
        f"lock {event.name!r}{merged}"
    )


def unavailable(event: events.LockUnavailable) -> str:
    told = ", ".join(f"{node}: {vote}" for node, vote in event.votes.items())
    return f"No quorum for lock {event.name!r} after {event.waited:.2f} s: {told}"


def quarantined(event: events.NodeQuarantined) -> str:
    return (
        f"Lock node {event.node} has lost its memory or is new, and does not vote for "
        f"{event.left:.0f} s; if no lock can be held now, 'celery -A APP redlock bootstrap' "
        "ends that at once"
    )


def deposed(event: events.LeaderDeposed) -> str:
    return f"Leads no more as {event.name!r} ({event.reason}), after {event.led:.1f} s"


def published(event: events.SlotPublished) -> str:
    late = f", {event.late:.1f} s late" if event.late >= 1.0 else ""
    return f"Published slot {slot(event)} as {event.task}[{event.task_id}]{late}"


#: What a slot was skipped for, in words.
SKIPPED = {
    "overlap": "the run of an earlier slot has not ended",
    "deadline": "too old to be made up for (redlock_beat_starting_deadline)",
    "duplicate": "the task is queued or running already",
    "uncertain": "an earlier leader died while it published it, and the task could not tell a copy",
}


def slot_skipped(event: events.SlotSkipped) -> str:
    more = f" and all since {moment(event.since)}" if event.since else ""
    return f"Skipped slot {slot(event)}{more}: {SKIPPED.get(event.cause, event.cause)}"


def slot(event: events.SlotEvent) -> str:
    return f"{event.entry!r} of {moment(event.due)}"


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


#: Level and words per event; what is not here is logged as it is, at DEBUG.
LINES: dict[type[events.Event], tuple[int, Callable[[Any], str]]] = {
    events.TaskSkipped: (logging.WARNING, skipped),
    events.TaskRefused: (logging.WARNING, refused),
    events.TaskRetried: (logging.WARNING, retried),
    events.TaskRescheduled: (logging.WARNING, rescheduled),
    events.DuplicatePublished: (logging.INFO, duplicate),
    events.LockUnavailable: (logging.WARNING, unavailable),
    events.LeaderElected: (logging.INFO, lambda e: f"Leads as {e.name!r}, term {e.fence}"),
    events.LeaderDeposed: (logging.INFO, deposed),
    events.SlotPublished: (logging.INFO, published),
    events.SlotSkipped: (logging.WARNING, slot_skipped),
    events.LeaseLost: (logging.ERROR, lambda e: f"Lock {e.name!r} is lost ({e.reason})"),
    events.NodeDown: (logging.WARNING, lambda e: f"Lock node {e.node} is down: {e.reason}"),
    events.NodeUp: (logging.INFO, lambda e: f"Lock node {e.node} is up"),
    events.NodeQuarantined: (logging.WARNING, quarantined),
    events.NodeClockJump: (
        logging.ERROR,
        lambda e: f"The clock of lock node {e.node} jumped by {e.jump:+.1f} s",
    ),
}
