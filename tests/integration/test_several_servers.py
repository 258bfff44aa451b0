"""A node whose name stands for two servers: nobody is to lock on either without knowing."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
from celery import Celery

from celery_redlock import ConfigurationError, Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.ops.doctor.nodes import gather_nodes
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.health import check
from celery_redlock.reading.nodes import bootstrap
from support.liar import honest, in_time, lying
from support.stored import ROOMY

RULES = Rules(**ROOMY)
NAME = "lock.test"


@pytest.fixture
def name(redis_nodes, monkeypatch):
    """A URL whose host is, by turns, the one and the other of two servers."""
    first, second = redis_nodes(2)
    inherited, places = socket.getaddrinfo, ["127.0.0.1", "127.0.0.2"]

    def resolved(host, port, *args, **kwargs):
        if host != NAME:
            return inherited(host, port, *args, **kwargs)
        places.reverse()
        return [found for place in places for found in inherited(place, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    for limit in ("reading.health.LONGEST_CONNECT", "reading.health.LONGEST_LOOK"):
        monkeypatch.setattr(f"celery_redlock.{limit}", 60.0)  # a slow machine finds them later
    monkeypatch.setattr("celery_redlock.ops.doctor.nodes.LONGEST_LOOK", 60.0)
    with lying(second.port, honest, place=("127.0.0.2", first.port)):
        yield f"redis://{NAME}:{first.port}/0"


def app_on(url):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(redlock_nodes=[url])
    return app


def test_two_clients_hold_one_lock_on_such_a_node(name):
    """The reason to refuse it: each has reached another server."""
    for _ in range(2):
        bootstrap([name], RULES)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(contextlib.closing(Redlock([name], RULES))) for _ in "ab"]
        for client in clients:
            client.acquire("a", wait=60)


def test_a_worker_does_not_start_on_it(name):
    app = app_on(name)  # which its plugin does not keep
    plugin = plugin_for(app)
    try:
        with pytest.raises(ConfigurationError, match=r"several servers \(127\.0\.0\..*127\.0\.0\."):
            plugin.check()
    finally:
        plugin.locks.close()


def test_the_doctor_says_so(name):
    (node,) = gather_nodes([name], RULES, lambda _: None)
    assert sorted(node.servers) == ["127.0.0.1", "127.0.0.2"]


def test_several_addresses_of_one_server_are_one(redis_nodes, monkeypatch):
    """As localhost has, which is 127.0.0.1 and ::1."""
    (server,) = redis_nodes(1)
    with lying(server.port, honest, place=("127.0.0.2", server.port)):
        inherited = socket.getaddrinfo
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda host, *more, **how: [
                found
                for place in (["127.0.0.1", "127.0.0.2"] if host == NAME else [host])
                for found in inherited(place, *more, **how)
            ],
        )
        url = f"redis://{NAME}:{server.port}/0"
        bootstrap([url], RULES)
        app = app_on(url)
        plugin = plugin_for(app)
        with contextlib.closing(plugin.locks):
            plugin.check()
        (node,) = gather_nodes([url], RULES, lambda _: None)
    assert node.servers == ()


def test_a_name_that_nobody_knows_is_an_error_of_its_own():
    (node,) = gather_nodes(["redis://no-such-host.invalid/0"], RULES, lambda _: None)
    assert node.problem


def test_a_name_that_is_looked_up_for_long_holds_nobody_up(redis_nodes, monkeypatch):
    servers, over = redis_nodes(3), threading.Event()
    inherited = socket.getaddrinfo
    urls = [f"redis://{NAME}:{servers[0].port}/0", *(server.url for server in servers[1:])]

    def slow(host, *args, **kwargs):
        if host == NAME and threading.current_thread().name.startswith("redlock-look"):
            over.wait(60)
        return inherited("127.0.0.1" if host == NAME else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    bootstrap(urls, RULES)
    with contextlib.closing(Redlock(urls, RULES)) as locks:
        try:
            assert in_time(lambda: check(locks), 30.0) == {}
        finally:
            over.set()
