"""What has expired in a database is deleted, however short the connections to it are."""

from __future__ import annotations

from contextlib import closing

import pytest

from celery_redlock.lock.database import batch
from celery_redlock.lock.database.address import DatabaseAddress
from celery_redlock.lock.database.batch import Batches

CONNECTIONS, KEPT = 200, 20


@pytest.fixture
def address(tmp_path):
    return DatabaseAddress(f"sqlite:///{tmp_path}/locks.db?commit=async")


@pytest.fixture(autouse=True)
def _little_is_swept_at_once(monkeypatch):
    monkeypatch.setattr(batch, "SWEEP_EVERY", 4)
    monkeypatch.setattr(batch, "SWEPT", KEPT - 4)


def left_by_short_connections(address):
    """Return how many rows there are after many connections with one short-lived key each."""
    with closing(address.store()) as store:
        Batches(store).answers([(b"SET", b"a%d" % number, b"kept") for number in range(KEPT)])
    for number in range(CONNECTIONS):
        with closing(address.store()) as store:
            batches = Batches(store)
            batches.answers([(b"SET", b"b%d" % number, b"expires", b"PX", b"1")])
            batches.sweep()
    with closing(address.store()) as store:
        return len(store.page(b"", b"", 2 * CONNECTIONS))


def test_short_connections_sweep_all_there_is_together(address):
    assert left_by_short_connections(address) < CONNECTIONS / 2


def test_connections_that_begin_to_count_at_zero_sweep_nothing(address, monkeypatch):
    monkeypatch.setattr(batch.random, "randrange", lambda _: 0)
    assert left_by_short_connections(address) > CONNECTIONS


def test_connections_that_begin_at_the_first_key_do_not_come_to_the_others(address, monkeypatch):
    delete = Batches._delete
    monkeypatch.setattr(Batches, "_delete", lambda self, over, _: delete(self, over, b""))
    assert left_by_short_connections(address) > CONNECTIONS
