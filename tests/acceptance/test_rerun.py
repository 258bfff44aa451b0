"""Merging into the next run, against real workers: the newest arguments win, none is lost."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from celery import Task

from celery_redlock import RedlockTask, current_lock
from celery_redlock.plugin import plugin_for
from support.events import body, now, overlaps, read, record
from support.stage import make_app, stage
from support.waiting import eventually
from support.worker import SUPPORT

UNTIL = ("started", "finished", "success", "expired")
TTL = 2.0
TRIGGERS = int(os.environ.get("REDLOCK_SPREE_TRIGGERS", "1000"))
SEED = int(os.environ.get("REDLOCK_SPREE_SEED", str(random.randrange(10**6))))
PUBLISHERS = 4
PACE = 0.08
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
    late = {"acks_late": True, "reject_on_worker_lost": True}

    @app.task(name="soak", unique_until="finished", unique_for=600.0, **late, **ours)
    def soak(self, name, number, seconds):
        with body(events, name, number=number, merged=current_lock().merged) as mine:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                record(events, "tick", name=name, body=mine)
                time.sleep(0.002)

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


# -- the soak --------------------------------------------------------------------------


class Soak:
    """Workers of a stage, publishers, and somebody who kills workers and their children."""

    def __init__(self, it, rng, **worker):
        self.it, self.rng, self._options = it, rng, worker
        self._started = 0
        self.kills = {"children": 0, "workers": 0}

    def start(self):
        """Start one worker."""
        self._started += 1
        return self.it.worker(name=f"n{self._started}", concurrency=4, **self._options)

    def kill_child(self):
        """``kill -9`` a child of some worker."""
        worker = self.rng.choice([w for w in self.it.workers if w.alive])
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        if children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self.rng.choice(children)), signal.SIGKILL)
            self.kills["children"] += 1

    def kill_worker(self):
        """``kill -9`` a whole worker, whose children die with it, and start another."""
        self.rng.choice([w for w in self.it.workers if w.alive]).kill(children=False)
        self.kills["workers"] += 1
        self.start()

    def publish(self, triggers, names):
        """Publish from 4 processes while killing; ends when the last one has published."""
        env = {"EVENTS": str(self.it.events), "PYTHONPATH": str(SUPPORT)}
        conf = json.dumps(self.it.conf)
        processes = []
        for n in range(PUBLISHERS):
            words = [conf, str(self.rng.random()), str(triggers // PUBLISHERS), str(names), str(n)]
            command = [sys.executable, __file__, *words]
            processes.append(subprocess.Popen(command, env={**os.environ, **env}))
        try:
            while any(process.poll() is None for process in processes):
                yield
        finally:
            for process in processes:
                process.kill() if process.poll() is None else None
                process.wait()
        assert [process.returncode for process in processes] == [0] * PUBLISHERS


def publisher(conf, seed, triggers, names, number):
    """Publish at random: the life of one of several processes."""
    rng = random.Random(seed)
    app = make_app(__file__, json.loads(conf), is_worker=False)
    events = os.environ["EVENTS"]
    for n in range(int(triggers)):
        name = f"soak {rng.randrange(int(names))}"
        mine, since = f"{number}.{n}", now()
        result = app.tasks["soak"].delay(name, mine, rng.uniform(0.005, 0.05))
        told = {"duplicate": result.duplicate, "id": result.id}
        record(events, "trigger", lock=name, number=mine, since=since, **told)
        time.sleep(rng.uniform(0.0, PACE))  # so that what is killed is now this, now that
    plugin_for(app).locks.close()


def last_triggers(events):
    """Return of each name the triggers after whose end no other one began, any may be the last."""
    found = {}
    for lock in {e["lock"] for e in events if e["kind"] == "trigger"}:
        mine = [e for e in events if e["kind"] == "trigger" and e["lock"] == lock]
        latest = max(e["since"] for e in mine)
        found[lock] = [e for e in mine if e["at"] >= latest]
    return found


def lost(events):
    """Return the names whose last trigger was followed by no run with its arguments."""
    starts = [e for e in events if e["kind"] == "start"]
    return [
        (name, last)
        for name, last in last_triggers(events).items()
        if not any(
            s["name"] == name and s["number"] == t["number"] and s["at"] >= t["since"]
            for t in last
            for s in starts
        )
    ]


@pytest.mark.parametrize("broker", ["rabbitmq", "redis"])
def test_soak(request, broker, tmp_path):
    conf = {"redlock_ttl": TTL, "redlock_max_ttl": TTL, "task_track_started": False}
    triggers = TRIGGERS
    if broker == "rabbitmq":
        conf["broker_url"] = request.getfixturevalue("rabbit").url
    else:
        triggers //= 4
    with stage(__file__, tmp_path, **conf) as it:
        rng = random.Random(SEED)
        soak = Soak(it, rng)
        it.start_workers([{"name": f"w{n}", "concurrency": 4} for n in range(2)])
        for n, _ in enumerate(soak.publish(triggers, 20)):
            time.sleep(rng.uniform(0.2, 0.8))
            if broker == "rabbitmq" and n % 5 == 2:
                soak.kill_worker()
            else:
                soak.kill_child()
        t = now()
        if broker == "rabbitmq":
            request.getfixturevalue("rabbit").wait_until_quiet()
        else:
            it.wait_until_quiet()
        events = read(it.events)
        starts = [e for e in events if e["kind"] == "start"]
        print(broker, soak.kills, len(starts), "quiet after", now() - t, "merged", sum(s["merged"] for s in starts))
        trig = [e for e in events if e["kind"] == "trigger"]
        print(len(trig), sum(e["duplicate"] for e in trig), max(e["at"] - e["since"] for e in trig), trig[-1]["at"] - trig[0]["at"])
        print("skipped", len(re.findall("skipped", it.log())), "Traceback", len(re.findall("Traceback", it.log())))
        print("overlaps", overlaps(events))
        print("lost", lost(events))
        last = last_triggers(events)
        for name in last:
            final = [s for s in starts if s["name"] == name][-1]
            if final["number"] not in [l["number"] for l in last[name]]:
                print("final", name, final, last[name])
        try:
            eventually(lambda: not it.keys("redlock:queued:*") | it.keys("redlock:next:*"), "quiet keys", timeout=5)
        except AssertionError:
            for k in it.keys("redlock:queued:*") | it.keys("redlock:next:*"):
                for node in it.nodes:
                    with redis.Redis.from_url(node.url) as c:
                        print(k, c.hgetall(k), c.pttl(k))
        (Path("/tmp/rerun") / f"{broker}.log").write_text(it.log())
        (Path("/tmp/rerun") / f"{broker}.events").write_bytes(it.events.read_bytes())
        assert 0


if __name__ == "__main__":
    publisher(*sys.argv[1:])
