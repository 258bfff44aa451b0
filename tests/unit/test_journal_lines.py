"""The journal in plain words, whatever is in it."""

from __future__ import annotations

import re

import pytest

from celery_redlock import events
from celery_redlock.observers import journal
from celery_redlock.observers.records import record_of
from celery_redlock.ops.journal_lines import LINES, line

KIN = {"task": "shop.bill", "task_id": "id-1"}
HOLDER = {"task_id": "id-0", "pid": 7, "host": "web-1", "since": 90.0, "token": "s3cret"}
REFUSED = {"name": "invoice:7", "cause": "conflict", "holder": HOLDER, **KIN}
EVENTS = [
    (
        events.TaskSkipped(**REFUSED),
        "Skipped shop.bill[id-1]: lock 'invoice:7' is held by task id-0",
    ),
    (events.TaskRefused(**REFUSED), "Failed shop.bill[id-1]"),
    (events.TaskRetried(**REFUSED, countdown=3.0), "Retry of shop.bill[id-1] in 3 s"),
    (events.TaskRescheduled(**REFUSED, countdown=2.0, times=4), "for 2 s, 4 times by now"),
    (
        events.DuplicatePublished("a", task="shop.bill", holder_id="id-0", on_duplicate="join"),
        "Duplicate of shop.bill[id-0] at publish (join): lock 'a'",
    ),
    (
        events.DuplicatePublished(
            "a", task="shop.bill", holder_id="id-0", on_duplicate="rerun", merged=2
        ),
        "2 merged into the next run",
    ),
    (events.LeaseLost("a", "deadline", **KIN), "Lost lock 'a' of shop.bill[id-1] (deadline)"),
    (events.LeaseLost("a", "stolen"), "Lost lock 'a' (stolen)"),
    (events.LeaderElected("beat:shop", 3), "leads as 'beat:shop', term 3"),
    (events.LeaderDeposed("beat:shop", "resigned", 61.0), "leads no more (resigned), after 1 min"),
    (events.SlotSkipped("nightly", "t", 100.0, "overlap"), "an earlier slot has not ended"),
    (events.SlotSkipped("nightly", "t", 100.0, "overlap", 50.0), "and all since"),
    (events.NodeDown("lock-1:1/0", "refused"), "Node lock-1:1/0 is down: refused"),
    (events.NodeUp("lock-1:1/0"), "is up again"),
    (events.NodeQuarantined("lock-1:1/0", 42.0), "no vote for 42 s"),
    (events.NodeClockJump("lock-1:1/0", -3.0), "its clock by -3.0 s"),
]


#: What any record may have.
FIELDS = (
    *("at", "pid", "host", "counts", "longest", "ttl", "name", "task", "task_id", "cause"),
    *("holder", "holder_id", "countdown", "times", "on_duplicate", "merged", "reason", "fence"),
    *("led", "entry", "due", "since", "node", "left", "jump"),
)


@pytest.mark.parametrize(("event", "words"), EVENTS)
def test_events_in_words(event, words):
    """Who, what and why, on one line, with the moment before it, and no token."""
    told = line(record_of(event))
    assert words in told
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", told)
    assert "s3cret" not in told
    assert "\n" not in told


def test_without_a_quorum_nobody_is_named():
    """The cause decides the words."""
    told = line(record_of(events.TaskSkipped("a", cause="unavailable", **KIN)))
    assert "no quorum of lock nodes for lock 'a'" in told


def test_hold_times_in_words():
    """What the journal's observer writes of them."""
    holds = journal.Holds(30.0)
    holds.add(0.5, 30.0)
    holds.add(75.0, 30.0)
    record = {"event": "Holds", "at": 1.0, "task": "shop.bill", **holds.as_record()}
    assert "Held: 2 times by shop.bill, up to 1 min 15 s (ttl 30 s)" in line(record)


def test_everything_that_is_journaled_has_words():
    """No event that the journal keeps is left to the words for unknown ones."""
    kept = {*journal.NOTABLE, *journal.NODE_EVENTS, events.DuplicatePublished}
    assert {event.__name__ for event in kept} | {"Holds"} == set(LINES)


@pytest.mark.parametrize("event", [*sorted(LINES), "Unknown"])
@pytest.mark.parametrize(
    "junk", [None, "\x1b[31m\n", [], {}, -1e300, float("inf"), float("nan"), 10**400, True]
)
def test_records_of_others_are_borne(event, junk):
    """Whatever stands in a field: one line, without control characters."""
    record = dict.fromkeys(FIELDS, junk)
    for told in (line({**record, "event": event}), line({"event": event})):
        assert told.isprintable()


def test_unknown_events_are_told_by_their_name():
    """A newer version may have written what this one does not know."""
    told = line({"event": "LockPainted", "at": 1.0, "name": "a", "task": "t"})
    assert told.endswith("LockPainted name a task t")
