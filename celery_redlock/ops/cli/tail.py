"""``redlock tail``: what is skipped, rescheduled, lost, as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
from celery.bin.base import CeleryCommand

from celery_redlock.observers.journal import NODE_EVENTS, NOTABLE
from celery_redlock.ops.cli.command import finish, json_option, with_settings_while_read
from celery_redlock.ops.journal_lines import line
from celery_redlock.ops.screen import COLOURS, Stop, colour, stop_on_interrupt
from celery_redlock.ops.text import in_json
from celery_redlock.reading.journal import KEPT, JournalReader
from celery_redlock.reading.search import Search
from celery_redlock.reading.sentences import wording
from celery_redlock.settings import Settings
from celery_redlock.words import number

__all__ = ["tail"]

#: How often the nodes are asked [s].
LOOK_EVERY = 0.5
#: How much older than the oldest line so far a record may be that comes late [s]: clocks differ,
#: and a node that comes back has records that nobody asked for.
LATE = 10.0
#: Every event that there is in a journal.
EVENTS = [*(event.__name__ for event in (*NOTABLE, *NODE_EVENTS)), "Holds"]
EXAMPLES = f"""\b
Events:
  {", ".join(EVENTS[:4])},
  {", ".join(EVENTS[4:8])},
  {", ".join(EVENTS[8:12])},
  {", ".join(EVENTS[12:])}

\b
Examples:
  celery -A shop redlock tail
  celery -A shop redlock tail -n 100 --no-follow
  celery -A shop redlock tail --task 'shop.*' --event TaskSkipped
  celery -A shop redlock tail --json | jq -r .event

\b
JSON: one object per line: event, at (Unix time), host, pid, id, and the
fields of the event
"""


@click.command(
    cls=CeleryCommand, epilog=EXAMPLES, short_help="Follow what is skipped, rescheduled, lost."
)
@click.option("-n", "--lines", default=10, show_default=True, type=click.IntRange(min=0))
@click.option("--follow/--no-follow", default=True, help="Go on until Ctrl-C, the default.")
@click.option("--task", help="Only of tasks with this name; may have * and ?.")
@click.option("--lock", help="Only of locks with this name; may have * and ?.")
@click.option("--event", "events", multiple=True, help="Only this event; may be given repeatedly.")
@json_option
@with_settings_while_read
def tail(
    settings: Settings,
    *,
    lines: int,
    follow: bool,
    task: str | None,
    lock: str | None,
    events: tuple[str, ...],
    as_json: bool,
) -> None:
    """
    Follow the journal: what was skipped, rescheduled, refused, lost, and how the nodes fared.

    The journal is kept on the lock nodes, by every worker, beat and client whose
    redlock_observers have "journal". Old records make room for new ones.

    Exits with 0, after Ctrl-C, too.
    """
    wanted = Search(events=events, task=task, lock=lock).has_record
    tell = tell_json if as_json else tell_line
    reader = JournalReader(settings.nodes, settings.rules)
    try:
        with stop_on_interrupt() as stop:
            begun = time.time()
            recent = [record for record in reader.recent(KEPT) if wanted(record)]
            recent = recent[len(recent) - lines :] if lines < len(recent) else recent
            for record in recent:
                tell(record)
            if follow:
                oldest = min((number(record.get("at")) for record in recent), default=begun)
                follow_on(reader, stop, tell, lambda r: wanted(r) and is_new(r, oldest))
    finally:
        reader.close()
    finish(0)


Record = dict[str, Any]


def is_new(record: Record, oldest: float) -> bool:
    """Return whether *record* belongs behind those that were shown, the first of them *oldest*."""
    return number(record.get("at")) >= oldest - LATE


def follow_on(
    reader: JournalReader,
    stop: Stop,
    tell: Callable[[Record], None],
    wanted: Callable[[Record], bool],
) -> None:
    """Tell of what comes until the user wants no more."""
    while not stop.is_wanted:
        for record in reader.new():
            if wanted(record):
                tell(record)
        stop.wait(LOOK_EVERY)


def tell_json(record: Record) -> None:
    """Print a record as one line of JSON."""
    click.echo(in_json(record))


def tell_line(record: Record) -> None:
    """Print a record in plain words."""
    click.echo(colour(line(record), COLOURS[wording(record).mark]))
