"""Apps as clients of a test: how they let go of servers that the test is about to end."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.backends.redis import RedisBackend

__all__ = ["let_go"]


def let_go(app: Celery) -> None:
    """Close *app* and its connections; results that are forgotten later leave the servers alone."""
    # Before Celery 5.7 such a result would unsubscribe from a server that may be gone by then.
    backend: Any = app.backend
    backend.remove_pending_result = lambda result: result
    if isinstance(app.backend, RedisBackend):
        backend.result_consumer.stop()
        backend.client.connection_pool.disconnect()
    app.close()
