"""Report mode with nodes that are down, hung or slow: all else stays, and no call takes long."""

from __future__ import annotations

import time
from statistics import median

import pytest
from celery import Celery

from celery_redlock import RedlockTask, events
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import bootstrap
from support.clients import let_go

#: Of one round [s]; and what a loaded machine may add to it.
#: Less together than a first connection may take [s], which the twin waits for.
NODE_TIMEOUT, SLACK = 0.2, 0.7
CALLS = 6


def make_app(urls, mode="report"):
    """Return an app whose messages stay in this process, and its events."""
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
    """Make apps that are closed at the end."""

    def make(*args):
        app, told = make_app(*args)
        request.addfinalizer(lambda: (plugin_for(app).locks.close(), let_go(app)))
        return app, told

    return make


def down(nodes):
    """End the servers."""
    for node in nodes:
        node.kill()


def hung(nodes):
    """Stop the servers; what is sent to them is taken, and never answered."""
    for node in nodes:
        node.pause()


def timed(call):
    """Return what *call* returns, and how long that took [s]."""
    began = time.monotonic()
    return call(), time.monotonic() - began


@pytest.mark.parametrize("when", ["before the first task", "after it"])
@pytest.mark.parametrize("state", [down, hung])
def test_without_nodes_tasks_run_and_messages_go_out(redis_nodes, make, state, when):
    """Each call is one bounded round at most, and each is reported as it is."""
    nodes = redis_nodes(5)
    app, told = make([node.url for node in nodes])
    bootstrap(app.conf.redlock_nodes, plugin_for(app).settings.rules)
    if when == "after it":
        assert app.tasks["add"].apply((1, 2)).get() == 3
        told.clear()
    state(nodes)
    calls = [timed(lambda: app.tasks["add"].apply((1, 2)).get()) for _ in range(CALLS)]
    assert [value for value, _ in calls] == [3] * CALLS
    sent = [timed(lambda: app.tasks["once"].delay("k").duplicate) for _ in range(CALLS)]
    assert [value for value, _ in sent] == [False] * CALLS
    assert median(took for _, took in (*calls, *sent)) < NODE_TIMEOUT + SLACK
    refused = [event for event in told if isinstance(event, events.TaskEvent)]
    assert {(type(it), it.cause, it.report) for it in refused} == {
        (events.TaskRefused, "unavailable", True)
    }
    assert len(refused) == CALLS


def test_an_enforced_task_waits_and_fails(redis_nodes, make):
    """Twin: the first one waits for connections, and then its policy applies."""
    nodes = redis_nodes(5)
    hung(nodes)
    app, _ = make([node.url for node in nodes], "enforce")
    done, took = timed(lambda: app.tasks["add"].apply((1, 2)))
    assert done.state == "FAILURE"
    assert took > NODE_TIMEOUT + SLACK


def test_slow_nodes_cost_a_round_at_most(five_nodes, proxied_nodes, make):
    """Farther away than a round waits; then near again, and reports are exact."""
    links = proxied_nodes(five_nodes)
    app, told = make([link.url for link in links])
    bootstrap(app.conf.redlock_nodes, plugin_for(app).settings.rules)
    assert app.tasks["add"].apply((1, 2)).get() == 3
    for link in links:
        link.delay(2 * NODE_TIMEOUT)
    calls = [timed(lambda: app.tasks["add"].apply((1, 2)).get()) for _ in range(CALLS)]
    assert [value for value, _ in calls] == [3] * CALLS
    assert median(took for _, took in calls) < NODE_TIMEOUT + SLACK
    assert {it.cause for it in told if isinstance(it, events.TaskEvent)} == {"unavailable"}
