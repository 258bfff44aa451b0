"""What observers tell outside: Celery events to a real receiver, spans to a real exporter."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from celery import signals

from celery_redlock import RedlockTask, Reschedule
from celery_redlock.observers import celery_events
from celery_redlock.plugin import plugin_for
from support.events import body, read, record
from support.stage import LASTING, stage
from support.stored import label
from support.versions import since
from support.waiting import eventually

pytestmark = pytest.mark.long

POOLS = {"prefork": 2, "threads": 4, "solo": 1, "gevent": 10, "eventlet": 10}
OURS = {"base": RedlockTask, "shared": False, "lock_key": "{lock}"}


def declare(app):
    def nap(lock, seconds=0.0):
        with body(os.environ["EVENTS"], lock):
            time.sleep(seconds)

    app.task(name="skip", **OURS)(nap)
    app.task(name="reschedule", on_conflict=Reschedule(base=1.0, cap=1.0), **OURS)(nap)
    app.task(name="fail", on_conflict="fail", **OURS)(nap)
    declare_busy(app)
    if "LAST_WORDS" in os.environ:
        celery_events.LAST_WORDS = float(os.environ["LAST_WORDS"])
    if "SPANS" in os.environ:
        signals.worker_process_init.connect(write_spans, weak=False)


def declare_busy(app):
    @app.task(name="busy", bind=True, **OURS)
    def busy(self, lock, until):
        locks = plugin_for(self.app).locks
        with body(os.environ["EVENTS"], lock):
            while not Path(until).exists():
                with locks.hold(f"{lock} within"):
                    fds = len(list(Path("/proc/self/fd").iterdir()))
                    about = {"fds": fds, "threads": threading.active_count()}
                    record(os.environ["EVENTS"], "tick", **about)
                time.sleep(0.01)


def write_spans(**_):
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    file = Path(os.environ["SPANS"]).open("a", buffering=1)  # noqa: SIM115  while the child lives
    exporter = ConsoleSpanExporter(out=file, formatter=in_one_line)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()


def in_one_line(span):
    return json.dumps(json.loads(span.to_json())) + "\n"


class Monitor:
    """
    Listens to events as Flower does, with Celery's own state of the cluster.

    Attributes:
        heard: All events so far.
        state: What Celery makes of them.
    """

    def __init__(self, it):
        self._app = it.app
        self.heard = []
        self.state = it.app.events.State()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self):
        self._thread.start()
        self.sync()
        return self

    def __exit__(self, *_):
        self._stopped.set()
        self._thread.join(60)

    def _listen(self):
        with self._app.connection_for_read() as connection:
            receiver = self._app.events.Receiver(connection, handlers={"*": self._hear})
            with receiver.consumer_context() as (line, *_):
                while not self._stopped.is_set():
                    with contextlib.suppress(TimeoutError):
                        line.drain_events(timeout=0.2)

    def _hear(self, event):
        self.state.event(event)
        self.heard.append(event)

    def sync(self):
        mark = f"mark-{time.monotonic_ns()}"

        def is_heard():
            with self._app.events.default_dispatcher() as dispatcher:
                dispatcher.send(mark)
            return any(event["type"] == mark for event in list(self.heard))

        eventually(is_heard, "our own event", timeout=100, every=0.1)

    def of_task(self, task_id):
        ours = [e for e in list(self.heard) if "redlock" in e["type"]]
        return [e["type"].removeprefix("task-redlock-") for e in ours if e.get("uuid") == task_id]

    def wait_for(self, kind, count=1, **fields):
        def found():
            of_kind = [e for e in list(self.heard) if e["type"] == kind]
            fitting = [e for e in of_kind if fields.items() <= e.items()]
            return fitting[count - 1 : count]

        return eventually(found, f"{kind} with {fields}", timeout=100)[0]


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observers")
    with stage(__file__, folder, **LASTING) as it:
        yield it


@pytest.mark.parametrize("pool", POOLS)
def test_events_of_a_task_arrive_and_its_state_stays_right(it, pool):
    with Monitor(it) as monitor:
        worker = it.worker(pool=pool, concurrency=POOLS[pool], name=pool, args=["-E"])
        lock = f"seen {pool}"
        ran = it.task("skip").delay(lock, 0.1)
        ran.get(timeout=100)
        with it.held(lock):
            skipped = it.task("skip").delay(lock)
            skipped.get(timeout=100)
            refused = it.task("fail").delay(lock)
            refused.get(timeout=100, propagate=False)
            put_off = it.task("reschedule").delay(lock)
            told = monitor.wait_for("task-redlock-rescheduled", uuid=put_off.id)
            assert (told["lock"], told["name"], told["cause"]) == (lock, "reschedule", "conflict")
        put_off.get(timeout=100)
        # Before the worker ends: a process that does has a second to send what it has left.
        ends = {"released": ran, "skipped": skipped, "refused": refused}
        for kind, result in (*ends.items(), ("released", put_off)):
            monitor.wait_for(f"task-redlock-{kind}", uuid=result.id)
        worker.terminate()
        monitor.sync()
        assert monitor.of_task(ran.id) == ["acquired", "released"]
        assert monitor.of_task(skipped.id) == ["conflict", "skipped"]
        assert monitor.of_task(refused.id) == ["conflict", "refused"]
        assert monitor.of_task(put_off.id)[-2:] == ["acquired", "released"]
        states = {r.id: monitor.state.tasks[r.id].state for r in (ran, skipped, put_off, refused)}
        assert list(states.values()) == ["SUCCESS", "SUCCESS", "SUCCESS", "FAILURE"]
        assert monitor.state.tasks[ran.id].name == "skip"
        assert {task.worker.hostname for task in monitor.state.tasks.values()} == {
            f"{pool}@localhost"
        }


SPAWNED = """
import json
from pathlib import Path
from celery import Celery
from celery_redlock import RedlockTask

