"""
What happened, in a sentence: one table for all that show events to a person.

It is made of the event's record (`celery_redlock.observers.records`), as the journal keeps it. So
the log, ``redlock tail``, the page and Grafana's annotations say the same of the same thing. What
is in a record may come from the nodes, where others may have written, too: nothing of it is
trusted. Whoever shows a sentence escapes control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from celery_redlock.words import LOSSES, duration, iso_moment, loss, number, votes_in_words, who

__all__ = ["WORDINGS", "Wording", "sentence", "wording"]

Record = Mapping[str, Any]


class Wording(NamedTuple):
    """
    How an event is worded.

    Attributes:
        word: One word or two, for a column.
        mark: ``"bad"`` if something is broken, ``"warn"`` if something did not go as it
            should, else ``"plain"``.
        what: What happened, and to whom.
        why: Why it did; "" where there is no more to say.
    """

    word: str
    mark: Literal["bad", "warn", "plain"]
    what: Callable[[Record], str]
    why: Callable[[Record], str] = lambda _: ""


def sentence(record: Record) -> str:
    """Return *record* in words."""
    worded = wording(record)
    what, why = worded.what(record), worded.why(record)
    return f"{what}: {why}" if why else what


def wording(record: Record) -> Wording:
    """Return how *record* is worded; an unknown event by its name and known fields."""
    event = record.get("event")
    name = event if isinstance(event, str) and event else "?"
    worded = WORDINGS.get(name, Wording(name, "plain", anything))
    return in_report(name, worded) if record.get("report") else worded


def in_report(name: str, worded: Wording) -> Wording:
    """Return how an event is worded by which nothing was refused."""
    what = REPORTED.get(name, worded.what)
    mark: Literal["warn", "plain"] = "warn" if name in REPORTED else "plain"
    return Wording(
        f"report: {worded.word}", mark, lambda it: f"{what(it)} (report mode)", worded.why
    )


# --- parts ---------------------------------------------------------------------------------


def text(record: Record, field: str) -> str:
    """Return a field as text; "?" if it is missing."""
    value = record.get(field)
    return "?" if value is None or value == "" else str(value)


def task(record: Record) -> str:
    return f"task {text(record, 'task')}[{text(record, 'task_id')}]"


def of_task(record: Record) -> str:
    """Return whose it was, if a task's."""
    return f" of {task(record)}" if record.get("task") else ""


def lock(record: Record) -> str:
    return f"lock {text(record, 'name')!r}"


def length(record: Record, field: str) -> str:
    return duration(number(record.get(field)))


def refusal(record: Record) -> str:
    """Return why a lock was not granted."""
    cause = record.get("cause")
    if cause == "finished":
        return "this execution has finished before"
    if cause == "unnamed":
        return "its arguments make no lock name"
    if cause in ("conflict", "redelivered"):
        again = "delivered again while it runs; " if cause == "redelivered" else ""
        return f"{again}{lock(record)} is held by {who(record.get('holder'), record.get('at'))}"
    return f"no quorum of lock nodes for {lock(record)}"


def slot(record: Record) -> str:
    return f"slot {text(record, 'entry')!r} of {iso_moment(record.get('due'))}"


def from_table(table: Mapping[str, str], field: str) -> Callable[[Record], str]:
    """Return what words *field* as *table* does, or as it is."""
    return lambda record: table.get(text(record, field), text(record, field))


# --- events --------------------------------------------------------------------------------


def acquired(record: Record) -> str:
    fence = record.get("fence")
    number_of_it = "" if fence is None else f", fence {fence}"
    after = length(record, "waited")
    if number(record.get("queued_for")):
        how = "woken" if record.get("was_woken") else "came by itself"
        after = f"{length(record, 'queued_for')} in the queue ({how})"
    return f"Acquired {lock(record)}{of_task(record)} after {after}{number_of_it}"


def unavailable(record: Record) -> str:
    whom = f" for {task(record)}" if record.get("task") else ""
    return f"No quorum for {lock(record)} after {length(record, 'waited')}{whom}"


def rescheduled(record: Record) -> str:
    again = f"{number(record.get('countdown')):g} s (attempt {number(record.get('times')):g})"
    return f"Rescheduled {task(record)} in {again}"


def queued(record: Record) -> str:
    return f"Queued {task(record)} (attempt {number(record.get('times')):g})"


def waiting(record: Record) -> str:
    count = number(record.get("count"))
    return f"{count:g} of task {text(record, 'task')} wait for their locks in this worker"


def duplicate(record: Record) -> str:
    merged = number(record.get("merged"))
    return f"{lock(record)}{f'; {merged:g} merged into the next run' if merged else ''}"


def published(record: Record) -> str:
    seconds = number(record.get("late"))
    late = f", {seconds:.1f} s late" if seconds >= 1 else ""
    return f"Published {slot(record)} as {task(record)}{late}"


def slot_skipped(record: Record) -> str:
    since = record.get("since")
    return f"Skipped {slot(record)}{f' and all since {iso_moment(since)}' if number(since) else ''}"


def measured(record: Record) -> str:
    took = f"{number(record.get('latency')) * 1000:.3g} ms"
    offset = f"{number(record.get('clock_offset')) * 1000:+.3g} ms"
    return f"Lock node {text(record, 'node')} answers in {took}, its clock differs by {offset}"


def anything(record: Record) -> str:
    """Return what is known of an event that this version does not know."""
    known = ("name", "task", "task_id", "node", "entry", "reason", "cause")
    parts = [f"{field} {record[field]}" for field in known if record.get(field)]
    return " ".join([text(record, "event"), *parts])


