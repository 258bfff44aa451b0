"""Notes that are in no hurry go along with whatever is sent to a node next."""

from __future__ import annotations

import pytest
import redis

from celery_redlock import Redlock
from celery_redlock.lock.queued import Duplicate, Placed, Trigger, end_request
from celery_redlock.lock.survey import bootstrap
from support.waiting import eventually

TRIGGER = Trigger("n", 60.0, {"task_id": "first"}, 60.0)


@pytest.fixture
def nodes(redis_nodes):
    """Three of them."""
    return redis_nodes(3)


@pytest.fixture
def locks(nodes):
    """Locks on three nodes, connected."""
    urls = [node.url for node in nodes]
    locks = Redlock.from_urls(urls, node_timeout=0.5)
    bootstrap(urls, locks.rules)
    locks.check()
    yield locks
    locks.close()


def tokens(nodes):
    """Return whose marker each node stores, None for nobody's."""
    found = []
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            token = client.hget("redlock:queued:n", "token")
            found.append(token and token.decode())
    return found


def test_a_note_in_no_hurry_goes_with_the_next_request(locks, nodes):
    """Nothing is sent for it alone, and it is there before the next answer is."""
    placed = locks.queued.enqueue(TRIGGER)
    assert isinstance(placed, Placed)
    end = end_request(locks.rules, "n", placed.token, "over", 0.0)
    locks.queued._driver.tell(end, frozenset({0}), hurry=False)
    locks.queued._driver.tell(end, frozenset({0, 1}), hurry=False)  # as often as one likes
    assert tokens(nodes) == [placed.token] * 3
    locks.inspect("n")
    assert tokens(nodes) == [placed.token, None, None]


def test_a_note_in_no_hurry_outlives_its_connection(locks, nodes):
    """The node hung up before there was anything to go along with: the next connection takes it."""
    placed = locks.queued.enqueue(TRIGGER)
    end = end_request(locks.rules, "n", placed.token, "over", 0.0)
    locks.queued._driver.tell(end, hurry=False)
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
    locks.inspect("n")  # the write to a connection that has ended may seem to succeed
    eventually(lambda: tokens(nodes) == [None] * 3, "the end of the marker")


def test_what_a_forgetful_node_stored_of_a_duplicate_is_ended_with_the_next_publish(locks, nodes):
    """It answered late or was not needed for the majority; nobody's marker is left there."""
    placed = locks.queued.enqueue(TRIGGER)
    with redis.Redis.from_url(nodes[2].url) as client:
        client.delete("redlock:queued:n")
    for _ in range(20):  # whether or not the third one is among those that decide
        assert isinstance(locks.queued.enqueue(TRIGGER), Duplicate)
    locks.queued.end("n", placed.token, "over", wait=True)
    locks.inspect("n")
    assert tokens(nodes) == [None] * 3
