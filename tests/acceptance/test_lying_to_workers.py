"""One node of three lies to workers and to the web page: tasks run, and the page is served."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import pytest

from celery_redlock import RedlockTask
from celery_redlock.ops.web.app import make_app
from celery_redlock.ops.web.guard import Door
from celery_redlock.ops.web.reader import Reader
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import bootstrap
from support.liar import LIES, in_time, lying
from support.stage import LASTING, stage
from support.waiting import eventually

pytestmark = pytest.mark.long

#: How much a worker's processes may take, each at its peak [KiB].
MEMORY = 400 * 1024


def declare(app):
    def job(number):
        time.sleep(0.1)  # so that others meet its lock
        return number

    ours = {"base": RedlockTask, "shared": False}
    app.task(name="queues", unique_on=(), on_conflict="queue", **ours)(job)
    app.task(name="unique", unique_until="finished", unique_for=60, **ours)(job)


@pytest.fixture(params=LIES)
def it(request, tmp_path):
    with stage(__file__, tmp_path, nodes=3, **LASTING) as it, contextlib.ExitStack() as stack:
        liar = stack.enter_context(lying(it.nodes[0].port, LIES[request.param]))
        others = [node.url for node in it.nodes[1:]]
        it.nodes_with_liar = [f"{liar.url}?socket_timeout=1", *others]
        rules = plugin_for(it.app).settings.rules
        # For this list. Both honest ones, which may not have answered in time at first.
        eventually(
            lambda: [*bootstrap(it.nodes_with_liar, rules).values()][1:] == ["enrolled"] * 2,
            "enrolment of those that do not lie",
            every=0.1,
        )
        it.app.conf.redlock_nodes = it.nodes_with_liar
        plugin_for(it.app).refresh()
        it.worker({"redlock_nodes": it.nodes_with_liar})
        yield it


def peak(pid):
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def test_tasks_run_and_the_page_is_served(it):
    results = [it.task("queues").delay(number) for number in range(4)]
    results += [it.task("unique").delay(number) for number in range(4)]
    settings = plugin_for(it.app).settings
    reader = Reader(settings.nodes, settings.rules, it.app)
    try:
        client = make_app("shop", settings, reader, Door("127.0.0.1", (), None)).test_client()
        for path in ("/", "/lock?name=queues", "/report", "/task?name=queues"):
            assert in_time(lambda path=path: client.get(path)).status_code == 200
        assert sorted(result.get(timeout=100) for result in results) == sorted([*range(4)] * 2)
        eventually(lambda: b"Quorum: yes" in client.get("/").data, "the page's verdict", every=0.5)
    finally:
        in_time(lambda: reader.close() is None)
    pid = it.workers[0].pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert max(map(peak, (pid, *children))) < MEMORY
