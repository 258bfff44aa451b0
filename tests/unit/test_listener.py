"""What a process hears from the nodes of locks that may be free, and how long it listens."""

from __future__ import annotations

import os
import queue
import threading
import time
from types import SimpleNamespace

import pytest
from redis.exceptions import NoPermissionError

from celery_redlock.lock.waiting import listener as module
from celery_redlock.lock.waiting.listener import Listener
from celery_redlock.lock.waiting.room import ThreadWaiting
from support.fakes import FakeClock
from support.waiting import eventually

LINE, OTHER = b"redlock:line:a", b"redlock:line:b"
SUBSCRIBED = [b"subscribe", b"redlock:wake:x", 1]


class ScriptedConnection:
    def __init__(self, *replies):
        self.replies = queue.Queue()
        for reply in replies:
            self.replies.put(reply)
        self.sent = []
        self.is_open = False
        self.looks = 0
        self._sock = None

    def connect(self):
        self.is_open = True
        self._sock = self

    def disconnect(self):
        self.is_open = False

    def shutdown(self, how):
        self.replies.put(ConnectionError("closed"))

    def send_command(self, *words, check_health=True):
        self.sent.append(words)

    def can_read(self, timeout=0):
        self.looks += 1
        ends = time.monotonic() + timeout
        while self.replies.empty() and time.monotonic() < ends:
            time.sleep(0.001)
        return not self.replies.empty()

    def read_response(self, *, disable_decoding=False):
        assert disable_decoding
        reply = self.replies.get(timeout=60)
        if isinstance(reply, Exception):
            raise reply
        return reply


class ScriptedNode:
    def __init__(self, number, *first):
        self.label = f"node-{number}"
        self.first = first or (SUBSCRIBED,)
        self.made = []
        self.has_moved = False

    def connection(self):
        self.made.append(ScriptedConnection(*self.first))
        return self.made[-1]

    def is_current(self, connection):
        return not self.has_moved or connection is not self.made[0]

    def say(self, message=LINE):
        eventually(lambda: self.made and self.made[-1].sent, "a subscription")
        begins = b"12345678" + b"-" * 32 if message in {LINE, OTHER} else b""
        self.made[-1].replies.put([b"message", b"redlock:wake:x", begins + message])


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setattr(module, "LOOK_EVERY", 0.02)
    monkeypatch.setattr(module, "SHORTEST_BACKOFF", 0.01)
    # What two nodes say is one release, however slow the machine is between the two.
    monkeypatch.setattr("celery_redlock.lock.waiting.room.BELATED", 600.0)
    return [ScriptedNode(number) for number in range(3)]


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(module, "clock", SimpleNamespace(now=clock, jitter=module.clock.jitter))
    return clock


@pytest.fixture
def ears(nodes):
    """A listener on them; what one node says alone counts in a minute."""
    eventually(lambda: not listening(), "end of those of other tests")
    ears = Listener(nodes, "redlock", lambda _: 60.0)
    yield ears
    ears.close()
    eventually(lambda: not listening(), "end of all threads")


class Registered(ThreadWaiting):
    """One that sleeps on when it is to be registered again, and counts that."""

    registrations = 0

    def register_again(self):
        self.registrations += 1


def wait_for(ears, line=LINE):
    waiting = Registered(line, 1.7e9)
    ears.enter(waiting)
    return waiting


def listening():
    return [t for t in threading.enumerate() if t.name.startswith("redlock-listen-node-")]


def test_nothing_is_connected_before_somebody_waits(ears, nodes):
    assert not listening()
    for line in (LINE, LINE, OTHER):
        wait_for(ears, line)
    eventually(lambda: all(node.made and node.made[0].sent for node in nodes), "subscriptions")
    assert [len(node.made) for node in nodes] == [1, 1, 1]
    channel = f"redlock:wake:{ears.channel()}".encode()
    assert nodes[0].made[0].sent == [("SUBSCRIBE", channel)]
    assert len(listening()) == 3


