"""Report of what tasks did and of what to set: ``redlock report``."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import click

from celery_redlock.ops.cli.command import UNWELL, app_at_hand, operator_command, settings_at_hand
from celery_redlock.ops.listing import local_time, note_silent
from celery_redlock.ops.loading import load_tasks
from celery_redlock.ops.report import CAUSES, Report, TaskReport, example_in_words, report_of
from celery_redlock.ops.text import LONGEST, one_line, paragraph, show_json, show_table
from celery_redlock.reading.holds import Holds
from celery_redlock.reading.tally import HOUR, RETENTION
from celery_redlock.reading.tally_reader import TallyReader
from celery_redlock.words import duration

__all__ = ["report"]

#: Unit -> its length [s].
UNITS = {"m": 60.0, "h": HOUR, "d": 24 * HOUR}
HEAD = ("TASK", "MODE", "RAN", "REFUSED", "HELD 50 %", "99 %", "LONGEST", "TTL")
#: What a narrow terminal can do without.
SPARE = ("TTL", "HELD 50 %", "MODE")
EXAMPLES = """\b
Examples:
  celery -A shop redlock report
  celery -A shop redlock report --since 7d --task 'shop.*'
  celery -A shop redlock report --json | jq '.tasks[] | {task, refused}'

\b
JSON: since, first (Unix times), watched (seconds), silent[]; tasks[]:
task, mode (report, enforce, both), ran, refused and reported (a count for
each cause: conflict, unavailable, redelivered, finished, unnamed,
duplicate, lost, debounced),
examples (a record for each cause), holds: count, mean, p50, p99, longest,
ttl; too_short, advice[]: option, text, value; entry, left_out[], in_code[];
redlock_protect: all entries as Python
"""


class Length(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """A length of time: a number with m, h or d."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        found = re.fullmatch(r"([0-9]{1,6})([mhd])", str(value))
        if isinstance(value, float):
            return value
        if found is None or not int(found[1]):
            self.fail("it is no time like 30m, 24h or 7d", param, ctx)
        return int(found[1]) * UNITS[found[2]]


@operator_command("What was refused, and what to set.", EXAMPLES)
@click.option(
    "--since",
    type=Length(),
    default="24h",
    show_default=True,
    help="How far back, in whole hours: 6h, 24h; at most 7d.",
)
@click.option("--task", help="Only of tasks with this name; may have * and ?.")
def report(*, since: float, task: str | None, as_json: bool) -> int:
    """
    Say what each task did: runs, refusals and why, lengths of holds; and what to set, with figures.

    In report mode (redlock_mode) nothing is refused: these are what would have been. Every
    process whose redlock_observers have "journal" counts, and sends its counts some seconds
    later. An execution that waits and is refused again and again counts once.

    Exits with 0, or with 1 if no quorum of nodes could be read.
    """
    settings, app = settings_at_hand(), app_at_hand()
    load_tasks(app)
    now = time.time()
    begin = max(now - since, now - RETENTION)
    tallies = TallyReader(settings.nodes, settings.rules).read(begin, now)
    found = report_of(app, settings.rules, tallies, begin, len(settings.nodes), task)
    show_json(as_plain(found)) if as_json else show(found)
    note_silent(found.silent)
    return 0 if found.is_complete else UNWELL


# --- as text -------------------------------------------------------------------------------


def show(found: Report) -> None:
    if not found.tasks:
        if found.is_complete:
            click.echo("Nothing was counted: no task took a lock, or none of this name.")
        return
    click.echo(f"Watched for {duration(found.watched)}, since {local_time(found.first)}.\n")
    show_table(HEAD, [row(it) for it in found.tasks], spare=SPARE)
    for it in found.tasks:
        show_task(it)
    if found.protect:
        where, entries = found.to_paste
        click.echo(f"\n{where}:\n\n{entries.rstrip()}")


def row(task: TaskReport) -> tuple[str, ...]:
    holds, refused = task.tally.holds, sum(task.refusals.values())
    times = (holds.quantile(0.5), holds.quantile(0.99), holds.longest, holds.ttl)
    lengths = [duration(it) if holds.count and it else "" for it in times]
    name = one_line(task.name, LONGEST)
    return (name, task.mode, str(task.tally.ran), str(refused or ""), *lengths)


def show_task(task: TaskReport) -> None:
    click.echo(f"\n{one_line(task.name, LONGEST)}")
    for cause, count in task.refusals.items():
        reported = task.tally.reported.get(cause, 0)
        only = "" if not reported else " (reported only)"
        if reported and reported < count:
            only = f" ({reported} reported only)"
        say(f"{count} x {CAUSES[cause]}{only}")
        record = task.tally.examples.get(cause)
        if record:
            say(f"last {local_time(record.get('at'))}: {example_in_words(cause, record)}", 4)
    if not task.refusals:
        say("Nothing was refused.")
    if task.too_short:
        say(task.too_short)
    for advice in task.advice:
        say(advice.text)
    for sentence in task.by_hand:
        say(sentence)


def say(text: str, indent: int = 2) -> None:
    click.echo(paragraph(text, " " * indent, " " * (indent + 2)))


# --- as JSON -------------------------------------------------------------------------------


def as_plain(found: Report) -> dict[str, Any]:
    return {
        "since": found.since,
        "first": found.first or None,
        "watched": found.watched,
        "silent": list(found.silent),
        "tasks": [task_as_plain(it) for it in found.tasks],
        "redlock_protect": found.protect,
    }


def task_as_plain(task: TaskReport) -> dict[str, Any]:
    tally = task.tally
    return {
        "task": task.name,
        "mode": task.mode,
        "ran": tally.ran,
        "refused": dict(tally.refused),
        "reported": dict(tally.reported),
        "examples": {cause: dict(record) for cause, record in tally.examples.items()},
        "holds": holds_as_plain(tally.holds),
        "too_short": task.too_short,
        "advice": [vars(it) for it in task.advice],
        "entry": dict(task.entry or {}),
        "left_out": list(task.left_out),
        "in_code": list(task.in_code),
    }


def holds_as_plain(holds: Holds) -> Mapping[str, float]:
    return {
        "count": holds.count,
        "mean": holds.total / holds.count if holds.count else 0.0,
        "p50": holds.quantile(0.5),
        "p99": holds.quantile(0.99),
        "longest": holds.longest,
        "ttl": holds.ttl,
    }
