"""
The observer that counts for Prometheus, on the default registry of prometheus_client.

Labels are names of tasks, nodes and schedule entries. Never a lock name: there are as many as
argument values, and it may hold one. The task of a lock that no task took is "".

Gauges have modes for programs of several processes. What is known of a node is set by whoever
looked last, and the worker's own process looks every ten seconds (`celery_redlock.nodewatch`).
All modes are "live" ones: what a process said that is gone does not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from celery_redlock import events
from celery_redlock.mutex import new_mutex
from celery_redlock.observers.fading import Fading, SmallestOfLate
from celery_redlock.observers.records import reported_as

__all__ = ["count_event", "counting"]

#: For how long a small margin is shown [s].
WINDOW = 300.0
UNKNOWN = float("nan")
#: What report mode reports, by cause.
REPORTS = ("conflict", "unavailable", "redelivered", "finished", "unnamed", "duplicate", "lost")

#: Held while an event is counted. Whoever forks should hold it: a child would find the mutex of
#: prometheus_client as another thread of the parent held it, and never released.
counting = new_mutex()


class Children(dict[tuple[str, ...], Any]):
    """The children of a metric by label values: found several times faster than it does."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self._metric = metric

    def __missing__(self, labels: tuple[str, ...]) -> Any:
        child = self[labels] = self._metric.labels(*labels)
        return child


def counter(name: str, about: str, *labels: str) -> Children:
    return Children(Counter(f"redlock_{name}", about, labels))


def histogram(name: str, about: str, label: str, *bounds: float) -> Children:
    return Children(Histogram(f"redlock_{name}", about, (label,), buckets=bounds))


def of_nodes(name: str, about: str) -> Children:
    """Make a gauge of what the process says that looked last."""
    mode = "livemostrecent"
    return Children(Gauge(f"redlock_{name}", about, ("node",), multiprocess_mode=mode))  # type: ignore[arg-type]


def of_leases(name: str, about: str) -> Children:
    """Make a gauge of the smallest value that any process has."""
    return Children(Gauge(f"redlock_{name}", about, ("task",), multiprocess_mode="livemin"))


ACQUIRES = counter("acquires_total", "Tries to take a lock, by their end.", "task", "outcome")
SKIPPED = counter("skipped_total", "Tasks that were skipped.", "task", "cause")
REFUSED = counter("refused_total", "Tasks that failed: no lock.", "task", "cause")
RETRIED = counter("retried_total", "Tasks that were retried: no lock.", "task", "cause")
RESCHEDULED = counter("rescheduled_total", "How often tasks were rescheduled.", "task", "cause")
QUEUED = counter("queued_total", "How often tasks were queued behind a holder.", "task", "cause")
RENEWALS = counter("renewals_total", "Leases extended by the watchdog.", "task")
LOST = counter("lost_total", "Locks lost while they were held.", "task", "reason")
REPORTED = counter(
    "reported_total", "What would have been refused or lost, in report mode.", "task", "cause"
)
DUPLICATES = counter(
    "duplicates_total", "Publishes of a task that was there already.", "task", "on_duplicate"
)
NODE_EVENTS = counter("node_events_total", "What happened to lock nodes.", "node", "event")
SLOTS = counter("beat_slots_total", "Slots of schedules, by outcome.", "entry", "outcome")
DEPOSED = counter("leader_deposed_total", "Ends of this process's leadership.", "reason")
ELECTED = Counter("redlock_leader_elected_total", "How often this process became the leader.")