def test_all_are_registered_again_once_a_node_can_be_heard(ears, nodes):
    """Releases before that have taken them out of its line; also while it was away."""
    for node in nodes:
        node.first = (ConnectionError("no answer"),)
    everybody = [wait_for(ears, line) for line in (LINE, LINE, OTHER)]
    eventually(lambda: all(node.made[2:] for node in nodes), "some tries")
    assert [one.registrations for one in everybody] == [0, 0, 0]
    for known, node in enumerate(nodes, start=1):
        node.first = (SUBSCRIBED,)
        eventually(lambda n=known: {one.registrations for one in everybody} == {n}, "one more")
    nodes[1].made[-1].replies.put(ConnectionError("gone"))
    eventually(lambda: {one.registrations for one in everybody} == {4}, "the node again")
    look_again(nodes)
    assert {one.registrations for one in everybody} == {4}


def test_what_the_nodes_say_wakes_who_waits(ears, nodes):
    one, other = wait_for(ears), wait_for(ears, OTHER)
    for message in (b"", b"nonsense", b"redlock:line:c"):
        for node in nodes:
            node.say(message)
    nodes[0].say()
    nodes[0].say()
    assert not one.wait(0.1)
    nodes[2].say()
    assert one.wait(60)
    assert not other.wait(0.0)
    for node in nodes:
        node.say(OTHER)
    assert other.wait(60)


def test_who_listens_to_the_server_of_before_listens_to_the_next_one(ears, nodes):
    """After a failover, say: hints that are sent to it count as unheard. Others are left alone."""
    wait_for(ears)
    eventually(lambda: all(node.made and node.made[0].sent for node in nodes), "subscriptions")
    nodes[0].has_moved = True
    eventually(lambda: len(nodes[0].made) == 2 and nodes[0].made[1].sent, "another subscription")
    assert not nodes[0].made[0].is_open
    assert [len(node.made) for node in nodes[1:]] == [1, 1]


def test_one_node_counts_after_its_round_trip(nodes):
    """As it is: whoever is far away is believed later than whoever is near."""
    ears = Listener(nodes, "redlock", {0: 60.0, 1: 0.0}.__getitem__)
    one = wait_for(ears)
    nodes[0].say()
    assert not one.wait(0.1)
    ears.leave(one)
    two = wait_for(ears)
    nodes[1].say()
    assert two.wait(60)
    ears.close()


def test_who_left_is_not_woken_and_others_are(ears, nodes):
    gone, other = wait_for(ears), wait_for(ears, OTHER)
    nodes[0].say()
    ears.leave(gone)
    for node in nodes:
        node.say()
        node.say(OTHER)
    assert other.wait(60)
    assert not gone.wait(0.0)


def test_a_node_that_hangs_up_is_connected_again(ears, nodes):
    one = wait_for(ears)
    nodes[0].say()
    eventually(lambda: nodes[1].made and nodes[1].made[0].sent, "a subscription")
    nodes[1].made[0].replies.put(ConnectionError("gone"))
    eventually(lambda: len(nodes[1].made) == 2, "another connection")
    assert not nodes[1].made[0].is_open
    nodes[1].say()
    assert one.wait(60)


def test_a_node_that_refuses_is_asked_less_and_less_often(ears, nodes, monkeypatch):
    """For want of a right to its channel, say: not many times a second for ever."""
    pauses = []

    def jitter(shortest, longest):
        pauses.append((shortest, longest))
        return 0.001

    monkeypatch.setattr(module, "clock", SimpleNamespace(now=module.clock.now, jitter=jitter))
    nodes[0].first = (NoPermissionError("no rights to this channel"),)
    one = wait_for(ears)
    eventually(lambda: len(pauses) >= 12, "some tries")
    longest = [min(0.01 * 2**n, module.LONGEST_BACKOFF) for n in range(12)]
    assert pauses[:12] == [(pause / 2, pause) for pause in longest]
    nodes[1].say()
    nodes[2].say()
    assert one.wait(60)


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
    wait_for(ears)
    eventually(lambda: all(node.made and node.made[0].looks for node in nodes), "looks")
    for _ in range(2):  # the second time it has been asked already
        clock.advance(module.PING_EVERY * 0.9)
        look_again(nodes)
    line = nodes[0].made[0]
    assert line.sent.count(("PING",)) == len(nodes[0].made) == 1
    clock.advance(module.PING_EVERY * 0.9)
    eventually(lambda: len(nodes[0].made) == 2, "another connection")


