"""
Records of the journal in plain words, one line each.

What is in a record comes from the nodes, where others may have written, too: nothing of it is
taken for granted, and no control character reaches the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from celery_redlock.ops.text import duration, one_line

__all__ = ["BAD", "ODD", "line", "moment", "number"]

Record = Mapping[str, Any]

#: Events after which something is broken, and after which something did not run when it should.
BAD = ("LeaseLost", "NodeDown", "NodeClockJump", "TaskRefused")
ODD = ("TaskSkipped", "TaskRescheduled", "TaskRetried", "SlotSkipped", "NodeQuarantined")

#: Larger than any number in a record of ours.
LARGEST = 1e12


def line(record: Record) -> str:
    """Return *record* as one line: when, and what happened."""
    event = str(record.get("event", "?"))
    words = LINES.get(event, anything)(record)
    return f"{moment(record.get('at'))}  {one_line(words)}"


def moment(at: object) -> str:
    """Return a moment [s, Unix time] in local time."""
    try:
        return datetime.fromtimestamp(number(at), timezone.utc).astimezone().strftime("%F %T")
    except (OverflowError, ValueError, OSError):  # a year that there is not
        return "?"


def number(value: object) -> float:
    """Return *value* if it is a number that one of ours may have written, else 0.0."""
    if isinstance(value, (int, float)) and -LARGEST < value < LARGEST:
        return float(value)
    return 0.0


# --- parts --------------------------------------------------------------------------------


def task(record: Record) -> str:
    return f"{record.get('task') or '?'}[{record.get('task_id') or '?'}]"


def lock(record: Record) -> str:
    return f"lock {record.get('name', '?')!r}"


def why(record: Record) -> str:
    """Return what a task was refused for."""
    if record.get("cause") != "conflict":
        return f"no quorum of lock nodes for {lock(record)}"
    holder = record.get("holder")
    return f"{lock(record)} is held by {who(holder, record.get('at'))}"


def who(holder: object, at: object) -> str:
    """Return *holder*, who was seen at the moment *at*, in plain words."""
    if not isinstance(holder, Mapping) or not holder:
        return "an unknown holder"
    told = [f"task {holder['task_id']}"] if "task_id" in holder else []
    told.append(f"process {holder.get('pid', '?')} on {holder.get('host', '?')}")
    if number(holder.get("since")):
        told.append(f"for {duration(max(0.0, number(at) - number(holder['since'])))} by then")
    return ", ".join(told)


def slot(record: Record) -> str:
    return f"slot {record.get('entry', '?')!r} of {moment(record.get('due'))}"


# --- events -------------------------------------------------------------------------------


def skipped(record: Record) -> str:
    return f"Skipped {task(record)}: {why(record)}"


def refused(record: Record) -> str:
    return f"Failed {task(record)}: {why(record)}"


def retried(record: Record) -> str:
    return f"Retry of {task(record)} in {number(record.get('countdown')):g} s: {why(record)}"


def rescheduled(record: Record) -> str:
    return (
        f"Put off {task(record)} for {number(record.get('countdown')):g} s, "
        f"{number(record.get('times')):g} times by now: {why(record)}"
    )


def duplicate(record: Record) -> str:
    merged = number(record.get("merged"))
    into = f", {merged:g} merged into the next run" if merged else ""
    return (
        f"Duplicate of {record.get('task') or '?'}[{record.get('holder_id', '?')}] at publish "
        f"({record.get('on_duplicate', '?')}): {lock(record)}{into}"
    )


def lost(record: Record) -> str:
    of = f" of {task(record)}" if record.get("task") else ""
    return f"Lost {lock(record)}{of} ({record.get('reason', '?')})"


def elected(record: Record) -> str:
    where = f"process {record.get('pid', '?')} on {record.get('host', '?')}"
    return f"Beat: {where} leads as {record.get('name', '?')!r}, term {record.get('fence')}"


def deposed(record: Record) -> str:
    where = f"process {record.get('pid', '?')} on {record.get('host', '?')}"
    led = duration(number(record.get("led")))
    return f"Beat: {where} leads no more ({record.get('reason', '?')}), after {led}"


#: Why a slot was skipped, in words.
SLOT_CAUSES = {
    "overlap": "the run of an earlier slot has not ended",
    "deadline": "too old to be made up for",
    "duplicate": "the task is queued or running already",
    "uncertain": "an earlier leader died while it published it",
}


def slot_skipped(record: Record) -> str:
    more = f" and all since {moment(record['since'])}" if number(record.get("since")) else ""
    cause = str(record.get("cause", "?"))
    return f"Beat: skipped {slot(record)}{more}: {SLOT_CAUSES.get(cause, cause)}"


def node(record: Record, words: str) -> str:
    seen_by = f"seen by process {record.get('pid', '?')} on {record.get('host', '?')}"
    return f"Node {record.get('node', '?')} {words} ({seen_by})"


def clock_jump(record: Record) -> str:
    return node(record, f"has set its clock by {number(record.get('jump')):+.1f} s")


def quarantined(record: Record) -> str:
    left = number(record.get("left"))
    return node(record, f"has lost its memory or is new: no vote for {left:.0f} s")


def holds(record: Record) -> str:
    counts = record.get("counts")
    times = sum(map(number, counts)) if isinstance(counts, list) else 0
    return (
        f"Held: {times:g} times by {record.get('task', '?')}, "
        f"up to {duration(number(record.get('longest')))} (ttl {number(record.get('ttl')):g} s)"
    )


def anything(record: Record) -> str:
    """Return what there is to say of an event that this version does not know."""
    known = ("name", "task", "task_id", "node", "entry", "reason", "cause")
    told = [f"{field} {record[field]}" for field in known if record.get(field)]
    return " ".join([str(record.get("event", "?")), *told])


#: Name of an event -> its words.
LINES: dict[str, Callable[[Record], str]] = {
    "TaskSkipped": skipped,
    "TaskRefused": refused,
    "TaskRetried": retried,
    "TaskRescheduled": rescheduled,
    "DuplicatePublished": duplicate,
    "LeaseLost": lost,
    "LeaderElected": elected,
    "LeaderDeposed": deposed,
    "SlotSkipped": slot_skipped,
    "NodeDown": lambda record: node(record, f"is down: {record.get('reason', '?')}"),
    "NodeUp": lambda record: node(record, "is up again"),
    "NodeQuarantined": quarantined,
    "NodeClockJump": clock_jump,
    "Holds": holds,
}
