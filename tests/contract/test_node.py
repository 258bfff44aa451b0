"""One connection to one node: whatever it does, its replies find their calls, or nobody's."""

from __future__ import annotations

import contextlib
import select
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
import redis
from celery import Celery
from redis._parsers import _HiredisParser, _RESP2Parser
from redis.utils import HIREDIS_AVAILABLE

from celery_redlock import RedlockTask, events
from celery_redlock.errors import ConfigurationError, LockTaken, QuorumUnavailable
from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.results import ReleaseOutcome
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.nodes import guard
from celery_redlock.lock.nodes import link as link_module
from celery_redlock.lock.nodes import node as node_module
from celery_redlock.lock.nodes.address import address_of
from celery_redlock.lock.nodes.link import Gone
from celery_redlock.lock.nodes.node import Node
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.records import line_key, marker_key, waiters_key
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts import requests
from celery_redlock.lock.scripts.requests import Marker
from celery_redlock.lock.scripts.votes import VoteKind
from celery_redlock.lock.waiting.waiting import InLine, leave_request, wait_request
from celery_redlock.plugin import plugin_for
from celery_redlock.reading import nodes as reading
from celery_redlock.reading.health import check
from support.clusters import in_cluster_mode
from support.eviction import evict, evicting
from support.fake_server import FakeServer
from support.fakes import FakeClock
from support.waiting import eventually

#: No node is late unless a test says so.
RULES = Rules(ttl=200, max_ttl=300, node_timeout=60)
A, B = "a" * 40, "b" * 40
LARGEST = link_module.LARGEST_UNSENT
#: After so much a node is late, and given up [s].
TOO_LONG = max(RULES.node_timeout, node_module.PATIENCE) + 1
#: How long the other end of a connection talks at most [s].
PATIENT = 30.0
PARSERS = [
    pytest.param(_RESP2Parser, id="python"),
    pytest.param(
        _HiredisParser,
        id="hiredis",
        marks=pytest.mark.skipif(not HIREDIS_AVAILABLE, reason="hiredis is not installed"),
    ),
]


def never(ballot):
    return False


def call(request, decided=never):
    return Round(request, 1, decided)


def acquire(name="n", token=A, fence=0):
    lease = Lease(name, token, fence, 200.0, 0.0, 0.0, {})
    return call(requests.acquire_request(RULES, lease, None))


def renew(name="n", token=A):
    return call(requests.renew_request(RULES, Lease(name, token, 0, 200.0, 0.0, 0.0), repair=True))


def release(name="n", token=A, decided=never):
    """Return a call that gives a lock back; nobody waits for it with *decided* None."""
    return call(requests.release_request(RULES, name, token), decided)


def inspect(name="n"):
    return call(requests.inspect_request(RULES, name))


class Line:
    """A node with its connection, driven as the fan-out would drive it."""

    def __init__(self, url, parser=None, rules=RULES, greeting=None):
        self.news = deque()
        self.node = Node(0, address_of(url), rules, self.news)
        if parser is not None:
            self.node.address._pool.connection_kwargs["parser_class"] = parser
        self.connection = self.node.address.connection()
        self.connection.connect()
        fingerprint = rules.fingerprint([self.node.label])
        if greeting is None:
            greeting = guard.greet(self.connection)
            guard.enrol(self.connection, rules, greeting.run_id, fingerprint, "bootstrap")
        self.node.attach(self.connection, greeting, fingerprint)

    def send(self, *calls):
        self.node.send(calls, clock.now())

    def drive(self, *calls, timeout=60.0):
        deadline = time.monotonic() + timeout
        while any(c.is_open for c in calls):
            left = deadline - time.monotonic()
            assert left > 0, [c.ballot for c in calls]
            if select.select([self.node.sock], [], [], left)[0]:
                self.node.read()
        return [c.ballot[0] for c in calls]

    def ask(self, *calls):
        self.send(*calls)
        return self.drive(*calls)

    def close(self):
        self.connection.disconnect()


