"""``redlock ls``: the live locks and their holders, however many there are."""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import click

from celery_redlock.lock.lease import quorum
from celery_redlock.ops.as_json import lock_as_json, reserved_as_json
from celery_redlock.ops.cli.command import UNWELL, operator_command, settings_at_hand
from celery_redlock.ops.cli.watch import WATCH, watch
from celery_redlock.ops.listing import (
    LOCK_COLOURS,
    LOCK_HEAD,
    LOCK_SPARE,
    RESERVATION_HEAD,
    lock_row,
    note_silent,
    reservation_row,
)
from celery_redlock.ops.screen import Progress, Stop, is_terminal, stop_on_interrupt
from celery_redlock.ops.text import Columns, in_json, one_line, show_table
from celery_redlock.reading.all_locks import AllLocks, AllReservations, Everywhere
from celery_redlock.reading.search import need, scan_pattern
from celery_redlock.settings import Settings
from celery_redlock.words import counted

__all__ = ["ls"]

#: So many locks are sorted by name; more are printed as they come, so that they need no memory.
SORTED = 5000
#: For how long locks are counted of which none was asked for [s].
LONGEST_COUNT = 5.0
#: For how long locks are read that are drawn again each second [s]; of more, some are left out.
LONGEST_LOOK = 1.0
EXAMPLES = """\b
Columns:
  VOTES     on how many nodes the lock is; with fewer than a majority
            it is an attempt under way, or what is left of one
  TTL LEFT  'never' is a key without an expiry, which nobody of ours has
            written: see 'redlock doctor' and 'redlock release'
  WAITING   how many wait for it: messages (on_conflict="queue" and
            unique_until), and whoever tries for lock_wait
  OLDEST    for how long the first of them has waited
  NAME#rate is a start that counts for the lock_rate of NAME: it stands
            for TTL LEFT, however its task has ended
  TOKEN     public part of the holder's token, for 'redlock release'

\b
Examples:
  celery -A shop redlock ls
  celery -A shop redlock ls invoice          names that contain 'invoice'
  celery -A shop redlock ls 'invoice:*'      names that begin with it
  celery -A shop redlock ls --reserved       names reserved at publish
  celery -A shop redlock ls --watch --limit 20
                                             the first 20, drawn again each second
  celery -A shop redlock ls --json | jq '.locks[].task_id'

\b
JSON: locks[]: name, task_id, task, execution, host, pid, since, age, ttl
(null for never), votes[], held, fence, waiting, waiting_since, token,
foreign; down[]: nodes that could not be read; complete: whether these are all;
with --reserved in place of locks[]: reserved[]: name, task_id, task, host,
pid, since, running, ended, debounced, left, merged, token, votes[], reserved
(by a majority)
"""


class Listed(NamedTuple):
    key: str  # in JSON
    source: type[Everywhere[Any]]  # goes through all
    head: tuple[str, ...]  # of the table
    row: Callable[[Any, int], tuple[str, ...]]  # returns the cells of one on some of so many nodes
    as_json: Callable[[Any, int], dict[str, Any]]  # likewise, for JSON
    none: str  # what there is none of
    unknown: str  # what cannot be told without a majority
    need: Callable[[Any], Any]  # tells which ones come first where not all are listed


LOCKS = Listed(
    *("locks", AllLocks, LOCK_HEAD, lock_row, lock_as_json),
    *("live locks", "any lock is held", need),
)
RESERVED = Listed(
    *("reserved", AllReservations, RESERVATION_HEAD, reservation_row, reserved_as_json),
    *("reserved names", "any name is reserved", lambda view: view.reservation.merged),
)


@operator_command("Who holds which lock.", EXAMPLES, only_prints=True)
@click.argument("pattern", required=False, metavar="[TEXT]")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help="Print so many at most: those that never expire, that somebody waits for, or that are "
    "held for longest.",
)
@click.option(
    "--reserved",
    is_flag=True,
    help="List the names that are reserved at publish (unique_until), and no lock is held for; "
    "and the newest call of each burst (debounce).",
)
@WATCH
def ls(
    *, pattern: str | None, limit: int | None, reserved: bool, is_watched: bool, as_json: bool
) -> int:
    """
    List the live locks and who holds them.

    TEXT picks those whose name contains it; with one of * ? [ in it, those that it matches as a
    whole. Up to 5000 are sorted by name, more come as they are found.

    Exits with 0, or with 1 if no majority of nodes votes and could be read: the list may have
    gaps. With 0 after --watch.
    """
    settings = settings_at_hand()
    total, kind = len(settings.nodes), RESERVED if reserved else LOCKS

    def look(stop: Stop, longest: float = math.inf) -> int:
        source = kind.source(settings.nodes, settings.rules, scan_pattern(pattern or ""), longest)
        found = Found(source, stop, limit, kind.need)
        if as_json:
            print_json(found, kind, total)
        else:
            longest = min(longest, LONGEST_COUNT)
            print_text(found, kind, total, lambda: none_of(settings, kind, pattern, longest))
            if kind is LOCKS:
                note_reserved(settings, pattern, longest)
        note_silent(source.silent)
        if source.is_cut or not found.is_complete:
            click.echo("Note: these are not all.", err=True)
        return 0 if is_quorate(source, total) and not stop.is_wanted else UNWELL

    if is_watched:
        return watch(lambda stop: look(stop, LONGEST_LOOK), as_json=as_json)
    with stop_on_interrupt() as stop:
        return look(stop)


