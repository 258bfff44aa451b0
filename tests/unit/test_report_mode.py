"""Report mode on nodes in memory: every body runs, and an event says what would have happened."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import SoftTimeLimitExceeded

from celery_redlock import (
    ConfigurationError,
    Fail,
    LockKeyError,
    Queue,
    RedlockTask,
    Reschedule,
    Retry,
    RunUnlocked,
    Skip,
    current_lock,
    events,
)
from celery_redlock.beat.entries import places_of_run
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.held import NotLocked
from celery_redlock.lock.waiting.waiting import InLine, wait_request
from celery_redlock.observers.records import record_of
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.journal_view import is_refusal
from celery_redlock.task.execution import reporting
from celery_redlock.task.execution.outcome import Outcome, records_after
from celery_redlock.task.execution.plan import Situation, plan
from celery_redlock.task.execution.reporting import event_of
from celery_redlock.task.messages.delivery import Delivery
from celery_redlock.task.messages.envelope import Envelope
from celery_redlock.task.messages.reservation import Reservation
from celery_redlock.task.messages.waiting import Waiting
from celery_redlock.task.naming.task_lock import lock_of
from celery_redlock.testing import memory_quorum
from support.options import OPTIONS

ids = map(str, itertools.count())


@pytest.fixture
def app(monkeypatch):
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.sent, app.told = [], []
    app.conf.update(redlock_mode="report", redlock_observers=[app.told.append])

    def send_task(name, args=None, kwargs=None, **options):
        app.sent.append(options)
        return app.AsyncResult(options["task_id"])

    monkeypatch.setattr(app, "send_task", send_task)
    monkeypatch.setattr(reporting, "_warned", set())
    with memory_quorum(app) as app.quorum:
        yield app
    app.close()


def deliver(task, *args, task_id=None, header=None, delivery_info=None, **fields):
    task_id = task_id or f"task-{next(ids)}"
    header = header or {"v": 1, "task_id": task_id, "id": "0" * 32}
    request = {"id": task_id, "task": task.name, "retries": 0, "hostname": "w", "redlock": header}
    info = {"routing_key": "celery", **(delivery_info or {})}
    request |= {"is_eager": False, "delivery_info": info, **fields}
    traced = build_tracer(task.name, task, app=task.app)(task_id, args, {}, request)
    if isinstance(traced[0], ExceptionInfo):
        raise traced[0].exception
    return traced[0]


def declare(app, body=lambda _task: "ran", **options):
    @app.task(
        name="bill", base=RedlockTask, bind=True, shared=False, **{"lock_key": "{key}", **options}
    )
    def bill(self, key):
        return body(self)

    app.finalize()
    return app.tasks["bill"]


def reported(app, kind=events.TaskEvent):
    found = [event for event in app.told if isinstance(event, kind)]
    assert all(event.report for event in app.told if isinstance(event, events.LockEvent))
    return found


def keys(app, node=0):
    return {key.decode() for key in app.quorum.nodes[node].model.keyspace.store}


def nested(inner):
    todo = [inner]
    return lambda task: todo.pop()(task) if todo else "ran"


def test_to_count_deliveries_takes_no_time_from_the_note(app):
    """Where both do not fit into one answer's time, nothing would be known of the lock."""
    for node in app.quorum.nodes:
        node.slow(0.7 * app.conf.get("redlock_node_timeout", 0.05))
    task = declare(app, acks_late=True, max_deliveries=3)
    assert deliver(task, "k") == "ran"
    assert reported(app) == []


def test_a_message_that_kills_its_worker_is_reported_and_runs_on(app):
    ran = []

    def kill(_task):
        ran.append(1)
        raise SystemExit

    task = declare(app, kill, acks_late=True, max_deliveries=2)
    for _ in range(4):
        with contextlib.suppress(SystemExit):
            deliver(task, "k", task_id="one", delivery_info={"redelivered": True})
        app.quorum.clock.tick(task.app.conf.get("redlock_ttl", 30.0) * 2)  # its lock is nobody's
    assert [event.cause for event in reported(app, events.TaskRefused)] == ["deliveries"] * 2
    assert len(ran) == 4


