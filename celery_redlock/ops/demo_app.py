"""
The app of the demo: what a user would write, plus a record of what its tasks really did.

The worker of `celery_redlock.ops.demo` runs it, and is told by environment variables where
the servers are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery import Celery, Task

from celery_redlock import RedlockTask, Reschedule, current_lock
from celery_redlock.ops.demo_record import BodyRecord

__all__ = ["TTL", "app", "bill", "count_stock", "settings_in"]

#: How long a lock lives unless it is renewed [s]; the default is 30, too long to watch.
TTL = 2.0
#: How often a long task writes down that it is still there [s].
TICK = 0.2

BROKER, NODES = "REDLOCK_DEMO_BROKER", "REDLOCK_DEMO_NODES"
RECORD, WITHOUT_LOCKS = "REDLOCK_DEMO_RECORD", "REDLOCK_DEMO_WITHOUT_LOCKS"


def settings_in(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the app's settings as *environment* has them."""
    broker = environment.get(BROKER, "memory://")
    return {
        "broker_url": broker,
        "result_backend": broker if broker.startswith("redis") else "cache+memory://",
        "redlock_nodes": environment.get(NODES, "redis://127.0.0.1:6379/0").split(),
        "redlock_ttl": TTL,
        "redlock_max_ttl": TTL,
        # By default the pause grows up to a minute.
        "redlock_on_unavailable": Reschedule(base=1.0, cap=2.0),
    }


app = Celery("demo", set_as_current=False)
app.conf.update(settings_in(os.environ))
record = Path(os.environ.get(RECORD, os.devnull))
protected: type[Task[..., Any]] = Task if os.environ.get(WITHOUT_LOCKS) else RedlockTask


@app.task(base=protected, lock_key="invoice:{invoice}")
def bill(invoice: int, seconds: float) -> str:
    """Bill an invoice, which takes so many *seconds* and must not be done twice at once."""
    with BodyRecord(record, f"invoice {invoice}", fence()):
        time.sleep(seconds)  # stands for the work
    return "billed"


@app.task(base=protected, lock_key="stock")
def count_stock(seconds: float) -> str:
    """Do one long job, asking now and then whether the lock is still held."""
    until = time.monotonic() + seconds
    with BodyRecord(record, "stock", fence()) as body:
        while time.monotonic() < until:
            time.sleep(TICK)  # stands for a piece of the work
            if protected is RedlockTask:
                current_lock().ensure_held()
                body.write("tick", renewals=current_lock().renewals)
    return "counted"


def fence() -> int | None:
    """Return the number of the lock that this body runs under, None without locks."""
    return current_lock().fence if protected is RedlockTask else None
