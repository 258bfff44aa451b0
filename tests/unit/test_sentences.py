"""Every event in a sentence: one table, which all that tell a person of events ask."""

from __future__ import annotations

import inspect

import pytest

from celery_redlock import events
from celery_redlock.observers import logging
from celery_redlock.observers.records import record_of
from celery_redlock.ops import listing
from celery_redlock.ops.cli import tail
from celery_redlock.ops.web.answers import of_entry
from celery_redlock.reading.journal_view import Entry
from celery_redlock.reading.sentences import sentence, wording

KIN = {"task": "shop.bill", "task_id": "id-1"}
HOLDER = {
    "task": "shop.bill",
    "task_id": "id-0",
    "pid": 7,
    "host": "web-1",
    "since": 90.0,
    "token": "s3cret",
}
REFUSED = {"name": "invoice:7", "cause": "conflict", "holder": HOLDER, **KIN}
HELD = "lock 'invoice:7' is held by task shop.bill[id-0], process 7 on web-1, for 10 s"
NODE = "lock-1:1/0"
SLOT = "slot 'nightly' of 1970-01-01T00:01:40.000+00:00"
EARLIER = "the run of an earlier slot has not ended"
SINCE = "and all since 1970-01-01T00:00:50.000+00:00"
EVENTS = [
    (
        events.LockAcquired("a", 7, 0.5, **KIN),
        "Acquired lock 'a' of task shop.bill[id-1] after 0.5 s, fence 7",
    ),
    (events.LockAcquired("a", None, 0.5), "Acquired lock 'a' after 0.5 s"),
    (
        events.LockConflict("a", HOLDER, 2.0),
        "Refused lock 'a' after 2 s: held by task shop.bill[id-0], process 7 on web-1, for 10 s",
    ),
    (
        events.LockUnavailable("a", {"n1": "no answer in time", "n2": "refused"}, 0.5),
        "No quorum for lock 'a' after 0.5 s: n1: no answer in time; n2: refused",
    ),
    (
        events.LockUnavailable("a", {"n1": "refused"}, 0.5, **KIN),
        "No quorum for lock 'a' after 0.5 s for task shop.bill[id-1]: n1: refused",
    ),
    (events.LockRenewed("a", 20.0), "Renewed lock 'a' with 20 s left"),
    (events.LockReleased("a", 75.0), "Released lock 'a' after 1 min 15 s"),
    (
        events.LeaseLost("A", "deadline", **KIN),
        "Lock 'A' is lost (deadline) by task shop.bill[id-1]: not renewed in time",
    ),
    (events.LeaseLost("a", "new"), "Lock 'a' is lost (new): new"),
    (events.TaskSkipped(**REFUSED), f"Skipped task shop.bill[id-1]: {HELD}"),
    (
        events.TaskSkipped(**{**REFUSED, "cause": "unavailable"}),
        "Skipped task shop.bill[id-1]: no quorum of lock nodes for lock 'invoice:7'",
    ),
    (
        events.TaskSkipped("a", cause="conflict", **KIN),
        "Skipped task shop.bill[id-1]: lock 'a' is held by an unknown holder",
    ),
    (events.TaskRefused(**REFUSED), f"Failed task shop.bill[id-1]: {HELD}"),
    (events.TaskRetried(**REFUSED, countdown=3.0), f"Retry of task shop.bill[id-1] in 3 s: {HELD}"),
    (
        events.TaskRescheduled(**REFUSED, countdown=2.0, times=4),
        f"Rescheduled task shop.bill[id-1] in 2 s (attempt 4): {HELD}",
    ),
    (
        events.TaskQueued(**REFUSED, countdown=60.0, times=1, since=1.0),
        f"Queued task shop.bill[id-1] (attempt 1): {HELD}",
    ),
    (
        events.LockAcquired("a", 7, 0.5, queued_for=4.0, was_woken=True, **KIN),
        "Acquired lock 'a' of task shop.bill[id-1] after 4 s in the queue (woken), fence 7",
    ),
    (
        events.LockAcquired("a", 7, 0.5, queued_for=61.0, **KIN),
        (
            "Acquired lock 'a' of task shop.bill[id-1] after 1 min 1 s in the queue "
            "(came by itself), fence 7"
        ),
    ),
    (
        events.TasksWaiting("shop.bill", 3),
        "3 of task shop.bill wait for their locks in this worker",
    ),
    (
        events.DuplicatePublished("a", task="shop.bill", holder_id="id-0", on_duplicate="join"),
        "A duplicate joined task shop.bill[id-0]: lock 'a'",
    ),
    (
        events.DuplicatePublished(
            "a", task="shop.bill", holder_id="id-0", on_duplicate="rerun", merged=2
        ),
        (
            "A duplicate asked for another run of task shop.bill[id-0]: lock 'a'; "
            "2 merged into the next run"
        ),
    ),
    (
        events.TaskSkipped(**REFUSED, report=True),
        f"Running task shop.bill[id-1], which would have been skipped (report mode): {HELD}",
    ),
    (
        events.TaskRefused(**{**REFUSED, "cause": "unavailable"}, report=True),
        (
            "Running task shop.bill[id-1], which would have failed (report mode): "
            "no quorum of lock nodes for lock 'invoice:7'"
        ),
    ),
    (
        events.TaskSkipped(**{**REFUSED, "cause": "redelivered"}, report=True),
        (
            "Running task shop.bill[id-1], which would have been skipped (report mode): "
            f"delivered again while it runs; {HELD}"
        ),
    ),
    (
        events.TaskSkipped(**{**REFUSED, "cause": "finished"}, report=True),
        (
            "Running task shop.bill[id-1], which would have been skipped (report mode): "
            "this execution has finished before"
        ),
    ),
    (
        events.LeaseLost("A", "deadline", **KIN, report=True),
        (
            "Lock 'A' would have been lost (deadline) by task shop.bill[id-1] (report mode): "
            "not renewed in time"
        ),
    ),
    (
        events.DuplicatePublished(
            "a", task="shop.bill", holder_id="id-0", on_duplicate="join", report=True
        ),
        (
            "Published task shop.bill, which would have joined task shop.bill[id-0] (report mode): "
            "lock 'a'"
        ),
    ),
    (
        events.LockReleased("a", 75.0, report=True),
        "Released lock 'a' after 1 min 15 s (report mode)",
    ),
    (events.LeaderElected("beat:shop", 3), "Leads as 'beat:shop', term 3"),
    (
        events.LeaderDeposed("beat:shop", "resigned", 61.0),
        "No longer leads as 'beat:shop', after 1 min 1 s: it resigned",
    ),
    (events.SlotPublished("nightly", "t", 100.0, "id-1", 0.2), f"Published {SLOT} as task t[id-1]"),
    (
        events.SlotPublished("nightly", "t", 100.0, "id-1", 2.0),
        f"Published {SLOT} as task t[id-1], 2.0 s late",
    ),
    (events.SlotSkipped("nightly", "t", 100.0, "overlap"), f"Skipped {SLOT}: {EARLIER}"),
    (
        events.SlotSkipped("nightly", "t", 100.0, "overlap", 50.0),
        f"Skipped {SLOT} {SINCE}: {EARLIER}",
    ),
    (events.NodeDown(NODE, "refused"), "Lock node lock-1:1/0 is down: refused"),
    (events.NodeUp(NODE), "Lock node lock-1:1/0 is up"),
    (
        events.NodeQuarantined(NODE, 42.0),
        "Lock node lock-1:1/0 is quarantined for 42 s: it is new, or was restarted or wiped",
    ),
    (events.NodeClockJump(NODE, -3.0), "The clock of lock node lock-1:1/0 jumped by -3.0 s"),
    (
        events.NodeMeasured(NODE, 0.001, 0.02),
        "Lock node lock-1:1/0 answers in 1 ms, its clock differs by +20 ms",
    ),
]
CLASSES = {
    kind
    for _, kind in inspect.getmembers(events, inspect.isclass)
    if issubclass(kind, events.Event) and not kind.__subclasses__()
}


