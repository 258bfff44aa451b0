"""
``on_duplicate="rerun"`` against real workers: the newest arguments run, once more and alone.

At most one task of a name runs and one is pending; what is triggered meanwhile is merged into
the pending one, also while workers are killed. The length of the soak is a parameter:

    REDLOCK_SPREE_TRIGGERS=20000 make test-all ARGS="tests/acceptance/test_rerun.py --timeout 1800"
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from billiard.exceptions import WorkerLostError
from celery.exceptions import TaskRevokedError

from celery_redlock import RedlockTask, current_lock
from celery_redlock.events import DuplicatePublished
from celery_redlock.plugin import plugin_for
from celery_redlock.unique.reservations import Reservations
from celery_redlock.unique.reserving import Started
from support.events import body, now, overlaps, read, record
from support.stage import LASTING, make_app, stage
from support.waiting import eventually
from support.worker import SUPPORT

pytestmark = pytest.mark.long

UNTIL = ("started", "finished", "success", "expired")
#: Where workers are killed, and the ends of their leases are waited for.
TTL = 8.0
#: How long a marker stands by itself where a test waits for that, and where it must not matter [s].
BRIEF, LONG = 8.0, 600.0
#: A countdown in which a test gets its triggers published, however slow the machine is [s].
COUNTDOWN = 5

TRIGGERS = int(os.environ.get("REDLOCK_SPREE_TRIGGERS", "1000"))
SEED = int(os.environ.get("REDLOCK_SPREE_SEED", str(random.randrange(10**6))))
PUBLISHERS, NAMES = 4, 20
#: Longest pause of a publisher between two triggers [s].
PACE = 0.08


def job(self, name, number, way=""):
    """Do what *way* says, and return the number and how many triggers were merged."""
    events, lock = os.environ["EVENTS"], current_lock()
    again = {"retries": self.request.retries, "merged": lock.merged}
    with body(events, name, number=number, id=self.request.id, **again):
        gate = Path(events).with_name(f"{name} {number}.open")
        waits = "gate" in way or ("hold" in way and self.request.retries)
        while waits and not gate.exists():
            time.sleep(0.01)
        if "retry" in way and not self.request.retries:
            own = (name, "own", way) if "own" in way else None
            raise self.retry(args=own, countdown=COUNTDOWN)
        if "swap" in way and not self.request.replaced_task_nesting:
            raise self.replace(self.si(name, "own", way))
        if "fail" in way:
            raise ValueError(name)
    return [number, lock.merged]


def short(self, name, number, seconds):
    with body(os.environ["EVENTS"], name, number=number) as mine:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            record(os.environ["EVENTS"], "tick", name=name, body=mine)
            time.sleep(0.002)


def declare(app):
    if "STAGE" in os.environ and "BLIND" in os.environ:
        forget_what_was_merged()

    def declared(name, run=job, until="finished", life=LONG, **options):
        options = {"lock_key": "{name}", "unique_until": until, "unique_for": life, **options}
        ours = {"base": RedlockTask, "bind": True, "shared": False, "on_duplicate": "rerun"}
        app.task(name=name, **ours, **options)(run)

    late = {"acks_late": True, "reject_on_worker_lost": True}
    for until in UNTIL:
        life = BRIEF if until == "expired" else LONG
        declared(until, until=until, life=life)
        declared(f"{until} late", until=until, life=life, **late)
    declared("fail", on_conflict="fail")
    declared("brief", life=BRIEF)
    declared("success brief", until="success", life=BRIEF)
    declared("soft", soft_time_limit=6)
    declared("looks", lock_ttl=6.0)  # it looks again when that lease may have ended
    declared(
        "auto", autoretry_for=(ValueError,), retry_backoff=False, default_retry_delay=COUNTDOWN
    )
    declared("soak", short, life=600.0, **late)


def forget_what_was_merged():
    """Have a worker take its turn as ever, but not look what was merged into its task."""
    start = Reservations.start

    def blind(*args, **kwargs):
        told = start(*args, **kwargs)
        return Started() if isinstance(told, Started) else told

    Reservations.start = blind


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    with named_stage(tmp_path_factory.mktemp("rerun"), **LASTING) as it:
        it.worker(concurrency=6)
        yield it
        it.no_key_is_for_ever()


@pytest.fixture(scope="module")
def lossless(rabbit, tmp_path_factory):
    with named_stage(tmp_path_factory.mktemp("lossless"), broker_url=rabbit.url) as it:
        it.worker(concurrency=4)
        yield it
        it.no_key_is_for_ever()


@contextlib.contextmanager
def named_stage(folder, **conf):
    short = {"redlock_ttl": TTL, "redlock_max_ttl": TTL, "redlock_node_timeout": 1.0}
    with stage(__file__, folder, **{**short, **conf}) as it:
        it.open = lambda name, number: (folder / f"{name} {number}.open").touch()
        it.runs = lambda name: [e for e in read(it.events, "start") if e["name"] == name]
        it.numbers = lambda name: [run["number"] for run in it.runs(name)]
        yield it


@pytest.fixture
def told(it, monkeypatch):
    """What an observer in the publisher is told."""
    events = []
    monkeypatch.setitem(vars(plugin_for(it.app)), "notify", events.append)
    return events


def pending(it, name):
    """Return the task ids of all messages at the broker, unacknowledged too, that stand for it."""
    with redis.Redis.from_url(it.broker.url) as client:
        messages = [json.loads(m) for m in client.lrange("celery", 0, -1)]
        messages += [json.loads(m)[0] for m in client.hvals("unacked")]
    return [
        m["headers"]["id"]
        for m in messages
        if m["headers"]["redlock"].get("reservation", [0])[0] == name
    ]


def merged_in(told):
    return [event.merged for event in told if isinstance(event, DuplicatePublished)]


def is_over(it, name):
    return not it.keys(f"redlock:queued:{name}") | it.keys(f"redlock:next:{name}")


# -- one more run ----------------------------------------------------------------------


@pytest.mark.parametrize("task", [*UNTIL, "finished late", "fail"])
def test_ten_triggers_while_one_runs_make_one_more_run(it, told, task):
    name, publish = f"ten {task}", it.task(task).delay
    began = now()
    first = publish(name, 0, "gate")
    it.started(name)
    results = [publish(name, number) for number in range(1, 11)]

    is_gone = task == "started"  # its marker: what comes next is no duplicate
    assert [r.duplicate for r in results] == [not is_gone] + 9 * [True]
    assert {r.id for r in results} == {results[0].id} != {first.id}
    assert results[0].holder_id == (results[0].id if is_gone else first.id)
    assert {r.holder_id for r in results[1:]} == {results[0].id}
    assert merged_in(told) == [] + (not is_gone) * [0] + [*range(1, 10)]

    # Not at once: between two commands of a worker a message is nowhere to be seen.
    waiting = eventually(lambda: set(pending(it, name)) - {first.id}, "a message that waits")
    assert waiting == {results[0].id}
    it.open(name, 0)
    assert [r.get(timeout=100) for r in results] == 10 * [[10, 9]]
    assert first.get(timeout=100) == [0, 0]
    assert it.numbers(name) == [0, 10]
    assert overlaps(e for e in read(it.events) if e.get("name") == name) == []
    if task == "expired":
        assert it.runs(name)[1]["at"] >= began + BRIEF
    else:
        eventually(lambda: is_over(it, name), "end of the markers")


def test_while_one_runs_there_is_one_message_however_often_it_looks(it):
    name, publish = "looks", it.task("looks").delay
    first = publish(name, 0, "gate")
    it.started(name)
    result = publish(name, 1)

    def has_looked(times):
        publish(name, 2)
        # The first one, too: a child may begin before its parent has acknowledged the message.
        assert set(pending(it, name)) <= {first.id, result.id}
        return it.log().count(f"[{result.id}] for ") >= times

    eventually(lambda: has_looked(3), "third look", timeout=100, every=0.05)
    eventually(lambda: pending(it, name) == [result.id], "one message")
    it.open(name, 0)
    assert result.get(timeout=100)[0] == 2
    assert it.numbers(name) == [0, 2]


@pytest.mark.parametrize("task", [*UNTIL, "finished late", "fail"])
def test_ten_triggers_while_the_first_waits_are_one_run(it, told, task):
    name, publish = f"waits {task}", it.task(task).apply_async
    first = publish((name, 0), queue=name)
    results = [publish((name, number), queue=name) for number in range(1, 11)]
    assert (first.duplicate, {r.duplicate for r in results}) == (False, {True})
    assert {r.id for r in results} == {r.holder_id for r in results} == {first.id}
    assert merged_in(told) == [*range(1, 11)]
    it.app.control.add_consumer(name, reply=True)
    assert [r.get(timeout=100) for r in [first, *results]] == 11 * [[10, 10]]
    assert it.numbers(name) == [10]
    if task != "expired":
        eventually(lambda: is_over(it, name), "end of the markers")


def test_windows_do_not_overlap(it):
    name, publish = "windows", it.task("expired").delay
    began = now()
    for number in range(3):
        publish(name, number)
        it.started(name, number + 1)
    assert it.numbers(name) == [0, 1, 2]
    starts = [run["at"] - began for run in it.runs(name)]
    assert starts[1] >= BRIEF
    assert starts[2] >= 2 * BRIEF


def test_a_marker_that_lapses_before_its_message_is_read_loses_no_trigger(it):
    """The queue was slower than ``unique_for``: the newest arguments run all the same."""
    name, publish = "lapses", it.task("brief").apply_async
    first = publish((name, 0), queue=name)
    assert publish((name, 1), queue=name).id == first.id
    lapsed = now() + BRIEF
    eventually(lambda: now() > lapsed, "lapse")  # of the marker, if nothing has prolonged it
    it.app.control.add_consumer(name, reply=True)
    first.get(timeout=100)
    assert it.numbers(name) == [1]


# -- retries, and what else comes again --------------------------------------------------


@pytest.mark.parametrize("task", ["started", "finished", "success", "auto"])
def test_in_the_countdown_of_a_retry_the_retry_keeps_its_arguments(it, task):
    name, publish = f"retry {task}", it.task(task).delay
    first = publish(name, 0, "fail" if task == "auto" else "retry hold")
    eventually(lambda: first.state == "RETRY", "a retry")
    results = [publish(name, number) for number in range(1, 11)]
    it.open(name, 0)  # the retry does not end before all are published, however slow the machine
    assert results[-1].get(timeout=100)[0] == 10
    if task == "auto":
        with pytest.raises(ValueError, match=name):
            first.get(timeout=100)
    else:
        assert first.get(timeout=100)[0] == 0
    ran = [(run["number"], run["retries"]) for run in it.runs(name)]
    tries = [(0, n) for n in range(4 if task == "auto" else 2)]
    if task == "started":  # its marker has ended: what comes now runs in the countdown already
        assert [run for run in ran if not run[0]] == tries
        assert [run for run in ran if run[0]][-1] == (10, 0)
    else:
        assert ran == [*tries, (10, 0)]
        assert {r.id for r in results} == {results[0].id} != {first.id}


@pytest.mark.parametrize("way", ["retry own", "swap"])
def test_what_names_its_own_arguments_has_them(it, way):
    name, publish = f"own {way}", it.task("finished").apply_async
    first = publish((name, 0, way), queue=name)
    assert publish((name, 1, way), queue=name).id == first.id
    it.app.control.add_consumer(name, reply=True)
    first.get(timeout=100)
    assert it.numbers(name) == [1, "own"]


# -- ends of other kinds -----------------------------------------------------------------


@pytest.mark.parametrize("task", ["finished", "started", "success brief", "soft"])
def test_after_a_failure_the_pending_one_runs(it, task):
    name, publish = f"fails {task}", it.task(task).delay
    first = publish(name, 0, "gate fail")
    it.started(name)
    results = [publish(name, number) for number in (1, 2)]
    if task != "soft":
        it.open(name, 0)
    first.get(timeout=100, propagate=False)
    assert first.state == "FAILURE"
    assert results[1].get(timeout=100) == [2, 1]
    eventually(lambda: is_over(it, name), "end of the markers")
    last = publish(name, 3)
    assert (last.duplicate, last.get(timeout=100)) == (False, [3, 0])
    assert it.numbers(name) == [0, 2, 3]


@pytest.mark.parametrize("task", ["finished", "finished late", "success"])
def test_after_a_revoke_of_the_running_one_the_pending_one_runs(it, task):
    name, publish = f"terminated {task}", it.task(task).delay
    first = publish(name, 0, "gate")
    it.started(name)
    results = [publish(name, number) for number in (1, 2)]
    first.revoke(terminate=True, signal="SIGKILL")
    assert results[1].get(timeout=100) == [2, 1]
    assert it.numbers(name) == [0, 2]
    eventually(lambda: is_over(it, name), "end of the markers")
    assert not publish(name, 3).duplicate


def test_after_a_revoke_of_the_pending_one_the_next_trigger_is_pending(it):
    """What was revoked takes its merged triggers along; what is triggered after that runs."""
    name, publish = "revoked", it.task("finished").delay
    publish(name, 0, "gate")
    it.started(name)
    revoked = publish(name, 1)
    assert publish(name, 2).id == revoked.id
    revoked.revoke()
    eventually(lambda: not it.keys(f"redlock:next:{name}"), "end of its marker")
    results = [publish(name, number) for number in (3, 4)]
    assert {r.id for r in results} == {results[0].id} != {revoked.id}
    it.open(name, 0)
    assert results[1].get(timeout=100) == [4, 1]
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=100)
    assert it.numbers(name) == [0, 4]
    eventually(lambda: is_over(it, name), "end of the markers")


# -- kills -------------------------------------------------------------------------------


@pytest.mark.parametrize("whom", ["child", "worker"])
@pytest.mark.parametrize("task", ["finished", "started", "finished late", "started late"])
def test_when_the_holder_is_killed_the_pending_one_runs(lossless, task, whom):
    it, name, is_late = lossless, f"{task} {whom}", task.endswith("late")
    publish = it.task(task).apply_async
    first = publish((name, 0, "gate"), queue=name)
    assert publish((name, 1, "gate"), queue=name).id == first.id
    doomed = it.worker(name=name.replace(" ", "-"), concurrency=1, args=["-Q", name])
    (holder,) = it.started(name)
    results = [publish((name, number)) for number in (2, 3)]
    assert {r.id for r in results} == {results[0].id} != {first.id}

    if whom == "child":
        it.wait_until_begun(holder.pid)
        os.kill(holder.pid, signal.SIGKILL)
    else:
        doomed.kill(children=False)
        it.app.control.add_consumer(name, reply=True)
    if task == "finished late":  # the pending one has to wait until it has run
        it.started(name, 2)
        assert it.numbers(name) == [1, 1]
        it.open(name, 1)
    elif is_late:  # the two may run in any order; a wrong one is not to wait for ever
        it.open(name, 1)
        it.open(name, 0)
    assert results[1].get(timeout=100)[0] == 3
    if is_late:
        assert first.get(timeout=100)[0] == 1
        assert sorted(it.numbers(name)) == [1, 1, 3]
    else:
        assert it.numbers(name) == [1, 3]
        if whom == "child":
            with pytest.raises(WorkerLostError):
                first.get(timeout=100)
    eventually(lambda: is_over(it, name), "end of the markers")


# -- the soak ----------------------------------------------------------------------------


class Soak:
    def __init__(self, it, rng):
        self.it, self.rng = it, rng
        self.enough = it.events.with_name("enough")  # until it is there they publish on
        self.children = self.workers = 0

    def kill_child(self):
        worker = self.rng.choice([w for w in self.it.workers if w.alive])
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        if children:
            with contextlib.suppress(ProcessLookupError):  # it has just died of another cause
                os.kill(int(self.rng.choice(children)), signal.SIGKILL)
                self.children += 1

    def kill_worker(self):
        self.rng.choice([w for w in self.it.workers if w.alive]).kill(children=False)
        self.workers += 1
        self.it.worker(concurrency=4)

    def publishing(self, triggers, names):
        paths = [str(SUPPORT), os.environ.get("PYTHONPATH")]
        env = {
            "EVENTS": str(self.it.events),
            "ENOUGH": str(self.enough),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        conf, share = json.dumps(self.it.conf), triggers // PUBLISHERS
        processes = []
        try:
            for n in range(PUBLISHERS):
                words = [conf, self.rng.random(), share, names, n]
                command = [sys.executable, __file__, *map(str, words)]
                processes.append(subprocess.Popen(command, env={**os.environ, **env}))
            while any(process.poll() is None for process in processes):
                yield
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert [process.returncode for process in processes] == [0] * PUBLISHERS


def trigger(app, events, name, number, seconds):
    since = now()
    result = app.tasks["soak"].delay(name, number, seconds)
    record(events, "trigger", lock=name, number=number, since=since, duplicate=result.duplicate)


def publisher(conf, seed, triggers, names, number):
    app = make_app(__file__, json.loads(conf), is_worker=False)
    rng, events = random.Random(seed), os.environ["EVENTS"]
    for n in itertools.count():
        if n >= int(triggers) and Path(os.environ["ENOUGH"]).exists():
            break
        name, mine = f"soak {rng.randrange(int(names))}", f"{number}.{n}"
        trigger(app, events, name, mine, rng.uniform(0.005, 0.05))
        time.sleep(rng.uniform(0.0, PACE))  # so that kills strike in the middle of all this
    plugin_for(app).locks.close()
    app.close()


def last_triggers(events):
    """Return of each name the triggers of which any may be the last: none began after their end."""
    triggers = [event for event in events if event["kind"] == "trigger"]
    found = {}
    for name in {trigger["lock"] for trigger in triggers}:
        of_name = [trigger for trigger in triggers if trigger["lock"] == name]
        latest = max(trigger["since"] for trigger in of_name)
        found[name] = [trigger for trigger in of_name if trigger["at"] >= latest]
    return found


def lost(events):
    ran = {(e["name"], e["number"]): e["at"] for e in events if e["kind"] == "start"}
    return {
        name: last
        for name, last in last_triggers(events).items()
        if not any(ran.get((name, t["number"]), 0.0) >= t["since"] for t in last)
    }


@pytest.mark.timeout(800)
@pytest.mark.parametrize("broker", ["rabbitmq", "redis"])
def test_whatever_is_killed_the_last_trigger_of_each_name_runs(request, broker, tmp_path):
    """Never two at once, nothing lost, nothing left; Redis drops messages of a killed worker."""
    rng = random.Random(SEED)
    print(f"REDLOCK_SPREE_SEED={SEED}")  # noqa: T201  pytest shows it if the test fails
    rabbit = request.getfixturevalue("rabbit") if broker == "rabbitmq" else None
    triggers, conf = (TRIGGERS, {"broker_url": rabbit.url}) if rabbit else (TRIGGERS // 4, {})
    with named_stage(tmp_path, task_default_queue="soak", task_track_started=False, **conf) as it:
        it.start_workers([{"name": f"n{n}", "concurrency": 4} for n in range(2)])
        soak = Soak(it, rng)
        for n, _ in enumerate(soak.publishing(triggers, NAMES)):
            time.sleep(rng.uniform(0.3, 1.0))  # kills are spread over the time of the triggers
            soak.kill_worker() if rabbit and n % 5 == 1 else soak.kill_child()
            it.no_key_is_for_ever()
            if soak.children >= 3 and soak.workers >= (2 if rabbit else 0):
                soak.enough.touch()
        eventually(lambda: is_over(it, "*"), "end of all markers", timeout=200, every=0.2)
        eventually(lambda: is_quiet(it, rabbit), "quiet", timeout=200, every=0.5)
        events = read(it.events)
        assert len([e for e in events if e["kind"] == "trigger"]) >= triggers // 4 * 4
        assert overlaps(events) == []
        assert lost(events) == {}
        assert is_over(it, "*")
        it.no_key_is_for_ever()


def is_quiet(it, rabbit):
    if rabbit:
        return "soak" not in rabbit.queues()
    with redis.Redis.from_url(it.broker.url) as client:
        return not client.exists("soak", "unacked")


@pytest.mark.parametrize("is_blind", [False, True])
def test_the_check_of_the_soak_sees_a_worker_that_forgets(tmp_path, is_blind):
    """Twin: where a start does not read what was merged, the last triggers are lost."""
    with named_stage(tmp_path, task_default_queue="soak") as it:
        soak = Soak(it, random.Random(SEED))
        soak.enough.touch()
        for _ in soak.publishing(40, 4):
            time.sleep(0.01)  # they end by themselves, and nobody is there to run anything
        # One that was long under way may be the first and the last of its name: this is the last.
        for n in range(4):
            trigger(it.app, it.events, f"soak {n}", "last", 0.02)
        it.worker(env={"BLIND": "1"} if is_blind else {})
        eventually(lambda: is_over(it, "*"), "end of all markers", timeout=100)
        events = read(it.events)
        assert len([e for e in events if e["kind"] == "start"]) == len(last_triggers(events)) == 4
        assert len(lost(events)) == (4 if is_blind else 0)


if __name__ == "__main__":
    publisher(*sys.argv[1:])
