"""
Parts of the sentences that describe events.

They are made of the event's record (`celery_redlock.observers.records`), as the journal keeps it.
What is in a record may come from the nodes, where others may have written, too: nothing of it is
trusted. Whoever shows a sentence escapes control characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_redlock.words import duration, iso_moment, newer_call, number, who

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
    return f"task {text(it, 'task')}[{text(it, 'task_id')}]"


def of_task(it: Record) -> str:
    return f" of {task(it)}" if it.get("task") else ""


def by_task(it: Record) -> str:
    return f" by {task(it)}" if it.get("task") else ""


def lock(it: Record) -> str:
    return f"lock {text(it, 'name')!r}"


def slot(it: Record) -> str:
    return f"slot {text(it, 'entry')!r} of {iso_moment(it.get('due'))}"


def length(it: Record, field: str) -> str:
    return duration(number(it.get(field)))


def held_by(it: Record) -> str:
    return f"held by {who(it.get('holder'), it.get('at'))}"


def refusal(it: Record) -> str:
    held = f"{lock(it)} is {held_by(it)}"
    words = {
        "finished": "this execution has finished before",
        "debounced": newer_call(it.get("holder")),
        "unnamed": "its arguments make no lock name",
        "rate": f"{lock(it)} has as many starts as its lock_rate allows",
        "deliveries": "its message was started as often as max_deliveries allows",
        "conflict": held,
        "redelivered": f"delivered again while it runs; {held}",
    }
    return words.get(text(it, "cause"), f"no quorum of lock nodes for {lock(it)}")


def reason_in(table: Mapping[str, str], it: Record, field: str) -> str:
    """Return the words of *table* for a field, or the field as it is."""
    return table.get(text(it, field), text(it, field))
