"""The bad network of the tests is as bad as it says, and no worse."""

from __future__ import annotations

import socket
import time

import pytest

from support.proxy import proxied
from support.waiting import eventually


@pytest.fixture
def link(five_nodes, proxied_nodes):
    return proxied_nodes(five_nodes[:1])[0]


def _connect(link, timeout=60.0):
    wire = socket.create_connection(("127.0.0.1", link.port), timeout=timeout)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return wire


def _ask(wire, command=b"PING\r\n"):
    wire.sendall(command)
    return wire.recv(1 << 16)


def _shortest_round_trip(wire, n=41):
    times = []
    for _ in range(n):
        start = time.perf_counter()
        assert _ask(wire) == b"+PONG\r\n"
        times.append(time.perf_counter() - start)
    return min(times)


def test_a_round_trip_takes_the_delay_twice(link):
    """Never less than both ways together, and not three times one way, if the machine lets it."""
    with _connect(link) as wire:
        link.delay(0.02)
        slow = _shortest_round_trip(wire)
        link.pass_through()
        assert _shortest_round_trip(wire) < 0.04
    assert 0.04 <= slow < 0.06


def test_delay_does_not_limit_what_is_under_way(link):
    link.delay(0.5)
    with _connect(link, timeout=60) as wire:
        start = time.perf_counter()
        for number in range(1000):  # one by one they would outlast the test
            wire.sendall(b"ECHO %04d\r\n" % number)
        told = b""
        while len(told) < 1000 * len(b"$4\r\n0000\r\n"):
            told += wire.recv(1 << 16)
        assert time.perf_counter() - start >= 1
    assert told == b"".join(b"$4\r\n%04d\r\n" % number for number in range(1000))


def test_much_data_arrives_whole(link):
    value = bytes(range(256)) * 40_000
    link.delay(0.001)
    with _connect(link, timeout=60) as wire:
        head = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % len(value)
        wire.sendall(head + value + b"\r\n")
        assert wire.recv(100) == b"+OK\r\n"
        wire.sendall(b"GET k\r\n")
        time.sleep(0.2)  # what the proxy held up would come in that time
        told = b""
        while len(told) < len(value) + 13:
            told += wire.recv(1 << 20)
    assert told == b"$%d\r\n%s\r\n" % (len(value), value)


def test_byte_by_byte_splits_every_reply(link):
    with _connect(link) as wire:
        link.byte_by_byte(gap=0.005)
        wire.sendall(b"PING\r\n")
        pieces = []
        while b"".join(pieces) != b"+PONG\r\n":
            pieces.append(wire.recv(100))
    assert len(pieces) >= 2  # a slow reader finds several at once


def test_a_blackhole_delivers_late_when_it_heals(link):
    """Silence is not loss: what was sent meanwhile still arrives, as with TCP."""
    with _connect(link) as wire:
        assert _ask(wire) == b"+PONG\r\n"
        link.blackhole()
        wire.settimeout(0.5)  # short: nothing is to come
        with pytest.raises(TimeoutError):
            _ask(wire, b"INCR n\r\n")
        wire.settimeout(60.0)
        link.pass_through()
        assert wire.recv(100) == b":1\r\n"


def test_lost_replies_do_not_undo_what_was_asked(link, five_nodes):
    with _connect(link, timeout=0.5) as wire:  # short: nothing is to come
        link.lose_replies()
        with pytest.raises(TimeoutError):
            _ask(wire, b"INCR n\r\n")
        with socket.create_connection(("127.0.0.1", five_nodes[0].port)) as direct:
            # The proxy may pass it on after its reply was given up.
            eventually(lambda: _ask(direct, b"GET n\r\n") == b"$1\r\n1\r\n", "what was asked")


def test_refuse_is_as_if_no_server_listened(link):
    with _connect(link) as wire:
        assert _ask(wire) == b"+PONG\r\n"
        link.refuse()
        assert wire.recv(100) == b""
    with pytest.raises(ConnectionRefusedError):
        _connect(link)
    link.pass_through()
    with _connect(link) as wire:
        assert _ask(wire) == b"+PONG\r\n"


def test_reset_breaks_old_and_new_connections(link):
    """RST, not FIN: the reader gets an error and no end of file."""
    with _connect(link) as wire:
        assert _ask(wire) == b"+PONG\r\n"
        link.reset()
        with pytest.raises(ConnectionResetError):
            wire.recv(100)
    with pytest.raises(ConnectionResetError), _connect(link) as wire:
        wire.recv(100)


def test_a_closed_client_is_closed_at_the_server(link, five_nodes):
    with socket.create_connection(("127.0.0.1", five_nodes[0].port)) as direct:

        def clients():
            return _ask(direct, b"CLIENT LIST\r\n").count(b"laddr=")

        before = clients()
        with _connect(link) as wire:
            assert _ask(wire) == b"+PONG\r\n"
            assert clients() == before + 1
        eventually(lambda: clients() == before, "closed connection")


def test_a_dead_server_is_a_reset_connection(redis_nodes, proxied_nodes):
    (node,) = redis_nodes(1)
    (link,) = proxied_nodes([node])
    node.kill()
    with pytest.raises(ConnectionResetError), _connect(link) as wire:
        wire.recv(100)
    node.start()
    with _connect(link) as wire:
        assert _ask(wire) == b"+PONG\r\n"


def test_links_are_bad_one_by_one(five_nodes, proxied_nodes):
    links = proxied_nodes(five_nodes)
    links[0].blackhole()
    for link in links[1:]:
        with _connect(link) as wire:
            assert _ask(wire) == b"+PONG\r\n"


def test_the_proxy_ends_with_its_block(five_nodes):
    with proxied([five_nodes[0].port]) as (link,), _connect(link) as wire:
        assert _ask(wire) == b"+PONG\r\n"
    with pytest.raises(ConnectionRefusedError):
        _connect(link)
