"""
Replies that no script of ours gives: a vote that could be one of ours, or a dropped connection.

A node is trusted to tell the truth, not to be well: a proxy in between, another server at its
address, or a bug of its own may answer anything. Nothing of that may come out of an acquire or a
release, and nothing that cannot be a grant may count as one.
"""

from __future__ import annotations

import contextlib
import enum
import math
import socket
import threading
from collections import deque

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis._parsers import _HiredisParser, _RESP2Parser
from redis.connection import Connection
from redis.utils import HIREDIS_AVAILABLE

from celery_redlock import LockKeyError, LockTaken, QuorumUnavailable, Redlock
from celery_redlock.beat import slot_records as slots
from celery_redlock.beat.slot_votes import claim_is_decided, last_of
from celery_redlock.lock import clock
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.nodes.address import address_of
from celery_redlock.lock.nodes.guard import Greeting, Unfit, greet, read_info
from celery_redlock.lock.nodes.link import Gone
from celery_redlock.lock.nodes.node import Node
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts import requests, votes
from celery_redlock.lock.scripts.scripting import Script, pack
from celery_redlock.lock.scripts.votes import Verdict, Vote, VoteKind, holder_of, judge
from celery_redlock.reading.health import probe
from celery_redlock.reading.nodes import bootstrap, node_statuses
from celery_redlock.unique.requests import (
    Start,
    Trigger,
    end_request,
    reserve_request,
    start_request,
)
from celery_redlock.unique.reserving import is_decided
from fuzz.hostile import a_reply, as_resp, impostor

RULES = Rules(ttl=60, max_ttl=60, node_timeout=3.0)  # a node that stands still is not a bad one
TOKEN = "a" * 40
LEASE = Lease("n", TOKEN, 7, 20.0, 0.0, 0.0)
TRIGGER = Trigger("n", 60.0, {})
START = Start({}, TOKEN, "id/0/0", 0.0, 60.0)
CLAIM = slots.Claim("beat/entry", 1.8e9, TOKEN, 7, 60.0)
#: All that is ever put to a node in a round, and what decides it.
ASKED = {
    "acquire": (requests.acquire_request(RULES, LEASE, "m"), votes.acquire_is_decided),
    "renew": (requests.renew_request(RULES, LEASE, repair=True), votes.acquire_is_decided),
    "release": (requests.release_request(RULES, "n", TOKEN), votes.acquire_is_decided),
    "inspect": (requests.inspect_request(RULES, "n"), lambda ballot: not holder_of(ballot)),
    "probe": (requests.probe_request(RULES), votes.acquire_is_decided),
    "reserve": (reserve_request(RULES, TRIGGER, TOKEN, 1), is_decided),
    "start": (start_request(RULES, "n", TOKEN, START), is_decided),
    "end": (end_request(RULES, "n", TOKEN, "over", 0.0), is_decided),
    "claim": (slots.claim_request(RULES, CLAIM), claim_is_decided),
    "look": (slots.look_request(RULES, "beat/entry"), lambda ballot: not last_of(ballot)),
}
GREETED = Greeting("e" * 40, 100.0, flushed=False, replicas=0, version="9")
PARSERS = [
    pytest.param(_RESP2Parser, id="python"),
    pytest.param(
        _HiredisParser,
        id="hiredis",
        marks=pytest.mark.skipif(not HIREDIS_AVAILABLE, reason="hiredis is not installed"),
    ),
]
#: Of numbers that scripts write; a Lua number holds no larger one exactly.
LARGEST = 2**53


def node_asked(kind, nodes=1):
    request, decided = ASKED[kind]
    call = Round(request, nodes, decided)
    node = Node(0, address_of("redis://127.0.0.1:1/0"), RULES, deque())
    node._owed.append((call, clock.now()))
    return node, call


def vote_for(kind, reply):
    """Return the vote that a node's *reply* makes; None if the connection is given up."""
    node, call = node_asked(kind)
    node._replies = lambda: iter([reply])
    try:
        node.read()
    except Gone:
        return None
    return call.ballot[0]


def assert_possible(vote):
    assert isinstance(vote.kind, enum.Enum)  # of locks, reservations or slots
    assert type(vote.fence) is int
    assert 0 <= vote.fence <= LARGEST
    assert type(vote.ttl) is float
    assert 0 <= vote.ttl < math.inf
    assert type(vote.value) is bytes
    assert type(vote.node_now) is float
    assert math.isfinite(vote.node_now)
    assert type(vote.amount) is int
    assert vote.amount >= 0
    assert vote.in_words()


def assert_well(kind, reply):
    vote = vote_for(kind, reply)
    if vote is None:
        return
    assert_possible(vote)
    assert ASKED[kind][1]([vote, None, None]) in (True, False)
    assert judge([vote]) in Verdict
    assert isinstance(holder_of([vote]), dict)
    if vote.kind is not VoteKind.UNREACHABLE:
        assert isinstance(reply, list)
        assert type(reply[0]) is int
        assert type(reply[1]) is int


