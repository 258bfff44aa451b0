"""What is told as Celery events: which types and fields, where, and what consumers make of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.app import trace
from celery.events.state import State, Task
from kombu import Connection

from celery_redlock import events
from celery_redlock.observers.celery_events import CeleryEvents, message_of

HOLDER = {"task": "shop.bill", "task_id": "other", "host": "h", "pid": 7, "since": 1.0}
TASK = {"task": "shop.bill", "task_id": "me"}
REFUSED = {**TASK, "cause": "conflict", "holder": {**HOLDER, "token": "0123abcd"}}
EXAMPLES = [
    events.LockAcquired("key", 7, 0.1, **TASK),
    events.LockConflict("key", {**HOLDER, "token": "0123abcd"}, 0.1, **TASK),
    events.LockUnavailable("key", {"n1": "timeout"}, 0.1, **TASK),
    events.LockRenewed("key", 5.0, ttl=9.0, lag=0.1, **TASK),
    events.LeaseLost("key", "stolen", **TASK),
    events.LockReleased("key", 0.5, ttl=9.0, **TASK),
    events.TaskSkipped("key", **REFUSED),
    events.TaskRefused("key", **REFUSED),
    events.TaskRetried("key", **REFUSED, countdown=3.0),
    events.TaskRescheduled("key", **REFUSED, countdown=3.0, times=2),
    events.TaskQueued("key", **REFUSED, countdown=60.0, times=1, since=1.0),
    events.DuplicatePublished("key", task="shop.bill", holder_id="other", on_duplicate="join"),
    events.TasksWaiting("shop.bill", 3),
    events.NodeDown("n1", "refused"),
    events.NodeUp("n1"),
    events.NodeQuarantined("n1", 5.0),
    events.NodeClockJump("n1", 5.0),
    events.NodeMeasured("n1", 0.001, 0.2),
    events.LeaderElected("beat", 3),
    events.LeaderDeposed("beat", "resigned", 5.0),
    events.SlotPublished("nightly", "shop.bill", 1.0, "me", 0.1),
    events.SlotSkipped("nightly", "shop.bill", 1.0, "overlap"),
]
OF_THE_TASK = EXAMPLES[:11]
WORKER = "w1@host"


@pytest.fixture
def in_worker(monkeypatch):
    monkeypatch.setattr(trace, "_localized", [None, None, WORKER])


def app_with(**conf):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(conf)
    return app


def observer_of(app, *, sends_events=True):
    return CeleryEvents(SimpleNamespace(app=app, sends_events=sends_events))


class Consumer:
    def __init__(self, app):
        self.state = State()
        with Connection("memory://") as connection:
            self.receiver = app.events.Receiver(connection, handlers={"*": self.state.event})
        self.timestamp = 100.0

    def hear(self, message):
        self.receiver.process(*self.receiver.event_from_message(json.loads(json.dumps(message))))

    def hear_celery(self, kind, **fields):
        self.timestamp += 1.0
        about = {"uuid": "me", "hostname": WORKER, "pid": 7, "clock": int(self.timestamp)}
        times = {"timestamp": self.timestamp, "utcoffset": 0}
        self.hear({"type": f"task-{kind}", **about, **times, **fields})

    def hear_ours(self, event):
        self.timestamp += 1.0
        self.hear(message_of(event, self.timestamp, WORKER))

    @property
    def task(self):
        return self.state.tasks["me"]


@pytest.fixture
def consumer():
    return Consumer(app_with())


def test_every_event_has_a_type():
    types = [kind.celery_type for kind in events.KINDS.values()]
    assert len(set(types)) == len(types)


@pytest.mark.parametrize("event", OF_THE_TASK, ids=lambda e: type(e).__name__)
def test_what_a_task_did_is_filed_under_the_task(event):
    told = message_of(event, 5.0, WORKER)
    assert told["type"] == f"task-redlock-{event.celery_type}"
    assert (told["uuid"], told["name"], told["lock"]) == ("me", "shop.bill", "key")
    assert (told["hostname"], told["timestamp"]) == (WORKER, 5.0)


@pytest.mark.parametrize("event", EXAMPLES[11:], ids=lambda e: type(e).__name__)
def test_what_is_of_no_task_is_in_a_group_of_its_own(event):
    """A consumer would look for a task in it, or move a task to another worker."""
    told = message_of(event, 5.0, WORKER)
    assert told["type"] == f"redlock-{event.celery_type}"


@pytest.mark.parametrize("event", OF_THE_TASK, ids=lambda e: type(e).__name__)
def test_what_is_only_reported_has_a_type_of_its_own(event):
    """Who counts skipped tasks does not count one that ran."""
    told = message_of(dataclasses.replace(event, report=True), 5.0, WORKER)
    assert told["type"] == f"task-redlock-report-{event.celery_type}"
    assert told["report"] is True


def test_a_lock_outside_of_tasks_is_of_no_task():
    told = message_of(events.LockAcquired("key", 7, 0.1), 5.0, WORKER)
    assert told["type"] == "redlock-acquired"
    assert "uuid" not in told


def test_a_task_that_runs_in_no_worker_is_not_filed():
    """Run by `apply` in a publisher, it is no task of a worker's; nor is the publisher one."""
    told = message_of(OF_THE_TASK[0], 5.0, "")
    assert told["type"] == "redlock-acquired"
    assert told["uuid"] == "me"
    assert told["hostname"]


