"""Real workers whose lock node is a database; RabbitMQ brings their messages. No Redis anywhere."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import closing
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from celery_redlock import RedlockTask
from celery_redlock.lock.database import server
from celery_redlock.lock.nodes.address import address_of
from support.events import body, overlaps, read
from support.kinds import POSTGRESQL, each
from support.stage import stage

pytestmark = pytest.mark.long

#: So short that a test may wait for one to expire, and longer than a stall [s].
TTL = 8.0
#: Who is not woken comes a minute later, or more [s].
WOKEN = 20.0
#: For how long an idle worker is watched [s].
IDLE = 20.0
#: How long a task goes on when its worker is told to end [s].
NAP = 6.0
POOLS = ("prefork", "threads", "solo", "gevent", "eventlet")


def declare(app):
    """Declare the tasks of this file."""
    if "STAGE" in os.environ:  # in a worker
        # Twenty commits at once, or a stall, may take longer than a process waits at its end.
        server.GRACE = 30.0

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
    task("long", lock_key="{lock}", acks_late=True, on_conflict="reschedule")
    task("skipped", lock_key="{lock}")


def results_at(url, folder):
    """Where Celery keeps results; in a file of SQLite it does not wait for those who write."""
    return f"db+sqlite:///{folder}/results.db" if url.startswith("sqlite") else f"db+{url}"


@pytest.fixture
def it(database_url, rabbit, tmp_path):
    address_of(database_url).make_tables()
    conf: dict[str, Any] = {"redlock_ttl": TTL, "redlock_max_ttl": TTL}
    conf["redlock_node_timeout"] = 1.9  # a commit may wait for those of a whole pool
    conf |= {"redlock_nodes": [database_url], "broker_url": rabbit.url}
    conf |= {"result_backend": results_at(database_url, tmp_path)}
    with stage(__file__, tmp_path, nodes=0, **conf) as it:
        it.bootstrap()
        yield it
        rabbit.wait_until_quiet(timeout=100)


def crew(it, *several):
    """Start workers, whose names no worker of another test has at the same broker."""
    it.start_workers({"name": f"w{secrets.token_hex(4)}", **options} for options in several)


def crowded(found):
    """Return how many bodies ran at once, at most."""
    edges = [(b.started, 1) for b in found] + [(b.ended, -1) for b in found]
    running, most = 0, 0
    for _, change in sorted(edges):
        running += change
        most = max(most, running)
    return most


def test_all_that_tasks_do(it):
    """Policies, a queue that is woken, places, two names, and one message at a time."""
    first = it.task("once").delay("once", 1.0)
    assert it.task("once").delay("once", 1.0).duplicate
    crew(it, {"concurrency": 3}, {"pool": "threads", "concurrency": 4})
    asked = [it.task("again").delay("again", 0.1) for _ in range(4)]
    asked += [it.task("queued").delay("queued", 0.3) for _ in range(4)]
    # So long that a second one has begun by then, however slow a grant is.
    asked += [it.task("few").delay("few", 2.0) for _ in range(6)]
    asked += [it.task("both").delay(f"both-{n}", 0.1) for n in range(3)]
    asked += [it.task("long").delay("long", TTL + 1.0)]  # longer than its lease, unless renewed
    for result in [first, *asked]:
        result.get(timeout=150)
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


@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_keeps_names_apart(it, pool):
    crew(it, {"pool": pool, "concurrency": 1 if pool == "solo" else 6}, {})
    asked = [it.task("again").delay(f"n{n % 3}", 0.1) for n in range(24)]
    asked += [it.task("queued").delay("queued", 0.1) for _ in range(4)]
    for result in asked:
        result.get(timeout=150)
    assert overlaps(read(it.events)) == []
    assert sum(len(it.bodies(f"n{n}")) for n in range(3)) == 24


def test_children_that_live_for_one_task(it):
    crew(it, {"concurrency": 2, "args": ("--max-tasks-per-child", "1")})
    asked = [it.task("again").delay(f"n{n % 2}", 0.0) for n in range(10)]
    for result in asked:
        result.get(timeout=150)
    assert overlaps(read(it.events)) == []


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet"])
def test_a_worker_that_is_told_to_end_takes_no_release_with_it(it, pool):
    crew(it, {"pool": pool, "concurrency": 20})
    names = [f"n{number}" for number in range(20)]
    for name in names:
        it.task("skipped").delay(name, NAP)
    for name in names:
        it.started(name)
    it.workers[0].terminate()
    with closing(it.locks()) as locks:
        assert [name for name in names if locks.inspect(name)[0].holder] == []
    assert all(it.bodies(name)[0].finished for name in names)


def test_a_killed_worker_holds_a_name_no_longer_than_its_lease(it):
    worker, other = (it.worker(concurrency=1, name=f"w{secrets.token_hex(4)}") for _ in range(2))
    asked = [it.task("long").delay("crash", 6.0) for _ in range(2)]
    it.started("crash")
    worker.kill()
    for result in asked:
        result.get(timeout=150)
    assert other.alive
    assert overlaps(read(it.events)) == []


@pytest.mark.parametrize("database_kind", each(POSTGRESQL), indirect=True)
def test_an_idle_worker_asks_less_than_once_a_second(it, database_kind, postgres_servers):
    """SQLite has no log of its statements."""
    url, server = it.conf["redlock_nodes"][0], postgres_servers(database_kind)
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as asked:
        name = asked.info.dbname
        asked.execute(f"ALTER DATABASE {name} SET log_statement = 'all'")
    crew(it, {"concurrency": 2})
    it.task("skipped").delay("warm", 0.0).get(timeout=60)
    time.sleep(IDLE)  # until what the task has left is told
    before = len(server.log().splitlines())
    time.sleep(IDLE)
    asked_for = [line for line in server.log().splitlines()[before:] if "statement:" in line]
    assert len(asked_for) < IDLE
