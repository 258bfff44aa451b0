"""Facts of an app's broker: when it delivers a message again, and where it delays one."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kombu import Exchange, Queue

from celery_redlock.configuration import first_url
from celery_redlock.process.log import get_logger
from celery_redlock.task.messages.delivery_info import queue_of

if TYPE_CHECKING:
    from celery_redlock.task.options import LockOptions

try:
    from celery.utils.quorum_queues import detect_quorum_queues
except ImportError:  # before Celery 5.5 what is to come later always waits in a worker
    detect_quorum_queues = None  # type: ignore[assignment]

__all__ = [
    "delays_in_broker",
    "driver_of",
    "longest_countdown",
    "warn_if_acked_early",
    "warn_if_debounced_long",
    "warn_if_forgetful",
    "warn_if_not_alone",
    "warn_if_results_expire",
    "way_back",
]

logger = get_logger(__name__)

#: For how long RabbitMQ lets a consumer not acknowledge a message, by default [s].
CONSUMER_TIMEOUT = 1800.0
#: The broker's default time after which an unacknowledged message is delivered again [s].
VISIBILITY_TIMEOUTS = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}
#: Where a message comes from that the broker held back, and what its routing key then begins
#: with: the delay in binary.
DELAYED_DELIVERY = "celery_delayed_delivery"
WAITED = re.compile(r"^(?:[01]\.){28}")


def visibility_timeout(app: Any) -> float | None:
    """In seconds; None for a broker without one."""
    scheme = first_url(app.conf.broker_read_url).partition(":")[0].partition("+")[0]
    if scheme not in VISIBILITY_TIMEOUTS:
        return None
    options = app.conf.broker_transport_options or {}
    return float(options.get("visibility_timeout", VISIBILITY_TIMEOUTS[scheme]))


def warn_if_forgetful(task: Any, dedup_ttl: float) -> None:
    timeout = visibility_timeout(task.app)
    if timeout is not None and 0 < dedup_ttl < timeout:
        logger.warning(
            "%s: dedup_ttl (%g s) is shorter than the broker's visibility timeout (%g s): a "
            "message that is delivered again after that would run again; raise dedup_ttl",
            task.name,
            dedup_ttl,
            timeout,
        )


def warn_if_acked_early(task: Any) -> None:
    if task.max_deliveries and not task.acks_late:
        logger.warning(
            "%s: max_deliveries has no effect, as its messages are acknowledged before they run, "
            "and are not delivered again; set acks_late=True, with reject_on_worker_lost=True for "
            "children that are killed, or leave max_deliveries out",
            task.name,
        )


def warn_if_not_alone(task: Any, options: LockOptions) -> None:
    if options.max_deliveries and task.acks_late and not options.limit:
        logger.warning(
            "%s: max_deliveries counts copies that run beside each other, as lock_limit=None takes "
            "no lock: a body that outlasts the time after which the broker delivers its message "
            "again (visibility_timeout, consumer_timeout) fails after %d such starts; raise that "
            "time, or give the task a lock",
            task.name,
            options.max_deliveries,
        )


def warn_if_results_expire(task: Any, options: LockOptions) -> None:
    expires = task.app.conf.result_expires
    expires = expires.total_seconds() if isinstance(expires, timedelta) else expires
    is_joined = options.unique_until == "expired" and options.on_duplicate == "join"
    if is_joined and not task.ignore_result and expires and options.unique_for > expires:
        logger.warning(
            "%s: unique_for (%g s) is longer than result_expires (%g s): a duplicate may join a "
            "task whose result is gone, and its get() then waits without end; raise "
            "result_expires, or use on_duplicate='fail'",
            task.name,
            options.unique_for,
            expires,
        )


def warn_if_debounced_long(task: Any, options: LockOptions) -> None:
    longest = longest_countdown(task.app)
    if options.debounce > longest and not delays_in_broker(task.app):
        logger.warning(
            "%s: debounce (%g s) is longer than a message may wait in a worker of this broker "
            "(%g s): it would be delivered again meanwhile, or its worker lose the connection; "
            "lower debounce, or raise the broker's timeout",
            task.name,
            options.debounce,
            longest,
        )


def longest_countdown(app: Any) -> float:
    """
    Longest delay that is safe with *app*'s broker [s].

    A delayed message waits unacknowledged in a worker; delayed for longer than the
    visibility timeout it would be delivered again and again. RabbitMQ has none, but ends a
    consumer that has not acknowledged a message for so long, and Celery the worker with it.
    """
    timeout = visibility_timeout(app)
    return max(1.0, (CONSUMER_TIMEOUT if timeout is None else timeout) / 3.0)


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
    if detect_quorum_queues is None:
        return False
    return bool(detect_quorum_queues(app, driver_of(app))[0])


def driver_of(app: Any) -> str:
    """Such as ``"amqp"`` or ``"redis"``."""
    return str(app.producer_pool.connections.connection.transport.driver_type)
