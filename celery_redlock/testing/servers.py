"""Real lock nodes for a test: servers on the loopback interface, enrolled, used by an app."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from celery_redlock.events import Observer
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.apps import app_on, rules_of

__all__ = ["real_servers"]

#: By its name: it belongs to `ops`, a layer above.
SERVERS = "celery_redlock.ops.servers"


class RealServers:
    """
    Servers in place of an app's lock nodes.

    Attributes:
        urls: As the setting ``redlock_nodes``.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls: Sequence[str] = urls

    def locks_on(
        self,
        nodes: Sequence[Any],
        rules: Rules,
        observers: Iterable[Observer],
        sleep: Callable[[float], None],
    ) -> Redlock:
        """Return locks on *nodes*, which are these."""
        return Redlock(nodes, rules, observers, sleep)


@contextlib.contextmanager
def real_servers(app: Any, n: int = 5) -> Iterator[list[Any]]:
    """
    Start *n* servers and lock the tasks of *app* there for the body of a ``with``.

    Args:
        app: A Celery app; in this process.
        n: How many; an odd number.

    Yields:
        The servers, as of `celery_redlock.ops.servers`, to be killed, paused and restarted.

    Raises:
        RuntimeError: There is no server program; says how to get one.
    """
    with importlib.import_module(SERVERS).servers(n) as servers:
        urls = [server.url for server in servers]
        bootstrap(urls, rules_of(app))
        with app_on(app, RealServers(urls)):
            yield servers
