"""``redlock bootstrap``: let new nodes vote at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice

import click
from celery.bin.base import CeleryCommand

from celery_redlock.ops.cli.command import UNWELL, finish, json_option, with_settings
from celery_redlock.ops.listing import lock_as_json, show_locks, show_nodes
from celery_redlock.ops.screen import is_terminal
from celery_redlock.ops.text import one_line, show_json
from celery_redlock.reading.all_locks import AllLocks
from celery_redlock.reading.nodes import bootstrap, node_statuses
from celery_redlock.reading.stored import LockView
from celery_redlock.settings import Settings

__all__ = ["bootstrap_command"]

#: So many locks suffice to say no.
SHOWN = 100
EXAMPLES = """\b
Examples:
  celery -A shop redlock bootstrap          asks before it changes anything
  celery -A shop redlock bootstrap --yes    for a script that sets up new nodes

\b
JSON: refused, and nodes[]: node, enrolled, problem; or, if it refused,
live_locks[] (the first 100) as those of 'redlock ls', and down[]: nodes
that could not be read
"""


@click.command(
    "bootstrap",
    cls=CeleryCommand,
    epilog=EXAMPLES,
    short_help="Let all nodes vote at once, without quarantine.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Go on despite live or unknown locks; implies --yes.")
@json_option
@with_settings
def bootstrap_command(settings: Settings, *, yes: bool, force: bool, as_json: bool) -> None:
    """
    Let all nodes vote at once, without quarantine.

    For new nodes, and after a wanted change of redlock_nodes or redlock_max_ttl. It is your
    word that nobody holds a lock: a node that has lost its memory may have forgotten one, and
    would give it to somebody else. So stop the workers first, or wait for redlock_max_ttl.

    Refuses while there are live locks, and while a node cannot be asked whether there are any,
    be it one of a new cluster.

    Exits with 0 if all nodes may vote, with 1 if not or if it refused.
    """
    nodes = node_statuses(settings.nodes, settings.rules)
    live = AllLocks(settings.nodes, settings.rules)
    locks = sorted(islice(live, SHOWN), key=lambda lock: lock.name)
    if not as_json:
        show_nodes(nodes)
        click.echo()
    if (locks or live.silent) and not force:
        refuse(locks, live.silent, len(nodes), as_json=as_json)
    if not (yes or force) and is_terminal(sys.stdin):
        click.confirm("Does nobody hold a lock now, and may all nodes vote?", abort=True, err=True)
    results = bootstrap(settings.nodes, settings.rules)
    show_results(results, as_json=as_json)
    done = all(is_enrolled(result) for result in results.values())
    finish(0 if done else UNWELL)


def refuse(locks: Sequence[LockView], silent: Sequence[str], nodes: int, *, as_json: bool) -> None:
    """
    End the command without having changed anything.

    Args:
        locks: That somebody holds.
        silent: Nodes that could not be read.
        nodes: How many there are.
        as_json: Whether to print JSON.
    """
    if as_json:
        told = [lock_as_json(lock, nodes) for lock in locks]
        show_json({"refused": True, "live_locks": told, "down": list(silent)})
    elif locks:
        show_locks(locks, nodes)
        click.echo()
    msg = (
        f"These nodes could not tell whether somebody holds a lock: {', '.join(silent)}. So "
        "nothing was changed. Start them, or let this user run SCAN on them. (--force goes on all "
        "the same. On new nodes it does no harm; else it may let two run at once.)"
    )
    if locks:
        msg = (
            "Somebody holds a lock, so nothing was changed. Wait until it is given back, or stop "
            "its holder. (--force goes on all the same, and may let two run at once.)"
        )
    raise click.ClickException(msg)


def show_results(results: dict[str, str], *, as_json: bool) -> None:
    """Print what became of each node: label -> what `reading.nodes.bootstrap` said."""
    if as_json:
        told = [
            {"node": node, "enrolled": is_enrolled(result), "problem": problem_in(result)}
            for node, result in results.items()
        ]
        show_json({"refused": False, "nodes": told})
        return
    for node, result in results.items():
        click.echo(f"{node}: {problem_in(result) or 'may vote'}")


def is_enrolled(result: str) -> bool:
    """Return whether *result* says that the node may vote."""
    return result == "enrolled"


def problem_in(result: str) -> str:
    """Return why the node may not vote, "" if it may."""
    return "" if is_enrolled(result) else one_line(result)
