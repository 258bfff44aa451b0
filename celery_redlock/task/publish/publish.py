"""
Publish a task; one with ``unique_until`` first reserves its lock name.

    apply_async --> eager, or a built-in task: as Celery does
                --> nothing to keep out, or part of a workflow: sent
                --> lock name --> RESERVE, one round
                      reserved:  sent with the token; it is ended if that fails
                      duplicate: join, fail, or rerun
                      no quorum: sent (the lock decides at run time), or fail by policy
                      in report mode: sent in any case
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from celery.utils import uuid
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.utils import json

from celery_redlock.errors import (
    ConfigurationError,
    DuplicateTask,
    LockKeyError,
    QuorumUnavailable,
)
from celery_redlock.events import DuplicatePublished
from celery_redlock.lock import clock
from celery_redlock.lock.records import shorten
from celery_redlock.plugin import locking, plugin_for
from celery_redlock.process.log import LONGEST_STORED, cut
from celery_redlock.task.execution.execution import latest_execution
from celery_redlock.task.execution.reporting import warn_once
from celery_redlock.task.messages.envelope import HEADER, Envelope, fresh_publish_id
from celery_redlock.task.messages.reservation import Reservation
from celery_redlock.task.naming.task_lock import lock_of, names_of, wait_until_bound
from celery_redlock.task.options import LONGEST_UNIQUE_FOR, LockOptions
from celery_redlock.task.policies import Fail
from celery_redlock.task.publish.result import UniqueResult, unique
from celery_redlock.unique.requests import OVER, Trigger
from celery_redlock.unique.reserving import Duplicate, Reserved

__all__ = ["publish"]

#: How much of a task's arguments the lock nodes keep [bytes of JSON].
LARGEST_KEPT = 2**16
#: Options of a publish that make it part of a workflow. Celery freezes the tasks of one, which
#: leaves a `reply_to`, and gives a callback its parent.
WORKFLOW = ("chain", "chord", "group_id", "link", "link_error", "parent_id", "reply_to")


@dataclass(frozen=True)
class Message:
    """
    A message to be published.

    Attributes:
        inherited: ``apply_async`` of the next base of *task*, which publishes.
        options: The other arguments of ``apply_async``, ``task_id`` among them.
    """

    task: Any
    inherited: Callable[..., Any]
    args: Any
    kwargs: Any
    options: dict[str, Any]
    envelope: Envelope

    def send(self, reservation: Reservation | None = None, **more: Any) -> Any:
        options = {**self.options, **more}
        sent = self.envelope
        if reservation is not None:
            sent = sent._replace(reservation=reservation)
        options["headers"] = {**(options.get("headers") or {}), **sent.header(options["task_id"])}
        return self.inherited(self.args, self.kwargs, **options)

    @property
    def needs_reservation(self) -> bool:
        """Whether it is unique, is not published again, and nobody but its caller waits for it."""
        slot = self.envelope.slot
        is_unique = self.task.unique_until is not None or (slot is not None and slot.is_buffered)
        is_again = bool(self.envelope.reservation or self.envelope.previous)
        return is_unique and not is_again and not locking.disabled and is_alone(self.options)

    def names(self) -> tuple[str, ...]:
        headers = self.options.get("headers") or {}
        given = {key: value for key, value in headers.items() if key != HEADER}
        return names_of(self.task, self.args, self.kwargs, given)

    def names_at_most(self) -> tuple[str, ...]:
        """Its lock names as they are in keys; none where they cannot be made here."""
        try:
            return tuple(map(shorten, self.names()))
        except Exception:  # noqa: BLE001  of code of the user's, which may be for workers alone
            return ()

    @property
    def lock_options(self) -> LockOptions:
        options, slot = lock_of(self.task).options, self.envelope.slot
        return options if slot is None else slot.adjust(options)


def publish(
    task: Any, inherited: Callable[..., Any], args: Any, kwargs: Any, options: dict[str, Any]
) -> UniqueResult:
    wait_until_bound(task)
    if task.app.conf.task_always_eager or lock_of(task).is_built_in:
        return unique(inherited(args, kwargs, **options))
    task_id = str(options["task_id"] or uuid())  # as our records and those of a backend have it
    envelope = envelope_of(options.get("headers"), task_id)
    message = Message(task, inherited, args, kwargs, {**options, "task_id": task_id}, envelope)
    if lock_of(task).is_computed:
        message = replace(message, envelope=envelope._replace(names=message.names_at_most()))
    if not message.needs_reservation:
        return unique(message.send())
    check_arguments(task, args, kwargs)
    check_id(task, task_id)
    chosen = message.lock_options
    return (publish_reported if chosen.only_reports else publish_unique)(message, chosen)


def check_id(task: Any, task_id: str) -> None:
    if cut(task_id) != task_id:
        msg = (
            f"{task.name}: task_id has {len(task_id):,} characters; with unique_until it may have "
            f"{LONGEST_STORED:,} bytes at most"
        )
        raise ConfigurationError(msg)


def publish_unique(message: Message, chosen: LockOptions) -> UniqueResult:
    name = message.names()[0]
    trigger = trigger_of(message, name, chosen)
    try:
        found = plugin_for(message.task.app).reservations.reserve(trigger)
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
        plugin_for(app).reservations.end(name, reserved.token, OVER)
        raise
    holder_id = before.get("task_id") if is_duplicate else None
    return unique(result, lock_name=name, duplicate=is_duplicate, holder_id=holder_id)


def join(message: Message, name: str, chosen: LockOptions, found: Duplicate) -> UniqueResult:
    """Return the result of the task that has the name, or raise DuplicateTask, by its options."""
    task, event = message.task, duplicate_of(message, name, chosen, found.holder, found.merged)
    plugin_for(task.app).notify(event)
    if chosen.on_duplicate == "fail":
        raise DuplicateTask(event.holder_id, name, found.votes)
    result = task.AsyncResult(event.holder_id)
    # Or a joiner would wait without end for what is never stored.
    result.ignored = is_ignored(message) or found.holder.get("ignored") is True
    return unique(result, lock_name=name, duplicate=True, holder_id=event.holder_id)


def publish_reported(message: Message, chosen: LockOptions) -> UniqueResult:
    """Send *message* in any case, one bounded round later; report a duplicate."""
    reservation = None
    try:
        reservation = reservation_noted(message, chosen)
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


def reservation_noted(message: Message, chosen: LockOptions) -> Reservation | None:
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


# --- what is decided without asking anybody ------------------------------------------------


def is_alone(options: Mapping[str, Any]) -> bool:
    is_again = options.get("retries") is not None  # 0 for one that was rescheduled
    return not is_again and not any(map(options.get, WORKFLOW))


def is_ignored(message: Message) -> bool:
    ignored = message.options.get("ignore_result")
    return bool(message.task.ignore_result if ignored is None else ignored)


def envelope_of(headers: Any, task_id: str) -> Envelope:
    """Every publish is another execution, except for copies of a message, which say whose."""
    envelope = Envelope.of(headers.get(HEADER) if isinstance(headers, Mapping) else None, task_id)
    if envelope.publish_id is not None:
        return envelope
    latest = latest_execution.get()  # also one that is over: its release may be on its way
    previous = None if latest is None or latest.request.id != task_id else latest.id
    return envelope._replace(publish_id=fresh_publish_id(), previous=previous)


def trigger_of(message: Message, name: str, chosen: LockOptions) -> Trigger:
    task, options = message.task, message.options
    arguments = carried(task, (message.args, message.kwargs)) if chosen.reruns else b""
    expires = from_now(options.get("expires", task.expires), task.app)
    window = chosen.unique_for + delay_of(options, task.app)
    life = life_of(chosen, window, expires)
    info = {"task": task.name, "task_id": options["task_id"]}
    if is_ignored(message):
        info["ignored"] = True
    if chosen.unique_until == "expired":
        info["until"] = "expired"
    return Trigger(name, life, info, window, expires is not None, arguments)


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
