"""What the default observer writes: prose for people, fields for machines, one line per refusal."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from celery_redlock import events
from celery_redlock.observers import logging as observer
from celery_redlock.observers import records as written
from celery_redlock.observers.logging import Log

TOKEN, SINCE = "0123abcd", 1.7e9
HOLDER = {"task": "shop.bill", "task_id": "other", "host": "mars", "pid": 7, "token": TOKEN}
HOLDER["since"] = SINCE
WHO = {"name": "key", "task": "shop.bill", "task_id": "me"}
TAKEN = {**WHO, "cause": "conflict"}
NO_QUORUM = {**WHO, "cause": "unavailable"}


@pytest.fixture
def records(caplog, monkeypatch):
    """Write an event a minute after its holder was granted the lock, and return its records."""
    monkeypatch.setattr(written, "time", SimpleNamespace(time=lambda: SINCE + 60.0))
    log_event = Log()

    def write(event, level=logging.DEBUG):
        caplog.clear()
        with caplog.at_level(level, "celery_redlock"):
            log_event(event)
        return caplog.records

    return write


REFUSALS = {
    events.TaskSkipped: ({}, "Skipped task shop.bill[me]: "),
    events.TaskRefused: ({}, "Failed task shop.bill[me]: "),
    events.TaskRetried: ({"countdown": 3.0}, "Retry of task shop.bill[me] in 3 s: "),
    events.TaskRescheduled: (
        {"countdown": 3.0, "times": 2},
        "Rescheduled task shop.bill[me] in 3 s (attempt 2): ",
    ),
    events.TaskQueued: (
        {"countdown": 60.0, "times": 1, "since": 1.0},
        "Queued task shop.bill[me] (attempt 1): ",
    ),
}


@pytest.mark.parametrize("kind", REFUSALS, ids=lambda kind: kind.__name__)
def test_a_refusal_is_one_line_that_says_who_holds_the_lock(records, kind):
    more, words = REFUSALS[kind]
    (record,) = records(kind(**TAKEN, **more, holder=HOLDER), logging.INFO)
    is_usual = kind in (events.TaskSkipped, events.TaskQueued)
    assert record.levelno == (logging.INFO if is_usual else logging.WARNING)
    line = record.getMessage()
    assert line == (
        f"{words}lock 'key' is held by task shop.bill[other], process 7 on mars, for 1 min 0 s"
    )
    assert TOKEN not in line
    assert record.redlock == kind.__name__
    assert record.redlock_event == {
        "lock": "key",
        "task": "shop.bill",
        "task_id": "me",
        "cause": "conflict",
        "holder_task": "shop.bill",
        "holder_task_id": "other",
        "holder_host": "mars",
        "holder_pid": 7,
        "holder_since": SINCE,
        **more,
    }


@pytest.mark.parametrize("kind", REFUSALS, ids=lambda kind: kind.__name__)
def test_without_a_quorum_nobody_is_named(records, kind):
    more, words = REFUSALS[kind]
    (record,) = records(kind(**NO_QUORUM, **more))
    assert record.getMessage() == f"{words}no quorum of lock nodes for lock 'key'"
    assert not [field for field in record.redlock_event if field.startswith("holder_")]


@pytest.mark.parametrize("kind", REFUSALS, ids=lambda kind: kind.__name__)
def test_what_is_only_reported_is_no_warning(records, kind):
    """It says that the task runs; what led to it is at DEBUG."""
    more, _ = REFUSALS[kind]
    (record,) = records(kind(**TAKEN, **more, report=True), logging.INFO)
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("Running task shop.bill[")
    assert record.redlock_event["report"] is True
    (record,) = records(events.LockUnavailable("key", {}, 0.1, report=True))
    assert record.levelno == logging.DEBUG


def test_an_unknown_holder_is_said_to_be_one(records):
    """A lock may be gone when its holder is asked for."""
    (record,) = records(events.TaskSkipped(**TAKEN))
    assert record.getMessage().endswith("held by an unknown holder")


def test_no_quorum_for_a_task_is_told_by_what_becomes_of_the_task(records):
    """The votes are at INFO, so that one refusal is one warning; elsewhere they are the warning."""
    votes = {"node-1": "no answer in time"}
    assert not records(events.LockUnavailable("key", votes, 0.1, task="t", task_id="me"), 30)
    (record,) = records(events.LockUnavailable("other", votes, 0.1, task="t", task_id="me"))
    assert record.levelno == logging.INFO
    assert record.redlock_event["votes"] == votes
    left = {"retry_after": 60.1}  # of a quarantine, which the worker's main process speaks of
    (record,) = records(events.LockUnavailable("new", votes, 0.1, **left, task="t", task_id="me"))
    assert record.levelno == logging.DEBUG
    (record,) = records(events.LockUnavailable("key", votes, 0.1, **left))
    assert record.levelno == logging.WARNING
    assert "node-1: no answer in time" in record.getMessage()


@pytest.mark.parametrize("kind", [events.TaskRescheduled, events.TaskQueued])
def test_of_many_attempts_ever_fewer_are_told(records, kind):
    """A task that waits for an hour writes a dozen lines, and no thousand."""
    more = REFUSALS[kind][0]
    told = [
        times
        for times in range(1, 100)
        if records(kind(**TAKEN, **{**more, "times": times}, holder=HOLDER), logging.INFO)
    ]
    assert told == [1, 2, 4, 8, 16, 32, 64]


def test_that_there_is_no_quorum_is_said_once_a_minute_for_each_lock(caplog, monkeypatch):
    """Each of the attempts would find the same."""
    at, write = [1000.0], Log()
    monkeypatch.setattr(observer, "time", SimpleNamespace(monotonic=lambda: at[0]))

    def told(name):
        caplog.clear()
        with caplog.at_level(logging.INFO, "celery_redlock"):
            write(events.LockUnavailable(name, {"n1": "refused"}, 0.1, task="shop.bill"))
        return len(caplog.records)

    assert [told("a"), told("a"), told("b")] == [1, 0, 1]
    at[0] += 59.0
    assert told("a") == 0
    at[0] += 1.0
    assert [told("a"), told("a")] == [1, 0]
    assert [told(f"{number}") for number in range(2000)] == [1] * 2000
    assert len(write._logged) <= observer.MOST_NAMES


def test_a_conflict_is_told_by_what_becomes_of_the_task(records):
    assert not records(events.LockConflict("key", HOLDER, 0.1, task="t", task_id="me"), 30)


def test_fields_never_clash_with_those_of_a_record(records):
    """Logging raises KeyError where they do: names, messages and processes are common words."""
    for event in (events.NodeDown("n", "why"), events.LeaderElected("beat", 3)):
        (record,) = records(event)
        assert record.name == "celery_redlock"
        assert set(record.redlock_event) in (
            {"node", "reason"},
            {"lock", "task", "task_id", "fence"},
        )


def test_no_field_tells_a_token(records):
    """Not even its public part: a log goes to places that no operator has seen."""
    for kind, (more, _) in REFUSALS.items():
        (record,) = records(kind(**TAKEN, **more, holder=HOLDER))
        assert TOKEN not in repr(vars(record))


def test_what_is_not_logged_costs_nothing(records, monkeypatch):
    from celery_redlock.observers import logging as module

    monkeypatch.setattr(module, "fields_of", None)
    assert not records(events.LockAcquired("key", 1, 0.1), logging.INFO)


def test_the_level_of_a_skip_is_a_setting(caplog):
    caplog.set_level(logging.DEBUG, "celery_redlock")
    for level in ("DEBUG", "INFO", "WARNING", "ERROR"):
        caplog.clear()
        Log(level)(events.TaskSkipped(**TAKEN))
        assert [record.levelname for record in caplog.records] == [level]


def test_a_node_is_told_of_when_it_goes_and_when_it_comes_back(caplog):
    caplog.set_level(logging.INFO, "celery_redlock")
    log, up, down = Log(), events.NodeUp("a"), events.NodeDown("a", "refused")
    for event in (up, up, down, down, up, up):
        log(event)
    assert caplog.messages == ["Lock node a is down: refused", "Lock node a is up"]


def test_who_does_not_speak_of_nodes_says_it_at_debug(caplog):
    """A worker's children, for which the main process speaks."""
    caplog.set_level(logging.DEBUG, "celery_redlock")
    log = Log(speaks_of_nodes=lambda: False)
    for event in (events.NodeDown("a", "refused"), events.NodeQuarantined("a", 3.0)):
        log(event)
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG"]
    log(events.LeaseLost("key", "deadline"))
    assert caplog.records[-1].levelname == "ERROR"
