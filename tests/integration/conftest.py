"""What all tests of this folder have: time to connect to a node."""

from __future__ import annotations

import pytest

from celery_redlock.lock.nodes import address, connections


@pytest.fixture(autouse=True)
def _connecting_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer for a few seconds is slow, not down."""
    for name in ("socket_timeout", "socket_connect_timeout"):
        monkeypatch.setitem(address.OPTIONS, name, 10.0)
    monkeypatch.setattr(connections, "FIRST_CONNECT", 10.0)
