"""Which samples an event changes, and that gauges get well again."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from celery_redlock import events
from celery_redlock.observers import prometheus
from celery_redlock.observers.prometheus import count_event
from celery_redlock.reading.nodes import NodeStatus
from celery_redlock.task.worker import node_watch

WHO = {"task": "shop.bill", "task_id": "4711"}
TASK = {"task": "shop.bill"}
NAME = "invoice:s3cr3t"


def taken(kind, cause, **more):
    return kind(NAME, cause=cause, **WHO, **more)


#: Event -> the samples that it adds one to.
COUNTED = [
    (
        events.LockAcquired(NAME, 7, 0.002, **WHO),
        [
            ("redlock_acquires_total", {**TASK, "outcome": "granted"}),
            ("redlock_wait_seconds_count", TASK),
            ("redlock_wait_seconds_bucket", {**TASK, "le": "0.0025"}),
        ],
    ),
    (
        events.LockAcquired(NAME, 7, 0.002),
        [("redlock_acquires_total", {"task": "", "outcome": "granted"})],
    ),
    (
        events.LockConflict(NAME, {"task_id": "1"}, 0.1, **WHO),
        [("redlock_acquires_total", {**TASK, "outcome": "taken"})],
    ),
    (
        events.LockUnavailable(NAME, {"a": "unreachable"}, 0.1, **WHO),
        [("redlock_acquires_total", {**TASK, "outcome": "unavailable"})],
    ),
    (
        events.LockReleased(NAME, 4000.0, ttl=30.0, **WHO),
        [
            ("redlock_hold_seconds_count", TASK),
            ("redlock_hold_seconds_bucket", {**TASK, "le": "10800.0"}),
        ],
    ),
    (
        events.LockRenewed(NAME, 20.0, ttl=30.0, lag=0.002, **WHO),
        [
            ("redlock_renewals_total", TASK),
            ("redlock_watchdog_lag_seconds_count", {}),
            ("redlock_watchdog_lag_seconds_bucket", {"le": "0.005"}),
        ],
    ),
    (
        events.LeaseLost(NAME, "deadline", **WHO),
        [("redlock_lost_total", {**TASK, "reason": "deadline"})],
    ),
    (
        taken(events.TaskSkipped, "conflict"),
        [("redlock_skipped_total", {**TASK, "cause": "conflict"})],
    ),
    (
        taken(events.TaskRefused, "unavailable"),
        [("redlock_refused_total", {**TASK, "cause": "unavailable"})],
    ),
    (
        taken(events.TaskRetried, "conflict", countdown=3.0),
        [("redlock_retried_total", {**TASK, "cause": "conflict"})],
    ),
    (
        taken(events.TaskRescheduled, "conflict", countdown=3.0, times=2),
        [("redlock_rescheduled_total", {**TASK, "cause": "conflict"})],
    ),
    (
        taken(events.TaskQueued, "conflict", countdown=60.0, times=1, since=1.0),
        [("redlock_queued_total", {**TASK, "cause": "conflict"})],
    ),
    (
        events.LockAcquired(NAME, 7, 0.002, queued_for=90.0, was_woken=True, **WHO),
        [
            ("redlock_queue_seconds_count", {**TASK, "woken": "yes"}),
            ("redlock_queue_seconds_bucket", {**TASK, "woken": "yes", "le": "120.0"}),
        ],
    ),
    (
        events.LockAcquired(NAME, 7, 0.002, queued_for=90.0, **WHO),
        [("redlock_queue_seconds_count", {**TASK, "woken": "no"})],
    ),
    (
        events.DuplicatePublished(NAME, "shop.bill", "0815", "join"),
        [("redlock_duplicates_total", {**TASK, "on_duplicate": "join"})],
    ),
    (
        events.NodeUp("node:1/0"),
        [("redlock_node_events_total", {"node": "node:1/0", "event": "up"})],
    ),
    (
        events.NodeDown("node:1/0", "refused"),
        [("redlock_node_events_total", {"node": "node:1/0", "event": "down"})],
    ),
    (
        events.NodeQuarantined("node:1/0", 60.0),
        [("redlock_node_events_total", {"node": "node:1/0", "event": "quarantined"})],
    ),
    (
        events.NodeClockJump("node:1/0", 60.0),
        [("redlock_node_events_total", {"node": "node:1/0", "event": "clock_jump"})],
    ),
    (events.LeaderElected("beat:shop", 3), [("redlock_leader_elected_total", {})]),
    (
        events.LeaderDeposed("beat:shop", "deadline", 60.0),
        [("redlock_leader_deposed_total", {"reason": "deadline"})],
    ),
    (
        events.SlotPublished("nightly", "shop.bill", 0.0, "4711", 0.3),
        [
            ("redlock_beat_slots_total", {"entry": "nightly", "outcome": "published"}),
            ("redlock_beat_slot_delay_seconds_bucket", {"entry": "nightly", "le": "0.5"}),
        ],
    ),
    (
        events.SlotSkipped("nightly", "shop.bill", 0.0, "overlap"),
        [("redlock_beat_slots_total", {"entry": "nightly", "outcome": "overlap"})],
    ),
]


@pytest.fixture(autouse=True)
def _nothing_is_held():
    yield
    prometheus._margins.clear()


def value(name, **labels):
    return REGISTRY.get_sample_value(name, labels)


@pytest.mark.parametrize(("event", "samples"), COUNTED, ids=lambda it: type(it).__name__)
def test_an_event_is_counted(event, samples):
    before = [value(name, **labels) or 0 for name, labels in samples]
    count_event(event)
    assert [value(name, **labels) for name, labels in samples] == [n + 1 for n in before]


def test_what_a_rule_waits_for_begins_with_zero():
    """Else its first loss would be no increase, and nobody would be told."""
    count_event(events.LockAcquired(NAME, 7, 0.1, task="shop.new"))
    assert value("redlock_lost_total", task="shop.new", reason="deadline") == 0
    assert value("redlock_lost_total", task="shop.new", reason="stolen") == 0
    assert value("redlock_acquires_total", task="shop.new", outcome="unavailable") == 0
    count_event(events.SlotPublished("new", "shop.new", 0.0, "4711", 0.3))
    assert value("redlock_beat_slots_total", entry="new", outcome="deadline") == 0


REPORTED = [
    (taken(events.TaskSkipped, "redelivered", report=True), "redelivered"),
    (taken(events.TaskRetried, "conflict", countdown=3.0, report=True), "conflict"),
    (taken(events.TaskSkipped, "rate", report=True), "rate"),
    (events.LeaseLost(NAME, "deadline", **WHO, report=True), "lost"),
    (events.DuplicatePublished(NAME, "shop.bill", "1", "join", report=True), "duplicate"),
]


def counts():
    metrics = (metric for metric in REGISTRY.collect() if metric.name.startswith("redlock_"))
    samples = (sample for metric in metrics for sample in metric.samples)
    growing = [it for it in samples if it.name.endswith(("_total", "_count", "_sum", "_bucket"))]
    return {(it.name, *sorted(it.labels.items())): it.value for it in growing}


@pytest.mark.parametrize(("event", "cause"), REPORTED, ids=lambda it: str(it)[:12])
def test_what_is_only_reported_is_counted_apart(event, cause):
    count_event(events.LockAcquired(NAME, None, 0.1, **WHO, report=True))  # begins with zeros
    before = counts()
    count_event(event)
    changed = {key: told - before.get(key, 0) for key, told in counts().items()}
    assert {key: by for key, by in changed.items() if by} == {
        ("redlock_reported_total", ("cause", cause), ("task", "shop.bill")): 1
    }


@pytest.mark.parametrize(
    "event",
    [
        events.LockAcquired(NAME, None, 0.1, **WHO, report=True),
        events.LockReleased(NAME, 0.1, **WHO, report=True),
        events.LockConflict(NAME, {}, 0.1, **WHO, report=True),
    ],
    ids=lambda it: type(it).__name__,
)
def test_a_note_is_no_lock(event):
    count_event(events.LockAcquired(NAME, None, 0.1, **WHO, report=True))
    before = counts()
    count_event(event)
    assert counts() == before


def test_how_many_wait_is_shown_as_it_is_now():
    """And of woken and others, the ones that there were not yet begin with zero."""
    for count in (3, 0, 2):
        count_event(events.TasksWaiting("waits", count))
        assert value("redlock_waiting", task="waits") == count
    count_event(events.LockAcquired(NAME, 7, 0.1, task="woken"))
    assert value("redlock_queue_seconds_count", task="woken", woken="no") is None
    count_event(events.LockAcquired(NAME, 7, 0.1, task="woken", queued_for=3.0, was_woken=True))
    assert value("redlock_queue_seconds_count", task="woken", woken="no") == 0


def test_every_event_is_counted_or_set():
    assert all(prometheus.STEPS[kind] for kind in events.KINDS.values())


def test_no_label_holds_a_lock_name_or_an_id():
    for event, _ in COUNTED:
        count_event(event)
    values = {
        text
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("redlock_")
        for text in sample.labels.values()
    }
    assert "shop.bill" in values
    assert not {text for text in values if "s3cr3t" in text or text in {"4711", "0815"}}
    assert "beat:shop" not in values


def test_an_event_of_a_users_own_is_passed_over():
    @dataclasses.dataclass(frozen=True)
    class Own(events.Event):
        pass

    count_event(Own())


def test_a_node_goes_down_and_comes_back():
    node = {"node": "node:2/0"}
    count_event(events.NodeUp("node:2/0"))
    assert value("redlock_node_up", **node) == 1
    count_event(events.NodeMeasured("node:2/0", 0.001, -0.2))
    assert value("redlock_node_latency_seconds", **node) == 0.001
    assert value("redlock_node_clock_offset_seconds", **node) == -0.2
    count_event(events.NodeDown("node:2/0", "refused"))
    assert value("redlock_node_up", **node) == 0
    assert math.isnan(value("redlock_node_latency_seconds", **node))
    assert math.isnan(value("redlock_node_clock_offset_seconds", **node))
    count_event(events.NodeMeasured("node:2/0", 0.002, 0.1, leaked=2))
    assert value("redlock_node_up", **node) == 1
    assert value("redlock_node_leaked_keys", **node) == 2
    assert value("redlock_node_latency_seconds", **node) == 0.002


def look(*nodes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_watch, "connect", lambda locks, longest: None)
        patch.setattr(node_watch, "probe", lambda locks: list(nodes))
        locks = SimpleNamespace(labels=[node.node for node in nodes])
        plugin = SimpleNamespace(locks=locks, notify=count_event, speaks_of_nodes=False)
        node_watch.NodeWatch(plugin).look()


@pytest.mark.parametrize(
    "end",
    [
        lambda: look(NodeStatus("node:3/0", "up", latency=0.001, clock_offset=0.0)),
        lambda: count_event(events.NodeDown("node:3/0", "refused")),
    ],
    ids=["seen to vote", "down"],
)
def test_a_quarantine_ends(end):
    """When a look finds that the node votes, or when there is no node to vote."""
    quarantined = {"name": "redlock_node_quarantined", "node": "node:3/0"}
    count_event(events.NodeUp("node:3/0"))
    look(NodeStatus("node:3/0", "quarantined", quarantine=50.0, latency=0.001, clock_offset=0.0))
    assert value(**quarantined) == 1
    assert value("redlock_node_up", node="node:3/0") == 1
    end()
    assert value(**quarantined) == 0


def test_a_quarantine_is_shown_by_who_sees_its_end():
    """Who does not look at the nodes, as a beat, would show it for ever, and only counts it."""
    count_event(events.NodeQuarantined("node:4/0", 60.0))
    assert value("redlock_node_quarantined", node="node:4/0") is None


def margins(task):
    found = (value(f"redlock_smallest_lease_margin_{it}", task=task) for it in ("seconds", "ratio"))
    return tuple(found)


def test_the_smallest_margin_is_that_of_the_locks_that_are_held():
    """Of all renewals of these; of one that was released, it alarms nobody."""
    about = {"task": "shop.margin"}
    for name, margin in (("a", 20.0), ("a", 3.0), ("a", 19.0), ("b", 15.0)):
        count_event(events.LockRenewed(name, margin, ttl=30.0, **about))
    assert margins("shop.margin") == (3.0, pytest.approx(0.1))
    count_event(events.LockReleased("c", 1.0, **about))
    assert margins("shop.margin") == (3.0, pytest.approx(0.1))
    count_event(events.LockReleased("a", 99.0, **about))
    assert margins("shop.margin") == (15.0, 0.5)
    count_event(events.LockReleased("b", 99.0, **about))
    assert margins("shop.margin") == (math.inf, math.inf)


def test_one_leads():
    count_event(events.LeaderElected("beat:shop", 3))
    assert value("redlock_leader") == 1
    count_event(events.LeaderDeposed("beat:shop", "resigned", 60.0))
    assert value("redlock_leader") == 0


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def run(script, **env):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,  # a hundred forks take a busy machine long; a jam lasts for ever
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


FORKED = """
    import os, threading, time
    from celery_redlock.events.metrics import REPORTED
    from celery_redlock.observers import prometheus
    from celery_redlock.observers.prometheus import counting

    mutex = prometheus.FAMILIES[REPORTED]._family._lock
    begun, end = threading.Event(), threading.Event()

    def count():  # as `count_event` does, but it takes its time
        with {held}, mutex:
            begun.set()
            end.wait(60)

    threading.Thread(target=count).start()
    begun.wait(60)
    if {held!r} == "counting":  # else the fork waits for nothing, and we end it afterwards
        threading.Timer(0.2, end.set).start()
    child = os.fork()
    if child == 0:
        # No other thread is here, so whoever has it has it for ever.
        os._exit(0 if mutex.acquire(blocking=False) else 1)
    end.set()
    print("jammed" if os.waitpid(child, 0)[1] else "free")
