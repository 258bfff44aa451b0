"""
``debounce`` against real workers: of each burst of calls the last one runs, and in time.

Bursts of calls with random pauses, two workers, and one of them is killed. The broker is RabbitMQ,
which delivers again at once what a killed worker had: with Redis it takes a visibility timeout.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from celery import group
from celery.exceptions import TaskRevokedError

from celery_redlock import RedlockTask
from celery_redlock.lock.records import TOKEN_LENGTH
from celery_redlock.task.execution import begin
from support.events import body, now, read
from support.stage import LASTING, stage
from support.stalls import Stalls
from support.stored import clients_of
from support.waiting import eventually

pytestmark = pytest.mark.long

CALLS = int(os.environ.get("REDLOCK_SPREE_CALLS", "500"))
SEED = int(os.environ.get("REDLOCK_SPREE_SEED", str(random.randrange(10**6))))
NAMES = 10
#: The options [s]; Celery and RabbitMQ take whole seconds.
DEBOUNCE, LONGEST = 2, 6
#: How late a run may come [s], besides what this process sees the machine be late: one second of
#: rounding, and a worker that stands still by itself.
LATE = 5.0
#: A debounce in which a test gets its calls published, however slow the machine is [s].
PATIENT = 5


def index(self, name, number):
    with body(os.environ["EVENTS"], name, number=number, id=self.request.id):
        time.sleep(0.05)  # a short body
    return number


def lasting(self, name, number):
    with body(os.environ["EVENTS"], name, number=number, pid=os.getpid()):
        if number == 0 and not self.request.delivery_info["redelivered"]:
            time.sleep(600)  # until it is killed
    return number


def declare(app):
    if "STAGE" in os.environ and "BLIND" in os.environ:
        begin.superseded_by = lambda _claim: None
    ours = {"base": RedlockTask, "bind": True, "shared": False}
    ours |= {"acks_late": True, "reject_on_worker_lost": True, "on_conflict": "queue"}
    for task, work, burst in (
        ("index", index, {"debounce": DEBOUNCE, "debounce_max": LONGEST}),
        ("patient", index, {"debounce": PATIENT, "debounce_max": 600}),
        ("lasting", lasting, {"debounce": 1}),
    ):
        app.task(name=task, lock_key=f"{task}:{{name}}", **burst, **ours)(work)


@pytest.fixture(scope="module")
def it(rabbit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("debounce")
    with stage(__file__, folder, nodes=3, broker_url=rabbit.url, **LASTING) as it:
        it.runs = lambda name: [e["number"] for e in read(it.events, "start") if e["name"] == name]
        it.worker(concurrency=4)
        yield it
        it.no_key_is_for_ever()


# -- bursts ----------------------------------------------------------------------------------


class Made(NamedTuple):
    """One call: when it began and was made [s], and its result."""

    number: int
    began: float
    made: float
    result: Any


class Burst:
    """
    Calls of which each came so soon after the one before that it belongs to them.

    Attributes:
        is_clear: Whether no pause within was nearly long enough to end it.
    """

    def __init__(self, *calls):
        self.calls, self.is_clear = list(calls), True

    @property
    def length(self):
        return self.calls[-1].made - self.calls[0].began


def bursts_in(calls):
    """Return bursts by the times of *calls*: a stalled publisher may have made more of them."""
    bursts = [Burst(calls[0])]
    for before, call in pairwise(calls):
        longest, shortest = call.made - before.began, call.began - before.made
        if shortest > DEBOUNCE + 1:  # rounded up
            bursts.append(Burst())
        bursts[-1].calls.append(call)
        if longest > DEBOUNCE / 2 and shortest <= DEBOUNCE + 1:
            bursts[-1].is_clear = False
    return bursts


def call_in_bursts(task, name, count, seed, made):
    """Call *task* in bursts of about a second or two, and once for longer than it may wait."""
    chance, left = random.Random(seed), count
    while left:
        in_all = chance.randint(2, 6) if left < count else 20
        for _ in range(min(in_all, left)):
            began, number = now(), count - left
            result = task.delay(name, number)
            made[name].append(Made(number, began, now(), result))
            left -= 1
            # The long one lasts for more than LONGEST + LATE: without debounce_max it were late.
            time.sleep(chance.uniform(0.0, 0.4) if in_all < 20 else chance.uniform(0.4, 0.8))
        time.sleep(chance.uniform(DEBOUNCE + 2, DEBOUNCE + 4))


def kill_between_bodies(it, worker):
    """
    Kill *worker* with its children while none of them holds a lock.

    It would stand to the end of its lease, and what waits for it would come late for that reason.
    """

    def is_its_child(pid):
        with suppress(ProcessLookupError):
            return os.getpgid(pid) == worker.pid
        return False

    def is_stopped_without_a_lock():
        os.killpg(worker.pid, signal.SIGSTOP)
        time.sleep(0.1)  # what it has sent is with the nodes by then
        stored = [c.get(k) for c in clients_of(it.nodes) for k in c.keys("redlock:lock:index:*")]
        if not any(is_its_child(json.loads(s[TOKEN_LENGTH:])["pid"]) for s in stored if s):
            return True
        os.killpg(worker.pid, signal.SIGCONT)
        return False

    eventually(is_stopped_without_a_lock, "moment without a lock", timeout=100, every=0.1)
    worker.kill()


def test_each_burst_runs_once_with_its_newest_arguments_and_in_time(it):
    doomed = it.worker(concurrency=4)
    chance, made = random.Random(SEED), {f"spree {n}": [] for n in range(NAMES)}
    threads = [
        threading.Thread(
            target=call_in_bursts,
            args=(it.task("index"), name, CALLS // NAMES, chance.random(), made),
        )
        for name in made
    ]
    with Stalls() as stalls:
        for thread in threads:
            thread.start()
        time.sleep(10)  # amid the bursts
        kill_between_bodies(it, doomed)
        for thread in threads:
            thread.join()
        results = {call.result.id: call for calls in made.values() for call in calls}
        values = {key: call.result.get(timeout=100) for key, call in results.items()}
    starts = read(it.events, "start")
    clear = 0
    for name, calls in made.items():
        runs = [e for e in starts if e["name"] == name]
        ran = {e["number"] for e in runs}
        for burst in bursts_in(calls):
            numbers = [call.number for call in burst.calls]
            of_burst = sorted(ran.intersection(numbers))
            assert of_burst[-1] == numbers[-1], (SEED, name, numbers, of_burst)
            if burst.is_clear and burst.length < LONGEST - 1:
                clear += 1
                assert of_burst == numbers[-1:], (SEED, name, numbers, of_burst)
            elif burst.is_clear:
                assert len(of_burst) <= burst.length / (LONGEST - DEBOUNCE) + 1, (SEED, of_burst)
        for call in calls:
            first = min(e["at"] for e in runs if e["number"] >= call.number)
            allowed = LONGEST + LATE + stalls.between(call.made, first)
            assert first - call.made <= allowed, (SEED, name, call, stalls.found)
    assert clear > CALLS / 20
    skipped = {key: value for key, value in values.items() if isinstance(value, dict)}
    assert len(skipped) > CALLS / 2
    for value in skipped.values():
        assert value["skipped"] == "debounced"
        newest, steps = value["holder"]["task_id"], 0
        while newest in skipped and steps < CALLS:  # whoever joins the newest ends at a run
            newest, steps = skipped[newest]["holder"]["task_id"], steps + 1
        assert values[newest] == results[newest].number


def test_without_a_claim_every_call_runs(it):
    """The twin: messages that nobody supersedes."""
    it.app.control.cancel_consumer("celery", destination=["w1@localhost"], reply=True)
    blind = it.worker(concurrency=4, env={"BLIND": "yes"}, name="blind")
    try:
        results = [it.task("patient").delay("blind", number) for number in range(5)]
        assert [result.get(timeout=100) for result in results] == [*range(5)]
    finally:
        blind.stop()
        it.app.control.add_consumer("celery", destination=["w1@localhost"], reply=True)


# -- single rules ----------------------------------------------------------------------------


def test_a_call_that_is_killed_in_its_body_runs_again(it):
    """Though a newer burst has begun meanwhile: what it was called for is not lost."""
    name = "killed"
    first = it.task("lasting").delay(name, 0)
    (run,) = it.started(name)
    it.wait_until_begun(run.pid)
    second = it.task("lasting").apply_async((name, 1), debounce=15)
    os.kill(run.pid, signal.SIGKILL)
    assert first.get(timeout=100) == 0
    assert second.get(timeout=100) == 1
    assert it.runs(name) == [0, 0, 1]


def test_a_call_that_is_revoked_ends_alone_and_the_next_one_runs(it):
    name, publish = "revoked", it.task("patient").delay
    first, newest = publish(name, 0), publish(name, 1)
    newest.revoke()
    assert first.get(timeout=100)["holder"]["task_id"] == newest.id
    with pytest.raises(TaskRevokedError):
        newest.get(timeout=100)
    assert publish(name, 2).get(timeout=100) == 2
    assert it.runs(name) == [2]


def test_members_of_a_group_all_run(it):
    name, task = "group", it.task("patient")
    results = group(task.si(name, number) for number in range(3)).apply_async()
    assert results.get(timeout=100) == [0, 1, 2]


def test_a_task_that_is_not_debounced_asks_the_nodes_for_nothing(it):
    """Of a call that says so, no node stores anything but its lock."""
    name = "plain"
    results = [it.task("patient").apply_async((name, n), debounce=None) for n in range(3)]
    assert [result.get(timeout=100) for result in results] == [0, 1, 2]
    assert it.keys(f"*:debounce:patient:{name}") == set()
    it.task("patient").apply_async((name, 3), debounce=1).get(timeout=100)
    assert it.keys(f"*:debounce:patient:{name}") == {f"redlock:debounce:patient:{name}"}


def test_the_log_and_the_journal_say_who_came_after(it):
    name, publish = "logged", it.task("patient").delay
    first, newest = publish(name, 0), publish(name, 1)
    assert first.get(timeout=100)["skipped"] == "debounced"
    it.wait_for_log(rf"Skipped task patient\[{first.id}\]: a newer call came: .*{newest.id}")
    assert newest.get(timeout=100) == 1
