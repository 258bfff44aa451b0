"""
Bring a task back later as an independent message: same id, same everything, own delivery.

The delivered message may be acknowledged once the copy is published, and only then. On
Redis a redelivered copy shares its delivery tag with the original, so acknowledging it
without publishing another would throw the running original's message away.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from celery.exceptions import Ignore, Reject

from celery_redlock.plugin import first_url

__all__ = ["come_again", "longest_countdown", "set_aside", "times_put_off", "warn_if_forgetful"]

logger = logging.getLogger(__name__)

#: Header that counts how often a policy put a task off.
PUT_OFF = "redlock_put_off"
#: The broker's default time after which an unacknowledged message is delivered again [s].
VISIBILITY_TIMEOUTS = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}


def visibility_timeout(app: Any) -> float | None:
    """Return after which time *app*'s broker delivers a message again [s]; None for never."""
    scheme = first_url(app.conf.broker_read_url).partition(":")[0].partition("+")[0]
    if scheme not in VISIBILITY_TIMEOUTS:
        return None
    options = app.conf.broker_transport_options or {}
    return float(options.get("visibility_timeout", VISIBILITY_TIMEOUTS[scheme]))


def warn_if_forgetful(task: Any, dedup_ttl: float) -> None:
    """Say so if *task*'s message may come again after its execution was forgotten."""
    timeout = visibility_timeout(task.app)
    if timeout is not None and 0 < dedup_ttl < timeout:
        logger.warning(
            "%s: dedup_ttl (%g s) is shorter than the broker's visibility timeout (%g s): a "
            "message that is delivered again after that would run again; raise dedup_ttl",
            task.name,
            dedup_ttl,
            timeout,
        )


def longest_countdown(app: Any) -> float:
    """
    Return the longest delay that is safe with *app*'s broker [s].

    A delayed message waits unacknowledged in a worker; delayed for longer than the
    visibility timeout it would be delivered again and again.
    """
    timeout = visibility_timeout(app)
    return 3600.0 if timeout is None else max(1.0, timeout / 3.0)


def times_put_off(request: Any) -> int:
    """Return how often a policy has put this task off."""
    value = (request.headers or {}).get(PUT_OFF, 0)
    return value if isinstance(value, int) else 0


def set_aside(task: Any, request: Any, after: float, otherwise: Exception | None = None) -> Ignore:
    """
    Publish a copy for later and return what ends this delivery without writing a state.

    Args:
        task: The task.
        request: Of the delivery that must not run now.
        after: When the copy may have its turn [s from now].
        otherwise: As of `come_again`.
    """
    countdown = max(1, math.ceil(min(after, longest_countdown(task.app))))
    come_again(task, request, countdown, otherwise)
    told = f"set aside for {countdown} s: it is running already, or what came before it is"
    logger.info("%s[%s] %s", task.name, request.id, told)
    return Ignore(told)


def come_again(
    task: Any,
    request: Any,
    countdown: int,
    otherwise: Exception | None = None,
    put_off: int | None = None,
) -> None:
    """
    Publish the task again with all it carries, `retries` unchanged.

    Args:
        task: The task.
        request: Of this delivery.
        countdown: When [whole s from now, >= 1: quorum queues take nothing else].
        otherwise: How the task is to fail, visibly, if it could not be published and the
            delivered message was acknowledged early.
        put_off: New value of the counter in the header; None leaves it as it is.

    Raises:
        Reject: It could not be published, and the broker still has the delivered message.
    """
    headers = dict(request.headers or {})
    if put_off is not None:
        headers[PUT_OFF] = put_off
    again = task.signature_from_request(
        request, countdown=countdown, retries=request.retries, headers=headers
    )
    try:
        again.apply_async(add_to_parent=False)
    except Exception as error:
        logger.exception("%s[%s] could not be published again", task.name, request.id)
        if otherwise is not None and not task.acks_late:
            raise otherwise from error
        raise Reject(error, requeue=True) from error
