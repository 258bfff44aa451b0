"""Unique at publish, against a real worker: who is a duplicate when, and what ends a marker."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import redis
from celery import Task, chain, chord, group
from celery.exceptions import TaskRevokedError

from celery_redlock import DuplicateTask, RedlockTask, UniqueResult
from support.events import body
from support.stage import stage
from support.waiting import eventually

UNTIL = ("started", "finished", "success", "expired")
WINDOW = 30.0
TTL = 3.0
#: How soon a marker is gone whose owner is: the worker looks for revoked tasks twice a second.
SOON = 5.0


def declare(app):
    """Declare the same task with every value of ``unique_until``, and some of its own kind."""
    folder = Path(os.environ["EVENTS"]).parent if "EVENTS" in os.environ else None

    def job(self, name, way=""):
        with body(os.environ["EVENTS"], name, retries=self.request.retries):
            while "gate" in way and not (folder / f"{name}.open").exists():
                time.sleep(0.01)
            if "retry" in way and self.request.retries < 2:
                raise self.retry(countdown=1 if "now" in way else 3)
            if "fail" in way:
                raise ValueError(name)
        return self.request.retries

    ours = {"base": RedlockTask, "bind": True, "shared": False, "unique_on": ("name",)}
    for until in UNTIL:
        app.task(name=until, unique_until=until, unique_for=WINDOW, **ours)(job)
        app.task(name=f"{until} late", unique_until=until, acks_late=True, unique_for=WINDOW, **ours)(job)
    app.task(name="refused", unique_until="finished", on_duplicate="fail", **ours)(job)
    app.task(name="brief", unique_until="finished", unique_for=1.5, **ours)(job)
    app.task(
        name="auto",
        unique_until="finished",
        autoretry_for=(ValueError,),
        retry_backoff=False,
        default_retry_delay=0,
        max_retries=2,
        **ours,
    )(job)

    @app.task(name="swap", unique_until="finished", **ours)
    def swap(self, name, into):
        with body(os.environ["EVENTS"], name):
            task = self.app.tasks[into]
            raise self.replace(task.si(f"{name} replaced", "gate"))

    @app.task(name="plain", bind=True, base=Task, shared=False)
    def plain(self, name, way=""):
        return name

    @app.task(name="gather", shared=False)
    def gather(values):
        return values


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    """A stage with one worker."""
    folder = tmp_path_factory.mktemp("unique")
    with stage(__file__, folder, redlock_ttl=TTL, redlock_max_ttl=TTL) as it:
        it.folder = folder
        it.worker(concurrency=6)
        yield it
        no_key_is_for_ever(it)


def no_key_is_for_ever(it):
    """Every key of ours on every node has an expiry."""
    for node in it.nodes:
        with redis.Redis.from_url(node.url) as client:
            keys = client.keys("redlock:*")
            assert all(client.pttl(key) != -1 for key in keys), keys


def is_duplicate(it, task, name, way=""):
    """Publish once more; into a queue that nobody reads, so that it changes nothing."""
    result = it.task(task).apply_async((name, way), queue="nobody")
    assert isinstance(result, UniqueResult)
    assert result.lock_name == it.task(task).lock_name((name,))
    return result.duplicate


# Was there a duplicate? The row is unique_until; the columns are when the second one came.
TABLE = {
    "started": {"waiting": 1, "running": 0, "retry": 0, "success": 0, "failure": 0, "revoked": 0},
    "finished": {"waiting": 1, "running": 1, "retry": 1, "success": 0, "failure": 0, "revoked": 0},
    "success": {"waiting": 1, "running": 1, "retry": 1, "success": 0, "failure": 1, "revoked": 0},
    "expired": {"waiting": 1, "running": 1, "retry": 1, "success": 1, "failure": 1, "revoked": 1},
}


def bring_about(it, task, name, when):
    """Publish *task*, and return its result when it is waiting, running, and so on."""
    publish = it.task(task).apply_async
    if when == "waiting":
        return publish((name,), queue="nobody")
    if when == "running":
        first = publish((name, "gate"))
        it.started(name)
        return first
    if when == "retry":
        first = publish((name, "retry"))
        eventually(lambda: first.state == "RETRY", "a retry")
        return first
    if when == "revoked":
        first = publish((name,), countdown=60)
        eventually(lambda: it.app.control.inspect().scheduled(), "an ETA", timeout=20)
        first.revoke()
        return first
    first = publish((name, "fail" if when == "failure" else ""))
    first.get(timeout=20, propagate=False)
    return first


@pytest.mark.parametrize("late", ["", " late"])
@pytest.mark.parametrize("when", list(TABLE["started"]))
@pytest.mark.parametrize("until", UNTIL)
def test_a_second_publish_is_answered_as_the_table_says(it, until, when, late):
    """Waiting, running, in a retry's countdown, after success, failure and revoke."""
    name, task = f"{until} {when}{late}", f"{until}{late}"
    first = bring_about(it, task, name, when)
    assert (first.duplicate, first.holder_id) == (False, first.id)
    if when == "revoked" and not TABLE[until][when]:
        eventually(lambda: not is_duplicate(it, task, name), "its end", timeout=SOON)
    else:
        second = it.task(task).apply_async((name,), queue="nobody")
        assert second.duplicate == TABLE[until][when]
        if second.duplicate:
            assert (second.id, second.holder_id) == (first.id, first.id)
    (it.folder / f"{name}.open").touch()
