"""
Messages that Celery ends before any execution: the names they reserved are free again.

    not registered, or refused (serializer, format, id) --> Celery's signal --> reservation ends
    cannot be decoded --> acknowledged without a signal   --> likewise

The token is in the header, which Celery need not understand. All later ways in which a message
ends are those of a request: `celery_redlock.task.worker.forced_ends`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery import bootsteps, signals

from celery_redlock.plugin import locking, plugin_for
from celery_redlock.process.log import get_logger
from celery_redlock.task.messages.envelope import HEADER, Envelope
from celery_redlock.task.messages.reservation import Reservation

__all__ = ["NoteDiscards", "end_reservation_of"]

logger = get_logger(__name__)

#: A copy of the task may run elsewhere, and stands for the name then.
IDLE = "idle"


def end_reservation_of(app: Any, message: Any) -> None:
    """End the reservation of a *message* that *app*'s worker discards; never fails."""
    try:
        reservation = reservation_of(message)
        if reservation is None or reservation.until == "expired" or locking.disabled:
            return
        known = plugin_for(app).reservations_for(report=reservation.is_report)
        reservation.end(known, IDLE)
    except Exception:  # it expires; Celery's own work must go on
        logger.exception("Ending the reservation of a message that is discarded failed")
    else:
        logger.warning("Lock name %r is free: its message is discarded", reservation.name)


def reservation_of(message: Any) -> Reservation | None:
    headers = message.headers
    if not isinstance(headers, Mapping):
        return None
    # Its id may be what it is discarded for; not that in our header, which may be a copy.
    task_id = headers.get("id") or (message.properties or {}).get("correlation_id")
    return Envelope.of(headers.get(HEADER), task_id).reservation


@signals.task_unknown.connect(weak=False)
@signals.task_rejected.connect(weak=False)
def _when_discarded(sender: Any = None, message: Any = None, **_: Any) -> None:
    if sender is not None and message is not None:
        end_reservation_of(sender.app, message)


class NoteDiscards(bootsteps.StartStopStep):
    """Has a consumer report messages that cannot be decoded, for which Celery has no signal."""

    requires = ("celery.worker.consumer.connection:Connection",)

    def start(self, consumer: Any) -> None:
        """Once for a consumer, which starts its steps again with each connection."""
        if not isinstance(consumer.on_decode_error, Noting):
            consumer.on_decode_error = Noting(consumer.app, consumer.on_decode_error)


class Noting:
    """Does what Celery does with a message that cannot be decoded, then ends its reservation."""

    def __init__(self, app: Any, inherited: Callable[[Any, Exception], Any]) -> None:
        self._app = app
        self._inherited = inherited

    def __call__(self, message: Any, exc: Exception) -> Any:
        try:
            return self._inherited(message, exc)
        finally:
            end_reservation_of(self._app, message)