@pytest.fixture
def line():
    with contextlib.ExitStack() as stack:

        def make(*args, **kwargs):
            made = Line(*args, **kwargs)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def locks():
    with contextlib.ExitStack() as stack:

        def make(*urls, bootstrap=True, **settings):
            rules = Rules(**{"ttl": 200, "max_ttl": 300, "node_timeout": 60, **settings})
            if bootstrap:
                told = reading.bootstrap(urls, rules)
                assert set(told.values()) == {"enrolled"}, told
            made = Redlock(urls, rules)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def fake():
    with contextlib.ExitStack() as stack:

        def start(answer):
            made = FakeServer(answer)
            stack.callback(made.close)
            return made

        yield start


GREETING = guard.Greeting("1" * 40, 100.0, flushed=False, replicas=0, version="fake")


def grant():
    """Return the reply that grants a lock, with the time of now: a clock that stood would jump."""
    return b"*3\r\n:1\r\n:%d\r\n$1\r\n0\r\n" % (time.time_ns() // 10**6)


LENGTH = len(grant())


# -- replies and their calls -----------------------------------------------------------


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("bytewise", [False, True], ids=["whole", "byte by byte"])
def test_every_call_gets_its_own_reply(contract_node, proxied_nodes, line, parser, bytewise):
    (link,) = proxied_nodes([contract_node])
    wire = line(link.url, parser)
    tokens = [f"{number:040d}" for number in range(30)]
    wire.ask(*[acquire(f"n{i}", token) for i, token in enumerate(tokens)])
    if bytewise:
        link.byte_by_byte(0.00002)
    for _ in range(3):
        votes = wire.ask(*[inspect(f"n{i}") for i in range(30)])
        assert [vote.value[:40].decode() for vote in votes] == tokens
    assert not wire.node._owed


@pytest.mark.parametrize("parser", PARSERS)
def test_a_reply_may_come_in_any_two_pieces(fake, line, parser):
    cut = iter(range(1, LENGTH))
    second_half = threading.Event()

    def answer(words, wire):
        place, reply = next(cut), grant()
        wire.sendall(reply[:place])
        second_half.wait(60)
        second_half.clear()
        return reply[place:]

    wire = line(fake(answer).url, parser, greeting=GREETING)
    for _ in range(1, LENGTH):
        asked = acquire()
        wire.send(asked)
        assert select.select([wire.node.sock], [], [], 60)[0]
        wire.node.read()
        assert asked.is_open
        second_half.set()
        assert wire.drive(asked)[0].kind is VoteKind.GRANTED


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("kept", [0, 1, 4, LENGTH - 1])
def test_a_connection_that_ends_in_a_reply_answers_nothing(fake, line, parser, kept):
    def answer(words, wire):
        wire.sendall(grant()[:kept])
        wire.shutdown(socket.SHUT_RDWR)

    wire = line(fake(answer).url, parser, greeting=GREETING)
    asked = [acquire(f"n{i}") for i in range(3)]
    wire.send(*asked)
    with pytest.raises(Gone) as gone:
        wire.drive(*asked)
    wire.node.detach(gone.value)
    assert {c.ballot[0].kind for c in asked} == {VoteKind.UNREACHABLE}
    assert wire.node.connection is None
    wire.send(later := acquire())
    assert later.ballot[0].reason == str(gone.value)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "nonsense",
    [
        b":1\r\n",
        b"*0\r\n",
        b"*1\r\n:1\r\n",
        b"*3\r\n:1\r\n:1000\r\n$1\r\nx\r\n",
        b"?\r\n",
        b"$-1\r\n",
    ],
)
def test_a_reply_that_makes_no_sense_ends_the_connection(fake, line, parser, nonsense):
    wire = line(fake(lambda *_: nonsense).url, parser, greeting=GREETING)
    asked = acquire()
    wire.send(asked)
    with pytest.raises(Gone) as gone:
        wire.drive(asked)
    wire.node.detach(gone.value)
    assert asked.ballot[0].kind is VoteKind.UNREACHABLE


