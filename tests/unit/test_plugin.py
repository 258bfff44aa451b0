"""What the plug-in does in a worker's parent, and after a fork."""

from __future__ import annotations

import os
import threading
import warnings
from types import SimpleNamespace

import pytest
from celery import Celery

from celery_redlock import RedlockTask, plugin
from celery_redlock.lock.nodes.address import shown
from celery_redlock.plugin import plugin_for
from celery_redlock.task.base import check_tasks
from celery_redlock.task.worker.start_steps import LOOK_FOR_DEATHS, NoteDeaths, start_line


@pytest.mark.parametrize("has_children", [True, False])
def test_a_parent_looks_for_dead_children_often(has_children):
    """By Celery's own function and in its own loop; in other pools there are none."""
    app = Celery("shop", set_as_current=False)
    plugin_for(app).has_children = has_children
    timers = []
    hub = SimpleNamespace(call_repeatedly=lambda *timer: timers.append(timer))
    pool = SimpleNamespace(maintain_pool=lambda: None)
    worker = SimpleNamespace(app=app, pool=pool)
    NoteDeaths.register_with_event_loop(SimpleNamespace(), worker, hub)
    assert timers == ([(LOOK_FOR_DEATHS, pool.maintain_pool)] if has_children else [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_while_another_thread_builds_does_not_jam_the_child():
    """The thread is not in the child, and would never let go of the lock there."""
    held, done = threading.Event(), threading.Event()

    def build():
        with plugin._building:
            held.set()
            done.wait(60)

    builder = threading.Thread(target=build)
    builder.start()
    held.wait(60)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fork with threads about is what is tried
            child = os.fork()
        if child == 0:
            os._exit(0 if plugin._building.acquire(blocking=False) else 1)
        _, status = os.waitpid(child, 0)
    finally:
        done.set()
        builder.join()
    assert os.waitstatus_to_exitcode(status) == 0


ONE, AWAY = "redis://broker/0", "one node: no lock while it is away"


@pytest.mark.parametrize(
    ("tasks", "nodes", "line"),
    [
        ([], [ONE], "no task takes a lock"),
        (["a"], [ONE], f"1 task takes a lock, on {ONE} ({AWAY}): a"),
        (
            ["b", "a"],
            ["redis://1", "redis://2", "redis://3"],
            "2 tasks take a lock, on redis://1, redis://2, redis://3 (2 of 3 nodes suffice): a, b",
        ),
        (
            [f"t{number:02}" for number in range(12)],
            ["unix:///s"],
            f"12 tasks take a lock, on unix:///s ({AWAY}): t00, t01, t02, t03, t04 and 7 more",
        ),
    ],
)
def test_a_worker_says_what_it_does_in_one_line(tasks, nodes, line):
    assert start_line(tasks, nodes) == f"redlock: {line}"


def test_only_tasks_that_are_kept_from_running_take_a_lock():
    """A task in report mode runs whatever the nodes say."""
    app = Celery("shop", broker="redis://none", set_as_current=False)

    @app.task(name="plain")
    def plain():
        """Take none."""

    @app.task(name="locked", base=RedlockTask)
    def locked():
        """Take one."""

    @app.task(name="reported", base=RedlockTask, lock_mode="report")
    def reported():
        """Report what a lock would do."""

    assert check_tasks(app) == ["locked"]


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("redis://me:secret@broker:6379/0?socket_timeout=3", "redis://broker:6379/0"),
        ("rediss://:se@cret@broker/2", "rediss://broker/2"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        (
            {"sentinels": ["redis://:secret@one:26379"], "service": "lock", "password": "secret"},
            "lock@sentinel/0",
        ),
    ],
    ids=str,
)
def test_a_node_is_shown_without_its_password(node, expected):
    assert shown(node) == expected
