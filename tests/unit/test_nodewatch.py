"""The worker's look at the nodes: what it tells, and that it harms nothing."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from functools import partial
from types import SimpleNamespace

import pytest

from celery_redlock.errors import ConfigurationError
from celery_redlock.events import NodeDown, NodeMeasured, NodeUp
from celery_redlock.process.mutex import new_mutex
from celery_redlock.reading.nodes import NodeStatus
from celery_redlock.task.worker import node_watch
from celery_redlock.task.worker.node_watch import NodeWatch, forks_held_off
from support.waiting import eventually

UP = NodeStatus("a", "up", latency=0.002, clock_offset=-0.5)
UNFIT = NodeStatus("b", "unfit", problem="unreachable (OOM)")
DOWN = NodeStatus("b", "down", problem="unreachable (refused)")


@pytest.fixture(autouse=True)
def _nodes_as_the_test_says(monkeypatch):
    monkeypatch.setattr(node_watch, "connect", lambda locks, longest: None)
    monkeypatch.setattr(node_watch, "probe", lambda locks: locks.probe())


class Locks:
    def __init__(self, *answers):
        self.answers = list(answers)
        self.labels = ("a",)
        self.probes = 0

    def probe(self):
        self.probes += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def watch(locks, told=None):
    notify = [].append if told is None else told.append
    has = {"app": object(), "locks": locks, "notify": notify, "servers": object()}
    return NodeWatch(SimpleNamespace(**has, speaks_of_nodes=False), partial(notify, "woken"))


def test_a_look_is_kept_and_told():
    """Operators read the whole of it; observers get what was measured of who answered."""
    told = []
    it = watch(Locks([UP, DOWN]), told)
    it.look()
    assert it.seen == [UP, DOWN]
    measured = [event for event in told if isinstance(event, NodeMeasured)]
    assert [(e.node, e.latency, e.clock_offset) for e in measured] == [("a", 0.002, -0.5)]


@pytest.mark.parametrize("error", [ConfigurationError("no nodes"), OSError("out of descriptors")])
def test_a_look_that_fails_does_not_end_the_watch(error, monkeypatch, caplog):
    caplog.set_level("WARNING", "celery_redlock")
    monkeypatch.setattr("celery_redlock.task.worker.node_watch.LOOK_EVERY", 0.01)
    locks = Locks(error, [UP])
    it = watch(locks)
    it.start()
    eventually(lambda: it.seen == [UP], "a look after the one that failed")
    it.stop()
    assert "Checking the lock nodes failed" in caplog.text


def test_what_fails_again_and_again_is_said_once(monkeypatch, caplog):
    """Settings that make no sense make none ten seconds later."""
    caplog.set_level("WARNING", "celery_redlock")
    monkeypatch.setattr("celery_redlock.task.worker.node_watch.LOOK_EVERY", 0.01)
    wrong = ConfigurationError("redlock_nodes is not set")
    it = watch(Locks(wrong, wrong, wrong, [UP]))
    it.start()
    eventually(lambda: it.seen == [UP], "a look after those that failed")
    it.stop()
    assert caplog.text.count("redlock_nodes is not set") == 1


def test_the_watch_ends_with_its_app(monkeypatch, caplog):
    """A worker within a test suite stops nothing; its app goes, and nobody is left to be told."""
    monkeypatch.setattr("celery_redlock.task.worker.node_watch.LOOK_EVERY", 0.01)
    before = set(threading.enumerate())
    it = watch(Locks([UP]))
    it.start()
    eventually(lambda: it.seen == [UP], "a look")
    it._plugin.app = None
    eventually(lambda: set(threading.enumerate()) <= before, "end of the thread")
    assert caplog.text == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_no_child_is_forked_in_the_middle_of_a_look(monkeypatch):
    """A lock of a metrics library that the thread holds would be held in the child for ever."""
    monkeypatch.setattr(node_watch, "LONGEST_HOLD", 60.0)
    library, in_hand, go_on = threading.Lock(), threading.Event(), threading.Event()

    def look():
        with forks_held_off, library:
            in_hand.set()
            go_on.wait(60)

    thread = threading.Thread(target=look)
    thread.start()
    in_hand.wait(60)
    threading.Timer(0.1, go_on.set).start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        is_free = library.acquire(blocking=False) and forks_held_off.acquire(blocking=False)
        os._exit(0 if is_free else 1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_node_that_answers_and_does_not_vote_is_down_once(monkeypatch):
    """There is no news of its connection; it is told when that begins, and when it is over."""
    told = []
    well = NodeStatus("b", "up", latency=0.1, clock_offset=0.0)
    it = watch(Locks([UNFIT], [UNFIT], [well], [DOWN]), told)
    for _ in range(4):
        it.look()
    down, up = [event for event in told if isinstance(event, (NodeDown, NodeUp))]
    assert (down.node, down.reason) == ("b", "unreachable (OOM)")
    assert isinstance(up, NodeUp)


def test_a_look_holds_forks_off():
    seen = []

    def told(_event):
        other = threading.Thread(target=lambda: seen.append(forks_held_off.acquire(timeout=0.05)))
        other.start()
        other.join()

    plugin = SimpleNamespace(locks=Locks([UP]), notify=told)
    NodeWatch(plugin).look()
    assert seen == [False]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_an_observer_that_hangs_does_not_hang_the_worker(monkeypatch):
    """A fork waits for a look to end, but not for ever; and the child can look by itself."""
    monkeypatch.setattr(node_watch, "LONGEST_HOLD", 0.1)
    in_hand, go_on = threading.Event(), threading.Event()

    def hangs():
        with forks_held_off:
            in_hand.set()
            go_on.wait(60)

    thread = threading.Thread(target=hangs)
    thread.start()
    in_hand.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        os._exit(0 if node_watch.forks_held_off.acquire(blocking=False) else 1)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert forks_held_off.acquire(blocking=False)
    forks_held_off.release()


def test_others_who_hold_forks_off_give_back_what_they_took_in_a_child_too(monkeypatch):
    """As metrics do, around ours: a later fork of that child would wait for good."""
    monkeypatch.setattr(node_watch, "forks_held_off", mutex := new_mutex())
    mutex.acquire()
    node_watch._before_fork()
    node_watch._after_fork_in_child()
    mutex.release()
    found = []
    other = threading.Thread(target=lambda: found.append(mutex.acquire(blocking=False)))
    other.start()
    other.join()
    assert found == [True]


NEW = [
    NodeStatus(label, "quarantined", quarantine=left)
    for label, left in (("a", 3.0), ("b", 61.0), ("c", 60.2))
]
HELP = "If nobody can hold a lock: celery -A shop redlock bootstrap"
NONE = "WARNING No lock can be granted"


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ([[UP] * 3] * 2, ["INFO 3 of 3 lock nodes vote"]),
        ([[UP, UP, DOWN]] * 2, ["WARNING 2 of 3 lock nodes vote; b is down"]),
        (
            [NEW, NEW, [UP] * 3],
            [
                f"{NONE} for 1 min 1 s: all 3 nodes are new or restarted. {HELP}",
                "INFO Locks can be granted again: 3 of 3 lock nodes vote",
            ],
        ),
        (
            [[UP, DOWN, NEW[0]]],
            [f"{NONE} for 3 s: 1 of 3 lock nodes vote; b is down; a is quarantined"],
        ),
        ([[UP, DOWN, DOWN]], [f"{NONE}: 1 of 3 lock nodes vote; b is down; b is down"]),
        ([NEW[:1]], [f"{NONE} for 3 s: the node is new or restarted. {HELP}"]),
        (
            [[DOWN], [UP]],
            [f"{NONE}: lock node b is down", "INFO Locks can be granted again: lock node a votes"],
        ),
        ([[UP]], ["INFO lock node a votes"]),
        ([[UP, UP]], []),
    ],
)
def test_whether_locks_can_be_granted_is_said_once(looks, told, monkeypatch, caplog):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/celery", "-A", "shop", "worker"])
    caplog.set_level("INFO", "celery_redlock")
    locks = Locks(*looks)
    locks.labels = ("a",) if len(looks[0]) == 1 else ("a", "b", "c")
    woken = []
    it = watch(locks, woken)
    for _ in looks:
        it.look()
    assert woken.count("woken") == str(told).count("again")
    assert [f"{record.levelname} {record.message}" for record in caplog.records] == told
    assert it._plugin.speaks_of_nodes


def test_keys_that_never_expire_are_counted_now_and_then(monkeypatch):
    told, asked = [], []

    class Leaks:
        def __init__(self, nodes, rules):
            assert (nodes, rules) == (["a"], "rules")

        def look(self, labels):
            asked.append(labels)
            return {"a": 3}

    monkeypatch.setattr(node_watch, "Leaks", Leaks)
    locks = Locks([UP, DOWN])
    locks.nodes, locks.rules = ["a"], "rules"
    it = watch(locks, told)
    it._plugin.servers = None
    for _ in range(3):
        it.look()
    assert asked == [{"a"}]
    assert [e.leaked for e in told if isinstance(e, NodeMeasured)] == [None, 3, 3]
