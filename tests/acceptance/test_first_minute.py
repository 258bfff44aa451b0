"""The first minute on the one Redis that one has: a server that has just started, and is empty."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from celery_redlock.lock.rules import Rules
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import bootstrap, node_statuses
from support.clients import let_go
from support.waiting import eventually

ROOT = Path(__file__).parents[2]
EXAMPLE = """
    import os
    from celery import Celery
    from celery_redlock import RedlockTask
    from celery_redlock.lock.nodes import connections

    if "EVENTS" in os.environ:  # in a worker: a server that is slow to answer is not down
        connections.FIRST_CONNECT = 20.0
    app = Celery("first", broker={server!r}, backend={server!r})
    app.conf.update({conf!r}, redlock_node_timeout=4.0)

    @app.task(base=RedlockTask)
    def bill(invoice_id):
        return f"invoice {{invoice_id}} billed"
"""
#: Lines that Celery writes of every task.
OF_CELERY = re.compile(r"Task \S+ (received|ignored|succeeded)")


@pytest.fixture
def first(redis_nodes, tmp_path, monkeypatch):
    """Return what makes the example a module, on one server that has just been started."""
    (server,) = redis_nodes(1)
    made = []

    def first(**conf):
        text = EXAMPLE.format(server=server.url, conf=conf)
        (tmp_path / "first.py").write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "first", raising=False)
        import first

        made.append(first.app)
        return first

    yield first
    for app in made:
        let_go(app)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_quarantine_is_five_lines_for_two_tasks(first, start_worker, pool):
    """What the worker does, how long it waits and how to end that, each task once, and its end."""
    shop = first(redlock_ttl=10.0, redlock_max_ttl=10.0)
    worker = start_worker("first", pool=pool, concurrency=2)
    results = [shop.bill.delay(number) for number in range(2)]
    for number, result in enumerate(results):
        assert result.get(timeout=100) == f"invoice {number} billed"
    worker.wait_for_log("Locks can be granted again")
    log = worker.log()
    lines = [line for line in log.splitlines() if re.match(r"\[\S+ \S+: [A-Z]+/", line)]
    ours = [line for line in lines if re.search(r"[Ll]ock|redlock:", line)]
    ours = [line for line in ours if not OF_CELERY.search(line)]
    assert len(ours) == 5, ours
    assert re.search(r"redlock: 1 task takes a lock, on redis://\S+ \(one node", ours[0])
    sentence = r"No lock can be granted for (\d+) s: .* celery -A first redlock boot"
    said = re.search(sentence, ours[1])
    assert said, ours
    assert 0 < int(said[1]) <= 12  # what is left of the quarantine, of 11.5 s, when it looks
    assert [len(re.findall(rf"{word}\b", log)) for word in ("received", "ignored")] == [4, 2]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_bootstrap_ends_the_wait_of_tasks_that_were_put_off(first, start_worker, pool):
    """They were put off for ten minutes, and come when their worker sees that the node votes."""
    shop = first(redlock_max_ttl=600.0)
    worker = start_worker("first", pool=pool, concurrency=2)
    results = [shop.bill.delay(number) for number in range(2)]
    for result in results:
        worker.wait_for_log(rf"Rescheduled task first.bill\[{result.id}\] in 6\d\d s")
    plugin = plugin_for(shop.app)
    nodes, rules = plugin.settings.nodes, plugin.settings.rules
    enrolled = {"enrolled"}  # if it did not answer in time, at another try
    eventually(lambda: {*bootstrap(nodes, rules).values()} == enrolled, "enrolment")
    for number, result in enumerate(results):
        assert result.get(timeout=100) == f"invoice {number} billed"


@pytest.fixture
def start_example(redis_nodes, tmp_path):
    """Return what does what the service ``first-start`` does, beside nodes of this test."""
    nodes = redis_nodes(5)
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    service = composed["services"]["first-start"]
    script = service["command"][2].replace("/first-start", str(tmp_path))
    names = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    names["REDLOCK_NODES"] = ",".join(node.url for node in nodes)
    names["REDLOCK_MAX_TTL"] = service["environment"]["REDLOCK_MAX_TTL"]

    def start():
        subprocess.run(["sh", "-c", script], env={**os.environ, **names}, cwd=ROOT, check=True)
        rules = Rules(ttl=5.0, max_ttl=float(names["REDLOCK_MAX_TTL"]))
        return [node.state for node in node_statuses([node.url for node in nodes], rules)]

    start.nodes = nodes
    return start


def test_the_compose_file_waits_for_nothing_and_trusts_nodes_once(start_example):
    """Nodes that are started again may have forgotten locks of workers that run."""
    assert start_example() == ["up"] * 5
    for node in start_example.nodes:
        node.kill()
        node.restart()
    assert start_example() == ["unmarked"] * 5
