"""
The app of a cell, for its workers and beats (``-A benchmarks.peers.app``) and for its client.

The task records its bodies: how long one takes is the row's plan, by its first argument and by
how many ran before it.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from celery import Celery

from benchmarks.peers.contestants import DECLARE
from benchmarks.peers.rows import BY_KEY, INTERVAL, Row
from support.events import body, read
from support.redelivery import look_often

#: Environment variable: the cell, as JSON.
CELL = "PEERS_CELL"
#: How long a retry waits [s].
COUNTDOWN = 3


@dataclass(frozen=True)
class Cell:
    """
    One cell as its processes know it.

    Attributes:
        row: Key of its row.
        column: Name of its column.
        broker: URL of the server for messages and results.
        nodes: URLs of the lock servers.
        events: File that the tasks record to.
    """

    row: str
    column: str
    broker: str
    nodes: list[str]
    events: str

    def as_json(self) -> str:
        """Return it as its processes are told of it."""
        return json.dumps(asdict(self))


def make_app(cell: Cell, *, is_current: bool = False) -> Celery:
    """Return the app of *cell*, with its task declared."""
    row = BY_KEY[cell.row]
    app = Celery("peers", set_as_current=is_current)
    app.conf.update(
        broker_url=cell.broker,
        result_backend=cell.broker,
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
        task_track_started=True,
        **row.conf,
    )
    if cell.row == "beats":
        entry = {"task": "work", "schedule": INTERVAL, "args": ["tick"]}
        app.conf.beat_schedule = {"entry": entry}
    DECLARE[cell.column](app, row, cell.nodes, body_of(cell, row))
    app.task(name="total", shared=False)(total)
    return app


def body_of(cell: Cell, row: Row) -> Any:
    """Return the body that all tasks of *row* have."""

    def work(self: Any, a: Any, b: str = "x") -> str:
        name = f"{a} {b}"
        before = sum(event["name"] == name for event in read(cell.events, "start"))
        plan = row.plan[str(a)] if str(a) in row.plan else row.plan["job"]
        with body(cell.events, name, task=self.request.id, retries=self.request.retries):
            time.sleep(plan[min(before, len(plan) - 1)])  # stands for work
        if a == "again" and not before:
            raise self.retry(countdown=COUNTDOWN)
        return f"result of {name}"

    return work


def total(parts: list[Any]) -> int:
    """Be the body of a chord."""
    return len(parts)


if CELL in os.environ:
    look_often()
    app = make_app(Cell(**json.loads(os.environ[CELL])), is_current=True)
