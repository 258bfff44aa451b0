"""
Parts of the sentences that events are told in.

They are made of the event's record (`celery_redlock.observers.records`), as the journal keeps it.
What is in a record may come from the nodes, where others may have written, too: nothing of it is
trusted. Whoever shows a sentence escapes control characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_redlock.words import duration, iso_moment, number, who

__all__ = [
    "Record",
    "by_task",
    "held_by",
    "length",
    "lock",
    "of_task",
    "reason_in",
    "refusal",
    "slot",
    "task",
    "text",
]

Record = Mapping[str, Any]


def text(it: Record, field: str) -> str:
    """Return a field as text; "?" if it is missing."""
    value = it.get(field)
    return "?" if value is None or value == "" else str(value)


def task(it: Record) -> str:
    """Return which task it was."""
    return f"task {text(it, 'task')}[{text(it, 'task_id')}]"


def of_task(it: Record) -> str:
    """Return whose it was, if a task's."""
    return f" of {task(it)}" if it.get("task") else ""


def by_task(it: Record) -> str:
    """Return by whom something was lost, if by a task."""
    return f" by {task(it)}" if it.get("task") else ""


def lock(it: Record) -> str:
    """Return which lock it was."""
    return f"lock {text(it, 'name')!r}"


def slot(it: Record) -> str:
    """Return which slot it was."""
    return f"slot {text(it, 'entry')!r} of {iso_moment(it.get('due'))}"


def length(it: Record, field: str) -> str:
    """Return a field as a length of time."""
    return duration(number(it.get(field)))


def held_by(it: Record) -> str:
    """Return who holds the lock."""
    return f"held by {who(it.get('holder'), it.get('at'))}"


def refusal(it: Record) -> str:
    """Return why a lock was not granted."""
    cause = it.get("cause")
    if cause == "finished":
        return "this execution has finished before"
    if cause == "unnamed":
        return "its arguments make no lock name"
    if cause in ("conflict", "redelivered"):
        again = "delivered again while it runs; " if cause == "redelivered" else ""
        return f"{again}{lock(it)} is {held_by(it)}"
    return f"no quorum of lock nodes for {lock(it)}"


def reason_in(table: Mapping[str, str], it: Record, field: str) -> str:
    """Return what words a field as *table* does, or the field as it is."""
    return table.get(text(it, field), text(it, field))
