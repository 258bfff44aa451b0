"""
Start the body of an execution: its reservation, the newest arguments, and the state STARTED.

    Granted --> start --> Started, with the arguments to run with
                      --> Refused, as another task of this name is queued before it
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from celery import states

from celery_redlock.errors import LockKeyError
from celery_redlock.lock.records import shorten
from celery_redlock.process.log import get_logger
from celery_redlock.task.execution.begun import Granted, Refused
from celery_redlock.task.execution.claim import Claim, end_reservation
from celery_redlock.task.execution.interrupt import defer_interrupts
from celery_redlock.task.execution.outcome import Records
from celery_redlock.task.execution.plan import Situation
from celery_redlock.task.messages.delivery_info import forget_serializer
from celery_redlock.task.messages.reservation import NotItsTurn, Reservation, newest_call
from celery_redlock.task.naming.task_lock import names_of
from celery_redlock.unique.requests import OVER

__all__ = ["Started", "start"]

logger = get_logger(__name__)


class Started(NamedTuple):
    """What a body runs with: the newest arguments that were merged, or its own."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def start(granted: Granted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Started | Refused:
    """
    Note that an execution runs now, with the arguments of its message.

    Raises:
        LockKeyError: What was merged into this task belongs to another name.
    """
    claim, newest = granted.claim, None
    reservation, request = claim.reservation, claim.request
    if reservation is not None and is_for_lock(reservation, claim):
        try:
            newest = start_reservation(granted, reservation)
        except NotItsTurn as error:
            return Refused(claim, error.why, Situation.NEXT)
        except LockKeyError:
            if not claim.is_report:
                raise
            logger.warning("%s runs with its own arguments", claim, exc_info=True)
    if newest is not None:
        request.args, request.kwargs = newest  # for a retry, or a copy
        args, kwargs = tuple(newest[0]), newest[1]
    store_started(claim)
    forget_serializer(request)
    if claim.starts:
        claim.count_from_now()
    return Started(args, kwargs)


def is_for_lock(reservation: Reservation, claim: Claim) -> bool:
    """
    Return whether *reservation* is for the lock that an execution holds.

    A retry may have other arguments, and so another name; and anybody can publish a message
    that belongs to another. Such a reservation is ended with its token, but none is ever made.
    """
    if shorten(reservation.name) == shorten(claim.name):
        return True
    if reservation.until == "started" and not claim.options.reruns:
        end_reservation(claim, Records(reservation=OVER))
    return False


def start_reservation(granted: Granted, reservation: Reservation) -> Any:
    """Note in the reservation that its task runs; return the newest arguments, None for none."""
    claim, held = granted.claim, granted.held
    is_of_other_mode = reservation.is_report is not claim.is_report
    # In report mode the body has none, and what it stands under is its note.
    lock = granted.own or held if reservation.is_report else held
    with defer_interrupts():
        started = reservation.start(
            claim.reservations,
            claim.options,
            lock,
            claim.info,
            comes_back=claim.task.acks_late or is_of_other_mode,
        )
    held.merged = started.merged
    newest = newest_call(started.arguments)
    if newest is None:
        return None
    if names_of(claim.task, *newest, claim.delivery.headers) != claim.names:
        raise LockKeyError(
            f"Task {claim.task.name!r}: what was merged into it makes another lock name"
        )
    return newest


def store_started(claim: Claim) -> None:
    """
    Store STARTED if Celery would have done so, now that this delivery is the one that runs.

    Celery stores it for every delivery. A late copy would write it over a FAILURE, which
    is the result, and end without another word.
    """
    task, request = claim.task, claim.request
    if claim.lock.stores_started and not request.is_eager and not is_ignored(task, request):
        who = {"pid": os.getpid(), "hostname": request.hostname}
        task.backend.store_result(request.id, who, states.STARTED, request=request)


def is_ignored(task: Any, request: Any) -> bool:
    """Return whether nobody wants the result. Before Celery 5.6 the task alone has a say."""
    from celery.app import trace  # noqa: PLC0415  a whole worker, and it is there by now

    ask = getattr(trace, "get_actual_ignore_result", lambda task, _request: task.ignore_result)
    return bool(ask(task, request))
