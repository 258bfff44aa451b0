"""What tasks do, counted: which events count as what, and when the counts are sent."""

from __future__ import annotations

import os
import random
import warnings
from itertools import pairwise
from types import SimpleNamespace

import pytest

from celery_redlock import events
from celery_redlock.observers import tally as observer
from celery_redlock.observers.tally import EVERY, MOST, Tally, summed
from celery_redlock.reading.holds import HOLD_BOUNDS, Holds, class_of
from celery_redlock.reading.tally import (
    EXAMPLES,
    FIELDS,
    REPORTED,
    Counts,
    TaskTally,
    largest,
    read_counts,
    tally_key,
)

AT = 1_764_000_000.0
HOLDER = {"task": "shop.bill", "task_id": "other", "host": "w1", "pid": 7, "since": 5.0}
ME = {"task": "shop.bill", "task_id": "me"}


def acquired(**more):
    return events.LockAcquired("name", 7, 0.001, **{**ME, **more})


def released(held=0.5, **more):
    return events.LockReleased("name", held, **{"ttl": 30.0, **ME, **more})


def refused(kind=events.TaskSkipped, cause="conflict", **more):
    return kind("name", cause=cause, holder={**HOLDER, "token": "01234567"}, **ME, **more)


def counted(*happened, at=AT):
    (counts,) = summed([(at, event) for event in happened]).values()
    return TaskTally.of([counts])


@pytest.fixture
def clock(monkeypatch):
    """Time that goes on when it is told to: ``clock[0] += seconds``; no hour ends meanwhile."""
    now = [1000.0]
    monkeypatch.setattr(
        observer, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: AT)
    )
    return now


# -- what counts as what -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "ran", "cause"),
    [
        (acquired(), 1, None),
        (refused(), 0, "conflict"),
        (refused(cause="rate"), 0, "rate"),
        (refused(events.TaskRefused, "deliveries"), 0, "deliveries"),
        (refused(events.TaskRefused, "unavailable"), 0, "unavailable"),
        (refused(events.TaskRetried, countdown=1.0), 0, "conflict"),
        (refused(events.TaskRescheduled, countdown=1.0, times=1), 0, "conflict"),
        (refused(events.TaskQueued, countdown=1.0, times=1, since=1.0), 0, "conflict"),
        (refused(events.TaskRescheduled, countdown=1.0, times=2), 0, None),
        (events.LeaseLost("name", "deadline", **ME), 0, "lost"),
        (events.DuplicatePublished("name", "shop.bill", "first", "join"), 0, "duplicate"),
    ],
)
def test_in_enforce_mode_what_is_refused_did_not_run(event, ran, cause):
    told = counted(event)
    assert (told.ran, told.ran_reported, told.reported) == (ran, 0, {})
    assert told.refused == ({cause: 1} if cause else {})


@pytest.mark.parametrize("cause", ["conflict", "unavailable", "redelivered", "finished"])
def test_in_report_mode_what_would_be_refused_ran(cause):
    told = counted(refused(cause=cause, report=True), acquired(report=True), acquired())
    assert (told.ran, told.ran_reported) == (3, 2)
    assert (told.refused, told.reported) == ({}, {cause: 1})


def test_a_duplicate_and_a_loss_may_be_only_reported():
    duplicate = events.DuplicatePublished("name", "shop.bill", "first", "join", report=True)
    told = counted(duplicate, events.LeaseLost("name", "deadline", report=True, **ME))
    assert (told.ran, told.refused) == (0, {})
    assert told.reported == {"duplicate": 1, "lost": 1}


@pytest.mark.parametrize(
    "event",
    [acquired(task=""), events.NodeDown("a", "refused"), events.LockRenewed("n", 1.0, **ME)],
)
def test_what_is_no_tasks_is_not_counted(event):
    sent = []
    Tally(lambda *it: sent.append(it))(event)
    assert sent == []


def test_an_example_names_both_sides_and_no_token():
    told = counted(refused(), refused(report=True))
    example = told.examples["conflict"]
    assert example["holder"] == HOLDER
    assert example["at"] == AT
    assert {key: example[key] for key in ("name", "task_id", "report", "pid")} == {
        "name": "name",
        "task_id": "me",
        "report": True,
        "pid": os.getpid(),
    }


def test_holds_are_counted_by_their_lengths():
    told = counted(released(0.002), released(0.002), released(70.0), released(1.0, ttl=0.0))
    holds = told.holds
    assert (holds.count, holds.longest, holds.ttl) == (4, 70.0, 30.0)
    assert holds.total == pytest.approx(71.004)
    assert holds.counts[class_of(0.002)] == 2


def test_hours_and_tasks_are_counted_apart():
    noted = [(AT, acquired()), (AT, acquired(task="other")), (AT + 3600, acquired())]
    assert [(task, it.numbers["ran"]) for (_, task), it in summed(noted).items()] == [
        ("shop.bill", 1),
        ("other", 1),
        ("shop.bill", 1),
    ]


def test_a_name_that_cannot_be_encoded_is_left_out():
    """A forged message may have one."""
    assert summed([(AT, acquired(task="\ud800"))]) == {}


# -- when it is sent -----------------------------------------------------------------------


def test_counts_are_sent_with_an_event_a_few_seconds_later(clock):
    sent = []
    tally = Tally(lambda hour, task, counts: sent.append(counts.numbers["ran"]))
    tally(acquired())
    assert sent == [1]
    for _ in range(10):
        tally(acquired())
    assert sent == [1]
    clock[0] += EVERY
    tally(acquired())
    assert sent == [1, 11]
    tally(acquired())
    tally.flush()
    tally.flush()
    assert sent == [1, 11, 1]


