"""
Observer for OpenTelemetry: metrics of all locks, and spans in the traces of the tasks.

Needs ``opentelemetry-api`` alone, and does nothing until an application sets up an SDK, which may
be later than this begins: in ``worker_process_init``, say. With
``opentelemetry-instrumentation-celery``, the spans ``redlock wait`` and ``redlock hold`` are
children of the task's ``run/...``.

Names follow the semantic conventions: dotted lower case, durations in seconds, counted things as
``{thing}``. A task is ``celery.task_name`` and its id ``messaging.message.id``, as that
instrumentation has them, so that both can be joined. The name of a lock is on spans only: there
are as many names as arguments, too many for a metric. Arguments are nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.trace import Span, Status, StatusCode

from celery_redlock.events import (
    KINDS,
    Event,
    LockAcquired,
    LockConflict,
    LockEvent,
    LockReleased,
    LockUnavailable,
)
from celery_redlock.events.metrics import REPORTED, UNKNOWN, Metric
from celery_redlock.observers.records import HOLDER

__all__ = ["OpenTelemetry"]

SCOPE = "celery_redlock"
TASK, TASK_ID = "celery.task_name", "messaging.message.id"
LOCK = "redlock.lock.name"
#: Label -> attribute, where that is not ``redlock.`` and the label.
KEYS = {"task": TASK}
#: Upper bounds of the classes of durations [s]: from a round on loopback to an hour.
BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)

Attributes = dict[str, Any]
Change = Callable[[float, Attributes], None]
#: What is changed, attribute and field of each label, and by how much: a number or a field.
Step = tuple[Change, list[tuple[str, str]], float | str]


class OpenTelemetry:
    def __init__(self) -> None:
        self._tracer = trace.get_tracer(SCOPE)
        meter = metrics.get_meter(SCOPE)
        every = dict.fromkeys(it for kind in KINDS.values() for it in kind.metrics if it.otel)
        self._changes = {it: change_of(meter, it) for it in (REPORTED, *every)}
        self._steps = {kind: self._steps_of(kind) for kind in KINDS.values()}
        self._spans: dict[type[Event], Callable[[Any], None]] = {
            LockAcquired: self._acquired,
            LockConflict: self._conflict,
            LockUnavailable: self._unavailable,
            LockReleased: self._released,
        }

    def __call__(self, event: Event) -> None:
        if getattr(event, "report", False):
            self._report(event)
            return
        for change, labels, by in self._steps.get(type(event), ()):
            value = getattr(event, by) if isinstance(by, str) else by
            if value is not None:
                change(value, attributes_of(labels, event))
        if event.noted:
            note(event.celery_type, event)
        span = self._spans.get(type(event))
        if span is not None:
            span(event)

    def _steps_of(self, kind: type[Event]) -> list[Step]:
        return [
            (self._changes[metric], keys_of(metric), by)
            for metric, by in kind.metrics.items()
            if metric.otel and by is not UNKNOWN
        ]

    def _report(self, event: Any) -> None:
        """Record what report mode would have refused; no lock was taken, so nothing else counts."""
        if event.counts_as:
            self._changes[REPORTED](1, attributes_of(keys_of(REPORTED), event))
            span = trace.get_current_span()
            if span.is_recording():
                attributes = {LOCK: event.name, "redlock.cause": event.counts_as}
                span.add_event("redlock.reported", attributes)

    def _acquired(self, event: LockAcquired) -> None:
        span = self._wait(event, event.waited, event.outcome)
        if event.fence is not None:
            span.set_attribute("redlock.fence", event.fence)
        span.end()

    def _conflict(self, event: LockConflict) -> None:
        span = self._wait(event, event.waited, event.outcome)
        if span.is_recording():
            span.set_attributes(about_holder(event.holder))
        span.end()

    def _unavailable(self, event: LockUnavailable) -> None:
        span = self._wait(event, event.waited, event.outcome)
        span.set_attribute("error.type", "unavailable")
        span.set_status(Status(StatusCode.ERROR, "no quorum of lock nodes"))
        span.end()

    def _wait(self, event: LockEvent, waited: float, outcome: str) -> Span:
        return self._span("redlock wait", event, waited, {"redlock.outcome": outcome})

    def _released(self, event: LockReleased) -> None:
        if not event.ttl:
            return  # another process held it, whose trace is unknown here
        span = self._span("redlock hold", event, event.held, {"redlock.lock.ttl": event.ttl})
        if event.lost:
            span.set_attribute("error.type", event.lost)
            span.set_status(Status(StatusCode.ERROR, f"the lock was lost ({event.lost})"))
        span.end()

    def _span(self, name: str, event: LockEvent, took: float, more: Attributes) -> Span:
        """Begin a span that began *took* seconds ago, in the context of whoever is here."""
        began = time.time_ns() - int(took * 1e9)
        about = {LOCK: event.name, **({TASK: event.task} if event.task else {}), **more}
        if event.task_id:
            about[TASK_ID] = event.task_id
        return self._tracer.start_span(name, start_time=began, attributes=about)


def change_of(meter: metrics.Meter, metric: Metric) -> Change:
    name, unit, about = f"redlock.{metric.otel}", metric.unit, metric.about
    if metric.kind == "counter":
        return meter.create_counter(name, unit, about).add
    if metric.kind == "gauge":
        return meter.create_gauge(name, unit, about).set
    return meter.create_histogram(
        name, unit, about, explicit_bucket_boundaries_advisory=BOUNDS
    ).record


def keys_of(metric: Metric) -> list[tuple[str, str]]:
    return [(KEYS.get(key, f"redlock.{key}"), field) for key, field in metric.labels.items()]


def attributes_of(labels: list[tuple[str, str]], event: Event) -> Attributes:
    """Return the labels of *event* as attributes, without a task that is ""."""
    found = {}
    for key, field in labels:
        value = getattr(event, field)
        if value != "":
            found[key] = value
    return found


def note(name: str, event: Any) -> None:
    span = trace.get_current_span()
    if span.is_recording():
        recorded = {f"redlock.{field}": getattr(event, field) for field in event.noted}
        about = {LOCK: event.name, **recorded, **about_holder(event.holder)}
        span.add_event(f"redlock.{name}", about)


def about_holder(holder: dict[str, Any]) -> Attributes:
    known = {key: holder[key] for key in HOLDER if key in holder}
    plain = {key: it for key, it in known.items() if isinstance(it, (str, int, float))}
    return {f"redlock.holder.{key}": it for key, it in plain.items()}
