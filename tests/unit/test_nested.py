"""Executions within executions, and what comes between a body and its stored result."""

from __future__ import annotations

import contextvars
import threading

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from celery_redlock import RedlockTask, current_lock
from celery_redlock.task.messages.delivery import Delivery
from celery_redlock.task.messages.envelope import Envelope
from celery_redlock.testing import memory_quorum

PUBLISH = "0" * 32


@pytest.fixture
def app(monkeypatch):
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.sent = []

    def send_task(name, args=None, kwargs=None, **options):
        app.sent.append(options)
        return app.AsyncResult(options["task_id"])

    monkeypatch.setattr(app, "send_task", send_task)
    with memory_quorum(app) as app.quorum:
        yield app
    app.close()


def deliver(task, *args, **fields):
    header = {"v": 1, "task_id": "me", "id": PUBLISH}
    request = {"id": "me", "task": task.name, "retries": 0, "hostname": "w", "redlock": header}
    request |= {"is_eager": False, "delivery_info": {"routing_key": "celery"}, **fields}
    return build_tracer(task.name, task, app=task.app)("me", args, {}, request)


def stored(app, kind):
    store = app.quorum.nodes[0].model.keyspace.store
    return {key: held for key, held in store.items() if f":{kind}:".encode() in key}


def is_done(app):
    (held,) = stored(app, "marker").values()
    return b"done" in repr(held).encode()


def test_a_call_under_the_tasks_own_id_takes_nothing_from_it(app):
    locks = []

    @app.task(base=RedlockTask, bind=True, name="bill", acks_late=True, shared=False)
    def bill(self, number):
        if number:
            self.apply((0,), task_id=self.request.id)
            locks.append(current_lock().name)

    deliver(bill, 1)
    assert locks == [bill.lock_name((1,))]
    assert is_done(app)


def test_what_a_hook_applies_does_not_keep_the_result_from_being_remembered(app):
    """Between the body and the stored result the task is over, but Celery is not through."""

    @app.task(base=RedlockTask, name="mail", shared=False)
    def mail():
        return "sent"

    class Mails(RedlockTask):
        abstract = True

        def on_success(self, *_):
            mail.apply()

    @app.task(base=Mails, name="bill", acks_late=True, shared=False)
    def bill(number):
        return number

    deliver(bill, 1)
    assert is_done(app)


def test_a_thread_that_outlives_its_body_has_not_the_lock_of_another(app):
    """With a copy of the context it would find that of the body which called ``apply()``."""
    go, found, threads = threading.Event(), [], []

    def ask():
        go.wait(60)
        try:
            found.append(current_lock().name)
        except RuntimeError:
            found.append(None)

    @app.task(base=RedlockTask, lock_key="inner", name="inner", shared=False)
    def inner():
        thread = threading.Thread(target=contextvars.copy_context().run, args=(ask,))
        thread.start()
        threads.append(thread)

    @app.task(base=RedlockTask, lock_key="outer", name="outer", shared=False)
    def outer():
        inner.apply()
        go.set()
        threads[0].join()

    outer.apply()
    assert found == [None]


def test_a_worker_that_ends_while_a_policy_acts_ends_no_reservation(app, monkeypatch):
    """The broker has the message still, and brings it back."""
    options = {"acks_late": True, "unique_until": "finished", "on_conflict": "reschedule"}

    @app.task(base=RedlockTask, name="bill", lock_key="bill", shared=False, **options)
    def bill():
        pytest.fail("it ran")

    bill.apply_async(task_id="me")
    header = app.sent[0]["headers"]["redlock"]

    def torn(*_, **__):
        raise SystemExit

    monkeypatch.setattr(app, "send_task", torn)
    with app.quorum.hold("bill"), pytest.raises(SystemExit):
        deliver(bill, redlock=header)
    assert stored(app, "queued")


@pytest.mark.parametrize("error", [ValueError, None])
def test_what_fails_before_it_is_called_ends_its_reservation(app, error):
    """Celery calls ``before_start`` outside of the task."""

    class Checks(RedlockTask):
        abstract = True

        def before_start(self, *_):
            if error:
                raise error

    @app.task(base=Checks, name="bill", unique_until="finished", shared=False)
    def bill():
        return 1

    bill.apply_async(task_id="me")
    assert stored(app, "queued")
    deliver(bill, redlock=app.sent[0]["headers"]["redlock"])
    assert not stored(app, "queued")


def test_what_a_hook_publishes_under_the_tasks_own_id_follows_it(app):
    """The task is over, but its lock may still be on its way back: that is no conflict."""

    class Again(RedlockTask):
        abstract = True

        def on_failure(self, exc, task_id, args, kwargs, einfo):
            self.apply_async(args, kwargs, task_id=task_id)

    @app.task(base=Again, name="bill", shared=False)
    def bill():
        raise ValueError

    deliver(bill)
    (sent,) = app.sent
    first = Delivery.of(
        bill, {"id": "me", "redlock": {"v": 1, "task_id": "me", "id": PUBLISH}}, "w"
    )
    again = Delivery.of(bill, {"id": "me", "redlock": sent["headers"]["redlock"]}, "w")
    assert again.execution != first.execution
    assert again.is_previous_execution({"task_id": "me", "execution": first.execution})


def test_options_that_make_no_sense_do_not_hide_how_a_task_failed(app, caplog):
    """Its arguments make no name, so that it fails; what it leaves is told in the log."""

    @app.task(base=RedlockTask, name="bill", unique_until="finished", shared=False)
    def bill(number):
        pytest.fail("it ran")

    reservation = ["bill", "a" * 40, "finished"]
    header = {"v": 1, "task_id": "me", "id": PUBLISH, "reservation": reservation}
    bill.lock_ttl = 10**9
    failed = deliver(bill, redlock=header)
    assert isinstance(failed.info.retval, TypeError)
    assert "may leave something on the nodes" in caplog.text


def test_the_owner_of_a_lock_is_not_shown():
    """Its token begins with it, and values end in logs."""
    delivery = Delivery("me", Envelope(), "e" * 32, may_be_repeated=True, owner="0wner" * 6)
    assert "0wner" not in repr(delivery)