"""


@needs_fork
@pytest.mark.parametrize(("held", "told"), [("counting", "free"), ("threading.Lock()", "jammed")])
def test_no_child_inherits_a_mutex_of_prometheus_client(held, told):
    """A fork waits until nothing is being counted; without that the child could never count."""
    assert run(FORKED.format(held=held)) == [told]


LOOKING = """
    import os, threading
    from celery_redlock.events import NodeMeasured
    from celery_redlock.task.worker.node_watch import forks_held_off
    from celery_redlock.observers.prometheus import count_event

    enough = threading.Event()

    def look():
        while not enough.is_set():
            with forks_held_off:
                count_event(NodeMeasured("n", 0.001, 0.0))

    threading.Thread(target=look, daemon=True).start()
    for _ in range(100):
        child = os.fork()
        if child == 0:
            count_event(NodeMeasured("n", 0.001, 0.0))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    enough.set()
    print("forked")
"""


@needs_fork
def test_a_watch_that_counts_does_not_jam_a_fork(tmp_path):
    """Both take two locks, in the same order."""
    assert run(LOOKING, PROMETHEUS_MULTIPROC_DIR=str(tmp_path)) == ["forked"]


NOWHERE = """
    from types import SimpleNamespace
    from celery_redlock.errors import ConfigurationError
    from celery_redlock.observers.names import observer_of

    for _ in range(2):
        try:
            observer_of("prometheus", SimpleNamespace(has_children=True))
        except ConfigurationError:
            print("told")
