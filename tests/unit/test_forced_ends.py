"""What the worker's parent does for a child that is lost, in every case that Celery knows."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from types import SimpleNamespace

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Ignore, InvalidTaskError, Reject, Retry
from kombu.asynchronous.timer import Timer
from kombu.serialization import registry

from celery_redlock import ConfigurationError, RedlockTask
from celery_redlock.lock.algorithm.effects import Sleep
from celery_redlock.lock.algorithm.results import ReleaseOutcome
from celery_redlock.lock.records import rate_name
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.waiting.waiting import LEAVE, WAIT, wait_request
from celery_redlock.plugin import Plugin, plugin_for
from celery_redlock.task.execution.outcome import Outcome
from celery_redlock.task.messages.delivery import execution_id
from celery_redlock.task.messages.delivery_info import OWNER, hide, word_in
from celery_redlock.task.messages.slot import BUFFERED_FOR
from celery_redlock.task.messages.waiting import Waiting
from celery_redlock.task.worker import lost_child, revokes
from celery_redlock.task.worker.forced_ends import RedlockRequest
from celery_redlock.task.worker.lost_child import LostChild
from celery_redlock.task.worker.revokes import NoteRevokes
from celery_redlock.testing import locks_disabled
from support.fakes import Drive, Ears, FakeClock, refused
from support.versions import since

CHILD = 4711


class ScriptedLocks:
    def __init__(self):
        self.outcomes = []
        self.done = []
        self.holders = []
        self.held = {}
        self.silent = 0
        self.rules = Rules()
        self.told = []
        self.driver = SimpleNamespace(tell=self.told.append)

    def inspect_all(self, names, ends=None):
        return [
            [SimpleNamespace(holder=holder, problem="") for holder in self.held.get(name, [])]
            + [SimpleNamespace(holder=holder, problem="") for holder in self.holders]
            + [SimpleNamespace(holder={}, problem="down")] * self.silent
            for name in names
        ]

    def mark(self, marker, *, wait):
        assert wait, "a process that never connected would send it to nobody"
        self.done.append(("mark", marker.name, marker.state, marker.ttl))

    def release_for(self, name, owner, *, since, keep, info, place):
        assert (place == 0) == ("#" not in name)
        assert info["task"], "observers are told whose lock it was"
        assert info["task_id"]
        self.done.append(("release", name, owner, keep))
        return self.outcomes.pop(0) if self.outcomes else ReleaseOutcome.RELEASED


@pytest.fixture
def app(monkeypatch):
    """The app of a worker whose tasks run in children, and whose waits take no time."""
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.redlock_nodes = ["redis://one:1/0"]
    plugin = plugin_for(app)
    plugin.has_children = True
    app.locks = plugin._locks = ScriptedLocks()
    app.deaths = []

    def die(pid, longest):
        app.locks.done.append(("death", pid))
        return True

    monkeypatch.setattr(lost_child, "wait_until_dead", die)
    monkeypatch.setattr(LostChild, "clear_away_in_thread", LostChild._clear_away)
    monkeypatch.setattr(lost_child, "PAUSE", 0.01)
    app.clock = clock = FakeClock()
    monkeypatch.setattr(lost_child, "time", SimpleNamespace(monotonic=clock, sleep=clock.advance))
    yield app
    app.close()


HEADER = {"v": 1, "task_id": "me", "id": "0" * 32}
EXECUTION = execution_id("bill", "me", "0" * 32, 0, 0)


def declare(app, **options):
    @app.task(name="bill", base=RedlockTask, shared=False, lock_key="{invoice}", **options)
    def bill(invoice):
        pass

    app.finalize()
    return app.tasks["bill"]


def deliver(app, task, content_type="application/json", **headers):
    known = {"id": "me", "task": "bill", "lang": "py", "retries": 0, "redlock": HEADER, **headers}
    message = SimpleNamespace(
        headers=known,
        body=b"",
        payload=[["seven"], {}, {}],
        content_type=content_type,
        content_encoding="utf-8",
        delivery_info={"routing_key": "celery"},
        properties={"correlation_id": "me", "reply_to": "somebody"},
    )
    request = RedlockRequest(
        message,
        app=app,
        task=task,
        on_ack=lambda *_: app.locks.done.append("ack"),
        on_reject=lambda _log, _errors, requeue: app.locks.done.append(("reject", requeue)),
    )
    request.worker_pid, request.time_start = CHILD, time.time()
    return request


def fail(request, error, *, return_ok=False):
    info = ExceptionInfo((type(error), error, tracebacks()))
    request.on_failure(info, return_ok=return_ok)


def tracebacks():
    with pytest.raises(ZeroDivisionError) as failure:
        _ = 1 / 0
    return failure.tb


LOST = WorkerLostError("signal 9")
RELEASE = [("death", CHILD), "release"]
DONE = ("mark", EXECUTION, "done", 3600.0)


def told(app):
    return [d[0] if d[0] == "release" else d for d in app.locks.done]


@pytest.mark.parametrize(
    ("options", "error", "done"),
    [
        ({"acks_late": True}, LOST, ["ack", DONE, *RELEASE]),
        ({"acks_late": True}, TimeLimitExceeded(1), ["ack", DONE, *RELEASE]),
        ({"acks_late": True, "reject_on_worker_lost": True}, LOST, [("reject", True), *RELEASE]),
        ({"acks_late": True, "dedup_ttl": 0}, LOST, ["ack", *RELEASE]),
        ({"acks_late": True}, Terminated(15), ["ack", DONE, *RELEASE]),
        pytest.param(
            *({"acks_late": True}, SystemExit(), ["ack", DONE, *RELEASE]),
            marks=since(5, 7, "the parent hears of a body that exits"),
        ),
        ({"acks_late": True}, ValueError("no"), ["ack"]),
        ({"acks_late": True}, Ignore(), ["ack"]),
        ({"acks_late": True}, Retry(exc=LOST), ["ack"]),
        ({"acks_late": True}, Reject("no", requeue=True), [("reject", True)]),
    ],
)
def test_what_is_done_for_a_child(app, options, error, done):
    """
    Released after its death; remembered as done, before it, if Celery will not try again.

    What a body raised by itself is no forced end: its child has released.
    """
    request = deliver(app, declare(app, **options))
    fail(request, error)
    assert told(app) == done


def test_what_a_child_noted_in_report_mode_is_released(app):
    plugin = plugin_for(app)
    plugin._reports, plugin._locks = app.locks, ScriptedLocks()
    request = deliver(app, declare(app, acks_late=True, lock_mode="report"))
    fail(request, LOST)
    assert told(app) == ["ack", DONE, *RELEASE]
    assert plugin._locks.done == []


@pytest.mark.parametrize("error", [LOST, TimeLimitExceeded(1), Terminated(15)])
def test_an_error_that_the_child_returned_is_no_forced_end(app, error):
    """Whatever it is: one of these may come from a task that the body waited for."""
    fail(deliver(app, declare(app, acks_late=True)), error, return_ok=True)
    assert told(app) == ["ack"]


def test_a_child_is_seen_to_once(app):
    """A revoke, and then its end; after another child has begun with it, once more."""
    request = deliver(app, declare(app))
    request.terminate(SimpleNamespace(terminate_job=lambda pid, signal: None))
    fail(request, Terminated(15))
    assert told(app).count("release") == 1
    request.worker_pid = CHILD + 1
    fail(request, LOST)
    assert told(app).count("release") == 2


def test_what_was_never_begun_has_no_child(app):
    """For a task that it puts back, the pool tells the id of the parent itself."""
    request = deliver(app, declare(app, acks_late=True))
    request.worker_pid = os.getpid()
    fail(request, LOST)
    assert told(app) == ["ack"]


def test_a_child_that_waited_for_its_lock_waits_no_more(app):
    """Else it would count for ``max_waiting`` for minutes, by each of its names."""
    request = deliver(app, declare(app))
    fail(request, LOST)
    assert {leave.script for leave in app.locks.told} == {LEAVE}
    assert {leave.keys for leave in app.locks.told} == {
        (b"redlock:line:seven", b"redlock:waiters:seven")
    }
    drive = Drive(ears=Ears(), name="seven", wait=10.0, owner=request._delivery.owner)
    drive.vote(*[refused()] * 3).go_on_to(Sleep)
    (in_the_child,) = [tell.request for tell in drive.told if tell.request.script is WAIT]
    one = Waiting("seven", 1.7e9).in_line(
        request.task.name, request.id, request._delivery.execution
    )
    as_a_message = wait_request(Rules(), one)
    names = [wait.arguments[0] for wait in (in_the_child, as_a_message)]
    assert [leave.arguments[0] for leave in app.locks.told] == names


def test_so_does_one_that_waited_for_a_start(app):
    fail(deliver(app, declare(app, lock_rate="5/s")), LOST)
    lines = {leave.keys[0] for leave in app.locks.told}
    assert lines == {b"redlock:line:seven", b"redlock:line:" + rate_name("seven").encode()}


@pytest.mark.parametrize("execution", [EXECUTION, "1" * 32])
def test_an_execution_that_runs_elsewhere_is_not_over(app, execution):
    """Only the copy was lost, that waited for it: what is remembered is for the first to say."""
    task = declare(app, acks_late=True)
    app.locks.holders = [{"execution": execution, "token": "another0", "since": 1.0}]
    fail(deliver(app, task), LOST)
    assert (DONE in app.locks.done) is (execution != EXECUTION)
    assert "release" in told(app)


def test_no_thread_is_no_harm(app, monkeypatch, caplog):
    """Where none can be started, Celery goes on, and the lease ends by itself."""
    caplog.set_level("INFO", "celery_redlock")
    monkeypatch.undo()

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    fail(deliver(app, declare(app)), LOST)
    assert "No thread left to release for bill[me]" in caplog.text


@pytest.mark.parametrize("task_id", [None, "", ["me"], {"me": 1}, b"me"])
def test_a_message_whose_task_id_is_none_is_refused(app, task_id):
    """As Celery refuses an invalid one: it would run beside the holder, or end the worker."""
    with pytest.raises(InvalidTaskError, match="task id"):
        deliver(app, declare(app), id=task_id)


@pytest.mark.parametrize("task_id", [7, uuid.UUID(int=7)])
def test_a_task_id_that_is_no_text_is_taken_as_text(app, task_id):
    """Celery takes it, and some pass the key of their own record; to refuse it loses the task."""
    request = deliver(app, declare(app), id=task_id)
    assert request.id == request._request_dict["id"] == str(task_id)


def test_a_child_whose_message_goes_to_the_dead_letters_is_not_over(app):
    """It is rejected, not acknowledged: what brings it back is to run."""
    task = declare(app, acks_late=True, acks_on_failure_or_timeout=False)
    fail(deliver(app, task), LOST)
    assert ("reject", False) in app.locks.done
    assert DONE not in app.locks.done


def test_a_message_acknowledged_early_is_over_with_its_child(app):
    """Nothing can come again but a copy, and that must not run."""
    request = deliver(app, declare(app))
    request.acknowledge()
    fail(request, LOST)
    assert told(app) == ["ack", DONE, *RELEASE]


@pytest.mark.parametrize("late", [True, False])
def test_a_task_that_was_cancelled_may_run_again(app, late):
    """A cold shutdown leaves it to the broker, or to a copy: nothing is remembered as done."""
    request = deliver(app, declare(app, acks_late=late))
    if not late:
        request.acknowledge()
    request._already_cancelled = True
    fail(request, Terminated(15))
    assert told(app) == ["ack"] * (not late) + RELEASE


@pytest.mark.parametrize("when", ["waiting", "other pool", "disabled"])
def test_where_there_is_nothing_to_release(app, when):
    request = deliver(app, declare(app, acks_late=True))
    if when == "waiting":
        request.worker_pid = None
    plugin_for(app).has_children = when != "other pool"
    if when == "disabled":
        with locks_disabled():
            fail(request, LOST)
    else:
        fail(request, LOST)
    assert told(app) == ["ack"]


def test_the_lock_is_that_of_the_child(app):
    task = declare(app, acks_late=True)
    request = deliver(app, task, retries=2, replaced_task_nesting=1)
    fail(request, LOST)
    child = Context(request.request_dict, args=request.args, kwargs=request.kwargs)
    owner = word_in(child.delivery_info, OWNER)
    assert len(owner) == 32
    assert ("release", task.lock_name(["seven"]), owner, 0.0) in app.locks.done
    assert ("mark", execution_id("bill", "me", "0" * 32, 2, 1), "done", 3600.0) in app.locks.done


@pytest.mark.parametrize("silent", [1, 2])
def test_of_a_thousand_places_those_are_released_that_it_has(app, silent):
    """Each costs a round; unless so few nodes answer that it may have any."""
    request = deliver(app, declare(app, lock_limit=1000))
    app.locks.held["seven#7"] = [{"token": request._delivery.owner[:8]}]
    app.locks.held["seven#8"] = [{"token": "0" * 8}]
    app.locks.holders, app.locks.silent = [{}, {}], silent
    fail(request, LOST)
    released = [d[1] for d in app.locks.done if d[0] == "release"]
    assert released == ["seven#7"] if silent == 1 else len(released) == 999


def test_its_call_says_on_how_many_places_it_may_be(app):
    """And what its start counts for stands: no place of the rate is among them."""
    task = declare(app, lock_limit=lambda _task, args, _kwargs: len(args[0]), lock_rate="9/s")
    request = deliver(app, task)
    app.locks.silent, app.locks.outcomes = 5, [ReleaseOutcome.UNKNOWN] * 30
    fail(request, LOST)
    released = {d[1] for d in app.locks.done if d[0] == "release"}
    assert released == {"seven", "seven#1", "seven#2", "seven#3", "seven#4"}


def test_where_only_starts_are_counted_nothing_is_released(app):
    task = declare(app, lock_limit=None, lock_rate="9/s")
    fail(deliver(app, task), LOST)
    assert not [d for d in app.locks.done if d[0] == "release"]


def test_all_its_places_are_tried_for_as_long_as_a_lease(app):
    request = deliver(app, declare(app, lock_limit=1000, lock_ttl=1.0))
    app.locks.silent, app.locks.outcomes = 5, [ReleaseOutcome.UNKNOWN] * 3000
    began = app.clock()
    fail(request, LOST)
    assert app.clock() - began < 1.1
    assert len({d[1] for d in app.locks.done if d[0] == "release"}) == 1000


def test_min_hold_is_kept_for_a_dead_child_too(app, monkeypatch):
    """What is left of it goes with the release, counted from the grant, clock set or not."""
    task, now = declare(app, min_hold=10.0), 1.7e9
    monkeypatch.setattr("celery_redlock.lock.clock.wall", lambda: now)
    for granted, left in ((-4, 6.0), (3600, 10.0), (-3600, 0.0)):
        request = deliver(app, task)
        request.time_start = now - 1000
        holder = {"token": request._delivery.owner[:8], "since": now + granted}
        app.locks.holders = [{}, holder, holder]
        app.locks.done.clear()
        fail(request, LOST)
        (_, _, _, keep), *_ = [d for d in app.locks.done if d[0] == "release"]
        assert keep == pytest.approx(left)


def test_nodes_that_do_not_answer_are_asked_again(app):
    app.locks.outcomes = [ReleaseOutcome.UNKNOWN] * 3 + [ReleaseOutcome.EXPIRED]
    fail(deliver(app, declare(app)), LOST)
    assert told(app).count("release") == 4
    app.locks.outcomes = [ReleaseOutcome.UNKNOWN] * 1000
    app.locks.done.clear()
    app.tasks["bill"].lock_ttl = 0.2
    fail(deliver(app, app.tasks["bill"]), LOST)
    assert 2 <= told(app).count("release") <= 25


@pytest.mark.parametrize("is_known", [True, False])
def test_of_many_places_that_of_the_child_is_released(app, is_known):
    task = declare(app, acks_late=True, lock_limit=3)
    request = deliver(app, task)
    owner, problem = request._delivery.owner, "" if is_known else "no answer in time"
    app.locks.labels = ("a", "b", "c")
    holders = [{}, {"token": owner[:8]}, {"token": "f" * 8}]
    app.locks.inspect_all = lambda names: [
        [SimpleNamespace(holder=holders[number], problem=problem)] * 3
        for number, _ in enumerate(names)
    ]
    released = []
    app.locks.release_for = lambda name, who, *, place, **_: (
        released.append((name, who == owner, place)) or ReleaseOutcome.RELEASED
    )
    fail(request, TimeLimitExceeded(1))
    names = [("seven", True, 0), ("seven#1", True, 1), ("seven#2", True, 2)]
    assert released == (names[1:2] if is_known else names)


def test_a_child_that_will_not_die_is_left_its_lock(app, monkeypatch):
    """Whoever is not proven dead may still be at work."""
    monkeypatch.setattr(lost_child, "wait_until_dead", lambda pid, longest: False)
    fail(deliver(app, declare(app, acks_late=True)), TimeLimitExceeded(1))
    assert told(app) == ["ack", DONE]


@pytest.mark.parametrize("error", [ConfigurationError("no"), RuntimeError("no")])
def test_a_failure_of_ours_is_told_and_does_no_harm(app, monkeypatch, caplog, error):
    """A name that cannot be made again: the lease ends by itself, and Celery goes on."""
    caplog.set_level("INFO", "celery_redlock")
    task = declare(app)

    def refuse(*_):
        raise error

    monkeypatch.setattr(type(task), "lock_name", refuse)
    fail(deliver(app, task), LOST)
    assert "whose process 4711 was lost" in caplog.text
    assert "release" not in told(app)


@pytest.mark.parametrize("how", ["terminate", "cancel"])
def test_a_revoke_does_not_wait_for_celery_to_note_the_death(app, how):
    """Celery may take seconds for that; the process has a handle."""
    request = deliver(app, declare(app, acks_late=True))
    pool = SimpleNamespace(terminate_job=lambda pid, signal: None)
    getattr(request, how)(pool)
    over = ["ack", DONE] if how == "terminate" else []
    assert told(app) == [*over, *RELEASE]


@pytest.mark.parametrize("stamp", ["eu", ["us", "eu"], "us", None, {"eu": 1}])
def test_a_task_that_waits_is_revoked_by_its_stamps_too(app, monkeypatch, stamp):
    """As by ``revoke_by_stamped_headers``, long before its time has come."""
    ended = []
    task = declare(app, unique_until="finished")
    header = {**HEADER, "reservation": ["7", "a" * 40, "finished"]}
    request = deliver(
        app, task, redlock=header, stamps={"tenant": stamp}, stamped_headers=["tenant"]
    )
    request.time_start = None
    monkeypatch.setitem(revokes.revoked_stamps, "tenant", ["eu"])
    monkeypatch.setattr(RedlockRequest, "leave_queue", lambda self, how: ended.append((self, how)))
    revokes.let_go_of_revoked()
    is_meant = "eu" in (stamp or ())
    assert ended == ([(request, Outcome.REVOKED)] if is_meant and stamp != {"eu": 1} else [])


class Consumer:
    def __init__(self, app):
        self.app, self.timer = app, Timer()


def test_a_worker_that_connects_again_goes_on_to_look_for_revokes(app):
    """Up to 5.6 Celery clears the timer when a connection breaks, and then starts these again."""
    declare(app)
    named = "celery_redlock.task.worker.revokes:NoteRevokes"
    assert named in app.steps["consumer"]
    consumer = Consumer(app)
    step = NoteRevokes(consumer)
    for clears in (False, True, False):
        step.start(consumer)
        assert sum(not entry.cancelled for *_, entry in consumer.timer.queue) == 1
        if clears:
            consumer.timer.clear()
        step.stop(consumer)
    assert all(entry.cancelled for *_, entry in consumer.timer.queue)


def test_an_owner_is_seen_by_the_child_alone(app):
    """Fresh for every delivery; in no header, no `inspect`, and not before the body's eyes."""
    task = declare(app)
    first, second = deliver(app, task), deliver(app, task)
    assert first._delivery.owner != second._delivery.owner
    assert first._delivery.owner not in json.dumps(first.info(), default=str)
    child = Context(first.request_dict, args=(), kwargs={})
    assert first._delivery.owner not in str(child.headers)
    assert word_in(child.delivery_info, OWNER) == first._delivery.owner
    hide(child)
    assert first._delivery.owner not in repr(child)
    assert word_in(child.delivery_info, OWNER) is None


