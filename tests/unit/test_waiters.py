"""Who waits for a lock, by what the nodes have: merged, the oldest first, and no secret shown."""

from __future__ import annotations

import json

import pytest

from celery_redlock.lock.records import encode_info, holder_payload
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.waiting import Ticket, wait_request
from celery_redlock.ops.listing import waiter_as_json
from celery_redlock.reading.stored import READ, arguments_of_read, read_stored, views_of
from celery_redlock.reading.waiters import NotedWaiters, noted_waiters, waiters_of
from celery_redlock.testing.model import NodeModel

RULES = Rules()
SINCE = 1.7e9


def ticket(letter, since, **more):
    """Return one that waits, whose ids are made of a letter."""
    info = {"task": "shop.bill", "task_id": f"id-{letter}"}
    token = more.pop("token", letter * 40)
    return Ticket("a", more.pop("who", letter * 32), since, info, token, "c" * 16, **more)


def node(*tickets, heard=SINCE):
    """Return what a node has of those who wait."""
    waiting = [part for it in tickets for part in (it.waits, b"%d" % (heard * 1000))]
    woken = [it for it in tickets if it.token]
    ready = [part for it in woken for part in (it.wakes, b"%d" % (it.since * 1000))]
    return noted_waiters(waiting, ready)


def ids(found):
    """Return the task ids in their order."""
    return [it.task_id for it in found]


def test_all_nodes_together_say_who_waits_the_oldest_first():
    """One node may lack what others have; nobody is listed twice."""
    first, second, third = (ticket(letter, SINCE + i) for i, letter in enumerate("abc"))
    found = waiters_of([node(third, first), node(first, second), node()])
    assert ids(found) == ["id-a", "id-b", "id-c"]
    assert [it.since for it in found] == [SINCE, SINCE + 1, SINCE + 2]
    payload = holder_payload({}, SINCE)
    assert (found[0].host, found[0].pid) == (payload["host"], payload["pid"])


def test_a_message_is_known_again_under_another_owner():
    """Its execution is what the nodes know it by; the token is its worker's."""
    (found,) = waiters_of([node(ticket("a", SINCE, token="f" * 40))])
    assert found.since == SINCE


def test_two_messages_of_one_task_id_are_two():
    """Each publish is an execution; which ticket is whose is not known, and both wait."""
    twice = ticket("a", SINCE), ticket("a", SINCE + 5, who="b" * 32, token="b" * 40)
    assert ids(waiters_of([node(*twice)])) == ["id-a", "id-a"]


def test_who_has_no_ticket_waits_since_nobody_knows_when():
    """It is last; with a ticket on any node that is known."""
    without = ticket("b", SINCE - 9, token="")
    found = waiters_of([node(ticket("a", SINCE), without)])
    assert ids(found) == ["id-a", "id-b"]
    assert (found[1].since, found[1].age, found[1].host) == (None, None, None)
    found = waiters_of([node(without), node(ticket("b", SINCE - 9))])
    assert found[0].since == SINCE - 9


def test_a_ticket_without_anybody_who_waits_counts_for_nothing():
    """It stays until the next release; whoever it was of has left."""
    gone = node(ticket("a", SINCE)).tickets
    assert waiters_of([NotedWaiters((), gone)]) == []


def test_who_waits_in_the_process_is_known_by_its_token():
    """A lock that no task takes has no task id."""
    one = Ticket("a", "a" * 32, SINCE, {}, "a" * 40, "c" * 16)
    two = Ticket("a", "b" * 32, SINCE + 1, {}, "b" * 40, "c" * 16)
    found = waiters_of([node(two, one)])
    assert [(it.task, it.since) for it in found] == [(None, SINCE), (None, SINCE + 1)]


ODD = [
    b"",
    b"by hand",
    b"a" * 32,
    b"A" * 32 + b"{}",
    b"a" * 31 + b"{}",
    b"a" * 32 + b"no JSON",
    b"a" * 32 + b"[1]",
    b"a" * 32 + b"[" * 100_000,
    b"\xff" * 80,
]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("score", [b"1", b"-1", b"nan", b"inf", b"x", b"1e300", b""])
def test_what_others_wrote_is_passed_over(odd, score):
    """Whoever else waits is found all the same."""
    mine = node(ticket("a", SINCE))
    others = noted_waiters([odd, score], [odd, score])
    assert others == NotedWaiters([], [])
    assert ids(waiters_of([others, mine])) == ["id-a"]


