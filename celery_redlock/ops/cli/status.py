"""``redlock status``: how each lock node is."""

from __future__ import annotations

import click
from celery.bin.base import CeleryCommand

from celery_redlock.lock.lease import quorum
from celery_redlock.ops.cli.command import UNWELL, finish, json_option, with_settings
from celery_redlock.ops.listing import count_up, show_nodes, verdict
from celery_redlock.ops.text import show_json
from celery_redlock.reading.nodes import node_statuses
from celery_redlock.settings import Settings

__all__ = ["status"]

#: What is told of a node; the rest of `NodeStatus` is what a worker knows.
NODE = ("node", "state", "version", "uptime", "quarantine", "problem")

EXAMPLES = """\b
States:
  up            votes
  quarantined   new, restarted or wiped, and keeps silent until every lock
                that it may have forgotten has ended; 'redlock bootstrap'
                ends that where no lock can be held
  unmarked      the same, but no client has noticed it yet
  unfit         answers, but must not be a lock node
  down          does not answer

\b
Examples:
  celery -A shop redlock status
  celery -A shop redlock status --json | jq .quorum
  celery -A shop redlock status > /dev/null || page-somebody

\b
JSON: quorum, voting, needed, nodes[]: node, state, version, uptime,
quarantine, problem
"""


@click.command(
    cls=CeleryCommand, epilog=EXAMPLES, short_help="Whether a majority of the lock nodes can vote."
)
@json_option
@with_settings
def status(settings: Settings, *, as_json: bool) -> None:
    """
    Show how each lock node is, and whether a quorum of them can vote.

    Exits with 0 if a quorum can vote now, with 1 if not, with 2 if the settings are wrong.
    """
    nodes = node_statuses(settings.nodes, settings.rules)
    voting, needed = count_up(nodes), quorum(len(nodes))
    if as_json:
        told = [{field: getattr(node, field) for field in NODE} for node in nodes]
        show_json({"quorum": voting >= needed, "voting": voting, "needed": needed, "nodes": told})
    else:
        show_nodes(nodes)
        click.echo()
        click.echo(verdict(nodes, settings))
    finish(0 if voting >= needed else UNWELL)
