"""What OpenTelemetry is told: names, attributes, spans in the task's trace; and without an SDK."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from celery_redlock import events
from celery_redlock.observers.otel import OpenTelemetry

TASK = {"task": "shop.bill", "task_id": "me"}
HOLDER = {"task_id": "other", "host": "mars", "pid": 7, "token": "0123abcd"}
ABOUT = {"celery.task_name": "shop.bill"}
REFUSED = {**TASK, "cause": "conflict", "holder": HOLDER}


class Sdk:
    def __init__(self, patch):
        self.reader, self.exporter = InMemoryMetricReader(), InMemorySpanExporter()
        self.meters = MeterProvider([self.reader])
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        patch.setattr(metrics, "get_meter", self.meters.get_meter)
        patch.setattr(trace, "get_tracer", tracers.get_tracer)
        self.tracer = tracers.get_tracer("a test")
        self.observe = OpenTelemetry()

    @property
    def spans(self):
        return list(self.exporter.get_finished_spans())

    @property
    def points(self):
        data = self.reader.get_metrics_data()
        found = {}
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                found |= {metric.name: metric for metric in scope.metrics}
        return found

    def value(self, name):
        (point,) = self.points[name].data.data_points
        return getattr(point, "value", getattr(point, "sum", None)), dict(point.attributes)


@pytest.fixture
def sdk(monkeypatch):
    sdk = Sdk(monkeypatch)
    yield sdk
    sdk.meters.shutdown()


LAWS = [
    (
        events.LockAcquired("key", 7, 0.25, **TASK),
        {
            "redlock.acquires": (1, {**ABOUT, "redlock.outcome": "granted"}),
            "redlock.wait.duration": (0.25, {**ABOUT, "redlock.outcome": "granted"}),
        },
    ),
    (
        events.LockConflict("key", HOLDER, 0.25, **TASK),
        {"redlock.acquires": (1, {**ABOUT, "redlock.outcome": "taken"})},
    ),
    (
        events.LockUnavailable("key", {}, 0.25, **TASK),
        {"redlock.acquires": (1, {**ABOUT, "redlock.outcome": "unavailable"})},
    ),
    (
        events.LockRenewed("key", 5.0, ttl=9.0, lag=0.5, **TASK),
        {
            "redlock.renewals": (1, ABOUT),
            "redlock.lease.margin": (5.0, ABOUT),
            "redlock.watchdog.lag": (0.5, {}),
        },
    ),
    (
        events.LeaseLost("key", "stolen", **TASK),
        {"redlock.lost": (1, {**ABOUT, "redlock.reason": "stolen"})},
    ),
    (
        events.LockReleased("key", 2.0, ttl=9.0, **TASK),
        {"redlock.hold.duration": (2.0, ABOUT)},
    ),
    (events.LockReleased("key", 2.0), {"redlock.hold.duration": (2.0, {})}),
    (
        events.TaskSkipped("key", **REFUSED),
        {"redlock.skipped": (1, {**ABOUT, "redlock.cause": "conflict"})},
    ),
    (
        events.TaskRefused("key", **REFUSED),
        {"redlock.refused": (1, {**ABOUT, "redlock.cause": "conflict"})},
    ),
    (
        events.TaskRetried("key", **REFUSED, countdown=3.0),
        {"redlock.retried": (1, {**ABOUT, "redlock.cause": "conflict"})},
    ),
    (
        events.TaskRescheduled("key", **REFUSED, countdown=3.0, times=2),
        {"redlock.rescheduled": (1, {**ABOUT, "redlock.cause": "conflict"})},
    ),
    (
        events.TaskQueued("key", **REFUSED, countdown=60.0, times=1, since=1.0),
        {"redlock.queued": (1, {**ABOUT, "redlock.cause": "conflict"})},
    ),
    (
        events.LockAcquired("key", 7, 0.1, **TASK, queued_for=4.0, was_woken=True),
        {"redlock.queue.duration": (4.0, {**ABOUT, "redlock.woken": True})},
    ),
    (events.TasksWaiting("shop.bill", 3), {"redlock.waiting": (3, ABOUT)}),
    (
        events.DuplicatePublished("key", task="shop.bill", holder_id="x", on_duplicate="join"),
        {"redlock.duplicates": (1, {**ABOUT, "redlock.on_duplicate": "join"})},
    ),
    (
        events.NodeDown("n1", "refused"),
        {
            "redlock.node.up": (0, {"redlock.node": "n1"}),
            "redlock.node.quarantined": (0, {"redlock.node": "n1"}),
        },
    ),
    (events.NodeQuarantined("n1", 9.0), {}),  # nobody would say that it ends
    (
        events.NodeMeasured("n1", 0.001, -0.2, quarantine=9.0),
        {"redlock.node.quarantined": (1, {"redlock.node": "n1"})},
    ),
    (events.NodeUp("n1"), {"redlock.node.up": (1, {"redlock.node": "n1"})}),
    (
        events.NodeMeasured("n1", 0.001, -0.2),
        {
            "redlock.node.up": (1, {"redlock.node": "n1"}),
            "redlock.node.quarantined": (0, {"redlock.node": "n1"}),
            "redlock.node.latency": (0.001, {"redlock.node": "n1"}),
            "redlock.node.clock_offset": (-0.2, {"redlock.node": "n1"}),
        },
    ),
]


@pytest.mark.parametrize(("event", "told"), LAWS, ids=lambda it: type(it).__name__)
def test_each_event_is_measured(sdk, event, told):
    """Under the names and attributes that the module promises, and never by the lock's name."""
    sdk.observe(event)
    assert {name: sdk.value(name) for name in told} == told
    for metric in sdk.points.values():
        assert all("key" not in dict(p.attributes).values() for p in metric.data.data_points)