def test_when_nobody_waits_any_more_the_connections_go(clock, ears, nodes, monkeypatch):
    monkeypatch.setattr(module, "IDLE", 5.0)
    gone = wait_for(ears)
    eventually(lambda: all(node.made and node.made[0].looks for node in nodes), "looks")
    clock.advance(6.0)
    look_again(nodes)
    assert len(listening()) == 3
    ears.leave(gone)
    look_again(nodes)
    assert len(listening()) == 3
    clock.advance(6.0)
    eventually(lambda: not listening(), "end of all threads")
    assert not any(node.made[0].is_open for node in nodes)
    one = wait_for(ears)
    eventually(lambda: all(len(node.made) == 2 for node in nodes), "connections again")
    nodes[0].say()
    nodes[1].say()
    assert one.wait(60)


def test_a_closed_listener_hears_nothing_until_somebody_waits_again(ears, nodes):
    wait_for(ears)
    eventually(lambda: all(node.made and node.made[0].sent for node in nodes), "subscriptions")
    ears.close()
    eventually(lambda: not listening(), "end of all threads")
    assert not any(node.made[0].is_open for node in nodes)
    wait_for(ears)
    eventually(lambda: all(len(node.made) == 2 for node in nodes), "connections again")


def test_closing_waits_for_no_look(ears, nodes, monkeypatch):
    """A process that ends, or forks after it, has no thread of ours."""
    monkeypatch.setattr(module, "LOOK_EVERY", 600.0)
    wait_for(ears)
    eventually(lambda: all(node.made and node.made[0].sent for node in nodes), "subscriptions")
    ears.close()
    eventually(lambda: not listening(), "end of all threads")


def test_who_is_struck_before_it_listens_leaves_it_to_the_next(ears, nodes, monkeypatch):
    """Nobody takes a node for listened to whose thread was never started."""

    def fail(_self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(KeyboardInterrupt):
            wait_for(ears)
    wait_for(ears)
    eventually(lambda: all(node.made for node in nodes), "connections")


def test_two_that_come_at_once_listen_once(ears, nodes):
    ears._start(0)
    for line in (LINE, OTHER):
        wait_for(ears, line)
    eventually(lambda: all(node.made and node.made[0].sent for node in nodes), "subscriptions")
    eventually(lambda: len(listening()) == len(nodes), "as many threads as nodes")
    assert [len(node.made) for node in nodes] == [1] * len(nodes)


def test_out_of_threads_everybody_comes_by_itself(ears, monkeypatch):
    def fail(_self):
        msg = "can't start new thread"
        raise RuntimeError(msg)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        assert not wait_for(ears).wait(0.01)
    wait_for(ears)
    eventually(lambda: len(listening()) == 3, "threads")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_has_ears_of_its_own_and_closes_its_copies(ears, nodes):
    """Else a node would take a parent that was killed for one that still listens."""
    one = wait_for(ears)
    eventually(lambda: all(node.made and node.made[0].sent for node in nodes), "subscriptions")
    mine = ears.channel()
    child = os.fork()
    if not child:
        is_new = ears.channel() != mine and ears.room.is_empty and not ears._listening
        is_closed = not any(node.made[0].is_open for node in nodes)
        os._exit(0 if is_new and is_closed and not one.wait(0.01) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ears.channel() == mine
    assert not ears.room.is_empty
    assert all(node.made[0].is_open for node in nodes)


def test_one_node_is_a_majority_of_one():
    node = ScriptedNode(0)
    ears = Listener([node], "redlock", lambda _: 60.0)
    one = wait_for(ears)
    node.say()
    assert one.wait(60)
    ears.close()


def test_who_waits_already_is_woken_after_a_close_once_somebody_listens(ears, nodes):
    waiting = wait_for(ears)
    eventually(lambda: all(node.made and node.made[-1].sent for node in nodes), "subscriptions")
    ears.close()
    eventually(lambda: not listening(), "end of all threads")
    ears.listen()
    for node in nodes:
        eventually(lambda node=node: len(node.made) > 1, "another connection")
        node.say()
    assert waiting.wait(60.0)
