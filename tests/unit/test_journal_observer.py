"""What is written to the journal, and what is not."""

from __future__ import annotations

import json
import os

import pytest

from celery_redlock import events
from celery_redlock.observers import journal as observer_module
from celery_redlock.observers.journal import NODE_PAUSE, JournalObserver
from celery_redlock.observers.records import record_of
from celery_redlock.observers.tally import Tally

HOLDER = {"task_id": "other", "host": "w1", "pid": 7, "since": 5.0, "token": "01234567", "x": 1}


class Memory:
    def __init__(self):
        self.written = []
        self.tallies = []

    def counted(self, *tally):
        self.tallies.append(tally)

    def put(self, record):
        self.written.append(json.loads(json.dumps(record)))

    @property
    def names(self):
        return [record["event"] for record in self.written]


@pytest.fixture
def clock(monkeypatch):
    """Time that goes on when it is told to: ``clock[0] += seconds``."""
    now = [1000.0]
    monkeypatch.setattr(observer_module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def observe(memory):
    return JournalObserver(memory.put, Tally(memory.counted))


def released(held, task="shop.bill", ttl=30.0):
    return events.LockReleased("name", held, ttl=ttl, task=task, task_id="id")


def test_a_refusal_is_written_at_once_with_its_holder(observe, memory):
    """Who asks why has the task, the cause and the holder, but not even a part of a token."""
    observe(events.TaskSkipped("bill:1", "shop.bill", "me", "conflict", HOLDER))
    (record,) = memory.written
    assert record["holder"] == {"task_id": "other", "host": "w1", "pid": 7, "since": 5.0}
    said = {key: record[key] for key in ("event", "name", "task", "task_id", "cause")}
    assert said == {
        "event": "TaskSkipped",
        "name": "bill:1",
        "task": "shop.bill",
        "task_id": "me",
        "cause": "conflict",
    }
    assert record["pid"] == os.getpid()


def test_a_task_that_gets_its_lock_writes_nothing(observe, memory):
    observe(events.LockAcquired("name", 7, 0.001, task="shop.bill", task_id="id"))
    observe(events.LockRenewed("name", 9.0, ttl=30.0, task="shop.bill", task_id="id"))
    observe(events.LockConflict("name", HOLDER, 0.001, task="shop.bill", task_id="id"))
    observe(released(0.5))
    assert memory.written == []


def test_a_grant_to_a_task_that_had_queued_is_written(observe, memory):
    """With how long, and whether it was woken; the twin got its lock at once."""
    queued = {"queued_for": 4.0, "was_woken": True}
    observe(events.LockAcquired("name", 7, 0.1, task="shop.bill", task_id="id", **queued))
    observe(events.LockAcquired("name", 8, 0.1, task="shop.bill", task_id="id"))
    (record,) = memory.written
    assert (record["event"], record["queued_for"], record["was_woken"]) == (
        "LockAcquired",
        4.0,
        True,
    )


def test_that_a_node_is_up_is_news_only_after_it_was_down(observe, memory, clock):
    """Every process connects to every node when it starts, and nobody wants to read that."""
    observe(events.NodeUp("a"))
    observe(events.NodeDown("a", "refused"))
    observe(events.NodeUp("a"))
    assert memory.names == ["NodeDown", "NodeUp"]


def test_a_quarantine_is_news_once(observe, memory, clock):
    """A process meets it with each connection that it makes; another quarantine is another one."""
    observe(events.NodeQuarantined("a", 64.0))
    clock[0] += 1.0
    observe(events.NodeQuarantined("a", 62.6))
    observe(events.NodeQuarantined("b", 62.6))
    clock[0] += 20.0
    observe(events.NodeQuarantined("a", 64.0))
    assert [(it["node"], it["left"]) for it in memory.written] == [
        ("a", 64.0),
        ("b", 62.6),
        ("a", 64.0),
    ]


def test_a_node_that_comes_and_goes_does_not_crowd_out_the_rest(observe, memory, clock):
    """Each process tells a few times in half a minute of one node, whatever happens to it."""
    for _ in range(50):
        observe(events.NodeDown("a", "refused"))
        observe(events.NodeUp("a"))
    observe(events.NodeDown("b", "refused"))
    assert memory.names == ["NodeDown", "NodeUp", "NodeDown", "NodeDown"]


@pytest.mark.parametrize("last", [events.NodeUp("a"), events.NodeDown("a", "for good")])
def test_the_last_that_is_told_of_a_node_is_so(observe, memory, clock, last):
    """What was too much at its time is made up for, by how the node is then."""
    for _ in range(3):
        observe(events.NodeDown("a", "refused"))
        observe(events.NodeUp("a"))
    observe(last)
    observe(released(1.0))
    assert "for good" not in str(memory.written)
    clock[0] += NODE_PAUSE + 1
    observe(events.LockAcquired("name", 7, 0.1))
    record = memory.written[-1]
    assert (record["event"], record["node"]) == (type(last).__name__, "a")
    before = len(memory.written)
    observe(events.LockAcquired("name", 7, 0.1))
    assert len(memory.written) == before


def test_what_is_counted_is_sent_at_the_end(observe, memory, clock):
    """The child of a worker may end after few tasks."""
    observe(released(0.5))
    observe(released(0.5))
    assert len(memory.tallies) == 1
    observe.flush()
    assert len(memory.tallies) == 2
    assert memory.written == []


def test_a_duplicate_is_written(observe, memory):
    """Why nothing was published is asked later, perhaps by somebody else."""
    observe(events.DuplicatePublished("name", "shop.bill", "first", "join"))
    assert memory.names == ["DuplicatePublished"]


def test_a_record_names_its_event_and_where_it_happened():
    """So that records of many processes can be told apart."""
    record = record_of(events.LeaseLost("name", "deadline", task="shop.bill", task_id="id"))
    assert {key: record[key] for key in ("event", "name", "reason", "task", "task_id")} == {
        "event": "LeaseLost",
        "name": "name",
        "reason": "deadline",
        "task": "shop.bill",
        "task_id": "id",
    }
    assert record["host"]
    assert record["at"] > 1e9