app = Celery("spawned", include=["spawned"])
app.conf.update(json.loads(Path(__file__).with_suffix(".json").read_text()))


@app.task(base=RedlockTask, name="spawned")
def spawned(lock):
    pass
"""


@since(5, 7, "worker_pool_start_method")
@pytest.mark.parametrize("args", [["-E"], []])
def test_children_that_were_spawned_send_events_as_well(it, tmp_path, start_worker, args):
    """They inherit nothing from the process that was told of ``-E``, but the app's settings."""
    conf = {**it.conf, "worker_pool_start_method": "spawn", "task_default_queue": "spawned"}
    (tmp_path / "spawned.py").write_text(SPAWNED)
    (tmp_path / "spawned.json").write_text(json.dumps(conf))
    with Monitor(it) as monitor:
        worker = start_worker("spawned", name="spawned", concurrency=1, args=args)
        it.app.send_task("spawned", ("one",), queue="spawned").get(timeout=100)
        if args:  # a process that ends has a second to send what it has left
            monitor.wait_for("task-redlock-released")
        worker.terminate()
        monitor.sync()
        ours = [e["type"] for e in monitor.heard if e["type"].startswith("task-redlock-")]
        assert ours == (["task-redlock-acquired", "task-redlock-released"] if args else [])


def test_without_events_switched_on_nothing_is_sent(it):
    """The same worker without ``-E``: the twin, and what a user has by default."""
    with Monitor(it) as monitor:
        worker = it.worker(name="silent")
        it.task("skip").delay("unseen", 0.1).get(timeout=100)
        with it.held("unseen"):
            it.task("skip").delay("unseen").get(timeout=100)
        worker.terminate()
        monitor.sync()
        assert [e["type"] for e in monitor.heard if "redlock" in e["type"]] == []
        assert not re.search("redlock-outbox|Celery events", worker.log())


