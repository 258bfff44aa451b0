"""
Tasks in line under settings of Celery's that change how a worker takes messages.

No prefetch beyond the tasks that run (``worker_disable_prefetch``), few tasks that are to come
later (``worker_eta_task_limit``), and a copy of what has succeeded is dropped unseen
(``worker_deduplicate_successful_tasks``). The broker delivers what is not acknowledged again soon.
"""

from __future__ import annotations

import os
import time

import pytest

from celery_redlock import RedlockTask
from support.events import body, overlaps, read
from support.redelivery import redelivered_after
from support.stage import LASTING, stage

pytestmark = pytest.mark.in_order  # the last scene replaces the worker

#: How many tasks may wait in a worker's timer.
LATER = 10
MANY = 3 * LATER
VISIBILITY = 4.0


def declare(app):
    def nap(lock, number, seconds=0.0):
        with body(os.environ["EVENTS"], lock, number=number):
            time.sleep(seconds)
        return number

    ours = {"base": RedlockTask, "shared": False, "lock_key": "{lock}", "on_conflict": "queue"}
    app.task(name="nap", acks_late=True, **ours)(nap)
    app.task(name="plain", acks_late=True, shared=False)(nap)


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    """A worker that takes as little as it can."""
    conf = {
        "worker_eta_task_limit": LATER,
        "worker_disable_prefetch": True,
        "worker_deduplicate_successful_tasks": True,
        **redelivered_after(VISIBILITY),
        **LASTING,
    }
    with stage(__file__, tmp_path_factory.mktemp("settings"), **conf) as it:
        it.options = {"concurrency": 2}
        it.worker(**it.options)
        yield it


def publish(it, lock, count=MANY):
    return [it.task("nap").delay(lock, number) for number in range(count)]


def check(it, lock, results):
    assert [result.get(timeout=100) for result in results] == list(range(len(results)))
    events = [event for event in read(it.events) if event["name"] == lock]
    assert sorted(e["number"] for e in events if e["kind"] == "start") == list(range(len(results)))
    assert overlaps(events) == []


def test_all_in_line_end_and_plain_tasks_are_not_held_up(it):
    with it.held("line"):
        waiting = publish(it, "line")
        plain = [it.task("plain").delay("plain", number) for number in range(40)]
        assert [result.get(timeout=100) for result in plain] == list(range(40))
        assert it.bodies("line") == []
    check(it, "line", waiting)


def test_what_is_delivered_again_while_it_waits_runs_once(it):
    """They wait for longer than the broker waits for an acknowledgement."""
    with it.held("long line"):
        waiting = publish(it, "long line", LATER)
        time.sleep(VISIBILITY + 2.0)  # none of them is to run by then, or more than once later
    check(it, "long line", waiting)


def test_a_deploy_in_the_middle(it):
    (old,) = it.workers
    # Under a lock: a machine that stalls has even this delivered again.
    running = it.task("nap").delay("running, deploy", 7, 2.0)
    it.started("running, deploy")
    with it.held("deploy"):
        waiting = publish(it, "deploy", LATER)
        it.wait_for_log(r"Queued task nap\[.*'deploy'")
        old.terminate()
        it.worker(**it.options)
    check(it, "deploy", waiting)
    assert running.get(timeout=100) == 7
    assert len(it.bodies("running, deploy")) == 1
