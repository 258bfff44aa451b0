"""How nodes and locks are listed for an operator: as text, or as what goes into JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from celery_redlock.lock.lease import quorum
from celery_redlock.lock.live import LockView
from celery_redlock.lock.survey import NodeStatus
from celery_redlock.ops.text import duration, one_line, show_table
from celery_redlock.settings import Settings

__all__ = ["count_up", "lock_as_json", "show_locks", "show_nodes", "verdict"]


def count_up(nodes: Sequence[NodeStatus]) -> int:
    """Return how many of *nodes* vote."""
    return sum(1 for node in nodes if node.state == "up")


def show_nodes(nodes: Sequence[NodeStatus]) -> None:
    """Print a line for each of *nodes*."""
    rows = [
        (
            node.node,
            node.state,
            node.version,
            duration(node.uptime) if node.version else "",
            f"{node.quarantine:.1f} s left" if node.quarantine else "",
            one_line(node.problem),
        )
        for node in nodes
    ]
    show_table(("NODE", "STATE", "VERSION", "UPTIME", "QUARANTINE", "PROBLEM"), rows)


def verdict(nodes: Sequence[NodeStatus], settings: Settings) -> str:
    """Return in words whether *nodes* can grant locks, and what helps if not."""
    voting, needed = count_up(nodes), quorum(len(nodes))
    counted = f"{voting} of {len(nodes)} nodes can vote, {needed} are needed."
    if voting >= needed:
        return f"Quorum: yes. {counted}"
    lines = [f"Quorum: NO. {counted} No lock can be taken or renewed."]
    states = {node.state for node in nodes}
    if "unmarked" in states:
        lines.append(
            "An unmarked node is new or has lost its memory. It votes at most "
            f"{settings.rules.quarantine:.0f} s after the first worker finds it, or at once after "
            "'celery -A APP redlock bootstrap'."
        )
    if "quarantined" in states:
        lines.append("A quarantined node votes by itself as soon as its quarantine is over.")
    return "\n".join(lines)


def show_locks(locks: Sequence[LockView], nodes: int) -> None:
    """Print a line for each of *locks*, which stand on some of so many *nodes*."""
    if not locks:
        click.echo("No live locks.")
        return
    rows = []
    for lock in locks:
        who = lock_as_json(lock, nodes)
        names = [str(who[field] or "?") for field in ("name", "task_id", "task", "host", "pid")]
        age = "?" if who["age"] is None else duration(who["age"])
        rows.append((*map(one_line, names), age, f"{lock.ttl:.1f} s", f"{len(lock.votes)}/{nodes}"))
    show_table(("LOCK", "TASK ID", "TASK", "HOST", "PID", "AGE", "TTL LEFT", "VOTES"), rows)


def lock_as_json(lock: LockView, nodes: int) -> dict[str, Any]:
    """Return what may be told of *lock*, which stands on some of so many *nodes*; no token."""
    holder, since = lock.holder, lock.holder.get("since")
    return {
        "name": lock.name,
        **{field: holder.get(field) for field in ("task_id", "task", "execution", "host", "pid")},
        "age": max(0.0, time.time() - since) if isinstance(since, (int, float)) else None,
        "ttl": lock.ttl,
        "votes": lock.votes,
        "held": len(lock.votes) >= quorum(nodes),
    }
