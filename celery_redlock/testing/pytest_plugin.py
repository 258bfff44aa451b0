"""
Fixtures for pytest, which finds this plug-in by itself where celery-redlock is installed.

    redlock_disabled   no locks in this test
    redlock_quorum     the app locks on nodes in memory
    redlock_servers    the app locks on real servers

The last two need the fixture `redlock_app`, which a suite has to define. Everything is imported
when a fixture is used: pytest loads this in every suite. ``-p no:redlock`` leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from celery_redlock.testing.quorum import MemoryQuorum

__all__ = ["redlock_app", "redlock_disabled", "redlock_quorum", "redlock_servers"]

NO_APP = """\
redlock_quorum and redlock_servers want to know your Celery app: define the fixture redlock_app,
in conftest.py for example:

    @pytest.fixture
    def redlock_app():
        from shop.celery import app
        return app
"""


@pytest.fixture
def redlock_app() -> Any:
    """Return the Celery app under test; to be overridden."""
    pytest.fail(NO_APP, pytrace=False)


@pytest.fixture
def redlock_disabled() -> Iterator[None]:
    """Bodies run, and no lock is asked for; see `celery_redlock.testing.locks_disabled`."""
    from celery_redlock.testing.disabled import locks_disabled  # noqa: PLC0415  celery and redis

    with locks_disabled():
        yield


@pytest.fixture
def redlock_quorum(redlock_app: Any) -> Iterator[MemoryQuorum]:
    """Five nodes in memory on which the app locks; `celery_redlock.testing.MemoryQuorum`."""
    from celery_redlock.testing.quorum import memory_quorum  # noqa: PLC0415  celery and redis

    with memory_quorum(redlock_app) as quorum:
        yield quorum


@pytest.fixture
def redlock_servers(redlock_app: Any) -> Iterator[list[Any]]:
    """Five real servers on which the app locks; `celery_redlock.testing.servers.Server` each."""
    from celery_redlock.testing.apps import real_servers  # noqa: PLC0415  celery and redis

    with real_servers(redlock_app) as servers:
        yield servers
