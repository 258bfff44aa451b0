"""What a process hears from the nodes of whose turn has come, and when it counts."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import queue
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from redis.exceptions import NoPermissionError

from celery_redlock.lock import listener as module
from celery_redlock.lock.listener import Listener
from support.fakes import FakeClock, token_of
from support.waiting import eventually

TOKEN, LOCK = token_of("t"), b"redlock:lock:a"
SUBSCRIBED = [b"subscribe", b"redlock:wake:x", 1]


class ScriptedConnection:
    """A connection on which a node says what a test has it say."""

    def __init__(self, *replies):
        self.replies = queue.Queue()
        for reply in replies:
            self.replies.put(reply)
        self.sent = []
        self.is_open = False
        self.looks = 0
        self._sock = None

    def connect(self):
        """Connect."""
        self.is_open = True
        self._sock = self

    def disconnect(self):
        """Hang up."""
        self.is_open = False

    def shutdown(self, how):
        """Have whoever reads see the end, as of a socket."""
        self.replies.put(ConnectionError("closed"))

    def send_command(self, *words, check_health=True):
        """Note what is sent."""
        self.sent.append(words)

    def can_read(self, timeout=0):
        """Wait for something to read."""
        self.looks += 1
        ends = time.monotonic() + timeout
        while self.replies.empty() and time.monotonic() < ends:
            time.sleep(0.001)
        return not self.replies.empty()

    def read_response(self, *, disable_decoding=False):
        """Return or raise what the node says."""
        assert disable_decoding
        reply = self.replies.get(timeout=60)
        if isinstance(reply, Exception):
            raise reply
        return reply


class ScriptedNode:
    """A node by its address: connections that are made of it, one after the other."""

    def __init__(self, number, *first):
        self.label = f"node-{number}"
        self.first = first or (SUBSCRIBED,)
        self.made = []

    def connection(self):
        """Return another connection."""
        self.made.append(ScriptedConnection(*self.first))
        return self.made[-1]

    def say(self, token=TOKEN, lock=LOCK):
        """Say whose turn has come."""
        eventually(lambda: self.made and self.made[-1].sent, "a subscription")
        self.made[-1].replies.put([b"message", b"redlock:wake:x", token.encode() + lock])


@pytest.fixture
def nodes(monkeypatch):
    """Three nodes; nothing takes long."""
    monkeypatch.setattr(module, "LOOK_EVERY", 0.02)
    monkeypatch.setattr(module, "SHORTEST_BACKOFF", 0.01)
    return [ScriptedNode(number) for number in range(3)]


@pytest.fixture
def clock(monkeypatch):
    """The time of the listener, moved by hand."""
    clock = FakeClock()
    monkeypatch.setattr(module, "clock", SimpleNamespace(now=clock, jitter=module.clock.jitter))
    return clock


@pytest.fixture
def ears(nodes):
    """A listener on them."""
    eventually(lambda: not listening(), "end of those of other tests")
    ears = Listener(nodes, "redlock")
    yield ears
    ears.close()
    eventually(lambda: not listening(), "end of all threads")


def listening():
    """Return the threads that listen to a node."""
    return [t for t in threading.enumerate() if t.name.startswith("redlock-listen-node-")]


def test_nothing_is_connected_before_somebody_waits(ears, nodes):
    """And then one connection per node, however many wait."""
    assert not listening()
    ears.expect(TOKEN)
    ears.expect(token_of("u"))
    eventually(lambda: all(node.made and node.made[0].sent for node in nodes), "subscriptions")
    assert [len(node.made) for node in nodes] == [1, 1, 1]
    channel = f"redlock:wake:{ears.channel()}".encode()
    assert nodes[0].made[0].sent == [("SUBSCRIBE", channel)]
    assert len(listening()) == 3


def test_a_majority_has_to_say_it(ears, nodes):
    """One node may have been restarted, or be cut off; its word is not enough."""
    ears.expect(TOKEN)
    nodes[0].say()
    assert not ears.wait(TOKEN, 0.1)
    nodes[0].say()
    assert not ears.wait(TOKEN, 0.1)
    nodes[2].say()
    assert ears.wait(TOKEN, 60)


def test_of_several_places_any_that_is_free_will_do(ears, nodes):
    """Two that are released at once may be told in either order: a majority is of nodes."""
    ears.expect(TOKEN)
    nodes[0].say(lock=b"redlock:lock:a")
    assert not ears.wait(TOKEN, 0.1)
    nodes[1].say(lock=b"redlock:lock:b")
    assert ears.wait(TOKEN, 60) in (b"redlock:lock:a", b"redlock:lock:b")


def test_who_is_called_is_called_once(ears, nodes):
    """Also if all nodes say it, and say it again."""
    calls, last = [], token_of("u")
    ears.expect(TOKEN, lambda _: calls.append(1))
    ears.expect(last)
    for token in (TOKEN, TOKEN, last):
        for node in nodes:
            node.say(token)
    eventually(lambda: len(ears._expected[last].heard) == len(nodes), "all heard")
    assert ears.wait(TOKEN, 0)
    assert calls == [1]


def test_who_is_forgotten_is_not_called(ears, nodes):
    """Nor is anybody else: what is said of them, and what is none of ours, is let pass."""
    calls = []
    ears.expect(TOKEN, lambda _: calls.append(TOKEN))
    other = token_of("u")
    ears.expect(other)
    ears.forget(TOKEN)
    for node in nodes:
        node.say()
        node.say("no token", b"")
        node.say(other)
    assert ears.wait(other, 60)
    assert calls == []


def test_what_was_heard_of_an_old_ticket_does_not_count_for_a_new_one(ears, nodes):
    """It is expected anew with nothing heard."""
    ears.expect(TOKEN)
    nodes[0].say()
    eventually(lambda: ears._expected[TOKEN].heard, "word")
    ears.expect(TOKEN)
    nodes[1].say()
    assert not ears.wait(TOKEN, 0.1)


def test_a_node_that_hangs_up_is_connected_again(ears, nodes):
    """What it says then counts as before."""
    ears.expect(TOKEN)
    nodes[0].say()
    nodes[1].made[0].replies.put(ConnectionError("gone"))
    eventually(lambda: len(nodes[1].made) == 2, "another connection")
    assert not nodes[1].made[0].is_open
    nodes[1].say()
    assert ears.wait(TOKEN, 60)


def test_a_node_that_refuses_is_asked_less_and_less_often(ears, nodes, monkeypatch):
    """For want of a right to its channel, say: not many times a second for ever."""
    pauses = []

    def jitter(shortest, longest):
        pauses.append((shortest, longest))
        return 0.001

    monkeypatch.setattr(module, "clock", SimpleNamespace(now=module.clock.now, jitter=jitter))
    nodes[0].first = (NoPermissionError("no rights to this channel"),)
    ears.expect(TOKEN)
    eventually(lambda: len(pauses) >= 12, "some tries")
    longest = [min(0.01 * 2**n, module.LONGEST_BACKOFF) for n in range(12)]
    assert pauses[:12] == [(pause / 2, pause) for pause in longest]
    nodes[1].say()
    nodes[2].say()
    assert ears.wait(TOKEN, 60)


def look_again(nodes):
    """Have the threads of all nodes look at what is, after whatever has happened before."""
    lines = [node.made[-1] for node in nodes]
    seen = [line.looks for line in lines]
    eventually(
        lambda: all(line.looks > looks + 2 for line, looks in zip(lines, seen, strict=True)),
        "looks",
    )


def test_a_silent_node_is_pinged_and_then_dropped(ears, nodes, clock):
    """A connection that a firewall forgot looks like one on which nothing is said."""
    ears.expect(TOKEN)
    eventually(lambda: all(node.made and node.made[0].looks for node in nodes), "looks")
    for _ in range(2):  # the second time it has been asked already
        clock.advance(module.PING_EVERY * 0.9)
        look_again(nodes)
    line = nodes[0].made[0]
    assert line.sent.count(("PING",)) == len(nodes[0].made) == 1
    clock.advance(module.PING_EVERY * 0.9)
    eventually(lambda: len(nodes[0].made) == 2, "another connection")


def test_when_nobody_waits_any_more_the_connections_go(ears, nodes, clock, monkeypatch):
    """After a while; whoever waits then is heard again."""
    monkeypatch.setattr(module, "IDLE", 5.0)
    ears.expect(TOKEN)
    eventually(lambda: all(node.made and node.made[0].looks for node in nodes), "looks")
    clock.advance(6.0)
    look_again(nodes)
    assert len(listening()) == 3
    ears.forget(TOKEN)
    look_again(nodes)
    assert len(listening()) == 3
    clock.advance(6.0)
    eventually(lambda: not listening(), "end of all threads")
    assert not any(node.made[0].is_open for node in nodes)
    ears.expect(TOKEN)
    eventually(lambda: all(len(node.made) == 2 for node in nodes), "connections again")
    nodes[0].say()
    nodes[1].say()
    assert ears.wait(TOKEN, 60)


def test_a_closed_listener_hears_nothing_until_somebody_waits_again(ears, nodes):
    """As the connections for locks do."""
    ears.expect(TOKEN)
    eventually(lambda: all(node.made and node.made[0].sent for node in nodes), "subscriptions")
    ears.close()
    eventually(lambda: not listening(), "end of all threads")
    assert not any(node.made[0].is_open for node in nodes)
    ears.expect(TOKEN)
    eventually(lambda: all(len(node.made) == 2 for node in nodes), "connections again")


def test_closing_waits_for_no_look(ears, nodes, monkeypatch):
    """A process that ends, or forks after it, has no thread of ours."""
    monkeypatch.setattr(module, "LOOK_EVERY", 600.0)
    ears.expect(TOKEN)
    eventually(lambda: all(node.made and node.made[0].sent for node in nodes), "subscriptions")
    ears.close()
    eventually(lambda: not listening(), "end of all threads")


class Interrupted(BaseException):
    """Raised by a signal."""


def strike(moment):
    """Return a tracer that raises at the line number *moment* from now, and what it counts."""
    count = itertools.count()

    def trace(_frame, event, _argument):
        if event == "line" and next(count) == moment:
            raise Interrupted
        return trace

    return trace, count


def apart(call):
    """Call in a generator, which takes along what Python 3.11 leaves of a raising tracer."""
    yield call()


def test_a_signal_locks_nobody_out_wherever_it_strikes(ears):
    """At any line of a wait, Python's own included: the threads that listen go on."""
    before = sys.gettrace()
    for moment in itertools.count():
        ears._expected[TOKEN] = module._Expected(lambda _: None)
        trace, count = strike(moment)
        gc.disable()  # what others have called at a collection is none of these lines
        with contextlib.suppress(Interrupted):
            sys.settrace(trace)
            try:
                next(apart(lambda: ears.wait(TOKEN, 0.001)))
            finally:
                sys.settrace(before)
                gc.enable()
        assert sys.exc_info() == (None, None, None)
        words = [(position, TOKEN.encode() + LOCK) for position in (0, 1)]
        hears = threading.Thread(target=lambda w=words: [ears._hear(*one) for one in w])
        hears.daemon = True
        hears.start()
        hears.join(timeout=60)
        assert not hears.is_alive(), moment
        assert ears.wait(TOKEN, 0) == LOCK
        if next(count) <= moment:
            break
    assert moment > 3