@pytest.mark.parametrize("kind", ["pickle", "yaml"])
def test_the_child_knows_how_its_message_was_written(app, kind):
    """Its arguments may be what the task's own serializer cannot write."""
    task = declare(app)
    content_type = registry.name_to_type[kind]
    request = deliver(app, task, content_type=content_type)
    child = Context(request.request_dict, args=(["seven"],), kwargs={})
    assert task.signature_from_request(child).options["serializer"] == kind


@pytest.mark.parametrize(
    "info",
    [None, {}, *({"redlock_owner": forged} for forged in (7, "", "f" * 31, "F" * 32, "f" * 200))],
)
def test_a_request_without_an_owner_has_none(info):
    assert word_in(info, OWNER) is None


def test_the_parent_has_the_options_that_the_slot_of_a_message_makes(app, monkeypatch):
    """As its child has: a run that waits for the one before it stands for its name no longer."""
    lives = []
    known = SimpleNamespace(end=lambda *_, life, **__: lives.append(life))
    monkeypatch.setattr(Plugin, "reservations_for", lambda _, report: known)
    task = declare(app, acks_late=True, reject_on_worker_lost=True)
    slot = ["nightly", "2026-01-01T00:00:00.000+00:00", "buffer_one"]
    reservation = ["seven", "a" * 40, "finished"]
    fail(deliver(app, task, redlock={**HEADER, "slot": slot, "reservation": reservation}), LOST)
    assert lives == [BUFFERED_FOR]
