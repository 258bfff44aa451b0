"""Revokes that a worker knows of: those of waiting tasks end their reservations."""

from __future__ import annotations

import weakref
from typing import Any

from celery import bootsteps
from celery.worker.state import revoked, revoked_stamps
from kombu.utils.functional import maybe_list

from celery_redlock.task.execution.outcome import Outcome
from celery_redlock.task.worker.broadcasts import know_consumer
from celery_redlock.task.worker.timer import cancel

__all__ = ["NoteRevokes", "is_revoked", "with_reservation"]

#: How often a worker looks whether a task that waits in it was revoked [s].
LOOK_FOR_REVOKES = 0.5
#: Requests that carry a reservation and have not come to an end.
with_reservation: weakref.WeakSet[Any] = weakref.WeakSet()


def is_revoked(request: Any) -> bool:
    if request.id in revoked:
        return True
    stamps = request.request_dict.get("stamps")
    if not isinstance(stamps, dict):
        return False
    return any(
        stamp in maybe_list(values)
        for header, values in revoked_stamps.items()
        for stamp in maybe_list(stamps.get(header)) or ()
    )


def let_go_of_revoked() -> None:
    """
    End the reservations of tasks that were revoked and wait in this worker.

    Celery itself looks when their time has come: for one that was rescheduled, or waits behind
    long ones, that may be in an hour.
    """
    if revoked or revoked_stamps:
        for request in list(with_reservation):
            if request.time_start is None and is_revoked(request):
                request.leave_queue(Outcome.REVOKED)


class NoteRevokes(bootsteps.StartStopStep):
    """
    Has a worker look whether a task that waits in it was revoked.

    A step of the consumer, as that starts its steps again with each connection to the broker: up
    to 5.6 Celery clears the worker's timer when one breaks.
    """

    requires = ("celery.worker.consumer.connection:Connection",)
    _entry: Any = None

    def start(self, consumer: Any) -> None:
        know_consumer(consumer)
        self._entry = consumer.timer.call_repeatedly(LOOK_FOR_REVOKES, let_go_of_revoked)

    def stop(self, consumer: Any) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            cancel(consumer.timer, entry)
