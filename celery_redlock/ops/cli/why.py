"""``redlock why``: who holds the lock of a call, and what becomes of another one."""

from __future__ import annotations

from typing import Any

import click
from celery.bin.base import CeleryCommand

from celery_redlock.lock.lease import quorum
from celery_redlock.lock.votes import Verdict
from celery_redlock.ops.cli.command import (
    TEXT,
    UNWELL,
    app_at_hand,
    app_with_tasks,
    finish,
    json_option,
    with_settings,
)
from celery_redlock.ops.journal_lines import line
from celery_redlock.ops.listing import STATES, age_of, in_words, left, scalar, who_as_json
from celery_redlock.ops.screen import colour
from celery_redlock.ops.text import LONGEST, duration, one_line, show_json, show_table
from celery_redlock.ops.why import Explanation, explain, find_task, name_of_call
from celery_redlock.reading.one_lock import HolderSeen, NodeLook, ReservationSeen
from celery_redlock.settings import Settings

__all__ = ["why"]

EXAMPLES = """\b
Examples:
  celery -A shop redlock why shop.bill '[42]'
  celery -A shop redlock why shop.bill '[42]' '{"dry_run": true}'
  celery -A shop redlock why shop.report '[]' '{"day": "2026-11-22"}'
  celery -A shop redlock why --name nightly-report
  celery -A shop redlock why shop.bill '[42]' --json | jq .state

\b
JSON: lock, task, state (held, free, unavailable), holder: task_id, task,
execution, host, pid, since, age, ttl (null for never), votes[], fence,
renewals, margin, token, foreign; others[]: the same of who has no
majority; nodes[]: node, state, token, ttl, fence, problem; another_call:
meets (granted, taken, unavailable), publish, run; queued, next: task_id,
task, host, pid, since, running, left, merged; recent[]: journal records
"""
#: What each verdict is called in JSON.
MEETS = {Verdict.GRANTED: "granted", Verdict.TAKEN: "taken"}


@click.command(cls=CeleryCommand, epilog=EXAMPLES, short_help="Why a call of a task does not run.")
@click.argument("call", nargs=-1, metavar="[TASK [ARGS [KWARGS]]]")
@click.option("--name", type=TEXT, help="Ask for a lock by its name instead.")
@json_option
@with_settings
def why(settings: Settings, *, call: tuple[str, ...], name: str | None, as_json: bool) -> None:
    """
    Say why a call of a task does not run: who holds its lock, and what another call would meet.

    ARGS is a JSON list, KWARGS a JSON object, as of the call. Asks the nodes and the journal, and
    changes nothing.

    Exits with 0 if the lock is free, with 1 if it is held or if no quorum could say, with 2 if
    there is no such task or it takes no such arguments.
    """
    app, task = app_at_hand(), None
    if (name is None) == (not call) or len(call) > 3:  # noqa: PLR2004  TASK, ARGS and KWARGS
        raise click.UsageError("Give TASK with its ARGS and KWARGS in JSON, or --name.")
    app_with_tasks(app)
    if name is None:
        task = find_task(app, call[0])
        name = name_of_call(task, *[*call[1:], *("[]", "{}")[len(call) - 1 :]])
    found = explain(app, settings, name, task)
    if as_json:
        show_json(as_plain(found))
    else:
        show(found)
    finish(0 if found.state == "free" else UNWELL)


# --- as text ------------------------------------------------------------------------------


def show(found: Explanation) -> None:
    """Print *found* in plain words."""
    of = f" of task {found.task}" if found.task else ""
    click.echo(f"Lock {one_line(found.name, LONGEST)!r}{of}: {colour(*headline(found))}")
    for holder in found.holders:
        show_holder(holder, found)
    click.echo()
    show_nodes(found.looks)
    click.echo()
    for label, seen in (("Queued", found.queued), ("Next", found.following)):
        if seen is not None:
            click.echo(f"{label}: {marker_words(seen)}")
    click.echo(f"Another call now: {' '.join(filter(None, (found.publish, found.run))) or '?'}")
    if found.recent:
        click.echo("\nLately refused (the newest last):")
        for record in found.recent:
            click.echo(f"  {line(record)}")


def headline(found: Explanation) -> tuple[str, str]:
    """Return in a few words how it is, and their colour."""
    if found.holder is not None:
        return "held.", "yellow"
    if found.state == "held":
        return "held by several that keep each other from a majority.", "yellow"
    if found.state == "free":
        return "free.", "green"
    told = sum(1 for one in found.looks if not one.problem and one.status.state == "up")
    needed = quorum(len(found.looks))
    return f"no quorum could say: {told} of {len(found.looks)} nodes vote, {needed} needed.", "red"