# -- what the body sees --------------------------------------------------------------------------


def test_the_body_runs_without_a_lock_and_can_ask_for_it(app):
    """What uses its lock goes on as where a policy runs it unlocked."""

    def body(task):
        task.lock.ensure_held()
        held = current_lock()
        return isinstance(held, NotLocked), held.name, held.why, held.fence, held.is_lost

    assert deliver(declare(app, body), "k") == (True, "k", "report mode", None, False)
    assert reported(app) == []


def test_it_is_noted_while_it_runs_on_keys_that_no_lock_has(app):
    seen = set()
    task = declare(app, lambda _: seen.update(keys(app)))
    deliver(task, "k")
    assert "redlock:report:lock:k" in seen
    assert not {key for key in seen if key.startswith(("redlock:lock", "redlock:fence"))}
    left = {key for key in keys(app) if not key.startswith("redlock:node:")}
    assert {key.rpartition(":")[0] for key in left} == {"redlock:report:marker"}


def test_the_mode_of_a_task_wins(app):
    """Twin of both: one task enforces among tasks that report."""
    told = declare(app, lambda task: task.lock.fence, lock_mode="enforce")
    assert deliver(told, "k")
    assert not [event for event in app.told if getattr(event, "report", False)]


@pytest.mark.parametrize("mode", ["reports", "", 1])
def test_another_mode_is_refused(app, mode):
    with pytest.raises(ConfigurationError, match="lock_mode"):
        declare(app, lock_mode=mode)
    app.conf.redlock_mode = mode
    plugin_for(app).refresh()
    with pytest.raises(ConfigurationError, match="redlock_mode"):
        _ = plugin_for(app).settings


def test_a_prefix_that_leaves_no_room_is_refused(app):
    task = declare(app)
    for prefix, mode in (("p" * 33, "report"), ("p" * 34, "enforce")):
        app.conf.redlock_prefix, task.lock_mode = prefix, mode
        plugin_for(app).refresh()
        task.check_lock()
    task.lock_mode = "report"
    with pytest.raises(ConfigurationError, match="at most 33 bytes"):
        task.check_lock()


def test_a_worker_says_that_nothing_is_enforced(app, caplog):
    """Once, at its start. Twin: in the other mode it says nothing of it."""
    for mode, times in (("report", 1), ("enforce", 0)):
        caplog.clear()
        app.conf.redlock_mode = mode
        plugin_for(app).refresh()
        plugin_for(app).check()
        assert caplog.text.count("redlock_mode is 'report'") == times


# -- what is reported ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ("skip", events.TaskSkipped),
        ("fail", events.TaskRefused),
        ("retry", events.TaskRetried),
        ("reschedule", events.TaskRescheduled),
        ("queue", events.TaskQueued),
    ],
)
def test_an_overlap_is_reported_once_by_what_its_policy_says(app, policy, kind):
    inner = []

    def overlap(task):
        inner.append(deliver(task, "k", task_id="second"))
        inner.append("redlock:report:lock:k" in keys(app))
        return "first ran"

    task = declare(app, nested(overlap), on_conflict=policy)
    assert deliver(task, "k", task_id="first") == "first ran"
    assert inner == ["ran", True]
    (event,) = reported(app)
    assert type(event) is kind
    assert (event.task_id, event.cause, event.holder["task_id"]) == ("second", "conflict", "first")
    assert app.sent == []


def test_without_an_overlap_nothing_is_reported(app):
    """Twin: another name, or one after the other."""
    task = declare(app, nested(lambda task: deliver(task, "another")))
    assert [deliver(task, "k") for _ in range(3)] == ["ran"] * 3
    assert reported(app) == []


