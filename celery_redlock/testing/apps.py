"""Apps under test: their settings, and the servers they lock on instead of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from celery_redlock.configuration import redlock_conf
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.plugin import Servers, locking, plugin_for
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.settings import Settings
from celery_redlock.testing.servers import Server, servers

__all__ = ["app_on", "real_servers", "rules_of"]


@contextlib.contextmanager
def app_on(app: Any, servers: Servers) -> Iterator[None]:
    """Lock the tasks of *app* on *servers*, even if locks are disabled elsewhere."""
    before, locking.disabled = locking.disabled, 0
    try:
        with plugin_for(app).on_servers(servers):
            yield
    finally:
        locking.disabled = before


def rules_of(app: Any) -> Rules:
    return Settings.from_conf({**redlock_conf(app), "redlock_nodes": ["redis://memory/0"]}).rules


@dataclass
class RealServers:
    """Servers in place of an app's lock nodes; see `celery_redlock.plugin.Servers`."""

    urls: Sequence[str]
    locks_on: ClassVar[type[Redlock]] = Redlock


@contextlib.contextmanager
def real_servers(app: Any, n: int = 5) -> Iterator[list[Server]]:
    """
    Start *n* servers and lock the tasks of *app* there for the body of a ``with``.

    Args:
        app: A Celery app; in this process.
        n: How many; an odd number.

    Yields:
        The servers, as of `celery_redlock.testing.servers`, to be killed, paused and restarted.

    Raises:
        RuntimeError: There is no server program; says how to get one.
    """
    with servers(n) as farm:
        urls = [server.url for server in farm]
        bootstrap(urls, rules_of(app))
        with app_on(app, RealServers(urls)):
            yield farm
