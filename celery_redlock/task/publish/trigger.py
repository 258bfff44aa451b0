"""The reservation that a publish asks the nodes for: how long, and with which arguments."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.utils import json

from celery_redlock.errors import LockKeyError
from celery_redlock.task.options import LONGEST_UNIQUE_FOR, LockOptions
from celery_redlock.task.publish.message import Message
from celery_redlock.unique.requests import Trigger

__all__ = ["trigger_of"]

#: How much of a task's arguments the lock nodes keep [bytes of JSON].
LARGEST_KEPT = 2**16


def trigger_of(message: Message, name: str, chosen: LockOptions) -> Trigger:
    task, options = message.task, message.options
    arguments = carried(task, (message.args, message.kwargs)) if chosen.reruns else b""
    expires = from_now(options.get("expires", task.expires), task.app)
    window = chosen.unique_for + delay_of(options, task.app)
    life = life_of(chosen, window, expires)
    info = {"task": task.name, "task_id": options["task_id"]}
    if message.is_ignored:
        info["ignored"] = True
    if chosen.unique_until == "expired":
        info["until"] = "expired"
    return Trigger(name, life, info, window, expires is not None, arguments)


def carried(task: Any, call: tuple[Any, Any]) -> bytes:
    """Return the arguments as the nodes keep them; nothing of them where the name says it all."""
    if task.lock_key is None and task.unique_on is None:
        return b"null"
    args, kwargs = call
    dump = getattr(task, "_dump_pydantic_arguments", None)  # since Celery 5.7
    if dump is not None:
        args, kwargs = dump(args, kwargs)
    try:
        found = json.dumps([list(args or ()), dict(kwargs or {})]).encode()
    except (TypeError, ValueError) as error:
        raise LockKeyError(
            f"Task {task.name!r}: on_duplicate='rerun' keeps the newest arguments on the lock "
            f"nodes as JSON, which cannot carry these ({type(error).__name__}); pass plain values"
        ) from None
    if len(found) > LARGEST_KEPT:
        raise LockKeyError(
            f"Task {task.name!r}: on_duplicate='rerun' keeps the newest arguments on the lock "
            f"nodes, which take {LARGEST_KEPT:,} bytes of JSON, not {len(found):,}; pass the id "
            "of what is large"
        )
    return found


def delay_of(options: Mapping[str, Any], app: Any) -> float:
    """Return when a task that is published now will run [s from now]."""
    delay = from_now(options.get("eta"), app)
    if delay is None:
        delay = options.get("countdown")
    return min(max(0.0, delay or 0.0), LONGEST_UNIQUE_FOR)


def life_of(chosen: LockOptions, window: float, expires: float | None) -> float:
    if expires is None or chosen.unique_until == "expired":
        return window
    return min(window, max(1.0, expires))  # a task that has expired does not run any more


def from_now(moment: Any, app: Any) -> float | None:
    """Return a moment as Celery takes it, a date or a number of seconds, as seconds from now."""
    if moment is None:
        return None
    if isinstance(moment, str):
        moment = maybe_iso8601(moment)
    if isinstance(moment, datetime):
        aware = maybe_make_aware(moment, app.timezone)
        return (aware - datetime.now(timezone.utc)).total_seconds()
    return float(moment)
