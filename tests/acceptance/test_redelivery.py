"""
A message that Redis delivers again while its first delivery still runs, or after it.

The broker waits some seconds for an acknowledgement, bodies run until what they are to meet has
come, and two workers take it. What ran is what the bodies themselves recorded.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from celery import Task

from celery_redlock import RedlockTask, Reschedule, Retry
from support.events import body, now, overlaps, read
from support.redelivery import redelivered_after
from support.stage import stage
from support.waiting import eventually

READY = {"SUCCESS", "FAILURE", "REVOKED"}
#: Copies are set aside for a third of that, so a machine may stall for the rest of it.
VISIBILITY = 6.0
#: Not longer, as two tests wait for the end of a lease.
TTL = 12.0


def declare(app):
    def work(self, lock, is_gated=False):  # noqa: FBT002  as a message carries it
        first = not any(e["name"] == lock for e in read(os.environ["EVENTS"], "start"))
        with body(os.environ["EVENTS"], lock, host=self.request.hostname):
            wait_at_gate(lock, is_gated=is_gated and first)
        return "the real result" if first else "a result of another run"

    options = {"bind": True, "shared": False, "acks_late": True}
    ours = {"base": RedlockTask, "lock_key": "{lock}", **options}
    app.task(name="late", **ours)(work)
    app.task(name="late_no_dedup", dedup_ttl=0, **ours)(work)
    app.task(name="put_back", reject_on_worker_lost=True, **ours)(work)
    app.task(name="plain", base=Task, **options)(work)
    for policy in (Reschedule(base=1, cap=1), Retry(countdown=1)):
        app.task(name=type(policy).__name__, on_conflict=policy, max_retries=None, **ours)(work)

    def fail(self, lock, is_gated):
        wait_at_gate(lock, is_gated=is_gated)
        raise ValueError(lock)

    app.task(name="failing", **ours)(fail)
    app.task(name="failing_and_told_by_celery", **ours)(fail)
    app.on_after_finalize.connect(let_celery_tell, weak=False)
    broken = os.environ.get("BROKEN")
    if broken == "countdown":
        set_aside_for_long()
    if broken == "store":
        die_while_storing(app)
    if broken == "shutdown":
        end_while_storing(app)
    if broken == "identity":
        make_identities_up()


def wait_at_gate(lock, *, is_gated):
    while is_gated and not Path(os.environ["EVENTS"]).with_name(f"open {lock}").exists():
        time.sleep(0.02)


def let_celery_tell(sender, **_):
    """Let Celery store STARTED for every delivery of a task, as it does without us."""
    sender.tasks["failing_and_told_by_celery"].track_started = True


def set_aside_for_long():
    from celery_redlock.task.execution import refused, requeue

    requeue.longest_countdown = lambda app: math.inf
    publish = refused.requeue

    def publish_late(claim, later):
        is_put_off = later.reason == "rescheduled"
        after = later.after if is_put_off else int(VISIBILITY) + 2
        return publish(claim, replace(later, after=after))

    refused.requeue = publish_late


def die_while_storing(app):
    """Kill the first process that has a result to store, between its body and the result."""
    store = app.backend.store_result

    def store_or_die(task_id, result, state, *args, **kwargs):
        starts = [e for e in read(os.environ["EVENTS"], "start") if e["name"] == "unstored"]
        if state == "SUCCESS" and len(starts) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return store(task_id, result, state, *args, **kwargs)

    app.backend.store_result = store_or_die


def end_while_storing(app):
    """Have the first child that has a result to store end as at a shutdown, before it is stored."""
    store = app.backend.store_result

    def store_or_end(task_id, result, state, *args, **kwargs):
        starts = [e for e in read(os.environ["EVENTS"], "start") if e["name"].startswith("shut")]
        if state == "SUCCESS" and len(starts) == 1:
            raise SystemExit
        return store(task_id, result, state, *args, **kwargs)

    app.backend.store_result = store_or_end


def make_identities_up():
    """Give each copy an identity of its own, whatever its message had."""
    from celery_redlock.task.messages.delivery import Delivery
    from celery_redlock.task.messages.envelope import fresh_publish_id

    def made_up(self):
        return self.envelope._replace(publish_id=fresh_publish_id())

    Delivery.copy = Delivery.retry = property(made_up)


class Watcher:
    def __init__(self, it, result):
        self._it, self._result = it, result
        self.seen, self.copies, self.header = [], 0, None
        self.opened = None  # when its body was let go on [s, as `now`]
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self):
        with redis.Redis.from_url(self._it.conf["broker_url"]) as client:
            gone = None  # since when the broker has no message of it
            while not any(state in READY for state, _ in self.seen):
                meta = self._it.meta(self._result.id)
                state = meta.get("status"), str(meta.get("result"))
                if not self.seen or self.seen[-1] != state:
                    self.seen.append(state)
                found = live_copies(client, self._result.id)
                self.copies = max(self.copies, len(found))
                self.header = self.header or next(
                    (m["headers"].get("redlock") for m in found), None
                )
                gone = None if found else gone or now()
                if gone and now() > gone + 5:  # its last state was written over between two looks
                    return
                time.sleep(0.02)

    def wait(self):
        self._thread.join(200)
        assert not self._thread.is_alive(), "the task did not end"


def live_copies(client, task_id):
    waiting = [json.loads(raw) for key in client.keys("q_*") for raw in client.lrange(key, 0, -1)]
    taken = [json.loads(raw)[0] for raw in client.hvals("unacked")]
    return [message for message in waiting + taken if message["headers"]["id"] == task_id]


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    conf = {
        "redlock_ttl": TTL,
        "redlock_max_ttl": TTL,
        "redlock_node_timeout": 1.0,
        **redelivered_after(VISIBILITY),
    }
    folder = tmp_path_factory.mktemp("redelivered")
    with stage(__file__, folder, **conf) as it:
        it.open = lambda lock: (folder / f"open {lock}").touch()
        workers = [("q_both", {})] * 2 + [("q_broken", {"BROKEN": "countdown"})] * 2
        workers += [("q_killed", {}), ("q_store", {"BROKEN": "store"})]
        workers += [("q_shutdown", {"BROKEN": "shutdown"}), ("q_identity", {"BROKEN": "identity"})]
        it.start_workers(
            {"name": f"w{n}", "concurrency": 6, "args": ["-Q", queue], "env": env}
            for n, (queue, env) in enumerate(workers)
        )
        yield it


@pytest.fixture(scope="module")
def long(it):
    tasks = {
        "once more": "late",
        "five times": "late",
        "plain": "plain",
        "no dedup": "late_no_dedup",
        "long countdown": "late",
        "failing": "failing",
        "failing, told by Celery": "failing_and_told_by_celery",
    }
    watchers = {}
    for which, task in tasks.items():
        queue = "q_broken" if which == "long countdown" else "q_both"
        watchers[which] = Watcher(it, it.task(task).apply_async((which, True), queue=queue))

    def times(which):
        words = rf"{tasks[which]}\[{watchers[which]._result.id}\] for \d+ s:"
        return len(re.findall(words, it.log()))

    # With its first copy each may end: one that is set aside comes again after the end.
    least = dict.fromkeys(("once more", "no dedup", "failing", "failing, told by Celery"), 1)
    for which, count in {**least, "five times": 5}.items():
        eventually(lambda which=which, count=count: times(which) >= count, f"copies of {which}")
        watchers[which].opened = now()
        it.open(which)
    it.started("plain", 2)
    eventually(lambda: watchers["long countdown"].copies >= 4, "copies of copies", timeout=200)
    for which in ("plain", "long countdown"):
        it.open(which)
    for watcher in watchers.values():
        watcher.wait()
    return watchers


@pytest.mark.parametrize("which", ["once more", "five times"])
def test_a_message_delivered_again_does_not_run_again(it, long, which):
    (ran,) = it.bodies(which)
    # It ran when its copy was set aside: the log had told of that before it was let go on.
    assert ran.started < long[which].opened <= ran.ended
    seen = [state for state in long[which].seen if state[0] is not None]
    assert [status for status, _ in seen] == ["STARTED", "SUCCESS"]
    assert seen[-1][1] == "the real result"


def deliver_once_more(it, task, which, watcher):
    result = watcher._result
    ends = f"{task}[{result.id}] has finished before; this copy ends"
    before = it.log().count(ends)
    copy = {"task_id": result.id, "headers": {"redlock": watcher.header}}
    it.task(task).apply_async((which, True), queue="q_both", **copy)
    eventually(lambda: it.log().count(ends) > before, f"end of one more copy of {which}")


def test_a_late_copy_does_not_write_over_a_failure(it, long):
    """Celery would store STARTED for the copy, over the FAILURE. Twin: told by Celery, it does."""
    tasks = {"failing": "failing", "failing, told by Celery": "failing_and_told_by_celery"}
    for which, task in tasks.items():
        deliver_once_more(it, task, which, long[which])
    states = [it.meta(long[which]._result.id)["status"] for which in tasks]
    assert states == ["FAILURE", "STARTED"]


def test_copies_do_not_multiply(it, long):
    assert long["five times"].copies <= 2
    received = it.log().count(f"late[{long['five times']._result.id}] received")
    (ran,) = it.bodies("five times")
    assert 6 <= received <= 3 + (ran.ended - ran.started) / (VISIBILITY / 3)


def test_copies_that_wait_for_too_long_do_multiply(long):
    """Twin: set aside for more than a visibility timeout, copies are themselves copied."""
    assert long["long countdown"].copies >= 4


def test_a_plain_task_runs_twice_at_once(it, long):
    """Twin: without us the broker's copy runs beside the first delivery."""
    first, second, *_ = it.started("plain", 2)
    assert second.started < first.ended


