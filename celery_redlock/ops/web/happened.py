"""What the journal tells, in words: why a task did not run, what it lost, how nodes were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery_redlock.ops.web.rows import holder_row, sentence
from celery_redlock.ops.web.words import Moment, Text, moment, number, seconds, text_of

__all__ = ["Happening", "happening"]

Record = Mapping[str, Any]
#: Reason of a loss -> in words.
LOSSES = {
    "deadline": "the lease ended before it could be renewed",
    "stolen": "a majority of nodes no longer has its token: it was released by an operator, "
    "taken by another, or forgotten",
    "fork": "the process was forked",
    "released": "it was given back",
}


@dataclass(frozen=True)
class Happening:
    """
    One record of the journal.

    Attributes:
        at: When.
        what: In a word or two.
        mark: ``"bad"``, ``"warn"`` or ``"plain"``.
        name: Lock name, or the node or entry that it is about.
        task: Name of the task.
        task_id: Its id.
        host: Where it was written.
        pid: By which process.
        why: In a sentence.
    """

    at: Moment | None
    what: str
    mark: str
    name: Text
    task: Text
    task_id: Text
    host: Text
    pid: Text
    why: Text


def happening(record: Record, now: float) -> Happening:
    """Return *record* as it is shown at the time *now* [s, Unix time]."""
    kind = record.get("event")
    what, mark, why = KINDS.get(kind if isinstance(kind, str) else "", UNKNOWN)
    about = record.get("name") or record.get("node") or record.get("entry")
    return Happening(
        at=moment(record.get("at"), now),
        what=what or text_of(kind, 30).short or "?",
        mark=mark,
        name=text_of(about),
        task=text_of(record.get("task")),
        task_id=text_of(record.get("task_id"), 40),
        host=text_of(record.get("host"), 40),
        pid=text_of(record.get("pid"), 20),
        why=text_of(why(record), 400),
    )


def cause(record: Record) -> str:
    """Return why the lock was not to be had."""
    if record.get("cause") != "conflict":
        return "no quorum of lock nodes could decide"
    holder = record.get("holder")
    if not isinstance(holder, dict) or not holder:
        return "somebody else held the lock"
    # How long the holder had it when this was written, not by now.
    at = number(record.get("at"))
    return f"the lock was held by {sentence(holder_row(holder, at or 0.0))}"


def comes_again(record: Record) -> str:
    """Return when a task comes again, and why."""
    times = number(record.get("times"))
    often = f" (attempt {int(times)})" if times else ""
    return f"comes again in {seconds(record.get('countdown')) or '?'}{often}: {cause(record)}"


def duplicate(record: Record) -> str:
    """Return what became of a task that was there already."""
    merged = number(record.get("merged"))
    more = f"; {int(merged)} merged into the next run" if merged else ""
    return f"task {text_of(record.get('holder_id'), 40).short} was there first{more}"


def lost(record: Record) -> str:
    """Return why a lock was lost."""
    reason = text_of(record.get("reason"), 40).short
    return LOSSES.get(reason, reason)


def slot(record: Record) -> str:
    """Return why the task of a slot was not published."""
    reason = text_of(record.get("cause"), 40).short
    return SLOTS.get(reason, reason)


def term(record: Record) -> str:
    """Return how a term of a leader ended."""
    reason = text_of(record.get("reason"), 40).short
    return f"{reason}, after {seconds(record.get('led')) or '?'}"


def nothing(_: Record) -> str:
    """Return that there is no more to say."""
    return ""


SLOTS = {
    "overlap": "the run of an earlier slot has not ended",
    "deadline": "the slot is too old",
    "uncertain": "an earlier leader died while it published it",
    "duplicate": "the task is queued already",
}
Telling = tuple[str, str, Callable[[Record], str]]
UNKNOWN: Telling = ("", "plain", nothing)
#: Event -> in a word, how bad it is, and why it happened.
KINDS: dict[str, Telling] = {
    "TaskSkipped": ("skipped", "warn", cause),
    "TaskRefused": ("failed", "bad", cause),
    "TaskRetried": ("retried", "warn", comes_again),
    "TaskRescheduled": ("rescheduled", "warn", comes_again),
    "DuplicatePublished": ("duplicate", "plain", duplicate),
    "LeaseLost": ("lock lost", "bad", lost),
    "SlotSkipped": ("slot skipped", "warn", slot),
    "LeaderElected": ("leads", "plain", lambda _: "this scheduler publishes from now on"),
    "LeaderDeposed": ("leads no more", "warn", term),
    "NodeDown": ("node down", "bad", lambda it: text_of(it.get("reason"), 200).short),
    "NodeUp": ("node up", "plain", lambda _: "it answers again"),
    "NodeQuarantined": (
        "quarantine",
        "warn",
        lambda it: f"the node lost its memory; it votes again in {seconds(it.get('left')) or '?'}",
    ),
    "NodeClockJump": ("clock jump", "warn", lambda it: f"by {jump(it.get('jump'))}"),
}


def jump(value: Any) -> str:
    """Return by how much a clock was stepped, in words."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "?"
    return f"{'back ' if value < 0 else ''}{seconds(abs(value)) or '?'}"
