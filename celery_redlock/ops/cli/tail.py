"""``redlock tail``: events of the journal, as they happen."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from typing import Any

import click

from celery_redlock.events import kinds_in
from celery_redlock.ops.cli.command import operator_command, settings_at_hand
from celery_redlock.ops.listing import line, note_silent
from celery_redlock.ops.screen import COLOURS, colour, stop_on_interrupt
from celery_redlock.ops.text import in_json
from celery_redlock.reading.journal import KEPT, JournalReader
from celery_redlock.reading.search import Search
from celery_redlock.reading.sentences import wording
from celery_redlock.words import number

__all__ = ["tail"]

#: How often the nodes are asked [s].
LOOK_EVERY = 0.5
#: How much older than the oldest line so far a record may be that comes late [s]: clocks differ,
#: and a node that comes back has records that nobody asked for.
LATE = 10.0
#: Every event that there is in a journal.
EVENTS = kinds_in("refused", "beat", "granted", "nodes")
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


@operator_command("Follow what is skipped, rescheduled, lost.", EXAMPLES, only_prints=True)
@click.option("-n", "--lines", default=10, show_default=True, type=click.IntRange(min=0))
@click.option("-f", "--follow/--no-follow", default=True, help="Go on until Ctrl-C, the default.")
@click.option("--task", help="Only of tasks with this name; may have * and ?.")
@click.option("--lock", help="Only of locks with this name; may have * and ?.")
@click.option(
    *("--event", "events"),
    type=click.Choice(EVENTS),
    metavar="TEXT",
    multiple=True,
    help="Only this event; may be given repeatedly.",
)
def tail(
    *,
    lines: int,
    follow: bool,
    task: str | None,
    lock: str | None,
    events: tuple[str, ...],
    as_json: bool,
) -> int:
    """
    Follow the journal: what was skipped, rescheduled, refused, lost, and how the nodes fared.

    Of grants (LockAcquired) it has those to tasks that had queued, and whether they were woken.
    The journal is kept on the lock nodes, by every worker, beat and client whose
    redlock_observers have "journal". Old records make room for new ones.

    Exits with 0, after Ctrl-C, too.
    """
    settings, wanted = settings_at_hand(), Search(events=events, task=task, lock=lock).has_record
    reader = JournalReader(settings.nodes, settings.rules)
    with contextlib.closing(reader), stop_on_interrupt() as stop:
        begun = time.time()
        recent = [record for record in reader.recent(KEPT) if wanted(record)]
        recent = recent[max(0, len(recent) - lines) :]
        for record in recent:
            show(record, as_json=as_json)
        note_silent(reader.silent)
        since = min((number(record.get("at")) for record in recent), default=begun) - LATE
        while follow and not stop.is_wanted and has_reader():
            for record in reader.new():
                if wanted(record) and number(record.get("at")) >= since:
                    show(record, as_json=as_json)
            stop.wait(LOOK_EVERY)
    return 0


def has_reader() -> bool:
    """Return whether somebody may read the output: without news no write would tell."""
    if sys.stdout is None or not hasattr(select, "poll"):
        return True
    poll = select.poll()
    try:
        poll.register(sys.stdout, 0)  # what is left is that its reader is gone
    except (OSError, ValueError):  # none of the system's
        return True
    return not poll.poll(0)


def show(record: dict[str, Any], *, as_json: bool) -> None:
    text = in_json(record) if as_json else colour(line(record), COLOURS[wording(record).mark])
    click.echo(text)
