"""
A record of what happened, written by many processes and read by one test.

Each event is a JSON line added with one O_APPEND write, so that lines of different
processes neither mix nor get lost when a process is killed. Times are of a clock that
all processes of a machine share and nobody can set.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

__all__ = ["Body", "bodies", "body", "most_at_once", "now", "overlaps", "read", "record"]

Event = dict[str, Any]


def now() -> float:
    """Return the time of the clock all events are stamped with [s, same in all processes]."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


#: How each event begins.
START = b'{"at":'


def record(path: str | Path, kind: str, **fields: Any) -> None:
    """Add one event, stamped with ``at`` [s, as :func:`now`] and ``pid``."""
    event = {"at": now(), "pid": os.getpid(), "kind": kind, **fields}
    line = json.dumps(event, default=str).encode() + b"\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


@contextmanager
def body(path: str | Path, name: str, **fields: Any) -> Iterator[str]:
    """
    Record the ``start`` and the ``end`` of a task's body that is to be alone under *name*.

    Yields:
        The id of this body; ``record(path, "tick", name=..., body=id)`` says that it still ran.
    """
    mine = {"name": name, "body": uuid.uuid4().hex, **fields}
    record(path, "start", **mine)
    error = None
    try:
        yield mine["body"]
    except BaseException as failure:
        error = type(failure).__name__
        raise
    finally:
        record(path, "end", **mine, error=error)


def read(path: str | Path, kind: str | None = None) -> list[Event]:
    """Return the events so far, of one kind or all, in the order of their time."""
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    # A last line without its end is being written at this moment; one that was never ended, as of
    # a process that was killed while it wrote, stands before the next one.
    events = [json.loads(line[line.rindex(START) :]) for line in lines if line.endswith(b"\n")]
    return sorted((e for e in events if kind in (None, e["kind"])), key=lambda e: e["at"])


@dataclass(frozen=True)
class Body:
    """
    One run of a task's body.

    Attributes:
        name: What it had to be alone under.
        body: Its id.
        pid: The process it ran in.
        started: Its first event [s, as :func:`now`].
        ended: Its last event [s]: of a body that was killed, the last moment known of it.
        finished: Whether that last event is an ``end``.
    """

    name: str
    body: str
    pid: int
    started: float
    ended: float
    finished: bool


def bodies(events: Iterable[Event]) -> list[Body]:
    of_bodies = [event for event in events if event.get("body")]
    by_id = sorted(of_bodies, key=lambda e: (e["name"], e["body"], e["at"]))
    found = []
    for (name, ident), group in groupby(by_id, key=lambda e: (e["name"], e["body"])):
        first, *rest = group
        last = rest[-1] if rest else first
        ended = last["kind"] == "end"
        found.append(Body(name, ident, first["pid"], first["at"], last["at"], finished=ended))
    return sorted(found, key=lambda b: (b.name, b.started))


def overlaps(events: Iterable[Event]) -> list[tuple[Body, Body]]:
    """Return every pair of bodies of one name that ran at the same time; the earlier one first."""
    pairs: list[tuple[Body, Body]] = []
    for _, group in groupby(bodies(events), key=lambda b: b.name):
        running: list[Body] = []
        for later in group:
            running = [earlier for earlier in running if earlier.ended > later.started]
            pairs.extend((earlier, later) for earlier in running)
            running.append(later)
    return pairs


def most_at_once(bodies: Iterable[Body]) -> int:
    """Return how many of *bodies* ran at one time, at most."""
    running = most = 0
    for _, step in sorted(step for it in bodies for step in ((it.started, 1), (it.ended, -1))):
        running += step
        most = max(most, running)
    return most
