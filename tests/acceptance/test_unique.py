"""Unique at publish, against a real worker: who is a duplicate when, and what ends a marker."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import signal
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from celery import Task, chain, chord, group
from celery.exceptions import Ignore, Reject, TaskRevokedError
from celery.result import ResultSet
from kombu.exceptions import SerializerNotInstalled

from celery_redlock import (
    DuplicateTask,
    QuorumUnavailable,
    RedlockTask,
    Reschedule,
    UniqueResult,
)
from celery_redlock.plugin import plugin_for
from support.events import body, read
from support.redelivery import redelivered_after
from support.stage import LASTING, stage
from support.stored import clients_of
from support.versions import since
from support.waiting import eventually

UNTIL = ("started", "finished", "success", "expired")
WINDOW = 600.0
#: Of a task whose worker is killed: the end of its lease is waited for.
TTL = 8.0
#: How soon a marker is gone whose owner is; far before it would lapse [s].
SOON = 60.0


UNIQUE = {"unique_until": "finished", "unique_for": 600}
#: What a task may raise before Celery calls it.
ERRORS = {"error": ValueError, "ignore": Ignore, "reject": Reject}


def declare(app):
    folder = Path(os.environ["EVENTS"]).parent if "EVENTS" in os.environ else None

    def job(self, name, way=""):
        with body(os.environ["EVENTS"], name, retries=self.request.retries):
            while "gate" in way and not (folder / f"{name}.open").exists():
                time.sleep(0.01)
            if "retry" in way and self.request.retries < 2:
                raise self.retry(countdown=1 if "now" in way else 8)
            if "fail" in way:
                raise ValueError(name)
        return self.request.retries

    ours = {"base": RedlockTask, "bind": True, "shared": False, "unique_on": ("name",)}
    for until in UNTIL:
        app.task(name=until, unique_until=until, unique_for=WINDOW, **ours)(job)
        app.task(
            name=f"{until} late", unique_until=until, acks_late=True, unique_for=WINDOW, **ours
        )(job)
    app.task(name="refused", unique_until="finished", on_duplicate="fail", **ours)(job)
    app.task(name="merging", on_duplicate="rerun", **UNIQUE, **ours)(job)
    app.task(name="brief", unique_until="finished", unique_for=5.0, **ours)(job)
    doomed = {"unique_until": "finished", "unique_for": WINDOW, "lock_ttl": TTL}
    app.task(name="doomed", **doomed, **ours)(job)
    app.task(name="doomed late", acks_late=True, **doomed, **ours)(job)
    app.task(
        name="auto",
        unique_until="finished",
        autoretry_for=(ValueError,),
        retry_backoff=False,
        # Not at once: RETRY is stored when that is published, over the FAILURE if it is quicker.
        default_retry_delay=3,
        max_retries=2,
        **ours,
    )(job)

    declare_others(app, ours)
    broken = os.environ.get("BROKEN")
    if broken == "any token":
        let_any_token_end_a_marker()
    elif broken == "parent":
        let_the_parent_end_nothing()
    elif broken == "start":
        let_a_start_say_nothing()


def let_any_token_end_a_marker():
    from celery_redlock.unique.scripts import END

    source = END.source.replace(b"m.token == ARGV[1]", b"m.token ~= ''")
    assert source != END.source
    END.source, END.sha = source, hashlib.sha1(source).hexdigest().encode()


def let_the_parent_end_nothing():
    from celery_redlock.task.worker.forced_ends import RedlockRequest

    RedlockRequest.leave_queue = lambda self, outcome: None
    lost_child = RedlockRequest.lost_child

    def without_reservation(self):
        lost = lost_child(self)
        envelope = replace(lost.delivery.envelope, reservation=None)
        return replace(lost, delivery=replace(lost.delivery, envelope=envelope))

    RedlockRequest.lost_child = without_reservation


def let_a_start_say_nothing():
    from celery_redlock.unique.reservations import Reservations
    from celery_redlock.unique.reserving import Started

    Reservations.start = lambda self, *args, **kwargs: Started()


def folder_of_events():
    return Path(os.environ["EVENTS"]).parent


def job_of(app):
    return app.tasks["finished"].run.__func__


def declare_others(app, ours):
    @app.task(name="swap", unique_until="finished", **ours)
    def swap(self, name, into):
        with body(os.environ["EVENTS"], name):
            task = self.app.tasks[into]
            raise self.replace(task.si(f"{name} replaced", "gate"))

    # The retry comes so late that a slow machine has looked at its marker before.
    @app.task(name="dying", retry_on_worker_lost=True, default_retry_delay=10, **UNIQUE, **ours)
    def dying(self, name):
        with body(os.environ["EVENTS"], name, retries=self.request.retries):
            if not self.request.retries:
                # The parent has to know that it began, or it is not missed: the test waits for it.
                while not (folder_of_events() / f"{name}.open").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)

    @app.task(name="hanging", time_limit=8, **UNIQUE, **ours)
    def hanging(self, name):
        with body(os.environ["EVENTS"], name):
            time.sleep(200)  # until the hard time limit

    @app.task(name="plain", bind=True, base=Task, shared=False)
    def plain(self, name, way=""):
        return name

    @app.task(name="gather", shared=False)
    def gather(values):
        return values

    declare_odd(app, ours)


def declare_odd(app, ours):
    @app.task(name="headers", max_retries=1, **UNIQUE, **ours)
    def headers(self, name):
        with body(os.environ["EVENTS"], name):
            raise self.retry(countdown=3, headers={"mine": 1})  # see "auto"

    @app.task(name="reject", **UNIQUE, **ours)
    def reject(self, name):
        with body(os.environ["EVENTS"], name):
            raise Reject(name, requeue=True)

    @app.task(name="trace", **UNIQUE, **ours)
    def trace(self, name):
        with body(os.environ["EVENTS"], name):
            self.app.tasks["finished"].apply_async((f"{name} child",), headers=self.request.headers)
            while not (folder_of_events() / f"{name}.open").exists():
                time.sleep(0.01)

    @app.task(
        name="patient", lock_wait=30, lock_ttl=TTL, unique_for=600, unique_until="finished", **ours
    )
    def patient(self, name):
        with body(os.environ["EVENTS"], name):
            pass

    class Checks(RedlockTask):
        abstract = True

        def before_start(self, task_id, args, kwargs):
            with body(os.environ["EVENTS"], args[0]):
                raise ERRORS[args[1]](args[1])

    app.task(name="checks", **UNIQUE, **{**ours, "base": Checks})(job_of(app))

    @app.task(name="anew", **UNIQUE, **ours)
    def anew(self, name, way="first"):
        with body(os.environ["EVENTS"], name, retries=int(way == "second")):
            if way == "first":
                self.apply_async((name, "second"), task_id=self.request.id)
                raise Ignore

    app.task(name="quiet", ignore_result=True, **UNIQUE, **ours)(headers.run)
    app.task(name="later", on_conflict=Reschedule(base=1, cap=1), **UNIQUE, **ours)(job_of(app))


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unique")
    with stage(__file__, folder, **LASTING) as it:
        it.folder = folder
        it.worker(concurrency=6)
        yield it
        it.no_key_is_for_ever()


def is_duplicate(it, task, name, way=""):
    """Publish once more; into a queue that nobody reads, so that it changes nothing."""
    result = it.task(task).apply_async((name, way), queue="nobody")
    assert isinstance(result, UniqueResult)
    assert result.lock_name == it.task(task).lock_name((name,))
    return result.duplicate


# Was there a duplicate? The row is unique_until; the columns are when the second one came.
TABLE = {
    "started": {"waiting": 1, "running": 0, "retry": 0, "success": 0, "failure": 0, "revoked": 0},
    "finished": {"waiting": 1, "running": 1, "retry": 1, "success": 0, "failure": 0, "revoked": 0},
    "success": {"waiting": 1, "running": 1, "retry": 1, "success": 0, "failure": 1, "revoked": 0},
    "expired": {"waiting": 1, "running": 1, "retry": 1, "success": 1, "failure": 1, "revoked": 1},
}


def test_the_page_has_the_same_table():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "unique-at-publish.md"
    text = page.read_text()
    rows = re.findall(r'^\| `"(\w+)"` \| (yes .*) \|$', text, re.MULTILINE)
    told = {until: [cell == "no" for cell in cells.split(" | ")] for until, cells in rows}
    assert told == {until: [not cell for cell in row.values()] for until, row in TABLE.items()}


@pytest.mark.parametrize("way", ["fresh", "duplicate", "merged"])
def test_a_publish_asks_the_nodes_once(it, monkeypatch, way):
    """A duplicate costs one round trip; a new task one more than it would without."""
    publish = it.task("merging" if way == "merged" else "finished").apply_async
    name = f"one round {way}"
    if way != "fresh":
        publish((name,), queue="nobody")
    fanout = plugin_for(it.app).locks.fanout
    asked, ask = [], fanout.ask
    monkeypatch.setattr(fanout, "ask", lambda calls, ends=None: (asked.append(calls), ask(calls)))
    assert publish((name,), queue="nobody").duplicate == (way != "fresh")
    assert len(asked) == 1


def test_a_revoke_by_a_stamp_leaves_the_name_free(it):
    stamped = {"stamped_headers": ["tenant"], "tenant": "eu", "countdown": 280}
    first = it.task("finished").apply_async(("stamped",), **stamped)
    eventually(lambda: first.id in str(it.app.control.inspect().scheduled()), "an ETA", timeout=100)
    assert is_duplicate(it, "finished", "stamped")
    it.app.control.revoke_by_stamped_headers({"tenant": ["eu"]})
    eventually(lambda: not is_duplicate(it, "finished", "stamped"), "its end", timeout=SOON)


def bring_about(it, task, name, when):
    publish = it.task(task).apply_async
    if when == "waiting":
        return publish((name,), queue="nobody")
    if when == "running":
        first = publish((name, "gate"))
        it.started(name)
        return first
    if when == "retry":
        first = publish((name, "retry"))
        eventually(lambda: first.state == "RETRY", "a retry")
        return first
    if when == "revoked":
        first = publish((name,), countdown=280)
        eventually(lambda: it.app.control.inspect().scheduled(), "an ETA", timeout=100)
        first.revoke()
        return first
    first = publish((name, "fail" if when == "failure" else ""))
    first.get(timeout=100, propagate=False)
    return first


@pytest.mark.parametrize("late", ["", " late"])
@pytest.mark.parametrize("when", list(TABLE["started"]))
@pytest.mark.parametrize("until", UNTIL)
def test_a_second_publish_is_answered_as_the_table_says(it, until, when, late):
    name, task = f"{until} {when}{late}", f"{until}{late}"
    first = bring_about(it, task, name, when)
    assert (first.duplicate, first.holder_id) == (False, first.id)
    if when == "revoked" and not TABLE[until][when]:
        eventually(lambda: not is_duplicate(it, task, name), "its end", timeout=SOON)
    else:
        second = it.task(task).apply_async((name,), queue="nobody")
        assert second.duplicate == TABLE[until][when]
        if second.duplicate:
            assert (second.id, second.holder_id) == (first.id, first.id)
    (it.folder / f"{name}.open").touch()


@pytest.mark.parametrize("way", list(ERRORS))
def test_a_task_that_ends_in_before_start_stands_for_no_name(it, way):
    """Celery calls ``before_start`` outside the task, and then not the task."""
    name = f"before start {way}"
    first = it.task("checks").apply_async((name, way))
    it.started(name)
    if way == "error":
        with pytest.raises(ValueError, match=way):
            first.get(timeout=100)
    eventually(lambda: not is_duplicate(it, "checks", name), "its end", timeout=SOON)


def test_what_a_body_publishes_under_its_own_id_is_no_duplicate_of_it(it):
    """Without ``unique_until`` it runs once the first one has given back the lock."""
    first = it.task("anew").apply_async(("anew",))
    assert first.get(timeout=100) is None


# --- by which a marker ends ----------------------------------------------------------------


def drop_markers(it):
    """Let the nodes forget every queued marker, as if its time had come."""
    for client in clients_of(it.nodes):
        for key in client.keys("redlock:queued:*"):
            client.delete(key)


def test_a_late_finisher_does_not_end_a_newer_marker(it):
    first = bring_about(it, "finished", "late finisher", "running")
    drop_markers(it)
    second = it.task("finished").apply_async(("late finisher",), queue="nobody")
    assert not second.duplicate
    (it.folder / "late finisher.open").touch()
    first.get(timeout=100)
    it.wait_until_free("finished:*")
    third = it.task("finished").apply_async(("late finisher",), queue="nobody")
    assert (third.duplicate, third.holder_id) == (True, second.id)


@pytest.mark.long
@pytest.mark.parametrize("broken", ["any token", "nothing"])
def test_without_the_token_a_late_finisher_would(it, broken):
    """The twin: a worker that compares no tokens ends the newer marker; others do not."""
    queue = broken.replace(" ", "")
    worker = it.worker(name=queue, args=["-Q", queue], env={"BROKEN": broken})
    name = f"late with {broken}"
    first = it.task("finished").apply_async((name, "gate"), queue=queue)
    it.started(name)
    drop_markers(it)
    it.task("finished").apply_async((name,), queue="nobody")
    (it.folder / f"{name}.open").touch()
    first.get(timeout=100)
    worker.kill()  # it must not get what later tests give to all workers
    assert is_duplicate(it, "finished", name) == (broken == "nothing")


@pytest.mark.parametrize("broken", ["parent", "nothing"])
def test_without_its_parent_a_child_that_was_killed_would_stand_for_its_name(it, broken):
    """The twin: acknowledged late, nobody else ends the marker before its time."""
    queue = f"{broken}kill"
    worker = it.worker(name=queue, args=["-Q", queue], env={"BROKEN": broken})
    name = f"killed without {broken}"
    it.task("finished late").apply_async((name, "gate"), queue=queue)
    (ran,) = it.started(name)
    it.wait_until_begun(ran.pid)
    os.kill(ran.pid, signal.SIGKILL)
    it.wait_for_log(r"WorkerLostError")
    if broken == "parent":
        worker.kill()  # it must not get what later tests give to all workers
    if broken == "nothing":
        eventually(lambda: not is_duplicate(it, "finished late", name), "its end", timeout=SOON)
    else:
        assert is_duplicate(it, "finished late", name)


@pytest.mark.long
@pytest.mark.parametrize("broken", ["start", "nothing"])
def test_without_a_start_a_killed_worker_would_silence_its_name(it, broken):
    """The twin: a marker that was not handed over to the lock outlives it."""
    queue = f"{broken}start"
    worker = it.worker(name=queue, args=["-Q", queue], env={"BROKEN": broken})
    name = f"silenced without {broken}"
    it.task("doomed").apply_async((name, "gate"), queue=queue)
    it.started(name)
    worker.kill()
    eventually(lambda: not it.keys("redlock:lock:doomed:*"), "the lease's end")
    assert is_duplicate(it, "doomed", name) == (broken == "start")


def test_a_late_starter_does_not_end_a_newer_marker(it):
    first = it.task("brief").apply_async(("late starter",), queue="later")
    eventually(lambda: not it.keys("redlock:queued:brief:*"), "the marker's end", timeout=SOON)
    second = it.task("brief").apply_async(("late starter",), countdown=200)
    assert not second.duplicate
    it.app.control.add_consumer("later", reply=True)
    assert first.get(timeout=100) == 0
    assert is_duplicate(it, "brief", "late starter")


def test_a_revoked_task_stands_for_nothing_once_a_worker_meets_it(it):
    first = it.task("finished").apply_async(("met",), queue="met")
    first.revoke()
    assert is_duplicate(it, "finished", "met")
    it.app.control.add_consumer("met", reply=True)
    eventually(lambda: not is_duplicate(it, "finished", "met"), "the marker's end", timeout=SOON)
    with pytest.raises(TaskRevokedError):
        first.get(timeout=100)


def test_what_was_purged_stands_for_nothing_when_its_time_is_over(it):
    """Nobody can tell of a message that was purged: its marker ends by itself."""
    it.task("brief").apply_async(("purged",), queue="purged")
    with it.app.connection_for_write() as connection:
        assert connection.default_channel.queue_purge("purged") == 1
    assert is_duplicate(it, "brief", "purged")
    eventually(lambda: not is_duplicate(it, "brief", "purged"), "the marker's end", timeout=SOON)


@pytest.mark.long
@pytest.mark.parametrize("by", ["expires", "countdown"])
def test_an_expired_task_stands_for_nothing(it, by):
    queue = {"queue": "nobody"} if by == "expires" else {"countdown": 280}
    it.task("finished").apply_async((f"expired {by}",), expires=5.0, **queue)
    assert is_duplicate(it, "finished", f"expired {by}")
    eventually(
        lambda: not is_duplicate(it, "finished", f"expired {by}"), "the marker's end", timeout=SOON
    )


def test_a_countdown_is_part_of_the_life_of_a_marker(it):
    published = time.monotonic()
    result = it.task("brief").apply_async(("put off", "gate"), countdown=8)
    while time.monotonic() < published + 7.5:
        assert is_duplicate(it, "brief", "put off")
        time.sleep(0.2)  # often enough to meet a gap
    it.started("put off")
    assert is_duplicate(it, "brief", "put off")
    (it.folder / "put off.open").touch()
    result.get(timeout=100)


def test_a_publish_that_fails_leaves_no_marker(it):
    with pytest.raises(SerializerNotInstalled):
        it.task("finished").apply_async(("unpublished",), serializer="unheard of")
    assert not is_duplicate(it, "finished", "unpublished")


@pytest.mark.parametrize("late", ["", " late"])
@pytest.mark.parametrize("way", ["killed", "terminated"])
def test_a_child_that_was_killed_stands_for_nothing(it, way, late):
    """The parent ends the marker once the child is dead, long before it would lapse."""
    name = f"{way}{late}"
    result = bring_about(it, f"finished{late}", name, "running")
    (it_runs,) = it.started(name)
    it.wait_until_begun(it_runs.pid)
    if way == "killed":
        os.kill(it_runs.pid, signal.SIGKILL)
    else:
        result.revoke(terminate=True, signal="SIGKILL")
    eventually(lambda: not is_duplicate(it, "finished", name), "the marker's end", timeout=SOON)


@pytest.mark.long
def test_a_task_beyond_its_hard_time_limit_stands_for_nothing(it):
    result = it.task("hanging").delay("hangs")
    it.started("hangs")
    assert it.task("hanging").apply_async(("hangs",), queue="nobody").duplicate
    result.get(timeout=100, propagate=False)
    eventually(
        lambda: not it.task("hanging").apply_async(("hangs",), queue="nobody").duplicate,
        "the marker's end",
        timeout=SOON,
    )


@pytest.mark.long
def test_a_worker_that_is_killed_leaves_the_name_free_with_its_lease(it):
    """Acknowledged early, its message is lost with it; nobody has to clear away."""
    worker = it.worker(name="doomed", args=["-Q", "doomed"])
    it.task("doomed").apply_async(("dead worker", "gate"), queue="doomed")
    it.started("dead worker")
    assert is_duplicate(it, "doomed", "dead worker")
    worker.kill()
    eventually(lambda: not is_duplicate(it, "doomed", "dead worker"), "the lease's end")


def test_a_message_that_is_delivered_again_keeps_its_marker(tmp_path):
    with stage(__file__, tmp_path, **LASTING, **redelivered_after(4)) as it:
        worker = it.worker()
        first = it.task("doomed late").delay("again", "gate")
        it.started("again")
        worker.kill()
        eventually(lambda: not it.keys("redlock:lock:*"), "the lease's end")
        assert is_duplicate(it, "doomed late", "again")
        it.worker()
        it.started("again", 2)
        assert is_duplicate(it, "doomed late", "again")
        (tmp_path / "again.open").touch()
        assert first.get(timeout=100) == 0
        assert not is_duplicate(it, "doomed late", "again")


def test_a_worker_that_is_killed_while_a_task_waits_for_its_lock_leaves_no_marker(it):
    """Acknowledged early, such a message is in its hand alone."""
    worker = it.worker(name="waiting", args=["-Q", "waiting"])
    with it.held(it.task("patient").lock_name(("waits",))):
        it.task("patient").apply_async(("waits",), queue="waiting")
        it.wait_for_log(r"patient\[.*received")
        eventually(lambda: alone_for(it, "patient", "waits") < 300, "it is in hand")
        worker.kill()
    assert 0 < alone_for(it, "patient", "waits") < 300  # not for ten minutes


def alone_for(it, task, name):
    """Return for how long the marker stands by itself yet, as most nodes say [s]."""
    key = f"redlock:queued:{it.task(task).lock_name((name,))}"
    told = sorted(float(client.hget(key, "until") or 0) for client in clients_of(it.nodes))
    return told[len(told) // 2] / 1000 - time.time()


def test_a_cold_shutdown_leaves_no_marker_of_what_it_throws_away(it):
    """Celery cancels a task that was acknowledged early, too: its message does not come back."""
    worker = it.worker(name="cold", args=["-Q", "cold"])
    it.task("finished").apply_async(("cold", "gate"), queue="cold")
    (ran,) = it.started("cold")
    it.wait_until_begun(ran.pid)  # or there is nothing that Celery knows to cancel
    worker.signal(signal.SIGQUIT)
    worker.wait()
    eventually(lambda: not is_duplicate(it, "finished", "cold"), "the marker's end", timeout=SOON)


def test_a_revoke_reaches_nodes_that_hung_up_on_the_parent(it):
    """The main process speaks seldom, and its connections may have been cut meanwhile."""
    for name in ("first", "second"):
        result = it.task("finished").apply_async((f"cut {name}",), countdown=280)
        eventually(lambda r=result: r.id in str(it.app.control.inspect().scheduled()), "an ETA")
        result.revoke()
        eventually(
            lambda n=name: not is_duplicate(it, "finished", f"cut {n}"), "its end", timeout=SOON
        )
        for client in clients_of(it.nodes):
            client.client_kill_filter(_type="normal", skipme=True)
    # They hung up on this process, too: the next publish may be the one that finds out.
    eventually(lambda: is_duplicate(it, "finished", "after hanging up"), "a connection")


def test_a_revoke_counts_after_the_broker_hung_up(it):
    with redis.Redis.from_url(it.broker.url) as client:
        before = {other["id"] for other in client.client_list()}
        worker = it.worker(name="again", args=["-Q", "again"])

        def hang_up():  # until it was on the connection that the worker listens on
            if "Connection to broker lost" in worker.log():
                return True
            for other in client.client_list():
                if other["id"] not in before:
                    client.client_kill_filter(_id=other["id"])
            return False

        eventually(hang_up, "the worker's loss of its broker", timeout=100, every=1.0)
    result = it.task("finished").apply_async(("again",), queue="again", countdown=280)
    eventually(
        lambda: result.id in str(it.app.control.inspect().scheduled()), "an ETA", timeout=100
    )
    result.revoke()
    eventually(lambda: not is_duplicate(it, "finished", "again"), "the marker's end", timeout=SOON)


@pytest.mark.long
def test_many_revokes_at_once_leave_no_marker(it):
    """More than one write holds, in a worker that has not spoken to the nodes before."""
    it.worker(name="many", args=["-Q", "many", "--prefetch-multiplier", "200"])
    names = [f"many {n}" for n in range(150)]
    publish = it.task("finished").apply_async
    results = [publish((name,), queue="many", countdown=280) for name in names]
    eventually(
        lambda: sum(map(len, (it.app.control.inspect().scheduled() or {}).values())) >= 150,
        "all ETAs",
        timeout=100,
        every=0.2,
    )
    it.app.control.revoke([result.id for result in results])
    eventually(lambda: not it.keys("redlock:queued:finished:*many*"), "their end", timeout=SOON)
    left = [name for name in names if alone_for(it, "finished", name) > 0]
    assert eventually(
        lambda: not [n for n in left if alone_for(it, "finished", n) > 0], "their end", timeout=SOON
    )


def test_a_set_of_results_has_one_for_each_even_if_two_are_of_one_task(it):
    """Asking for all at once, Celery keeps one value for each id, and None for the others."""
    publish = it.task("finished").delay
    results = [publish("in a set", "gate"), publish("in a set"), publish("beside it")]
    assert [result.duplicate for result in results] == [False, True, False]
    (it.folder / "in a set.open").touch()
    assert ResultSet(results).get(timeout=100) == [0, 0, 0]


@pytest.mark.long
def test_a_failure_stands_for_the_whole_window_whatever_the_message_had(it):
    """``expires`` is about the message, ``unique_for`` about the name."""
    result = it.task("success").apply_async(("failed", "fail"), expires=8)
    result.get(timeout=100, propagate=False)
    expired = time.monotonic() + 8.5  # short: of an expiry
    while time.monotonic() < expired:
        assert is_duplicate(it, "success", "failed")
        time.sleep(0.2)  # often enough to meet a gap


# --- what a task does itself is no duplicate of it --------------------------------------------


@pytest.mark.parametrize(("task", "way"), [("finished", "retry now"), ("auto", "fail")])
def test_a_retry_runs_as_often_as_it_is_asked_for(it, task, way):
    name = f"{task} {way}"
    result = it.task(task).delay(name, way)
    result.get(timeout=100, propagate=False)
    retries = [e["retries"] for e in read(it.events) if e["name"] == name and e["kind"] == "start"]
    assert retries == [0, 1, 2]
    assert result.state == ("FAILURE" if way == "fail" else "SUCCESS")
    assert not is_duplicate(it, task, name)


def test_a_retry_with_headers_of_its_own_keeps_the_marker(it):
    """Celery puts them in the place of all others; the marker ends with the retry all the same."""
    result = it.task("headers").delay("headed")
    result.get(timeout=100, propagate=False)
    assert len(it.bodies("headed")) == 2
    assert not it.task("headers").apply_async(("headed",), queue="nobody").duplicate


def test_a_message_that_is_rejected_after_its_acknowledgement_is_gone(it):
    it.task("reject").delay("rejected")
    it.started("rejected")
    eventually(
        lambda: not it.task("reject").apply_async(("rejected",), queue="nobody").duplicate,
        "the marker's end",
        timeout=SOON,
    )


def test_headers_that_are_handed_on_do_not_end_the_marker_of_who_hands_them_on(it):
    result = it.task("trace").delay("traced")
    it.started("traced child")
    it.wait_until_free("finished:*")
    assert it.task("trace").apply_async(("traced",), queue="nobody").duplicate
    (it.folder / "traced.open").touch()
    result.get(timeout=100)
    assert not is_duplicate(it, "finished", "traced child")


def test_a_task_that_is_put_off_is_no_duplicate(it):
    """Nor is one that another producer sent, without our header and without a reply address."""
    name = "put off by its policy"
    waiting = it.task("later").apply_async((name,), queue="nobody")
    with it.held(it.task("later").lock_name((name,))):
        headers = {"id": str(uuid.uuid4()), "task": "later", "lang": "other", "root_id": None}
        with it.app.producer_or_acquire() as producer:
            producer.publish(
                [[name], {}, {}], routing_key="celery", headers=headers, serializer="json"
            )
        it.wait_for_log(rf"Rescheduled task later\[{headers['id']}\]")
    it.started(name)
    assert it.task("later").apply_async((name,), queue="nobody").holder_id == waiting.id


@since(5, 7, "task_retry_on_worker_lost")
def test_a_retry_for_a_child_that_was_lost_keeps_the_marker(it):
    result = it.task("dying").delay("dies once")
    (ran,) = it.started("dies once")
    it.wait_until_begun(ran.pid)
    (it.folder / "dies once.open").touch()
    eventually(lambda: result.state == "RETRY", "a retry", timeout=100)
    it.wait_until_free("dying:*")
    assert it.task("dying").apply_async(("dies once",), queue="nobody").duplicate
    result.get(timeout=100)
    assert not it.task("dying").apply_async(("dies once",), queue="nobody").duplicate


@pytest.mark.parametrize("into", ["finished", "plain"])
def test_a_replacement_has_the_marker_if_it_can_end_it(it, into):
    """One of ours ends it as it ends; anything else would leave it, so it ends before."""
    name = f"swapped for {into}"
    result = it.task("swap").delay(name, into)
    if into == "finished":
        it.started(f"{name} replaced")
        assert it.task("swap").apply_async((name, into), queue="nobody").duplicate
    (it.folder / f"{name} replaced.open").touch()
    result.get(timeout=100)
    assert not it.task("swap").apply_async((name, into), queue="nobody").duplicate


# --- workflows, errors, nodes -----------------------------------------------------------------


def test_members_of_a_workflow_are_always_published(it):
    twins = [it.task("finished").si(f"twin {n // 2}") for n in range(4)]
    gather = it.task("gather")
    for workflow in (
        chord(twins, gather.s()),
        group(twins),
        chain(*twins, gather.si([])),
        group([chain(twins[0], twins[1]), twins[2]]),
    ):
        workflow.apply_async().get(timeout=100)


def test_a_task_with_a_callback_is_always_published(it):
    """Its callback would be dropped along with it."""
    first = bring_about(it, "finished", "called back", "waiting")
    second = it.task("finished").apply_async(
        ("called back",), queue="nobody", link=it.task("plain").si("told")
    )
    assert not second.duplicate
    assert second.id != first.id


def test_a_callback_of_the_name_is_published_and_its_parent_succeeds(it):
    """Also where a duplicate is an error: the parent is not to pay for it."""
    it.task("refused").apply_async(("called",), queue="nobody")
    parent = it.task("plain").apply_async(("parent",), link=it.task("refused").si("called"))
    assert parent.get(timeout=100) == "parent"
    it.started("called")
    assert parent.state == "SUCCESS"


def test_a_joined_result_that_nobody_stores_is_not_waited_for(it):
    first = it.task("quiet").apply_async(("ignored",), queue="nobody")
    second = it.task("quiet").apply_async(("ignored",), queue="nobody")
    assert second.duplicate
    assert (first.get(timeout=60), second.get(timeout=60)) == (None, None)


def test_a_first_call_whose_result_nobody_stores_is_not_waited_for(it):
    """Although the second one wants its result: there will be none."""
    first = it.task("headers").apply_async(("only first",), queue="nobody", ignore_result=True)
    second = it.task("headers").apply_async(("only first",), queue="nobody")
    assert second.duplicate
    assert second.id == first.id
    assert second.get(timeout=60) is None


def test_a_duplicate_can_be_an_error(it):
    first = it.task("refused").apply_async(("twice",), queue="nobody")
    for publish in (
        lambda: it.task("refused").delay("twice"),
        lambda: it.task("refused").s("twice").apply_async(),
        lambda: it.task("refused").apply_async(kwargs={"name": "twice"}, countdown=5),
    ):
        with pytest.raises(DuplicateTask) as caught:
            publish()
        told = pickle.loads(pickle.dumps(caught.value))
        assert told.holder_id == first.id
        assert told.lock_name == it.task("refused").lock_name(("twice",)) == first.lock_name
        assert sum(vote.startswith("refused") for vote in told.votes.values()) > len(told.votes) / 2


def test_a_joined_result_is_that_of_the_task_that_is_there(it):
    first = bring_about(it, "finished", "joined", "running")
    second = it.task("finished").delay("joined")
    (it.folder / "joined.open").touch()
    assert second.get(timeout=100) == first.get(timeout=100) == 0
    assert len(it.bodies("joined")) == 1


def test_wrong_arguments_are_a_type_error_as_with_any_task(it):
    """Celery's own check comes first."""
    with pytest.raises(TypeError):
        it.task("finished").delay()


@pytest.mark.parametrize("policy", ["fail", "reschedule"])
def test_without_a_quorum_a_task_is_published_unless_it_is_to_fail(tmp_path, policy):
    """The lock decides at run time; with ``"fail"`` the caller is told."""
    with stage(__file__, tmp_path, redlock_on_unavailable=policy, **LASTING) as it:
        publish = it.task("finished").apply_async
        for node in it.nodes[:3]:
            node.kill()
        if policy == "fail":
            with pytest.raises(QuorumUnavailable):
                publish(("unavailable",))
            return
        assert not any(publish(("unavailable",)).duplicate for _ in range(2))
        with redis.Redis.from_url(it.broker.url) as client:
            assert client.llen("celery") == 2
        it.worker()
        eventually(
            lambda: "Rescheduled task" in it.log() or None, "a task that was put off", timeout=100
        )
        for node in it.nodes[:3]:
            node.restart()
        it.bootstrap()
        it.started("unavailable")
