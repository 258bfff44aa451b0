"""The journal over several nodes: each record once, whatever becomes of nodes and writers."""

from __future__ import annotations

import time

import pytest
import redis

from celery_redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.health import probe
from celery_redlock.reading.journal import JournalReader, write_record
from celery_redlock.reading.nodes import bootstrap
from support.stored import ROOMY, clients_of, urls_of
from support.waiting import eventually

RULES = Rules(**ROOMY)


@pytest.fixture
def locks(five_nodes):
    bootstrap(urls_of(five_nodes), RULES)
    locks = Redlock(urls_of(five_nodes), RULES)
    probe(locks)
    yield locks
    locks.close()


@pytest.fixture
def reader(five_nodes):
    reader = JournalReader(urls_of(five_nodes), RULES)
    yield reader
    reader.close()


def put(locks, *numbers):
    for number in numbers:
        write_record(locks, {"event": "Test", "at": time.time(), "number": number})


def arrived(nodes, count):
    eventually(
        lambda: all(client.xlen("redlock:journal") >= count for client in clients_of(nodes)),
        f"{count} records",
    )


def numbers(records):
    return [record["number"] for record in records]


def test_a_record_is_written_though_the_nodes_have_forgotten_its_script(five_nodes, locks):
    put(locks, 0)
    arrived(five_nodes, 1)
    for client in clients_of(five_nodes):
        client.script_flush()
    put(locks, 1)
    eventually(lambda: probe(locks) is not None, "answers")
    put(locks, 2)
    arrived(five_nodes, 3)


def test_a_record_on_five_nodes_is_read_once(five_nodes, locks, reader):
    put(locks, *range(20))
    arrived(five_nodes, 20)
    assert numbers(reader.recent()) == list(range(20))
    assert reader.new() == []
    put(locks, 20, 21)
    arrived(five_nodes, 22)
    assert numbers(reader.new()) == [20, 21]


def test_recent_is_the_newest(five_nodes, locks, reader):
    put(locks, *range(30))
    arrived(five_nodes, 30)
    assert numbers(reader.recent(5)) == [25, 26, 27, 28, 29]


def test_a_reader_that_has_read_nothing_yet_starts_from_the_beginning(five_nodes, locks, reader):
    put(locks, 1)
    arrived(five_nodes, 1)
    assert numbers(reader.new()) == [1]


def test_records_outlive_nodes(redis_nodes):
    nodes = redis_nodes(3)
    bootstrap(urls_of(nodes), RULES)
    locks = Redlock(urls_of(nodes), RULES)
    reader = JournalReader(urls_of(nodes), RULES)
    probe(locks)
    put(locks, 1)
    arrived(nodes, 1)
    assert numbers(reader.recent()) == [1]
    nodes[0].kill()
    put(locks, 2)
    arrived(nodes[1:], 2)
    assert numbers(reader.new()) == [2]
    nodes[0].start()
    nodes[1].kill()
    put(locks, 3)
    arrived(nodes[2:], 3)
    assert 3 in numbers(reader.new())
    assert numbers(JournalReader(urls_of(nodes), RULES).recent()) == [1, 2, 3]
    reader.close()
    locks.close()


def test_what_others_wrote_into_it_harms_no_reader(five_nodes, locks, reader):
    with redis.Redis.from_url(five_nodes[0].url) as client:
        for value in (b"\xff\xfe", b"[1]", b"{}", b'{"id": 7}', b'{"id": {"a": 1}}'):
            client.xadd("redlock:journal", {"e": value})
        client.xadd("redlock:journal", {"other": "field"})
    put(locks, 1)
    arrived(five_nodes[1:], 1)
    assert numbers(reader.recent()) == [1]


def test_a_key_of_another_type_is_no_journal(five_nodes, locks, reader):
    with redis.Redis.from_url(five_nodes[0].url) as client:
        client.set("redlock:journal", "mine")
    put(locks, 1)
    arrived(five_nodes[1:], 1)
    assert numbers(reader.recent()) == [1]
    locks.release(locks.acquire("still works"))
