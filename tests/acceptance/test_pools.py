"""The same acceptance suite in every pool: prefork, threads, solo, gevent, eventlet."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from celery import Task, chain, chord, group
from celery.exceptions import Ignore, Reject, TaskRevokedError

from celery_redlock import LockTaken, RedlockTask, Reschedule, Retry, current_lock
from support.events import body, overlaps, read
from support.redelivery import redelivered_after
from support.stage import LASTING, stage
from support.waiting import eventually

pytestmark = pytest.mark.long

GREEN = ("gevent", "eventlet")
POOLS = {"prefork": 4, "threads": 4, "solo": 1, "gevent": 10, "eventlet": 10}
VISIBILITY = 3.0
#: Of what is to be renewed before long, and delivered again meanwhile.
TTL = 9.0
READY = {"SUCCESS", "FAILURE", "REVOKED"}


def declare(app):
    declare_naps(app)
    declare_others(app)


OURS = {"base": RedlockTask, "shared": False, "lock_key": "{lock}"}


def declare_naps(app):
    def nap(lock, seconds=0.0, value=None):
        with body(os.environ["EVENTS"], lock):
            time.sleep(seconds)
        return value

    policies = {
        "skip": "skip",
        "fail": "fail",
        "retry": Retry(countdown=1),
        "reschedule": Reschedule(base=1.0, cap=1.0),
        "queue": "queue",
    }
    for name, policy in policies.items():
        app.task(name=name, on_conflict=policy, max_retries=None, **OURS)(nap)
    app.task(name="plain", base=Task, shared=False)(nap)


def wait_for_renewals(count):
    while current_lock().renewals < count:
        time.sleep(0.02)


def declare_others(app):
    @app.task(name="again", bind=True, max_retries=None, **OURS)
    def again(self, lock, times):
        with body(os.environ["EVENTS"], lock):
            if self.request.retries < times:
                raise self.retry(countdown=0)
        return self.request.retries

    @app.task(name="link", **{**OURS, "lock_key": None, "unique_on": ()})
    def link(count):
        with body(os.environ["EVENTS"], "link"):
            return count + 1

    @app.task(name="relay", bind=True, **OURS)
    def relay(self, lock, times):
        with body(os.environ["EVENTS"], lock):
            return self.delay(lock, times - 1).id if times else None

    @app.task(name="end", bind=True, **OURS)
    def end(self, lock, way):
        with body(os.environ["EVENTS"], lock):
            if way == "replace":
                raise self.replace(self.app.tasks["skip"].si(f"instead of {lock}"))
            if way != "return":
                errors = {"error": ValueError(lock), "ignore": Ignore()}
                raise errors.get(way, Reject(lock, requeue=False))

    @app.task(name="late", acks_late=True, lock_ttl=TTL, **OURS)
    def late(lock, renewals):
        with body(os.environ["EVENTS"], lock):
            wait_for_renewals(renewals)
        return "the real result", current_lock().renewals

    @app.task(name="gather", shared=False)
    def gather(values):
        return values


@pytest.fixture(scope="module", params=POOLS)
def it(request, tmp_path_factory):
    with stage(__file__, tmp_path_factory.mktemp(request.param), **LASTING) as it:
        it.pool = request.param
        options = {"pool": it.pool, "concurrency": POOLS[it.pool]}
        it.start_workers({"name": f"{it.pool}{n}", **options} for n in range(2))
        yield it


def of(it, prefix):
    return [e for e in read(it.events) if e.get("name", "").startswith(prefix)]


@pytest.mark.parametrize("task", ["skip", "plain"])
def test_bodies_of_one_name_never_meet(it, task):
    """Many publishes of few names, in both workers: no overlap; twin: plain tasks do overlap."""
    rng = random.Random(it.pool)
    results = [
        it.task(task).delay(f"{task} {rng.randrange(4)}", rng.uniform(0.02, 0.06), n)
        for n in range(60)
    ]
    values = [result.get(timeout=100) for result in results]
    if task == "plain":
        assert overlaps(of(it, task))
        return
    assert overlaps(of(it, task)) == []
    ran = [value for value in values if isinstance(value, int)]
    assert len(ran) == sum(e["kind"] == "end" for e in of(it, task))
    assert all(v["skipped"] == "conflict" for v in values if not isinstance(v, int))


#: What is logged of a task under a policy that has it wait for its lock.
WAITS = {"reschedule": "Rescheduled task", "queue": "Queued task"}


@pytest.mark.parametrize("policy", ["skip", "fail", "retry", *WAITS])
def test_a_conflict_ends_as_its_policy_says(it, policy):
    lock = f"policy {policy}"
    with it.held(lock):
        result = it.task(policy).delay(lock, 0.0, "ran")
        if policy == "skip":
            assert result.get(timeout=100)["skipped"] == "conflict"
        elif policy == "fail":
            with pytest.raises(LockTaken):
                result.get(timeout=100)
        elif policy == "retry":
            eventually(lambda: result.state == "RETRY", "a retry", timeout=100)
        else:
            it.wait_for_log(rf"{WAITS[policy]} \S*{policy}\[{result.id}\]")
    if policy in ("retry", *WAITS):
        assert result.get(timeout=100) == "ran"
    assert len(it.bodies(lock)) == (policy in ("retry", *WAITS))


def test_nothing_is_refused_by_its_own_lock_or_its_predecessors(it):
    again = it.task("again").delay("again", 8)
    link = it.task("link")
    links = chain(link.s(0), *(link.s() for _ in range(8))).apply_async()
    relay = it.task("relay").delay("relay", 4)
    assert again.get(timeout=100) == 8
    assert links.get(timeout=100) == 9
    for _ in range(4):
        relay = it.app.AsyncResult(relay.get(timeout=100))
    assert relay.get(timeout=100) is None
    assert [len(it.bodies(name)) for name in ("again", "link", "relay")] == [9, 9, 5]
    assert overlaps(of(it, "again") + of(it, "link") + of(it, "relay")) == []


def test_no_way_out_of_a_body_leaves_a_lock_behind(it):
    ways = ("return", "error", "ignore", "reject", "replace")
    for way in ways:
        it.task("end").delay(f"end by {way}", way)
    for way in ways:
        it.started(f"end by {way}")
    it.started("instead of end by replace")
    it.wait_until_free("end by *", "instead of*")


def test_a_chord_and_a_group_with_equal_members_end(it):
    members = [it.task("skip").si("twin", 0.5, "ran") for _ in range(4)]
    values = chord(members, it.task("gather").s()).apply_async().get(timeout=100)
    assert "ran" in values
    assert all(value == "ran" or value["skipped"] == "conflict" for value in values)
    values = group(members).apply_async().get(timeout=100)
    assert len(values) == 4
    assert overlaps(of(it, "twin")) == []


def test_a_chord_and_a_group_whose_members_wait_for_one_another_end(it):
    members = [it.task("queue").si("in line", 0.05, number) for number in range(4)]
    results = [chord(members, it.task("gather").s()).apply_async(), group(members).apply_async()]
    assert [sorted(result.get(timeout=100)) for result in results] == [[0, 1, 2, 3]] * 2
    assert len(it.bodies("in line")) == 8
    assert overlaps(of(it, "in line")) == []


@pytest.mark.parametrize("policy", WAITS)
@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_a_task_that_was_put_off_can_be_called_off(it, policy, end):
    lock = f"{policy}, {end}"
    with it.held(lock):
        result = it.task(policy).apply_async((lock,), expires=8.0 if end == "expired" else None)
        it.wait_for_log(rf"{WAITS[policy]} \S*{policy}\[{result.id}\]")
        if end == "revoked":
            result.revoke()
        with pytest.raises(TaskRevokedError):
            result.get(timeout=100)
    assert it.task(policy).delay(lock, 0.0, "next").get(timeout=100) == "next"
    assert len(it.bodies(lock)) == 1


def test_a_message_delivered_again_does_not_run_again(it):
    # Workers of its own, or what waits for a slow one would be delivered again in all other tests.
    conf = redelivered_after(VISIBILITY)
    own = {"pool": it.pool, "concurrency": POOLS[it.pool], "args": ["-Q", "impatient"]}
    workers = [it.worker(conf, name=f"impatient{n}", **own) for n in range(2)]
    if it.pool in GREEN:  # there kombu never looks for what was not acknowledged
        workers.append(it.worker(conf, pool="solo", name="looker", args=["-Q", "nothing"]))
    result = it.task("late").apply_async(("redelivered", 4), queue="impatient")
    it.started("redelivered")
    value, renewals = result.get(timeout=100)
    assert value == "the real result"
    assert renewals >= 4
    it.wait_for_log(rf"late\[{result.id}\] for \d+ s:")
    it.wait_for_log(rf"late\[{result.id}\] has finished before; this copy ends")
    assert len(it.bodies("redelivered")) == 1
    assert result.state == "SUCCESS"
    for worker in workers:
        worker.kill()


def test_a_warm_shutdown_keeps_the_lock_to_the_end_of_the_task(it):
    worker = it.worker(pool=it.pool, concurrency=2, name="leaving", args=["-Q", "leaving"])
    result = it.task("late").apply_async(("warm", 1), queue="leaving")
    it.started("warm")
    worker.signal(signal.SIGTERM)
    locks = it.locks()
    try:
        granted = locks.acquire("warm", wait=100)
        locks.release(granted)
    finally:
        locks.close()
    (ran,) = it.bodies("warm")
    assert ran.finished
    assert result.get(timeout=100)[0] == "the real result"
    worker.wait()
