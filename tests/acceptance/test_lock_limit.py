"""
``lock_limit``: at most N at once, whatever dies meanwhile; and several names, all or none.

Who runs at once is told by a record outside, which no lock has a hand in.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from celery_redlock import RedlockTask, current_lock
from celery_redlock.plugin import plugin_for
from support.events import body, read
from support.stage import stage
from support.waiting import eventually

LIMIT = 3
NAMES = 10
TTL = 2.0


def declare(app):
    """Declare a task with three places, the same with a thousand, and one of two names."""
    options = {"base": RedlockTask, "shared": False, "acks_late": True, "lock_ttl": TTL}
    options |= {"reject_on_worker_lost": True, "on_conflict": "queue"}

    def work(name, seconds):
        held = current_lock()
        with body(os.environ["EVENTS"], name, lock=held.name, place=held.place, fence=held.fence):
            time.sleep(seconds)
        return held.place

    app.task(name="limited", lock_key="{name}", lock_limit=LIMIT, **options)(work)
    app.task(name="free", lock_key="{name}", lock_limit=1000, **options)(work)

    @app.task(name="pair", lock_key=("tenant:{tenant}", "all"), **options)
    def pair(tenant, seconds):
        held = current_lock()
        with body(os.environ["EVENTS"], "pair"), body(os.environ["EVENTS"], f"tenant {tenant}"):
            time.sleep(seconds)
        return [held.name, [other.name for other in held.others], held.fence is not None]


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    """Two workers with eight children, on nodes that lose their memory when they restart."""
    transport = {"visibility_timeout": 10, "unacked_restore_interval": 1}
    conf = {"redlock_max_ttl": TTL, "redlock_ttl": TTL, "worker_prefetch_multiplier": 4}
    folder = tmp_path_factory.mktemp("limit")
    with stage(__file__, folder, broker_transport_options=transport, **conf) as it:
        it.start_workers([{"concurrency": 8}] * 2)
        yield it


def most_at_once(bodies):
    """Return how many of *bodies* ran at the same time, at most, as far as is known of each."""
    steps = [(one.started, 1) for one in bodies] + [(one.ended, -1) for one in bodies]
    running = most = 0
    for _, step in sorted(steps):
        running += step
        most = max(most, running)
    return most


def begun(it, name):
    """Return what was recorded when the bodies of *name* started, in that order."""
    return [event for event in read(it.events, "start") if event["name"] == name]


def test_never_more_than_the_limit_whatever_dies(it):
    """A worker is killed with all its children, three of five nodes forget; all tasks end."""
    names = [f"limited {number}" for number in range(NAMES)]
    results = [it.task("limited").delay(names[i % NAMES], 0.05) for i in range(200)]
    eventually(lambda: sum(result.ready() for result in results) > 30, "some results", timeout=100)
    os.killpg(it.workers[0].pid, signal.SIGKILL)
    it.worker(concurrency=8)
    eventually(lambda: sum(result.ready() for result in results) > 80, "more results", timeout=100)
    for node in it.nodes[:3]:
        node.restart()
    # With Redis as the broker a worker that is killed takes along what it has just taken off the
    # queue, and has not noted as received: kombu's, of any task (see test_killing_spree).
    eventually(
        lambda: all(one.ready() or one.id not in it.log() for one in results),
        "all results",
        timeout=120,
        every=0.5,
    )
    places = [one.get() for one in results if one.ready()]
    assert len(places) >= len(results) - 2
    assert set(places) == set(range(LIMIT))
    for name in names:
        assert most_at_once(it.bodies(name)) <= LIMIT
        for place in range(LIMIT):
            fences = [one["fence"] for one in begun(it, name) if one["place"] == place]
            assert fences == sorted(set(fences)), "a place has fencing numbers of its own"


def test_without_the_limit_there_are_more(it):
    """The twin: the record outside sees four and more where the limit does not forbid it."""
    results = [it.task("free").delay("free", 0.5) for _ in range(16)]
    for result in results:
        result.get(timeout=100)
    assert most_at_once(it.bodies("free")) > LIMIT


def test_a_place_is_free_again_when_its_holder_is_killed(it):
    """The parent releases for the child, on the place that it had."""
    results = [it.task("limited").delay("killed", 30.0) for _ in range(LIMIT)]
    it.started("killed", LIMIT)
    waits = it.task("limited").delay("killed", 0.0)
    results[0].revoke(terminate=True, signal="SIGKILL")
    waits.get(timeout=20)
    for result in results[1:]:
        result.revoke(terminate=True, signal="SIGKILL")
    assert {one["place"] for one in begun(it, "killed")} == set(range(LIMIT))
    it.wait_until_free()


def test_several_names_are_taken_together(it):
    """One tenant at a time, and one in total; the first name is the lock, the rest its others."""
    results = [it.task("pair").delay(number % 3, 0.03) for number in range(12)]
    for number, result in enumerate(results):
        assert result.get(timeout=60) == [f"tenant:{number % 3}", ["all"], True]
    assert most_at_once(it.bodies("pair")) == 1
    it.wait_until_free()


def test_all_names_or_none(it):
    """Whoever finds one of them taken has none of the others meanwhile."""
    with it.held("all"):
        waits = it.task("pair").delay(7, 0.0)
        eventually(lambda: it.keys("redlock:ready:all"), "a task that waits", timeout=60)
        eventually(lambda: not it.keys("redlock:lock:tenant:7"), "the name before it", timeout=20)
        assert plugin_for(it.app).locks.acquire("tenant:7").fence
    # Its own lease of the tenant's name ends by itself.
    assert waits.get(timeout=60)[0] == "tenant:7"
