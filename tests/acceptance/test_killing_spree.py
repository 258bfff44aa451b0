"""
A stream of tasks, and somebody who kills workers and their children at random.

Every task has to reach its own result, no two bodies of one name may run at once, fences
grow, and nothing stays behind.

With Redis as the broker a worker that is killed may take a message along (`support.broker_record`).
RabbitMQ loses nothing, so there nothing is excused.

Messages that nobody acknowledged are brought back by a worker that has taken kombu's own lock for
that (``unacked_mutex``). Killed with it in its hand, it keeps all others from bringing any back
until ``unacked_mutex_expire``: five minutes, unless it is set, as it is here.

The length is a parameter:

    REDLOCK_SPREE_KILLS=200 make test-all \
        ARGS="tests/acceptance/test_killing_spree.py --timeout 1800"

kills 200 times among 2,000 tasks on 100 names; the suite kills 15 times.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
import redis
from celery import Task

from celery_redlock import RedlockTask, Reschedule, current_lock
from celery_redlock.lock.waiting.waiting import HEARD_FOR
from support.broker_record import BrokerRecord
from support.events import bodies, body, overlaps, read, record
from support.redelivery import redelivered_after
from support.stage import stage
from support.stored import clients_of
from support.waiting import eventually

pytestmark = pytest.mark.long

KILLS = int(os.environ.get("REDLOCK_SPREE_KILLS", "15"))
SEED = int(os.environ.get("REDLOCK_SPREE_SEED", str(random.randrange(10**6))))
WORKERS = 3
#: So long that no stall costs a body its lock; that of a killed one takes so long to end [s].
TTL = 10.0
DEDUP_TTL = 600.0
#: Longest life of each kind of key [s].
LONGEST = {
    "lock": TTL,
    "waiters": HEARD_FOR,
    "line": HEARD_FOR,
    "marker": DEDUP_TTL,
    "fence": 3600.0,
    "node": 30 * 24 * 3600.0,
    "journal": 7 * 24 * 3600.0,
    "tally": 7 * 24 * 3600.0,
}


def declare(app):
    options = {"shared": False, "acks_late": True, "reject_on_worker_lost": True}

    def work(name, number, seconds):
        events = os.environ["EVENTS"]
        with contextlib.suppress(RuntimeError):
            record(events, "fence", name=name, fence=current_lock().fence)
        with body(events, name, number=number) as mine:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                record(events, "tick", name=name, body=mine)
                time.sleep(0.005)
        return number

    ours = {"lock_key": "{name}", "lock_wait": 0.5, "on_conflict": Reschedule(1.0, 2.0)}
    app.task(
        name="locked", base=RedlockTask, on_unavailable=Reschedule(1.0, 2.0), **ours, **options
    )(work)
    app.task(name="plain", base=Task, **options)(work)


class Killer:
    def __init__(self, it, rng):
        self._it, self._rng = it, rng
        self._started = 0
        self.kills, self.workers, self.killed = 0, 0, set()

    def start(self):
        self._started += 1
        return self._it.worker(name=f"n{self._started}", concurrency=4)

    def kill(self):
        worker = self._rng.choice([w for w in self._it.workers if w.alive])
        children = children_of(worker.pid)
        if self._rng.random() < 0.8:
            if children:
                self._kill(self._rng.choice(children))
        else:
            self.killed |= set(children)
            worker.kill(children=False)
            self.workers += 1
            self.start()
        self.kills += 1

    def _kill(self, pid):
        self.killed.add(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children_of(pid):
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


@pytest.fixture
def spree(request, tmp_path):
    conf = {
        "redlock_ttl": TTL,
        "redlock_max_ttl": TTL,
        "redlock_dedup_ttl": DEDUP_TTL,
        "redlock_node_timeout": 1.0,
        **redelivered_after(3),
        "task_track_started": False,
    }
    if getattr(request, "param", "redis") == "rabbitmq":
        conf["broker_url"] = request.getfixturevalue("rabbit").url
        conf["broker_transport_options"] = {}
    with stage(__file__, tmp_path, **conf) as it:
        rng = random.Random(SEED)
        killer, told = Killer(it, rng), BrokerRecord(it.broker.url)
        starts = [threading.Thread(target=killer.start) for _ in range(WORKERS)]
        for start in starts:
            start.start()
        for start in starts:
            start.join()
        print(f"REDLOCK_SPREE_SEED={SEED}")  # noqa: T201  pytest shows it if the test fails
        yield it, killer, rng, told
        told.close()


def run(it, killer, rng, task, kills, longest=0.15):
    """
    Publish ten tasks for each kill while killing; returns the results by their numbers.

    Bodies last up to *longest* [s].
    """
    names = [f"{task} {n}" for n in range(max(kills // 2, 5))]
    results = {}
    for number in range(10 * kills):
        name = rng.choice(names)
        results[number] = it.task(task).delay(name, number, rng.uniform(0.01, longest))
        if number % 10 == 9:
            time.sleep(rng.uniform(0.05, 0.3))
            killer.kill()
    return results


@pytest.mark.parametrize("spree", ["redis", "rabbitmq"], indirect=True)
def test_whatever_is_killed_every_task_runs_to_its_end_and_alone(spree):
    it, killer, rng, told = spree
    results = run(it, killer, rng, "locked", KILLS)
    pending = dict(results)

    def all_done():
        for number in [n for n, r in pending.items() if it.meta(r.id).get("status") == "SUCCESS"]:
            del pending[number]
        return all(told.was_dropped(r.id) for r in pending.values()) and not messages(it)

    try:
        eventually(all_done, "success of every task", timeout=200 + KILLS, every=0.2)
    except AssertionError as late:
        raise AssertionError(story(it, pending)) from late
    assert killer.kills == KILLS
    assert len(pending) <= killer.workers, "a worker that is killed has one message in its hand"
    print(f"{len(pending)} of {len(results)} were dropped by the broker's client")  # noqa: T201
    done = {number: r for number, r in results.items() if number not in pending}
    assert all(it.meta(r.id)["result"] == number for number, r in done.items())

    events = [e for e in read(it.events) if e.get("name", "").startswith("locked")]
    assert overlaps(events) == []
    check_fences(events)
    check_reruns(events, killer.killed)
    check_keys(it)
    eventually(lambda: not it.keys("redlock:lock:*"), "end of every lock", timeout=60)


def messages(it):
    with redis.Redis.from_url(it.broker.url) as client:
        return client.lrange("celery", 0, -1) + client.hvals("unacked")


def story(it, pending):
    log, lines = it.log().splitlines(), []
    for number, result in pending.items():
        lines.append(
            f"task {number} [{result.id}]: {it.meta(result.id)}, markers "
            f"{it.keys(f'redlock:marker:{result.id}*')}"
        )
        lines += [line for line in log if result.id in line]
    lines.append(f"in Redis: {messages(it)}")
    return "\n".join(lines)


def check_fences(events):
    fences = defaultdict(list)
    for event in events:
        if event["kind"] == "fence":
            fences[event["name"]].append(event["fence"])
    for name, seen in fences.items():
        assert seen == sorted(set(seen)), name


def check_reruns(events, killed):
    starts = {e["body"]: e["number"] for e in events if e["kind"] == "start"}
    finished = defaultdict(list)
    for ran in sorted((b for b in bodies(events) if b.finished), key=lambda b: b.started):
        finished[starts[ran.body]].append(ran)
    for number, runs in finished.items():
        assert all(ran.pid in killed for ran in runs[:-1]), f"task {number} ran twice: {runs}"


def check_keys(it):
    for client in clients_of(it.nodes):
        for key in client.scan_iter("redlock:*"):
            left = client.pttl(key)
            kind = key.split(b":")[1].decode()
            assert left == -2 or 0 <= left <= LONGEST[kind] * 1000, (key, left)


def test_without_locks_the_same_bodies_do_meet(spree):
    """Twin: plain tasks in the same spree overlap, so the record can show it."""
    it, killer, rng, _ = spree
    results = run(it, killer, rng, "plain", 5, longest=1.0)
    eventually(
        lambda: (
            sum(it.meta(r.id).get("status") == "SUCCESS" for r in results.values())
            >= len(results) - killer.workers
        ),
        "success of all but those that were dropped",
        timeout=200,
        every=0.2,
    )
    assert overlaps(e for e in read(it.events) if e.get("name", "").startswith("plain"))
