"""Spans of a task that runs in this process, beside those of Celery's instrumentation."""

from __future__ import annotations

import pytest
from celery import Celery
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_redlock import RedlockTask
from celery_redlock.observers.otel import OpenTelemetry
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import bootstrap


@pytest.fixture
def spans(monkeypatch):
    """All spans that end, of Celery and of ours; providers of the process stay what they are."""
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda name, *_, **__: tracers.get_tracer(name))
    instrumentor = CeleryInstrumentor()
    instrumentor.instrument(tracer_provider=tracers, skip_dep_check=True)
    yield lambda: {span.name: span for span in exporter.get_finished_spans()}
    instrumentor.uninstrument()


@pytest.fixture
def app(five_nodes, spans):
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    nodes = [node.url for node in five_nodes]
    app.conf.update(
        redlock_nodes=nodes, redlock_observers=[OpenTelemetry()], redlock_node_timeout=2.5
    )
    plugin = plugin_for(app)
    bootstrap(nodes, plugin.settings.rules)

    @app.task(name="bill", base=RedlockTask, lock_key="bill {order}", shared=False)
    def bill(order):
        return order

    yield app
    plugin.locks.close()
    app.close()


def test_wait_and_hold_are_within_the_run(app, spans):
    app.tasks["bill"].apply((1,))
    found = spans()
    run, wait, hold = found["run/bill"], found["redlock wait"], found["redlock hold"]
    assert {wait.parent.span_id, hold.parent.span_id} == {run.context.span_id}
    assert wait.context.trace_id == hold.context.trace_id == run.context.trace_id
    assert run.start_time <= wait.start_time <= wait.end_time
    assert hold.start_time < hold.end_time <= run.end_time


def test_a_skip_is_noted_on_the_run(app, spans):
    with plugin_for(app).locks.hold("bill 2"):
        app.tasks["bill"].apply((2,))
        found = spans()
    (noted,) = [event for event in found["run/bill"].events if event.name.startswith("redlock")]
    assert noted.name == "redlock.skipped"
    assert noted.attributes["redlock.lock.name"] == "bill 2"
    assert noted.attributes["redlock.holder.pid"]
    assert found["redlock wait"].attributes["redlock.outcome"] == "taken"
    assert "redlock hold" not in found
