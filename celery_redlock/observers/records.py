"""Events as plain JSON values, for whatever takes them out of the process."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from celery_redlock.events import Event
from celery_redlock.lock.records import LONGEST_NAME
from celery_redlock.process.log import cut

__all__ = ["record_of", "reported_as"]

#: What is said about a holder: who and where it is. Not its token, not even the public part.
HOLDER = ("task", "task_id", "execution", "host", "pid", "since", "ttl", "entry", "due")


def record_of(event: Event) -> dict[str, Any]:
    """
    Return *event* as plain JSON values.

    Beside its fields: ``event`` (the name of its class), ``at`` [s, Unix time], ``host`` and
    ``pid`` of this process; ``report`` only where it is true. A lock's name is as in its key.
    Neither a token nor an argument value, except where a lock name of the user's holds one.
    """
    fields = dict(vars(event))
    if not fields.get("report"):
        fields.pop("report", None)
    if "holder" in fields:
        fields["holder"] = {key: fields["holder"][key] for key in HOLDER if key in fields["holder"]}
    if "name" in fields:  # as it is in a key, and so in all that operators see of the lock
        fields["name"] = cut(str(fields["name"]), LONGEST_NAME)
    where = {"at": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
    return {"event": type(event).__name__, **where, **fields}


def reported_as(event: Event) -> str:
    """Return the cause that a report counts; "" if it is none."""
    return event.counts_as if getattr(event, "report", False) else ""