def test_durations_have_classes_that_fit_seconds(sdk):
    """Those of the SDK are made for milliseconds: everything would be in the first."""
    sdk.observe(events.LockAcquired("key", 7, 0.25, **TASK))
    metric = sdk.points["redlock.wait.duration"]
    (point,) = metric.data.data_points
    assert metric.unit == "s"
    assert point.explicit_bounds[0] <= 0.001
    assert point.bucket_counts[0] == 0


def test_a_wait_is_a_span_as_long_as_the_wait_in_the_current_trace(sdk):
    begun = time.time_ns()
    with sdk.tracer.start_as_current_span("run") as run:
        sdk.observe(events.LockAcquired("key", 7, 2.0, **TASK))
    wait, _ = sdk.spans
    assert wait.name == "redlock wait"
    assert wait.parent.span_id == run.get_span_context().span_id
    assert begun <= wait.start_time + 2 * 10**9 <= wait.end_time <= time.time_ns()
    assert dict(wait.attributes) == {
        "redlock.lock.name": "key",
        "celery.task_name": "shop.bill",
        "messaging.message.id": "me",
        "redlock.outcome": "granted",
        "redlock.fence": 7,
    }
    assert wait.status.status_code is StatusCode.UNSET


def test_a_conflict_names_the_holder_and_is_no_error(sdk):
    """Somebody else was faster: that is what a lock is for."""
    sdk.observe(events.LockConflict("key", HOLDER, 0.25, **TASK))
    (span,) = sdk.spans
    assert span.attributes["redlock.outcome"] == "taken"
    assert span.attributes["redlock.holder.task_id"] == "other"
    assert span.status.status_code is StatusCode.UNSET
    assert "0123abcd" not in span.to_json()


def test_no_quorum_is_an_error(sdk):
    sdk.observe(events.LockUnavailable("key", {"n": "no answer"}, 0.25, **TASK))
    (span,) = sdk.spans
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "unavailable"


@pytest.mark.parametrize("lost", ["", "stolen"])
def test_a_hold_is_a_span_and_an_error_if_the_lock_was_lost(sdk, lost):
    begun = time.time_ns()
    sdk.observe(events.LockReleased("key", 2.0, ttl=9.0, lost=lost, **TASK))
    (span,) = sdk.spans
    assert span.name == "redlock hold"
    assert begun <= span.start_time + 2 * 10**9 <= span.end_time <= time.time_ns()
    assert (span.status.status_code is StatusCode.ERROR) == bool(lost)
    assert span.attributes.get("error.type") == (lost or None)


def test_a_release_for_a_dead_child_is_no_span(sdk):
    """It would be a trace of its own, of nobody."""
    sdk.observe(events.LockReleased("key", 2.0))
    assert sdk.spans == []


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (events.TaskSkipped("key", **REFUSED), "redlock.skipped"),
        (events.TaskRefused("key", **REFUSED), "redlock.refused"),
        (events.TaskRetried("key", **REFUSED, countdown=3.0), "redlock.retried"),
        (events.TaskRescheduled("key", **REFUSED, countdown=3.0, times=2), "redlock.rescheduled"),
        (LAWS[14][0], "redlock.duplicate"),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_what_became_of_a_task_is_noted_on_its_span(sdk, event, name):
    """The span of the run is the current one; outside of it nothing is noted."""
    sdk.observe(event)
    with sdk.tracer.start_as_current_span("run"):
        sdk.observe(event)
    (run,) = sdk.spans
    (noted,) = run.events
    assert noted.name == name
    assert noted.attributes["redlock.lock.name"] == "key"
    assert "0123abcd" not in run.to_json()


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (events.TaskSkipped("key", **REFUSED, report=True), "conflict"),
        (events.LeaseLost("key", "deadline", **TASK, report=True), "lost"),
    ],
    ids=["skipped", "lost"],
)
def test_what_is_only_reported_has_a_metric_of_its_own(sdk, event, cause):
    with sdk.tracer.start_as_current_span("run"):
        sdk.observe(event)
        sdk.observe(events.LockAcquired("key", None, 0.1, **TASK, report=True))
    assert sdk.value("redlock.reported") == (1, {**ABOUT, "redlock.cause": cause})
    assert set(sdk.points) == {"redlock.reported"}
    (run,) = sdk.spans
    assert [noted.name for noted in run.events] == ["redlock.reported"]


SCRIPT = """
    from opentelemetry import metrics, trace
    from celery_redlock import events
    from celery_redlock.observers.otel import OpenTelemetry

    observe = OpenTelemetry()
    all_of_them = [
        events.LockAcquired("key", 7, 0.1, task="t", task_id="me"),
        events.LockConflict("key", {"pid": 7}, 0.1),
        events.LockUnavailable("key", {}, 0.1),
        events.LockReleased("key", 0.1, ttl=9.0, lost="stolen"),
        events.TaskSkipped("key", "t", "me", "conflict", {}),
        events.NodeMeasured("n", 0.1, 0.1),
    ]
    for event in all_of_them:
        observe(event)
"""
LATER = """
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(tracers)
    metrics.set_meter_provider(MeterProvider([reader]))
    for event in all_of_them:
        observe(event)
    assert len(spans.get_finished_spans()) == 4, spans.get_finished_spans()
    (resource,) = reader.get_metrics_data().resource_metrics
    names = {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
    assert {"redlock.acquires", "redlock.hold.duration", "redlock.node.up"} <= names, names
"""


@pytest.mark.parametrize("more", ["", LATER], ids=["never", "later"])
def test_without_an_sdk_nothing_happens_and_a_later_one_is_taken_up(more):
    """As in a child that sets its SDK up in ``worker_process_init``; in a process of its own."""
    script = textwrap.dedent(SCRIPT) + textwrap.dedent(more)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
