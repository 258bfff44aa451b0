"""``redlock status``: state of each lock node."""

from __future__ import annotations

import textwrap
from typing import Any

import click

from celery_redlock.ops.cli.command import UNWELL, operator_command, settings_at_hand
from celery_redlock.ops.cli.watch import WATCH, watch
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
  celery -A shop redlock status --watch      drawn again each second
  celery -A shop redlock status --json | jq .quorum
  celery -A shop redlock status > /dev/null || page-somebody

\b
JSON: quorum, voting, needed, nodes[]: node, state, latency, version, uptime,
quarantine, problem; times in seconds
"""


@operator_command("Whether a majority of the lock nodes can vote.", EXAMPLES)
@WATCH
def status(*, is_watched: bool, as_json: bool) -> int:
    """
    Show how each lock node is, and whether a quorum of them can vote.

    LATENCY is the time of one small write from here, its answer included.

    Exits with 0 if a quorum can vote now, with 1 if not, with 2 if the settings are wrong; with 0
    after --watch.
    """
    settings = settings_at_hand()

    def look(_stop: object = None) -> int:
        quorum = Quorum(node_statuses(settings.nodes, settings.rules), settings.rules)
        if as_json:
            show_json(as_plain(quorum))
        else:
            show_nodes(quorum.nodes)
            click.echo(f"\n{quorum}")
        return UNWELL if quorum.mark == "bad" else 0

    return watch(look, as_json=as_json) if is_watched else look()


def as_plain(quorum: Quorum) -> dict[str, Any]:
    nodes = [{field: getattr(node, field) for field in NODE} for node in quorum.nodes]
    counted = {"voting": quorum.voting, "needed": quorum.needed}
    return {"quorum": quorum.mark != "bad", **counted, "nodes": nodes}