@pytest.mark.parametrize("parser", PARSERS)
def test_a_reply_that_nobody_asked_for_ends_the_connection(fake, line, parser):
    """One reply too many means that the count is wrong: nothing from there is believed."""
    wire = line(fake(lambda *_: grant() * 2).url, parser, greeting=GREETING)

    def read_again():
        select.select([wire.node.sock], [], [], 0.1)
        wire.node.read()

    with pytest.raises(Gone, match="nobody asked"):
        wire.ask(acquire())
        eventually(read_again, "end of the connection")


def test_a_node_that_takes_no_bytes_is_given_up_and_never_waited_for(fake, line):
    stalled = threading.Event()
    wire = line(fake(lambda *_: stalled.wait() and None).url, greeting=GREETING)
    try:
        with pytest.raises(Gone):  # if it blocked, it would do so until this test is given up
            for number in range(10_000):
                wire.node.send([release("x" * 100, decided=None)] * 50, clock.now() + number * 1e-9)
    finally:
        stalled.set()


# -- late ------------------------------------------------------------------------------


def test_a_late_reply_is_dropped_and_does_not_shift_the_others(contract_node, proxied_nodes, line):
    (link,) = proxied_nodes([contract_node])
    wire = line(link.url)
    assert wire.ask(acquire("mine", A))[0].kind is VoteKind.GRANTED
    link.lose_replies()
    late = acquire("mine", B)
    wire.send(late)
    late.is_open = False  # as the fan-out does when the time is up
    link.pass_through()
    votes = wire.ask(inspect("mine"), acquire("other", B))
    assert late.ballot == [None]
    assert votes[0].value.startswith(A.encode())
    assert votes[1].kind is VoteKind.GRANTED


def test_a_suspect_is_sent_releases_only_until_it_has_answered(contract_node, line):
    rules = Rules(ttl=200, max_ttl=300, node_timeout=0.5)
    wire = line(contract_node.url, rules=rules)
    wire.ask(acquire("mine", A))
    contract_node.pause()
    try:
        wire.send(slow := inspect("mine"))
        ((_, sent),) = wire.node._owed
        late = sent + rules.node_timeout + 0.1
        asked, freed = acquire("other", B), release("mine", A, decided=None)
        wire.node.send([asked, freed], late)
        assert asked.ballot[0] == node_module.Vote(VoteKind.UNREACHABLE, reason="no answer in time")
        assert [type(e) for e in wire.news] == [events.NodeUp, events.NodeDown]
    finally:
        contract_node.resume()
    wire.drive(slow)
    eventually(lambda: wire.node.read() or not wire.node._owed, "end of the queue")
    assert type(wire.news[-1]) is events.NodeUp
    votes = wire.ask(inspect("mine"), inspect("other"))
    assert [vote.value for vote in votes] == [b"", b""]


def test_a_suspect_that_is_given_up_is_not_said_to_be_down_again(contract_node, line):
    """Once is enough, until it is up again. Twin: one that nobody suspected is said to be."""
    wire = line(contract_node.url)
    wire.ask(acquire("mine", A))
    contract_node.pause()
    try:
        wire.send(inspect("mine"))
        wire.node.suspect(clock.now())
        wire.node.detach(Gone("no answer for 2 s"))
    finally:
        contract_node.resume()
    assert [type(e) for e in wire.news] == [events.NodeUp, events.NodeDown]
    other = line(contract_node.url)
    other.node.detach(Gone("closed"))
    assert [type(e) for e in other.news] == [events.NodeUp, events.NodeDown]


def test_a_suspect_that_keeps_up_again_votes_again_although_it_is_busy(fake, line, monkeypatch):
    """It need not owe nothing for that: its oldest debt must be young. Twin: an old one is not."""
    ticked = FakeClock()
    monkeypatch.setattr(clock, "now", ticked)
    asked = []

    def answer(words, wire):  # is one behind all the time
        asked.append(words)
        return b"*2\r\n:1\r\n:0\r\n" if len(asked) > 1 else None

    rules = Rules(ttl=200, max_ttl=300, node_timeout=0.5)
    wire = line(fake(answer).url, greeting=GREETING, rules=rules)
    wire.send(release(decided=None))
    wire.node.suspect(clock.now())
    ticked.advance(rules.node_timeout + 0.1)
    wire.node.read()
    assert wire.node.suspect_since is not None
    wire.send(release(decided=None))
    eventually(lambda: wire.node.read() or wire.node.suspect_since is None, "its return")
    assert wire.node._owed


