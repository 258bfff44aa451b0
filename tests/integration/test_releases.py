"""What is sent and nobody waits for arrives, however the process ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis

import celery_redlock
from celery_redlock import Redlock
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.health import check
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.unique.requests import Trigger
from celery_redlock.unique.reservations import Reservations
from celery_redlock.unique.reserving import Duplicate
from support.stored import ROOMY, clients_of
from support.waiting import eventually

#: What is not released stands for longer than a test may wait.
RULES = Rules(**{**ROOMY, "ttl": 600.0, "max_ttl": 600.0})
TRIGGER = Trigger("n", 600.0, {"task_id": "first"}, 600.0)


@pytest.fixture
def nodes(redis_nodes):
    return redis_nodes(3)


@pytest.fixture
def locks(nodes):
    urls = [node.url for node in nodes]
    locks = Redlock(urls, RULES)
    bootstrap(urls, RULES)
    check(locks)
    yield locks
    locks.close()


def tokens(nodes):
    found = [client.hget("redlock:queued:n", "token") for client in clients_of(nodes)]
    return [token and token.decode() for token in found]


def test_what_a_forgetful_node_stored_of_a_duplicate_is_ended(locks, nodes):
    """It answered late or was not needed for the majority; nobody's marker is left there."""
    placed = Reservations.on(locks).reserve(TRIGGER)
    with redis.Redis.from_url(nodes[2].url) as client:
        client.delete("redlock:queued:n")
    for _ in range(20):  # whether or not the third one is among those that decide
        assert isinstance(Reservations.on(locks).reserve(TRIGGER), Duplicate)
    Reservations.on(locks).end("n", placed.token, "over", wait=True)
    eventually(lambda: tokens(nodes) == [None] * 3, "the end of the marker")


def standing(nodes):
    return {key for client in clients_of(nodes) for key in client.keys("redlock:lock:*")}


def wait_until_free(nodes):
    """Wait until no lock is left, much less long than a lease would last."""
    eventually(lambda: not standing(nodes), "release of all locks")


def test_a_release_is_sent_at_once(locks, nodes):
    held = locks.take(LockRequest("n", 600.0))
    assert standing(nodes)
    locks.give_back(held)
    wait_until_free(nodes)


def test_a_crowd_of_releases_at_once_leaves_nothing(locks, nodes):
    crowd = [locks.take(LockRequest(f"n{number}", 600.0)) for number in range(100)]
    begin = threading.Barrier(len(crowd))

    def give_back(held):
        begin.wait(60)
        locks.give_back(held)

    threads = [threading.Thread(target=give_back, args=(held,)) for held in crowd]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until_free(nodes)


def test_who_takes_it_again_at_once_keeps_nobody_out(locks, nodes):
    """
    A lock that one process takes again and again is granted to another that waits.

    A release and the next request in one write would be carried out in one go: nobody else
    could ever come in between.
    """
    others = Redlock([node.url for node in nodes], RULES)
    check(others)
    is_over, turns = threading.Event(), []

    def run_tasks():
        while not is_over.is_set():
            held = locks.take(LockRequest("n", 600.0, wait=600.0))
            time.sleep(0.001)
            locks.give_back(held)
            turns.append(held.fence)
            time.sleep(0.002)

    busy = threading.Thread(target=run_tasks)
    busy.start()
    try:
        for _ in range(3):
            seen = len(turns)
            eventually(lambda: len(turns) > seen, "turn of the busy one")  # noqa: B023  called here
            others.give_back(others.take(LockRequest("n", 600.0, wait=600.0)))
    finally:
        is_over.set()
        busy.join()
        others.close()
    assert len(turns) > 3


@pytest.mark.parametrize("end", ["locks.close()", "sys.exit()", "os._exit(0)", "os.kill(mine, 9)"])
def test_the_end_of_a_process_takes_no_release_with_it(nodes, locks, end):
    source = f"""
import os, sys
from celery_redlock import Redlock
from celery_redlock.lock.algorithm.request import LockRequest
mine, locks = os.getpid(), Redlock.from_urls(sys.argv[1:], node_timeout=2.5, max_ttl=600.0)
locks.give_back(locks.take(LockRequest("n", 600.0, wait=60.0)))
{end}
"""
    path = [str(Path(celery_redlock.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    urls = [node.url for node in nodes]
    subprocess.run(
        [sys.executable, "-c", source, *urls],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        timeout=100,
        check="kill" not in end,
    )
    wait_until_free(nodes)
