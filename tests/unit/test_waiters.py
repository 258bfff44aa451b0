"""Who waits for a lock, by what the nodes have: merged, the oldest first, and no secret shown."""

from __future__ import annotations

import json

import pytest

from celery_redlock.lock.records import encode_info, holder_payload
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.waiting.waiting import HEARD_FOR, NO_CHANNEL, InLine, wait_request
from celery_redlock.ops.as_json import waiter_as_json
from celery_redlock.reading.read_script import FEW, READ, arguments_of_read, read_stored
from celery_redlock.reading.stored import views_of
from celery_redlock.reading.waiters import oldest_since, recorded_waiters, waiters_of
from celery_redlock.testing.model import NodeModel
from support.fakes import FakeClock

RULES = Rules()
SINCE = 1.7e9
MINUTE = 60.0
CHANNEL = "c" * 16


def record(claimed=SINCE, first=SINCE, heard=SINCE + MINUTE, channel=CHANNEL, info=None):
    moments = b"%013d%013d" % (first * 1000, heard * 1000)
    return channel.encode() + b"0001" + moments + encode_info(holder_payload(info or {}, claimed))


def of(letter, since, **more):
    info = {"task": "shop.bill", "task_id": f"id-{letter}"}
    who = more.pop("who", letter * 32)
    return [who.encode(), record(since, since, info=info, **more)]


def node(*pairs, now=SINCE + MINUTE):
    return recorded_waiters([part for pair in pairs for part in pair], now)


def ids(found):
    return [it.task_id for it in found]


def test_all_nodes_together_say_who_waits_the_oldest_first():
    first, second, third = (of(letter, SINCE + i) for i, letter in enumerate("abc"))
    found = waiters_of([*node(third, first), *node(first, second), *node()])
    assert ids(found) == ["id-a", "id-b", "id-c"]
    assert [it.since for it in found] == [SINCE, SINCE + 1, SINCE + 2]
    payload = holder_payload({}, SINCE)
    assert (found[0].host, found[0].pid) == (payload["host"], payload["pid"])


def test_one_waits_since_the_node_that_has_known_of_it_longest_heard_of_it():
    """A node that was away, or has forgotten it, knows of it for a moment only."""
    late, early = of("a", SINCE + 30), of("a", SINCE)
    for order in ([*node(late), *node(early)], [*node(early), *node(late)]):
        (found,) = waiters_of(order)
        assert found.since == SINCE


def test_two_messages_of_one_task_id_are_two():
    """Each publish is an execution."""
    twice = of("a", SINCE), [b"b" * 32, of("a", SINCE + 5)[1]]
    assert ids(waiters_of(node(*twice))) == ["id-a", "id-a"]


def test_who_is_reached_by_no_hint_waits_nowhere():
    """A message on its way, or in a broker that delays it; since when it waits is known."""
    (found,) = waiters_of(node(of("a", SINCE, channel=NO_CHANNEL)))
    assert (found.since, found.host, found.pid) == (SINCE, None, None)


def test_what_was_heard_last_says_where_it_waits():
    """It was woken, and one node has not heard of that yet."""
    reached = of("a", SINCE, heard=SINCE + 2)
    for moment, is_there in ((SINCE + 1, True), (SINCE + 3, False)):
        aside = of("a", SINCE, heard=moment, channel=NO_CHANNEL)
        (found,) = waiters_of([*node(reached), *node(aside)])
        assert (found.host is not None) is is_there


def test_who_was_not_heard_of_for_long_waits_no_more():
    """As the nodes forget it: its message was purged, or its process is gone."""
    gone = of("a", SINCE, heard=SINCE)
    assert node(gone, now=SINCE + HEARD_FOR) == []
    assert len(node(gone, now=SINCE + HEARD_FOR - 0.001)) == 1


@pytest.mark.parametrize(
    ("claimed", "since"),
    [
        (SINCE - 1e6, SINCE),
        (SINCE + 7, SINCE + 7),
        (SINCE + 1e6, SINCE + MINUTE),
        (None, SINCE),
        ("1", SINCE),
    ],
)
def test_nobody_waits_since_before_a_node_knew_of_it_nor_since_later(claimed, since):
    """Its own clock may be wrong, or it lies: this is also how it stands in the line."""
    info = {"since": claimed}
    value = CHANNEL.encode() + b"0001%013d%013d" % (SINCE * 1000, (SINCE + MINUTE) * 1000)
    (found,) = node([b"a" * 32, value + encode_info(info)])
    assert found.waiter.since == since


def test_who_waits_in_the_process_may_have_no_task():
    pairs = [b"b" * 32, record(SINCE + 1, SINCE + 1)], [b"a" * 32, record()]
    found = waiters_of(node(*pairs))
    assert [(it.task, it.since) for it in found] == [(None, SINCE), (None, SINCE + 1)]


MINE = of("a", SINCE)
ODD = [
    [b"", MINE[1]],
    [b"A" * 32, MINE[1]],
    [b"a" * 31, MINE[1]],
    [b"a" * 33, MINE[1]],
    [b"\xff" * 32, MINE[1]],
    [b"a" * 32, b""],
    [b"a" * 32, None],
    [b"a" * 32, b"by hand"],
    [b"a" * 32, MINE[1][1:]],
    [b"a" * 32, b"\xff" * 80],
    [b"a" * 32, CHANNEL.encode() + b"000x" + MINE[1][20:]],
    [b"a" * 32, CHANNEL.encode() + b"0001" + b"-" + MINE[1][21:]],
    [b"a" * 32, MINE[1][:46]],
    [b"a" * 32, MINE[1][:46] + b"no JSON"],
    [b"a" * 32, MINE[1][:46] + b"[1]"],
    [b"a" * 32, MINE[1][:46] + b"[" * 100_000],
]


