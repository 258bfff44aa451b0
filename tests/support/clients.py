"""Apps as clients of a test: how they let go of servers that the test is about to end."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.backends.redis import RedisBackend

from celery_redlock.lock import watchdog
from celery_redlock.lock.nodes import connections

__all__ = ["hang_up", "let_go"]


def let_go(app: Celery) -> None:
    """Close *app* and its connections; results that are forgotten later leave the servers alone."""
    # Before Celery 5.7 such a result would unsubscribe from a server that may be gone by then.
    backend: Any = app.backend
    backend.remove_pending_result = lambda result: result
    if isinstance(app.backend, RedisBackend):
        backend.result_consumer.stop()
        backend.client.connection_pool.disconnect()
    app.close()


def hang_up() -> None:
    """
    Have every `Redlock` of this process renew nothing and call nobody, until it is used again.

    One that a test has left behind would renew its locks on the emptied servers of the next
    test, and enrol for its own rules those that get a port of servers that have ended.
    """
    for dog in list(watchdog._every_watchdog):
        for held in dog.held:
            dog.unwatch(held)
    for each in list(connections._all_connections):
        each.close()
