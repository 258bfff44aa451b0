"""What tests of this folder share: time to connect to a node, and locks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading import nodes as reading
from celery_redlock.testing.servers import Server
from support.database_server import patient
from support.stored import ROOMY, urls_of

#: Files, and a test of another one, whose locks are in a database.
DATABASES = {
    *("test_database", "test_database_faults", "test_database_login", "test_database_tables"),
    *("test_django_tables", "test_listening"),
    "test_a_database_is_a_node_like_any_other",
}


@pytest.fixture
def usual_limits() -> None:
    """For tests whose subject is how long a database may take: it is as elsewhere."""


@pytest.fixture(autouse=True)
def _databases_may_take_long(request: pytest.FixtureRequest) -> Iterator[None]:
    """No transaction of this process is late, unless the test asks for `usual_limits`."""
    uses_one = not DATABASES.isdisjoint({request.path.stem, request.node.originalname})
    with ExitStack() as stack:
        if uses_one and "usual_limits" not in request.fixturenames:
            stack.enter_context(patient(seconds=60))
        yield


@pytest.fixture
def sync_locks() -> Iterator[Callable[..., Redlock]]:
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


@pytest.fixture
def locks(sync_locks: Callable[..., Redlock]) -> Callable[..., Redlock]:
    """`sync_locks`, where a module has no others."""
    return sync_locks
