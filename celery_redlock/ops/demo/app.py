"""
The app of the demo: what a user would write, and a record of what its task really did.

A body writes a JSON line when it starts and when it ends, with one O_APPEND write, so that lines of
different processes neither mix nor get lost when a process is killed. The demo's claims are
computed from these lines, and from nothing that the library says of itself.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from celery import Celery, Task

from celery_redlock import RedlockTask, Reschedule, current_lock

__all__ = ["SCENE", "TTL", "VISIBILITY", "Run", "app", "bill", "overlapping", "read_runs", "use"]

#: How long a lock lives unless it is renewed [s]; the default is 30, too long to watch.
TTL = 3.0
#: When the broker delivers a message again that nobody acknowledged [s]; the default is an hour.
VISIBILITY = 3.0
#: How long a piece of the work takes [s].
PIECE = 0.1
#: The variable that tells a worker its scene as JSON: broker, nodes, record, with_locks.
SCENE = "REDLOCK_DEMO"

scene: dict[str, Any] = json.loads(os.environ.get(SCENE, "{}"))
app = Celery("demo", set_as_current=False)
with_locks = scene.get("with_locks", True)
protected: type[Task[..., Any]] = RedlockTask if with_locks else Task
#: On a plain task it would keep the worker from starting.
named: dict[str, Any] = {"lock_key": "invoice:{invoice}"} if with_locks else {}


def use(servers: Mapping[str, Any]) -> None:
    app.conf.update(
        broker_url=servers["broker"],
        broker_transport_options={"visibility_timeout": VISIBILITY},
        result_backend=servers["broker"],
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        redlock_nodes=servers["nodes"],
        redlock_ttl=TTL,
        redlock_max_ttl=TTL,
        # As long as such a lock allows: a machine that is busy must not make a server late.
        redlock_node_timeout=0.45 * TTL,
        # By default the pause grows up to a minute.
        redlock_on_unavailable=Reschedule(base=1.0, cap=2.0),
    )


if scene:
    use(scene)


@dataclass(frozen=True)
class Run:
    """One run of the task's body; moments are of `time.monotonic` [s]."""

    task: str
    pid: int
    invoice: int
    started: float
    fence: int | None
    over: float | None = None  # None while it runs
    is_killed: bool = False
    renewals: int = 0  # how often its lock had been renewed by then

    @property
    def lasted(self) -> float:
        return (self.over or time.monotonic()) - self.started


@app.task(base=protected, bind=True, shared=False, **named)
def bill(self: Any, invoice: int, seconds: float) -> str:
    """Bill an invoice, which takes so many *seconds* and must not be done twice at once."""
    lock = current_lock() if with_locks else None
    # The monotonic clock is one for all processes of a machine, and nobody can set it.
    started = time.monotonic()
    run = Run(self.request.id, os.getpid(), invoice, started, lock.fence if lock else None)
    write(run)
    while time.monotonic() < started + seconds:
        time.sleep(PIECE)  # stands for a piece of the work
        if lock is not None:
            lock.ensure_held()
    write(replace(run, over=time.monotonic(), renewals=lock.renewals if lock else 0))
    return "billed"


def write(run: Run) -> None:
    with Path(scene["record"]).open("ab", buffering=0) as record:
        record.write(json.dumps(asdict(run)).encode() + b"\n")


def read_runs(record: Path, killed: Mapping[int, float]) -> list[Run]:
    """Return the runs in *record*, by start; *killed*: process -> when it was."""
    runs: dict[tuple[int, float], Run] = {}
    # What stands behind the last newline is being written at this moment.
    for line in record.read_bytes().split(b"\n")[:-1] if record.exists() else ():
        run = Run(**json.loads(line))
        if run.over is None and run.pid in killed:
            run = replace(run, over=killed[run.pid], is_killed=True)
        runs[run.pid, run.started] = run
    return sorted(runs.values(), key=lambda run: run.started)


def overlapping(runs: Sequence[Run]) -> int:
    def was_running(other: Run, run: Run) -> bool:
        began = other.invoice == run.invoice and other.started < run.started
        return began and (other.over is None or other.over > run.started)

    return sum(any(was_running(other, run) for other in runs) for run in runs)