def test_who_is_struck_before_it_listens_leaves_it_to_the_next(ears, nodes, monkeypatch):
    """Nobody takes a node for listened to whose thread was never started."""

    def fail(_self):
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(Interrupted):
            ears.expect(TOKEN)
    ears.expect(TOKEN)
    eventually(lambda: all(node.made for node in nodes), "connections")


def test_two_that_expect_at_once_listen_once(ears, nodes):
    """The second thread of a node ends at once."""
    ears._start(0)
    for token in (TOKEN, TOKEN[::-1]):
        ears.expect(token)
    eventually(lambda: all(node.made and node.made[0].sent for node in nodes), "subscriptions")
    eventually(lambda: len(listening()) == len(nodes), "as many threads as nodes")
    assert [len(node.made) for node in nodes] == [1] * len(nodes)


def test_out_of_threads_everybody_comes_by_itself(ears, monkeypatch):
    """It is tried again with the next one that waits."""

    def fail(_self):
        msg = "can't start new thread"
        raise RuntimeError(msg)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        ears.expect(TOKEN)
        assert not ears.wait(TOKEN, 0.01)
    ears.expect(token_of("u"))
    eventually(lambda: len(listening()) == 3, "threads")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_has_ears_of_its_own_and_closes_its_copies(ears, nodes):
    """Else a node would take a parent that was killed for one that still listens."""
    ears.expect(TOKEN)
    eventually(lambda: all(node.made and node.made[0].sent for node in nodes), "subscriptions")
    mine = ears.channel()
    child = os.fork()
    if not child:
        is_new = ears.channel() != mine and not ears._expected and not ears._listening
        is_closed = not any(node.made[0].is_open for node in nodes)
        os._exit(0 if is_new and is_closed and not ears.wait(TOKEN, 0.01) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ears.channel() == mine
    assert all(node.made[0].is_open for node in nodes)


def test_one_node_is_a_majority_of_one():
    """As everywhere."""
    node = ScriptedNode(0)
    ears = Listener([SimpleNamespace(label=node.label, connection=node.connection)], "redlock")
    ears.expect(TOKEN)
    node.say()
    assert ears.wait(TOKEN, 60)
    ears.close()
