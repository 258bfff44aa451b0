"""``redlock top``: nodes, the busiest names and refusals, live in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from celery_redlock.ops.cli.command import UNWELL, app_at_hand, operator_command, settings_at_hand
from celery_redlock.ops.listing import line, lock_as_json, show_nodes
from celery_redlock.ops.loading import load_tasks
from celery_redlock.ops.screen import is_dumb, is_terminal
from celery_redlock.ops.text import show_json, show_table
from celery_redlock.ops.top import HEAD, REFUSALS, Reader, Snapshot
from celery_redlock.settings import Settings

__all__ = ["top"]

EXAMPLES = """\b
Keys:
  q, Ctrl-C     quit
  up, down      choose a name; also k and j
  Enter         'redlock why' of it; any key goes back
  /             filter by what follows; Enter keeps it, Esc ends it
  b a w n       sort by the busiest, age, how many wait, name

\b
Examples:
  celery -A shop redlock top
  celery -A shop redlock top | head         one snapshot, as plain text
  celery -A shop redlock top --json | jq '.names[:3]'

\b
JSON: quorum, nodes[]: node, state, problem; complete; names[], the busiest
first: name, refused (in the last minute), lock (as of 'redlock ls', or
null); refused[]: journal records of the last minute, the newest first
"""


@operator_command("Nodes, names and refusals, live.", EXAMPLES)
def top(*, as_json: bool) -> int:
    """
    Watch the nodes, the busiest lock names, and what was refused in the last minute.

    Needs a terminal and the extra 'cli'; without one of them it prints one snapshot.

    Exits with 0, or with 1 if no quorum could vote at the end.
    """
    settings = settings_at_hand()
    load_tasks(app_at_hand())
    reader = Reader(settings)
    is_live = not (as_json or is_dumb()) and all(map(is_terminal, (sys.stdin, sys.stdout)))
    if (watch := live() if is_live else None) is not None:
        snapshot = watch(settings, reader)
    else:
        snapshot = reader.read()
        show_json(as_plain(snapshot)) if as_json else show(snapshot)
        if is_live:
            click.echo('\nLive with: pip install "celery-redlock[cli]"', err=True)
    return UNWELL if snapshot is not None and snapshot.quorum.mark == "bad" else 0


def live() -> Callable[[Settings, Reader], Snapshot | None] | None:
    """Return what shows it live; None without rich, or where there are no terminals like ours."""
    try:
        from celery_redlock.ops.cli.live import watch  # noqa: PLC0415  an extra, slow to import
    except ImportError:
        return None
    return watch


def show(snapshot: Snapshot) -> None:
    """Print *snapshot* as plain text."""
    show_nodes(snapshot.quorum.nodes)
    click.echo(f"\n{snapshot.quorum.headline}\n")
    show_table(HEAD, [name.cells for name in snapshot.sorted()])
    if not snapshot.is_complete:
        click.echo("These are not all.")
    click.echo(f"\nRefused in the last minute: {len(snapshot.refused)}")
    for record in snapshot.refused[:REFUSALS]:
        click.echo(f"  {line(record)}")


def as_plain(snapshot: Snapshot) -> dict[str, Any]:
    """Return *snapshot* as plain JSON values."""
    nodes = snapshot.quorum.nodes
    names = [(it, it.lock and lock_as_json(it.lock, len(nodes))) for it in snapshot.sorted()]
    return {
        "quorum": snapshot.quorum.mark != "bad",
        "nodes": [{"node": n.node, "state": n.state, "problem": n.problem} for n in nodes],
        "complete": snapshot.is_complete,
        "names": [{"name": it.name, "refused": it.refused, "lock": lock} for it, lock in names],
        "refused": list(snapshot.refused),
    }
