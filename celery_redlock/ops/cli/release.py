"""``redlock release``: release a lock of the holder that an operator has seen."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import PUBLIC_TOKEN_LENGTH, Keys
from celery_redlock.lock.scripts.votes import Verdict
from celery_redlock.ops.as_json import holder_as_json, reserved_as_json
from celery_redlock.ops.cli.command import (
    TEXT,
    UNWELL,
    Text,
    app_at_hand,
    operator_command,
    settings_at_hand,
)
from celery_redlock.ops.listing import left, reservation_in_words
from celery_redlock.ops.loading import load_tasks
from celery_redlock.ops.screen import is_terminal
from celery_redlock.ops.text import LONGEST, one_line, show_json
from celery_redlock.ops.why import most_places
from celery_redlock.reading.one_lock import OneLock
from celery_redlock.reading.places import read_places
from celery_redlock.reading.release import release_seen
from celery_redlock.reading.stored import LockView, ReservationView
from celery_redlock.settings import Settings
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
  celery -A shop redlock release shop:7 rate:eu --token 3f9a01bc

\b
JSON: lock, released, reason (released, not everywhere, free, held by
another, reserved by another, not ours, unavailable), holder: task_id, task,
execution, host, pid, since, age, ttl, votes[], token (null if it was no
holder's); reservation: name, task_id, task, host, pid, since, running,
ended, left, merged, token, votes[], reserved (null if it was none's);
nodes[]: node, result; others[]: the same of each further NAME
"""
#: What a node answers on which the holder does not have the lock (any more).
GONE = ("released", "free", "held by another", "not written by us")
QUESTIONS: dict[type, str] = {
    LockView: "Release the lock of this holder?",
    ReservationView: "End this reservation?",
}
#: What happened to a lock, in words for a person.
REASONS = {
    "released": "Released.",
    "not everywhere": "Not released everywhere: see above. Nodes that did not answer keep the key "
    "until it expires.",
    "free": "Nobody holds this lock. Nothing was changed.",
    "held by another": "Another holder has this lock, not the one of this token. Nothing was "
    "changed; see 'redlock why --name'.",
    "reserved by another": "Nobody holds this lock. Its name is reserved, with another token: see "
    "'redlock why --name'. Nothing was changed.",
    "unavailable": "No quorum of nodes could say who holds this lock. Nothing was changed; see "
    "'redlock status'.",
    "not ours": "The value of this key was not written by celery-redlock, and what it means to "
    "whoever wrote it is not known here. Nothing was changed. If it is in the way: redis-cli "
    "GET {key}, then DEL {key}, on each node.",
}


class Token(Text):
    # Click has called it with *param* alone before 8.2.
    def get_missing_message(self, param: Any, ctx: Any = None) -> str:  # noqa: ARG002
        return "'redlock ls' shows it."


@operator_command("Release a lock whose holder is gone.", EXAMPLES)
@click.argument("names", metavar="NAME...", type=TEXT, nargs=-1, required=True)
@click.option(
    *("--token", "tokens"),
    type=Token(),
    required=True,
    multiple=True,
    help="Public part of the holder's token; again where its locks have several.",
)
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal.")
def release(*, names: tuple[str, ...], tokens: tuple[str, ...], yes: bool, as_json: bool) -> int:
    """
    Release the lock NAME of the holder that was seen, and of no other.

    Of a lock with several places (lock_limit), the one that this holder has. Of a task with
    several locks, give all names: in a worker their tokens begin alike. With the token of a
    reservation (unique_until; 'redlock ls --reserved' shows it) this ends the reservation: calls
    are published again, and what is queued still runs if it is delivered.

    For a holder that is gone for good or hangs, where waiting for the lease to end is no way
    out, and for keys that never expire. A holder that still runs finds out at its next renewal,
    after a third of its TTL, and learns that its lock is lost; until then two may run at once.

    Exits with 0 if a quorum of nodes says that the holder does not have it any more, with 1 if
    not, or not of each NAME.
    """
    settings, app = settings_at_hand(), app_at_hand()
    if min(map(len, tokens)) < PUBLIC_TOKEN_LENGTH:
        msg = f"--token needs at least {PUBLIC_TOKEN_LENGTH} characters, as 'redlock ls' shows them"
        raise click.UsageError(msg)
    if not (yes or is_terminal(sys.stdin)):
        raise click.UsageError("There is no terminal to ask on: add --yes.")
    with contextlib.suppress(ConfigurationError):  # an app that cannot be loaded blocks nobody
        load_tasks(app)
    limits = dict.fromkeys(names, most_places(app))
    places = read_places(settings.nodes, settings.rules, limits)
    plain = [
        release_one(settings, *seen_in(places.of(name), tokens), yes=yes, as_json=as_json)
        for name in limits
    ]
    if as_json:
        show_json(plain[0] if len(plain) == 1 else {**plain[0], "others": plain[1:]})
    return 0 if all(one["released"] for one in plain) else UNWELL


