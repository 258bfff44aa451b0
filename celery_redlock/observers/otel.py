"""
The observer for OpenTelemetry: metrics of all locks, and spans in the traces of the tasks.

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

from celery_redlock import events
from celery_redlock.observers.records import HOLDER, reported_as

__all__ = ["OpenTelemetry"]

SCOPE = "celery_redlock"
TASK, TASK_ID = "celery.task_name", "messaging.message.id"
NODE, LOCK = "redlock.node", "redlock.lock.name"
#: Upper bounds of the classes of durations [s]: from a round on loopback to an hour.
BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)

Attributes = dict[str, Any]


class OpenTelemetry:
    """Records what happens with whatever SDK is set up, now or later."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer(SCOPE)
        meter = metrics.get_meter(SCOPE)

        def seconds(name: str, what: str) -> metrics.Histogram:
            return meter.create_histogram(
                name, "s", what, explicit_bucket_boundaries_advisory=BOUNDS
            )

        count, gauge = meter.create_counter, meter.create_gauge
        self._acquires = count("redlock.acquires", "{acquire}", "Locks asked for, by outcome")
        self._waits = seconds("redlock.wait.duration", "From asking for a lock to the answer")
        self._queued = seconds("redlock.queue.duration", "From joining the queue to the grant")
        self._waiting = gauge("redlock.waiting", "{task}", "Tasks that wait for their locks")
        self._holds = seconds("redlock.hold.duration", "From a grant to the release")
        self._renewals = count("redlock.renewals", "{renewal}", "Leases renewed")
        self._margins = seconds("redlock.lease.margin", "What was left of a lease when renewed")
        self._lags = seconds("redlock.watchdog.lag", "How late the watchdog began a renewal")
        self._lost = count("redlock.lost", "{lock}", "Locks lost while held, by reason")
        self._policies = {
            events.TaskSkipped: count("redlock.skipped", "{task}", "Tasks skipped"),
            events.TaskRefused: count("redlock.refused", "{task}", "Tasks failed: no lock"),
            events.TaskRetried: count("redlock.retried", "{task}", "Tasks retried by Celery"),
            events.TaskRescheduled: count("redlock.rescheduled", "{task}", "Tasks rescheduled"),
            events.TaskQueued: count("redlock.queued", "{task}", "Tasks queued behind a holder"),
        }
        self._duplicates = count("redlock.duplicates", "{task}", "Duplicates met at publish")
        self._reported = count(
            "redlock.reported", "{report}", "What report mode would have refused, by cause"
        )
        self._up = gauge("redlock.node.up", "{node}", "1 if a lock node answers, else 0")
        self._quarantined = gauge(
            "redlock.node.quarantined",
            "{node}",
            "1 if a lock node is quarantined, else 0",
        )
        self._latency = seconds("redlock.node.latency", "From a request to a node to its answer")
        self._offset = gauge("redlock.node.clock_offset", "s", "How far a node's clock is ahead")
        self._leaked = gauge(
            "redlock.node.leaked_keys", "{key}", "How many of our keys never expire"
        )
        self._takers: dict[type[events.Event], Callable[[Any], None]] = {
            events.LockAcquired: self._acquired,
            events.LockConflict: self._conflict,
            events.LockUnavailable: self._unavailable,
            events.LockRenewed: self._renewed,
            events.LeaseLost: self._lose,
            events.LockReleased: self._released,
            **dict.fromkeys(self._policies, self._policy),
            events.TasksWaiting: lambda e: self._waiting.set(e.count, {TASK: e.task}),
            events.DuplicatePublished: self._duplicate,
            events.NodeDown: self._down,
            events.NodeQuarantined: lambda e: self._quarantined.set(1, {NODE: e.node}),
            events.NodeUp: lambda e: self._up.set(1, {NODE: e.node}),
            events.NodeMeasured: self._measured,
        }

    def __call__(self, event: events.Event) -> None:
        """Record *event*."""
        take = self._takers.get(type(event))
        if getattr(event, "report", False):
            self._report(event)
        elif take is not None:
            take(event)

    def _report(self, event: Any) -> None:
        """Record what report mode would have refused; no lock was taken, so nothing else counts."""
        cause = reported_as(event)
        if not cause:
            return
        self._reported.add(1, {**about_task(event), "redlock.cause": cause})
        span = trace.get_current_span()
        if span.is_recording():
            span.add_event("redlock.reported", {LOCK: event.name, "redlock.cause": cause})

    def _acquired(self, event: events.LockAcquired) -> None:
        span = self._wait(event, event.waited, "granted")
        if event.queued_for:
            woken = {"redlock.woken": event.was_woken}
            self._queued.record(event.queued_for, {**about_task(event), **woken})
        if event.fence is not None:
            span.set_attribute("redlock.fence", event.fence)
        span.end()

    def _conflict(self, event: events.LockConflict) -> None:
        span = self._wait(event, event.waited, "taken")
        if span.is_recording():
            span.set_attributes(about_holder(event.holder))
        span.end()

    def _unavailable(self, event: events.LockUnavailable) -> None:
        span = self._wait(event, event.waited, "unavailable")
        span.set_attribute("error.type", "unavailable")
        span.set_status(Status(StatusCode.ERROR, "no quorum of lock nodes"))
        span.end()

    def _wait(self, event: events.LockEvent, waited: float, outcome: str) -> Span:
        about = {**about_task(event), "redlock.outcome": outcome}
        self._acquires.add(1, about)
        self._waits.record(waited, about)
        return self._span("redlock wait", event, waited, {"redlock.outcome": outcome})

    def _renewed(self, event: events.LockRenewed) -> None:
        about = about_task(event)
        self._renewals.add(1, about)
        self._margins.record(event.margin, about)
        self._lags.record(event.lag)

    def _lose(self, event: events.LeaseLost) -> None:
        self._lost.add(1, {**about_task(event), "redlock.reason": event.reason})

    def _released(self, event: events.LockReleased) -> None:
        self._holds.record(event.held, about_task(event))
        if not event.ttl:
            return  # another process held it, whose trace is unknown here
        span = self._span("redlock hold", event, event.held, {"redlock.lock.ttl": event.ttl})
        if event.lost:
            span.set_attribute("error.type", event.lost)
            span.set_status(Status(StatusCode.ERROR, f"the lock was lost ({event.lost})"))
        span.end()

    def _span(self, name: str, event: events.LockEvent, took: float, more: Attributes) -> Span:
        """Begin a span that began *took* seconds ago, in the context of whoever is here."""
        began = time.time_ns() - int(took * 1e9)
        about = {LOCK: event.name, **about_task(event), **more}
        if event.task_id:
            about[TASK_ID] = event.task_id
        return self._tracer.start_span(name, start_time=began, attributes=about)

    def _policy(self, event: events.TaskEvent) -> None:
        about = {**about_task(event), "redlock.cause": event.cause}
        self._policies[type(event)].add(1, about)
        span = trace.get_current_span()
        if span.is_recording():
            name = f"redlock.{type(event).__name__.removeprefix('Task').lower()}"
            attributes = {
                LOCK: event.name,
                "redlock.cause": event.cause,
                **about_holder(event.holder),
            }
            if isinstance(event, (events.TaskRetried, events.TaskRescheduled, events.TaskQueued)):
                attributes["redlock.countdown"] = event.countdown
            span.add_event(name, attributes)

    def _duplicate(self, event: events.DuplicatePublished) -> None:
        how = {"redlock.on_duplicate": event.on_duplicate}
        self._duplicates.add(1, {**about_task(event), **how})
        span = trace.get_current_span()
        if span.is_recording():
            holder = {"redlock.holder.task_id": event.holder_id}
            span.add_event("redlock.duplicate", {LOCK: event.name, **how, **holder})

    def _down(self, event: events.NodeDown) -> None:
        self._up.set(0, {NODE: event.node})
        self._quarantined.set(0, {NODE: event.node})

    def _measured(self, event: events.NodeMeasured) -> None:
        about = {NODE: event.node}
        self._up.set(1, about)
        self._quarantined.set(1 if event.quarantine else 0, about)
        self._latency.record(event.latency, about)
        self._offset.set(event.clock_offset, about)
        if event.leaked is not None:
            self._leaked.set(event.leaked, about)


def about_task(event: events.LockEvent) -> Attributes:
    """Return the attribute that names the task of *event*; none outside of tasks."""
    return {TASK: event.task} if event.task else {}


def about_holder(holder: dict[str, Any]) -> Attributes:
    """Return who holds a lock, as attributes: nothing of its token."""
    known = {key: holder[key] for key in HOLDER if key in holder}
    plain = {key: it for key, it in known.items() if isinstance(it, (str, int, float))}
    return {f"redlock.holder.{key}": it for key, it in plain.items()}
