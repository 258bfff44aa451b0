"""What tests of this folder share: time to connect to a node, and locks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from celery_redlock.lock.nodes import address, connections
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading import nodes as reading
from celery_redlock.testing.servers import Server
from support.stored import ROOMY, urls_of


@pytest.fixture(autouse=True)
def _connecting_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer for a few seconds is slow, not down."""
    for name in ("socket_timeout", "socket_connect_timeout"):
        monkeypatch.setitem(address.OPTIONS, name, 10.0)
    monkeypatch.setattr(connections, "FIRST_CONNECT", 10.0)


@pytest.fixture
def locks() -> Iterator[Callable[..., Redlock]]:
    """Make locks on some servers, which are enrolled first: ``locks(servers, **settings)``."""
    with ExitStack() as stack:

        def make(
            servers: Iterable[Server],
            *,
            bootstrap: bool = True,
            observers: Iterable[Any] = (),
            **settings: Any,
        ) -> Redlock:
            rules = Rules(**{**ROOMY, **settings})
            if bootstrap:
                told = reading.bootstrap(urls_of(servers), rules)
                assert set(told.values()) == {"enrolled"}, told
            made = Redlock(urls_of(servers), rules, observers)
            stack.callback(made.close)
            return made

        yield make
