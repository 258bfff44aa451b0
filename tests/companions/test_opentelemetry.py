"""OpenTelemetry's own instrumentation of Celery: spans of publishes and of runs."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from companions import shop
from support.stage import stage
from support.waiting import eventually

#: Not imported here: it would change this process for other tests.
pytestmark = pytest.mark.skipif(
    find_spec("opentelemetry.instrumentation.celery") is None, reason="not installed"
)


def declare(app):
    if shop.is_with_companion():
        begin()
    shop.declare(app)


def begin():
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import (
        SimpleSpanProcessor,
        SpanExporter,
        SpanExportResult,
    )

    class File(SpanExporter):
        def export(self, spans):
            with Path(os.environ["EVENTS"]).with_name("spans.jsonl").open("a") as file:
                for span in spans:
                    file.write(json.dumps(json.loads(span.to_json())) + "\n")
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(File()))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()


def spans_in(folder):
    """Return what was written; a line that is being written is none yet."""
    path = folder / "spans.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def runs_in(spans):
    runs = [span for span in spans if span["name"].startswith("run/")]
    return {span["attributes"]["messaging.message.id"]: span for span in runs}


def test_a_day_with_opentelemetry(tmp_path):
    with stage(__file__, tmp_path, nodes=3) as it:
        it.worker(env={"COMPANION": "yes"})
        found = shop.spend_a_day(it)
        # A run's span comes after its result, and the worker is killed at the end of this.
        eventually(lambda: set(found["ids"]) <= set(runs_in(spans_in(tmp_path))), "all spans")
    spans = spans_in(tmp_path)
    runs = [span for span in spans if span["name"].startswith("run/")]
    failed = {span["name"] for span in runs if span["status"]["status_code"] == "ERROR"}
    assert failed == {"run/broken"}
    published = {s["context"]["trace_id"] for s in spans if s["name"].startswith("apply_async/")}
    assert {span["context"]["trace_id"] for span in runs} <= published
