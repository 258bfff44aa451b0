"""
Tasks that queue behind the holder of their lock, with real workers.

A task that was refused comes by itself after ten minutes here; all of this takes less, so what runs
was woken.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError

from celery_redlock import LockTaken, Queue, RedlockTask
from celery_redlock.lock.waiting.room import Room
from celery_redlock.task.messages import waiting
from celery_redlock.task.messages.envelope import Envelope, fresh_publish_id
from celery_redlock.task.worker import waiting_room
from support.events import body, overlaps, read
from support.stage import LASTING, stage
from support.stored import clients_of
from support.waiting import eventually

pytestmark = pytest.mark.in_order  # the scenes kill children and workers

#: Of a task whose worker is killed: the end of its lease is waited for.
TTL = 8.0
#: Longest that wake-ups may take on a loaded machine [s]; nobody comes by itself so soon.
SOON = 100.0
#: A lease of which two thirds are more than that.
LONG = 600.0
#: How many tasks wait behind one lock.
MANY = 30


def gate_of(lock):
    return Path(os.environ["EVENTS"]).with_name(f"open {lock}")


def declare(app):
    if "STAGE" in os.environ:  # in a worker, and not in this process, where other tests are run
        # Not after 54 s: that may pass on a machine that is slow.
        waiting.FIRST_BY_ITSELF = waiting.LONGEST_BY_ITSELF = 600
    if "DEAF" in os.environ:
        Room.hear = Room.free = lambda *_: None
    if "COUNTED" in os.environ:
        waiting_room.UNCOUNTED = 0

    def nap(self, lock, number=0, gated=False):  # noqa: FBT002  as a message carries it
        with body(os.environ["EVENTS"], lock, number=number, id=self.request.id):
            ends = time.monotonic() + 250
            while gated and not gate_of(lock).exists() and time.monotonic() < ends:
                time.sleep(0.02)
            time.sleep(0.02)  # a short body
        return number

    def locked(name, run=nap, **options):
        options = {"on_conflict": "queue", "lock_key": "{lock}", **options}
        app.task(name=name, base=RedlockTask, bind=True, shared=False, **options)(run)

    locked("nap")
    locked("patient", lock_wait=250)
    locked("doomed", lock_ttl=TTL)
    locked("late", acks_late=True)
    locked("lost", acks_late=True, reject_on_worker_lost=True)
    locked("full", on_conflict=Queue(max_waiting=2))
    locked("full_skip", on_conflict=Queue(max_waiting=2, then="skip"))
    locked("once", unique_until="started", on_duplicate="join")
    locked("long", lock_ttl=LONG, on_conflict="fail")
    again = {"unique_until": "finished", "on_duplicate": "rerun"}
    locked("again", lock_ttl=LONG, on_conflict="fail", **again)

    @app.task(
        name="stubborn",
        base=RedlockTask,
        bind=True,
        shared=False,
        lock_key="{lock}",
        on_conflict="queue",
        max_retries=1,
    )
    def stubborn(self, lock):
        with body(os.environ["EVENTS"], lock, retries=self.request.retries):
            if not self.request.retries:
                raise self.retry(countdown=2)
        return self.request.retries

    @app.task(name="plain", shared=False)
    def plain(value=None):
        return value


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    folder = tmp_path_factory.mktemp("queue")
    with stage(
        __file__, folder, **{**LASTING, "redlock_max_ttl": LONG}, worker_eta_task_limit=10
    ) as it:
        it.numbers = itertools.count(1)
        yield it


class Crew:
    def __init__(self, it, queue):
        self.it = it
        self.queue = queue
        self.workers = []

    def worker(self, queue=None, **options):
        options = {"concurrency": 2, "args": ["-Q", queue or self.queue], **options}
        self.workers.append(self.it.worker(**options))
        return self.workers[-1]

    def publish(self, name, *args, **options):
        return self.it.task(name).apply_async(args, **{"queue": self.queue, **options})

    def log(self):
        return "\n".join(worker.log() for worker in self.workers if worker.log_path.exists())

    def queued(self, name, *args, **options):
        result = self.publish(name, *args, **options)
        eventually(
            lambda: f"Queued task {name}[{result.id}]" in self.log(),
            f"{name}{args} in the queue",
            timeout=SOON,
        )
        return result

    def in_line(self, lock, count=MANY, name="nap"):
        return [self.queued(name, lock, number) for number in range(count)]

    def numbers(self, lock):
        starts = read(self.it.events, "start")
        return [start.get("number") for start in starts if start["name"] == lock]

    def waiting(self, lock):
        return [client.zcard(f"redlock:line:{lock}") for client in clients_of(self.it.nodes)]


@pytest.fixture
def crew(it):
    number = next(it.numbers)
    crew = Crew(it, f"queue-{number}")
    yield crew
    complaints = [word for word in ("cannot be woken", "may be waited for") if word in crew.log()]
    for worker in crew.workers:
        worker.stop()
    assert not complaints


def all_of(results, timeout=SOON):
    ends = time.monotonic() + timeout
    return [result.get(timeout=max(0.1, ends - time.monotonic())) for result in results]


def alone(it, lock):
    return not [pair for pair in overlaps(read(it.events)) if pair[0].name == lock]


# -- in line -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "name"),
    [
        *itertools.product(["prefork", "threads", "gevent", "solo"], ["nap", "late"]),
        ("eventlet", "late"),
    ],
)
def test_all_who_wait_run_one_by_one_in_the_order_of_their_refusal(it, crew, pool, name):
    """And long before they would come by themselves: each release wakes the next one."""
    lock = f"line, {pool}, {name}"
    # With Celery events a greenlet lets others run at moments at which none does without them.
    events = ["-E"] if pool == "gevent" else []
    crew.worker(pool=pool, args=["-Q", crew.queue, *events])
    count = MANY if (pool, name) == ("prefork", "nap") else 10
    with it.held(lock):
        results = crew.in_line(lock, count, name)
        assert it.bodies(lock) == []
    assert all_of(results) == list(range(count))
    numbers = crew.numbers(lock)
    assert sorted(numbers) == list(range(count))
    assert alone(it, lock)
    # Best effort: a wake-up that a loaded machine loses lets the next one pass.
    assert sum(b < a for a, b in itertools.pairwise(numbers)) <= 1, numbers
    eventually(lambda: crew.waiting(lock) == [0] * 5, "end of the line", timeout=SOON)
    assert not it.keys(f"redlock:waiters:{lock}")
    # None where a slow worker has not answered in time.
    asked = it.app.control.inspect(timeout=1).scheduled
    assert not any(eventually(asked, "answer of the worker", timeout=SOON).values())


def test_twin_a_worker_that_hears_nothing_runs_none_of_them(it, crew):
    """And does not learn that the lock is free: they wait until they come by themselves."""
    crew.worker(env={"DEAF": "1"})
    with it.held("deaf"):
        crew.in_line("deaf", 5)
    time.sleep(6)  # whoever heard would run in that time
    assert it.bodies("deaf") == []


def test_several_workers_wake_each_other(it, crew):
    crew.worker(pool="threads")
    crew.worker(pool="prefork")
    orders = []
    for lock in ("all over", "once more", "for the last time"):  # a machine that stands still once
        with it.held(lock):
            results = crew.in_line(lock, 12)
        assert all_of(results) == list(range(12))
        assert alone(it, lock)
        numbers = crew.numbers(lock)
        orders.append(sum(b < a for a, b in itertools.combinations(numbers, 2)))
        # Nothing is kept for who is told: of the 66 pairs few run in another order.
        if orders[-1] <= 6:
            break
    assert min(orders) <= 6, orders


def test_those_who_wait_are_in_nobody_s_way(it, crew):
    """They count for neither the prefetch nor ``worker_eta_task_limit``, which is 10 here."""
    crew.worker()
    with it.held("beside"):
        waiting = crew.in_line("beside")
        plain = [crew.publish("plain", number) for number in range(40)]
        assert all_of(plain) == list(range(40))
    assert all_of(waiting) == list(range(MANY))


def test_twin_tasks_that_count_for_the_limit_hold_up_all_others(it, crew):
    """As any tasks do that are to come later."""
    crew.worker(env={"COUNTED": "1"})
    with it.held("counted"):
        for number in range(MANY):
            crew.publish("nap", "counted", number)
        eventually(lambda: crew.log().count("Queued task") >= 10, "a full queue", timeout=SOON)
        time.sleep(2)  # a worker that is not held up would take them within that
        plain = [crew.publish("plain", number) for number in range(40)]
        time.sleep(4)  # as above
        assert not all(result.ready() for result in plain)


def test_a_worker_without_a_free_process_holds_up_nobody_elsewhere(it, crew):
    busy, lock = crew.worker(concurrency=1), "no process"
    with it.held(lock):
        first = crew.queued("nap", lock, 1)
        crew.publish("nap", "in the way", 0, True)
        it.started("in the way")
        crew.worker(queue="queue-free")
        second = crew.queued("nap", lock, 2, queue="queue-free")
        eventually(lambda: crew.waiting(lock) == [2] * 5, "both who wait", timeout=SOON)
    assert second.get(timeout=SOON) == 2
    assert crew.numbers(lock) == [2]
    gate_of_stage(it, "in the way").touch()
    assert first.get(timeout=SOON) == 1
    assert busy.log().count("Queued task nap") == 1


# -- how the lock becomes free -----------------------------------------------------------


def test_a_child_that_is_killed_wakes_the_next(it, crew):
    """Its parent releases for it, and that release wakes, too."""
    crew.worker()
    crew.publish("nap", "killed child", 7, True)
    (holder,) = it.started("killed child")
    it.wait_until_begun(holder.pid)
    waiting = crew.queued("nap", "killed child", 8)
    os.kill(holder.pid, signal.SIGKILL)
    assert waiting.get(timeout=SOON) == 8


def test_a_child_that_is_killed_while_it_waits_waits_no_more(it, crew):
    """Its parent says so; the nodes would count it for minutes."""
    crew.worker()
    lock = "killed while it waits"
    with it.held(lock), redis.Redis.from_url(it.nodes[0].url) as client:
        crew.publish("patient", lock, 7)
        eventually(lambda: it.keys(f"redlock:waiters:{lock}"), "somebody who waits", timeout=SOON)
        (noted,) = eventually(lambda: client.hvals(f"redlock:waiters:{lock}"), "what is noted")
        pid = json.loads(noted[noted.index(b"{") :])["pid"]
        it.wait_until_begun(pid)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not it.keys(f"redlock:waiters:{lock}"), "end of that", timeout=SOON)


def test_a_lease_that_lapses_wakes_the_next(it, crew):
    """Nobody releases for a worker that is killed with its children; others look every second."""
    holding = crew.worker(queue="queue-holding")
    crew.worker()
    crew.publish("doomed", "killed worker", 7, True, queue="queue-holding")
    it.started("killed worker")
    waiting = crew.queued("nap", "killed worker", 8)
    holding.kill()
    assert waiting.get(timeout=SOON) == 8


def test_an_operator_s_release_wakes_the_next(it, crew):
    crew.worker()
    locks = it.locks()
    lease = locks.acquire("operator", ttl=locks.rules.max_ttl, wait=60.0)
    waiting = crew.queued("nap", "operator", 8)
    line = "-m celery -A support.stage redlock release operator --yes --token"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    environment["STAGE"] = json.dumps([__file__, it.conf])
    command = [sys.executable, *line.split(), lease.token[:8]]
    subprocess.run(command, check=True, env=environment, timeout=60)
    assert waiting.get(timeout=SOON) == 8
    locks.close()


# -- those who do not run -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_one_that_is_not_to_run_lets_the_next_pass(it, crew, how):
    """It leaves the line as soon as that is known, so nobody waits for it."""
    crew.worker()
    lock = f"the first has {how}"
    with it.held(lock):
        # So long that both wait by then, however slow the machine is.
        first = crew.queued("nap", lock, 1, **({"expires": 30} if how == "expired" else {}))
        second = crew.queued("nap", lock, 2)
        eventually(lambda: crew.waiting(lock) == [2] * 5, "both who wait", timeout=SOON)
        if how == "revoked":
            it.app.control.revoke(first.id)
        eventually(lambda: crew.waiting(lock) == [1] * 5, "one who waits", timeout=SOON)
        with pytest.raises(TaskRevokedError):  # while the lock is held, and long before it comes
            first.get(timeout=SOON)
    assert second.get(timeout=SOON) == 2
    assert crew.numbers(lock) == [2]


def gate_of_stage(it, lock):
    """Return the gate of *lock*, as the workers know it."""
    return it.events.with_name(f"open {lock}")


@pytest.mark.parametrize("name", ["full", "full_skip"])
def test_no_more_wait_than_may(it, crew, name):
    crew.worker()
    lock = f"no more, {name}"
    with it.held(lock):
        waiting = [crew.queued(name, lock, number) for number in range(2)]
        third = crew.publish(name, lock, 2)
        if name == "full":
            with pytest.raises(LockTaken, match="no more"):
                third.get(timeout=SOON)
        else:
            assert third.get(timeout=SOON)["skipped"] == "conflict"
    assert all_of(waiting) == [0, 1]
    with it.held(lock):  # and room for others is there again
        again = [crew.queued(name, lock, number) for number in range(3, 5)]
    assert all_of(again) == [3, 4]


# -- what else a task may be ------------------------------------------------------------------


def test_parts_of_workflows_wait_like_all(it, crew):
    crew.worker()
    nap, plain = it.task("nap"), it.task("plain")
    with it.held("workflow"):
        parts = [nap.si("workflow", number).set(queue=crew.queue) for number in range(3)]
        last = plain.s().set(queue=crew.queue)
        results = [
            chord(parts, last).apply_async(queue=crew.queue),
            group(parts).apply_async(queue=crew.queue),
            chain(parts[2], last).apply_async(queue=crew.queue),
        ]
        eventually(lambda: crew.log().count("Queued task") >= 7, "all wait", timeout=SOON)
    assert all_of(results) == [[0, 1, 2], [0, 1, 2], 2]
    assert alone(it, "workflow")


def test_one_runs_and_one_waits(it, crew):
    crew.worker()
    lock = "one and one"
    first = crew.publish("once", lock, 1, True)
    it.started(lock)
    second = crew.queued("once", lock, 2)
    others = [crew.publish("once", lock, number) for number in (3, 4)]
    assert [other.id for other in others] == [second.id] * 2
    gate_of_stage(it, lock).touch()
    assert all_of([first, second, *others]) == [1, 2, 2, 2]
    time.sleep(1)  # a second run would come in that time
    assert crew.numbers(lock) == [1, 2]


def set_aside(crew, name, result):
    words = f"{name}[{result.id}] for "
    eventually(lambda: words in crew.log(), f"{name} that is set aside", timeout=SOON)


def test_the_next_run_is_woken_by_the_one_before_it(it, crew):
    """It would come by itself when the lease may have ended."""
    crew.worker()
    crew.publish("again", "next run", 1, True)
    it.started("next run")
    second = crew.publish("again", "next run", 2)
    set_aside(crew, "again", second)
    gate_of_stage(it, "next run").touch()
    assert second.get(timeout=SOON) == 2
    assert alone(it, "next run")


def test_a_copy_of_what_runs_ends_when_that_does(it, crew):
    """Woken by its release, it finds that it has finished."""
    crew.worker()
    message = {"task_id": "copied", "headers": Envelope(fresh_publish_id()).header("copied")}
    result = crew.publish("long", "copied", 1, True, **message)
    it.started("copied")
    crew.publish("long", "copied", 1, True, **message)
    set_aside(crew, "long", result)
    gate_of_stage(it, "copied").touch()
    assert result.get(timeout=SOON) == 1
    eventually(
        lambda: f"long[{result.id}] has finished before; this copy ends" in crew.log(),
        "the end of the copy",
        timeout=SOON,
    )
    assert crew.numbers("copied") == [1]


def test_a_retry_of_its_own_is_none_that_waits(it, crew):
    """It comes when the body said, and not when a lock is released."""
    crew.worker()
    with it.held("stubborn"):
        result = crew.queued("stubborn", "stubborn")
    assert result.get(timeout=SOON) == 1
    first, second = it.bodies("stubborn")
    assert second.started - first.started > 1.5


def test_a_message_that_was_delivered_twice_runs_once(it, crew):
    lock = "delivered twice"
    with it.held(lock), redis.Redis.from_url(it.broker.url) as client:
        result = crew.publish("late", lock, 1)
        (message,) = client.lrange(crew.queue, 0, -1)
        copy = json.loads(message)
        copy["properties"]["delivery_tag"] = "another"
        copy["headers"]["redelivered"] = True
        client.lpush(crew.queue, json.dumps(copy))
        crew.worker()
        eventually(lambda: crew.log().count("Queued task") >= 2, "both wait", timeout=SOON)
    assert result.get(timeout=SOON) == 1
    eventually(lambda: crew.waiting(lock) == [0] * 5, "end of the line", timeout=SOON)
    time.sleep(1)  # as above
    assert crew.numbers(lock) == [1]


# -- the worker that holds the messages -----------------------------------------------------------


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_those_who_wait_in_a_worker_that_stops_run_elsewhere(it, crew, pool):
    stopping = crew.worker(pool=pool)
    lock = f"stops, {pool}"
    with it.held(lock):
        results = crew.in_line(lock, 4)
        stopping.terminate()
        eventually(lambda: crew.waiting(lock) == [0] * 5, "end of the line", timeout=SOON)
        crew.worker(pool=pool)
        eventually(lambda: crew.waiting(lock) == [4] * 5, "both who wait again", timeout=SOON)
    assert all_of(results) == list(range(4))
    assert sorted(crew.numbers(lock)) == list(range(4))


def test_those_who_wait_survive_a_connection_that_breaks(it, crew):
    worker = crew.worker()
    lock = "breaks"
    with it.held(lock):
        results = crew.in_line(lock, 4)
        with redis.Redis.from_url(it.broker.url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        worker.wait_for_log(r"(?s)[Cc]onnection to broker lost.*")
        eventually(lambda: crew.waiting(lock) == [4] * 5, "both who wait again", timeout=SOON)
        plain = [crew.publish("plain", number) for number in range(20)]
        assert all_of(plain) == list(range(20))
    assert all_of(results) == list(range(4))
    assert sorted(crew.numbers(lock)) == list(range(4))
    assert alone(it, lock)