"""


def test_files_that_cannot_be_written_are_told_of_each_time(tmp_path):
    """Of an app that is asked again after that, too."""
    nowhere = str(tmp_path / "nowhere")
    assert run(NOWHERE, PROMETHEUS_MULTIPROC_DIR=nowhere) == ["told", "told"]


FAMILY = """
    import os
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector
    from celery_redlock import events
    from celery_redlock.observers.prometheus import count_event

    def child(*told):
        pid = os.fork()
        if pid == 0:
            for event in told:
                count_event(event)
            os._exit(0)
        os.waitpid(pid, 0)

    def show(name, **labels):
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        print(registry.get_sample_value(name, labels))

    renewed = events.LockRenewed("k", 9.0, ttl=10.0, task="t")
    count_event(renewed)
    child(events.TaskSkipped("k", task="t", task_id="1", cause="conflict"))
    show("redlock_smallest_lease_margin_seconds", task="t")
    show("redlock_renewals_total", task="t")

    count_event(events.NodeMeasured("n", 0.001, 0.0))
    child(events.TaskSkipped("k", task="t", task_id="1", cause="conflict"))
    show("redlock_node_up", node="n")
    child(events.NodeDown("n", "refused"))
    show("redlock_node_up", node="n")
    count_event(events.NodeMeasured("n", 0.001, 0.0))
    show("redlock_node_up", node="n")
    show("redlock_skipped_total", task="t", cause="conflict")
"""


@needs_fork
def test_processes_are_added_up_as_they_should_be(tmp_path):
    """A child without renewals has no small margin; of a node, the last word counts."""
    told = run(FAMILY, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert told == ["9.0", "1.0", "1.0", "0.0", "1.0", "2.0"]