@pytest.mark.parametrize("score", [b"-1", b"nan", b"inf", b"x", b"1e300", b""])
def test_a_record_with_an_odd_score_is_passed_over(score):
    """It is no moment of ours; the twin is a score that is one."""
    record = ticket("a", SINCE).waits
    assert noted_waiters([record, score], []).waiting == []
    assert len(noted_waiters([record, b"1700000000000"], []).waiting) == 1


@pytest.mark.parametrize(
    "info", [{"task": 1, "task_id": []}, {"task": "t", "task_id": "i", "pid": True, "host": {}}]
)
def test_a_description_of_any_shape_is_read(info):
    """What is no text is not known."""
    odd = Ticket("a", "a" * 32, SINCE, info, "a" * 40, "c" * 16)
    record = b"a" * 40 + b"c" * 16 + encode_info(info)
    found = noted_waiters([odd.waits, b"1"], [record, b"1700000000000"])
    (one,) = waiters_of([found])
    assert {type(part) for part in (one.task, one.task_id, one.host)} <= {str, type(None)}
    assert one.pid is None


def test_no_part_of_a_token_is_shown():
    """Not in JSON, and not in the words for a debugger."""
    of_node = node(ticket("a", SINCE, token="f" * 40))
    (found,) = waiters_of([of_node])
    for shown in (json.dumps(waiter_as_json(found)), repr(found), repr(of_node)):
        assert "ffff" not in shown
        assert "aaaa" not in shown


# --- as nodes have it ------------------------------------------------------------------------


def read(node, most=10, names=("a",)):
    """Return what a node stores of the locks *names*."""
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


def wait(node, *tickets):
    """Have a node note that they wait."""
    for one in tickets:
        request = wait_request(RULES, one)
        keys = (b"%d" % len(request.keys), *request.keys)
        node.ask(b"EVAL", request.script.source, *keys, *request.arguments)


@pytest.fixture
def held():
    """A node on which somebody holds the lock."""
    node = NodeModel(0, lambda: SINCE + 60)
    node.ask(b"SET", b"redlock:lock:a", b"e" * 40 + b"{}", b"PX", b"30000")
    return node


def test_those_who_wait_are_read_with_the_lock(held):
    """As the scripts have written them; of a lock nobody waits for there is nothing."""
    wait(held, ticket("b", SINCE + 1), ticket("a", SINCE), ticket("c", SINCE + 2, token=""))
    waited_for, other = read(held, names=("a", "b"))
    assert ids(waiters_of([waited_for.waiters])) == ["id-a", "id-b", "id-c"]
    assert (waited_for.noted, other.noted) == (3, 0)
    assert waiters_of([other.waiters]) == []


def test_a_list_of_locks_says_since_when_the_oldest_waits(held):
    """Of each lock one ticket is read; how many wait is counted."""
    wait(held, *(ticket(letter, SINCE + i) for i, letter in enumerate("abc")))
    (stored,) = read(held, most=1)
    assert len(stored.waiters.tickets) == 1
    (view,) = views_of("a", {"node": stored})
    assert (view.waiting, view.waiting_since) == (3, SINCE)


def test_nobody_waits_since_nobody_knows_when(held):
    """The twin: without a ticket there is no moment."""
    (stored,) = read(held)
    (view,) = views_of("a", {"node": stored})
    assert (view.waiting, view.waiting_since) == (0, None)


@pytest.mark.parametrize("key", [b"redlock:waiting:a", b"redlock:ready:a"])
def test_a_key_of_another_type_is_in_nobodys_way(held, key):
    """The lock is read all the same."""
    wait(held, ticket("a", SINCE))
    held.ask(b"SET", key, b"by hand")
    (stored,) = read(held)
    assert stored.value is not None
    assert all(it.since is None for it in waiters_of([stored.waiters]))