def test_a_node_that_owes_an_answer_for_seconds_is_given_up(contract_node, line):
    wire = line(contract_node.url)
    contract_node.pause()
    try:
        wire.send(slow := inspect())
        with pytest.raises(Gone, match="no answer for 2 s"):
            wire.node.send([release()], clock.now() + TOO_LONG)
        wire.node.detach(Gone("no answer"))
        assert slow.ballot[0].kind is VoteKind.UNREACHABLE
    finally:
        contract_node.resume()


# -- what a connection does not take at once ------------------------------------------------


class Narrow:
    """A socket that takes so many bytes at a time, after it would block so often."""

    def __init__(self, sock, room, blocked=1):
        self._sock, self._room, self._blocked, self._left = sock, room, blocked, 0

    def __getattr__(self, name):
        return getattr(self._sock, name)

    def send(self, data):
        if self._left:
            self._left -= 1
            raise BlockingIOError
        self._left = self._blocked
        return self._sock.send(data[: self._room])


@pytest.mark.parametrize("room", [1, 2, 7, 64, 1000])
def test_what_does_not_go_out_at_once_goes_out_in_order(contract_node, line, room):
    wire = line(contract_node.url)
    wire.node.sock = Narrow(wire.node.sock, room)
    mine, another = acquire("mine", A), inspect("mine")
    wire.send(mine, another)
    wire.send(note := release("mine", A, decided=None), last := inspect("mine"))
    assert wire.node.unsent
    while wire.node.unsent:
        wire.node.flush()
    votes = wire.drive(mine, another, last)
    assert votes[0].kind is VoteKind.GRANTED
    assert votes[1].value.startswith(A.encode())
    assert votes[2].value == b""
    assert not wire.node._owed
    assert not note.is_open


