"""
Publish a task; one with ``unique_until`` first reserves its lock name, one with ``debounce`` waits.

    apply_async --> eager, or a built-in task: as Celery does
                --> nothing to keep out, or part of a workflow: sent
                --> with ``debounce``: `celery_redlock.task.publish.debounce`
                --> lock name --> RESERVE, one round
                      reserved:  sent with the token; it is ended if that fails
                      duplicate: join, fail, or rerun
                      no quorum: sent (the lock decides at run time), or fail by policy
                      in report mode: sent in any case
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from celery.utils import uuid

from celery_redlock.errors import ConfigurationError, DuplicateTask, QuorumUnavailable
from celery_redlock.events import DuplicatePublished
from celery_redlock.lock import clock
from celery_redlock.plugin import plugin_for
from celery_redlock.process.log import LONGEST_STORED, cut
from celery_redlock.task.execution.reporting import warn_once
from celery_redlock.task.messages.reservation import Reservation
from celery_redlock.task.naming.task_lock import lock_of, wait_until_bound
from celery_redlock.task.options import LockOptions
from celery_redlock.task.policies import Fail
from celery_redlock.task.publish.debounce import (
    NOT_AT_ALL,
    TASKS_OWN,
    check_asked,
    debounce_of,
    publish_debounced,
)
from celery_redlock.task.publish.message import Message, envelope_of
from celery_redlock.task.publish.result import UniqueResult, unique
from celery_redlock.task.publish.trigger import trigger_of
from celery_redlock.unique.requests import OVER
from celery_redlock.unique.reserving import Duplicate, Reserved

__all__ = ["publish"]


def publish(
    task: Any, inherited: Callable[..., Any], args: Any, kwargs: Any, options: dict[str, Any]
) -> UniqueResult:
    wait_until_bound(task)
    debounce = options.pop("debounce", TASKS_OWN)
    check_asked(task, debounce)
    if "debounce_max" in options:
        raise ConfigurationError(
            f"{task.name}: debounce_max is an option of the task, and not of a call; set it there"
        )
    if lock_of(task).is_built_in:
        return unique(inherited(args, kwargs, **options))
    task_id = str(options["task_id"] or uuid())  # as our records and those of a backend have it
    envelope = envelope_of(options.get("headers"), task_id)
    message = Message(task, inherited, args, kwargs, {**options, "task_id": task_id}, envelope)
    if task.app.conf.task_always_eager:
        if message.needs_reservation:  # what is refused elsewhere is refused here
            check_not_debounced(task, debounce)
        else:
            debounce_of(message, debounce)
        return unique(inherited(args, kwargs, **options))
    if lock_of(task).is_computed:
        message = replace(message, envelope=envelope._replace(names=message.names_at_most()))
    if not message.needs_reservation:
        debounced = debounce_of(message, debounce)
        if debounced is None:
            return unique(message.send())
        check_arguments(task, args, kwargs)
        return unique(publish_debounced(message, debounced))
    check_not_debounced(task, debounce)
    check_arguments(task, args, kwargs)
    check_id(task, task_id)
    chosen = message.lock_options
    return (publish_reported if chosen.only_reports else publish_unique)(message, chosen)


def check_not_debounced(task: Any, debounce: Any) -> None:
    if debounce not in (TASKS_OWN, *NOT_AT_ALL):
        raise ConfigurationError(
            f"{task.name}: debounce={debounce!r} of a call publishes all and runs the last, and "
            "unique_until publishes the first and keeps out the next ones; drop one of them"
        )


def check_id(task: Any, task_id: str) -> None:
    if cut(task_id) != task_id:
        raise ConfigurationError(
            f"{task.name}: task_id has {len(task_id):,} characters; with unique_until it may have "
            f"{LONGEST_STORED:,} bytes at most"
        )


def publish_unique(message: Message, chosen: LockOptions) -> UniqueResult:
    name = message.names()[0]
    trigger = trigger_of(message, name, chosen)
    try:
        found = plugin_for(message.task.app).reservations_for(report=False).reserve(trigger)
    except QuorumUnavailable:
        if isinstance(chosen.on_unavailable, Fail):
            raise
        return unique(message.send(), lock_name=name)
    if isinstance(found, Reserved):
        return send_reserved(message, name, chosen, found)
    if chosen.reruns and not found.merged:  # into what may expire: the arguments could be lost
        return unique(message.send(), lock_name=name)
    return join(message, name, chosen, found)


def send_reserved(
    message: Message, name: str, chosen: LockOptions, reserved: Reserved
) -> UniqueResult:
    """Send *message* with its token; if that fails, the name is free again."""
    app, before = message.task.app, reserved.before
    is_duplicate = bool(before) and chosen.unique_until != "started"
    until = str(chosen.unique_until)
    try:
        if is_duplicate:
            plugin_for(app).notify(duplicate_of(message, name, chosen, before))
        delay = delay_behind(before, message.options, chosen)
        result = message.send(Reservation(name, reserved.token, until), **delay)
    except BaseException:  # not published, or nobody knows: a second message at the worst
        plugin_for(app).reservations_for(report=False).end(name, reserved.token, OVER)
        raise
    holder_id = before.get("task_id") if is_duplicate else None
    return unique(result, lock_name=name, duplicate=is_duplicate, holder_id=holder_id)


def join(message: Message, name: str, chosen: LockOptions, found: Duplicate) -> UniqueResult:
    task, event = message.task, duplicate_of(message, name, chosen, found.holder, found.merged)
    plugin_for(task.app).notify(event)
    if chosen.on_duplicate == "fail":
        raise DuplicateTask(event.holder_id, name, found.votes)
    result = task.AsyncResult(event.holder_id)
    # Or a joiner would wait without end for what is never stored.
    result.ignored = message.is_ignored or found.holder.get("ignored") is True
    return unique(result, lock_name=name, duplicate=True, holder_id=event.holder_id)


def publish_reported(message: Message, chosen: LockOptions) -> UniqueResult:
    """Send *message* in any case, one bounded round later; report a duplicate."""
    reservation = None
    try:
        reservation = reserve_for_report(message, chosen)
    except QuorumUnavailable:
        pass  # that is reported where it was asked
    except SoftTimeLimitExceeded:  # of the task that publishes it
        raise
    except Exception:  # noqa: BLE001  with any error the message is published
        warn_once(message.task.name, "%s is published, and unreported", message.task.name)
    try:
        return unique(message.send(reservation), lock_name=getattr(reservation, "name", None))
    except BaseException:
        if reservation is not None:
            known = plugin_for(message.task.app).reservations_for(report=True)
            known.end(reservation.name, reservation.token, OVER)
        raise


def reserve_for_report(message: Message, chosen: LockOptions) -> Reservation | None:
    """Return a reservation that keeps nobody out; None, reported, if another message has it."""
    plugin = plugin_for(message.task.app)
    name = message.names()[0]
    trigger = trigger_of(message, name, replace(chosen, on_duplicate="join"))
    ends = clock.now() + plugin.settings.rules.node_timeout
    found = plugin.reservations_for(report=True).reserve(trigger, ends)
    if isinstance(found, Reserved):
        return Reservation(name, found.token, str(chosen.unique_until), is_report=True)
    plugin.notify(replace(duplicate_of(message, name, chosen, found.holder), report=True))
    return None


def duplicate_of(
    message: Message, name: str, chosen: LockOptions, holder: Mapping[str, Any], merged: int = 0
) -> DuplicatePublished:
    holder_id = str(holder.get("task_id", ""))
    return DuplicatePublished(name, message.task.name, holder_id, chosen.on_duplicate, merged)


def delay_behind(
    before: Mapping[str, Any], options: Mapping[str, Any], chosen: LockOptions
) -> dict[str, int]:
    """Return the options that delay a task until the window of the one before it ends."""
    if not before or chosen.unique_until != "expired" or "eta" in options:
        return {}
    left = math.ceil(before["ttl"])  # in whole seconds: quorum queues take nothing else
    return {"countdown": max(options.get("countdown") or 0, left, 1)}


def check_arguments(task: Any, args: Any, kwargs: Any) -> None:
    """Raise TypeError for arguments that do not fit, before they are to make a name."""
    check = getattr(task, "__header__", None)
    if task.typing and check is not None:
        check(*(args or ()), **(kwargs or {}))