def test_what_is_counted_before_all_nodes_are_there_is_sent_once_later(clock):
    """A node that is missing would lack it for good; one that never comes delays nothing twice."""
    sent = []
    tally = Tally(lambda hour, task, counts: sent.append(counts.numbers["ran"]), lambda: False)
    tally(acquired())
    assert sent == []
    clock[0] += EVERY
    tally(acquired())
    assert sent == [2]


def test_a_busy_process_sends_sooner(clock):
    """So that no event waits for the sum of too many others."""
    sent = []
    tally = Tally(lambda hour, task, counts: sent.append(counts.numbers["ran"]))
    for _ in range(MOST + 1):
        tally(acquired())
    assert sent == [1, MOST]


def test_a_task_does_not_wait_for_the_sum(clock, monkeypatch):
    """A grant and a release are noted; they are added up when they are sent."""
    sums = []
    monkeypatch.setattr(observer, "summed", lambda noted: sums.append(len(list(noted))) or {})
    tally = Tally(lambda *_: None)
    for _ in range(100):
        tally(acquired())
        tally(released())
    assert sums == [1]
    tally.flush()
    assert sums == [1, 199]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_what_a_parent_counted_is_not_sent_by_its_child(clock):
    sent = []
    tally = Tally(lambda hour, task, counts: sent.append((task, counts.numbers["ran"])))
    tally(acquired())
    tally(acquired())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        sent.clear()
        tally.flush()
        tally(acquired(task="child"))
        tally.flush()
        os._exit(0 if sent == [("child", 1)] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tally.flush()
    assert sent == [("shop.bill", 1), ("shop.bill", 1)]


# -- adding up -----------------------------------------------------------------------------


def counts(**numbers):
    return Counts(numbers, {})


def test_of_the_nodes_the_largest_counts():
    """One that was away has missed some; none has counted anything twice."""
    told = largest([counts(ran=3, first=5, longest=10), counts(ran=5, first=7), counts()])
    assert told.numbers == {"ran": 5, "first": 5, "longest": 10}


def test_hours_add_up():
    told = TaskTally.of(
        [
            counts(ran=3, first=1000, last=2000, longest=10_000, held=12_000, ttl=60_000),
            counts(ran=5, first=3000, last=4000, longest=2000, held=3000, ttl=30_000),
            counts(**{"ran": 1, f"{REPORTED}conflict": 2}),
        ]
    )
    assert (told.ran, told.first, told.last) == (9, 1.0, 4.0)
    assert (told.holds.longest, told.holds.total, told.holds.ttl) == (10.0, 15.0, 30.0)
    assert told.reported == {"conflict": 2}


def test_of_an_example_the_newest_counts():
    parts = [Counts({}, {"example:lost": {"at": at}}) for at in (1.0, 3.0, 2.0)]
    assert TaskTally.of(parts).examples == {"lost": {"at": 3.0}}


@pytest.mark.parametrize("junk", [b"x", b"-1", b"9" * 400, b"1.5", b"nan", None, 7, [], b""])
def test_what_others_wrote_is_left_out(junk):
    reply = [junk] * (len(FIELDS) + len(EXAMPLES))
    assert read_counts(reply) == Counts({}, {})


def test_a_key_is_short_whatever_the_name():
    one, other = (tally_key("redlock", 490_000, "x" * 500 + end) for end in "ab")
    assert one != other
    assert max(len(one), len(other)) < 200


# -- lengths -------------------------------------------------------------------------------


def test_classes_are_so_narrow_that_a_length_is_known_to_a_fifth():
    assert all(upper / lower < 1.5 for lower, upper in pairwise(HOLD_BOUNDS))


@pytest.mark.parametrize("share", [0.5, 0.99, 1.0])
def test_a_quantile_is_never_less_than_what_was_measured(share):
    """And no more than half as long again: what is advised by it is enough."""
    dice = random.Random(share)
    for _ in range(50):
        lengths = sorted(10 ** dice.uniform(-2.9, 3.9) for _ in range(dice.randint(1, 300)))
        counts = [0] * (len(HOLD_BOUNDS) + 1)
        for length in lengths:
            counts[class_of(length)] += 1
        holds = Holds(tuple(counts), sum(lengths), lengths[-1])
        right = lengths[max(1, -(-int(share * 100) * len(lengths) // 100)) - 1]
        assert right <= holds.quantile(share) <= 1.5 * right


@pytest.mark.parametrize("length", [0.004, 2.0, 30.0])
def test_the_quantiles_of_equal_lengths_are_that_length(length):
    """Not a class's middle: a hold of 30 s was said to have taken up to 26 s."""
    counts = [0] * (len(HOLD_BOUNDS) + 1)
    counts[class_of(length)] = 3
    holds = Holds(tuple(counts), 3 * length, length)
    assert [holds.quantile(share) for share in (0.5, 0.99)] == [length, length]


def test_lengths_outside_of_all_classes():
    counts = [0] * (len(HOLD_BOUNDS) + 1)
    counts[class_of(90_000.0)] = 1
    assert Holds(tuple(counts), 90_000.0, 90_000.0).quantile(0.5) == 90_000.0
    assert Holds().quantile(0.5) == 0.0
    counts = [1] + [0] * len(HOLD_BOUNDS)
    assert Holds(tuple(counts), 0.0002, 0.0002).quantile(0.5) == 0.0002