def test_a_node_owes_no_answer_to_what_was_not_sent(contract_node, line, monkeypatch):
    """Nobody sends on while nobody asks: whoever asks next does, and the node can answer then."""
    wire = line(contract_node.url)
    wire.node.sock = narrow = Narrow(wire.node.sock, 50)
    wire.send(*[release(decided=None) for _ in range(20)])
    later = clock.now() + TOO_LONG
    monkeypatch.setattr(clock, "now", lambda: later)
    while len(wire.node.unsent) > 200:
        wire.node.flush()
    wire.send(first := inspect())
    assert wire.node.suspect_since is None
    assert not [what for what in wire.news if isinstance(what, events.NodeDown)]
    narrow._blocked = narrow._left = 10_000
    monkeypatch.setattr(clock, "now", lambda: later + TOO_LONG)
    with pytest.raises(Gone, match="no answer for 2 s"):
        wire.send(inspect())  # it could have taken more, and did not
    assert first.is_open


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_a_node_that_took_nothing_for_a_while_gets_what_was_meant_for_it(
    contract_node, tls_port, certificate, line, is_tls
):
    """A buffer is full where the network is slow: that is no reason to connect anew."""
    tls = f"rediss://127.0.0.1:{tls_port}/0?ssl_ca_certs={certificate[0]}"
    wire = line(tls if is_tls else contract_node.url)
    wire.node.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    wire.ask(acquire("mine", A))
    contract_node.pause()
    try:
        filling = [release("x" * 2000, decided=None) for _ in range(LARGEST // 2500)]
        while not wire.node.unsent:
            wire.send(*filling)
        wire.send(release("mine", A, decided=None), last := inspect("mine"))
    finally:
        contract_node.resume()

    def is_done():
        wire.node.flush()
        if select.select([wire.node.sock], [], [], 0.01)[0]:
            wire.node.read()
        return not last.is_open

    eventually(is_done, "answer to the last request")
    assert last.ballot[0].value == b""


# -- scripts that the node forgot ---------------------------------------------------------


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("verb", [acquire, renew, release, inspect])
def test_a_forgotten_script_is_sent_again(contract_node, line, parser, verb):
    wire = line(contract_node.url, parser)
    wire.ask(acquire())
    (known,) = wire.ask(verb())
    wire.ask(release(), acquire())
    with redis.Redis.from_url(contract_node.url) as client:
        client.script_flush()
    (again,) = wire.ask(verb())
    assert again.kind is known.kind
    assert again.value == known.value
    assert not wire.node._owed
    assert wire.ask(verb())[0].kind is not VoteKind.UNREACHABLE


def test_what_nobody_waits_for_survives_a_script_flush_too(contract_node, line):
    wire = line(contract_node.url)
    wire.ask(acquire())
    with redis.Redis.from_url(contract_node.url) as client:
        client.script_flush()
        marker = requests.mark_request(RULES, Marker("m", "done", 30.0))
        wire.send(release(decided=None), call(marker, None))
        (vote,) = wire.ask(inspect())
        eventually(lambda: wire.node.read() or not wire.node._owed, "end of the queue")
        assert vote.kind is not VoteKind.UNREACHABLE
        assert wire.ask(inspect())[0].value == b""
        assert client.get(marker_key("redlock", "m")) == b"done"


def test_that_somebody_waits_survives_a_script_flush_too(contract_node, line):
    """Nobody waits for the answer, and yet the node votes on it: it is told with its boot id."""
    wire = line(contract_node.url)
    one = InLine("n", "c" * 32, 0.0, {}, "c" * 16)
    with redis.Redis.from_url(contract_node.url) as client:
        client.script_flush()
        wire.send(call(wait_request(RULES, one), None))
        wire.ask(inspect())
        eventually(lambda: wire.node.read() or not wire.node._owed, "end of the queue")
        assert client.hkeys(waiters_key(RULES.prefix, "n")) == [b"c" * 32]
        client.script_flush()
        wire.send(call(leave_request(RULES, "n", one.who), None))
        wire.ask(inspect())
        eventually(lambda: wire.node.read() or not wire.node._owed, "end of the queue")
        assert not client.exists(waiters_key(RULES.prefix, "n"), line_key("redlock", "n"))


@pytest.mark.parametrize("verb", [acquire, renew])
def test_a_grant_that_nobody_waits_for_is_not_repeated(contract_node, line, verb):
    """What would give a lock to somebody who has left is dropped with its script."""
    wire = line(contract_node.url)
    with redis.Redis.from_url(contract_node.url) as client:
        client.script_flush()
    wire.send(abandoned := verb())
    abandoned.is_open = False
    assert wire.ask(inspect())[0].value == b""


# -- errors of a server ---------------------------------------------------------------------


@pytest.mark.parametrize("parser", PARSERS)
def test_a_full_node_says_so_and_still_releases(redis_nodes, line, parser):
    """Out of memory is an unreachable vote that names it; a release needs no memory."""
    (server,) = redis_nodes(1)
    wire = line(server.url, parser)
    wire.ask(acquire("held", A))
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)
        (vote,) = wire.ask(acquire("other", B))
        assert vote.kind is VoteKind.UNREACHABLE
        assert "OOM" in vote.reason or "maxmemory" in vote.reason
        assert wire.ask(release("held", A))[0].kind is VoteKind.GRANTED
        client.config_set("maxmemory", 0)
        assert wire.ask(acquire("other", B))[0].kind is VoteKind.GRANTED
        assert client.exists("redlock:lock:held") == 0


@pytest.mark.parametrize("parser", PARSERS)
def test_a_busy_node_is_unreachable_and_comes_back(redis_nodes, line, parser):
    (server,) = redis_nodes(1)
    wire = line(server.url, parser)
    with redis.Redis.from_url(server.url) as client:
        client.config_set("lua-time-limit", 5)
        blocker = redis.Redis.from_url(server.url)

        def block():
            with contextlib.suppress(redis.RedisError):
                blocker.eval("while true do end", 0)

        loop = threading.Thread(target=block)
        loop.start()
        try:

            def busy():
                (vote,) = wire.ask(acquire())
                return vote.kind is VoteKind.UNREACHABLE and vote

            vote = eventually(busy, "BUSY")
            assert "BUSY" in vote.reason or "busy" in vote.reason
        finally:
            eventually(lambda: _kill_script(client), "SCRIPT KILL")
            loop.join()
            blocker.close()
        assert wire.ask(acquire())[0].kind is VoteKind.GRANTED


def _kill_script(client):
    with contextlib.suppress(redis.ResponseError):
        client.script_kill()
        return True
    return False


@pytest.mark.parametrize("parser", PARSERS)
def test_a_loading_node_is_left_and_asked_anew(fake, line, parser):
    loading = b"-LOADING Redis is loading the dataset in memory\r\n"
    wire = line(fake(lambda *_: loading).url, parser, greeting=GREETING)
    asked = acquire()
    wire.send(asked)
    with pytest.raises(Gone, match="loading"):
        wire.drive(asked)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "said",
    [
        "MOVED 2639 127.0.0.1:7001",
        "ASK 2639 127.0.0.1:7001",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "CLUSTERDOWN The cluster is down",
        "MOVED nowhere",
    ],
)
def test_a_server_that_says_that_another_one_is_the_node_is_left(fake, line, parser, said):
    """No vote, and the connection is dropped, so that the node is found anew."""
    wire = line(fake(lambda *_: b"-%b\r\n" % said.encode()).url, parser, greeting=GREETING)
    asked = acquire()
    wire.send(asked)
    with pytest.raises(Gone):
        wire.drive(asked)
    wire.node.detach(Gone("moved"))
    assert asked.ballot[0].kind is VoteKind.UNREACHABLE


