"""The tally over several nodes: every count once, whatever happens to nodes and processes."""

from __future__ import annotations

import os
import threading
import time
import warnings

import pytest
import redis
from celery import Celery

from celery_redlock import Redlock, events
from celery_redlock.lock.nodes.fanout import Fanout
from celery_redlock.lock.rules import Rules
from celery_redlock.observers import tally
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.health import probe
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.reading.tally import HOUR, RETENTION, Counts, hour_key, tally_key, tally_request
from celery_redlock.reading.tally_reader import TallyReader
from support.stored import ROOMY, clients_of, urls_of
from support.waiting import eventually

RULES = Rules(**ROOMY)
TASK = "shop.bill"


@pytest.fixture
def locks(five_nodes):
    bootstrap(urls_of(five_nodes), RULES)
    locks = Redlock(urls_of(five_nodes), RULES)
    probe(locks)
    yield locks
    locks.close()


def hour_now():
    return int(time.time() // HOUR)


@pytest.fixture(autouse=True)
def _the_hour_of_the_test(monkeypatch):
    """A test counts and looks under the key of one hour, though another may begin amid it."""
    hour = hour_now()
    monkeypatch.setitem(globals(), "hour_now", lambda: hour)


def add(locks, hour=None, task=TASK, **numbers):
    hour = hour_now() if hour is None else hour
    locks.driver.tell(tally_request(RULES, hour, task, Counts(numbers, {})))


def read(nodes, since=None):
    now = time.time()
    return TallyReader(urls_of(nodes), RULES).read(now - HOUR if since is None else since, now)


def ran(nodes, task=TASK, since=None):
    found = read(nodes, since).tasks.get(task)
    return found.ran if found else 0


def on_node(node, hour=None):
    key = tally_key("redlock", hour_now() if hour is None else hour, TASK)
    with redis.Redis.from_url(node.url, decode_responses=True) as client:
        return client.hgetall(key)


def test_what_processes_count_adds_up(five_nodes, locks):
    other = Redlock(urls_of(five_nodes), RULES)
    probe(other)
    for it, first in ((locks, 2000), (other, 1000)):
        numbers = {"ran": 2, "hold:7": 1, "first": first, "last": first + 5, "longest": first}
        examples = {"example:lost": {"at": first / 1000, "task_id": f"id-{first}"}}
        request = tally_request(RULES, hour_now(), TASK, Counts(numbers, examples))
        it.driver.tell(request)
        eventually(lambda: all(map(on_node, five_nodes)), "counts")
        probe(it)
    found = read(five_nodes).tasks[TASK]
    assert (found.ran, found.first, found.last) == (4, 1.0, 2.005)
    assert (found.holds.counts[7], found.holds.longest) == (2, 2.0)
    assert found.examples["lost"]["task_id"] == "id-1000"  # the last that was written
    other.close()


def test_nodes_that_were_away_in_turn_lose_no_count(redis_nodes):
    """Whoever was there all the time knows all; the others' numbers are smaller."""
    nodes = redis_nodes(3)
    bootstrap(urls_of(nodes), RULES)
    locks = Redlock(urls_of(nodes), RULES)
    probe(locks)
    add(locks, ran=1)
    eventually(lambda: ran(nodes) == 1, "one")
    for counted, away in enumerate((nodes[0], nodes[1]), 2):
        away.kill()
        add(locks, ran=1)
        eventually(lambda n=counted: on_node(nodes[2])["ran"] == str(n), "counts")
        away.start()
        eventually(lambda: all(it.state != "down" for it in probe(locks)), "a node that is back")
    add(locks, ran=1)
    eventually(lambda: ran(nodes) == 4, "four")
    assert max(int(on_node(node).get("ran", 0)) for node in nodes[:2]) < 4
    nodes[1].kill()
    found = read(nodes)
    assert found.tasks[TASK].ran == 4
    assert len(found.silent) == 1
    locks.close()


def test_hours_add_up_and_are_forgotten(five_nodes, locks):
    for ago in range(3):
        add(locks, hour=hour_now() - ago, ran=1)
    eventually(lambda: ran(five_nodes, since=(hour_now() - 2) * HOUR) == 3, "three hours")
    assert ran(five_nodes, since=hour_now() * HOUR) == 1
    with redis.Redis.from_url(five_nodes[0].url) as client:
        for key in (tally_key("redlock", hour_now(), TASK), hour_key("redlock", hour_now())):
            assert RETENTION - 60 < client.ttl(key) <= RETENTION


def test_a_reader_asks_for_an_hour_that_is_over_once(five_nodes, locks):
    """Nothing is added to it any more; to the newest two hours there is."""
    add(locks, hour=hour_now() - 3, ran=1)
    reader, now = TallyReader(urls_of(five_nodes), RULES), time.time()
    eventually(lambda: ran(five_nodes, since=now - 4 * HOUR) == 1, "counts")
    assert reader.read(now - 4 * HOUR, now).tasks[TASK].ran == 1
    for client in clients_of(five_nodes):
        client.delete(tally_key("redlock", hour_now() - 3, TASK))
    add(locks, ran=1)
    eventually(lambda: ran(five_nodes) == 1, "counts")
    assert reader.read(now - 4 * HOUR, now).tasks[TASK].ran == 2


def test_what_an_idle_process_adds_later_is_read(five_nodes, locks):
    add(locks, hour=hour_now() - 3, ran=1)
    reader, now = TallyReader(urls_of(five_nodes), RULES), time.time()
    eventually(lambda: ran(five_nodes, since=now - 4 * HOUR) == 1, "counts")
    assert reader.read(now - 4 * HOUR, now).tasks[TASK].ran == 1
    add(locks, hour=hour_now() - 3, ran=1)
    eventually(lambda: ran(five_nodes, since=now - 4 * HOUR) == 2, "its last counts")
    assert reader.read(now - 4 * HOUR, now + 601.0).tasks[TASK].ran == 2
    assert reader.read(now + 24 * HOUR, now + 24 * HOUR).tasks == {}
    assert len(reader._over) == 0


def test_what_others_wrote_harms_no_reader(five_nodes, locks):
    with redis.Redis.from_url(five_nodes[0].url) as client:
        client.zadd(hour_key("redlock", hour_now()), {b"\xff": 0, "other": 0, TASK: 0})
        client.set(tally_key("redlock", hour_now(), "other"), "mine")
        client.hset(tally_key("redlock", hour_now(), TASK), "ran", "many")
        client.set(hour_key("redlock", hour_now() - 1), "mine")
    add(locks, ran=3)
    eventually(lambda: ran(five_nodes) == 3, "counts")
    assert read(five_nodes).silent == []
    eventually(lambda: on_node(five_nodes[0])["ran"] == "3", "a number in place of a word")


# -- of an app -----------------------------------------------------------------------------


@pytest.fixture
def plugin(five_nodes, monkeypatch):
    """The plugin of an app whose locks are on five nodes; it counts by itself once."""
    monkeypatch.setattr(tally, "EVERY", 600.0)
    bootstrap(urls_of(five_nodes), RULES)
    app = Celery("shop", set_as_current=False, broker="memory://")
    app.conf.update(
        redlock_nodes=urls_of(five_nodes),
        redlock_observers=["journal"],
        **{f"redlock_{name}": value for name, value in ROOMY.items()},
    )
    plugin = plugin_for(app)
    probe(plugin.locks)
    yield plugin
    plugin.locks.close()


def happens(plugin, task=TASK):
    plugin.notify(events.LockAcquired("name", 7, 0.001, task=task, task_id="id"))


def test_the_journals_observer_counts(five_nodes, plugin):
    for _ in range(3):
        happens(plugin)
    eventually(lambda: ran(five_nodes) == 1, "the first")
    plugin.flush()
    eventually(lambda: ran(five_nodes) == 3, "all")


def test_at_the_end_nothing_connects(five_nodes, plugin):
    happens(plugin)
    eventually(lambda: ran(five_nodes) == 1, "the first")
    happens(plugin)
    plugin.locks.close()
    before = threading.active_count()
    plugin.flush()
    assert not plugin.locks.fanout.is_connected
    assert threading.active_count() <= before


def test_without_a_look_at_the_connections_it_would_connect(five_nodes, plugin, monkeypatch):
    """The twin of the one before."""
    happens(plugin)
    happens(plugin)
    plugin.locks.close()
    monkeypatch.setattr(Fanout, "is_connected", True)
    plugin.flush()
    nodes = plugin.locks.fanout.nodes
    eventually(lambda: any(node.connection is not None for node in nodes), "a connection")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_counts_for_itself(five_nodes, plugin):
    """On connections of its own; what its parent had not sent yet, the parent sends."""
    happens(plugin)
    happens(plugin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            probe(plugin.locks)
            happens(plugin, "child")
            happens(plugin, "child")
            plugin.flush()
            probe(plugin.locks)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    plugin.flush()
    eventually(lambda: (ran(five_nodes), ran(five_nodes, "child")) == (2, 2), "each its own")
