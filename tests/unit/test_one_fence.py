"""One who waits, a stall before its fence is agreed on, and another who has the lock meanwhile."""

from __future__ import annotations

import pytest

from celery_redlock.lock.algorithm.acquiring import acquire
from celery_redlock.lock.algorithm.effects import Ask, Sleep
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.lease import Lease, fence_proposal
from celery_redlock.lock.records import Keys
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import release_request
from celery_redlock.lock.scripts.scripts import RENEW
from support.fakes import Ears, FakeClock
from support.lua import ScriptNode

RULES = Rules(max_ttl=10.0, ttl=2.0)
LABELS = ("a", "b", "c")
FREE, FENCE = Keys.of(RULES.prefix, "k").lock, Keys.of(RULES.prefix, "k").fence


class Steps:
    """One who acquires the lock, on nodes in memory and a step at a time."""

    def __init__(self, nodes, clock, wait=0.0):
        client = Participant(RULES, LABELS, listener=Ears(), now=clock, wall=clock)
        client.chance = lambda _, most: most
        self.nodes, self.steps = nodes, acquire(client, LockRequest("k", 2.0, wait=wait))
        self.lease = None
        self.step = self.send(None)

    def send(self, answer):
        try:
            self.step = self.steps.send(answer)
        except StopIteration as end:
            self.step, self.lease = None, end.value
        return self.step

    def do(self):
        step = self.step
        if isinstance(step, Ask):
            return self.send([node.vote(step.request) for node in self.nodes])
        for place, node in enumerate(self.nodes):
            if place not in step.skip:
                node.vote(step.request)
        return self.send(None)

    def until(self, ends):
        while self.step is not None and not ends(self.step):
            self.do()

    def release(self):
        for node in self.nodes:
            node.vote(release_request(RULES, "k", self.lease.token))


def confirms(step):
    return isinstance(step, Ask) and step.request.script is RENEW


def is_pause(step):
    return isinstance(step, Sleep)


def stands_still(step):
    """Whether a step is a pause, or is to agree on a fence."""
    return is_pause(step) or confirms(step)


def see(node, moment):
    """Have a node, and no other, see a fence of somebody whose clock is a little ahead."""
    node.ask(b"SET", FENCE, b"%d" % fence_proposal(round(moment * 1000), 0))


@pytest.fixture
def clock():
    return FakeClock(1.7e9)


@pytest.fixture
def nodes(clock):
    """Three nodes; whoever is told something by them listens."""
    nodes = [ScriptNode(RULES, clock) for _ in LABELS]
    for node in nodes:
        node.keyspace.hear = lambda *_: 1
    return nodes


def test_no_two_holders_have_one_fence(nodes, clock):
    """What the second holder's release leaves for one who waited is no grant of the first round."""
    first = Steps(nodes, clock)
    first.until(lambda _: False)
    waits = Steps(nodes, clock, wait=60.0)
    waits.until(is_pause)
    first.release()
    clock.advance(waits.step.seconds)
    waits.send(None)  # it comes by itself, as the release is on its way to it
    see(nodes[0], clock() + 0.5)
    waits.until(stands_still)
    if is_pause(waits.step):
        waits.send(FREE)
        see(nodes[0], clock() + 0.7)
    waits.until(confirms)
    assert confirms(waits.step), "nothing to agree on: the story has no point"
    clock.advance(3.0)  # its keys have ended
    other = Steps(nodes, clock)
    other.until(lambda _: False)
    assert isinstance(other.lease, Lease)
    other.release()
    while waits.step is not None:
        waits.until(is_pause)
        if waits.step is not None:
            clock.advance(waits.step.seconds)
            waits.send(None)
    assert first.lease.fence < other.lease.fence < waits.lease.fence
