"""The message of a publish, before it is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from celery_redlock.lock.records import shorten
from celery_redlock.plugin import locking
from celery_redlock.task.execution.execution import latest_execution
from celery_redlock.task.messages.envelope import HEADER, Envelope, fresh_publish_id
from celery_redlock.task.messages.reservation import Reservation
from celery_redlock.task.naming.task_lock import lock_of, names_of
from celery_redlock.task.options import LockOptions

__all__ = ["Message", "envelope_of"]

#: Options of a publish that make it part of a workflow, which is always published: the rest would
#: wait without end for a task that is dropped, and a callback be dropped along with it. Celery
#: freezes the tasks of a workflow, which leaves a `reply_to`, and gives a callback its parent.
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

    def numbered(self, number: int) -> Message:
        """The message of a call that a newer one supersedes."""
        return replace(self, envelope=self.envelope._replace(debounced=number))

    @property
    def needs_reservation(self) -> bool:
        """Whether it is unique, is not published again, and nobody but its caller waits for it."""
        slot = self.envelope.slot
        is_unique = self.task.unique_until is not None or (slot is not None and slot.is_buffered)
        return is_unique and self.is_new

    @property
    def is_new(self) -> bool:
        is_again = bool(self.envelope.reservation or self.envelope.previous)
        return not is_again and not locking.disabled and is_alone(self.options)

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

    @property
    def is_ignored(self) -> bool:
        """Whether nobody stores its result."""
        ignored = self.options.get("ignore_result")
        return bool(self.task.ignore_result if ignored is None else ignored)


def is_alone(options: Mapping[str, Any]) -> bool:
    is_again = options.get("retries") is not None  # 0 for one that was rescheduled
    return not is_again and not any(map(options.get, WORKFLOW))


def envelope_of(headers: Any, task_id: str) -> Envelope:
    """Every publish is another execution, except for copies of a message, which say whose."""
    envelope = Envelope.of(headers.get(HEADER) if isinstance(headers, Mapping) else None, task_id)
    if envelope.publish_id is not None:
        return envelope
    latest = latest_execution.get()  # also one that is over: its release may be on its way
    previous = None if latest is None or latest.request.id != task_id else latest.id
    fresh = fresh_publish_id()
    return envelope._replace(publish_id=fresh, previous=previous, debounced=0, again=False)
