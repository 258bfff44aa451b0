"""What the plug-in does in a worker's parent, and after a fork."""

from __future__ import annotations

import os
import threading
import warnings
from types import SimpleNamespace

import pytest
from celery import Celery

from celery_redlock import plugin
from celery_redlock.plugin import plugin_for
from celery_redlock.task.worker.start_steps import LOOK_FOR_DEATHS, NoteDeaths


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