def test_a_worker_that_ends_sends_what_it_has_left(it):
    with Monitor(it) as monitor:
        # What is tried here is that it sends them; a stall may be longer than it waits.
        worker = it.worker(name="last", concurrency=1, args=["-E"], env={"LAST_WORDS": "30"})
        result = it.task("skip").delay("last words", 0.5)
        it.started("last words")
        worker.terminate()
        monitor.sync()
        assert monitor.of_task(result.id) == ["acquired", "released"]


def test_a_node_that_goes_down_is_told(tmp_path):
    """Of no task, so in a group of its own; and no worker appears that there is not."""
    own = stage(__file__, tmp_path, **LASTING)
    with own as it, Monitor(it) as monitor:
        it.worker(concurrency=1, args=["-E"])
        it.task("skip").delay("before").get(timeout=100)
        it.nodes[0].kill()
        it.task("skip").delay("after").get(timeout=100)
        # Of that node: on a loaded machine another one may have been late before.
        told = monitor.wait_for("redlock-node-down", node=label(it.nodes[0]))
        assert told["hostname"] == "w1@localhost"
        monitor.sync()
        assert set(monitor.state.workers) == {"w1@localhost"}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_without_a_broker_tasks_and_locks_go_on_and_nothing_leaks(tmp_path):
    with stage(__file__, tmp_path, **LASTING) as it:
        worker = it.worker(concurrency=1, args=["-E"])
        until = tmp_path / "until"
        it.task("busy").delay("busy", str(until))

        def ticks(more):
            seen = len(read(it.events, "tick"))
            return eventually(
                lambda: found[seen:] if len(found := read(it.events, "tick")) > seen + more else [],
                "more locks",
                timeout=200,
                every=0.1,
            )

        ticks(50)
        it.broker.kill()
        worker.wait_for_log("Celery events cannot be sent", timeout=100)
        during = ticks(300)
        assert during[-1]["threads"] <= during[0]["threads"]
        # Those of one try; that a hundred of them leave no more is held by an integration test.
        assert max(tick["fds"] for tick in during) <= during[0]["fds"] + 4
        it.broker.restart()
        with Monitor(it) as monitor:
            monitor.wait_for("redlock-released", count=50, lock="busy within")
            until.touch()
            monitor.wait_for("task-redlock-released", lock="busy")
        after = read(it.events, "tick")[-1]
        assert after["threads"] <= during[0]["threads"]
        said = re.findall("Celery events cannot be sent", worker.log())
        assert len(said) <= 2, "one line of a child, one of its parent"
        assert read(it.events, "end")[-1]["error"] is None


def test_spans_of_a_worker_are_in_the_trace_of_the_task(it, tmp_path):
    spans = tmp_path / "spans.jsonl"
    conf = {"redlock_observers": ["otel"]}
    env = {"SPANS": str(spans)}
    it.worker(conf, name="traced", concurrency=1, env=env, args=["-Q", "traced"])
    result = it.task("skip").apply_async(("traced",), queue="traced")
    result.get(timeout=100)

    def all_of_them():
        # A last line without its end is being written at this moment.
        lines = spans.read_text().split("\n")[:-1] if spans.exists() else []
        found = {span["name"]: span for span in map(json.loads, lines)}
        return found if len(found) == 3 else None

    found = eventually(all_of_them, "three spans", timeout=100)
    run = found["run/skip"]
    for name in ("redlock wait", "redlock hold"):
        span = found[name]
        assert span["context"]["trace_id"] == run["context"]["trace_id"]
        assert span["parent_id"] == run["context"]["span_id"]
        assert span["attributes"]["celery.task_name"] == run["attributes"]["celery.task_name"]
        task_id = span["attributes"]["messaging.message.id"]
        assert task_id == run["attributes"]["messaging.message.id"] == result.id
        assert span["attributes"]["redlock.lock.name"] == "traced"
