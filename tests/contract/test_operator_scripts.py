"""What operators' tools have the nodes do: probes and the journal, on real servers."""

from __future__ import annotations

import json
import time

import pytest
import redis

from celery_redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.health import probe
from celery_redlock.reading.journal import KEPT, RECORD, RETENTION, JournalReader, write_record
from celery_redlock.reading.nodes import bootstrap
from support.waiting import eventually

RULES = Rules(ttl=60, max_ttl=60)


@pytest.fixture
def client(contract_node):
    with redis.Redis.from_url(contract_node.url) as client:
        yield client


@pytest.fixture
def locks(contract_node):
    locks = Redlock.from_urls([contract_node.url], ttl=60, max_ttl=60, node_timeout=5.0)
    yield locks
    locks.close()


def test_a_probe_of_an_enrolled_node_says_that_it_votes(contract_node, locks):
    bootstrap([contract_node.url], RULES)
    (health,) = probe(locks)
    assert (health.state, health.problem, health.quarantine) == ("up", "", 0.0)
    assert health.latency > 0
    assert abs(health.clock_offset) <= health.latency / 2 + 0.01


def test_a_probe_finds_a_node_that_lost_its_memory(contract_node, client, locks):
    bootstrap([contract_node.url], RULES)
    probe(locks)
    client.flushall()
    (health,) = probe(locks)
    assert health.state == "quarantined"
    assert 0 < health.quarantine <= RULES.quarantine
    assert client.exists("redlock:node:quarantine")


def test_a_probe_changes_nothing_on_a_healthy_node(contract_node, client, locks):
    """But a key that is gone in a second: so it may be sent as often as one likes."""
    bootstrap([contract_node.url], RULES)
    before = {key: client.get(key) for key in client.keys("*")}
    probe(locks)
    assert client.pttl("redlock:node:probe") <= 1000
    client.delete("redlock:node:probe")
    assert {key: client.get(key) for key in client.keys("*")} == before


def test_the_journal_is_capped_and_expires(client):
    for number in range(KEPT + 1500):
        client.eval(
            RECORD.source, 1, "redlock:journal", json.dumps({"id": str(number)}), 100, 60_000
        )
    assert 100 <= client.xlen("redlock:journal") <= 300
    assert 0 < client.pttl("redlock:journal") <= 60_000


def test_what_is_put_is_read_with_its_life(contract_node, client, locks):
    bootstrap([contract_node.url], RULES)
    probe(locks)
    write_record(locks, {"event": "TaskSkipped", "at": time.time(), "task": "shop.bill"})
    reader = JournalReader([contract_node.url], RULES)
    (record,) = eventually(reader.recent, "record")
    assert record["task"] == "shop.bill"
    assert RETENTION - 600 < client.ttl("redlock:journal") <= RETENTION
    reader.close()
