"""Nodes, locks and records of the journal as text for the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import click

from celery_redlock.ops.as_json import who_as_json
from celery_redlock.ops.screen import COLOURS
from celery_redlock.ops.text import LONGEST, one_line, show_table
from celery_redlock.reading.nodes import NodeStatus
from celery_redlock.reading.quorum import MARKS
from celery_redlock.reading.sentences import sentence
from celery_redlock.reading.stored import LockView, ReservationView, StoredReservation
from celery_redlock.words import counted, duration, number

__all__ = [
    "LOCK_COLOURS",
    "LOCK_HEAD",
    "LOCK_SPARE",
    "RESERVATION_HEAD",
    "STATES",
    "left",
    "line",
    "local_time",
    "lock_row",
    "note_silent",
    "reservation_in_words",
    "reservation_row",
    "show_nodes",
    "since_in_words",
]

#: State of a node -> how it is shown on a terminal.
STATES = {state: COLOURS[mark] for state, mark in MARKS.items()}
LOCK_HEAD = (
    *("LOCK", "TASK ID", "TASK", "HOST", "PID", "AGE", "TTL LEFT"),
    *("VOTES", "FENCE", "WAITING", "OLDEST", "TOKEN"),
)
LOCK_COLOURS = {"never": "red"}
#: What a narrow terminal can do without, first to go first.
LOCK_SPARE = ("FENCE", "PID", "OLDEST", "WAITING", "HOST", "TASK")
RESERVATION_HEAD = ("NAME", "TASK ID", "TASK", "STATE", "STANDS FOR", "MERGED", "VOTES", "TOKEN")
#: Events that are noticed by more than one process: who noticed is worth a word.
NOTICED = ("Node", "Leader")


def show_nodes(nodes: Sequence[NodeStatus]) -> None:
    rows = [
        (
            node.node,
            node.state,
            "" if node.latency is None else f"{node.latency * 1000:.1f} ms",
            one_line(node.version),
            duration(node.uptime) if node.version else "",
            f"{node.quarantine:.1f} s left" if node.quarantine else "",
            one_line(node.problem),
        )
        for node in nodes
    ]
    head = ("NODE", "STATE", "LATENCY", "VERSION", "UPTIME", "QUARANTINE", "PROBLEM")
    show_table(head, rows, STATES)


def lock_row(lock: LockView, nodes: int) -> tuple[str, ...]:
    """Return cells under `LOCK_HEAD` for *lock*, which is on some of so many *nodes*."""
    who = who_as_json(lock.holder)
    names = [lock.name, *(who[field] for field in ("task_id", "task", "host", "pid"))]
    return (
        *(one_line(name or "?", LONGEST) for name in names),
        "?" if lock.age is None else duration(lock.age),
        left(lock.ttl),
        f"{len(lock.votes)}/{nodes}",
        str(lock.fence or ""),
        str(lock.waiting or ""),
        since_in_words(lock.waiting_since),
        one_line(lock.holder.get("token") or "not ours", LONGEST),
    )


def reservation_row(view: ReservationView, nodes: int) -> tuple[str, ...]:
    one, whose = view.reservation, who_as_json(view.reservation.info)
    return (
        *(one_line(part or "?", LONGEST) for part in (view.name, whose["task_id"], whose["task"])),
        state_of(one),
        left(one.left),
        str(one.merged or ""),
        f"{len(view.votes)}/{nodes}",
        "" if one.is_burst else one_line(one.seen, LONGEST),
    )


def state_of(seen: StoredReservation) -> str:
    if seen.is_running:
        return "begun"
    if seen.is_burst:
        return "debounced"
    return "ended" if seen.has_run else "stands" if seen.is_window else "waits"


def reservation_in_words(seen: StoredReservation) -> str:
    info = who_as_json(seen.info)
    if seen.is_burst:
        its_id = one_line(info["task_id"] or "?", LONGEST)
        return f"id {its_id}: the newest call of a burst, which ends in {seen.left:.0f} s at most"
    what = f"waits, {seen.left:.0f} s at most"
    if seen.is_running:
        what = "has begun"
    elif seen.has_run:
        what = f"has ended, and stands for {seen.left:.0f} s"
    elif seen.is_window:
        what = f"stands for {seen.left:.0f} s, whatever happens to it"
    merged = f", {counted(seen.merged, 'trigger')} merged into it" if seen.merged else ""
    task, its_id, token = (
        one_line(it or "?", LONGEST) for it in (info["task"], info["task_id"], seen.seen)
    )
    return f"task {task}, id {its_id}: {what}{merged}; token {token}"


def since_in_words(since: float | None) -> str:
    return "" if since is None else duration(max(0.0, time.time() - since))


def note_silent(nodes: Sequence[str]) -> None:
    if nodes:
        click.echo(
            f"Note: could not be read: {', '.join(nodes)}; see 'redlock status' and "
            "'redlock doctor'.",
            err=True,
        )


def left(ttl: float | None) -> str:
    return "never" if ttl is None else f"{ttl:.1f} s"


def line(record: Mapping[str, Any]) -> str:
    by = ""
    if str(record.get("event")).startswith(NOTICED):
        by = f" (process {record.get('pid', '?')} on {record.get('host', '?')})"
    # Others may have written to the nodes, too: no control character reaches the terminal.
    return f"{local_time(record.get('at'))}  {one_line(sentence(record) + by)}"


def local_time(at: object) -> str:
    try:
        return datetime.fromtimestamp(number(at), timezone.utc).astimezone().strftime("%F %T")
    except (OverflowError, ValueError, OSError):  # a year that there is not
        return "?"
