"""
A node in memory says of queued markers what a real server does, whatever it is told.

As in `simulation.test_conformance`: both are told the same at the same moment, the clock of the
node in memory standing where the server's was when it was asked.
"""

from __future__ import annotations

import time

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_redlock.lock.guard import boot_marker
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts import ENROL, Keys, registered
from celery_redlock.testing.markers import MarkerNode
from celery_redlock.unique.queued import (
    AS_IT_IS,
    OVER,
    Begun,
    Trigger,
    end_request,
    enqueue_request,
    marker_keys,
    start_request,
)

RULES = Rules(ttl=20, max_ttl=30)
NAME = "report"
KEYS = Keys.of(RULES.prefix, NAME)
TINY, LONG = 0.003, 20.0
TOKENS = ["a" * 40, "a" * 32 + "b" * 8, "c" * 40, "d" * 40]  # the first two are of one owner
LOCKS = ["1" * 40, "2" * 40]
BOOT = boot_marker("r" * 40, "f" * 16)

some = st.sampled_from
ENQUEUE = st.tuples(
    st.just("enqueue"),
    some(TOKENS),
    some([LONG, LONG, TINY]),
    some([0.0, LONG, 40.0]),
    some([False, False, True]),
    some([b"", b"[1]", b"[2]"]),
    some([1, 2, 3, 2**53 - 1, 2**53]),
)
START = st.tuples(
    st.just("start"),
    some(TOKENS),
    some(LOCKS),
    some(["first", "second"]),
    some([0.0, LONG, TINY, AS_IT_IS, OVER]),
    some([LONG, TINY]),
)
WORDS = [OVER, "idle", "unstarted", "wait", "hand", "window", "ran"]
END = st.tuples(st.just("end"), some(TOKENS), some(WORDS), some([0.0, LONG, TINY]))
LOCK = st.tuples(st.just("lock"), some([*LOCKS, ""]))
STORIES = st.lists(st.one_of(ENQUEUE, ENQUEUE, START, START, END, LOCK), min_size=1, max_size=24)


class Both:
    """A server, and a node in memory."""

    def __init__(self, client):
        self.client = client
        self.clock, self.slack = 0.0, 0.0
        self.node = MarkerNode(0, lambda: self.clock / 1000.0)
        pipe = client.pipeline(transaction=False).flushall()
        for script in registered():
            pipe.script_load(script.source)
        pipe.execute()
        self.tell(ENROL, (KEYS.boot, KEYS.quarantine), (BOOT, b"31000", b"bootstrap"))

    def play(self, story):
        """Tell both *story*, and compare the answer to each step and all that is stored."""
        for step in story:
            what, *how = step
            getattr(self, what)(*how)
            if TINY in how:
                time.sleep(TINY + 0.002)  # what is so short is over then
            self.compare(step)

    def enqueue(self, token, life, window, expires, arguments, version):
        """Ask for the marker."""
        info = {"task_id": token[0]}
        trigger = Trigger(NAME, life, info, window=window, expires=expires, arguments=arguments)
        self.ask(enqueue_request(RULES, trigger, token, version))

    def start(self, token, lock, execution, alone, life):
        """Note that a task runs."""
        begun = Begun({"task_id": token[0]}, lock, execution, alone, life)
        self.ask(start_request(RULES, NAME, token, begun))

    def end(self, token, how, life):
        """End a marker."""
        self.ask(end_request(RULES, NAME, token, how, life))

    def lock(self, token):
        """Have a lock held, or nobody hold it."""
        pipe = self.client.pipeline(transaction=False).time()
        if token:
            pipe.set(KEYS.lock, token + "{}", px=60_000)
        else:
            pipe.delete(KEYS.lock)
        before, _, after = pipe.time().execute()
        self._set_clock(before, after)
        if token:
            self.node.put(KEYS.lock, token.encode() + b"{}", b"60000")
        else:
            self.node.delete(KEYS.lock)

    def ask(self, request):
        """Put a request to both."""
        boot = (BOOT,) if request.script.guarded else ()
        theirs, ours = self.tell(request.script, request.keys, (*request.arguments, *boot))
        theirs, ours = request.script.read(theirs), request.script.read(ours)
        near = {"ttl": 0.0, "node_now": 0.0}
        assert ours._replace(**near) == theirs._replace(**near)
        assert ours.ttl * 1000 == pytest.approx(theirs.ttl * 1000, abs=2 * self.slack + 2)

    def tell(self, script, keys, arguments):
        """Return what both answer."""
        words = (b"EVALSHA", script.sha, b"%d" % len(keys), *keys, *arguments)
        pipe = self.client.pipeline(transaction=False).time().execute_command(*words).time()
        before, theirs, after = pipe.execute()
        self._set_clock(before, after)
        return theirs, self.node.execute(words)

    def _set_clock(self, before, after):
        self.clock = before[0] * 1000.0 + before[1] / 1000.0
        self.slack = max(self.slack, after[0] * 1000.0 + after[1] / 1000.0 - self.clock)

    def compare(self, step):
        """Compare both markers."""
        allowed = 2 * self.slack + 2
        for key in marker_keys(RULES, NAME):
            pipe = self.client.pipeline(transaction=False).time().hgetall(key).pttl(key).time()
            before, theirs, left, after = pipe.execute()
            self._set_clock(before, after)
            ours = self.node.fields(key)
            assert set(ours) == set(theirs), step
            for field, value in theirs.items():
                if field in (b"until", b"window"):
                    assert int(ours[field]) == pytest.approx(int(value), abs=allowed), (step, field)
                else:
                    assert ours[field] == value, (step, field)
            assert self.node.rest_of(key) == pytest.approx(left, abs=allowed), step


def test_whatever_they_are_told_of_markers_both_do_the_same(contract_node):
    """Random stories, on servers of each kind."""
    with redis.Redis.from_url(contract_node.url) as client:

        @settings(max_examples=100)
        @given(STORIES)
        def tell(story):
            Both(client).play(story)

        tell()


A_STORY = [
    ("enqueue", TOKENS[0], LONG, LONG, False, b"[1]", 1),
    ("enqueue", TOKENS[2], LONG, LONG, False, b"[2]", 5),
    ("lock", LOCKS[0]),
    ("start", TOKENS[0], LOCKS[0], "first", 0.0, LONG),
    ("enqueue", TOKENS[2], LONG, LONG, False, b"[2]", 6),
    ("enqueue", TOKENS[3], LONG, LONG, False, b"[3]", 7),
    ("end", TOKENS[0], "window", 0.0),
    ("lock", ""),
    ("start", TOKENS[2], LOCKS[1], "first", LONG, LONG),
    ("end", TOKENS[0], OVER, 0.0),
    ("start", TOKENS[2], LOCKS[1], "first", LONG, LONG),
    ("end", TOKENS[2], OVER, 0.0),
]


@pytest.mark.parametrize(
    ("name", "stand_in"),
    [
        ("_merge", lambda self, marker, now, lock, _: self._refuse(marker, now, lock)),
        ("_end", lambda self, marker, *_: self.drop(marker.key)),
        ("_note_start", lambda *_: None),
        ("rename", lambda self, key, to: None),
    ],
)
def test_a_node_in_memory_that_does_something_else_is_found_out(
    contract_node, monkeypatch, name, stand_in
):
    """The comparison sees: each part of it is missed in one story."""
    with redis.Redis.from_url(contract_node.url) as client:
        Both(client).play(A_STORY)
        monkeypatch.setattr(MarkerNode, name, stand_in)
        with pytest.raises((AssertionError, KeyError)):
            Both(client).play(A_STORY)