@pytest.mark.parametrize("parser", PARSERS)
def test_another_error_is_no_reason_to_leave(fake, line, parser):
    """The twin: it costs one vote."""
    wire = line(fake(lambda *_: b"-ERR MOVED or not\r\n").url, parser, greeting=GREETING)
    asked = acquire()
    wire.send(asked)
    wire.drive(asked)
    assert asked.ballot[0].reason == "MOVED or not"


def test_a_master_that_became_a_replica_is_left(redis_nodes, line):
    """READONLY is no vote, and the connection is dropped so that the node is greeted anew."""
    server, other = redis_nodes(2)
    wire = line(server.url)
    with redis.Redis.from_url(server.url) as client:
        client.replicaof("127.0.0.1", other.port)
    asked = acquire()
    wire.send(asked)
    with pytest.raises(Gone, match=r"(?i)read ?only|closed|reset"):
        wire.drive(asked)
    wire.node.detach(Gone("readonly"))
    assert asked.ballot[0].kind is VoteKind.UNREACHABLE


def test_a_worker_warns_of_a_node_that_has_replicas(redis_nodes, caplog):
    """Whoever has one may think of swapping the two."""
    server, replica = redis_nodes(2)
    app = Celery("shop", set_as_current=False)
    app.conf.update(redlock_nodes=[server.url], broker_url=server.url, redlock_node_timeout=1.0)
    app.Task = RedlockTask
    with redis.Redis.from_url(replica.url) as copy, redis.Redis.from_url(server.url) as master:
        copy.replicaof("127.0.0.1", server.port)
        eventually(lambda: master.info("replication")["connected_slaves"], "a replica")
    plugin_for(app).check()
    assert "has 1 replica" in caplog.text
    assert "REPLICAOF" in caplog.text


def test_a_node_can_be_connected_any_number_of_times(contract_node):
    address = address_of(contract_node.url)
    for _ in range(300):
        connection = address.connection()
    connection.connect()
    connection.disconnect()


# -- who may connect, and to what -------------------------------------------------------------


