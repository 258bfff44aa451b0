"""Short runs of the nemesis; ``python -m nemesis`` is for long ones."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from nemesis.celery_run import run_celery
from nemesis.clocks import LIBRARY
from nemesis.databases import run_database
from nemesis.faults import FAULTS
from nemesis.leftovers import Sampler
from nemesis.report import table
from nemesis.run import run
from support.machine import IN_CI
from support.waiting import eventually

SECONDS = 8.0
#: A contender that has to break and has not yet is given so long [s].
LONGEST = 400.0
SEED = random.randrange(10**6)


@pytest.fixture(scope="module")
def results(some_binary):
    names = ["rolling-restart", "pause-clients"]
    if LIBRARY is not None or IN_CI:  # where it is missing in CI, the run says so
        names.append("clock-steps")
    with ThreadPoolExecutor(len(names)) as runs:
        done = runs.map(lambda n: run(FAULTS[n], SECONDS, SEED, longest=LONGEST), names)
        return dict(zip(names, done, strict=True))


@pytest.mark.timeout(900)  # the first has all runs made
@pytest.mark.parametrize("fault", ["rolling-restart", "pause-clients", "clock-steps"])
def test_no_promise_is_broken_where_a_weaker_lock_breaks(results, fault):
    if fault not in results:
        pytest.skip("libfaketime is not installed")
    assert results[fault].violations == [], table(results[fault])
    assert results[fault].counts, table(results[fault])


@pytest.mark.timeout(600)  # some forty processes start at once, and all limits add up
def test_where_strikes_hit_the_way_to_the_nodes_or_the_clients_no_promise_is_broken(tmp_path):
    names = ["one-way", "kill-clients", "kill9-aof"]
    over = threading.Event()
    with ThreadPoolExecutor(len(names) + 1) as runs:
        tasks = runs.submit(run_celery, SECONDS, SEED, tell=print, over=over)
        done = list(runs.map(lambda n: run(FAULTS[n], SECONDS, SEED, logs=tmp_path), names))
    for result in [*done, tasks.result()]:
        assert result.violations == [], table(result)
        assert result.injections
        assert sum(result.hits.values()) >= result.injections, table(result)
    for result in done:
        written = (tmp_path / result.fault / "strikes.jsonl").read_text().splitlines()
        assert len(written) >= result.injections


@pytest.mark.timeout(900)
def test_a_replica_that_is_promoted_breaks_a_weaker_lock_alone(postgres_server):
    result = run_database("db-promote", SECONDS, SEED, longest=LONGEST)
    assert result.violations == [], table(result)
    assert result.counts, table(result)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["db-kill9", "db-backends", "db-lines", "db-clients", "db-async"])
def test_a_database_that_is_struck_keeps_every_promise(fault, postgres_server):
    result = run_database(fault, SECONDS, SEED)
    assert result.violations == [], table(result)
    assert result.injections


def test_a_lock_without_an_expiry_is_seen(redis_nodes):
    (node,) = redis_nodes(1)
    with redis.Redis.from_url(node.url) as client, Sampler([node], ["ours"]) as sampler:
        client.set("ours:lock:mortal", "x", px=60_000)
        client.set("other:lock:a", "x")
        client.set("ours:fence:a", "1")
        client.set("ours:lock:eternal", "x")
        eventually(lambda: sampler.eternal, "look at the keys")
        assert sampler.eternal == {"ours:lock:eternal"}
        eventually(lambda: sampler.seen >= 2, "look at the other lock")