def test_a_copy_beside_the_original_is_a_redelivery(app):
    elsewhere = contextvars.Context().run  # no call within the body, but another child's
    task = declare(app, nested(lambda task: elsewhere(deliver, task, "k", task_id="same")))
    assert deliver(task, "k", task_id="same") == "ran"
    (event,) = reported(app, events.TaskSkipped)
    assert event.cause == "redelivered"


def test_a_copy_after_the_end_is_late(app):
    """It runs again, as without us. Twin: with nothing remembered nobody knows."""
    task = declare(app)
    assert [deliver(task, "k", task_id="same") for _ in range(3)] == ["ran"] * 3
    assert [event.cause for event in reported(app, events.TaskSkipped)] == ["finished"] * 2
    app.told.clear()
    task.dedup_ttl = 0
    assert [deliver(task, "other", task_id="same again") for _ in range(2)] == ["ran"] * 2
    assert reported(app) == []


def test_a_retry_that_meets_the_end_of_the_one_before_is_no_overlap(app):
    """An enforced one would wait a moment."""
    elsewhere = contextvars.Context().run
    retry = {"task_id": "same", "retries": 1}
    task = declare(app, nested(lambda task: elsewhere(deliver, task, "k", **retry)))
    deliver(task, "k", task_id="same")
    assert reported(app) == []


def test_a_retry_that_comes_before_the_release_is_noted_as_well(app, monkeypatch):
    """Whoever runs beside it meets its note, and it counts as one that ran."""
    task, retry = declare(app), {"task_id": "same", "retries": 1}
    note = plugin_for(app).reports.take(LockRequest("k", 30.0, info={"task_id": "same"}))
    waits = plugin_for(app).reports.driver
    monkeypatch.setattr(waits, "_sleep", lambda _: plugin_for(app).reports.give_back(note))
    deliver(task, "k", **retry)
    assert len(reported(app, events.LockAcquired)) == 2
    assert reported(app) == []


@pytest.mark.parametrize("state", ["down", "hang"])
def test_without_a_quorum_it_runs_and_is_reported(app, state):
    """For one round at most; the policy for that says what would have happened."""
    task = declare(app)
    deliver(task, "k")
    for node in app.quorum.nodes[:3]:
        getattr(node, state)()
    before = app.quorum.clock.now()
    assert deliver(task, "k") == "ran"
    assert app.quorum.clock.now() - before < plugin_for(app).settings.rules.node_timeout + 0.01
    (event,) = reported(app)
    assert (type(event), event.cause) == (events.TaskRescheduled, "unavailable")


def test_looking_for_the_execution_before_ends_with_the_round(app, monkeypatch):
    """As one of many places may be its."""
    task, reports = declare(app, lock_limit=2), plugin_for(app).reports
    for _ in range(2):
        reports.take(LockRequest("k", 30.0, limit=2))
    inspect_all = reports.inspect_all

    def of_nodes_that_hang(*asked):
        for node in app.quorum.nodes:
            node.hang()
        return inspect_all(*asked)

    monkeypatch.setattr(reports, "inspect_all", of_nodes_that_hang)
    before = app.quorum.clock.now()
    assert deliver(task, "k", task_id="same", retries=1) == "ran"
    assert app.quorum.clock.now() - before < plugin_for(app).settings.rules.node_timeout + 0.01
    assert len(reported(app)) == 1


def test_nodes_that_were_just_restarted_are_asked(app):
    """Nobody relies on what they say, so nothing is unknown for a minute."""
    task = declare(app)
    for node in app.quorum.nodes:
        node.forget()
    assert deliver(task, "k") == "ran"
    assert reported(app) == []


def test_a_lease_that_would_have_been_lost_is_reported_once(app):
    def lose(task):
        for node in app.quorum.nodes:
            node.down()
        app.quorum.clock.tick(100)
        task.lock.ensure_held()
        return "went on"

    assert deliver(declare(app, lose), "k") == "went on"
    (event,) = reported(app, events.LeaseLost)
    assert event.task == "bill"


