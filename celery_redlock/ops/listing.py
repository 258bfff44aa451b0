"""How nodes and locks are listed for an operator: as text, or as what goes into JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from celery_redlock.ops.screen import COLOURS
from celery_redlock.ops.text import LONGEST, one_line, show_table
from celery_redlock.reading.nodes import NodeStatus
from celery_redlock.reading.quorum import MARKS
from celery_redlock.reading.stored import LockView
from celery_redlock.words import duration

__all__ = [
    "LOCK_HEAD",
    "STATES",
    "holder_as_json",
    "left",
    "lock_as_json",
    "lock_row",
    "scalar",
    "show_locks",
    "show_nodes",
    "who_as_json",
]

#: State of a node -> how it is shown on a terminal.
STATES = {state: COLOURS[mark] for state, mark in MARKS.items()}
LOCK_HEAD = (
    *("LOCK", "TASK ID", "TASK", "HOST", "PID", "AGE", "TTL LEFT"),
    *("VOTES", "FENCE", "WAITING", "TOKEN"),
)
#: What a holder tells of itself, and we tell of it.
HOLDER = ("task_id", "task", "execution", "host", "pid", "since")


def show_nodes(nodes: Sequence[NodeStatus]) -> None:
    """Print a line for each of *nodes*."""
    rows = [
        (
            node.node,
            node.state,
            one_line(node.version),
            duration(node.uptime) if node.version else "",
            f"{node.quarantine:.1f} s left" if node.quarantine else "",
            one_line(node.problem),
        )
        for node in nodes
    ]
    show_table(("NODE", "STATE", "VERSION", "UPTIME", "QUARANTINE", "PROBLEM"), rows, STATES)


def show_locks(locks: Sequence[LockView], nodes: int) -> None:
    """Print a line for each of *locks*, which stand on some of so many *nodes*."""
    if not locks:
        click.echo("No live locks.")
        return
    show_table(LOCK_HEAD, [lock_row(lock, nodes) for lock in locks], {"never": "red"})


def lock_row(lock: LockView, nodes: int) -> tuple[str, ...]:
    """Return *lock*, which stands on some of so many *nodes*, in cells under `LOCK_HEAD`."""
    who = lock_as_json(lock, nodes)
    names = [str(who[field] or "?") for field in ("name", "task_id", "task", "host", "pid")]
    return (
        *(one_line(name, LONGEST) for name in names),
        "?" if who["age"] is None else duration(who["age"]),
        left(lock.ttl),
        f"{len(lock.votes)}/{nodes}",
        str(lock.fence or ""),
        str(lock.waiting or ""),
        one_line(who["token"] or "not ours", LONGEST),
    )


def left(ttl: float | None) -> str:
    """Return what is left of a lease, in words; ``never`` for one that does not end."""
    return "never" if ttl is None else f"{ttl:.1f} s"


def lock_as_json(lock: LockView, nodes: int) -> dict[str, Any]:
    """
    Return what may be told of *lock*, which stands on some of so many *nodes*.

    Of its token that is the public part, by which ``redlock release`` knows the holder that an
    operator has seen.
    """
    return {
        "name": lock.name,
        **holder_as_json(lock),
        "held": lock.is_held(nodes),
        "fence": lock.fence or None,
        "waiting": lock.waiting,
        "foreign": lock.is_foreign,
    }


def holder_as_json(lock: LockView) -> dict[str, Any]:
    """Return what may be told of the holder of *lock*, and where it stands."""
    return {
        **who_as_json(lock.holder),
        "age": lock.age,
        "ttl": lock.ttl,
        "votes": lock.votes,
        "token": lock.holder.get("token"),
    }


def who_as_json(holder: dict[str, Any]) -> dict[str, Any]:
    """Return what *holder* tells of itself that we tell on; None for what it does not tell."""
    return {field: scalar(holder.get(field)) for field in HOLDER}


def scalar(value: object) -> str | float | None:
    """Return *value* if it is text or a number; else somebody else wrote it."""
    return value if isinstance(value, (str, int, float)) else None