def lost(record: Record) -> str:
    return f"Lock {text(record, 'name')!r} is lost ({text(record, 'reason')}){by_task(record)}"


def why_lost(record: Record) -> str:
    return loss(text(record, "reason"), record.get("votes"))


def by_task(record: Record) -> str:
    """Return by whom something was lost, if by a task."""
    return f" by {task(record)}" if record.get("task") else ""


def duplicating(record: Record) -> str:
    """Return what a duplicate did, and of which task it is one."""
    did = DUPLICATES.get(text(record, "on_duplicate"), "was published beside")
    return f"{did} task {text(record, 'task')}[{text(record, 'holder_id')}]"


#: What a duplicate did, by its ``on_duplicate``.
DUPLICATES = {"join": "joined", "fail": "failed because of", "rerun": "asked for another run of"}
#: Name of an event -> what it says in report mode, where it has not happened.
REPORTED: dict[str, Callable[[Record], str]] = {
    "TaskSkipped": lambda it: f"Running {task(it)}, which would have been skipped",
    "TaskRefused": lambda it: f"Running {task(it)}, which would have failed",
    "TaskRetried": lambda it: f"Running {task(it)}, which would have been retried",
    "TaskRescheduled": lambda it: f"Running {task(it)}, which would have been rescheduled",
    "TaskQueued": lambda it: f"Running {task(it)}, which would have been queued",
    "LeaseLost": lambda it: (
        f"Lock {text(it, 'name')!r} would have been lost ({text(it, 'reason')}){by_task(it)}"
    ),
    "DuplicatePublished": lambda it: (
        f"Published task {text(it, 'task')}, which would have {duplicating(it)}"
    ),
}
#: Why a slot was skipped, in words.
SLOTS = {
    "overlap": "the run of an earlier slot has not ended",
    "deadline": "too old to be made up for (redlock_beat_starting_deadline)",
    "duplicate": "the task is queued or running already",
    "uncertain": "an earlier leader died while publishing it, and the task recognises no copy",
}
#: Why a term ended, in words.
TERMS = {
    "resigned": "it resigned",
    "failed": "its scheduler raised an error",
    "clock": "the clock of its machine is too far ahead",
    "deposed": "a newer leader was met",
    **LOSSES,
}

#: Name of an event -> its wording.
WORDINGS: dict[str, Wording] = {
    "LockAcquired": Wording("acquired", "plain", acquired),
    "LockConflict": Wording(
        "taken",
        "plain",
        lambda it: f"Refused {lock(it)}{of_task(it)} after {length(it, 'waited')}",
        lambda it: f"held by {who(it.get('holder'), it.get('at'))}",
    ),
    "LockUnavailable": Wording(
        "no quorum",
        "warn",
        unavailable,
        lambda it: votes_in_words(it.get("votes")),
    ),
    "LockRenewed": Wording(
        "renewed",
        "plain",
        lambda it: f"Renewed {lock(it)}{of_task(it)} with {length(it, 'margin')} left",
    ),
    "LockReleased": Wording(
        "released",
        "plain",
        lambda it: f"Released {lock(it)}{of_task(it)} after {length(it, 'held')}",
    ),
    "LeaseLost": Wording("lock lost", "bad", lost, why_lost),
    "TaskSkipped": Wording("skipped", "warn", lambda it: f"Skipped {task(it)}", refusal),
    "TaskRefused": Wording("failed", "bad", lambda it: f"Failed {task(it)}", refusal),
    "TaskRetried": Wording(
        "retried",
        "warn",
        lambda it: f"Retry of {task(it)} in {number(it.get('countdown')):g} s",
        refusal,
    ),
    "TaskRescheduled": Wording("rescheduled", "warn", rescheduled, refusal),
    "TaskQueued": Wording("queued", "plain", queued, refusal),
    "TasksWaiting": Wording("waiting", "plain", waiting),
    "DuplicatePublished": Wording(
        "duplicate",
        "plain",
        lambda it: f"A duplicate {duplicating(it)}",
        duplicate,
    ),
    "NodeDown": Wording(
        "node down",
        "bad",
        lambda it: f"Lock node {text(it, 'node')} is down",
        lambda it: str(it.get("reason") or ""),
    ),
    "NodeUp": Wording("node up", "plain", lambda it: f"Lock node {text(it, 'node')} is up"),
    "NodeQuarantined": Wording(
        "quarantine",
        "warn",
        lambda it: (
            f"Lock node {text(it, 'node')} is quarantined for {number(it.get('left')):.0f} s"
        ),
        lambda _: "it is new, or was restarted or wiped",
    ),
    "NodeClockJump": Wording(
        "clock jump",
        "bad",
        lambda it: (
            f"The clock of lock node {text(it, 'node')} jumped by {number(it.get('jump')):+.1f} s"
        ),
    ),
    "NodeMeasured": Wording("node measured", "plain", measured),
    "LeaderElected": Wording(
        "leads", "plain", lambda it: f"Leads as {text(it, 'name')!r}, term {text(it, 'fence')}"
    ),
    "LeaderDeposed": Wording(
        "no longer leads",
        "warn",
        lambda it: f"No longer leads as {text(it, 'name')!r}, after {length(it, 'led')}",
        from_table(TERMS, "reason"),
    ),
    "SlotPublished": Wording("slot published", "plain", published),
    "SlotSkipped": Wording("slot skipped", "warn", slot_skipped, from_table(SLOTS, "cause")),
}
