"""
``lock_limit``: at most N at once, whatever dies meanwhile; and several names, all or none.

Who runs at once is told by a record outside, which no lock has a hand in.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from celery_redlock import RedlockTask, current_lock
from celery_redlock.lock.lease import quorum
from celery_redlock.plugin import plugin_for
from support.broker_record import BrokerRecord
from support.events import body, most_at_once, now, read
from support.process import is_gone
from support.redelivery import redelivered_after
from support.stage import stage
from support.waiting import eventually

LIMIT = 3
NAMES = 10
PUBLISHES = 1000
#: So long that no stall costs a body its lock; and it is what a killed one's lock takes to end [s].
TTL = 10.0


def wait_at_the_gate(name):
    gate = Path(os.environ["EVENTS"]).with_name(f"{name}.open")
    eventually(gate.exists, f"word to go on for {name!r}", timeout=100)


def declare(app):
    options = {"base": RedlockTask, "shared": False, "acks_late": True, "lock_ttl": TTL}
    options |= {"reject_on_worker_lost": True, "on_conflict": "queue"}

    def work(name, seconds):
        held = current_lock()
        with body(os.environ["EVENTS"], name, lock=held.name, place=held.place, fence=held.fence):
            time.sleep(seconds)
            if name == "free":
                wait_at_the_gate(name)
        return held.place

    app.task(name="limited", lock_key="{name}", lock_limit=LIMIT, **options)(work)
    app.task(name="free", lock_key="no limit:{name}", lock_limit=1000, **options)(work)

    @app.task(name="per_node", shared=False)
    def per_node(number):
        """Take a place where a majority of nodes counts less than three, as recipes do."""
        nodes, counted = app.conf.redlock_nodes, []
        for step in range(len(nodes)):  # the first that answer: each client's own
            with redis.Redis.from_url(nodes[(number + step) % len(nodes)]) as client:
                if len(counted) < quorum(len(nodes)) and client.incr("per node") <= LIMIT:
                    counted.append(client)
        is_granted = len(counted) == quorum(len(nodes))
        if is_granted:
            with body(os.environ["EVENTS"], "per node"):
                wait_at_the_gate("per node")
        return is_granted

    @app.task(name="pair", lock_key=("tenant:{tenant}", "all"), **options)
    def pair(tenant, seconds):
        held = current_lock()
        with body(os.environ["EVENTS"], "pair"), body(os.environ["EVENTS"], f"tenant {tenant}"):
            time.sleep(seconds)
        return [held.name, [other.name for other in held.others], held.fence is not None]


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    conf = {"redlock_max_ttl": TTL, "redlock_ttl": TTL, "worker_prefetch_multiplier": 4}
    conf |= {"redlock_node_timeout": 1.0, "task_track_started": False, **redelivered_after(5)}
    folder = tmp_path_factory.mktemp("limit")
    with stage(__file__, folder, **conf) as it:
        it.start_workers([{"concurrency": 8}] * 2)
        yield it


def begun(it, name):
    return [event for event in read(it.events, "start") if event["name"] == name]


def stored(it, ids):
    with redis.Redis.from_url(it.broker.url) as client:
        found = client.mget([f"celery-task-meta-{one}" for one in ids])
    return {one: json.loads(meta) for one, meta in zip(ids, found, strict=True) if meta}


def killed_at(bodies, when):
    """Return *bodies*; of what was cut off by a kill it is known that it ran until that moment."""
    return [
        one if one.finished or one.started > when else replace(one, ended=max(one.ended, when))
        for one in bodies
    ]


@pytest.mark.long
def test_never_more_than_the_limit_whatever_dies(it):
    names = [f"limited {number}" for number in range(NAMES)]
    broker = BrokerRecord(it.broker.url)
    ids = [it.task("limited").delay(names[i % NAMES], 0.02).id for i in range(PUBLISHES)]

    def ended(share):
        return eventually(lambda: len(stored(it, ids)) > share * PUBLISHES, f"{share}", timeout=100)

    ended(0.2)
    killed = now()
    os.killpg(it.workers[0].pid, signal.SIGKILL)
    it.worker(concurrency=8)
    ended(0.4)
    for node in it.nodes[:3]:
        node.restart()

    def all_have_ended():
        with redis.Redis.from_url(it.broker.url) as client:
            if client.llen("celery"):  # what waits there is pushed, and not dropped
                return None
        found = stored(it, ids)
        return all(one in found or broker.was_dropped(one) for one in ids) and found

    found = eventually(all_have_ended, "the end of all tasks", timeout=200, every=0.2)
    broker.close()
    assert len(found) >= PUBLISHES - 1, "one worker was killed, with one message in its hand"
    assert {meta["status"] for meta in found.values()} == {"SUCCESS"}
    assert {meta["result"] for meta in found.values()} == set(range(LIMIT))
    for name in names:
        assert most_at_once(killed_at(it.bodies(name), killed)) <= LIMIT
        for place in range(LIMIT):
            fences = [one["fence"] for one in begun(it, name) if one["place"] == place]
            assert fences == sorted(set(fences)), "a place has fencing numbers of its own"


def test_a_count_per_node_lets_in_more(it):
    """A twin: each node counts to three, and each of five tasks has a majority of them."""
    results = [it.task("per_node").delay(number) for number in range(5)]
    it.started("per node", 5)
    it.events.with_name("per node.open").touch()
    assert [result.get(timeout=100) for result in results] == [True] * 5
    assert most_at_once(it.bodies("per node")) == 5 > LIMIT


def test_without_the_limit_there_are_more(it):
    """The twin: the record outside sees four and more where the limit does not forbid it."""
    results = [it.task("free").delay("free", 0.0) for _ in range(16)]
    it.started("free", LIMIT + 1)
    it.events.with_name("free.open").touch()
    for result in results:
        result.get(timeout=100)
    assert most_at_once(it.bodies("free")) > LIMIT


def test_a_place_is_free_again_when_its_holder_is_killed(it):
    """The parent releases for the child, on the place that it had."""
    results = [it.task("limited").delay("killed", 600.0) for _ in range(LIMIT)]
    it.started("killed", LIMIT)
    waits = it.task("limited").delay("killed", 0.0)
    results[0].revoke(terminate=True, signal="SIGKILL")
    waits.get(timeout=100)
    for result in results[1:]:
        result.revoke(terminate=True, signal="SIGKILL")
    # From their death on, and not from the word of it, the lock is to be free soon.
    cut_off = [one.pid for one in it.bodies("killed") if not one.finished]
    eventually(lambda: all(map(is_gone, cut_off)), "death of all holders", timeout=100)
    assert {one["place"] for one in begun(it, "killed")} == set(range(LIMIT))
    it.wait_until_free()


def test_several_names_are_taken_together(it):
    results = [it.task("pair").delay(number % 3, 0.03) for number in range(12)]
    for number, result in enumerate(results):
        assert result.get(timeout=60) == [f"tenant:{number % 3}", ["all"], True]
    assert most_at_once(it.bodies("pair")) == 1
    it.wait_until_free()


def test_all_names_or_none(it):
    with it.held("all"):
        waits = it.task("pair").delay(7, 0.0)
        eventually(lambda: it.keys("redlock:line:all"), "a task that waits", timeout=60)
        eventually(lambda: not it.keys("redlock:lock:tenant:7"), "the name before it", timeout=60)
        # Each time it looks again it has it for a moment.
        assert plugin_for(it.app).locks.acquire("tenant:7", wait=60.0).fence
    # Its own lease of the tenant's name ends by itself.
    assert waits.get(timeout=60)[0] == "tenant:7"
