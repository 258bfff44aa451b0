"""``redlock ls``: who holds which lock, however many there are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, islice

import click

from celery_redlock.lock.lease import quorum
from celery_redlock.ops.cli.command import UNWELL, operator_command, settings_at_hand
from celery_redlock.ops.listing import LOCK_COLOURS, LOCK_HEAD, lock_as_json, lock_row, note_silent
from celery_redlock.ops.screen import Progress, Stop, is_terminal, stop_on_interrupt
from celery_redlock.ops.text import Columns, in_json, show_table
from celery_redlock.reading.all_locks import AllLocks
from celery_redlock.reading.search import scan_pattern
from celery_redlock.reading.stored import LockView

__all__ = ["ls"]

#: So many locks are sorted by name; more are printed as they come, so that they need no memory.
SORTED = 5000
EXAMPLES = """\b
Columns:
  VOTES     on how many nodes the lock is; with fewer than a majority
            it is an attempt under way, or what is left of one
  TTL LEFT  'never' is a key without an expiry, which nobody of ours has
            written: see 'redlock doctor' and 'redlock release'
  WAITING   how many wait for it: messages (on_conflict="queue" and
            unique_until), and whoever tries for lock_wait
  OLDEST    for how long the first of them has waited
  TOKEN     public part of the holder's token, for 'redlock release'

\b
Examples:
  celery -A shop redlock ls
  celery -A shop redlock ls invoice          names that contain 'invoice'
  celery -A shop redlock ls 'invoice:*'      names that begin with it
  celery -A shop redlock ls --json | jq '.locks[].task_id'

\b
JSON: locks[]: name, task_id, task, execution, host, pid, since, age, ttl
(null for never), votes[], held, fence, waiting, waiting_since, token,
foreign; down[]: nodes that could not be read; complete: whether these are all
"""


@operator_command("Who holds which lock.", EXAMPLES, only_prints=True)
@click.argument("pattern", required=False, metavar="[TEXT]")
@click.option("--limit", type=click.IntRange(min=1), help="Print so many at most; any of them.")
def ls(*, pattern: str | None, limit: int | None, as_json: bool) -> int:
    """
    List the live locks and who holds them.

    TEXT picks those whose name contains it; with one of * ? [ in it, those that it matches as a
    whole. Up to 5000 locks are sorted by name, more come as they are found.

    Exits with 0, or with 1 if no majority of nodes could be read: the list may have gaps.
    """
    settings = settings_at_hand()
    total = len(settings.nodes)
    locks = AllLocks(settings.nodes, settings.rules, scan_pattern(pattern or ""))
    with stop_on_interrupt() as stop:
        found = Found(locks, stop, limit)
        if as_json:
            print_json(found, total)
        else:
            print_text(found, total)
    note_silent(locks.silent)
    if not found.is_complete:
        click.echo("Note: these are not all.", err=True)
    return 0 if is_quorate(locks, total) and not stop.is_wanted else UNWELL


def is_quorate(locks: AllLocks, total: int) -> bool:
    """Return whether a majority of so many nodes could be read to the end for *locks*."""
    return total - len(locks.silent) >= quorum(total)


class Found:
    """
    Live locks until there are no more, enough, or the user wants no more.

    Attributes:
        locks: Where they come from.
        is_complete: Whether they were all.
    """

    def __init__(self, locks: AllLocks, stop: Stop, limit: int | None) -> None:
        self.locks = locks
        self.is_complete = True
        self._stop = stop
        self._limit = limit

    def __iter__(self) -> Iterator[LockView]:
        for count, lock in enumerate(self.locks):
            if self._stop.is_wanted or count == self._limit:
                self.is_complete = False
                return
            yield lock


def print_json(found: Found, total: int) -> None:
    """Print one JSON document, a lock per line, and end it properly whatever comes."""
    progress = Progress("locks read", is_wanted=not is_terminal(sys.stdout))
    click.echo('{"locks": [', nl=False)
    for count, lock in enumerate(found):
        line = in_json(lock_as_json(lock, total))
        click.echo(f"{',' if count else ''}\n  {line}", nl=False)
        progress.tell(count)
    progress.clear()
    silent = found.locks.silent
    rest = in_json({"down": silent, "complete": found.is_complete and not silent})
    click.echo(f"\n], {rest[1:]}")


def print_text(found: Found, total: int) -> None:
    """Print a sorted table of a few locks, or of many the first ones and then one by one."""
    progress, coming = Progress("locks read"), iter(found)
    first = []
    for lock in islice(coming, SORTED):
        first.append(lock)
        progress.tell(len(first))
    more = next(coming, None)
    progress.clear()
    if more is not None:
        rows = [LOCK_HEAD, *(lock_row(lock, total) for lock in (*first, more))]
        columns = Columns(rows, LOCK_COLOURS)
        for row in chain(rows, (lock_row(lock, total) for lock in coming)):
            click.echo(columns.line(row))
    elif first:
        rows = [lock_row(lock, total) for lock in sorted(first, key=lambda lock: lock.name)]
        show_table(LOCK_HEAD, rows, LOCK_COLOURS)
    elif is_quorate(found.locks, total):
        click.echo("No live locks.")
    else:
        click.echo("No majority of the nodes could be read: cannot tell whether any lock is held.")
