"""Real workers, beats and tools on a cluster as their lock node, whose servers fail and move."""

from __future__ import annotations

import os
import re
import time
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from celery_redlock import RedlockTask
from support.beats import published, stage_beat
from support.clusters import Cluster, cluster
from support.command_line import command_line
from support.events import body, overlaps, read
from support.stage import Stage, stage
from support.waiting import eventually

pytestmark = pytest.mark.long

#: So short that a test may wait for a quarantine, and longer than a stall [s].
TTL = 6.0
#: Who is not woken comes a minute later, or more [s].
WOKEN = 20.0
EVERY_SECOND = {"tick": {"task": "skipped", "schedule": 1.0, "args": ["tick", 0.0]}}


def declare(app):
    """Declare the tasks of this file."""

    def nap(lock, seconds):
        with body(os.environ["EVENTS"], lock):
            time.sleep(seconds)  # stands in for work

    def task(name, **options):
        app.task(base=RedlockTask, name=name, shared=False, **options)(nap)

    task("again", lock_key="{lock}", on_conflict="reschedule", acks_late=True)
    task("queued", lock_key="{lock}", on_conflict="queue")
    task("few", lock_key="few:{lock}", lock_limit=2, on_conflict="queue")
    task("both", lock_key=lambda _, args, __: (args[0], "other"), on_conflict="queue")
    task("once", lock_key="{lock}", unique_until="finished")
    task("skipped", lock_key="{lock}")


class Clustered(NamedTuple):
    """A stage and its only lock node."""

    it: Stage
    node: Cluster


@pytest.fixture
def clustered(request, some_binary, tmp_path):
    """A cluster that a stage locks on, with leases of `TTL` or as the test has them."""
    ttl = getattr(request, "param", TTL)
    conf: dict[str, Any] = {"redlock_ttl": ttl, "redlock_max_ttl": ttl}
    conf["beat_schedule"] = EVERY_SECOND
    with cluster(some_binary) as node:
        conf["redlock_nodes"] = [node.url()]
        with stage(__file__, tmp_path, nodes=0, **conf) as it:
            it.bootstrap()
            yield Clustered(it, node)


def crowded(found):
    """Return how many bodies ran at once, at most."""
    edges = [(b.started, 1) for b in found] + [(b.ended, -1) for b in found]
    running, most = 0, 0
    for _, change in sorted(edges):
        running += change
        most = max(most, running)
    return most


def test_all_that_tasks_and_beats_do(clustered):
    """Policies, a queue that is woken, places, two names, one message at a time, and slots."""
    it, _ = clustered
    first = it.task("once").delay("once", 1.0)
    assert it.task("once").delay("once", 1.0).duplicate
    it.start_workers([{"concurrency": 3}, {"pool": "threads", "concurrency": 4}])
    asked = [it.task("again").delay("again", 0.1) for _ in range(4)]
    asked += [it.task("queued").delay("queued", 0.3) for _ in range(4)]
    asked += [it.task("few").delay("few", 0.3) for _ in range(6)]
    asked += [it.task("both").delay(f"both-{n}", 0.1) for n in range(3)]
    for result in [first, *asked]:
        result.get(timeout=100)
    assert crowded(it.bodies("few")) == 2
    assert len(it.bodies("few")) == 6
    for name in ("again", "queued"):
        assert len(it.bodies(name)) == 4
    alone = [event for event in read(it.events) if event["name"] != "few"]
    assert overlaps(alone) == []
    waits = [b.started - a.ended for a, b in pairwise(it.bodies("queued"))]
    assert max(waits) < WOKEN, waits
    with it.held("held"):
        assert it.task("skipped").delay("held", 0.0).get(timeout=60)["skipped"] == "conflict"


# No end of a lease is waited for, and six commands are to see a lock that one server keeps.
@pytest.mark.parametrize("clustered", [120.0], indirect=True)
def test_what_operators_see(clustered, tmp_path):
    """The node by its name, who holds a lock, and no finding that is not about one node."""
    it, node = clustered
    source = f"""
        from celery import Celery
        from celery_redlock import RedlockTask
        app = Celery("shop", broker={it.broker.url!r}, backend={it.broker.url!r})
        app.conf.redlock_nodes = [{node.url()!r}]
        app.conf.redlock_ttl = app.conf.redlock_max_ttl = {it.conf["redlock_ttl"]}
        app.conf.redlock_node_timeout = 1.0

        @app.task(base=RedlockTask, name="nap", lock_key="{{lock}}")
        def nap(lock, seconds): pass
    """
    (tmp_path / "operators").mkdir()
    said = ""
    with command_line(tmp_path / "operators", source) as line, it.held("kept"):
        for words, code in {
            ("status",): 0,
            ("ls",): 0,
            ("why", "nap", '["kept", 1]'): 1,
            ("doctor",): None,
            ("tail", "--no-follow"): 0,
            ("report",): 0,
        }.items():
            got, out, err = line.redlock([], *words)
            assert code in (None, got), (words, got, out, err)
            said += out + err
    assert re.search(rf"{re.escape(node.label)} +up", said)
    assert "kept" in said
    assert "a cluster has replicas" in said


def test_beats_publish_each_slot_once_over_a_failover(clustered):
    """Two of them; who leads is deposed, and one leads again after the quarantine."""
    it, node = clustered

    def slots():
        return [(one.entry, one.due) for one in published(it.broker.url)]

    for name in ("one", "two"):
        stage_beat(it, name)
    eventually(lambda: len(slots()) >= 3, "slots", timeout=100)
    node.fail_over()
    before = len(slots())
    eventually(lambda: len(slots()) >= before + 3, "slots after it", timeout=100)
    found = slots()
    assert len(found) == len(set(found))


@pytest.mark.parametrize("move", ["failover", "kill", "slot"])
def test_a_failover_and_a_slot_that_moves_during_load(clustered, move):
    """No two bodies of a name run at once, none is lost, and locks are granted again."""
    it, node = clustered
    it.start_workers([{"concurrency": 2}, {"pool": "threads", "concurrency": 3}])
    asked = [it.task("again").delay(f"n{n % 3}", 0.1) for n in range(30)]
    asked += [it.task("queued").delay("queued", 0.1) for _ in range(5)]
    it.started("n0", 2)
    if move == "slot":
        node.migrate()
    else:
        node.fail_over(kill=move == "kill")
    after = it.task("again").delay("after", 0.0)
    for result in [*asked, after]:
        result.get(timeout=200, propagate=False)
    assert overlaps(read(it.events)) == []
    done = [it.bodies(f"n{n}") for n in range(3)]
    assert sum(map(len, done)) >= 30
    assert len(it.bodies("after")) == 1
