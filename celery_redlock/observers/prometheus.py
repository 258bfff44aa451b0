"""
Observer that counts for Prometheus, on the default registry of prometheus_client.

What an event changes, its class says (`celery_redlock.events`). In programs of several processes,
prometheus_client adds up: see ``docs/how-to/metrics.md``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, values

from celery_redlock.events import KINDS, Event, LockReleased, LockRenewed
from celery_redlock.events.metrics import REPORTED, Metric, gauge
from celery_redlock.process.forks import around_fork
from celery_redlock.process.mutex import new_mutex

__all__ = ["COUNTS_IN_FILES", "count_event"]

#: Whether prometheus_client adds up processes, as it decided when something first imported it.
COUNTS_IN_FILES = bool(getattr(values.ValueClass, "_multiprocess", False))
#: Held while something is counted, and by whoever forks: a child would find the mutexes of
#: prometheus_client as another thread of the parent held them, and never released.
counting = new_mutex()


class Children(dict[Any, Callable[[float], None]]):
    """Functions that change a metric, by label values: found several times faster than its own."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.metric = metric
        self._family = made(metric)

    def __missing__(self, labels: Any) -> Callable[[float], None]:
        first = labels[:-1] if isinstance(labels, tuple) else ()
        for it in (labels, *((*first, last) for last in self.metric.begins)):
            if it not in self:
                self[it] = self._change_of(it)
        if labels and self.metric is not REPORTED:
            begin(next(iter(self.metric.labels)), first[0] if first else labels)
        return self[labels]

    def _change_of(self, labels: Any) -> Callable[[float], None]:
        every = labels if isinstance(labels, tuple) else (labels,)
        words = [{True: "yes", False: "no"}.get(it, it) for it in every]
        child = self._family.labels(*words) if words else self._family
        change = {"counter": "inc", "gauge": "set", "histogram": "observe"}[self.metric.kind]
        return getattr(child, change)  # type: ignore[no-any-return]


def made(metric: Metric) -> Any:
    name, labels = f"redlock_{metric.prometheus}", tuple(metric.labels)
    if metric.kind == "counter":
        return Counter(name, metric.about, labels)
    if metric.kind == "histogram":
        return Histogram(name, metric.about, labels, buckets=metric.bounds)
    return Gauge(name, metric.about, labels, multiprocess_mode=metric.mode)  # type: ignore[arg-type]


#: Metric -> its children.
FAMILIES = {
    metric: Children(metric)
    for metric in (REPORTED, *dict.fromkeys(it for kind in KINDS.values() for it in kind.metrics))
    if metric.prometheus
}
#: First label and value of what has been begun.
_begun: set[tuple[str, str]] = set()


def begin(label: str, value: str) -> None:
    """Export zeros, once: of a series that begins with a one, Prometheus sees no increase."""
    if (label, value) in _begun:
        return
    _begun.add((label, value))
    for metric, children in FAMILIES.items():
        is_counter = metric.kind == "counter" and metric.begins and metric is not REPORTED
        if is_counter and next(iter(metric.labels)) == label:
            _ = children[value, metric.begins[0]]


#: What is looked up, by which label values of the event, and by how much it is changed: by the
#: value of an attribute, or always by the same.
Step = tuple[Children, Callable[[Any], Any], Any, float]


def steps_of(kind: type[Event]) -> list[Step]:
    steps: list[Step] = []
    for metric, by in kind.metrics.items():
        if metric in FAMILIES:
            labels = metric.labels.values()
            key: Callable[[Any], Any] = attrgetter(*labels) if labels else lambda _: ()
            by_value = (attrgetter(by), 0) if isinstance(by, str) else (None, by)
            steps.append((FAMILIES[metric], key, *by_value))
    return steps


STEPS = {kind: steps_of(kind) for kind in KINDS.values()}


def count_event(event: Event) -> None:
    """Count *event*, or set its gauge; events that are not counted cost a look-up."""
    kind = type(event)
    steps = STEPS.get(kind)
    if steps is None:
        return
    with counting:
        if _pid != os.getpid():
            start_over()
        if getattr(event, "report", False):
            report(event)
            return
        for changes, key_of, value_of, value in steps:
            if value_of is None:
                changes[key_of(event)](value)
            elif (by := value_of(event)) is not None:
                changes[key_of(event)](by)
        if kind in MARGIN_NOTES:
            MARGIN_NOTES[kind](event)


def report(event: Any) -> None:
    """Count what report mode would have refused; no lock was taken, so nothing else counts."""
    counts = FAMILIES[REPORTED]
    _ = counts[event.task, REPORTED.begins[0]]  # begins with zeros
    if event.counts_as:
        counts[event.task, event.counts_as](1)


# --- margins -------------------------------------------------------------------------------

MARGIN = Children(
    gauge(
        "smallest_lease_margin_seconds",
        "Least that was left when a lease was renewed, of the locks that are held now.",
        "task",
        mode="livemin",
    )
)
MARGIN_RATIO = Children(
    gauge(
        "smallest_lease_margin_ratio",
        "The same as a share of the lease; two thirds is usual.",
        "task",
        mode="livemin",
    )
)
#: Task -> lock that this process holds -> least margin of its renewals [s], and its share.
_margins: dict[str, dict[str, tuple[float, float]]] = {}
_pid = os.getpid()
NONE = (math.inf, math.inf)


def renewed(event: LockRenewed) -> None:
    held = _margins.setdefault(event.task, {})
    ratio = event.margin / event.ttl if event.ttl else math.inf
    held[event.name] = min(held.get(event.name, NONE), (event.margin, ratio))
    show_margins(event.task)


def released(event: LockReleased) -> None:
    held = _margins.get(event.task)
    if held and held.pop(event.name, None):
        show_margins(event.task)


MARGIN_NOTES: dict[type[Event], Callable[[Any], None]] = {
    LockRenewed: renewed,
    LockReleased: released,
}


def show_margins(task: str) -> None:
    """Show the least margin of the locks of *task* that are held now."""
    margins, ratios = zip(NONE, *_margins[task].values(), strict=True)
    MARGIN[task](min(margins))
    MARGIN_RATIO[task](min(ratios))


def start_over() -> None:
    """After a fork: what the parent renewed is the parent's, and no small margin here."""
    global _pid  # noqa: PLW0603  this process's own
    _pid = os.getpid()
    for held in _margins.values():
        held.clear()
    for task in _margins:
        show_margins(task)


# Last of all: what could make no metrics is imported again by the next who asks for them.
around_fork("counting", counting.release, before=counting.acquire, in_parent=counting.release)
