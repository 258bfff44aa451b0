"""Report mode with nodes that are down, hung or slow: all else stays, and no call takes long."""

from __future__ import annotations

import time

import pytest
from celery import Celery

from celery_redlock import RedlockTask, events
from celery_redlock.lock import clock
from celery_redlock.lock.nodes import connections
from celery_redlock.lock.nodes.fanout import Fanout
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import bootstrap
from support.clients import let_go

#: Of one round [s]: short, as rounds are to end without an answer.
NODE_TIMEOUT = 0.2
CALLS = 6


def make_app(urls, mode="report"):
    app, told = Celery("shop", broker="memory://", set_as_current=False), []
    app.conf.update(
        redlock_nodes=urls,
        redlock_mode=mode,
        redlock_node_timeout=NODE_TIMEOUT,
        redlock_observers=[told.append],
    )

    @app.task(name="add", base=RedlockTask, shared=False, on_unavailable="fail")
    def add(one, other):
        return one + other

    @app.task(name="once", base=RedlockTask, shared=False, unique_until="finished")
    def once(key):
        return key

    return app, told


@pytest.fixture
def make(request):
    def make(*args):
        app, told = make_app(*args)
        request.addfinalizer(lambda: (plugin_for(app).locks.close(), let_go(app)))
        return app, told

    return make


def down(nodes):
    for node in nodes:
        node.kill()


def hung(nodes):
    for node in nodes:
        node.pause()


@pytest.fixture
def bounds(monkeypatch):
    """For each time that nodes were asked: until when it may take [s from then], None for ever."""
    bounds, ask = [], Fanout.ask

    def noted(self, calls, ends=None):
        bounds.append(None if ends is None else ends - clock.now())
        return ask(self, calls, ends)

    monkeypatch.setattr(Fanout, "ask", noted)
    return bounds


@pytest.fixture
def waits_for_connections(monkeypatch):
    """Whoever waits for a first connection as enforced tasks do waits longer than a test may."""
    monkeypatch.setattr(connections, "FIRST_CONNECT", 600.0)


@pytest.mark.usefixtures("waits_for_connections")
@pytest.mark.parametrize("when", ["before the first task", "after it"])
@pytest.mark.parametrize("state", [down, hung])
def test_without_nodes_tasks_run_and_messages_go_out(redis_nodes, make, bounds, state, when):
    nodes = redis_nodes(5)
    app, told = make([node.url for node in nodes])
    bootstrap(app.conf.redlock_nodes, plugin_for(app).settings.rules)
    if when == "after it":
        assert app.tasks["add"].apply((1, 2)).get() == 3
        told.clear()
        bounds.clear()
    state(nodes)
    assert [app.tasks["add"].apply((1, 2)).get() for _ in range(CALLS)] == [3] * CALLS
    assert [app.tasks["once"].delay("k").duplicate for _ in range(CALLS)] == [False] * CALLS
    assert len(bounds) == 2 * CALLS
    assert all(bound is not None and bound <= NODE_TIMEOUT for bound in bounds)
    refused = [event for event in told if isinstance(event, events.TaskEvent)]
    assert {(type(it), it.cause, it.report) for it in refused} == {
        (events.TaskRefused, "unavailable", True)
    }
    assert len(refused) == CALLS


def test_an_enforced_task_waits_and_fails(redis_nodes, make, bounds, monkeypatch):
    """Twin: the first one waits for connections, and then its policy applies."""
    monkeypatch.setattr(connections, "FIRST_CONNECT", 2.0)
    nodes = redis_nodes(5)
    hung(nodes)
    app, _ = make([node.url for node in nodes], "enforce")
    began = time.monotonic()
    assert app.tasks["add"].apply((1, 2)).state == "FAILURE"
    assert time.monotonic() - began > 1.9
    assert bounds == [None]


@pytest.mark.usefixtures("waits_for_connections")
def test_slow_nodes_cost_a_round_at_most(five_nodes, proxied_nodes, make, bounds):
    links = proxied_nodes(five_nodes)
    app, told = make([link.url for link in links])
    bootstrap(app.conf.redlock_nodes, plugin_for(app).settings.rules)
    assert app.tasks["add"].apply((1, 2)).get() == 3
    for link in links:
        link.delay(60.0)
    bounds.clear()
    assert [app.tasks["add"].apply((1, 2)).get() for _ in range(CALLS)] == [3] * CALLS
    assert len(bounds) == CALLS
    assert all(bound is not None and bound <= NODE_TIMEOUT for bound in bounds)
    assert {it.cause for it in told if isinstance(it, events.TaskEvent)} == {"unavailable"}
