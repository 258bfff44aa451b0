"""
Waiters for a lock, by what all nodes have recorded, in one list.

Each node has a hash per lock of who waits (`celery_redlock.lock.waiting.waiting`). Others may have
written there, too: what is no record of ours is passed over.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from celery_redlock.lock.records import CHANNEL_LENGTH, OWNER_LENGTH, object_in, since_of
from celery_redlock.lock.waiting.waiting import HEARD_FOR, LIMIT_LENGTH, MOMENT_LENGTH, NO_CHANNEL

__all__ = ["RecordedWaiter", "Waiter", "in_order", "oldest_since", "recorded_waiters", "waiters_of"]

WHO = re.compile(rb"[0-9a-f]{%d}" % OWNER_LENGTH)
RECORD = re.compile(
    rb"(.{%d})[0-9]{%d}([0-9]{%d})([0-9]{%d})(.*)"
    % (CHANNEL_LENGTH, LIMIT_LENGTH, MOMENT_LENGTH, MOMENT_LENGTH),
    re.DOTALL,
)


@dataclass(frozen=True)
class Waiter:
    """Somebody who waits for a lock; None for what is not known."""

    task: str | None
    task_id: str | None
    host: str | None  # of the process that gets a hint when the lock is free
    pid: int | None
    since: float  # [s, Unix time]

    @property
    def age(self) -> float:
        return max(0.0, time.time() - self.since)


class RecordedWaiter(NamedTuple):
    who: bytes  # a part of a token, never shown
    heard: float  # when the node last heard of it [s, Unix time]
    waiter: Waiter

    def __repr__(self) -> str:
        return f"<RecordedWaiter {self.waiter.since:.3f}>"


def recorded_waiters(fields: Sequence[bytes], now: float) -> list[RecordedWaiter]:
    """Return who waits by *fields* of that hash, each with its value, at the time *now* [s]."""
    pairs = zip(fields[::2], fields[1::2], strict=False)
    found = (recorded_waiter(who, value) for who, value in pairs if value is not None)
    return [one for one in found if one is not None and one.heard > now - HEARD_FOR]


def recorded_waiter(who: bytes, value: bytes) -> RecordedWaiter | None:
    match = RECORD.fullmatch(value)
    if match is None or WHO.fullmatch(who) is None:
        return None
    channel, first, last, description = match.groups()
    info = object_in(description)
    if not info and description != b"{}":
        return None
    heard, known = int(last) / 1000.0, int(first) / 1000.0
    since = min(heard, max(known, since_of(info) or 0.0))
    # A hint can reach its process, or nobody knows where it waits.
    place = info if channel != NO_CHANNEL.encode() else {}
    pid = place.get("pid")
    waiter = Waiter(
        text_in(info, "task"),
        text_in(info, "task_id"),
        text_in(place, "host"),
        pid if type(pid) is int else None,
        since,
    )
    return RecordedWaiter(who, heard, waiter)


def oldest_since(found: Iterable[RecordedWaiter]) -> float | None:
    return min((one.waiter.since for one in found), default=None)


def waiters_of(found: Iterable[RecordedWaiter]) -> list[Waiter]:
    by_who: dict[bytes, list[RecordedWaiter]] = {}
    for one in found:
        by_who.setdefault(one.who, []).append(one)
    return sorted(map(merged, by_who.values()), key=in_order)


def merged(found: Sequence[RecordedWaiter]) -> Waiter:
    newest = max(found, key=lambda one: one.heard).waiter
    return replace(newest, since=min(one.waiter.since for one in found))


def in_order(it: Waiter) -> tuple[Any, ...]:
    return it.since, it.task or "", it.task_id or ""


def text_in(info: Mapping[str, Any], key: str) -> str | None:
    value = info.get(key)
    return value if isinstance(value, str) and value else None
