"""The `Bench` of a test's own file, on a server of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_redlock.testing.servers import Server


@pytest.fixture
def fresh(request: pytest.FixtureRequest, contract_node: Server) -> Iterator[Any]:
    """A bench on a node that nobody has enrolled."""
    bench = request.module.Bench(contract_node)
    yield bench
    bench.client.close()


@pytest.fixture
def bench(fresh: Any) -> Any:
    """A bench on a node that is enrolled and votes."""
    fresh.enrol()
    return fresh
