"""
Metrics, described once for Prometheus and OpenTelemetry.

Labels are names of tasks, nodes and schedule entries. Never a lock name: there are as many as
argument values, and it may hold one. The task of a lock that no task took is "".

Those that several events change are here, all others stand at their event.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Changes", "Metric", "counter", "gauge", "histogram", "of_nodes"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Metric:
    kind: Literal["counter", "gauge", "histogram"]  # as both libraries call it
    about: str  # what it is, in a sentence
    labels: Mapping[str, str]  # label -> attribute of the event that has its value
    prometheus: str = ""  # its name there, after redlock_; "" if it is not there
    otel: str = ""  # its name there, after redlock.; "" if it is not there
    unit: str = "s"  # in OpenTelemetry
    bounds: tuple[float, ...] = ()  # upper bounds of a histogram in Prometheus
    mode: str = ""  # how Prometheus adds up a gauge over processes; all are "live" ones
    begins: tuple[Any, ...] = ()  # values of the last label that begin with zero, together


#: What a gauge shows of what is not known any more; OpenTelemetry keeps the last value.
UNKNOWN = math.nan
#: Metric -> what it is changed by: a number, or the name of an attribute of the event, whose value
#: None changes nothing.
Changes = Mapping[Metric, float | str]


def named(labels: tuple[str, ...]) -> dict[str, str]:
    """Return label -> attribute, of ``"label"`` or ``"label=attribute"``."""
    return {label.partition("=")[0]: label.rpartition("=")[2] for label in labels}


def counter(
    name: str, about: str, *labels: str, unit: str = "", begins: tuple[str, ...] = ()
) -> Metric:
    """Describe a counter; without a *unit* it is one of Prometheus alone."""
    return Metric(
        kind="counter",
        about=about,
        labels=named(labels),
        prometheus=f"{name}_total",
        otel=name if unit else "",
        unit=unit,
        begins=begins,
    )


def histogram(about: str, *labels: str, begins: tuple[Any, ...] = (), **more: Any) -> Metric:
    """Describe a histogram of seconds."""
    return Metric(kind="histogram", about=about, labels=named(labels), begins=begins, **more)


def gauge(name: str, about: str, *labels: str, mode: str, **more: str) -> Metric:
    made: dict[str, Any] = {"labels": named(labels), "prometheus": name, "mode": mode, **more}
    return Metric(kind="gauge", about=about, **made)


def of_nodes(name: str, about: str, **more: str) -> Metric:
    """Describe a gauge that a worker sets every ten seconds, from the process that looked last."""
    return gauge(name, about, "node", mode="livemostrecent", **more)


#: Upper bounds [s]: a lock on a network nearby takes less than a millisecond, one that is waited
#: for up to `lock_wait`; it is held for as long as a task runs.
# fmt: off
WAITS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
HOLDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200)
QUEUES = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600, 10800, 43200)
DELAYS = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
LAGS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
# fmt: on

ACQUIRES = counter(
    *("acquires", "Tries to take a lock, by their end.", "task", "outcome"),
    unit="{acquire}",
    begins=("granted", "taken", "unavailable"),
)
ANSWERS = histogram(
    "From asking for a lock to the answer.", "task", "outcome", otel="wait.duration"
)
#: In report mode, nothing else is counted: no lock was taken.
REPORTED = counter(
    *("reported", "What would have been refused or lost, in report mode."),
    *("task", "cause=counts_as"),
    unit="{report}",
    begins=(
        *("conflict", "rate", "unavailable", "redelivered", "finished", "unnamed", "duplicate"),
        *("lost", "debounced"),
    ),
)
NODE_EVENTS = counter(
    *("node_events", "What happened to lock nodes.", "node", "event=change"),
    begins=("down", "quarantined", "clock_jump"),
)
NODE_UP = of_nodes("node_up", "Whether a lock node answers.", otel="node.up", unit="{node}")
NODE_QUARANTINED = of_nodes(
    *("node_quarantined", "Whether a lock node is quarantined."),
    otel="node.quarantined",
    unit="{node}",
)
NODE_LATENCY = of_nodes("node_latency_seconds", "From a request to its answer.")
NODE_OFFSET = of_nodes(
    *("node_clock_offset_seconds", "How far its clock is ahead of the worker's."),
    otel="node.clock_offset",
)
SLOTS = counter(
    *("beat_slots", "Slots of schedules, by outcome.", "entry", "outcome"),
    begins=("overlap", "deadline", "uncertain", "duplicate"),
)
LEADER = gauge("leader", "Whether a scheduler here leads the others.", mode="livemax")
