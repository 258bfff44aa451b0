"""
Report mode in real workers of three pools: everything runs, and each thing is reported once.

The twin of each finding is a task that enforces. The last test has workers in both modes on one
queue, while tasks go from one mode to the other.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from celery_redlock import RedlockTask, current_lock
from celery_redlock.lock.held import NotLocked
from support.events import body, overlaps, read, record
from support.stage import LASTING, copied_message, stage
from support.waiting import eventually

POOLS = ["prefork", "threads", "gevent"]
#: What is counted: events of these have a cause, or are one by themselves.
COUNTED = {"LeaseLost": "lost", "DuplicatePublished": "duplicate"}
SWITCHED = ["switched one", "switched two"]


def declare(app):
    path = os.environ.get("EVENTS")
    app.told = []

    def note(event):
        cause = getattr(event, "cause", COUNTED.get(type(event).__name__))
        if not (cause and getattr(event, "report", False)):
            return
        if path is None:
            app.told.append((event.name, cause))
        else:
            record(path, "report", name=event.name, cause=cause, event=type(event).__name__)

    app.conf.redlock_observers = [note]

    def work(self, lock, is_gated=False):  # noqa: FBT002  as a message carries it
        is_first = not any(e["name"] == lock for e in read(path, "start"))
        mode = "report" if isinstance(current_lock(), NotLocked) else "enforce"
        with body(path, lock, mode=mode, task=self.request.id):
            time.sleep(0.05)  # a short body
            while is_gated and is_first and not Path(path).with_name(f"open {lock}").exists():
                time.sleep(0.02)
            current_lock().ensure_held()
        return "ran"

    ours = {"base": RedlockTask, "bind": True, "shared": False, "lock_key": "{lock}"}
    app.task(name="late", acks_late=True, **ours)(work)
    app.task(name="late, enforced", acks_late=True, lock_mode="enforce", **ours)(work)
    # Short, as it is to be lost; more than two node timeouts.
    app.task(name="losing", lock_ttl=12.0, acks_late=True, **ours)(work)
    unique = {**ours, "unique_until": "finished"}
    app.task(name="unique", **unique)(work)
    app.task(name="unique, enforced", lock_mode="enforce", **unique)(work)
    for name in SWITCHED:
        mode = "enforce" if name in os.environ.get("ENFORCED", "") else "report"
        queued = {**unique, "on_conflict": "queue", "lock_mode": mode}
        app.task(name=name, **queued)(work)


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    # In report mode a child's first task has one node timeout to connect, too.
    patient = {**LASTING, "redlock_node_timeout": 5.0}
    with stage(__file__, folder, redlock_mode="report", **patient) as it:
        it.open = lambda lock: (folder / f"open {lock}").touch()
        it.start_workers(
            {"name": pool, "pool": pool, "concurrency": 8, "args": ["-Q", pool]} for pool in POOLS
        )
        yield it


@pytest.fixture(scope="module")
def ran(it):
    results = []

    def publish(task, lock, pool, *, is_gated=False, **options):
        results.append(it.task(task).apply_async((lock, is_gated), queue=pool, **options))
        return results[-1]

    for pool in POOLS:
        for kind in ("late", "late, enforced"):
            lock = f"{kind} overlap {pool}"
            publish(kind, lock, pool, is_gated=True)
            it.started(lock)
            publish(kind, lock, pool).get(timeout=100)
            it.open(lock)
            lock, copy = f"{kind} redelivered {pool}", copied_message()
            again = publish(kind, lock, pool, is_gated=True, **copy)
            it.started(lock)
            publish(kind, lock, pool, is_gated=True, **copy)
            if kind == "late":
                it.started(lock, 2)
            else:
                it.wait_for_log(rf"{kind}\[{again.id}\] for \d+ s:")
            it.open(lock)
        for kind in ("unique", "unique, enforced"):
            for _ in range(2):
                publish(kind, f"{kind} {pool}", pool, is_gated=True)
            it.open(f"{kind} {pool}")
        copy = copied_message()
        publish("late", f"late copy {pool}", pool, **copy).get(timeout=100)
        eventually(lambda: not it.keys("redlock:report:lock:late copy*"), "its end")
        publish("late", f"late copy {pool}", pool, **copy)
    assert all(result.get(timeout=100) for result in results)
    it.wait_until_quiet()
    return it


def reports(it, name):
    told = Counter(e["cause"] for e in read(it.events, "report") if e["name"] == name)
    return told + Counter(cause for lock, cause in it.app.told if lock == name)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    ("what", "cause"), [("overlap", "conflict"), ("redelivered", "redelivered")]
)
def test_what_runs_beside_another_is_reported_once(ran, pool, what, cause):
    """Both bodies ran, one beside the other. Twin: an enforced one did not, and reports nothing."""
    name = f"late {what} {pool}"
    assert reports(ran, name) == {cause: 1}
    assert len(ran.bodies(name)) == 2
    assert overlaps(e for e in read(ran.events) if e.get("name") == name)
    twin = f"late, enforced {what} {pool}"
    assert len(ran.bodies(twin)) == 1
    assert not reports(ran, twin)


@pytest.mark.parametrize("pool", POOLS)
def test_a_late_copy_is_reported_once(ran, pool):
    name = f"late copy {pool}"
    assert reports(ran, name) == {"finished": 1}
    assert len(ran.bodies(name)) == 2


@pytest.mark.parametrize("pool", POOLS)
def test_a_duplicate_at_publish_is_reported_once(ran, pool):
    """Both were published and ran, and may have met at run time. Twin: the second joined."""
    told = reports(ran, f"unique {pool}")
    assert told["duplicate"] == 1
    assert told["conflict"] <= 1
    assert len(ran.bodies(f"unique {pool}")) == 2
    assert len(ran.bodies(f"unique, enforced {pool}")) == 1


def test_a_lost_lease_is_reported_once_in_each_pool(ran):
    names = [f"lost {pool}" for pool in POOLS]
    sent = [
        ran.task("losing").apply_async((name, True), queue=pool)
        for name, pool in zip(names, POOLS, strict=True)
    ]
    for name in names:
        ran.started(name)
    for node in ran.nodes[:3]:
        node.pause()
    try:
        for name in names:
            eventually(lambda name=name: reports(ran, name)["lost"], f"loss of {name}")
            ran.open(name)
        assert [result.get(timeout=100) for result in sent] == ["ran"] * len(sent)
    finally:
        for node in ran.nodes[:3]:
            node.resume()
    lost = [
        {cause: n for cause, n in reports(ran, name).items() if cause == "lost"} for name in names
    ]
    assert lost == [{"lost": 1}] * len(names)


def test_tasks_go_from_one_mode_to_the_other_while_workers_of_both_run(it):
    """
    Nothing is lost or blocked, and those that enforce exclude each other all the time.

    Three workers: one reports, in one the first task is enforced, in one both are. The publisher
    goes from one mode to the other with each message.
    """
    enforced = ["", SWITCHED[0], " ".join(SWITCHED)]
    queue = {"concurrency": 3, "args": ["-Q", "switch"]}
    it.start_workers(
        {"name": f"m{n}", "env": {"ENFORCED": names}, **queue} for n, names in enumerate(enforced)
    )

    def publish(times):
        sent = []
        for n in range(times):
            for name in SWITCHED:
                task = it.task(name)
                task.lock_mode = "enforce" if n % 2 else "report"
                result = task.apply_async((name,), queue="switch")
                if not result.duplicate:
                    sent.append(result)
        return sent

    def begun():
        return [e for e in read(it.events) if e.get("name") in SWITCHED and e.get("mode")]

    def have_run_in_both_modes():
        """Publish some more until they have: one worker may stall, and the others take all."""
        if {(e["name"], e["mode"]) for e in begun()} == both_modes:
            return True
        sent.extend(some := publish(3))
        assert [result.get(timeout=100) for result in some] == ["ran"] * len(some)
        return False

    both_modes = {(name, mode) for name in SWITCHED for mode in ("enforce", "report")}
    sent = publish(15)
    assert [result.get(timeout=100) for result in sent] == ["ran"] * len(sent)
    eventually(have_run_in_both_modes, "runs in both modes", timeout=100)
    # By its name, as threads start them: nobody but those that enforce, of the first task.
    next(worker for worker in it.workers if "m0@localhost" in worker.command).stop()
    sent += (more := publish(5))
    assert [result.get(timeout=100) for result in more] == ["ran"] * len(more)
    it.wait_until_free()
    ids = Counter(e["task"] for e in read(it.events, "start") if e["name"] in SWITCHED)
    assert ids == {result.id: 1 for result in sent}
    assert {(e["name"], e["mode"]) for e in begun()} == both_modes
    assert overlaps(e for e in begun() if e["mode"] == "enforce") == []
    eventually(lambda: not it.keys("redlock:queued:switched*"), "ends of all reservations")
