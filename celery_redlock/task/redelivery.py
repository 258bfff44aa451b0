"""
Publish a task again for later: the same id and options, as a message of its own.

The delivered message may be acknowledged once the copy is published, and only then. On
Redis a redelivered copy shares its delivery tag with the original, so acknowledging it
without publishing another would throw the running original's message away.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kombu import Exchange, Queue, pools
from kombu.exceptions import OperationalError

from celery_redlock.configuration import first_url
from celery_redlock.deferral import pause
from celery_redlock.lock.clock import jitter
from celery_redlock.log import get_logger
from celery_redlock.task.delivery import queue_of
from celery_redlock.task.envelope import Envelope
from celery_redlock.task.outcome import DeliveryOver, Outcome, PutBack

if TYPE_CHECKING:
    from celery_redlock.task.options import LockOptions

try:
    from celery.utils.quorum_queues import detect_quorum_queues
except ImportError:  # before Celery 5.5 what is to come later always waits in a worker
    detect_quorum_queues = None  # type: ignore[assignment]

__all__ = [
    "delays_in_broker",
    "headers_of",
    "longest_countdown",
    "requeue",
    "warn_if_forgetful",
    "warn_if_results_expire",
    "way_back",
]

logger = get_logger(__name__)

#: Shortest and longest pause before the broker is to deliver a message again for which no copy
#: could be published [s].
PUT_BACK_AFTER = 0.5, 1.5
#: For how long RabbitMQ lets a consumer not acknowledge a message, by default [s].
CONSUMER_TIMEOUT = 1800.0
#: The broker's default time after which an unacknowledged message is delivered again [s].
VISIBILITY_TIMEOUTS = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}
#: What RabbitMQ notes of a delayed message. Before 4.0.1 it would take a copy that carries
#: them along for one that goes in circles, and drop it.
DEATHS = ("x-death", "x-first-death-", "x-last-death-")
#: Where a message comes from that the broker held back, and what its routing key then begins
#: with: the delay in binary.
DELAYED_DELIVERY = "celery_delayed_delivery"
WAITED = re.compile(r"^(?:[01]\.){28}")


def visibility_timeout(app: Any) -> float | None:
    """Return after how long *app*'s broker delivers a message again [s]; None for never."""
    scheme = first_url(app.conf.broker_read_url).partition(":")[0].partition("+")[0]
    if scheme not in VISIBILITY_TIMEOUTS:
        return None
    options = app.conf.broker_transport_options or {}
    return float(options.get("visibility_timeout", VISIBILITY_TIMEOUTS[scheme]))


def warn_if_forgetful(task: Any, dedup_ttl: float) -> None:
    """Warn if *task*'s message may be delivered again after its execution was forgotten."""
    timeout = visibility_timeout(task.app)
    if timeout is not None and 0 < dedup_ttl < timeout:
        logger.warning(
            "%s: dedup_ttl (%g s) is shorter than the broker's visibility timeout (%g s): a "
            "message that is delivered again after that would run again; raise dedup_ttl",
            task.name,
            dedup_ttl,
            timeout,
        )


def warn_if_results_expire(task: Any, options: LockOptions) -> None:
    """Warn if duplicates of *task* may join one whose result the backend has dropped already."""
    kept = task.app.conf.result_expires
    kept = kept.total_seconds() if isinstance(kept, timedelta) else kept
    is_joined = options.unique_until == "expired" and options.on_duplicate == "join"
    if is_joined and not task.ignore_result and kept and options.unique_for > kept:
        logger.warning(
            "%s: unique_for (%g s) is longer than result_expires (%g s): a duplicate may join a "
            "task whose result is gone, and its get() then waits without end; raise "
            "result_expires, or use on_duplicate='fail'",
            task.name,
            options.unique_for,
            kept,
        )


def longest_countdown(app: Any) -> float:
    """
    Return the longest delay that is safe with *app*'s broker [s].

    A delayed message waits unacknowledged in a worker; delayed for longer than the
    visibility timeout it would be delivered again and again. RabbitMQ has none, but ends a
    consumer that has not acknowledged a message for so long, and Celery the worker with it.
    """
    timeout = visibility_timeout(app)
    return max(1.0, (CONSUMER_TIMEOUT if timeout is None else timeout) / 3.0)


def requeue(
    task: Any,
    request: Any,
    envelope: Envelope,
    after: float,
    *,
    reason: str,
    outcome: Outcome,
    otherwise: Exception | None = None,
) -> DeliveryOver:
    """
    Publish a copy of the message for later; return what ends this delivery without a state.

    The copy carries all that the message did, `retries` unchanged.

    Args:
        task: The task.
        request: Of this delivery.
        envelope: Of the copy.
        after: When the copy may have its turn [s from now]; in whole seconds and at least one, as
            quorum queues take nothing else, and no longer than the broker can bear.
        reason: Why, in words.
        outcome: Of this execution.
        otherwise: How the task is to fail, visibly, if it could not be published, and the
            broker does not have the delivered message any more, or another try would fail, too.
            None if another delivery of it will store its result.

    Raises:
        PutBack: It could not be published, and the broker still has the delivered message.
        Exception: *otherwise*.
    """
    countdown = max(1, math.ceil(min(after, longest_countdown(task.app))))
    headers = {**headers_of(request), **envelope.header(request.id)}
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
        logger.exception("%s[%s] could not be published again", task.name, request.id)
        is_to_fail = not (task.acks_late and is_of_connection(error, task.app))
        if otherwise is not None and is_to_fail:
            raise otherwise from error
        pause(jitter(*PUT_BACK_AFTER))  # or it would be delivered as fast as the broker can
        raise PutBack(error, outcome) from error
    return DeliveryOver(reason, outcome, float(countdown))


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
    """Return the headers of a copy of a delivery."""
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


def way_back(app: Any, request: Any) -> dict[str, Any]:
    """
    Return the option that brings a delayed copy back to the queue that this delivery came from.

    With quorum queues the delay is the broker's, and Celery (5.6, 5.7) makes the copy's way from
    the option ``queue`` alone. Without one that is the default queue, whatever exchange and
    routing key the message came with; the workers there may be others, or none.
    """
    info = request.delivery_info or {}
    exchange, key = info.get("exchange"), info.get("routing_key")
    if queue_of(info):  # of a broadcast: by that queue, which the task's own signature names
        return {}
    if not exchange or not key or not delays_in_broker(app):
        return {}
    if exchange == DELAYED_DELIVERY:  # nothing that came this way belongs to a direct exchange
        kind, key = "topic", WAITED.sub("", key)
    else:
        known = (queue.exchange for queue in app.amqp.queues.values() if queue.exchange)
        # With an unknown one it waits in the worker, as with a direct exchange.
        kind = next((found.type for found in known if found.name == exchange), "direct")
    return {"queue": Queue(key, Exchange(exchange, kind), key, no_declare=True)}


def delays_in_broker(app: Any) -> bool:
    """Return whether Celery lets the broker hold back delayed messages."""
    if detect_quorum_queues is None:
        return False
    return bool(detect_quorum_queues(app, driver_of(app))[0])


def driver_of(app: Any) -> str:
    """Return the kind of broker that *app* publishes to, as ``"amqp"`` or ``"redis"``."""
    return str(app.producer_pool.connections.connection.transport.driver_type)


def as_called(request: Any) -> dict[str, Any]:
    """Return what the caller said about the result; before 5.7 Celery does not pass it on."""
    said = vars(request).get("ignore_result")  # the class has a False by default
    return {} if said is None else {"ignore_result": said}
