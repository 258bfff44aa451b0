"""Contracts hold on every kind of server, so in CI both kinds have to be there."""

from __future__ import annotations

import os

import pytest

from celery_redlock.testing.servers import find_binary


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_server_of_this_kind_is_tried(kind):
    """Without it the other contract tests would quietly try the other kind only."""
    try:
        find_binary(kind)
    except RuntimeError as missing:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(missing))