# Bounds in seconds: a lock on a network nearby takes less than a millisecond, one that is waited
# for up to `lock_wait`; it is held for as long as a task runs.
# fmt: off
WAIT = histogram(
    "wait_seconds", "From the first request for a lock to its grant.", "task",
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60,
)
HOLD = histogram(
    "hold_seconds", "From the grant of a lock to its release.", "task",
    0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200,
)
SLOT_DELAY = histogram(
    "beat_slot_delay_seconds", "From when a slot was due to the publish of its task.", "entry",
    0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600,
)
LAG = Histogram(
    "redlock_watchdog_lag_seconds", "How late the watchdog began a renewal.",
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
# fmt: on

QUEUE = Children(
    Histogram(
        "redlock_queue_seconds",
        "For how long tasks had waited as messages when they got their locks, woken or not.",
        ("task", "woken"),
        buckets=(0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600, 10800, 43200),
    )
)
WAITING = Children(
    Gauge(
        "redlock_waiting",
        "Tasks that wait for their locks in this worker, and can be woken.",
        ("task",),
        multiprocess_mode="livesum",
    )
)
MARGIN = of_leases(
    "smallest_lease_margin_seconds",
    "Least that was left of a lease when it was renewed, in the last five minutes.",
)
MARGIN_RATIO = of_leases(
    "smallest_lease_margin_ratio", "The same as a share of the lease; two thirds is usual."
)
NODE_UP = of_nodes("node_up", "Whether a lock node answers.")
NODE_QUARANTINED = of_nodes("node_quarantined", "Whether a lock node is quarantined.")
NODE_LATENCY = of_nodes("node_latency_seconds", "From a request to its answer.")
NODE_LEAKED = of_nodes("node_leaked_keys", "How many of our keys on a lock node never expire.")
NODE_OFFSET = of_nodes("node_clock_offset_seconds", "How far its clock is ahead of the worker's.")
LEADER = Gauge(
    "redlock_leader", "Whether a scheduler here leads the others.", multiprocess_mode="livemax"
)

fading = Fading(counting)
_margins: dict[tuple[str, str], SmallestOfLate] = {}
_pid = os.getpid()


def count_event(event: events.Event) -> None:
    """Count *event*, or set its gauge; events that are not counted cost a look-up."""
    note = reported if getattr(event, "report", False) else NOTES.get(type(event))
    if note is not None:
        with counting:
            if _pid != os.getpid():
                start_over()
            note(event)


def start_over() -> None:
    """After a fork: what the parent renewed is the parent's, and no small margin here."""
    global _pid  # noqa: PLW0603  this process's own
    _pid = os.getpid()
    fading.start_over()
    _margins.clear()
    for gauges in (MARGIN, MARGIN_RATIO):
        for child in gauges.values():
            child.set(float("inf"))


def introduce(counts: Children, first: str, lasts: tuple[str, ...]) -> None:
    """Export zeros: of a series that begins with a one, Prometheus sees no increase."""
    for last in lasts:
        counts[first, last].inc(0)


def acquired(event: events.LockAcquired) -> None:
    if (event.task,) not in WAIT:
        introduce(ACQUIRES, event.task, ("granted", "taken", "unavailable"))
        introduce(LOST, event.task, ("deadline", "stolen"))
        for refusals in (SKIPPED, REFUSED, RETRIED, RESCHEDULED, QUEUED):
            introduce(refusals, event.task, ("conflict", "unavailable"))
    ACQUIRES[event.task, "granted"].inc()
    WAIT[(event.task,)].observe(event.waited)
    if event.queued_for:
        by_word = {word: QUEUE[event.task, word] for word in ("yes", "no")}  # one begins with zero
        by_word["yes" if event.was_woken else "no"].observe(event.queued_for)


def reported(event: Any) -> None:
    """Count what report mode would have refused; no lock was taken, so nothing else counts."""
    if isinstance(event, events.LockAcquired) and (event.task, "conflict") not in REPORTED:
        introduce(REPORTED, event.task, REPORTS)
    cause = reported_as(event)
    if cause:
        REPORTED[event.task, cause].inc()


def released(event: events.LockReleased) -> None:
    HOLD[(event.task,)].observe(event.held)


def renewed(event: events.LockRenewed) -> None:
    RENEWALS[(event.task,)].inc()
    LAG.observe(event.lag)
    note_margin(MARGIN, event.task, event.margin)
    if event.ttl:
        note_margin(MARGIN_RATIO, event.task, event.margin / event.ttl)


def note_margin(gauges: Children, task: str, margin: float | None = None) -> None:
    """Show the smallest recent margin, with a new *margin* or, later, without."""
    kind = "seconds" if gauges is MARGIN else "ratio"
    now, late = time.monotonic(), _margins.setdefault((kind, task), SmallestOfLate(WINDOW))
    if margin is not None:
        late.add(margin, now)
    gauges[(task,)].set(late.smallest(now))
    left = late.lasts(now)
    if left:
        fading.after(left, f"margin {kind} {task}", lambda: note_margin(gauges, task))


def node_down(event: events.NodeDown) -> None:
    NODE_EVENTS[event.node, "down"].inc()
    NODE_UP[(event.node,)].set(0)
    quarantine(event.node, 0.0)
    NODE_LATENCY[(event.node,)].set(UNKNOWN)
    NODE_OFFSET[(event.node,)].set(UNKNOWN)


def node_up(event: events.NodeUp) -> None:
    if (event.node,) not in NODE_UP:
        introduce(NODE_EVENTS, event.node, ("down", "quarantined", "clock_jump"))
    NODE_EVENTS[event.node, "up"].inc()
    NODE_UP[(event.node,)].set(1)


def node_quarantined(event: events.NodeQuarantined) -> None:
    NODE_EVENTS[event.node, "quarantined"].inc()
    quarantine(event.node, event.left)


def quarantine(node: str, left: float) -> None:
    """Show that *node* is quarantined, until *left* is over [s]."""
    shown = NODE_QUARANTINED[(node,)]
    shown.set(1 if left > 0 else 0)
    if left > 0:
        fading.after(left, f"quarantine {node}", lambda: shown.set(0))
    else:
        fading.forget(f"quarantine {node}")


def node_measured(event: events.NodeMeasured) -> None:
    NODE_UP[(event.node,)].set(1)
    quarantine(event.node, event.quarantine)
    NODE_LATENCY[(event.node,)].set(event.latency)
    NODE_OFFSET[(event.node,)].set(event.clock_offset)
    if event.leaked is not None:
        NODE_LEAKED[(event.node,)].set(event.leaked)


def elected(_event: events.LeaderElected) -> None:
    ELECTED.inc()
    LEADER.set(1)


def deposed(event: events.LeaderDeposed) -> None:
    DEPOSED[(event.reason,)].inc()
    LEADER.set(0)


def published(event: events.SlotPublished) -> None:
    if (event.entry,) not in SLOT_DELAY:
        introduce(SLOTS, event.entry, ("overlap", "deadline", "uncertain", "duplicate"))
    SLOTS[event.entry, "published"].inc()
    SLOT_DELAY[(event.entry,)].observe(event.late)


#: What to do about an event.
NOTES: dict[type[events.Event], Callable[[Any], None]] = {
    events.LockAcquired: acquired,
    events.LockConflict: lambda e: ACQUIRES[e.task, "taken"].inc(),
    events.LockUnavailable: lambda e: ACQUIRES[e.task, "unavailable"].inc(),
    events.LockRenewed: renewed,
    events.LeaseLost: lambda e: LOST[e.task, e.reason].inc(),
    events.LockReleased: released,
    events.TaskSkipped: lambda e: SKIPPED[e.task, e.cause].inc(),
    events.TaskRefused: lambda e: REFUSED[e.task, e.cause].inc(),
    events.TaskRetried: lambda e: RETRIED[e.task, e.cause].inc(),
    events.TaskRescheduled: lambda e: RESCHEDULED[e.task, e.cause].inc(),
    events.TaskQueued: lambda e: QUEUED[e.task, e.cause].inc(),
    events.TasksWaiting: lambda e: WAITING[(e.task,)].set(e.count),
    events.DuplicatePublished: lambda e: DUPLICATES[e.task, e.on_duplicate].inc(),
    events.NodeDown: node_down,
    events.NodeUp: node_up,
    events.NodeQuarantined: node_quarantined,
    events.NodeClockJump: lambda e: NODE_EVENTS[e.node, "clock_jump"].inc(),
    events.NodeMeasured: node_measured,
    events.LeaderElected: elected,
    events.LeaderDeposed: deposed,
    events.SlotPublished: published,
    events.SlotSkipped: lambda e: SLOTS[e.entry, e.cause].inc(),
}
