"""``redlock status``: how each lock node is."""

from __future__ import annotations

import textwrap

import click

from celery_redlock.ops.cli.command import UNWELL, operator_command, settings_at_hand
from celery_redlock.ops.listing import show_nodes
from celery_redlock.ops.text import show_json
from celery_redlock.reading.nodes import node_statuses
from celery_redlock.reading.quorum import MEANINGS, Quorum

__all__ = ["status"]

#: What is shown of a node; the rest of `NodeStatus` is what a worker knows.
NODE = ("node", "state", "latency", "version", "uptime", "quarantine", "problem")

STATES = "\n".join(
    textwrap.fill(f"  {state:<13} {meaning}", 76, subsequent_indent=" " * 16)
    for state, meaning in MEANINGS.items()
)
EXAMPLES = f"""\b
States:
{STATES}

\b
Examples:
  celery -A shop redlock status
  celery -A shop redlock status --json | jq .quorum
  celery -A shop redlock status > /dev/null || page-somebody

\b
JSON: quorum, voting, needed, nodes[]: node, state, latency, version, uptime,
quarantine, problem; times in seconds
"""


@operator_command("Whether a majority of the lock nodes can vote.", EXAMPLES)
def status(*, as_json: bool) -> int:
    """
    Show how each lock node is, and whether a quorum of them can vote.

    LATENCY is the time of one small write from here, its answer included.

    Exits with 0 if a quorum can vote now, with 1 if not, with 2 if the settings are wrong.
    """
    settings = settings_at_hand()
    quorum = Quorum(node_statuses(settings.nodes, settings.rules), settings.rules)
    is_there = quorum.mark != "bad"
    if as_json:
        counted = {"quorum": is_there, "voting": quorum.voting, "needed": quorum.needed}
        nodes = [{field: getattr(node, field) for field in NODE} for node in quorum.nodes]
        show_json({**counted, "nodes": nodes})
    else:
        show_nodes(quorum.nodes)
        click.echo(f"\n{quorum}")
    return 0 if is_there else UNWELL
