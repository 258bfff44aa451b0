# ruff: noqa: ANN001, ANN201  tasks as their users write them
"""
The app of the acceptance tests: tasks that record their bodies, with or without locks.

Everything is set by the environment, so that a twin of a test differs from it in one word:
``LOCKS=off`` makes plain tasks of them all.
"""

from __future__ import annotations

import os
import time

from celery import Celery, Task
from celery.exceptions import Ignore, Reject

from celery_redlock import RedlockTask, current_lock
from support.events import body, record

EVENTS = os.environ.get("EVENTS", os.devnull)
TTL = float(os.environ.get("TTL", "60"))
LOCKED = os.environ.get("LOCKS", "on") == "on"
BASE = RedlockTask if LOCKED else Task

app = Celery("shop", broker=os.environ.get("BROKER"), backend=os.environ.get("BROKER"))
app.conf.update(
    redlock_nodes=os.environ.get("NODES", "redis://127.0.0.1:1").split(","),
    redlock_ttl=TTL,
    redlock_max_ttl=max(TTL, 3.0),
    redlock_node_timeout=min(1.0, TTL / 3),
    broker_connection_retry_on_startup=True,
    task_track_started=True,
    worker_prefetch_multiplier=1,
)
if not LOCKED:  # or a worker would take their options for those of a forgotten base
    app.conf.redlock_protect = {"*": None}


def lock_or_none():
    """Return the lock of the running task, None where tasks are plain."""
    return current_lock() if LOCKED else None


@app.task(base=BASE, bind=True, lock_key="bill:{invoice}")
def bill(self, invoice, seconds=0.01):
    """Bill an invoice, which takes *seconds* and must not happen twice at once."""
    with body(EVENTS, f"bill {invoice}", task=self.request.id):
        time.sleep(seconds)
    return {"billed": invoice, "fence": getattr(lock_or_none(), "fence", None)}


@app.task(base=BASE, bind=True, lock_key="keep:{name}")
def keep(self, name, renewals):
    """Hold the lock until it was renewed so often, asking for it all the time; returns that."""
    with body(EVENTS, f"keep {name}"):
        while self.lock.renewals < renewals:
            self.lock.ensure_held()
            time.sleep(0.02)
    return self.lock.renewals


@app.task(base=BASE, lock_key="lose:{name}")
def lose_asleep(name, seconds):
    """Sleep in one blocking call, never asking for the lock."""
    with body(EVENTS, f"lose {name}"):
        time.sleep(seconds)
    return "done"


@app.task(base=BASE, lock_key="lose:{name}")
def lose_busy(name, seconds):
    """Compute in pure Python, never asking for the lock, and swallowing every Exception."""
    with body(EVENTS, f"lose {name}"):
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            try:
                sum(range(500))
            except Exception:  # noqa: BLE001  what a careless body does
                record(EVENTS, "swallowed", name=name)
    return "done"


@app.task(base=BASE, lock_key="lose:{name}", on_lock_lost="warn")
def lose_warned(name, seconds):
    """Go on until the lock is lost, and a moment longer; tells whether it was."""
    with body(EVENTS, f"lose {name}"):
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not lock_or_none().is_lost:
            time.sleep(0.02)
        time.sleep(0.2)  # in which an exception would strike
    return lock_or_none().is_lost


@app.task(base=BASE, bind=True, lock_key="again", max_retries=None)
def again(self, times):
    """Retry at once, *times* times."""
    with body(EVENTS, "again", retries=self.request.retries):
        pass
    if self.request.retries < times:
        raise self.retry(countdown=0, max_retries=times)
    return self.request.retries


@app.task(base=BASE, lock_key="link")
def link(before):
    """Be a member of a chain whose members all share one lock."""
    with body(EVENTS, "link", before=before):
        return before + 1


@app.task(base=BASE, bind=True, lock_key="end:{name}")
def end(self, name, way):
    """End in one of the *ways* that a body can end."""
    with body(EVENTS, f"end {name}"):
        if way == "ignore":
            raise Ignore
        if way == "reject":
            raise Reject("no", requeue=False)
        if way == "exit":
            raise SystemExit(0)
        if way == "error":
            raise ValueError(name)
        if way == "replace":
            raise self.replace(bill.si(f"instead of {name}"))
        time.sleep(float(way))  # until the soft time limit


@app.task(base=BASE)
def total(numbers):
    """Be the body of a chord."""
    return numbers
