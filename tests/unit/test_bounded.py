"""One exchange with a server: it ends by a deadline, and brings no more than it may."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from celery_redlock.lock import bounded
from celery_redlock.lock.bounded import BoundedSocket


@pytest.fixture
def pair():
    """Return a bounded socket and the other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30.0)
        yield BoundedSocket(ours, 0.5), theirs


def drip(theirs, stop):
    """Send a byte now and then."""
    with contextlib.suppress(OSError):
        while not stop.wait(0.05):
            theirs.send(b"x")


@pytest.fixture
def dripping(pair):
    """Return a bounded socket whose other end sends a byte now and then."""
    stop = threading.Event()
    thread = threading.Thread(target=drip, args=(pair[1], stop))
    thread.start()
    yield pair[0]
    stop.set()
    thread.join()


def read_on(sock, seconds):
    """Read a byte at a time for so long."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        assert sock.recv(1)


def test_no_exchange_lasts_longer_than_it_may(dripping):
    """Although none of its reads does."""
    dripping.begin()
    with pytest.raises(TimeoutError):
        read_on(dripping, 60.0)
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


def test_a_timeout_of_its_own_is_kept(pair):
    """Of a read that is not to wait, or not for long."""
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