def test_without_the_memory_of_what_finished_it_runs_again(it, long):
    """Twin: with ``dedup_ttl=0`` the copy waits for the first to end, and then runs."""
    first, second, *_ = it.started("no dedup", 2)
    assert second.started >= first.ended


def test_a_late_copy_touches_nothing(it, long):
    deliver_once_more(it, "late", "once more", long["once more"])
    time.sleep(0.5)  # a word to the backend would take less
    assert it.meta(long["once more"]._result.id)["result"] == "the real result"
    assert len(it.bodies("once more")) == 1


@pytest.mark.long
def test_a_result_that_was_not_stored_is_made_again(it):
    """A death between the body and the result: another run, and no sooner than it must."""
    result = it.task("put_back").apply_async(("unstored",), queue="q_store")
    assert result.get(timeout=100) == "a result of another run"
    first, second = it.bodies("unstored")
    assert first.finished
    waited = second.started - first.ended
    assert waited > 1.0, "it did not wait for the first to be stored"


def test_a_result_that_a_shutdown_kept_from_being_stored_is_made_again(it):
    """Celery tells that it succeeded, and nobody ever had its result."""
    result = it.task("put_back").apply_async(("shut down",), queue="q_shutdown")
    assert result.get(timeout=100) == "a result of another run"
    assert len(it.bodies("shut down")) == 2


