"""Merging into the next run, against real workers: the newest arguments win, none is lost."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import redis
from celery import Task

from celery_redlock import RedlockTask, current_lock
from support.events import body, now, read
from support.stage import stage
from support.waiting import eventually

UNTIL = ("started", "finished", "success", "expired")
TTL = 2.0
#: How long a marker stands by itself where a test waits for that, and where it must not matter [s].
BRIEF, LONG = 3.0, 60.0


def declare(app):
    """Declare the same task for every value of ``unique_until``, and some of its own kind."""
    events = os.environ.get("EVENTS", "")

    def job(self, name, number, way=""):
        lock = current_lock()
        again = {"retries": self.request.retries, "merged": lock.merged}
        with body(events, name, number=number, id=self.request.id, **again):
            gate = Path(events).with_name(f"{name} {number}.open")
            while "gate" in way and not gate.exists():
                time.sleep(0.01)
            if "retry" in way and self.request.retries < 1:
                args = (name, "retried", way) if "args" in way else None
                raise self.retry(args=args, countdown=1)
            if "swap" in way:
                raise self.replace(self.app.tasks["finished"].si(name, "swapped"))
            if "fail" in way:
                raise ValueError(name)
        return [number, lock.merged]

    ours = {"base": RedlockTask, "bind": True, "shared": False, "lock_key": "{name}"}
    ours["on_duplicate"] = "rerun"
    for until in UNTIL:
        window = BRIEF if until == "expired" else LONG
        app.task(name=until, unique_until=until, unique_for=window, **ours)(job)
        late = {"acks_late": True, "reject_on_worker_lost": True}
        app.task(name=f"{until} late", unique_until=until, unique_for=window, **late, **ours)(job)
    app.task(name="brief", unique_until="finished", unique_for=BRIEF, **ours)(job)


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    """A stage with one worker."""
    folder = tmp_path_factory.mktemp("rerun")
    with stage(__file__, folder, redlock_ttl=TTL, redlock_max_ttl=TTL) as it:
        it.folder = folder
        it.open = lambda name, number: (folder / f"{name} {number}.open").touch()
        it.runs = lambda name: [e for e in read(it.events, "start") if e["name"] == name]
        it.worker(concurrency=4)
        yield it


@pytest.mark.parametrize("way", ["retry args", "swap"])
def test_own_arguments_of_what_comes_next_stand(it, way):
    """A retry or a replacement with arguments of its own runs with these, not with merged ones."""
    name = f"own {way}"
    task = it.task("finished")
    later = {"countdown": 1}
    first = task.apply_async((name, 0, way), **later)
    second = task.delay(name, 1, way)
    assert second.duplicate
    first.get(timeout=20)
    assert [r["number"] for r in it.runs(name)] == [1, "retried" if way != "swap" else "swapped"]


def test_a_marker_that_lapses_before_its_message_is_read_loses_no_trigger(it):
    """The queue was slower than unique_for: the newest arguments run all the same."""
    task = it.task("brief")
    first = task.apply_async(("lapse", 0), queue="slow")
    time.sleep(BRIEF / 2)  # so that the trigger is merged in the middle of the marker's life
    assert task.apply_async(("lapse", 1), queue="slow").id == first.id
    eventually(lambda: not it.keys("redlock:queued:lapse"), "lapse")
    it.worker(name="slow", concurrency=1, args=["-Q", "slow"])
    first.get(timeout=20)
    assert it.runs("lapse")[-1]["number"] == 1


def test_expired(it):
    """Windows do not overlap: the third run starts a window after the second."""
    task = it.task("expired")
    begun = now()
    task.delay("windows", 0)
    it.started("windows", 1)
    task.delay("windows", 1)
    it.started("windows", 2)
    task.delay("windows", 2)
    it.started("windows", 3)
    starts = [r["at"] - begun for r in it.runs("windows")]
    print(starts)
    assert starts[1] >= BRIEF
    assert starts[2] >= 2 * BRIEF


@pytest.mark.parametrize("until", UNTIL)
def test_redelivered_keeps(it, until):
    """Redelivered after kill."""
    import signal

    name = f"redelivered {until}"
    task = it.task(f"{until} late")
    first = task.apply_async((name, 0, "gate"), countdown=1)
    second = task.delay(name, 1, "gate")
    assert first.id == second.id
    ran = it.started(name)[0]
    os.kill(ran.pid, signal.SIGKILL)
    it.started(name, 2)
    it.open(name, 1)
    it.open(name, 0)
    assert [r["number"] for r in it.runs(name)] == [1, 1]
