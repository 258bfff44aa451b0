"""
Report of what tasks did over a time, what was refused, and what to set.

It is made of the tallies on the nodes and of the options of the app's tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

from celery_redlock.configuration import spelling
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.rules import Rules
from celery_redlock.ops.advice import Advice, Watched, advise, entry_of, literal, too_short
from celery_redlock.reading.tally import TaskTally
from celery_redlock.reading.tally_reader import Tallies
from celery_redlock.task.base import RedlockTask, takes_lock
from celery_redlock.task.declared import classes_before
from celery_redlock.task.messages.broker import visibility_timeout
from celery_redlock.task.naming.task_lock import lock_of
from celery_redlock.task.options import OPTIONS, LockOptions
from celery_redlock.words import loss, newer_call, number, who

__all__ = ["Report", "TaskReport", "example_in_words", "report_of"]

PROTECT = "redlock_protect"
#: Cause -> in words, of a column.
CAUSES = {
    "conflict": "lock was held",
    "rate": "over its lock_rate",
    "deliveries": "started too often",
    "unavailable": "no quorum",
    "redelivered": "copy beside its run",
    "finished": "copy after its run",
    "unnamed": "arguments make no lock name, would fail",
    "duplicate": "duplicate at publish",
    "lost": "lock was lost",
    "debounced": "newer call of a burst",
}


@dataclass(frozen=True)
class TaskReport:
    name: str
    tally: TaskTally
    mode: str  # "report" (nothing was refused), "enforce" or "both"; "" if it only published
    advice: Sequence[Advice] = ()  # empty if it was watched for too short a time
    too_short: str = ""  # why there is no advice; "" if there is
    #: Options for redlock_protect; with left_out, what to change where they are now
    entry: Mapping[str, Any] | None = None
    #: Options of its own that cannot be written here; an entry would be without them
    left_out: Sequence[str] = ()
    #: Options of the entry that its code sets to something else, which would win
    in_code: Sequence[str] = ()

    @property
    def by_hand(self) -> list[str]:
        sentences = []
        if self.left_out and self.entry:
            sentences.append(
                f"Add {dict(self.entry)!r} to the options that redlock_protect has for it now: an "
                f"entry of its own would be without its {', '.join(self.left_out)}."
            )
        if self.in_code:
            options = ", ".join(self.in_code)
            sentences.append(f"Change {options} in its code, which wins over redlock_protect.")
        return sentences

    @property
    def refusals(self) -> dict[str, int]:
        """Cause -> how often something was or would have been refused; lost locks, too."""
        refused, reported = self.tally.refused, self.tally.reported
        causes = [cause for cause in CAUSES if cause in refused or cause in reported]
        return {cause: refused.get(cause, 0) + reported.get(cause, 0) for cause in causes}


@dataclass(frozen=True)
class Report:
    since: float  # from when on counts are included [s, Unix time]
    first: float  # when anything was first counted [s, Unix time]; 0.0 if nothing was
    watched: float  # how long something was counted [s]
    tasks: Sequence[TaskReport]  # who ran most often comes first
    nodes: int  # how many there are
    silent: Sequence[str]  # labels of those that did not answer
    setting: str = PROTECT  # what redlock_protect is called where the app reads its configuration
    has_setting: bool = False  # whether the app has one already

    @property
    def is_complete(self) -> bool:
        return self.nodes - len(self.silent) >= quorum(self.nodes)

    @property
    def entries(self) -> dict[str, Mapping[str, Any]]:
        return {it.name: it.entry for it in self.tasks if it.entry and not it.left_out}

    @property
    def protect(self) -> str:
        """The entries as the Python of ``redlock_protect``; "" if there is none."""
        return f"{{\n{self._lines}}}" if self.entries else ""

    @property
    def to_paste(self) -> tuple[str, str]:
        """Where to paste the entries, and what: no assignment, where it would drop all others."""
        if self.has_setting:
            return f"Ready to paste into {self.setting}, before what it has now", self._lines
        return "Ready to paste into the settings", f"{self.setting} = {self.protect}"

    @property
    def _lines(self) -> str:
        entries = self.entries.items()  # their keys are patterns
        return "".join(f"    {escape(name)!r}: {dict(entry)!r},\n" for name, entry in entries)


def report_of(
    app: Any, rules: Rules, tallies: Tallies, since: float, nodes: int, pattern: str | None = None
) -> Report:
    """
    Return the report of what *tallies* say since a moment [s, Unix time].

    *app* has its tasks loaded; None if nobody knows them. *pattern* of task names may have ``*``
    and ``?``.
    """
    length = tallies.last - tallies.first
    names = [it for it in tallies.tasks if pattern is None or fnmatchcase(it, pattern)]
    timeout = None if app is None else visibility_timeout(app)
    found = [
        task_report(name, watched_task(app, rules, name, tallies.tasks[name], timeout), length)
        for name in names
    ]
    setting = PROTECT if app is None else spelling(app, PROTECT)
    has_setting = app is not None and app.conf.get(PROTECT) is not None
    return Report(since, tallies.first, length, found, nodes, tallies.silent, setting, has_setting)


def watched_task(
    app: Any, rules: Rules, name: str, tally: TaskTally, timeout: float | None
) -> Watched:
    task = None if app is None else app.tasks.get(name)
    if task is None or not takes_lock(task):
        return Watched(tally, None, rules, timeout)
    options: LockOptions = lock_of(task).options
    own = {it: getattr(task, it) for it in OPTIONS if getattr(task, it) != getattr(RedlockTask, it)}
    return Watched(tally, options, rules, timeout, bool(task.acks_late), own, said_in_code(task))


def said_in_code(task: Any) -> set[str]:
    """Return the options that the code of *task* sets, or an annotation: they win over entries."""
    classes = classes_before(task, RedlockTask)
    if lock_of(task).is_named:
        classes = classes[1:]  # without the one that has the entry
    said = [*(vars(cls) for cls in classes), vars(task)]
    return {option for option in OPTIONS if any(it.get(option) is not None for it in said)}


def task_report(name: str, watched: Watched, length: float) -> TaskReport:
    tally = watched.tally
    refused = sum(tally.refused.values())
    why = too_short(length, tally.ran + refused)
    advice = [] if why else advise(watched)
    would_fail = "unnamed" in tally.reported
    changed = any(it.value is not None for it in advice) or (
        mode_of(tally) in {"report", "both"} and not would_fail
    )
    entry, left_out = entry_of(watched, advice) if changed and not why else ({}, [])
    plain = {it: literal(watched.own[it]) for it in watched.in_code if it in watched.own}
    in_code = [it for it in entry if it in watched.in_code and entry[it] != plain.get(it)]
    return TaskReport(name, tally, mode_of(tally), advice, why, entry, left_out, in_code)


def mode_of(tally: TaskTally) -> str:
    reports = bool(tally.reported or tally.ran_reported)
    enforces = bool(tally.refused or tally.ran > tally.ran_reported)
    return (
        "both" if reports and enforces else "report" if reports else "enforce" if enforces else ""
    )


def example_in_words(cause: str, record: Mapping[str, Any]) -> str:
    """Return who was refused, where, and by whom; what is in *record* is not trusted."""
    at, holder = record.get("at"), record.get("holder")
    place = f"process {record.get('pid', '?')} on {record.get('host', '?')}"
    task = f"task id {record['task_id']}, " if record.get("task_id") else ""
    because = {
        "conflict": f"lock {record.get('name')!r} was held by {who(holder, at)}",
        "redelivered": f"it ran already: {who(holder, at)}",
        "duplicate": f"task id {record.get('holder_id', '?')} was queued or running already",
        "debounced": newer_call(holder),
        "lost": loss(record.get("reason"), record.get("votes")),
    }.get(cause, CAUSES.get(cause, cause))
    return f"{task}{place}: {because}" if number(at) else f"{task}{place}"
