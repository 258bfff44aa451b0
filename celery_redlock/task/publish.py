"""
Unique at publish: take the marker of the name, publish with its token, or tell of who has it.

    apply_async --> part of a workflow, or coming again: publish as ever
                --> lock name --> RESERVE, one round
                      placed:     publish, the token in a header; ended if that fails
                      duplicate:  join, fail, or rerun
                      no quorum:  publish (the lock decides at run time), or fail by policy

Members of a chord, group or chain are always published: dropping one would leave the rest
waiting for ever. So is a task with a callback, which would be dropped along with it.

Source:
    DESIGN section 5, FACTS 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.utils import json

from celery_redlock.errors import DuplicateTask, LockKeyError, QuorumUnavailable
from celery_redlock.events import DuplicatePublished
from celery_redlock.plugin import Plugin
from celery_redlock.task.options import LONGEST_UNIQUE_FOR, LockOptions
from celery_redlock.task.policies import Fail
from celery_redlock.task.reservation import Reservation
from celery_redlock.task.result import UniqueResult, unique
from celery_redlock.unique.requests import OVER, Trigger
from celery_redlock.unique.reserving import Duplicate, Reserved

__all__ = ["is_alone", "publish"]

#: How much of a task's arguments the lock nodes keep [bytes of JSON].
LARGEST_KEPT = 2**16
#: Options of a publish that make it part of something larger, or one that comes again. A task of
#: a workflow is frozen, which leaves a `reply_to`; a callback is told its parent.
COMPANY = ("chain", "chord", "group_id", "link", "link_error", "parent_id", "reply_to")


def is_alone(options: Mapping[str, Any]) -> bool:
    """Return whether nothing waits for this publish but, perhaps, its own caller."""
    comes_again = options.get("retries") is not None  # 0 for one that was rescheduled
    return not comes_again and not any(options.get(option) for option in COMPANY)


def publish(
    task: Any,
    plugin: Plugin,
    chosen: LockOptions,
    call: tuple[Any, Any],
    options: dict[str, Any],
    send: Callable[..., Any],
) -> UniqueResult:
    """
    Publish *task* unless one of its name is queued or running already.

    Args:
        task: A `RedlockTask` with ``unique_until``.
        plugin: Of its app.
        chosen: Its options.
        call: Positional and keyword arguments, either may be None.
        options: Of the publish, ``task_id`` among them.
        send: Publishes: ``send(reservation, **options)``.

    Raises:
        DuplicateTask: There is one, and ``on_duplicate`` is ``"fail"``.
        QuorumUnavailable: No quorum could decide, and ``on_unavailable`` is ``"fail"``.
        LockKeyError: The arguments make no lock name.
    """
    name = task.lock_name(*call)
    info = {"task": task.name, "task_id": options["task_id"]}
    arguments = carried(task, call) if chosen.reruns else b""
    expires = from_now(options.get("expires", task.expires), task.app)
    window = chosen.unique_for + delay_of(options, task.app)
    life = life_of(chosen, window, expires)
    trigger = Trigger(name, life, info, window, expires is not None, arguments)
    try:
        placed = plugin.reservations.reserve(trigger)
    except QuorumUnavailable:
        if isinstance(chosen.on_unavailable, Fail):
            raise
        return unique(send(None, **options), lock_name=name)
    if isinstance(placed, Duplicate) and not (chosen.reruns and not placed.merged):
        return joined(task, plugin, chosen, name, placed, options)
    if isinstance(placed, Duplicate):  # into what may expire nothing is merged: it could be lost
        return unique(send(None, **options), lock_name=name)
    try:
        is_duplicate = bool(placed.before) and chosen.unique_until != "started"
        if is_duplicate:
            tell(task, plugin, chosen, name, placed.before, 0)
        if placed.before:
            wait_for_it(options, chosen, placed)
        reservation = Reservation(name, placed.token, str(chosen.unique_until))
        result = send(reservation, **options)
    except BaseException:  # not published, or nobody knows: a second message at the worst
        plugin.reservations.end(name, placed.token, OVER)
        raise
    holder_id = placed.before.get("task_id") if is_duplicate else None
    return unique(result, lock_name=name, duplicate=is_duplicate, holder_id=holder_id)


def joined(
    task: Any,
    plugin: Plugin,
    chosen: LockOptions,
    name: str,
    found: Duplicate,
    options: Mapping[str, Any],
) -> UniqueResult:
    """Return the result of the task that is there; raises DuplicateTask where that is wanted."""
    holder_id = str(found.holder.get("task_id", ""))
    tell(task, plugin, chosen, name, found.holder, found.merged)
    if chosen.on_duplicate == "fail":
        raise DuplicateTask(holder_id, name, found.votes)
    result = task.AsyncResult(holder_id)
    said = options.get("ignore_result")
    result.ignored = task.ignore_result if said is None else said
    return unique(result, lock_name=name, duplicate=True, holder_id=holder_id)


def tell(
    task: Any, plugin: Plugin, chosen: LockOptions, name: str, holder: dict[str, Any], merged: int
) -> None:
    """Tell the observers of a duplicate."""
    holder_id = str(holder.get("task_id", ""))
    plugin.notify(DuplicatePublished(name, task.name, holder_id, chosen.on_duplicate, merged))


def wait_for_it(options: dict[str, Any], chosen: LockOptions, placed: Reserved) -> None:
    """Let a task that is next begin when the window of the one before it ends."""
    if chosen.unique_until == "expired" and "eta" not in options:
        left = math.ceil(placed.before["ttl"])  # in whole seconds: quorum queues take nothing else
        options["countdown"] = max(options.get("countdown") or 0, left, 1)


def carried(task: Any, call: tuple[Any, Any]) -> bytes:
    """
    Return the arguments as the nodes keep them; nothing of them where the name says it all.

    Raises:
        LockKeyError: They are not what kombu's JSON carries, or more than `LARGEST_KEPT`.
    """
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
    """Return when a task that is published now is to run [s from now]."""
    delay = from_now(options.get("eta"), app)
    if delay is None:
        delay = options.get("countdown")
    return min(max(0.0, delay or 0.0), LONGEST_UNIQUE_FOR)


def life_of(chosen: LockOptions, window: float, expires: float | None) -> float:
    """Return how long the marker of a task that is published now stands by itself [s]."""
    if expires is None or chosen.unique_until == "expired":
        return window
    return min(window, max(1.0, expires))  # a task that has expired does not run any more


def from_now(moment: Any, app: Any) -> float | None:
    """Return a moment as Celery takes it, a date or a number of seconds, as seconds from now."""
    if isinstance(moment, str):
        moment = maybe_iso8601(moment)
    if isinstance(moment, datetime):
        aware = maybe_make_aware(moment, app.timezone)
        return (aware - datetime.now(timezone.utc)).total_seconds()
    return None if moment is None else float(moment)
