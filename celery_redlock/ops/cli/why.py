"""``redlock why``: the holder of a call's lock, and what another call would meet."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

import click

from celery_redlock.lock.scripts.votes import Verdict
from celery_redlock.ops.as_json import explanation_as_json, node_as_json
from celery_redlock.ops.call import find_task, limits_in_call
from celery_redlock.ops.cli.command import (
    TEXT,
    UNWELL,
    app_at_hand,
    operator_command,
    settings_at_hand,
)
from celery_redlock.ops.forecast import GETS_IT
from celery_redlock.ops.listing import (
    LOCK_COLOURS,
    LOCK_HEAD,
    LOCK_SPARE,
    STATES,
    left,
    line,
    lock_row,
    reservation_in_words,
    since_in_words,
)
from celery_redlock.ops.loading import load_tasks
from celery_redlock.ops.screen import COLOURS, colour
from celery_redlock.ops.text import LONGEST, one_line, scalar, show_json, show_table
from celery_redlock.ops.why import (
    Explanation,
    explain,
    lines_of_name,
    of_locks,
)
from celery_redlock.reading.one_lock import OneLock
from celery_redlock.reading.places import Places
from celery_redlock.reading.stored import LockView, StoredReservation
from celery_redlock.words import counted, who

__all__ = ["why"]

#: How many of those who wait are shown to a person.
SHOWN = 20

EXAMPLES = """\b
Examples:
  celery -A shop redlock why shop.bill '[42]'
  celery -A shop redlock why shop.bill '[42]' '{"dry_run": true}'
  celery -A shop redlock why shop.report '[]' '{"day": "2026-11-22"}'
  celery -A shop redlock why --name nightly
  celery -A shop redlock why shop.bill '[42]' --json | jq .state

