"""What counts the starts of a task, by its rate and of its message: taken, and taken back."""

from __future__ import annotations

import contextlib

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Reject

from celery_redlock import LockKeyError, LockTaken, Rate, RedlockTask
from celery_redlock.lock.records import RATE, STARTS
from celery_redlock.ops.call import CallError, limits_in_call
from celery_redlock.task.execution import execution
from celery_redlock.task.execution import start as starting
from celery_redlock.task.execution.begun import Refused
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.execution.execution import latest_execution
from celery_redlock.task.execution.plan import Situation
from celery_redlock.testing import memory_quorum

HEADER = {"v": 1, "task_id": "me", "id": "0" * 32}


@pytest.fixture
def app():
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    with memory_quorum(app) as app.quorum:
        yield app
    app.close()


def declare(app, body=lambda: None, **options):
    known = {"base": RedlockTask, "name": "report", "shared": False, "lock_key": "report"}

    def report():
        return body()

    app.task(**{**known, **options})(report)
    return app.tasks["report"]


def trace(task):
    """Deliver *task* as a worker does, with all that comes after its body."""
    request = {"id": "me", "redlock": HEADER, "delivery_info": {}, "hostname": "here"}
    before = latest_execution.get()
    try:
        build_tracer(task.name, task, app=task.app)("me", (), {}, request)
    finally:
        latest_execution.set(before)


def counted(app):
    """Return how many starts the nodes have, by rates and of messages."""
    names = [key.decode() for key in app.quorum.nodes[0].model.keyspace.store]
    return [sum(kind in name for name in names if ":lock:" in name) for kind in (RATE, STARTS)]


# -- by a call ---------------------------------------------------------------------------------


def test_a_call_may_have_neither_lock_nor_rate(app):
    task = declare(app, lambda: "ran", lock_limit=None, lock_rate=lambda *_: None)
    assert task.apply().get() == "ran"
    with pytest.raises(CallError, match="takes no lock, and has no lock_rate"):
        limits_in_call(task)


@pytest.mark.parametrize("digits", [10, 400, 5000])
def test_a_number_that_a_message_says_is_no_rate_if_no_float_can_hold_it(app, digits):
    """Python refuses to read so many digits, or to divide by so much: with other errors."""
    task = declare(app, lock_limit=None, lock_rate=lambda *_: "9" * digits + "/s")
    with pytest.raises(LockKeyError, match="gave no rate"):
        task.apply(throw=True)


def test_a_rate_in_next_to_no_time_is_one():
    assert Rate(5, 5e-324).burst == 5


# -- late --------------------------------------------------------------------------------------


def starts_early(app, monkeypatch, late):
    """Return whether another body starts 54 s after one that began so *late*: of one a minute."""
    task = declare(app, lambda: "ran", lock_limit=None, lock_rate="1/m", on_conflict="fail")
    monkeypatch.setattr(starting, "store_started", lambda _: app.quorum.clock.tick(late))
    assert task.apply().get() == "ran"
    app.quorum.clock.tick(54)
    return task.apply().state == "SUCCESS"


@pytest.mark.parametrize("late", [0, 3, 10, 30])
def test_a_body_that_begins_late_counts_from_then(app, monkeypatch, late):
    """As where the result backend takes its time to store that it has started."""
    assert not starts_early(app, monkeypatch, late)


def test_else_another_would_start_in_its_window(app, monkeypatch):
    monkeypatch.setattr(Claim, "count_from_now", lambda _: None)
    assert starts_early(app, monkeypatch, 10)


# -- taken back --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_start_counts_until_the_result_is_stored(app, monkeypatch, is_stored):
    """A result that takes more memory than there is kills its worker, and comes again."""

    def store(task_id, result, state, **_):
        assert counted(app)[1] == 1
        if not is_stored:
            raise SystemExit

    monkeypatch.setattr(app.backend, "store_result", store)
    task = declare(app, acks_late=True, max_deliveries=2)
    with contextlib.suppress(SystemExit):
        trace(task)
    assert counted(app)[1] == (0 if is_stored else 1)


def test_without_a_memory_of_what_has_finished_a_start_is_taken_back_too(app):
    trace(declare(app, acks_late=True, max_deliveries=2, dedup_ttl=0.0))
    assert counted(app) == [0, 0]


@pytest.mark.parametrize("error", [Reject(requeue=True), Reject(requeue=False), Ignore()])
def test_a_body_that_ends_without_a_result_has_killed_nothing(app, error):
    def end():
        assert counted(app)[1] == 1
        raise error

    trace(declare(app, end, acks_late=True, max_deliveries=2))
    assert counted(app)[1] == 0


@pytest.mark.parametrize("is_its_turn", [True, False])
def test_what_is_not_started_after_all_does_not_count(app, monkeypatch, is_its_turn):
    """The next run is granted its lock before it finds that another one is queued before it."""
    both = []

    def begin(granted, args, kwargs):
        both.append(counted(app))
        if is_its_turn:
            return starting.start(granted, args, kwargs)
        return Refused(granted.claim, LockTaken("report", {}, {}), Situation.NEXT)

    monkeypatch.setattr(execution, "start", begin)
    monkeypatch.setattr(app, "send_task", lambda *_, **__: None)
    trace(declare(app, acks_late=True, max_deliveries=2, lock_rate="5/m"))
    assert both == [[1, 1]]
    assert counted(app) == [1 if is_its_turn else 0, 0]


@pytest.mark.parametrize("is_eager", [True, False])
def test_what_nothing_delivers_again_is_not_counted(app, is_eager):
    seen = []
    task = declare(app, lambda: seen.append(counted(app)[1]), acks_late=True, max_deliveries=2)
    (task.apply if is_eager else lambda: trace(task))()
    assert seen == [0 if is_eager else 1]