@pytest.mark.parametrize("odd", range(len(ODD)))
def test_what_others_wrote_is_passed_over(odd):
    assert node(ODD[odd]) == []
    assert ids(waiters_of(node(ODD[odd], MINE))) == ["id-a"]


@pytest.mark.parametrize(
    "info", [{"task": 1, "task_id": []}, {"task": "t", "task_id": "i", "pid": True, "host": {}}]
)
def test_a_description_of_any_shape_is_read(info):
    value = MINE[1][:46] + encode_info(info)
    (one,) = waiters_of(node([b"a" * 32, value]))
    assert {type(part) for part in (one.task, one.task_id, one.host)} <= {str, type(None)}
    assert one.pid is None


def test_no_part_of_a_token_is_shown():
    of_node = node(MINE)
    (found,) = waiters_of(of_node)
    for shown in (json.dumps(waiter_as_json(found)), repr(found), repr(of_node)):
        assert "aaaa" not in shown


def test_nobody_waits_since_nobody_knows_when():
    assert oldest_since([]) is None
    assert oldest_since(node(of("b", SINCE + 1), MINE)) == SINCE


# --- as nodes have it ------------------------------------------------------------------------


def read(node, most=10, names=("a",)):
    keys = [b"redlock:lock:" + name.encode() for name in names]
    arguments = arguments_of_read(keys, RULES.prefix, most)
    return read_stored(node.ask(b"EVAL", READ.source, *arguments), len(keys))


def test_what_a_quarantined_node_has_is_no_vote(held):
    """It may have forgotten who has the lock now; what it has is still told of it."""
    (before,) = read(held)
    held.ask(b"SET", b"redlock:node:quarantine", b"1", b"PX", b"60000")
    (after,) = read(held)
    assert before.value == after.value != b""
    views = [view for one in (before, after) for view in views_of("a", {"n": one})]
    assert [(view.votes, view.quarantined) for view in views] == [(["n"], []), ([], ["n"])]
    assert [view.is_held(1) for view in views] == [True, False]
    assert [view.is_unclear(1, 0) for view in views] == [False, True]


def wait(node, *letters, channel=CHANNEL):
    for letter in letters:
        info = {"task": "shop.bill", "task_id": f"id-{letter}"}
        one = InLine("a", f"{letter:0>32}", node.clock(), info, channel)
        request = wait_request(RULES, one)
        keys = (b"%d" % len(request.keys), *request.keys)
        unguarded = (*request.arguments[:-1], b"0", b"")
        node.ask(b"EVAL", request.script.source, *keys, *unguarded)
        node.clock.advance(1.0)


@pytest.fixture
def held():
    clock = FakeClock(SINCE)
    node = NodeModel(0, clock)
    node.clock = clock
    node.ask(b"SET", b"redlock:lock:a", b"e" * 40 + b"{}", b"PX", b"600000")
    return node


def test_those_who_wait_are_read_with_the_lock(held):
    wait(held, "b", "a")
    wait(held, "c", channel="")
    waited_for, other = read(held, names=("a", "b"))
    found = waiters_of(waited_for.waiters)
    assert ids(found) == ["id-b", "id-a", "id-c"]
    assert [it.since for it in found] == [SINCE, SINCE + 1, SINCE + 2]
    assert (waited_for.recorded, other.recorded) == (3, 0)
    assert waiters_of(other.waiters) == []
    (view,) = views_of("a", {"node": waited_for})
    assert (view.waiting, view.waiting_since) == (3, SINCE)


def test_who_was_not_heard_of_for_long_does_not_count(held):
    """The node has not forgotten it yet, as it does that when another one comes."""
    wait(held, "a")
    held.clock.advance(HEARD_FOR - 2.0)
    wait(held, "b")
    (stored,) = read(held)
    assert (stored.recorded, ids(waiters_of(stored.waiters))) == (1, ["id-b"])
    assert held.ask(b"HLEN", b"redlock:waiters:a") == 2


def test_of_very_many_the_oldest_are_read_and_all_counted(held):
    wait(held, "f", channel="")
    wait(held, *map(str, range(FEW)))
    (one,), (some,), (all_,) = (read(held, most) for most in (1, 3, FEW + 1))
    assert ids(waiters_of(one.waiters)) == ["id-0"]
    assert ids(waiters_of(some.waiters)) == ["id-0", "id-1", "id-2"]
    assert len(all_.waiters) == FEW + 1
    assert one.recorded == some.recorded == all_.recorded == FEW + 1
    (view,) = views_of("a", {"node": one})
    assert (view.waiting, view.waiting_since) == (FEW + 1, SINCE + 1)


def test_one_in_the_line_that_is_no_more_known_is_passed_over(held):
    """Somebody has written it there."""
    wait(held, *map(str, range(FEW + 2)))
    held.ask(b"ZADD", b"redlock:line:a", b"1", b"f" * 32 + CHANNEL.encode() + b"0001")
    (stored,) = read(held, 2)
    assert ids(waiters_of(stored.waiters)) == ["id-0"]


def test_nobody_waits_for_a_lock_that_is_only_held(held):
    """The twin: there is no moment."""
    (stored,) = read(held)
    (view,) = views_of("a", {"node": stored})
    assert (view.waiting, view.waiting_since) == (0, None)


@pytest.mark.parametrize("key", [b"redlock:waiters:a", b"redlock:line:a"])
@pytest.mark.parametrize("many", [1, FEW + 1])
def test_a_key_of_another_type_is_in_nobodys_way(held, key, many):
    wait(held, *map(str, range(many)))
    held.ask(b"SET", key, b"by hand")
    (stored,) = read(held)
    assert stored.value is not None
    is_known = key == b"redlock:line:a" and many == 1
    assert len(stored.waiters) == is_known