def show_holder(holder: HolderSeen, found: Explanation) -> None:
    """Print who has the lock on some nodes."""
    votes = f"on {len(holder.votes)} of {len(found.looks)} nodes"
    if holder.is_foreign:
        click.echo(f"  Something else than celery-redlock has written its key, {votes}.")
        return
    is_leftover = holder is not found.holder
    role = "An attempt under way, or left over" if is_leftover else "Held"
    info = holder.info
    click.echo(f"  {role}: {in_words(info)}")
    age = age_of(info)
    since = "" if age is None else f"for {duration(age)}, "
    times = scalar(info.get("renewals"))
    renewed = f"renewed {times} time{'' if times == 1 else 's'}, " if times else ""
    fence = f"fence {holder.fence}, " if holder.fence else ""
    rest = one_line(f"{since}{renewed}{fence}token {info.get('token', '?')}", LONGEST)
    click.echo(f"  {rest}; {votes}, ttl left {left(holder.ttl)}")
    if holder.ttl is None:
        click.echo(
            "  This key never expires, so no task of ours has written it like that. If its holder "
            "is gone, 'redlock release' takes it away."
        )


def show_nodes(looks: Any) -> None:
    """Print what each node has."""
    rows = [
        (
            one.node,
            one.status.state,
            token_of(one),
            "" if one.value is None else left(one.ttl),
            str(one.fence or ""),
            one_line(one.problem or one.status.problem),
        )
        for one in looks
    ]
    show_table(("NODE", "STATE", "TOKEN", "TTL LEFT", "FENCE", "PROBLEM"), rows, STATES)


def token_of(one: NodeLook) -> str:
    """Return whose token a node has, by its public part."""
    if one.value is None:
        return "" if one.problem or one.status.state in ("down", "unfit") else "free"
    return "not ours" if one.is_foreign else one_line(one.holder.get("token", "?"), LONGEST)


def marker_words(seen: ReservationSeen) -> str:
    """Return whose message stands for the name."""
    info = who_as_json(seen.info)
    what = "has begun" if seen.is_running else f"waits, {seen.left:.0f} s at most"
    merged = f", {seen.merged} triggers merged into it" if seen.merged else ""
    task, its_id = (one_line(info[field], LONGEST) for field in ("task", "task_id"))
    return f"task {task}, id {its_id}: {what}{merged}"


# --- as JSON ------------------------------------------------------------------------------


def as_plain(found: Explanation) -> dict[str, Any]:
    """Return *found* as plain JSON values."""
    holder = found.holder
    return {
        "lock": found.name,
        "task": found.task or None,
        "state": found.state,
        "holder": None if holder is None else holder_as_plain(holder),
        "others": [holder_as_plain(each) for each in found.holders if each is not holder],
        "nodes": [node_as_plain(one) for one in found.looks],
        "another_call": {
            "meets": MEETS.get(found.verdict, "unavailable"),
            "publish": found.publish,
            "run": found.run or None,
        },
        "queued": marker_as_plain(found.queued),
        "next": marker_as_plain(found.following),
        "recent": list(found.recent),
    }


def holder_as_plain(holder: HolderSeen) -> dict[str, Any]:
    """Return *holder* as plain JSON values."""
    info = holder.info
    return {
        **who_as_json(info),
        "age": age_of(info),
        "ttl": holder.ttl,
        "votes": holder.votes,
        "fence": holder.fence or None,
        "renewals": scalar(info.get("renewals", 0)),
        "margin": scalar(info.get("margin")),
        "token": info.get("token"),
        "foreign": holder.is_foreign,
    }


def node_as_plain(one: NodeLook) -> dict[str, Any]:
    """Return what a node has as plain JSON values."""
    return {
        "node": one.node,
        "state": one.status.state,
        "token": one.holder.get("token"),
        "ttl": one.ttl if one.value is not None else 0.0,
        "fence": one.fence or None,
        "problem": one.problem or one.status.problem,
    }


def marker_as_plain(seen: ReservationSeen | None) -> dict[str, Any] | None:
    """Return whose message stands for the name as plain JSON values; nothing of its token."""
    if seen is None:
        return None
    told = who_as_json(seen.info)
    del told["execution"]  # it has none before it runs
    return {**told, "running": seen.is_running, "left": seen.left, "merged": seen.merged}
