"""
Connections that something on the way drops, without a word, while nobody uses them.

A firewall or load balancer forgets a connection that was idle: what is sent on it is swallowed,
and neither end is told. Each test has a twin without the protection that has to see the harm.
"""

from __future__ import annotations

import socket
import threading
import time

import pytest
from celery import Celery

from celery_redlock import RedlockTask, events
from celery_redlock.errors import QuorumUnavailable
from celery_redlock.lock.nodes import address, fanout, urls
from celery_redlock.lock.nodes.bounded import socket_of
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.plugin import plugin_for
from celery_redlock.reading import nodes as reading
from support.stored import ROOMY, value_of, wait_until_free
from support.waiting import eventually

#: What counts as idle in these tests, and a little more [s].
IDLE, LONGER = 0.3, 0.4
#: Long enough for an answer on a machine that stands still now and then.
SETTINGS = ROOMY


@pytest.fixture
def on(request, monkeypatch):
    monkeypatch.setattr(fanout, "QUIET", IDLE / 2)
    monkeypatch.setattr(fanout, "IDLE", IDLE if request.param else float("inf"))
    return request.param


protection = pytest.mark.parametrize("on", [True, False], ids=["on", "off"], indirect=True)


@pytest.fixture
def links(redis_nodes, proxied_nodes):
    """Return ways to three nodes that trust one another, by which these are called."""
    made = proxied_nodes(redis_nodes(3))
    urls = [link.url for link in made]
    assert set(reading.bootstrap(urls, Rules(**SETTINGS)).values()) == {"enrolled"}
    return made


@pytest.fixture
def locks(links):
    made = Redlock([link.url for link in links], Rules(**SETTINGS))
    yield made
    made.close()


def drop(links):
    """Let the connections be idle, and dropped."""
    time.sleep(LONGER)
    for link in links:
        link.drop_connections()


@protection
def test_each_lock_after_an_idle_time_is_granted(locks, links, on):
    """All three nodes are there all the time."""
    locks.release(locks.acquire("warm"))
    outcomes = []
    for number in range(3):
        drop(links)
        try:
            locks.release(locks.acquire(f"after {number}"), wait=False)
        except QuorumUnavailable:
            outcomes.append("unavailable")
        else:
            outcomes.append("granted")
    assert outcomes == (["granted"] * 3 if on else ["unavailable"] * 3)


@protection
def test_each_publish_after_an_idle_time_reserves(links, on):
    """It is the only thing that its process does, once in each idle time."""

    def shop():
        app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
        app.conf.redlock_nodes = [link.url for link in links]
        app.conf.redlock_node_timeout = SETTINGS["node_timeout"]

        @app.task(base=RedlockTask, name="bill", lock_key="{number}", unique_until="success")
        def bill(number):
            """Bill it."""

        return bill

    publisher, other = shop(), shop()
    publisher.delay(0)
    published_twice = 0
    for number in range(1, 6):
        drop(links)
        assert not publisher.delay(number).duplicate
        plugin_for(other.app).locks.close()  # so that it connects anew
        published_twice += not other.delay(number).duplicate
    assert published_twice == (0 if on else 5)


@protection
def test_a_release_after_an_idle_time_arrives(locks, links, on):
    """Nobody waits for its answer, and this process asks for nothing more."""
    lease = locks.acquire("long")
    drop(links)
    locks.release(lease, wait=False)
    if on:
        wait_until_free(links, "long")
    else:
        time.sleep(2 * SETTINGS["node_timeout"])  # by then it would have arrived
        assert all(value_of(node, "long") for node in links)


@protection
def test_several_threads_that_come_at_once_all_get_their_locks(locks, links, on):
    locks.release(locks.acquire("warm"))
    drop(links)
    granted = []

    def take(number):
        granted.append(locks.acquire(f"thread {number}").name)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(granted) == (8 if on else 0)


@pytest.mark.parametrize("on", [True], ids=["on"], indirect=True)
def test_a_connection_that_is_there_stays_and_nobody_hears_of_it(links, on):
    said = []
    locks = Redlock([link.url for link in links], Rules(**SETTINGS), [said.append])
    locks.release(locks.acquire("warm"))
    ours = [node.connection for node in locks.fanout.nodes]
    before = len(said)
    time.sleep(LONGER)
    locks.release(locks.acquire("again"))
    assert [node.connection for node in locks.fanout.nodes] == ours
    drop(links)
    locks.release(locks.acquire("dropped"))
    assert not {*map(id, ours)} & {id(node.connection) for node in locks.fanout.nodes}
    news = [one for one in said[before:] if isinstance(one, (events.NodeUp, events.NodeDown))]
    assert news == []
    locks.close()


@pytest.mark.parametrize("on", [True], ids=["on"], indirect=True)
def test_a_node_that_is_gone_meanwhile_is_down_once(redis_nodes, proxied_nodes, on):
    links = proxied_nodes(redis_nodes(3))
    urls, said = [link.url for link in links], []
    reading.bootstrap(urls, Rules(**SETTINGS))
    locks = Redlock(urls, Rules(**SETTINGS), [said.append])
    locks.release(locks.acquire("warm"))
    links[0].drop_connections()
    links[0].refuse()
    for _ in range(2):
        time.sleep(LONGER)
        locks.release(locks.acquire("again"))
    eventually(lambda: any(isinstance(one, events.NodeDown) for one in said), "it is down")
    assert [one.node for one in said if isinstance(one, events.NodeDown)] == [urls[0][8:]]
    locks.close()


def test_every_connection_is_kept_alive(redis_nodes):
    """Also while nobody uses it, so that few are dropped, and a dead one is known to be."""
    (node,) = redis_nodes(1)
    connection = address.addresses_of([node.url])[0].connection()
    connection.connect()
    sock = socket_of(connection)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert urls.KEEPALIVE
    for option, seconds in urls.KEEPALIVE.items():
        assert sock.getsockopt(socket.IPPROTO_TCP, option) == seconds
    connection.disconnect()


def test_a_url_has_its_own_way_with_it(redis_nodes):
    (node,) = redis_nodes(1)
    connection = address.addresses_of([f"{node.url}?socket_keepalive=no"])[0].connection()
    connection.connect()
    assert not socket_of(connection).getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    connection.disconnect()
