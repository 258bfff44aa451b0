"""
The app of the demo: what a user would write, plus a record of what its task really did.

A body writes a JSON line when it starts, while it runs and when it ends, with one O_APPEND write,
so that lines of different processes neither mix nor get lost when a process is killed. The demo's
claims are computed from these lines, and from nothing that the library says of itself.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery, Task

from celery_redlock import RedlockTask, Reschedule, current_lock

__all__ = ["TTL", "VISIBILITY", "Run", "app", "bill", "overlapping", "read_runs", "settings_in"]

#: How long a lock lives unless it is renewed [s]; the default is 30, too long to watch.
TTL = 2.0
#: When the broker delivers a message again that nobody acknowledged [s]; the default is an hour.
VISIBILITY = 3.0
#: How often a body writes down that it is still there [s].
TICK = 0.1

BROKER, NODES = "REDLOCK_DEMO_BROKER", "REDLOCK_DEMO_NODES"
RECORD, WITHOUT_LOCKS = "REDLOCK_DEMO_RECORD", "REDLOCK_DEMO_WITHOUT_LOCKS"


def settings_in(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the app's settings as *environment* has them."""
    broker = environment.get(BROKER, "memory://")
    return {
        "broker_url": broker,
        "broker_transport_options": {"visibility_timeout": VISIBILITY},
        "result_backend": broker if broker.startswith("redis") else "cache+memory://",
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "redlock_nodes": environment.get(NODES, "redis://127.0.0.1:6379/0").split(),
        "redlock_ttl": TTL,
        "redlock_max_ttl": TTL,
        # By default the pause grows up to a minute.
        "redlock_on_unavailable": Reschedule(base=1.0, cap=2.0),
    }


app = Celery("demo", set_as_current=False)
app.conf.update(settings_in(os.environ))
protected: type[Task[..., Any]] = Task if os.environ.get(WITHOUT_LOCKS) else RedlockTask


@app.task(base=protected, bind=True, lock_key="invoice:{invoice}")
def bill(self: Any, invoice: int, seconds: float) -> str:
    """Bill an invoice, which takes so many *seconds* and must not be done twice at once."""
    lock = current_lock() if protected is RedlockTask else None
    facts = {"task": self.request.id, "pid": os.getpid(), "invoice": invoice}
    # The monotonic clock is one for all processes of a machine, and nobody can set it.
    started = time.monotonic()
    write("start", started, **facts, fence=lock and lock.fence)
    while time.monotonic() < started + seconds:
        time.sleep(TICK)  # stands for a piece of the work
        if lock is not None:
            lock.ensure_held()
            write("tick", started, **facts, renewals=lock.renewals)
    write("end", started, **facts)
    return "billed"


def write(kind: str, started: float, **facts: Any) -> None:
    """Add a line of this *kind* to the record, of the run that has *started* then."""
    line = {"kind": kind, "at": time.monotonic(), "started": started, **facts}
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    file = os.open(os.environ.get(RECORD, os.devnull), flags, 0o600)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


@dataclass
class Run:
    """
    One run of the task's body; moments are of `time.monotonic` [s].

    Attributes:
        over: When it was; None while it runs.
        renewals: How often its lock had been renewed when it last told.
    """

    task: str
    pid: int
    invoice: int
    started: float
    fence: int | None
    over: float | None = None
    is_killed: bool = False
    renewals: int = 0

    @property
    def lasted(self) -> float:
        """How long it took, or takes up to now [s]."""
        return (self.over or time.monotonic()) - self.started


def read_runs(path: Path, killed: Mapping[int, float]) -> list[Run]:
    """Return the runs in the record, by start; *killed*: the processes that were, and when."""
    runs: dict[tuple[int, float], Run] = {}
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith(b"\n"):
            break  # is being written at this moment
        fact = json.loads(line)
        pid, started = fact["pid"], fact["started"]
        if fact["kind"] == "start":
            run = Run(fact["task"], pid, fact["invoice"], started, fact["fence"])
            runs[pid, started] = run
        run = runs[pid, started]
        run.renewals = fact.get("renewals", run.renewals)
        if fact["kind"] == "end":
            run.over = fact["at"]
    for run in runs.values():
        if run.over is None and run.pid in killed:
            run.over, run.is_killed = killed[run.pid], True
    return sorted(runs.values(), key=lambda run: run.started)


def overlapping(runs: Iterable[Run]) -> int:
    """Return how many of *runs* started while another run of the same invoice was not over."""
    until: dict[int, float] = {}
    found = 0
    for run in sorted(runs, key=lambda run: run.started):
        before = until.get(run.invoice, 0.0)
        found += run.started < before
        until[run.invoice] = max(before, float("inf") if run.over is None else run.over)
    return found
