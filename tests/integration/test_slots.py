"""Slot records on real servers that fail: what is told them reaches them after all."""

from __future__ import annotations

import time

import pytest

from celery_redlock import QuorumUnavailable, Redlock
from celery_redlock.beat.slot_records import Claim, Slots
from celery_redlock.beat.slot_votes import SlotState
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.health import check
from celery_redlock.reading.nodes import bootstrap
from support.stored import ROOMY, clients_of
from support.waiting import eventually

RULES = Rules(**ROOMY)


@pytest.fixture
def farm(redis_nodes):
    nodes = redis_nodes(3)
    urls = [node.url for node in nodes]
    bootstrap(urls, RULES)
    clients = [Redlock(urls, RULES) for _ in range(2)]
    for client in clients:
        check(client)
    yield nodes, *clients
    for client in clients:
        client.close()


def claim_of(due, fence):
    return Claim("shop/report", due, f"{fence:040x}", fence, 60.0)


def records(nodes):
    key = "redlock:slot:shop/report"
    return [client.hmget(key, "slot", "state") for client in clients_of(nodes)]


def test_a_claim_that_lies_in_a_paused_node_is_withdrawn_behind_it(farm):
    """It is carried out when the node goes on, and so is what takes it back: no doubt is left."""
    nodes, first, second = farm
    due = float(int(time.time()))
    for node in nodes[:2]:
        node.pause()
    with pytest.raises(QuorumUnavailable):
        Slots.on(first).claim(claim_of(due, fence=1))
    for node in nodes[:2]:
        node.resume()
    eventually(lambda: records(nodes) == [[None, None]] * 3, "records without a claim")
    eventually(lambda: Slots.on(second).look(["shop/report"]) == {}, "a look that finds none")
    assert Slots.on(second).claim(claim_of(due, fence=2)).state is SlotState.CLAIMED


def test_what_was_settled_while_a_node_was_paused_reaches_it(farm):
    nodes, first, _ = farm
    due = float(int(time.time()))
    Slots.on(first).claim(claim_of(due - 1, fence=1))
    nodes[0].pause()
    assert Slots.on(first).claim(claim_of(due, fence=1)).state is SlotState.CLAIMED
    Slots.on(first).settle(claim_of(due, fence=1))
    nodes[0].resume()
    settled = [b"%d" % (due * 1000), b"settled"]
    eventually(lambda: records(nodes) == [settled] * 3, "three settled records")
