"""
The app of `tests/acceptance/test_unavailable.py`: one task for each policy.

Every body writes down under which lock it ran and what its request carried.
"""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery

from celery_redlock import Reschedule, Retry, current_lock
from celery_redlock.task.base import RedlockTask
from support.events import body

app = Celery("unavailable", broker=os.environ["BROKER"], backend=os.environ["BROKER"])
app.conf.update(
    {
        "redlock_ttl": 6,
        "redlock_max_ttl": 6,
        "redlock_node_timeout": 1.0,
        "result_extended": True,
        "broker_connection_retry_on_startup": True,
        # By default Celery itself takes 2.8 s to shut down, of which 1 s is a last BRPOP.
        "broker_transport_options": {"polling_interval": 0.1},
        **json.loads(os.environ.get("MORE", "{}")),
    }
)
if os.environ["NODES"]:
    app.conf.redlock_nodes = os.environ["NODES"].split(",")


def work(self: Any, value: int, key: str) -> int:
    lock, request = current_lock(), self.request
    seen = {
        "lock": type(lock).__name__,
        "fence": lock.fence,
        "retries": request.retries,
        "headers": dict(request.headers or {}),
        "priority": request.delivery_info.get("priority"),
        "queue": request.delivery_info.get("routing_key"),
        "expires": request.expires,
    }
    with body(os.environ["EVENTS"], key, **seen):
        return value * 10


def locked(name: str, **options: Any) -> None:
    decorated: Any = app.task(bind=True, base=RedlockTask, name=name, unique_on=("key",), **options)
    decorated(work)


locked("skipping", on_unavailable="skip")
locked("patient", on_unavailable="skip", lock_wait=1.0)
locked("failing", on_unavailable="fail")
locked("retrying", on_unavailable=Retry(countdown=1))
# Celery stores RETRY when the next try is published, over its FAILURE if that is quicker.
locked("retrying_twice", on_unavailable=Retry(countdown=3), max_retries=2)
locked("by_default")
locked("coming_again", on_unavailable=Reschedule(base=1.0, cap=1.0), max_retries=0)
locked("coming_twice", on_unavailable=Reschedule(base=1.0, cap=1.0, max_reschedules=2))
locked("unlocked", on_unavailable="run_unlocked")


@app.task(name="plain")
def plain(value: Any) -> Any:
    return value
