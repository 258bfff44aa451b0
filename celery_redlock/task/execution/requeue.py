"""
Publish a delivery again for later: the same id and options, as a message of its own.

The delivered message may be acknowledged once the copy is published, and only then. On
Redis a redelivered copy shares its delivery tag with the original, so acknowledging it
without publishing another would throw the running original's message away.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kombu import pools
from kombu.exceptions import OperationalError

from celery_redlock.lock.clock import jitter
from celery_redlock.process.deferral import pause
from celery_redlock.process.log import get_logger
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.execution.outcome import DeliveryOver, Outcome, PutBack
from celery_redlock.task.messages.broker import driver_of, longest_countdown, way_back
from celery_redlock.task.messages.envelope import Envelope

__all__ = ["Requeue", "headers_of", "requeue", "retry"]

logger = get_logger(__name__)

#: Shortest and longest pause before the broker is to deliver a message again for which no copy
#: could be published [s].
PUT_BACK_AFTER = 0.5, 1.5
#: What RabbitMQ notes of a delayed message. Before 4.0.1 it would take a copy that carries
#: them along for one that goes in circles, and drop it.
DEATHS = ("x-death", "x-first-death-", "x-last-death-")


@dataclass(frozen=True)
class Requeue:
    """
    How a task is delivered again.

    Attributes:
        envelope: Of the copy.
        after: When the copy may have its turn [s from now]; in whole seconds and at least one, as
            quorum queues take nothing else, and no longer than the broker can bear.
        reason: Why, in words.
        outcome: Of this execution.
        otherwise: How the task is to fail, visibly, if it could not be published, and the
            broker does not have the delivered message any more, or another try would fail, too.
            None if another delivery of it will store its result.
    """

    envelope: Envelope
    after: float
    reason: str
    outcome: Outcome
    otherwise: Exception | None = None


def requeue(claim: Claim, later: Requeue) -> DeliveryOver:
    """
    Publish a copy of the message for later; return what ends this delivery without a state.

    The copy carries all that the message did, `retries` unchanged.

    Raises:
        PutBack: It could not be published, and the broker still has the delivered message.
        Exception: `Requeue.otherwise`.
    """
    task, request = claim.task, claim.request
    countdown = max(1, math.ceil(min(later.after, longest_countdown(task.app))))
    headers = {**headers_of(request), **later.envelope.header(request.id)}
    if request.parent_id is None:  # or Celery takes the task that publishes for its parent: itself
        headers["parent_id"] = None
    again = task.signature_from_request(
        request,
        countdown=countdown,
        retries=request.retries,
        headers=headers,
        **ids_of(request),
        **as_called(request),
    )
    try:
        with sure_producer(task.app) as producer:
            again.apply_async(add_to_parent=False, producer=producer, **way_back(task.app, request))
    except Exception as error:
        logger.exception("%s could not be published again", claim)
        is_to_fail = not (task.acks_late and is_of_connection(error, task.app))
        if later.otherwise is not None and is_to_fail:
            raise later.otherwise from error
        pause(jitter(*PUT_BACK_AFTER))  # or it would be delivered as fast as the broker can
        raise PutBack(error, later.outcome) from error
    return DeliveryOver(later.reason, later.outcome, float(countdown))


def retry(claim: Claim, error: Exception, countdown: float) -> Exception:
    """Retry as the task itself would; return what ends this delivery."""
    task, request = claim.task, claim.request
    headers = {**headers_of(request), **claim.delivery.retry.header(request.id)}
    again: Exception = task.retry(
        exc=error,
        countdown=countdown,
        throw=False,
        headers=headers,
        **way_back(task.app, request),
    )
    return again


def ids_of(request: Any) -> dict[str, str]:
    """Return the options that keep the ids that the publisher gave to the message itself."""
    given = {
        "correlation_id": request.correlation_id,
        "message_id": (request.properties or {}).get("message_id"),
    }
    return {name: value for name, value in given.items() if value and value != request.id}


def is_of_connection(error: Exception, app: Any) -> bool:
    """Return whether *error* is about the way to the broker, and not about the message."""
    of_broker = app.producer_pool.connections.connection.connection_errors
    return isinstance(error, (OperationalError, OSError, *of_broker))


def headers_of(request: Any) -> dict[str, Any]:
    return {k: v for k, v in custom_headers(request).items() if not k.startswith(DEATHS)}


def custom_headers(request: Any) -> Mapping[str, Any]:
    """Return the headers of a delivery; a message may bring anything under that name."""
    return request.headers if isinstance(request.headers, Mapping) else {}


@contextlib.contextmanager
def sure_producer(app: Any) -> Iterator[Any]:
    """
    Yield a producer whose publish returns when the broker has the message.

    With AMQP it otherwise returns when it is written to a socket. The delivered message is
    acknowledged right after, and the copy, on a connection that breaks at that moment, would be
    the only one. None where Celery's own producer is as sure.
    """
    if driver_of(app) != "amqp":
        yield None
        return
    connection = app.connection_for_write(transport_options={"confirm_publish": True})
    with pools.producers[connection].acquire(block=True) as producer:
        yield producer


def as_called(request: Any) -> dict[str, Any]:
    """Return what the caller said about the result; before 5.7 Celery does not pass it on."""
    said = vars(request).get("ignore_result")  # the class has a False by default
    return {} if said is None else {"ignore_result": said}
