"""Real workers start, run tasks, and never outlive the test that started them."""

from __future__ import annotations

import os
import textwrap

import pytest

from support import events as recording
from support.clients import let_go
from support.process import is_gone
from support.waiting import eventually

pytestmark = pytest.mark.long

APP = """
    import os, time
    from celery import Celery
    from support.events import body, record

    app = Celery(broker=os.environ["BROKER"], backend=os.environ["BROKER"], set_as_current=False)

    @app.task(shared=False)
    def nap(seconds):
        with body(os.environ["EVENTS"], "nap"):
            time.sleep(seconds)
        return os.getpid()
"""


@pytest.fixture
def shop(tmp_path, broker, monkeypatch):
    (tmp_path / "harness_shop.py").write_text(textwrap.dedent(APP))
    monkeypatch.setenv("BROKER", broker.url)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "harness_shop", raising=False)
    import harness_shop

    yield harness_shop
    let_go(harness_shop.app)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent", "eventlet"])
def test_a_worker_of_every_pool_runs_tasks(shop, start_worker, events, pool):
    worker = start_worker("harness_shop", pool=pool, concurrency=1)
    ran_in = shop.nap.delay(0.01).get(timeout=100)
    assert (ran_in == worker.pid) == (pool != "prefork")
    (body,) = recording.bodies(recording.read(events))
    assert (body.name, body.pid, body.finished) == ("nap", ran_in, True)
    worker.terminate()
    assert not worker.alive


def test_a_killed_worker_takes_its_children_along(shop, start_worker, events):
    worker = start_worker("harness_shop")
    shop.nap.delay(30)
    (start,) = eventually(lambda: recording.read(events, "start"), "start of a body")
    assert start["pid"] != worker.pid
    worker.kill()
    assert not worker.alive
    eventually(lambda: is_gone(start["pid"]), "end of the child")


def test_a_worker_whose_app_is_broken_shows_its_log(start_worker):
    with pytest.raises(AssertionError, match=r"(?s)has ended.*no_such_module"):
        start_worker("no_such_module")


def test_the_environment_of_the_developer_stays_outside():
    """What was exported for another project reaches no test."""
    assert not [name for name in os.environ if name.startswith(("REDLOCK_", "CELERY_"))]
