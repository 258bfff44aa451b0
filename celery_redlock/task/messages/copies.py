"""Options and headers that a retry or a copy takes over from its message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kombu import Queue

from celery_redlock.task.messages.delivery_info import broadcast_of, queue_of, serializer_of
from celery_redlock.task.messages.envelope import HEADER, Envelope

__all__ = ["options_of_copy", "way_of_copy"]


def options_of_copy(
    task: Any, request: Any, given: Mapping[str, Any], *, has_new_arguments: bool
) -> dict[str, Any]:
    """Return the options of a retry or copy; those *given* count, but for our header."""
    own, options = vars(request), dict(given)
    headers = given.get("headers", request.headers)
    headers = headers if isinstance(headers, Mapping) else {}
    envelope = envelope_of_copy(headers, request)
    broadcast = broadcast_of(task.app, request.delivery_info)
    if broadcast is not None and not queue_of(request.delivery_info):
        envelope = envelope._replace(worker=request.hostname)
        # A child process of a worker has never declared it, and Redis would drop the message.
        options["declare"] = [broadcast]
    if envelope != Envelope():
        options["headers"] = {**headers, **envelope.header(str(request.id))}
    carried = {
        "serializer": serializer_of(request),
        "compression": own.get("compression"),
        "delivery_mode": (request.properties or {}).get("delivery_mode"),
    }
    if not has_new_arguments:  # the caller may have hidden what they are
        carried |= {name: own.get(name) for name in ("argsrepr", "kwargsrepr")}
    return {**{option: value for option, value in carried.items() if value}, **options}


def way_of_copy(request: Any) -> dict[str, Any]:
    """
    Return the queue that a copy of a broadcast message goes by, as the option of a publish.

    To that queue alone, with RabbitMQ: by the exchange it would go to all of them again. Others,
    as Redis, have no such way; there each worker drops what is for another.
    """
    name = queue_of(request.delivery_info)
    # It is there, and nobody but who declared it knows with which arguments.
    return {"queue": Queue(name, no_declare=True), "declare": []} if name else {}


def envelope_of_copy(headers: Mapping[str, Any], request: Any) -> Envelope:
    envelope = Envelope.of(headers.get(HEADER), request.id)
    if envelope.publish_id is not None:  # of a copy, which is the same execution
        return envelope
    envelope = Envelope.of(vars(request).get(HEADER), request.id)
    return envelope._replace(publish_id=None, previous=None, waiting=None, debounced=0)