@pytest.mark.parametrize(("event", "words"), EVENTS)
def test_an_event_in_a_sentence(event, words):
    """Who, what and why, without a token; ten seconds after the holder got its lock."""
    assert sentence({**record_of(event), "at": 100.0}) == words


def test_every_event_has_a_sentence():
    assert set(events.KINDS.values()) == CLASSES
    assert all("what" in vars(kind) for kind in CLASSES)


def test_an_unknown_event_is_told_by_its_name():
    """A newer version may have written what this one does not know."""
    record = {"event": "LockPainted", "at": 1.0, "name": "a", "task": "t"}
    assert sentence(record) == "LockPainted name a task t"
    assert wording(record).word == "LockPainted"
    assert sentence({"event": ["LockPainted"]}).startswith("[")


@pytest.mark.parametrize("told", ["log", "journal", "tail", "page"])
def test_all_ask_the_one_table(told, monkeypatch, caplog, capsys):
    monkeypatch.setattr(events.NodeUp, "what", lambda _: "Blue skies")
    event = events.NodeUp(NODE)
    if told == "log":
        with caplog.at_level("DEBUG", "celery_redlock"):
            logging.log_event(event)
        assert caplog.messages == ["Blue skies"]
    elif told == "journal":
        assert "Blue skies" in listing.line(record_of(event))
    elif told == "tail":
        tail.show(record_of(event), as_json=False)
        assert "Blue skies" in capsys.readouterr().out
    else:
        assert "Blue skies" in of_entry(Entry(record_of(event), []))
