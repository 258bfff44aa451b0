"""``redlock release``: take a lock away from the holder that an operator has seen."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import PUBLIC_TOKEN_LENGTH, Keys
from celery_redlock.lock.votes import Verdict
from celery_redlock.ops.cli.command import TEXT, UNWELL, Text, operator_command, settings_at_hand
from celery_redlock.ops.listing import holder_as_json, left
from celery_redlock.ops.screen import is_terminal
from celery_redlock.ops.text import LONGEST, one_line, show_json
from celery_redlock.reading.one_lock import OneLock, read_lock, release_seen
from celery_redlock.reading.stored import LockView
from celery_redlock.words import who

__all__ = ["release"]

EXAMPLES = """\b
The token is what 'redlock ls' and 'redlock why' show: its first 8
characters, which prove nothing. They make sure that the lock is taken from
the holder that you have seen, and not from one that came since.

\b
Examples:
  celery -A shop redlock release nightly --token 3f9a01bc
  celery -A shop redlock release nightly --token 3f9a01bc --yes --json

\b
JSON: lock, released, reason (released, not everywhere, free, held by
another, not ours, unavailable), holder: task_id, task, execution, host,
pid, since, age, ttl, votes[], token (null if nobody holds it); nodes[]:
node, result
"""
#: What a node answers on which the holder does not have the lock (any more).
GONE = ("released", "free", "held by another", "not written by us")
#: What happened to a lock, in words for a person.
REASONS = {
    "released": "Released.",
    "not everywhere": "Not released everywhere: see above. Nodes that did not answer keep the key "
    "until it expires.",
    "free": "Nobody holds this lock. Nothing was changed.",
    "held by another": "Another holder has this lock, not the one of this token. Nothing was "
    "changed; see 'redlock why --name'.",
    "unavailable": "No quorum of nodes could say who holds this lock. Nothing was changed; see "
    "'redlock status'.",
    "not ours": "The value of this key was not written by celery-redlock, and what it means to "
    "whoever wrote it is not known here. Nothing was changed. If it is in the way: redis-cli "
    "GET {key}, then DEL {key}, on each node.",
}


class Token(Text):
    """The public part of a token."""

    # Click has called it with *param* alone before 8.2.
    def get_missing_message(self, param: Any, ctx: Any = None) -> str:  # noqa: ARG002
        """Say where to find it."""
        return "'redlock ls' shows it."


@operator_command("Release a lock whose holder is gone.", EXAMPLES)
@click.argument("name", type=TEXT)
@click.option("--token", type=Token(), required=True, help="Public part of the holder's token.")
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal.")
def release(*, name: str, token: str, yes: bool, as_json: bool) -> int:
    """
    Release the lock NAME of the holder that was seen, and of no other.

    For a holder that is gone for good or hangs, where waiting for the lease to end is no way
    out, and for keys that never expire. A holder that still runs finds out at its next renewal,
    after a third of its TTL, and learns that its lock is lost; until then two may run at once.

    Exits with 0 if a quorum of nodes says that the holder does not have it any more, with 1 if
    not.
    """
    settings = settings_at_hand()
    if len(token) < PUBLIC_TOKEN_LENGTH:
        msg = f"--token needs at least {PUBLIC_TOKEN_LENGTH} characters, as 'redlock ls' shows them"
        raise click.UsageError(msg)
    if not (yes or is_terminal(sys.stdin)):
        raise click.UsageError("There is no terminal to ask on: add --yes.")
    lock = read_lock(settings.nodes, settings.rules, name)
    seen, results = seen_holder(lock, token), dict[str, str]()
    if seen is None:
        reason = why_not(lock)
    else:
        if not (as_json and yes):
            show_holder(name, seen, len(lock.nodes), err=as_json)
        if not yes:
            click.confirm("Release the lock of this holder?", abort=True, err=True)
        results = release_seen(settings.nodes, settings.rules, name, token)
        reason = outcome(results, seen)
    if as_json:
        told = [{"node": node, "result": one_line(text)} for node, text in results.items()]
        holder = None if seen is None else holder_as_json(seen)
        done = {"lock": name, "released": reason == "released", "reason": reason}
        show_json({**done, "holder": holder, "nodes": told})
    else:
        for node, text in results.items():
            click.echo(f"{node}: {one_line(text)}")
        key = one_line(Keys.of(settings.rules.prefix, name).lock.decode(errors="replace"))
        click.echo(REASONS[reason].format(key=repr(key)))
    return 0 if reason == "released" else UNWELL


def seen_holder(lock: OneLock, token: str) -> LockView | None:
    """Return the holder whose token begins with *token*; None if no node has one."""
    begin = token.encode()
    stored = {k: v for k, v in lock.stored.items() if (v.value or b"").startswith(begin)}
    found = [view for view in replace(lock, stored=stored).views if not view.is_foreign]
    return found[0] if found else None


def why_not(lock: OneLock) -> str:
    """Return why there is nothing to release, as ``--json`` says it."""
    if len(lock.stored) < quorum(len(lock.nodes)):
        return "unavailable"
    if not lock.views:  # a node that is not up may have forgotten that somebody holds it
        return "free" if lock.verdict is Verdict.GRANTED else "unavailable"
    return "not ours" if all(view.is_foreign for view in lock.views) else "held by another"


def outcome(results: Mapping[str, str], seen: LockView) -> str:
    """Return what happened to the lock that *seen* held, as ``--json`` says it."""
    answers = results.values()
    gone = [node for node, result in results.items() if result in GONE]
    if len(gone) < quorum(len(results)):
        return "not everywhere" if "released" in answers else "unavailable"
    if not set(seen.votes) <= set(gone):
        return "not everywhere"
    if "released" in answers:
        return "released"
    return "free" if {results[node] for node in gone} == {"free"} else "held by another"


def show_holder(name: str, seen: LockView, nodes: int, *, err: bool) -> None:
    """Say who holds the lock, and what releasing it means."""
    holder = who(seen.holder, time.time())
    click.echo(f"Lock {one_line(name, LONGEST)!r} is held by {holder};", err=err)
    click.echo(f"on {len(seen.votes)} of {nodes} nodes, ttl left {left(seen.ttl)}.", err=err)
    click.echo(
        "If it still runs, it goes on until its next renewal, and another one can run beside it "
        "as soon as the lock is released.",
        err=err,
    )