@settings(max_examples=150)
@given(kind=st.sampled_from(sorted(ASKED)), reply=a_reply())
@example(kind="acquire", reply=[1, 1000, b"-1"])
@example(kind="acquire", reply=[1, 1000, b"9" * 31])
@example(kind="acquire", reply=[1, 1000, b"1_000"])
@example(kind="acquire", reply=[1, 1000, 7.5])
@example(kind="acquire", reply=[True, 1000, b"7"])
@example(kind="acquire", reply=[1.0, 1000, b"7"])
@example(kind="acquire", reply=[[1], 1000, b"7"])
@example(kind="acquire", reply=b"\x01\x02\x03")
@example(kind="acquire", reply=b"\0\1\2\3\4\5")
@example(kind="acquire", reply=[0, 1000, 5000, [b"x"], b"0"])
@example(kind="acquire", reply=[0, 1000, 5000, None, b"0"])
@example(kind="acquire", reply=[0, 1000, 10**400, b"x", b"0"])
@example(kind="acquire", reply=[0, 10**400, 5000, b"x", b"0"])
@example(kind="acquire", reply=[1, math.nan, b"7"])
@example(kind="acquire", reply=[-3, 1000, b"\xff"])
@example(kind="acquire", reply=[-3, 1000, 7])
@example(kind="acquire", reply=[-2, 1000, -(10**400)])
@example(kind="reserve", reply=[4, 1000, b"7", 0, b"x", b"many"])
@example(kind="start", reply=[1, 1000, b"7", None, 0])
@example(kind="claim", reply=[1, 1000, 0, None])
@example(kind="look", reply=[1, 1000, b"9" * 25, b"settled"])
@example(kind="look", reply=[1, 1000, b"-5", b"settled"])
def test_a_reply_is_a_possible_vote_or_ends_the_connection(kind, reply):
    assert_well(kind, reply)


def test_a_reader_that_believes_anything_is_seen(monkeypatch):
    """The twin: one that takes any reply for a grant."""
    trusting = Script("", grant_of, guarded=True)
    request = requests.Request(trusting, (), ())
    monkeypatch.setitem(ASKED, "acquire", (request, votes.acquire_is_decided))
    with pytest.raises(AssertionError):
        assert_well("acquire", [1, 1000, b"-1"])
    with pytest.raises(AssertionError):
        assert_well("acquire", [True, 1000, b"7"])


def grant_of(reply):
    return Vote(VoteKind.GRANTED, int(reply[2]), node_now=1.0)


# --- bytes on a connection ------------------------------------------------------------------


BROKEN = [
    b":abc\r\n",
    b":\r\n",
    b":" + b"9" * 5000 + b"\r\n",
    b"$abc\r\n",
    b"$-7\r\n",
    b"*abc\r\n",
    b"*-7\r\n",
    b"*1\r\n" * 5000 + b":1\r\n",
    b"\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"-\r\n",
    b"-NOSCRIPT\r\n",
    b"+\xff\xfe\r\n",
    b"\0" * 100,
    b"*3\r\n:1\r\n:1000\r\n",
    b"*3\r\n:1\r\n:1000\r\n$1\r\n7\r\n" * 3,
]
PIECES = st.sampled_from(
    [b"\r\n", b":1", b":1000", b"*3\r\n", b"$1\r\n", b"7", b"-ERR x", b"+OK", b"$-1", b"_", b",1.5"]
)
STREAMS = (
    st.sampled_from(BROKEN)
    | st.binary(max_size=60)
    | st.lists(PIECES | st.binary(max_size=4), max_size=8).map(b"".join)
    | a_reply().map(as_resp)
)


def read_stream(parser, stream):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        node, call = node_asked("acquire")
        node._owed.clear()
        connection = Connection(parser_class=parser, protocol=2)
        connection._sock = ours
        connection._parser.on_connect(connection)
        node.attach(connection, GREETED, "f" * 16)
        try:
            node.send([call], clock.now())
            theirs.sendall(stream)
            theirs.shutdown(socket.SHUT_WR)
            for _ in range(3):
                node.read()
        except Gone:
            pass
        finally:
            vote = call.ballot[0]
            node.detach(Gone("over"))
        return vote


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stream=STREAMS)
@example(stream=BROKEN[0])
@example(stream=BROKEN[2])
@example(stream=BROKEN[7])
def test_any_bytes_are_a_possible_vote_or_end_the_connection(parser, stream):
    vote = read_stream(parser, stream)
    if vote is not None:
        assert_possible(vote)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("stream", BROKEN)
def test_broken_bytes_end_the_connection(parser, stream):
    vote = read_stream(parser, stream)
    if vote is not None:
        assert_possible(vote)


# --- what a server tells of itself ------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(
            ["role", "run_id", "uptime_in_seconds", "connected_slaves", "redis_version"]
        ),
        st.text(max_size=12) | st.sampled_from(["master", "abc", "-1", "nan", "9" * 400, "1e400"]),
    )
)
def test_what_a_server_tells_is_read_or_it_is_unfit(fields):
    told = "\r\n".join(f"{name}:{value}" for name, value in fields.items()).encode(
        "utf-8", "replace"
    )
    assert isinstance(read_info(told), dict)
    connection = Answering(told)
    try:
        greeting = greet(connection)
    except Unfit:
        return
    assert math.isfinite(greeting.uptime)
    assert greeting.replicas >= 0


