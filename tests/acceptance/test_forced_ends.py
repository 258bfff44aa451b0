"""
Tasks that are ended by force: hard limits, revokes, kills, shutdowns, recycled children.

The lease lasts far longer than any test waits, so what frees a lock is that somebody released it.
Bodies record that they live every few milliseconds: a body that was killed cannot record its end.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import redis
from celery.exceptions import TaskRevokedError

from celery_redlock import RedlockTask
from support.events import body, overlaps, read, record
from support.process import is_gone
from support.redelivery import redelivered_after
from support.stage import stage
from support.versions import CELERY, since
from support.waiting import eventually

pytestmark = pytest.mark.long

#: Longer than a test waits for the next run of a name [s].
TTL = 240.0
#: How long Celery's parent takes at most to note that a child is dead, without us [s].
NOTED = 8.0
#: A limit [s], so long that the body has begun by then, also after a stall.
LIMIT = 12.0


def gate(lock):
    return Path(os.environ["EVENTS"]).with_name(f"{lock}.open")


def open_gate(it, lock):
    it.events.with_name(f"{lock}.open").touch()


def declare(app):
    switch_off(os.environ.get("SWITCHED_OFF"))
    options = {"base": RedlockTask, "bind": True, "shared": False, "lock_key": "{lock}"}

    def work(self, lock, seconds, *, ignore=False, once=False):
        earlier = any(e["name"] == lock for e in read(os.environ["EVENTS"], "start"))
        if ignore:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with body(os.environ["EVENTS"], lock) as mine:
            end = time.monotonic() + (0 if once and earlier else seconds)
            while time.monotonic() < end and not gate(lock).exists():
                record(os.environ["EVENTS"], "tick", name=lock, body=mine)
                time.sleep(0.02)
        return f"worked on {lock}"

    app.task(name="early", **options)(work)
    app.task(name="late", acks_late=True, **options)(work)
    app.task(name="late_no_dedup", acks_late=True, dedup_ttl=0, **options)(work)
    app.task(name="put_back", acks_late=True, reject_on_worker_lost=True, **options)(work)
    app.task(name="put_off", on_conflict="reschedule", **options)(work)
    app.task(name="next", lock_wait=TTL / 2, on_conflict="fail", **options)(work)
    if CELERY >= (5, 7):
        app.task(
            name="retried",
            acks_late=True,
            retry_on_worker_lost=True,
            default_retry_delay=1,
            **options,
        )(work)


def switch_off(protection):
    if protection is None:
        return
    from celery.worker.request import Request

    from celery_redlock.task.worker import forced_ends, lost_child

    if protection == "release for the dead":
        for method in ("on_failure", "terminate", "cancel"):
            setattr(forced_ends.RedlockRequest, method, getattr(Request, method))
    if protection == "proof of death":
        lost_child.wait_until_dead = lambda pid, longest: True


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forced")
    conf = {"redlock_ttl": TTL, "redlock_max_ttl": TTL}
    with stage(__file__, folder, **conf) as it:
        workers = [("many", 13, None), ("next", 13, None), ("one", 1, None)]
        workers += [("leaky", 6, "release for the dead"), ("hasty", 2, "proof of death")]
        start_all(it, workers)
        yield it


def start_all(it, workers):
    it.start_workers(
        {
            "name": queue,
            "concurrency": concurrency,
            "args": ["-Q", queue],
            "env": {"SWITCHED_OFF": switched_off} if switched_off else {},
        }
        for queue, concurrency, switched_off in workers
    )


def publish(it, name, *args, queue="many", **options):
    kwargs = {key: options.pop(key) for key in ("ignore", "once") if key in options}
    return it.task(name).apply_async(args, kwargs, queue=queue, **options)


def terminate(it, result, signame):
    it.app.control.revoke(result.id, terminate=True, signal=signame)


#: End -> (does the body ignore SIGTERM, hard limit [s], signal of a revoke, kill -9).
ENDS = {
    "hard limit": (False, LIMIT, None, False),
    "hard limit, SIGTERM ignored": (True, LIMIT, None, False),
    "revoked": (False, None, "SIGTERM", False),
    "revoked with SIGKILL": (False, None, "SIGKILL", False),
    "revoked, SIGTERM ignored": (True, None, "SIGTERM", False),
    "killed": (False, None, None, True),
}
#: Those whose child has no chance to release by itself.
WITHOUT_CHANCE = ["hard limit, SIGTERM ignored", "revoked with SIGKILL", "killed"]


def end_by_force(it, lock, end, task="late", queue="many"):
    ignore, limit, signame, kill = ENDS[end]
    result = publish(it, task, lock, 120.0, ignore=ignore, time_limit=limit, queue=queue)
    (running,) = it.started(lock)
    if signame:
        terminate(it, result, signame)
    if kill:
        it.wait_until_begun(running.pid)
        os.kill(running.pid, signal.SIGKILL)
    return result


@pytest.fixture(scope="module")
def forced(it):
    """All ends, of both kinds of tasks, each with a next run: lock -> their two results."""
    results = {}
    for end in ENDS:
        for task in ("early", "late"):
            lock = f"{task} {end}"
            result = end_by_force(it, lock, end, task)
            results[lock] = result, publish(it, "next", lock, 0.0, queue="next")
    for task in ("early", "late"):
        lock = f"{task} revoked, SIGTERM ignored"
        it.wait_for_log(rf"Terminating {results[lock][0].id} ")
        open_gate(it, lock)
    return results


@pytest.mark.parametrize("task", ["early", "late"])
@pytest.mark.parametrize("end", ENDS)
def test_the_next_run_starts_and_not_before_the_first_is_dead(it, forced, task, end):
    lock = f"{task} {end}"
    result, following = forced[lock]
    it.started(lock, 2)
    assert overlaps(e for e in read(it.events) if e.get("name") == lock) == []
    assert following.get(timeout=100) == f"worked on {lock}"
    states = {"killed": "FAILURE", "revoked, SIGTERM ignored": "SUCCESS"}
    state = states.get(end, "FAILURE" if end.startswith("hard") else "REVOKED")
    eventually(lambda: result.state == state, f"{end} ends as {state}", timeout=100)


def test_a_parent_that_does_not_release_leaves_the_lock_behind(it):
    """Twin: without us, the locks of those that were killed outright stay for their lease."""
    locks = {f"leaky {end}": end for end in WITHOUT_CHANCE}
    for lock, end in locks.items():
        end_by_force(it, lock, end, queue="leaky")
        (first,) = it.started(lock)
        eventually(lambda pid=first.pid: is_gone(pid), f"death by {end}", timeout=100)
    time.sleep(NOTED)  # in which nothing is to happen
    assert all(it.keys(f"redlock:lock:{lock}") for lock in locks)


def test_a_parent_that_does_not_wait_for_the_death_lets_bodies_meet(it):
    """Twin: released when Celery says "revoked", the lock is given out while the body runs on."""
    lock = "hasty"
    end_by_force(it, lock, "revoked, SIGTERM ignored", queue="hasty")
    publish(it, "next", lock, 0.0, queue="one")
    it.started(lock, 2)
    open_gate(it, lock)
    eventually(lambda: it.bodies(lock)[0].finished, "end of the first body", timeout=100)
    assert overlaps(e for e in read(it.events) if e.get("name") == lock)


# -- before the body ------------------------------------------------------------------


@pytest.mark.parametrize("end", ["revoked", "expired"])
@pytest.mark.parametrize("waits", ["queued", "put off"])
def test_a_task_that_ends_before_it_runs_is_in_nobodys_way(it, end, waits):
    lock = f"{waits} {end}"
    before, queue = (f"{lock} busy", "one") if waits == "queued" else (lock, "many")
    busy = publish(it, "early", before, 120.0, queue=queue)
    it.started(before)
    # Not before it has been put off.
    expires = {"queued": 1.0, "put off": 10.0}[waits] if end == "expired" else None
    if waits == "queued":
        result = publish(it, "early", lock, 0.0, queue="one", expires=expires)
    else:
        result = publish(it, "put_off", lock, 0.0, expires=expires)
        it.wait_for_log(rf"Rescheduled task put_off\[{result.id}\]", timeout=60)
    sent = time.time()  # or later: by then it counts
    if end == "revoked":
        result.revoke()
        # Not for the result: from Celery 5.7 on any worker stores that, at once.
        (worker,) = (w for w in it.workers if f"{queue}@localhost" in w.command)
        worker.wait_for_log(rf"Tasks flagged as revoked: .*{result.id}", timeout=60)
    else:
        eventually(lambda: time.time() > sent + expires + 1.0, "expiry", timeout=60)
    open_gate(it, before)
    busy.get(timeout=100)
    publish(it, "next", lock, 0.0, queue="many").get(timeout=100)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=100)
    if end == "revoked":
        it.wait_for_log(rf"Discarding revoked task: \S+{result.id}", timeout=100)
    assert len(it.bodies(lock)) == (1 if waits == "queued" else 2)


# -- what comes again -----------------------------------------------------------------


@pytest.mark.parametrize(
    "task",
    [
        "put_back",
        pytest.param("retried", marks=since(5, 7, "task_retry_on_worker_lost")),
    ],
)
def test_a_task_whose_child_was_killed_comes_again_if_celery_says_so(it, task):
    lock = f"again {task}"
    # Not by the children that outlived a revoke above: Celery takes their death for that revoke.
    result = publish(it, task, lock, 120.0, once=True, queue="next")
    (running,) = it.started(lock)
    it.wait_until_begun(running.pid)
    os.kill(running.pid, signal.SIGKILL)
    assert result.get(timeout=100) == f"worked on {lock}"
    first, second = it.bodies(lock)
    assert second.started >= first.ended


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    folder = tmp_path_factory.mktemp("impatient")
    conf = {"redlock_ttl": TTL, "redlock_max_ttl": TTL, **redelivered_after(2)}
    with stage(__file__, folder, **conf) as it:
        start_all(it, [("many", 4, None), ("one", 2, None)])
        yield it


@pytest.mark.parametrize("task", ["late", "late_no_dedup"])
def test_a_copy_does_not_revive_what_celery_has_given_up(impatient, task):
    """The copy that was set aside ends, too; twin: where nothing is remembered, it runs."""
    it, lock = impatient, f"given up {task}"
    result = publish(it, task, lock, 120.0, once=True)
    (running,) = it.started(lock)
    it.wait_for_log(rf"{task}\[{result.id}\] for \d+ s:", timeout=60)
    os.kill(running.pid, signal.SIGKILL)
    with pytest.raises(Exception, match="exited prematurely"):
        result.get(timeout=100)
    with redis.Redis.from_url(it.conf["broker_url"]) as client:
        eventually(lambda: not client.exists("unacked"), "end of the copy", timeout=100)
    if task == "late":
        assert len(it.bodies(lock)) == 1
        assert result.state == "FAILURE"
    else:
        assert len(it.bodies(lock)) >= 2  # a slow broker's client may have made several copies


# -- a worker that ends ---------------------------------------------------------------


@pytest.fixture
def leaving(tmp_path):
    conf = {"redlock_ttl": TTL, "redlock_max_ttl": TTL, **redelivered_after(3)}
    with stage(__file__, tmp_path, worker_soft_shutdown_timeout=1.5, **conf) as it:
        start_all(it, [("leaving", 2, None)])
        yield it


def test_a_warm_shutdown_keeps_the_lock_to_the_end_of_the_task(leaving):
    (worker,) = leaving.workers
    result = publish(leaving, "late", "warm", 120.0, queue="leaving")
    leaving.started("warm")
    worker.signal(signal.SIGTERM)
    staying = leaving.worker(name="staying", args=["-Q", "leaving,staying"])
    following = publish(leaving, "next", "warm", 0.0, queue="staying")
    staying.wait_for_log(rf"next\[{following.id}\] received", timeout=60)
    time.sleep(0.5)  # in which it is not to run
    open_gate(leaving, "warm")
    assert result.get(timeout=100) == "worked on warm"
    assert following.get(timeout=100) == "worked on warm"
    first, second = leaving.bodies("warm")
    assert first.finished
    assert second.started >= first.ended
    worker.wait()


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param(["SIGQUIT"], marks=since(5, 5, "a cold shutdown fails nothing"), id="cold"),
        pytest.param(["SIGINT", "SIGINT"], marks=since(5, 5, "soft shutdown"), id="soft"),
    ],
)
def test_what_a_shutdown_cuts_off_is_done_by_another_worker(leaving, signals):
    """Its lock is given back by the child that is told to end, long before the lease would end."""
    (worker,) = leaving.workers
    result = publish(leaving, "late", "cut off", 120.0, once=True, queue="leaving")
    (running,) = leaving.started("cut off")
    for name in signals:  # two of a kind that come at once are one
        worker.signal(signal.Signals[name])
        worker.wait_for_log(r"(?i)worker: \S+ shutdown", timeout=60)
    worker.wait()
    eventually(lambda: is_gone(running.pid), "death of its child")
    leaving.worker(name="staying", args=["-Q", "leaving"])
    assert result.get(timeout=100) == "worked on cut off"
    assert overlaps(read(leaving.events)) == []


@pytest.mark.parametrize("ttl", [3.0, TTL])  # short, for what is tried here is its end
def test_the_lock_of_a_worker_that_was_killed_ends_with_its_lease(tmp_path, ttl):
    """Nobody is left to release; the lease ends by itself. Twin: a long one is still there."""
    with stage(__file__, tmp_path, redlock_ttl=ttl, redlock_max_ttl=ttl) as it:
        worker = it.worker(name="leaving", args=["-Q", "leaving"])
        it.worker(name="staying", args=["-Q", "staying"])
        publish(it, "late", "orphan", 120.0, queue="leaving")
        it.started("orphan")
        time.sleep(1.5)  # until it was renewed, if the lease is the short one
        worker.kill()
        following = publish(it, "next", "orphan", 0.0, queue="staying")
        if ttl == TTL:
            time.sleep(5.0)  # in which nothing is to happen
            assert len(it.bodies("orphan")) == 1
            return
        assert following.get(timeout=100) == "worked on orphan"
        first, second = it.bodies("orphan")
        assert second.started > first.ended


# -- children that come and go --------------------------------------------------------


@pytest.mark.parametrize("limit", ["--max-tasks-per-child=1", "--max-memory-per-child=1"])
def test_children_that_are_replaced_leave_nothing_behind(tmp_path, limit):
    with stage(__file__, tmp_path, redlock_ttl=TTL, redlock_max_ttl=TTL) as it:
        it.worker(concurrency=2, args=[limit])
        results = [it.task("late").apply_async((f"lock {n}", 0.0)) for n in range(10)]
        assert [r.get(timeout=60) for r in results] == [f"worked on lock {n}" for n in range(10)]
        results = [it.task("next").apply_async(("the same", 0.0)) for _ in range(6)]
        assert {r.get(timeout=60) for r in results} == {"worked on the same"}
        it.wait_until_free()
        ran = [b for n in range(10) for b in it.bodies(f"lock {n}")] + it.bodies("the same")
        assert len({b.pid for b in ran}) >= 13, "children were not replaced"
        assert overlaps(read(it.events)) == []