def seen_in(places: Sequence[OneLock], tokens: Sequence[str]) -> tuple[OneLock, str]:
    """Return a place that somebody has with one of *tokens*, and it; else the first of each."""
    pairs = ((place, token) for place in places for token in tokens)
    found = (pair for pair in pairs if seen_with(*pair) is not None)
    return next(found, (places[0], tokens[0]))


def release_one(
    settings: Settings, lock: OneLock, token: str, *, yes: bool, as_json: bool
) -> dict[str, Any]:
    name, seen, results = lock.stored_name, seen_with(lock, token), dict[str, str]()
    if seen is None:
        reason = why_not(lock)
    else:
        if not (as_json and yes):
            show_seen(name, seen, len(lock.nodes), err=as_json)
        if not yes:
            click.confirm(QUESTIONS[type(seen)], abort=True, err=True)
        results = release_seen(settings.nodes, settings.rules, name, token, lock.number)
        reason = outcome(results, seen)
    if not as_json:
        for node, text in results.items():
            click.echo(f"{node}: {one_line(text)}")
        key = one_line(Keys.of(settings.rules.prefix, name).lock.decode(errors="replace"))
        click.echo(REASONS[reason].format(key=repr(key)))
    return {
        "lock": name,
        "released": reason == "released",
        "reason": reason,
        "holder": holder_as_json(seen) if isinstance(seen, LockView) else None,
        "reservation": reserved_as_json(seen, len(lock.nodes))
        if isinstance(seen, ReservationView)
        else None,
        "nodes": [{"node": node, "result": one_line(text)} for node, text in results.items()],
    }


def seen_with(lock: OneLock, token: str) -> LockView | ReservationView | None:
    """Return the holder or reservation whose token begins with *token*; None if none does."""
    begin = token.encode()
    stored = {k: v for k, v in lock.stored.items() if (v.value or b"").startswith(begin)}
    found = [view for view in replace(lock, stored=stored).views if not view.is_foreign]
    if found:
        return found[0]
    reserved = (it for it in lock.reservations if it.reservation.token.startswith(begin))
    return next(reserved, None)


def why_not(lock: OneLock) -> str:
    if not lock.is_known:
        return "unavailable"
    if not lock.views and lock.reservations:
        return "reserved by another"
    if not lock.views:  # a node that is not up may have forgotten that somebody holds it
        return "free" if lock.verdict is Verdict.GRANTED else "unavailable"
    return "not ours" if all(view.is_foreign for view in lock.views) else "held by another"


def outcome(results: Mapping[str, str], seen: LockView | ReservationView) -> str:
    answers = results.values()
    gone = [node for node, result in results.items() if result in GONE]
    if len(gone) < quorum(len(results)):
        return "not everywhere" if "released" in answers else "unavailable"
    if not set(seen.stored_on) <= set(gone):
        return "not everywhere"
    if "released" in answers:
        return "released"
    return "free" if {results[node] for node in gone} == {"free"} else "held by another"


def show_seen(name: str, seen: LockView | ReservationView, nodes: int, *, err: bool) -> None:
    if isinstance(seen, ReservationView):
        whose = reservation_in_words(seen.reservation)
        click.echo(f"Name {one_line(name, LONGEST)!r} is reserved by {whose};", err=err)
        click.echo(f"on {len(seen.votes)} of {nodes} nodes.", err=err)
        click.echo(
            "If its message is still queued, it runs when it is delivered; another call can be "
            "published as soon as the reservation ends.",
            err=err,
        )
        return
    holder = who(seen.holder, time.time())
    click.echo(f"Lock {one_line(name, LONGEST)!r} is held by {holder};", err=err)
    click.echo(f"on {len(seen.stored_on)} of {nodes} nodes, ttl left {left(seen.ttl)}.", err=err)
    click.echo(
        "If it still runs, it goes on until its next renewal, and another one can run beside it "
        "as soon as the lock is released.",
        err=err,
    )
