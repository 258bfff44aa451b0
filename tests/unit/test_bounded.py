"""One exchange with a server: it ends by a deadline, and brings no more than it may."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
import redis
from redis._parsers import _HiredisParser, _RESP2Parser
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.utils import HIREDIS_AVAILABLE

from celery_redlock.lock.nodes import bounded
from celery_redlock.lock.nodes.bounded import BoundedSocket

PARSERS = [_RESP2Parser, *[_HiredisParser] * HIREDIS_AVAILABLE]


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30.0)
        yield BoundedSocket(ours, 0.5), theirs


def drip(theirs, stop):
    with contextlib.suppress(OSError):
        while not stop.wait(0.05):
            theirs.send(b"x")


@pytest.fixture
def dripping(pair):
    stop = threading.Event()
    thread = threading.Thread(target=drip, args=(pair[1], stop))
    thread.start()
    yield pair[0]
    stop.set()
    thread.join()


def read_on(sock, seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        assert sock.recv(1)


def test_no_exchange_lasts_longer_than_it_may(dripping):
    dripping.begin()
    with pytest.raises(TimeoutError):
        read_on(dripping, 60.0)
    dripping._longest = 60.0  # the dripping thread may be late; the deadline of before is over
    dripping.begin()
    assert dripping.recv(1)  # another exchange has its own time


def test_without_a_deadline_it_lasts(dripping):
    """The twin: reads that come in time each go on for as long as there is something."""
    dripping.begin()
    dripping.end()
    read_on(dripping, 1.0)


@pytest.mark.parametrize("way", ["recv", "recv_into"])
def test_no_exchange_brings_more_than_it_may(pair, monkeypatch, way):
    """The bytes of all its reads count; the next exchange begins anew."""
    monkeypatch.setattr(bounded, "LARGEST", 1000)
    sock, theirs = pair
    read = sock.recv if way == "recv" else lambda size: sock.recv_into(bytearray(size))
    theirs.sendall(bytes(2000))
    sock.begin()
    assert read(900)
    sock.begin()
    assert read(900)
    with pytest.raises(OSError, match="MiB"):
        read(200)


@contextlib.contextmanager
def server(answer, keeps):
    """A server that answers all with *answer*, and hangs up once nothing comes for so long [s]."""

    def serve():
        with contextlib.suppress(OSError), listens.accept()[0] as client:
            client.settimeout(keeps)
            while client.recv(2**16):
                client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listens:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listens.getsockname()[1]
        finally:
            listens.shutdown(socket.SHUT_RDWR)
            thread.join()


def connection_to(port, kind=redis.Connection, **options):
    known = {"host": "127.0.0.1", "port": port, "retry": Retry(NoBackoff(), 0)}
    return bounded.bounded(kind)(**{**known, **options})


def test_no_handshake_lasts_longer_than_it_may(monkeypatch):
    """Although reads without a timeout of their own would wait until the server hangs up."""
    monkeypatch.setattr(bounded, "LONGEST", 0.5)
    with server(b"", keeps=30.0) as port:
        connection = connection_to(port, redis.SSLConnection, socket_timeout=None)
        with pytest.raises(redis.TimeoutError):
            connection.connect()


@pytest.mark.parametrize(
    "answer", [b":abc\r\n", b"$abc\r\n", b"*1\r\n" * 5000, b"*4294967295\r\n", b"hello\r\n"]
)
@pytest.mark.parametrize("parser", PARSERS)
def test_bytes_that_are_no_answer_are_an_error_of_redis(answer, parser):
    """Whichever parser reads them, who reads has one kind of error to expect."""
    with server(answer, keeps=1.0) as port:
        connection = connection_to(port, parser_class=parser, socket_timeout=0.5, protocol=2)
        with pytest.raises(redis.RedisError):
            connection.connect()
            connection.send_command("INFO")
            connection.read_response()
        connection.disconnect()


@pytest.mark.parametrize(
    ("host", "port"), [("a\0b", 1), ("a" * 70, 1), ("\ud800", 1), ("127.0.0.1", 2**16)]
)
def test_a_place_that_cannot_be_is_an_error_of_redis(host, port):
    """As a Sentinel may tell it; the standard library has an error of its own for some."""
    with pytest.raises(redis.ConnectionError):
        connection_to(port, host=host).connect()


def test_a_timeout_of_its_own_is_kept(pair):
    sock, _ = pair
    sock.begin()
    sock.settimeout(0)
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    sock.settimeout(0.01)
    with pytest.raises(TimeoutError):
        sock.recv(1)
    sock.end()
    assert sock.gettimeout() == 0.01
