"""No lock outlives its task: it is free before anybody can know how the task has ended."""

from __future__ import annotations

import os
import time

import pytest
import redis
from celery import chain

from celery_redlock import RedlockTask
from support.events import body, read, record
from support.stage import stage

#: So long that a lock which was left to its lease does not pass for released [s].
TTL = 120.0
#: No node is late here: a release that one of them has not answered yet is not what is looked for.
RULES = {"redlock_ttl": TTL, "redlock_max_ttl": TTL, "redlock_node_timeout": 10.0}
#: For processes that end: without observers, whose last words could take a release along.
ENDING = {**RULES, "redlock_observers": []}
KINDS = {"early": False, "late": True}


class Looking:
    """A result backend that records which locks stand when it is about to store a result."""

    def __init__(self, backend, urls):
        self._backend = backend
        self._urls = urls

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def mark_as_done(self, task_id, *args, **kwargs):
        record(os.environ["EVENTS"], "storing", task=task_id, locks=sorted(standing(self._urls)))
        return self._backend.mark_as_done(task_id, *args, **kwargs)


def standing(urls):
    found = set()
    for url in urls:
        with redis.Redis.from_url(url) as client:
            found |= {key.decode() for key in client.keys("redlock:lock:*")}
    return found


class Watched(RedlockTask):
    abstract = True

    @property
    def backend(self):
        return Looking(self.app.backend, self.app.conf.redlock_nodes)


def declare(app):
    def run(lock, seconds=0.0):
        with body(os.environ["EVENTS"], lock):
            time.sleep(seconds)
        return os.getpid()

    ours = {"shared": False, "lock_key": "{lock}", "on_conflict": "fail"}
    for name, late in KINDS.items():
        app.task(name=name, base=RedlockTask, acks_late=late, **ours)(run)
        app.task(name=f"{name} watched", base=Watched, acks_late=late, **ours)(run)


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    with stage(__file__, tmp_path_factory.mktemp("lingering"), **RULES) as it:
        it.worker(concurrency=3)
        yield it


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_is_free_before_the_result_is_stored(it, kind):
    """Whoever waits for the result, or comes next in a chain, must not meet this lock."""
    for number in range(10):
        result = it.task(f"{kind} watched").delay(f"{kind} {number}")
        result.get(timeout=100)
        (stored,) = [e for e in read(it.events, "storing") if e["task"] == result.id]
        assert stored["locks"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_caller_may_ask_for_it_again_at_once(it, kind):
    name = f"again {kind}"
    for _ in range(50):
        it.task(kind).delay(name).get(timeout=100, interval=0.001)
    assert len(it.bodies(name)) == 50


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_of_a_chain_finds_it_free(it, kind):
    name = f"chain {kind}"
    task = it.task(kind)
    chain(*[task.si(name) for _ in range(20)]).apply_async().get(timeout=200)
    assert len(it.bodies(name)) == 20


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_worker_holds_nothing(it, kind):
    results = [it.task(kind).delay(f"idle {kind} {number}") for number in range(30)]
    for result in results:
        result.get(timeout=100)
    it.wait_until_free()


# -- processes that end --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_that_ends_after_its_task_leaves_no_lock(tmp_path, kind):
    with stage(__file__, tmp_path, **ENDING) as it:
        it.worker(concurrency=2, args=["--max-tasks-per-child", "1"])
        results = [it.task(kind).delay(f"child {number}") for number in range(6)]
        assert len({result.get(timeout=100) for result in results}) == 6
        it.wait_until_free()


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_worker_that_shuts_down_warmly_leaves_no_lock(tmp_path, pool):
    """
    Told to end while it is busy, it ends its tasks, and their locks with them.

    With no more tasks at the broker: Celery's prefork pool, ended amid many, at times never ends.
    """
    with stage(__file__, tmp_path, **ENDING) as it:
        size = 1 if pool == "solo" else 2
        worker = it.worker(pool=pool, concurrency=size)
        for number in range(size):
            it.task("early").delay(f"busy {number}", 1.0)
        for number in range(size):
            it.started(f"busy {number}")
        worker.terminate()
        it.wait_until_free()
        assert all(each.finished for n in range(size) for each in it.bodies(f"busy {n}"))