@pytest.mark.parametrize(
    ("login", "words"),
    [("", "Authentication required"), (":wr0ng@", "invalid"), ("nobody:wr0ng@", "invalid")],
)
def test_a_refused_login_is_told_without_the_password(redis_nodes, locks, login, words):
    (server,) = redis_nodes(1)
    with redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", "s3cret")
    lock = locks(f"redis://{login}127.0.0.1:{server.port}/0", bootstrap=False)
    (problem,) = check(lock).values()
    assert words in problem
    with pytest.raises(QuorumUnavailable) as refusal:
        lock.acquire("n")
    assert words in str(refusal.value)
    assert "wr0ng" not in str(refusal.value) + repr(lock)


def test_a_password_and_an_acl_user_are_let_in(redis_nodes, locks):
    (server,) = redis_nodes(1)
    with redis.Redis.from_url(server.url) as client:
        client.acl_setuser(
            "shop", enabled=True, passwords=["+p@ss"], keys=["redlock:*"], commands=["+@all"]
        )
        client.config_set("requirepass", "s3cret")
    for login in (":s3cret", "shop:p%40ss"):
        lock = locks(f"redis://{login}@127.0.0.1:{server.port}/0")
        lease = lock.acquire("n")
        lease = lock.extend(lease)
        assert lock.inspect("n")[0].holder["token"] == lease.token[:8]
        assert lock.release(lease) is ReleaseOutcome.RELEASED


def test_an_acl_user_without_the_right_commands_is_told_so(redis_nodes, locks):
    (server,) = redis_nodes(1)
    with redis.Redis.from_url(server.url) as client:
        client.acl_setuser(
            "poor", enabled=True, passwords=["+x"], keys=["*"], commands=["+@all", "-info"]
        )
    lock = locks(f"redis://poor:x@127.0.0.1:{server.port}/0", bootstrap=False)
    (problem,) = check(lock).values()
    assert "permission" in problem
    assert "info" in problem


def test_a_replica_is_unfit(redis_nodes, locks):
    master, replica = redis_nodes(2)
    with redis.Redis.from_url(replica.url) as client:
        client.replicaof("127.0.0.1", master.port)
    lock = locks(replica.url, bootstrap=False)
    with pytest.raises(ConfigurationError, match="must be a master"):
        check(lock)
    with pytest.raises(QuorumUnavailable, match="must be a master"):
        lock.acquire("n")
    assert "must be a master" in reading.bootstrap([replica.url], RULES)[lock.labels[0]]


def test_every_vote_of_a_node_that_may_evict_is_given_with_a_look(redis_nodes, locks):
    """Also over a connection that was there before it evicted a key."""
    (server,) = redis_nodes(1)
    client = evicting(server)
    lock = locks(server.url)
    lock.acquire("n")
    evict(client)
    with pytest.raises(QuorumUnavailable, match="may evict keys"):
        lock.acquire("n")


def test_a_cluster_node_is_unfit(redis_nodes, locks):
    (server,) = redis_nodes(1, extra_args=in_cluster_mode())
    with pytest.raises(ConfigurationError, match=r"redis\+cluster://.*cluster-enabled no"):
        check(locks(server.url, bootstrap=False))


def test_a_server_that_is_no_cluster_is_unfit_as_one(redis_nodes, locks):
    """The reverse: nothing would be won, and no failover be noticed."""
    (server,) = redis_nodes(1)
    url = server.url.replace("redis://", "redis+cluster://")
    with pytest.raises(ConfigurationError, match=r"does not run in cluster mode.* redis://"):
        check(locks(url, bootstrap=False))


@pytest.mark.parametrize(
    "answer",
    [
        lambda words, wire: b"+OK\r\n",
        lambda words, wire: b"$5\r\nhello\r\n",
        lambda words, wire: b"$12\r\nrole:master\n\r\n",
        lambda words, wire: wire.shutdown(socket.SHUT_RDWR),
        lambda words, wire: b"HTTP/1.1 400 Bad Request\r\n\r\n",
        lambda words, wire: b"-ERR unknown command\r\n",
    ],
    ids=["ok", "text", "half an INFO", "closes", "http", "error"],
)
def test_something_that_is_no_redis_is_unreachable_and_tried_again(fake, locks, answer):
    server = fake(answer)
    lock = locks(server.url, bootstrap=False, node_timeout=0.1)
    with pytest.raises(QuorumUnavailable) as refusal:
        lock.acquire("n")
    assert lock.labels[0] in refusal.value.votes
    with contextlib.suppress(ConfigurationError):
        assert check(lock)
    tries = len(server.wires)
    eventually(lambda: len(server.wires) > tries, "another try")


