"""
The group ``redlock`` of the ``celery`` command, and where its commands are.

Every start of ``celery``, of a worker too, imports this; a command's own module is imported
when that command is used.
"""

from __future__ import annotations

from typing import Any

import click
from celery.bin.base import handle_preload_options
from click_didyoumean import DYMGroup  # type: ignore[import-untyped]  # comes with Celery
from kombu.utils.imports import symbol_by_name

from celery_redlock.ops import control

__all__ = ["COMMANDS", "redlock"]

#: Has `celery inspect` know our remote control commands, in the process of the command line, too.
INSPECT = (control.redlock_locks, control.redlock_nodes)

#: Name -> where its command is, in the order of the help.
COMMANDS = {
    "status": "celery_redlock.ops.cli.status:status",
    "ls": "celery_redlock.ops.cli.ls:ls",
    "why": "celery_redlock.ops.cli.why:why",
    "release": "celery_redlock.ops.cli.release:release",
    "report": "celery_redlock.ops.cli.report:report",
    "doctor": "celery_redlock.ops.cli.doctor:doctor",
    "tail": "celery_redlock.ops.cli.tail:tail",
    "bootstrap": "celery_redlock.ops.cli.bootstrap:bootstrap_command",
    "init": "celery_redlock.ops.cli.init:init",
    "web": "celery_redlock.ops.web.command:web_command",
}

GROUP_EXAMPLES = """\b
Examples:
  celery -A shop redlock status             can a majority of the nodes vote?
  celery -A shop redlock ls                 who holds which lock?
  celery -A shop redlock ls --watch         ... drawn again each second
  celery -A shop redlock why shop.bill '[42]'
                                            why does this call not run?
  celery -A shop redlock report             what was refused, what to set?
  celery -A shop redlock doctor             is anything set up wrongly?
  celery -A shop redlock tail               what is skipped, rescheduled, lost?
  celery -A shop redlock bootstrap          let new nodes vote at once
  celery -A shop redlock init               make the tables of a database
  celery -A shop redlock status --json      the same for a script

\b
Exit codes of all commands:
  0   all is well
  1   something is not: no quorum, a lock that is held, a refusal, a finding
  2   wrong usage, or invalid settings

\b
Completion of commands and options, as of any program made with click:
  eval "$(_CELERY_COMPLETE=bash_source celery)"       also zsh_source
  _CELERY_COMPLETE=fish_source celery | source
"""


class Group(DYMGroup):  # type: ignore[misc]  # comes without types, with Celery
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        where = COMMANDS.get(cmd_name)
        return symbol_by_name(where) if where else None


@click.group(cls=Group, epilog=GROUP_EXAMPLES)
@click.pass_context
@handle_preload_options
def redlock(_context: click.Context, **_preloaded: Any) -> None:
    """Look at the lock nodes of an app, and at the locks on them."""