def test_a_long_body_keeps_its_note(app):
    def overlap(task):
        app.quorum.clock.tick(100)
        return deliver(task, "k")

    deliver(declare(app, nested(overlap)), "k")
    assert reported(app, events.LeaseLost) == []
    assert len(reported(app)) == 1


def test_several_names_and_places(app):
    """Places are taken one by one; of several names one that is held is enough."""

    def overlap(task):
        return [deliver(task, "k") for _ in range(2)] and deliver(task, "k")

    task = declare(app, nested(lambda task: deliver(task, "k")), lock_limit=2)
    deliver(task, "k")
    assert reported(app) == []
    app.tasks.pop("bill")
    task = declare(app, nested(overlap), lock_key=("one", "a {key}"))
    deliver(task, "k")
    assert [event.name for event in reported(app)] == ["a k"] * 3


# -- whatever goes wrong -------------------------------------------------------------------------


def test_arguments_that_make_no_name_change_nothing(app, caplog):
    """It runs, is reported, and has one warning for all such calls. Twin: an enforced one fails."""
    task = declare(app, lock_key=lambda *_: 1 / 0)
    assert [deliver(task, "k") for _ in range(3)] == ["ran"] * 3
    assert [it.levelname for it in caplog.records].count("WARNING") == 1
    assert [event.cause for event in reported(app, events.TaskRefused)] == ["unnamed"] * 3
    task.lock_mode = "enforce"
    with pytest.raises(LockKeyError):
        deliver(task, "k")


def test_a_soft_time_limit_is_the_tasks(app, monkeypatch):
    """It may strike while the nodes are asked."""

    def strike(*_, **__):
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(reporting, "take", strike)
    with pytest.raises(SoftTimeLimitExceeded):
        deliver(declare(app), "k")


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    ("policy", "later", "at_once"),
    [
        (Skip(), events.TaskSkipped, events.TaskSkipped),
        (Fail(), events.TaskRefused, events.TaskRefused),
        (Retry(), events.TaskRetried, events.TaskRefused),
        (Retry(7), events.TaskRetried, events.TaskRefused),
        (Reschedule(), events.TaskRescheduled, events.TaskRefused),
        (Reschedule(max_reschedules=0), events.TaskRefused, events.TaskRefused),
        (Queue(), events.TaskQueued, events.TaskRefused),
        (RunUnlocked(), type(None), type(None)),
    ],
)
def test_what_each_policy_would_have_done(policy, later, at_once, eager):
    about = {"name": "k", "task": "bill", "task_id": "me", "cause": "conflict", "holder": {}}
    options = replace(OPTIONS, on_conflict=policy, on_unavailable=policy)
    for situation in (Situation.TAKEN, Situation.UNAVAILABLE):
        planned = plan(options, situation, is_eager=eager)
        event = event_of(planned, about, 180)
        assert type(event) is (at_once if eager else later)
        assert event is None or event.report
        if isinstance(event, events.TaskRetried):
            assert event.countdown == (180 if policy.countdown is None else policy.countdown)


# -- at publish ----------------------------------------------------------------------------------

UNIQUE = {"unique_until": "finished", "unique_for": 100}


def reservation_in(options):
    return Envelope.of(options["headers"]["redlock"], options["task_id"]).reservation


@pytest.mark.parametrize("how", ["join", "fail", "rerun"])
def test_a_duplicate_is_published_and_reported(app, how):
    task = declare(app, **UNIQUE, on_duplicate=how)
    first, second = task.delay("k"), task.delay("k")
    assert [it["task_id"] for it in app.sent] == [first.id, second.id]
    assert [first.duplicate, second.duplicate] == [False, False]
    (event,) = reported(app, events.DuplicatePublished)
    assert (event.holder_id, event.on_duplicate) == (first.id, how)
    assert reservation_in(app.sent[0]).is_report
    assert reservation_in(app.sent[1]) is None


