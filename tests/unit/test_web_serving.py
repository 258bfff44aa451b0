"""What one client may take of the page's server: real sockets on loopback, no browser."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import urllib.request

import pytest
from waitress import wasyncore

from celery_redlock.ops.web import serving
from support.waiting import eventually

HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
WHOLE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
PATIENCE = 60


class Site:
    def __init__(self):
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.server = serving.make_server(self.page, "127.0.0.1", 0)
        self.port = int(self.server.effective_port)
        self._sockets = self.server._map
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def page(self, _environ, start_response):
        self.may_answer.wait(PATIENCE)
        start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "2")])
        return [b"ok"]

    def connect(self, words=b""):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        connection.sendall(words)
        return connection

    def fetched(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=PATIENCE) as answer:
            return answer.read()

    def close(self):
        self.may_answer.set()
        # Awake for another reason, the thread may have closed the trigger before it is written to.
        with contextlib.suppress(OSError):
            self.server.trigger.pull_trigger(lambda: wasyncore.close_all(self._sockets))
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self.server.task_dispatcher.shutdown()


@pytest.fixture
def site():
    with contextlib.closing(Site()) as site:
        yield site


@pytest.fixture
def connections():
    with contextlib.ExitStack() as stack:
        yield stack.enter_context


def is_closed(connection):
    if not select.select([connection], [], [], 0)[0]:
        return False
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def drip(connection):
    with contextlib.suppress(OSError):
        connection.send(b"x")


def test_slow_clients_keep_nobody_out(monkeypatch, connections):
    monkeypatch.setattr(serving, "SILENCE", 3600)  # it is their number that ends some
    with contextlib.closing(Site()) as site:
        slow = [connections(site.connect(HALF)) for _ in range(serving.CONNECTIONS + 50)]
        for connection in slow:
            drip(connection)
        assert site.fetched() == b"ok"
        channels = site.server.active_channels
        eventually(lambda: len(channels) <= serving.CONNECTIONS, "few connections")


def test_a_byte_now_and_then_keeps_no_connection_open(monkeypatch, connections):
    """The whole request has to come in time."""
    monkeypatch.setattr(serving, "SILENCE", 1)
    monkeypatch.setattr(serving, "CLEANUP", 1)
    with contextlib.closing(Site()) as site:
        slow = connections(site.connect(HALF))

        def is_over():
            drip(slow)
            return is_closed(slow)

        eventually(is_over, "the end of a slow connection")


def test_a_request_that_is_answered_is_not_ended_for_another(site, connections):
    """Nodes may be slow; whoever waits for a page waits for it, whoever else comes."""
    site.may_answer.clear()
    waiting = connections(site.connect(WHOLE))
    channels = site.server.active_channels
    eventually(lambda: any(it.requests for it in list(channels.values())), "a request")
    slow = [connections(site.connect(HALF)) for _ in range(serving.CONNECTIONS + 50)]
    eventually(lambda: any(map(is_closed, slow)), "the end of a slow connection")
    site.may_answer.set()
    said = b""
    while b"ok" not in said:
        piece = waiting.recv(4096)
        assert piece
        said += piece


def test_silence_is_not_borne_for_long():
    """Or a few hundred halves of requests would make everybody wait."""
    assert serving.SILENCE + serving.CLEANUP <= 15
