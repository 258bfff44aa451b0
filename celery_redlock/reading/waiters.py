"""
Who waits for a lock, and since when: what the nodes have of it, in one list.

Each node has two sorted sets per lock (`celery_redlock.lock.waiting`): who waits, and the tickets
of those who can be woken. Only a ticket says since when, and in which process. Others may have
written there, too: what is no record of ours is passed over.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery_redlock.lock.records import (
    CHANNEL_LENGTH,
    END_OF_TIME,
    OWNER_LENGTH,
    SEVERAL,
    TOKEN_LENGTH,
    object_in,
)

__all__ = [
    "NOBODY",
    "Noted",
    "NotedWaiters",
    "Waiter",
    "in_order",
    "noted_waiters",
    "oldest_since",
    "waiters_of",
]

HEX = re.compile(rb"[0-9a-f]+")


class Noted(NamedTuple):
    """
    One record of a node: that somebody waits, or a ticket.

    Attributes:
        ident: What it is known by; it is a part of a token, and never shown.
        info: Description.
        at: When the node last heard of it, or since when it waits [s, Unix time].
    """

    ident: bytes
    info: Mapping[str, Any]
    at: float

    def __repr__(self) -> str:
        return f"<Noted {self.at:.3f}>"


class NotedWaiters(NamedTuple):
    """
    What one node has of those who wait for one lock.

    Attributes:
        waiting: Who waits; those that were heard of last.
        tickets: Of those who can be woken, the oldest first.
    """

    waiting: Sequence[Noted] = ()
    tickets: Sequence[Noted] = ()


NOBODY = NotedWaiters()


@dataclass(frozen=True)
class Waiter:
    """
    Somebody who waits for a lock. None for what is not known.

    Attributes:
        task: Name of its task.
        task_id: Id of that.
        host: Of the process that is notified when its turn has come.
        pid: Of that process.
        since: Since when it waits [s, Unix time].
    """

    task: str | None = None
    task_id: str | None = None
    host: str | None = None
    pid: int | None = None
    since: float | None = None

    @property
    def age(self) -> float | None:
        """For how long it has waited [s]."""
        return None if self.since is None else max(0.0, time.time() - self.since)


@dataclass
class _Found:
    """What all nodes together have of one who waits."""

    info: Mapping[str, Any]
    tickets: list[Noted] = field(default_factory=list)


def noted_waiters(waiting: Sequence[bytes], tickets: Sequence[bytes]) -> NotedWaiters:
    """Return what a node has of those who wait: members of its sorted sets, each with its score."""
    return NotedWaiters(
        noted(waiting, OWNER_LENGTH, OWNER_LENGTH),
        noted(tickets, TOKEN_LENGTH, TOKEN_LENGTH + CHANNEL_LENGTH),
    )


def noted(members: Sequence[bytes], ident: int, head: int) -> list[Noted]:
    """Return records that begin with *head* hexadecimal digits; *ident* of them are their own."""
    found = []
    for member, score in zip(members[::2], members[1::2], strict=False):
        description = member[head:].removeprefix(SEVERAL.encode())
        info, at = object_in(description), moment_in(score)
        is_ours = HEX.fullmatch(member[:head]) is not None and (info or description == b"{}")
        if is_ours and len(member) > head and at is not None:
            found.append(Noted(member[:ident], info, at))
    return found


def moment_in(score: bytes) -> float | None:
    """Return the moment [s, Unix time] in a score [ms]; None if it can be none."""
    try:
        at = float(score) / 1000.0
    except ValueError:
        return None
    return at if 0 <= at < END_OF_TIME else None


def oldest_since(found: Iterable[NotedWaiters]) -> float | None:
    """Return since when the oldest waits, by what each node has [s, Unix time]; None if unknown."""
    return min((ticket.at for one in found for ticket in one.tickets), default=None)


def waiters_of(found: Iterable[NotedWaiters]) -> list[Waiter]:
    """Return who waits by what all nodes have, the oldest first; those of no known age last."""
    of_nodes = list(found)
    waiting = {it.ident: _Found(it.info) for one in of_nodes for it in one.waiting}
    by_task: dict[Any, list[_Found]] = {}
    for it in waiting.values():
        by_task.setdefault(task_in(it.info), []).append(it)
    for ticket in (it for one in of_nodes for it in one.tickets):
        # One in ``lock_wait`` is known by the owner of its token. A message is known by its
        # execution, which no ticket has.
        itself = waiting.get(ticket.ident[:OWNER_LENGTH])
        same = [itself] if itself else by_task.get(task_in(ticket.info), ())
        for it in same if task_in(ticket.info)[1] or itself else ():
            it.tickets.append(ticket)
    return sorted(map(waiter, waiting.values()), key=in_order)


def task_in(info: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the name and the id of the task in a description."""
    return text_in(info, "task"), text_in(info, "task_id")


def waiter(found: _Found) -> Waiter:
    """Return who it is that waits."""
    task, task_id = task_in(found.info)
    newest = max(found.tickets, key=lambda it: number_in(it.info, "since"), default=None)
    if newest is None:
        return Waiter(task, task_id)
    pid = newest.info.get("pid")
    return Waiter(
        task,
        task_id,
        text_in(newest.info, "host"),
        pid if type(pid) is int else None,
        min(ticket.at for ticket in found.tickets),
    )


def in_order(it: Waiter) -> tuple[Any, ...]:
    """Return what waiters are sorted by: since when they wait, if that is known."""
    return it.since is None, it.since or 0.0, it.task or "", it.task_id or ""


def text_in(info: Mapping[str, Any], key: str) -> str | None:
    """Return the text at *key*; None if there is none."""
    value = info.get(key)
    return value if isinstance(value, str) and value else None


def number_in(info: Mapping[str, Any], key: str) -> float:
    """Return the number at *key*; 0.0 if there is none."""
    value = info.get(key)
    return float(value) if isinstance(value, (int, float)) and value < END_OF_TIME else 0.0