class Answering:
    def __init__(self, told):
        self._told = told

    def pack_commands(self, commands):
        """Return nothing: nobody reads it."""

    def send_packed_command(self, command):
        """Send nothing."""

    def read_response(self, **_):
        return self._told


GARBAGE = {
    "numbers": lambda words: b":5\r\n",
    "nothing": lambda words: b"$-1\r\n",
    "a word": lambda words: b"+OK\r\n",
    "no number": lambda words: b":abc\r\n",
    "a huge number": lambda words: b":" + b"9" * 5000 + b"\r\n",
    "nesting": lambda words: b"*1\r\n" * 5000 + b":1\r\n",
    "an endless script": lambda words: b"-NOSCRIPT No matching script\r\n",
    "text with a first byte of 1": lambda words: as_resp(b"\x01\x02\x03\x04\x05"),
    "text with a first byte of 0": lambda words: as_resp(b"\0\1\2\3\4\5"),
    "a holder that is a list": lambda words: as_resp([0, 1000, 5000, [b"x"], b"0"]),
    "a marker that is no text": lambda words: as_resp([-3, 1000, b"\xff"]),
    "a fence below zero": lambda words: as_resp([1, 1000, b"-1"]),
    "a fence that no node writes": lambda words: as_resp([1, 1000, b"1" + b"0" * 30]),
    "an endless lease": lambda words: as_resp([0, 1000, 10**400, b"x" * 40, b"0"]),
}


@contextlib.contextmanager
def mixed(good, bad, answer):
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(impostor(answer, run_id=f"{i:040x}")).url for i in range(bad)]
        locks = Redlock([*good, *fakes], RULES)
        stack.callback(locks.close)
        bootstrap([*good, *fakes], RULES)
        yield locks


def in_time(work, patience=60.0):
    found = []

    def run():
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001  told on below
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience)
    assert found, f"has not ended within {patience:g} s"
    return found[0]


#: One node suffices to know that an execution has finished, so a bad one can keep others waiting.
OUTVOTED = [what for what in GARBAGE if what != "a marker that is no text"]


@pytest.mark.parametrize("what", OUTVOTED)
def test_a_majority_of_good_nodes_grants_beside_a_bad_one(five_nodes, what):
    with mixed([node.url for node in five_nodes[:2]], 1, GARBAGE[what]) as locks:
        lease = in_time(lambda: locks.acquire("n"))
        assert isinstance(lease, Lease), repr(lease)
        assert lease.fence is not None
        assert 0 < lease.fence <= LARGEST
        assert isinstance(in_time(lambda: locks.inspect("n")), list)
        assert in_time(lambda: locks.extend(lease)).token == lease.token
        assert in_time(lambda: locks.release(lease)) == "RELEASED"
        assert isinstance(in_time(lambda: locks.acquire("n")), Lease)


@pytest.mark.parametrize("what", GARBAGE)
def test_a_majority_of_bad_nodes_never_grants(five_nodes, what):
    with mixed([five_nodes[0].url], 2, GARBAGE[what]) as locks:
        outcome = in_time(lambda: locks.acquire("n"))
        assert isinstance(outcome, (QuorumUnavailable, LockTaken)), repr(outcome)
        assert str(outcome)
        assert isinstance(in_time(lambda: locks.inspect("n")), list)
        assert in_time(lambda: locks.release(LEASE)) in ("UNKNOWN", "EXPIRED")
        assert isinstance(in_time(lambda: probe(locks)), list)


@pytest.mark.parametrize("what", GARBAGE)
def test_an_operator_is_told_of_a_node_that_makes_no_sense(five_nodes, what):
    with impostor(GARBAGE[what]) as fake:
        fake.greeting = GARBAGE[what]
        nodes = [five_nodes[0].url, five_nodes[1].url, fake.url]
        bootstrap(nodes[:1], RULES)
        statuses = in_time(lambda: node_statuses(nodes, RULES))
        assert isinstance(statuses, list), repr(statuses)
        assert statuses[2].state in ("down", "unfit", "unmarked")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(min_size=0, max_size=300) | st.sampled_from(["\ud800", "\udcff", "\0", "*"]))
def test_any_name_is_a_lock_or_refused(five_nodes, name):
    locks = Redlock([five_nodes[0].url], RULES)
    try:
        bootstrap([five_nodes[0].url], RULES)
        try:
            lease = locks.acquire(name)
        except LockKeyError:
            return
        assert locks.release(lease) == "RELEASED"
    finally:
        locks.close()


def test_packed_words_are_bytes():
    """The impostor reads what is really sent."""
    assert pack(b"a", b"") == b"*2\r\n$1\r\na\r\n$0\r\n\r\n"
