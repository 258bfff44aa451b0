"""Requests to a node about a reservation, one function per script, and their values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery_redlock.lock.records import Keys, encode_info, ms, record_key
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import Request
from celery_redlock.unique.scripts import END, RESERVE, START

__all__ = [
    "AS_IT_IS",
    "OVER",
    "Start",
    "Trigger",
    "end_request",
    "reservation_keys",
    "reserve_request",
    "start_request",
]

#: How long a node keeps the reservation of a task that runs; it counts only while its lock is held.
RETENTION = 7 * 24 * 3600.0
#: For a reservation that is not to change when its task starts, and for one that then ends.
AS_IT_IS, OVER = "as it is", "over"


class Trigger(NamedTuple):
    """A publish that wants to reserve a lock name."""

    name: str
    life: float  # how long the reservation is to stand by itself [s]
    info: dict[str, Any]  # description of the owner; plain JSON values, among them ``task_id``
    window: float = 0.0  # how long it is to stand after a failure, counted from the publish [s]
    expires: bool = False  # whether its message may, so that no other publish can rely on it
    #: Of the call, as JSON, where a duplicate is to hand them over to the task that is queued.
    arguments: bytes = b""


@dataclass(frozen=True)
class Start:
    """A task starts under its lock."""

    #: Description of the task, for a reservation that has lapsed while nobody else had the name.
    info: dict[str, Any]
    lock_token: str = field(repr=False)
    execution: str  # which one of the task it is; merged arguments are for the first
    #: For how long the reservation is to stand by itself from now on [s], 0.0 for as long as the
    #: lock is held; `AS_IT_IS`; or `OVER`.
    alone: float | str
    life: float  # how long a reservation of this task stands by itself from its publish [s]


def reservation_keys(rules: Rules, name: str) -> tuple[bytes, bytes]:
    """Return the keys of the reservations of *name*: who is queued or runs, and who is next."""
    return record_key(rules.prefix, "queued", name), record_key(rules.prefix, "next", name)


def reserve_request(rules: Rules, trigger: Trigger, token: str, version: int) -> Request:
    keys = Keys.of(rules.prefix, trigger.name)
    return Request(
        RESERVE,
        (*reservation_keys(rules, trigger.name), keys.lock, keys.boot, keys.quarantine),
        (
            token.encode(),
            encode_info(trigger.info),
            ms(trigger.life),
            ms(trigger.window),
            b"-" if trigger.expires else b"",
            trigger.arguments,
            b"%d" % version,
            ms(RETENTION),
            rules.quarantine_ms,
        ),
    )


def start_request(rules: Rules, name: str, token: str, begun: Start) -> Request:
    alone = begun.alone if isinstance(begun.alone, str) else f"{begun.alone * 1000:.0f}"
    return Request(
        START,
        (*reservation_keys(rules, name), Keys.of(rules.prefix, name).lock),
        (
            token.encode(),
            encode_info(begun.info),
            begun.lock_token.encode(),
            begun.execution.encode(),
            alone.encode(),
            ms(begun.life),
            ms(max(RETENTION, begun.life)),
        ),
    )


def end_request(rules: Rules, name: str, token: str, how: str = OVER, life: float = 0.0) -> Request:
    keys = (*reservation_keys(rules, name), Keys.of(rules.prefix, name).lock)
    return Request(END, keys, (token.encode(), how.encode(), ms(life)))