@pytest.mark.parametrize("mode", ["report", "enforce"])
def test_the_end_of_the_task_ends_its_note(app, mode):
    """In a worker of either mode: the next publish is no duplicate."""
    task = declare(app, **UNIQUE)
    task.delay("k")
    (sent,) = app.sent
    task.lock_mode = mode
    deliver(task, "k", task_id=sent["task_id"], header=sent["headers"]["redlock"])
    task.lock_mode = "report"
    task.delay("k")
    assert [it for it in app.told if isinstance(it, events.DuplicatePublished)] == []


@pytest.mark.parametrize("mode", ["report", "enforce"])
def test_a_worker_that_reports_ends_an_enforced_reservation(app, mode):
    """What was reserved before the switch keeps nobody out after it."""
    task = declare(app, **UNIQUE, lock_mode="enforce")
    task.delay("k")
    (sent,) = app.sent
    assert not reservation_in(sent).is_report
    assert task.delay("k").duplicate
    task.lock_mode = mode
    deliver(task, "k", task_id=sent["task_id"], header=sent["headers"]["redlock"])
    task.lock_mode = "enforce"
    assert not task.delay("k").duplicate


def test_an_enforcing_publisher_meets_no_note(app):
    task = declare(app, **UNIQUE)
    task.delay("k")
    task.lock_mode = "enforce"
    assert not task.delay("k").duplicate
    assert len(app.sent) == 2


def test_newest_arguments_that_were_merged_are_not_lost(app):
    """Enforced at publish, reported at run time: the run has them all the same."""
    seen = []

    @app.task(base=RedlockTask, shared=False, lock_key="k", on_duplicate="rerun", **UNIQUE)
    def index(value):
        seen.append(value)

    task = app.tasks[index.name]
    task.lock_mode = "enforce"
    task.delay("old")
    task.delay("new")
    (sent,) = app.sent
    task.lock_mode = "report"
    deliver(task, "old", task_id=sent["task_id"], header=sent["headers"]["redlock"])
    assert seen == ["new"]


@pytest.mark.parametrize("mode", ["report", "enforce"])
def test_what_was_merged_and_is_broken_keeps_no_body_from_running(app, monkeypatch, mode):
    """It runs with its own arguments. Twin: enforced, it fails."""
    task = declare(app, **UNIQUE, lock_mode="enforce")
    task.delay("k")
    (sent,) = app.sent
    task.lock_mode = mode
    monkeypatch.setattr(
        "celery_redlock.task.execution.start.newest_call",
        lambda _: ((), {"what": "is no argument"}),
    )
    message = {"task_id": sent["task_id"], "header": sent["headers"]["redlock"]}
    if mode == "report":
        assert deliver(task, "k", **message) == "ran"
    else:
        with pytest.raises(LockKeyError):
            deliver(task, "k", **message)


def test_a_publish_goes_out_without_a_quorum(app):
    task = declare(app, **UNIQUE, on_unavailable="fail")
    for node in app.quorum.nodes[:3]:
        node.down()
    task.delay("k")
    assert len(app.sent) == 1


def test_a_publish_goes_out_without_a_name(app):
    """Twin: an enforced one says what is wrong."""
    task = declare(app, **UNIQUE, lock_key=lambda *_: 1 / 0)
    task.delay("k")
    assert len(app.sent) == 1
    task.lock_mode = "enforce"
    with pytest.raises(LockKeyError):
        task.delay("k")


