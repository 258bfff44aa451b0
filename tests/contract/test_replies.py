"""What a connection has for us by now is taken, all of it and no more, by either reader."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import ssl

import pytest
from redis._parsers import _HiredisParser, _RESP2Parser
from redis.connection import Connection
from redis.exceptions import BusyLoadingError, NoScriptError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as Lost
from redis.utils import HIREDIS_AVAILABLE

from celery_redlock.lock.nodes import replies
from celery_redlock.lock.nodes.bounded import BoundedSocket
from celery_redlock.lock.nodes.replies import replies_of

NEEDS_HIREDIS = pytest.mark.skipif(not HIREDIS_AVAILABLE, reason="hiredis is not installed")
PARSERS = [
    pytest.param(_RESP2Parser, id="python"),
    pytest.param(_HiredisParser, id="hiredis", marks=NEEDS_HIREDIS),
]
#: As a node answers: to a grant, a release, a probe and the reading of a key that is not there.
ANSWERS = b"".join(
    [b"*3\r\n:1\r\n:1000\r\n$1\r\n0\r\n", b":0\r\n", b"$2\r\nhi\r\n", b"$-1\r\n", b"*0\r\n"]
)
READ = [[1, 1000, b"0"], 0, b"hi", None, []]


class Wire:
    """
    Both ends of a connection: a test says what comes, and takes what was read.

    Attributes:
        owed: What the node has still to answer, as many as were asked for by `owe`.
        found: What the last look took.
        server: The other end.
    """

    def __init__(self, parser, protocol=2, **options):
        ours, self.server = socket.socketpair()
        self.connection = Connection(parser_class=parser, protocol=protocol, **options)
        self.connection._sock = ours
        self.connection._parser.on_connect(self.connection)
        ours.settimeout(0)
        self.sock = ours
        self.owed = []
        self.found = []
        self._replies = replies_of(self.connection, self.owed)

    def owe(self, many):
        self.owed += range(many)

    def say(self, data):
        """Have *data* arrive; it is there when this returns."""
        self.server.sendall(data)

    def look(self):
        """Take what is there, as a node does: afterwards it is owed no more."""
        self.found = []
        try:
            for reply in self._replies():
                if isinstance(reply, Lost):
                    raise reply
                self.found.append(reply)
        finally:
            del self.owed[: len(self.found)]
        return self.found

    @property
    def is_readable(self):
        return bool(select.select([self.sock], [], [], 0)[0])

    def close(self):
        for end in (self.sock, self.server):
            end.close()


@pytest.fixture
def wire():
    with contextlib.ExitStack() as stack:

        def make(*args, **kwargs):
            made = Wire(*args, **kwargs)
            stack.callback(made.close)
            return made

        yield make


# -- what comes ------------------------------------------------------------------------


@pytest.mark.parametrize("parser", PARSERS)
def test_nothing_there_is_nothing_read(wire, parser):
    line = wire(parser)
    assert line.look() == []
    line.owe(1)
    assert line.look() == []


@pytest.mark.parametrize("parser", PARSERS)
def test_all_that_is_there_is_read_in_order(wire, parser):
    line = wire(parser)
    line.owe(2 * len(READ))
    line.say(2 * ANSWERS)
    assert line.look() == 2 * READ
    assert line.look() == []
    assert not line.is_readable


@pytest.mark.parametrize("parser", PARSERS)
def test_replies_may_come_in_any_two_pieces(wire, parser):
    line = wire(parser)
    for cut in range(1, len(ANSWERS)):
        line.owe(len(READ))
        line.say(ANSWERS[:cut])
        first = line.look()
        assert first == READ[: len(first)]
        line.say(ANSWERS[cut:])
        assert first + line.look() == READ, cut
        assert line.owed == []


@pytest.mark.parametrize("parser", PARSERS)
def test_replies_may_come_byte_by_byte(wire, parser):
    line, found = wire(parser), []
    line.owe(len(READ))
    for place in range(len(ANSWERS)):
        line.say(ANSWERS[place : place + 1])
        found += line.look()
    assert found == READ


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("length", [-1, 0, 1])
def test_a_reply_that_ends_where_a_look_ends_is_read(wire, parser, length):
    line = wire(parser)
    size = replies.SIZE + length
    head = b"$%d\r\n" % (size - len(b"$16000\r\n\r\n"))
    text = b"x" * (size - len(head) - 2)
    line.owe(1)
    line.say(head + text + b"\r\n")
    found = line.look()
    while not found:
        assert line.is_readable, "what is left would never be read"
        found = line.look()
    assert found == [text]


@pytest.mark.parametrize("parser", PARSERS)
def test_much_data_is_told_of_until_it_is_read(wire, parser):
    line = wire(parser)
    many = 5 * replies.SIZE // len(ANSWERS)
    line.owe(many * len(READ))
    line.server.setblocking(False)
    data, found = ANSWERS * many, []
    while data:
        with contextlib.suppress(BlockingIOError):
            data = data[line.server.send(data) :]
        while line.is_readable:
            found += line.look()
    assert found == READ * many
    assert line.owed == []


@pytest.mark.parametrize("parser", PARSERS)
def test_a_look_takes_all_there_is(wire, parser):
    """A last look, when time is up, must find every answer that has come, however many."""
    line = wire(parser)
    many = 3 * replies.SIZE // len(ANSWERS)
    line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    line.server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    line.owe(many * len(READ))
    line.say(ANSWERS * many)
    assert len(line.look()) == many * len(READ)


# -- errors ----------------------------------------------------------------------------


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"-NOSCRIPT No matching script.\r\n", NoScriptError),
        (b"-READONLY You can't write against a read only replica.\r\n", ReadOnlyError),
        (b"-NOPERM no permissions to run this\r\n", RedisError),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", RedisError),
        (b"-ERR anything\r\n", RedisError),
    ],
)
def test_an_error_is_a_reply_like_any_other(wire, parser, said, kind):
    """It is handed over and not raised: those before and behind it find their calls."""
    line = wire(parser)
    line.owe(3)
    line.say(b":1\r\n" + said + b":2\r\n")
    before, error, after = line.look()
    assert (before, after) == (1, 2)
    assert isinstance(error, kind)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "said",
    [
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-NOAUTH Authentication required.\r\n",
        b"-ERR max number of clients reached\r\n",
    ],
)
def test_a_server_that_cannot_serve_us_is_a_dead_connection(wire, parser, said):
    line = wire(parser)
    line.owe(3)
    line.say(b":1\r\n" + said)
    with pytest.raises(RedisError) as error:
        line.look()
    assert line.found == [1]
    assert ("loading" in said.decode().lower()) == isinstance(error.value, BusyLoadingError)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n", b"?\r\n", b"\x00\x00\r\n"])
def test_what_is_no_protocol_is_a_dead_connection(wire, parser, said):
    line = wire(parser)
    line.owe(1)
    line.say(said)
    with pytest.raises(RedisError):
        line.look()


# -- the end ---------------------------------------------------------------------------


@pytest.mark.parametrize("parser", PARSERS)
def test_what_came_before_the_end_is_read_first(wire, parser):
    """A node that answers and hangs up has answered; that it is gone shows at once afterwards."""
    line, found = wire(parser), []
    line.owe(1)
    line.say(b":1\r\n")
    line.server.close()
    with contextlib.suppress(RedisError, OSError):  # now, or at the next look
        for reply in line._replies():
            found.append(reply)
            line.owed.clear()
    assert found == [1]
    assert line.is_readable
    with pytest.raises((RedisError, OSError)):
        line.look()


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("kept", [0, 1, 5, len(ANSWERS.partition(b":0")[0]) - 1])
def test_an_end_in_the_middle_of_a_reply_is_an_end(wire, parser, kept):
    line, found = wire(parser), []
    line.owe(1)
    line.say(ANSWERS[:kept])
    line.server.close()
    with pytest.raises((RedisError, OSError)):
        for _ in range(3):
            found += line.look()
    assert found == []


@pytest.mark.parametrize("parser", PARSERS)
def test_a_reset_is_an_end(wire, parser):
    """The other side has thrown away what we sent: an error of the connection, of any kind."""
    line = wire(parser)
    line.owe(1)
    line.sock.send(b"never read")
    line.server.close()
    with pytest.raises((RedisError, OSError)):
        for _ in range(2):
            line.look()


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("never_whole", [b"$16000000\r\n", b"*16000000\r\n"], ids=["text", "list"])
def test_an_answer_without_end_is_given_up(wire, parser, monkeypatch, never_whole):
    """Once it is longer than any of ours; whole answers may come for ever."""
    most = 2**14
    monkeypatch.setattr(replies, "LARGEST", most)
    line = wire(parser)
    line.connection._sock = BoundedSocket(line.sock, 3.0)
    line.connection._parser.on_connect(line.connection)
    looking = replies_of(line.connection, line.owed)
    for _ in range(2 * most // len(ANSWERS)):
        line.owe(len(READ))
        line.say(ANSWERS)
        assert list(looking()) == READ
        line.owed.clear()
    line.owe(1)
    line.say(never_whole)
    with pytest.raises((OSError, RedisError)):
        for _ in range(2 * most // 1000):
            line.say(b":1\r\n" * 250)
            assert not list(looking())


# -- who reads -------------------------------------------------------------------------


@NEEDS_HIREDIS
def test_hiredis_is_past_the_layers_above_it(wire, monkeypatch):
    """Its replies are taken from it: redis-py's own way is not gone."""
    line = wire(_HiredisParser)
    monkeypatch.setattr(_HiredisParser, "read_response", None)
    line.owe(1)
    line.say(b":1\r\n")
    assert line.look() == [1]