def _is_used(lock):
    lease = lock.acquire("n")
    with pytest.raises(LockTaken) as taken:
        lock.acquire("n")
    assert taken.value.holder["token"] == lease.token[:8]
    lease = lock.extend(lease)
    assert lease.fence
    assert lock.release(lease) is ReleaseOutcome.RELEASED


@pytest.mark.parametrize("parser", PARSERS)
def test_a_url_that_asks_for_resp3_changes_nothing(contract_node, locks, monkeypatch, parser):
    monkeypatch.setattr("redis.connection.DefaultParser", parser)
    lock = locks(f"{contract_node.url}?protocol=3")
    lock.fanout._addresses[0]._pool.connection_kwargs["parser_class"] = parser
    _is_used(lock)
    assert str(lock.fanout.nodes[0].connection.protocol) == "2"


def test_a_unix_socket_works_as_well(redis_nodes, locks, tmp_path_factory):
    path = tmp_path_factory.mktemp("s") / "redis.sock"
    redis_nodes(1, extra_args=("--unixsocket", str(path)))
    lock = locks(f"unix://{path}")
    _is_used(lock)
    assert str(path) in lock.labels[0]


@pytest.fixture
def certificate(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.fixture
def tls_port(contract_node, certificate):
    """
    Port of something that speaks TLS and forwards to `contract_node`.

    The embedded Valkey is built without TLS; what is tested is our side of it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    listener = socket.create_server(("127.0.0.1", 0))
    wires = []

    def pump(source, sink):
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(65536):
                sink.sendall(data)
        for wire in (source, sink):
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                raw, _ = listener.accept()
                with contextlib.suppress(OSError):
                    outside = context.wrap_socket(raw, server_side=True)
                    inside = socket.create_connection(("127.0.0.1", contract_node.port))
                    wires.extend((outside, inside))
                    for pair in ((outside, inside), (inside, outside)):
                        threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()
    for wire in wires:
        wire.close()


def test_tls_works_as_well(tls_port, certificate, locks, line):
    url = f"rediss://127.0.0.1:{tls_port}/0?ssl_cert_reqs=required&ssl_ca_certs={certificate[0]}"
    _is_used(locks(url))
    for parser in (p.values[0] for p in PARSERS if HIREDIS_AVAILABLE or p.id == "python"):
        wire = line(url, parser)
        tokens = [f"{number:040d}" for number in range(200)]
        names = [f"{parser.__name__}{'n' * 90}{i}" for i in range(200)]
        wire.ask(*[acquire(*pair) for pair in zip(names, tokens, strict=True)])
        votes = wire.ask(*[inspect(name) for name in names])
        assert [vote.value[:40].decode() for vote in votes] == tokens


def test_a_tls_node_with_an_unknown_certificate_is_unreachable(tls_port, locks):
    lock = locks(f"rediss://127.0.0.1:{tls_port}/0", bootstrap=False)
    (problem,) = check(lock).values()
    assert "certificate" in problem.lower()


def test_nobody_is_listened_to_without_end(monkeypatch):
    monkeypatch.setattr(link_module, "LONGEST_FAREWELL", 0.2)
    ours, theirs = socket.socketpair()

    has_said_all = threading.Event()

    def talk():
        ends = time.monotonic() + PATIENT
        with contextlib.suppress(OSError):
            while time.monotonic() < ends:
                theirs.send(bytes(2**12))
            has_said_all.set()

    talker = threading.Thread(target=talk)
    with theirs:
        talker.start()
        link_module.read_out(SimpleNamespace(_sock=ours, disconnect=ours.close))
        talker.join()
    assert not has_said_all.is_set()
