"""
``celery -A APP redlock ...``: what an operator asks and tells the lock nodes.

A plug-in of the ``celery`` command (entry point group ``celery.commands``). It reads the
settings of the app and asks the nodes through `celery_redlock.lock.survey`; it takes no
lock and tells nobody a token or a password.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import wraps
from typing import Any

import click
from celery.bin.base import CeleryCommand, CLIContext, handle_preload_options

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.live import LockView, live_locks
from celery_redlock.lock.survey import bootstrap, node_statuses
from celery_redlock.ops.listing import count_up, lock_as_json, show_locks, show_nodes, verdict
from celery_redlock.ops.text import one_line, show_json
from celery_redlock.plugin import plugin_for
from celery_redlock.settings import Settings

__all__ = ["redlock"]

#: Exit code when the nodes are not as they should be.
UNWELL = 1
#: Exit code when the app's settings make no sense; click's own for wrong usage, too.
MISCONFIGURED = 2
#: How Celery calls the app that it makes when ``-A`` is missing.
NO_APP = "default"

GROUP_EXAMPLES = """\b
Examples:
  celery -A shop redlock status             can a majority of the nodes vote?
  celery -A shop redlock ls                 who holds which lock?
  celery -A shop redlock bootstrap          let new nodes vote at once
  celery -A shop redlock status --json      the same for a script
"""
STATUS_EXAMPLES = """\b
States:
  up            votes
  quarantined   was restarted or wiped, and keeps silent until every lock
                that it may have forgotten has ended
  unmarked      new, or restarted and not noticed by any client yet
  down          does not answer, or must not be a lock node

\b
Examples:
  celery -A shop redlock status
  celery -A shop redlock status --json | jq .quorum
  celery -A shop redlock status > /dev/null || page-somebody
"""
LS_EXAMPLES = """\b
Examples:
  celery -A shop redlock ls
  celery -A shop redlock ls --json | jq '.locks[].task_id'
"""
BOOTSTRAP_EXAMPLES = """\b
Examples:
  celery -A shop redlock bootstrap          asks before it changes anything
  celery -A shop redlock bootstrap --yes    for a script that sets up new nodes
"""


class SettingsError(click.ClickException):
    """The app's settings make no sense; ends the command with exit code 2."""

    exit_code = MISCONFIGURED


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give *command* the option ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Hand the settings of the app at hand to *command*; tell cleanly what is wrong with them."""

    @wraps(command)
    def run(**options: Any) -> None:
        context: CLIContext = click.get_current_context().obj
        try:
            command(settings_of(context.app), **options)
        except ConfigurationError as error:
            raise SettingsError(str(error)) from None

    return run


def settings_of(app: Any) -> Settings:
    """Return the settings of *app*; raises ConfigurationError."""
    try:
        settings = plugin_for(app).settings
    except ConfigurationError as error:
        if app.main != NO_APP:
            raise
        msg = f"{error}. No app was named: celery -A APP redlock ..."
        raise ConfigurationError(msg) from None
    if settings.is_fallback:
        click.echo(
            "Note: redlock_nodes is not set, so this is about the one Redis that the app has as "
            "its result backend or broker.",
            err=True,
        )
    return settings


@click.group(epilog=GROUP_EXAMPLES)
@click.pass_context
@handle_preload_options
def redlock(_context: click.Context, **_preloaded: Any) -> None:
    """Look at the lock nodes of an app, and at the locks on them."""


# -- status ------------------------------------------------------------------------


@redlock.command(cls=CeleryCommand, epilog=STATUS_EXAMPLES)
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
        told = [asdict(node) for node in nodes]
        show_json({"quorum": voting >= needed, "voting": voting, "needed": needed, "nodes": told})
    else:
        show_nodes(nodes)
        click.echo()
        click.echo(verdict(nodes, settings))
    click.get_current_context().exit(0 if voting >= needed else UNWELL)


# -- ls ----------------------------------------------------------------------------


@redlock.command(cls=CeleryCommand, epilog=LS_EXAMPLES)
@json_option
@with_settings
def ls(settings: Settings, *, as_json: bool) -> None:
    """
    List the live locks and who holds them.

    VOTES says on how many nodes a lock stands; with fewer than a majority it is an attempt
    under way, or what is left of one. Exits with 1 if a majority of nodes is down: the list may
    then have gaps.
    """
    total = len(settings.nodes)
    down = [n.node for n in node_statuses(settings.nodes, settings.rules) if n.state == "down"]
    locks = sorted(live_locks(settings.nodes, settings.rules), key=lambda lock: lock.name)
    if as_json:
        show_json({"locks": [lock_as_json(lock, total) for lock in locks], "down": down})
    else:
        show_locks(locks, total)
    if down:
        click.echo(f"Note: down: {', '.join(down)}; why, says 'redlock status'.", err=True)
    click.get_current_context().exit(0 if total - len(down) >= quorum(total) else UNWELL)


# -- bootstrap ---------------------------------------------------------------------


@redlock.command("bootstrap", cls=CeleryCommand, epilog=BOOTSTRAP_EXAMPLES)
@click.option("--yes", is_flag=True, help="Do not ask. Still refuses while there are live locks.")
@click.option("--force", is_flag=True, help="Go on despite live locks; implies --yes.")
@json_option
@with_settings
def bootstrap_command(settings: Settings, *, yes: bool, force: bool, as_json: bool) -> None:
    """
    Let all nodes vote at once, without quarantine.

    For new nodes, and after a wanted change of redlock_nodes or redlock_max_ttl. It is your
    word that nobody holds a lock: a node that has lost its memory may have forgotten one, and
    would give it to somebody else. So stop the workers first, or wait for redlock_max_ttl.

    Exits with 0 if all nodes may vote, with 1 if not or if it refused.
    """
    nodes = node_statuses(settings.nodes, settings.rules)
    locks = sorted(live_locks(settings.nodes, settings.rules), key=lambda lock: lock.name)
    if not as_json:
        show_nodes(nodes)
        click.echo()
    if locks and not force:
        refuse(locks, len(nodes), as_json=as_json)
    if not (yes or force) and sys.stdin.isatty():
        click.confirm("Does nobody hold a lock now, and may all nodes vote?", abort=True, err=True)
    results = bootstrap(settings.nodes, settings.rules)
    show_results(results, as_json=as_json)
    done = all(is_enrolled(result) for result in results.values())
    click.get_current_context().exit(0 if done else UNWELL)


def refuse(locks: Sequence[LockView], nodes: int, *, as_json: bool) -> None:
    """Say who holds *locks*, and end the command without having changed anything."""
    if as_json:
        show_json({"refused": True, "live_locks": [lock_as_json(lock, nodes) for lock in locks]})
    else:
        show_locks(locks, nodes)
        click.echo()
    msg = (
        "Somebody holds a lock, so nothing was changed. Wait until it is given back, or stop its "
        "holder. (--force goes on all the same, and may let two run at once.)"
    )
    raise click.ClickException(msg)


def show_results(results: dict[str, str], *, as_json: bool) -> None:
    """Print what became of each node: label -> what `celery_redlock.lock.survey.bootstrap` said."""
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