@NEEDS_HIREDIS
def test_what_was_left_over_from_connecting_is_read(wire):
    """A server said more than it was asked; that is told, for whoever counts what is owed."""
    line = wire(_HiredisParser)
    line.connection._parser._reader.feed(b":7\r\n:8\r\n")
    line.owe(3)
    line.say(b":9\r\n")
    looking = replies_of(line.connection, line.owed)()
    assert list(itertools.islice(looking, 4)) == [7, 8, 9]


@pytest.mark.parametrize("parser", PARSERS)
def test_bytes_stay_bytes(wire, parser):
    """Also with ``?decode_responses=true`` in a URL: what a node stores need not be text."""
    line = wire(parser, decode_responses=True)
    line.owe(1)
    line.say(b"*2\r\n$2\r\nhi\r\n$1\r\n\xff\r\n")
    assert line.look() == [[b"hi", b"\xff"]]


@NEEDS_HIREDIS
def test_tls_is_read_by_redis_py(wire, monkeypatch):
    """A record that was decrypted lies where no selector sees it: all of it has to be read."""
    line = wire(_HiredisParser)
    monkeypatch.setattr(ssl, "SSLSocket", type(line.sock))
    monkeypatch.setattr(replies, "by_hiredis", None)
    assert list(replies_of(line.connection, [])()) == []


def test_the_python_parser_looks_once_for_what_is_owed(wire):
    """With the last reply that is owed it stops: another look would end in an error."""
    line, looks = wire(_RESP2Parser), []
    parser = line.connection._parser
    line.owe(2)
    line.say(b":1\r\n:2\r\n")
    real = parser.read_response
    parser.read_response = lambda **how: looks.append(how) or real(**how)
    assert line.look() == [1, 2]
    assert len(looks) == 2


@pytest.mark.parametrize("parser", PARSERS)
def test_a_look_that_is_given_up_loses_nothing(wire, parser):
    line = wire(parser)
    line.owe(3)
    line.say(b":1\r\n:2\r\n:3\r\n")
    assert next(iter(line._replies())) == 1
    del line.owed[:1]
    line.say(b":4\r\n")
    line.owe(1)
    assert line.look() == [2, 3, 4]