def test_a_duplicate_names_the_task_that_was_first():
    """That is the task that somebody looks for."""
    (event,) = (e for e in EXAMPLES if isinstance(e, events.DuplicatePublished))
    assert message_of(event, 5.0, "")["uuid"] == "other"


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda e: type(e).__name__)
def test_no_field_is_one_of_celerys(event):
    """Every field becomes an attribute of Celery's `Task`, and may replace none of it."""
    told = message_of(event, 5.0, WORKER)
    its_own = {"type", "hostname", "utcoffset", "pid", "timestamp", "uuid", "name"}
    assert {field for field in told if hasattr(Task(), field)} <= its_own
    assert not {"clock", "local_received"} & set(told)
    assert "0123abcd" not in json.dumps(told)
    fields = {field.name for field in dataclasses.fields(event)} - {
        "holder_id",
        "task_id",
        "task",
        "report",
    }
    assert {{"name": "lock"}.get(field, field) for field in fields} <= set(told)


@pytest.mark.parametrize("event", OF_THE_TASK, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("end", ["succeeded", "failed"])
def test_the_end_of_a_task_stays_what_it_was(consumer, event, is_late, end):
    consumer.hear_celery("received", name="shop.bill", args="(1,)", retries=0)
    consumer.hear_celery("started")
    if not is_late:
        consumer.hear_ours(event)
    consumer.hear_celery(end, runtime=0.5, result="2", exception="no")
    if is_late:
        consumer.hear_ours(event)
    assert consumer.task.state == {"succeeded": "SUCCESS", "failed": "FAILURE"}[end]
    assert (consumer.task.name, consumer.task.args) == ("shop.bill", "(1,)")
    assert consumer.task.worker.hostname == WORKER
    assert set(consumer.state.workers) == {WORKER}
    assert consumer.state.task_types() == ["shop.bill"]


def test_a_running_task_shows_what_it_did_last(consumer):
    consumer.hear_celery("received", name="shop.bill")
    consumer.hear_celery("started")
    consumer.hear_ours(OF_THE_TASK[0])
    assert consumer.task.state == "REDLOCK-ACQUIRED"
    assert consumer.task.started is not None
    assert not consumer.task.ready


def test_what_is_of_no_task_makes_neither_tasks_nor_workers(consumer):
    """A publisher is no worker; twin: in the group ``task`` it would be one."""
    for event in EXAMPLES[11:]:
        consumer.hear_ours(event)
    assert not consumer.state.tasks
    assert not consumer.state.workers
    duplicate = message_of(EXAMPLES[11], 5.0, "gen7@web")
    consumer.hear({**duplicate, "type": "task-redlock-duplicate"})
    assert set(consumer.state.workers) == {"gen7@web"}
    assert consumer.state.tasks["other"].worker.hostname == "gen7@web"


def test_an_event_named_like_a_method_would_break_the_consumer(consumer):
    """The twin of the renaming: why ``event`` is left out."""
    consumer.hear({**message_of(OF_THE_TASK[0], 5.0, WORKER), "event": "LockAcquired"})
    with pytest.raises(TypeError, match="not callable"):
        consumer.hear_ours(OF_THE_TASK[1])


@pytest.mark.parametrize(
    ("in_a_worker", "sends_events", "task_send_sent_event", "is_sent"),
    [
        (True, True, False, True),
        (True, False, False, False),
        (True, False, True, False),
        (False, False, True, True),
        (False, False, False, False),
    ],
)
def test_it_is_active_where_the_app_sends_events(
    monkeypatch, in_a_worker, sends_events, task_send_sent_event, is_sent
):
    """In a worker as its ``-E`` says, elsewhere as ``task_send_sent_event``; else not at all."""
    if in_a_worker:
        monkeypatch.setattr(trace, "_localized", [None, None, WORKER])
    app = app_with(task_send_sent_event=task_send_sent_event)
    observer = observer_of(app, sends_events=sends_events)
    told = []
    monkeypatch.setattr(observer._outbox, "put", told.append)
    observer(OF_THE_TASK[0])
    assert len(told) == is_sent


def test_where_nothing_is_sent_there_is_no_thread(in_worker):
    """The default costs whoever does not use it next to nothing."""
    before = set(threading.enumerate())
    observer = observer_of(app_with(), sends_events=False)
    for event in EXAMPLES:
        observer(event)
    observer.flush()
    assert set(threading.enumerate()) <= before


@contextlib.contextmanager
def receiver_of(app, heard):
    """Listen as a monitor does; yields what waits until *heard* has so many events."""
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": heard.append})
        with receiver.consumer_context() as (line, *_):

            def wait_for(count):
                while len(heard) < count:
                    line.drain_events(timeout=60)

            yield wait_for


def test_a_real_receiver_hears_all_of_it(in_worker):
    app, heard = app_with(), []
    with receiver_of(app, heard) as wait_for:
        observer = observer_of(app)
        for event in EXAMPLES:
            observer(event)
        observer.flush()
        wait_for(len(EXAMPLES))
    assert [e["type"] for e in heard] == [message_of(e, 5.0, WORKER)["type"] for e in EXAMPLES]
    assert all(e["clock"] for e in heard), "the receiver's own"


def test_what_cannot_be_written_is_dropped(in_worker, caplog):
    """It would be no better the next time, and what comes after it is sent."""
    app, heard = app_with(), []
    with receiver_of(app, heard) as wait_for:
        observer = observer_of(app)
        observer(events.NodeDown("n1", object()))
        observer.flush()
        observer(events.NodeUp("n1"))
        observer.flush()
        wait_for(1)
    assert [e["type"] for e in heard] == ["redlock-node-up"]
    assert "cannot be written and are dropped" in caplog.text


def test_an_app_that_is_gone_is_no_error(in_worker, caplog):
    """Observers may outlive it, in a user's tests."""
    observer = observer_of(app_with())
    observer._plugin.app = None
    observer(OF_THE_TASK[0])
    observer.flush()
    assert caplog.records == []
