"""
What comes after a task of the same lock: its retries, its replacement, the next in a chain.

None of them is refused by the lock of the one before, which may still be on its way out in
another process. The policy is "fail", so that a refusal shows.
"""

from __future__ import annotations

import os
import time

import pytest
from celery import chain, signals

from celery_redlock import LockTaken, RedlockTask
from support.events import body, overlaps, read
from support.stage import LASTING, stage
from support.waiting import eventually

pytestmark = pytest.mark.long

TIMES = 25


def declare(app):
    if os.environ.get("SWITCHED_OFF"):
        release_late_and_know_nobody()
    options = {"base": RedlockTask, "bind": True, "shared": False, "on_conflict": "fail"}
    options |= {"lock_key": "{lock}", "max_retries": None}
    declare_retries(app, options)
    declare_successors(app, options)

    @signals.task_success.connect(weak=False)
    def after_the_result(sender, **_):
        if sender.request.kwargs.get("lock", sender.request.args[-1]).startswith("seen"):
            time.sleep(0.05)  # what a receiver may take, while the lock of a late release stands


def declare_retries(app, options):
    def again(self, lock):
        with body(os.environ["EVENTS"], lock):
            if self.request.retries < TIMES:
                raise self.retry(countdown=0)
        return self.request.retries

    app.task(name="retry", **options)(again)
    app.task(name="retry_late", acks_late=True, **options)(again)

    def stumble(self, lock):
        with body(os.environ["EVENTS"], lock):
            if self.request.retries < TIMES:
                raise ConnectionError(lock)
        return self.request.retries

    auto = {"autoretry_for": (ConnectionError,), "default_retry_delay": 0}
    app.task(name="autoretry", **auto, **options)(stumble)
    app.task(name="autoretry_late", acks_late=True, **auto, **options)(stumble)


def declare_successors(app, options):
    @app.task(name="link", **options)
    def link(self, count, lock):
        with body(os.environ["EVENTS"], lock):
            return count + 1

    @app.task(name="replace", **options)
    def replace(self, lock, times):
        with body(os.environ["EVENTS"], lock):
            if times:
                raise self.replace(self.si(lock, times - 1).set(queue="whole"))
        return "the last"

    @app.task(name="relay", **options)
    def relay(self, lock, times):
        with body(os.environ["EVENTS"], lock):
            if not times:
                return None
            return self.apply_async((lock, times - 1), queue="whole").id


def release_late_and_know_nobody():
    from celery_redlock.task.execution.execution import Execution
    from celery_redlock.task.messages.delivery import Delivery

    end, completed = Execution.end, Execution.completed

    def note(self, *how):
        self.how = how

    def end_then(self, **how):
        time.sleep(0.5)  # on a busy machine another process needs that to take the retry
        end(self, *self.how)
        completed(self, **how)

    Execution.end = note
    Execution.completed = end_then
    Delivery.is_previous_execution = Delivery.is_same_execution = lambda self, holder: False


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    with stage(__file__, tmp_path_factory.mktemp("kin"), **LASTING) as it:
        it.start_workers(
            {"name": name, "concurrency": 4, "args": ["-Q", name], "env": env}
            for name, env in (("whole", {}), ("broken", {"SWITCHED_OFF": "1"}))
        )
        yield it


@pytest.mark.parametrize("task", ["retry", "retry_late", "autoretry", "autoretry_late"])
def test_a_retry_is_not_refused(it, task):
    assert it.task(task).apply_async((task,), queue="whole").get(timeout=100) == TIMES
    assert len(it.bodies(task)) == TIMES + 1
    assert overlaps(e for e in read(it.events) if e.get("name") == task) == []


def test_a_chain_of_one_lock_is_not_refused(it):
    link = it.task("link")
    links = chain(*(link.s(*first, "chain").set(queue="whole") for first in [(0,)] + 24 * [()]))
    assert links.apply_async().get(timeout=100) == 25
    link.apply_async((0, "by link"), link=link.s("by link").set(queue="whole"), queue="whole")
    eventually(lambda: sum(b.finished for b in it.bodies("by link")) == 2, "the link", timeout=100)
    names = ("chain", "by link")
    assert overlaps(e for e in read(it.events) if e.get("name") in names) == []


def test_a_replacement_is_not_refused(it):
    result = it.task("replace").apply_async(("replace", 10), queue="whole")
    assert result.get(timeout=100) == "the last"
    assert len(it.bodies("replace")) == 11
    assert overlaps(e for e in read(it.events) if e.get("name") == "replace") == []


def test_a_task_that_publishes_itself_is_not_refused(it):
    """The child finds the parent still in its body, or on its way out."""
    result = it.task("relay").apply_async(("relay", 10), queue="whole")
    while (child := result.get(timeout=100)) is not None:
        result = it.app.AsyncResult(child)
    assert len(it.bodies("relay")) == 11


def calls_one_after_the_other(it, queue):
    """Call again whoever has the result, on a worker whose receivers take their time after it."""
    link, lock = it.task("link"), f"seen by {queue}"
    return [link.apply_async((n, lock), queue=queue).get(timeout=100) for n in range(20)]


def test_a_caller_who_has_the_result_finds_the_lock_free(it):
    assert calls_one_after_the_other(it, "whole") == list(range(1, 21))


def test_twin_a_lock_released_after_the_result_refuses_that_caller(it):
    with pytest.raises(LockTaken):
        calls_one_after_the_other(it, "broken")


def test_without_it_some_are_refused_by_their_own_predecessors(it):
    """Twin: released late, and not knowing its kin, a task fails on its own lock."""
    # Fewer than the worker has children: an idle one takes the retry while the lock still stands.
    for n in range(2):
        it.task("retry").apply_async((f"broken {n}",), queue="broken", retries=n)
    # In the log: the RETRY of the one before may be stored over this FAILURE.
    it.wait_for_log(r"Task retry\[.*LockTaken", timeout=100)