\b
JSON: lock, task, state (held, free, unavailable), holder: task_id, task,
execution, host, pid, since, age, ttl (null for never), votes[], fence,
renewals, margin, token, foreign; others[]: the same of who has no
majority; nodes[]: node, state, token, ttl, fence, problem; another_call:
meets (granted, taken, unavailable), publish, run; queued, next: task_id,
task, host, pid, since, running, ended, left, merged, token,
debounced, result (its state, null unless ended); burst: the same of the
newest call of its burst, without result; waiting, waiting_since;
waiters[], the oldest first: task, task_id, host, pid, since, age;
places[], of all lock names: lock, name, place, state, holder; workers[]
that answer: worker, has_it; recent[]: journal records
"""


@operator_command("Why a call of a task does not run.", EXAMPLES)
@click.argument("call", nargs=-1, metavar="[TASK [ARGS [KWARGS]]]")
@click.option("--name", type=TEXT, help="Ask for a lock by its name instead.")
@click.option(
    "--header",
    "headers",
    type=TEXT,
    metavar="NAME=VALUE",
    multiple=True,
    help="Header of the call, where it is part of the lock name; again for each. VALUE is text.",
)
def why(*, call: tuple[str, ...], name: str | None, headers: tuple[str, ...], as_json: bool) -> int:
    """
    Say why a call of a task does not run: who holds its lock, and what another call would meet.

    ARGS is a JSON list, KWARGS a JSON object, as of the call. Asks the nodes and the journal, and
    of a lock that is held the workers, and changes nothing.

    Exits with 0 if the lock is free, with 1 if it is held or if no quorum could say, with 2 if
    there is no such task or it takes no such arguments.
    """
    settings, app, task = settings_at_hand(), app_at_hand(), None
    if (name is None) == (not call) or len(call) > 3:  # noqa: PLR2004  TASK, ARGS and KWARGS
        raise click.UsageError("Give TASK with its ARGS and KWARGS in JSON, or --name.")
    load_tasks(app)
    if name is None:
        task = find_task(app, call[0])
        args, kwargs = (*call[1:], *("[]", "{}")[len(call) - 1 :])
        limits = limits_in_call(task, args, kwargs, headers_in(headers))
    else:
        limits = lines_of_name(app, name)
    found = explain(app, settings, limits, task)
    if as_json:
        show_json(explanation_as_json(found))
    else:
        show(found)
    return 0 if found.state == "free" else UNWELL


def headers_in(given: Sequence[str]) -> dict[str, str]:
    pairs = [one.partition("=") for one in given]
    if not all(name and sign for name, sign, _ in pairs):
        raise click.UsageError("--header needs NAME=VALUE, like --header tenant=acme")
    return {name: value for name, _, value in pairs}


# --- as text ------------------------------------------------------------------------------


def show(found: Explanation) -> None:
    words, mark = found.headline
    of = f" of task {found.task}" if found.task else ""
    named = ", ".join(repr(one_line(name, LONGEST)) for name in found.names)
    lock = "Lock" if len(found.names) == 1 else "Locks"
    click.echo(f"{lock} {named}{of}: {colour(words, COLOURS[mark])}")
    if len(found.places.all) == 1 and of_locks(found.places.all):
        for holder in found.lock.views:
            show_holder(holder, found)
    else:
        click.echo()
        show_places(found.places)
    click.echo()
    show_nodes(found.lock)
    click.echo()
    show_waiters(found.places)
    for label, seen in (("Queued", found.lock.queued), ("Next", found.lock.next)):
        if seen is not None:
            click.echo(f"{label}: {reservation_in_words(seen)}{result_of(seen, found)}")
    if found.lock.burst is not None:
        click.echo(f"Debounced: {reservation_in_words(found.lock.burst)}")
    another = " ".join(filter(None, (found.publish, found.run))) or without_task(found)
    click.echo(f"Another call now: {another}")
    if found.recent:
        click.echo("\nLately refused (the newest last):")
        for record in found.recent:
            click.echo(f"  {line(record)}")


def result_of(seen: StoredReservation, found: Explanation) -> str:
    state = found.results.get(str(seen.info.get("task_id")))
    if state is None or seen.has_run or seen.is_window:
        return ""
    return f". Its result is {state}: if nothing of it runs any more, 'redlock release' ends this"


def without_task(found: Explanation) -> str:
    if found.places.verdict is Verdict.GRANTED:
        return GETS_IT
    option, meets = "on_unavailable", "finds no quorum"
    if found.places.verdict is Verdict.TAKEN:
        option, meets = "on_conflict", "finds the lock taken"
    cause = "nobody holds it, so no task is known"
    views = [view for place in found.places.all for view in place.views]
    if views:
        task = views[0].holder.get("task")
        cause = "its holder is no task"
        if task is not None:
            cause = f"the app has no task {one_line(task, LONGEST)!r} that takes a lock"
    return (
        f"A worker that gets it now {meets}. What {option} then says is not known from the name: "
        f"{cause}. Ask with the task: 'redlock why TASK ARGS'."
    )


def show_holder(view: LockView, found: Explanation) -> None:
    votes = f"on {len(view.stored_on)} of {len(found.lock.nodes)} nodes"
    if view.is_foreign:
        click.echo(f"  Something else than celery-redlock has written its key, {votes}.")
        return
    role = "Held" if view == found.holder else "An attempt under way, or left over"
    click.echo(f"  {role}: {who(view.holder, time.time())}")
    times = scalar(view.holder.get("renewals"))
    renewed = f"renewed {times} time{'' if times == 1 else 's'}, " if times else ""
    fence = f"fence {view.fence}, " if view.fence else ""
    rest = one_line(f"{renewed}{fence}token {view.holder.get('token', '?')}", LONGEST)
    click.echo(f"  {rest}; {votes}, ttl left {left(view.ttl)}")
    if view == found.holder and found.workers and not any(found.workers.values()):
        none_of = counted(len(found.workers), "worker")
        verb = "answers" if len(found.workers) == 1 else "answer"
        token = one_line(view.holder.get("token", "TOKEN"), LONGEST)
        name = shlex.quote(one_line(found.lock.name, LONGEST))
        click.echo(
            f"  {none_of} {verb}, and none has it: its worker is gone, or too busy to answer, as "
            "a solo worker is with a task. If it is gone, "
            f"'redlock release {name} --token {token}' releases it before its lease ends."
        )
    if view.ttl is None:
        click.echo(
            "  This key never expires, so no task of ours has written it like that. If its holder "
            "is gone, 'redlock release' releases it."
        )


def show_places(places: Places) -> None:
    rows: list[tuple[str, ...]] = []
    for place in places.all:
        name, nodes = one_line(place.stored_name, LONGEST), len(place.nodes)
        if not place.views:
            rows.append((name, place.state, *[""] * (len(LOCK_HEAD) - 2)))
        rows += [lock_row(view, nodes) for view in place.views]
    show_table(LOCK_HEAD, rows, LOCK_COLOURS, LOCK_SPARE)


def show_waiters(places: Places) -> None:
    waiters = places.waiters
    if not waiters:
        return
    oldest = since_in_words(waiters[0].since)
    click.echo(f"Waiting: {len(waiters)}{f', the first for {oldest}' if oldest else ''}")
    rows = [
        (since_in_words(it.since) or "?", *(one_line(part or "?", LONGEST) for part in parts))
        for it in waiters[:SHOWN]
        for parts in [(it.task_id, it.task, it.host, it.pid)]
    ]
    show_table(("WAITS FOR", "TASK ID", "TASK", "HOST", "PID"), rows)
    if len(waiters) > SHOWN:
        click.echo(f"... and {len(waiters) - SHOWN} more; --json has them.")
    click.echo()


def show_nodes(lock: OneLock) -> None:
    rows = []
    for node in lock.nodes:
        plain = node_as_json(node, lock)
        token = "" if node.state in ("down", "unfit") else "free"
        rest = ""
        if plain["ttl"] != 0.0:
            token, rest = one_line(plain["token"] or "not ours", LONGEST), left(plain["ttl"])
        rows.append(
            (node.node, node.state, token, rest, str(plain["fence"] or ""), one_line(node.problem))
        )
    show_table(("NODE", "STATE", "TOKEN", "TTL LEFT", "FENCE", "PROBLEM"), rows, STATES)