def none_of(settings: Settings, kind: Listed, pattern: str | None, longest: float) -> str:
    count, least = count_of(settings, kind, "", longest) if pattern else (0, "")
    if not count:
        return f"No {kind.none}."
    of = f"{kind.none} ({least}{count})"
    return f"None of the {of} has a name that matches {one_line(pattern)!r}."


def note_reserved(settings: Settings, pattern: str | None, longest: float) -> None:
    count, least = count_of(settings, RESERVED, pattern or "", longest)
    if count:
        names = counted(count, "name")
        click.echo(
            f"Note: {least}{names} reserved at publish, or debounced, without a lock; see "
            "'redlock ls --reserved'.",
            err=True,
        )


def count_of(settings: Settings, kind: Listed, pattern: str, longest: float) -> tuple[int, str]:
    """Return how many there are, and "at least " if there was no time to count them all."""
    source = kind.source(settings.nodes, settings.rules, scan_pattern(pattern), longest)
    count = sum(1 for _ in source)
    return count, "at least " if source.is_cut else ""


def is_quorate(source: Everywhere[Any], total: int) -> bool:
    return total - len({*source.silent, *source.voteless}) >= quorum(total)


class Found:
    """What is listed until there is no more, enough, or the user stops it."""

    def __init__(
        self,
        source: Everywhere[Any],
        stop: Stop,
        limit: int | None,
        need: Callable[[Any], Any] = need,
    ) -> None:
        self.source = source
        self._need = need
        self.is_complete = True
        self._stop = stop
        self._limit = limit

    def __iter__(self) -> Iterator[Any]:
        if self._limit is None:
            yield from self._all()
            return
        first = heapq.nlargest(self._limit + 1, self._all(), self._need)
        self.is_complete = self.is_complete and len(first) <= self._limit
        yield from first[: self._limit]

    def _all(self) -> Iterator[Any]:
        for one in self.source:
            if self._stop.is_wanted:
                self.is_complete = False
                return
            yield one


def print_json(found: Found, kind: Listed, total: int) -> None:
    """Print one JSON document, an item per line, and end it properly whatever happens."""
    progress = Progress(f"{kind.key} read", is_wanted=not is_terminal(sys.stdout))
    click.echo(f'{{"{kind.key}": [', nl=False)
    for count, one in enumerate(found):
        line = in_json(kind.as_json(one, total))
        click.echo(f"{',' if count else ''}\n  {line}", nl=False)
        progress.tell(count)
    progress.clear()
    silent = found.source.silent
    rest = in_json({"down": silent, "complete": found.is_complete and not silent})
    click.echo(f"\n], {rest[1:]}")


def print_text(found: Found, kind: Listed, total: int, none_found: Callable[[], str]) -> None:
    """Print a sorted table of a few; of many the first ones, and then one by one."""
    progress, coming = Progress(f"{kind.key} read"), iter(found)
    first = []
    for one in islice(coming, SORTED):
        first.append(one)
        progress.tell(len(first))
    more = next(coming, None)
    progress.clear()
    if more is not None:
        rows = [kind.head, *(kind.row(one, total) for one in (*first, more))]
        columns = Columns(rows, LOCK_COLOURS, LOCK_SPARE)
        for row in chain(rows, (kind.row(one, total) for one in coming)):
            click.echo(columns.line(row))
    elif first:
        rows = [kind.row(one, total) for one in sorted(first, key=lambda one: one.name)]
        show_table(kind.head, rows, LOCK_COLOURS, LOCK_SPARE)
    elif is_quorate(found.source, total):
        click.echo(none_found())
    else:
        click.echo(
            "No majority of the nodes votes and could be read: cannot tell whether "
            f"{kind.unknown}; see 'redlock status'."
        )
