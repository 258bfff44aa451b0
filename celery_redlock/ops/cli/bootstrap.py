"""``redlock bootstrap``: let new nodes vote at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice

import click

from celery_redlock.lock.nodes.urls import is_database
from celery_redlock.ops.as_json import lock_as_json
from celery_redlock.ops.cli.command import UNWELL, operator_command, settings_at_hand
from celery_redlock.ops.listing import LOCK_COLOURS, LOCK_HEAD, LOCK_SPARE, lock_row, show_nodes
from celery_redlock.ops.screen import is_terminal
from celery_redlock.ops.text import one_line, show_json, show_table
from celery_redlock.reading.all_locks import AllLocks
from celery_redlock.reading.nodes import bootstrap, node_statuses
from celery_redlock.reading.stored import LockView

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


@operator_command("Let all nodes vote at once, without quarantine.", EXAMPLES)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Go on despite live or unknown locks; implies --yes.")
def bootstrap_command(*, yes: bool, force: bool, as_json: bool) -> int:
    """
    Let all nodes vote at once, without quarantine.

    For new nodes, and after a wanted change of redlock_nodes or redlock_max_ttl. It is your
    word that nobody holds a lock: a node that has lost its memory may have forgotten one, and
    would give it to somebody else. So stop the workers first, or wait for redlock_max_ttl.

    Refuses while there are live locks, and while a node cannot be asked whether there are any,
    be it one of a new cluster.

    Exits with 0 if all nodes may vote, with 1 if not or if it refused.
    """
    settings = settings_at_hand()
    nodes = node_statuses(settings.nodes, settings.rules)
    live = AllLocks(settings.nodes, settings.rules)
    locks = sorted(islice(live, SHOWN), key=lambda lock: lock.name)
    if not as_json:
        show_nodes(nodes)
        click.echo()
    if (locks or live.silent) and not force:
        in_database = any(map(is_database, settings.nodes))
        remedy = "see to what it says" if in_database else "let this user run SCAN on them"
        refuse(locks, live.silent, len(nodes), remedy, as_json=as_json)
    if not (yes or force) and is_terminal(sys.stdin):
        click.confirm("Does nobody hold a lock now, and may all nodes vote?", abort=True, err=True)
    results = bootstrap(settings.nodes, settings.rules)
    problems = {
        node: "" if said == "enrolled" else one_line(said) or "did not answer"
        for node, said in results.items()
    }
    if as_json:
        plain = [{"node": n, "enrolled": not said, "problem": said} for n, said in problems.items()]
        show_json({"refused": False, "nodes": plain})
    else:
        for node, problem in problems.items():
            click.echo(f"{node}: {problem or 'may vote'}")
    return UNWELL if any(problems.values()) else 0


def refuse(
    locks: Sequence[LockView], silent: Sequence[str], nodes: int, remedy: str, *, as_json: bool
) -> None:
    """End the command without a change: there are *locks*, or *silent* nodes."""
    if as_json:
        plain = [lock_as_json(lock, nodes) for lock in locks]
        show_json({"refused": True, "live_locks": plain, "down": list(silent)})
    elif locks:
        show_table(LOCK_HEAD, [lock_row(lock, nodes) for lock in locks], LOCK_COLOURS, LOCK_SPARE)
        click.echo()
    msg = (
        f"These nodes could not say whether a lock is held: {', '.join(silent)}. So "
        f"nothing was changed. Start them, or {remedy}. (--force goes on all the same. On new "
        "nodes it does no harm; else it may let two run at once.)"
    )
    if locks:
        msg = (
            "Somebody holds a lock, so nothing was changed. Wait until it is released, or stop its "
            "holder. (--force ignores this, and may let two run at once.)"
        )
    raise click.ClickException(msg)