def test_a_publish_that_fails_leaves_no_note(app, monkeypatch):
    task = declare(app, **UNIQUE)
    with monkeypatch.context() as broken:
        broken.setattr(app, "send_task", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            task.delay("k")
    task.delay("k")
    assert reported(app, events.DuplicatePublished) == []


def test_a_reports_reservation_is_nothing_to_older_workers():
    """They take a header with a word more for none at all; we read what we write."""
    reservation = Reservation("k", "a" * 40, "finished", is_report=True)
    assert Reservation.of(reservation.parts) == reservation
    assert len(reservation.parts) == 4
    assert Reservation.of([*reservation.parts[:3], "enforce"]) is None


def test_a_report_merges_nothing(app):
    """Its reservation ends as one of a task that has no other run."""
    task = declare(app, **UNIQUE, on_duplicate="rerun")
    options = lock_of(task).options
    ours, theirs = (
        records_after(
            Outcome.FINISHED, options, Reservation("k", "a" * 40, "finished", it), "finishing"
        )
        for it in (True, False)
    )
    assert (ours.after_result, theirs.after_result) == (False, True)


# -- beat, and whoever is told -----------------------------------------------------------------


@pytest.mark.parametrize(("mode", "names"), [("report", []), ("enforce", ["k"])])
def test_beat_looks_for_no_overlap_of_a_task_that_reports(app, mode, names):
    """It publishes the slot, and the worker reports the overlap."""
    entry = SimpleNamespace(args=("k",), kwargs={}, options={})
    assert places_of_run(declare(app, lock_mode=mode), entry) == names


def test_what_report_mode_reports_is_no_refusal():
    """Those who ask why a task did not run are not shown what ran."""
    about = {"name": "k", "task": "bill", "task_id": "me", "cause": "conflict"}
    told = [record_of(events.TaskSkipped(**about, report=it)) for it in (True, False)]
    assert [is_refusal(record) for record in told] == [False, True]


def test_an_event_that_reports_nothing_does_not_say_so():
    assert "report" not in record_of(events.LockReleased("k", 1.0))
    assert record_of(events.LockReleased("k", 1.0, report=True))["report"] is True


# -- messages of workers that enforce ------------------------------------------------------------


def test_a_message_that_waited_runs_and_leaves_the_line(app):
    """Without its lock; else the nodes would send it hints that are for those who want it."""
    task, locks = declare(app), plugin_for(app).locks
    waiting = Waiting("k", 1.0)
    header = Envelope(publish_id="0" * 32, waiting=waiting).header("me")["redlock"]
    delivery = Delivery.of(task, {"id": "me", "retries": 0, "redlock": header}, "w")
    another = InLine("k", "f" * 32, 2.0, {}, "c" * 16)
    for one in (waiting.in_line(task.name, "me", delivery.execution, "c" * 16), another):
        locks.driver.tell(wait_request(locks.rules, one))
    assert in_line(app) == [{delivery.execution, another.who}] * len(app.quorum.nodes)
    assert deliver(task, "k", task_id="me", header=header) == "ran"
    assert in_line(app) == [{another.who}] * len(app.quorum.nodes)


def in_line(app):
    asked = [node.model.ask(b"ZRANGE", b"redlock:line:k", b"0", b"-1") for node in app.quorum.nodes]
    known = [node.model.ask(b"HGETALL", b"redlock:waiters:k") for node in app.quorum.nodes]
    found = [{member[:32].decode() for member in members} for members in asked]
    assert found == [{who.decode() for who in pairs[::2]} for pairs in known]
    return found


def test_an_enforced_lock_is_neither_met_nor_broken(app):
    task = declare(app)
    with app.quorum.hold("k"):
        assert deliver(task, "k") == "ran"
        assert app.quorum.holder("k")
    assert reported(app) == []


def test_a_note_keeps_no_enforced_task_from_its_lock(app):
    inner = []

    def enforce(task):
        task.lock_mode = "enforce"
        inner.append(deliver(task, "k"))
        task.lock_mode = "report"
        return "ran"

    task = declare(app, nested(enforce))
    deliver(task, "k")
    assert inner == ["ran"]
    assert not [it for it in app.told if isinstance(it, events.TaskEvent)]
