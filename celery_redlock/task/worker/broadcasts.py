"""Queues of broadcast messages, as the consumer of a worker knows them."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["broadcast_queue", "know_consumer"]

#: App -> the consumer of its worker.
_consumers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def know_consumer(consumer: Any) -> None:
    app = getattr(consumer, "app", None)
    if app is not None:
        _consumers[app] = weakref.ref(consumer)


def broadcast_queue(app: Any, message: Any) -> str:
    """The queue of a fanout exchange that *message* came by, if others can publish to it."""
    consumer = _consumers.get(app, lambda: None)()
    if consumer is None or consumer.connection.transport.driver_type != "amqp":
        return ""
    tag = (message.delivery_info or {}).get("consumer_tag")
    tags = getattr(consumer.task_consumer, "_active_tags", {})  # kombu has no public way
    for queue in consumer.task_consumer.queues if tag else ():
        if tags.get(queue.name) == tag and getattr(queue.exchange, "type", "") == "fanout":
            return str(queue.name)
    return ""