def put_off_twice(it, task, name, queue):
    """
    Have a message without an identity put off in its first delivery, and in a later one.

    It is due after the broker has delivered it again. Returns its result once all copies are gone.
    Well after it: whoever stands still while it gives back messages keeps others from doing so.
    """
    with it.held(name):
        result = it.app.send_task(task, (name,), countdown=int(VISIBILITY) + 5, queue=queue)
        received = f"{task}[{result.id}] received"
        eventually(lambda: it.log().count(received) >= 6, "copies of both deliveries")
    with redis.Redis.from_url(it.conf["broker_url"]) as client:
        eventually(lambda: not live_copies(client, result.id), "end of all copies")
    return result


@pytest.mark.parametrize("task", ["Reschedule", "Retry"])
def test_copies_of_a_message_without_an_identity_are_one_execution(it, task):
    name = f"put off by {task}"
    result = put_off_twice(it, task, name, "q_both")
    assert result.get(timeout=100) == "the real result"
    assert len(it.bodies(name)) == 1


@pytest.mark.parametrize("task", ["Reschedule", "Retry"])
def test_identities_that_copies_make_up_are_so_many_executions(it, task):
    """The twin."""
    name = f"made up by {task}"
    put_off_twice(it, task, name, "q_identity")
    assert len(it.bodies(name)) >= 2


def test_a_worker_that_is_killed_loses_no_task(it):
    (worker,) = [w for w in it.workers if "q_killed" in w.command]
    result = it.task("late").apply_async(("killed", True), queue="q_killed")
    it.started("killed")
    it.wait_for_log(rf"late\[{result.id}\] for \d+ s:")  # there is a copy
    worker.kill()
    it.worker(name="heir", args=["-Q", "q_killed"])
    assert result.get(timeout=100) == "a result of another run"
    first, _ = it.bodies("killed")
    assert not first.finished
    assert overlaps(e for e in read(it.events) if e.get("name") == "killed") == []


def test_a_second_publish_under_the_same_task_id_runs(it):
    names = ["through the class", "by name"]
    for publish, name in zip((it.task("late").apply_async, by_name(it)), names, strict=True):
        for _ in range(2):
            publish((name,), task_id=f"nightly {name}", queue="q_both").get(timeout=100)
            it.wait_until_free()
    it.wait_until_quiet()
    assert [len(it.bodies(name)) for name in names] == [2, 2]


def by_name(it):
    """Return a function that publishes as one does who does not have the task's code."""
    return lambda args, **options: it.app.send_task("late", args, **options)
