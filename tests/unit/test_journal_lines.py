"""The journal on a terminal, whatever is in it."""

from __future__ import annotations

import re

import pytest

from celery_redlock import events
from celery_redlock.observers.records import record_of
from celery_redlock.ops.cli.tail import EVENTS
from celery_redlock.ops.listing import line
from celery_redlock.reading.sentences import sentence

#: What any record may have.
FIELDS = (
    *("at", "pid", "host", "counts", "longest", "ttl", "name", "task", "task_id", "cause"),
    *("holder", "holder_id", "countdown", "times", "on_duplicate", "merged", "reason", "fence"),
    *("led", "entry", "due", "since", "node", "left", "jump"),
)


def test_a_line_has_a_moment_and_the_sentence():
    record = record_of(events.TaskSkipped("a", cause="unavailable", task="t", task_id="id-1"))
    when, told = re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  (.+)", line(record)).groups()
    assert when
    assert told == sentence(record)


@pytest.mark.parametrize(
    "event", [events.NodeDown("lock-1:1/0", "refused"), events.LeaderElected("beat:shop", 3)]
)
def test_what_many_notice_says_who_did(event):
    record = {**record_of(event), "pid": 7, "host": "web-1"}
    assert line(record).endswith(f"{sentence(record)} (process 7 on web-1)")


def test_everything_that_is_journaled_is_listed():
    assert {name for name, kind in events.KINDS.items() if kind.journal} == set(EVENTS)
    assert len(set(EVENTS)) == len(EVENTS)


@pytest.mark.parametrize("event", [*sorted(events.KINDS), "Unknown"])
@pytest.mark.parametrize(
    "junk", [None, "\x1b[31m\n", [], {}, -1e300, float("inf"), float("nan"), 10**400, True]
)
def test_records_of_others_are_borne(event, junk):
    record = dict.fromkeys(FIELDS, junk)
    for told in (line({**record, "event": event}), line({"event": event})):
        assert told.isprintable()


def test_unknown_events_are_told_by_their_name():
    """A newer version may have written what this one does not know."""
    told = line({"event": "LockPainted", "at": 1.0, "name": "a", "task": "t"})
    assert told.endswith("LockPainted name a task t")
