"""One visit to a node brings several answers: what it does not tell costs no other."""

from __future__ import annotations

import pytest
import redis

from celery_redlock.lock.nodes.address import addresses_of
from celery_redlock.lock.nodes.guard import exchange, replies
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap, connected
from celery_redlock.reading.places import read_places
from support.liar import encoded, endless, honest, lying
from support.stored import ROOMY

RULES = Rules(**ROOMY)


@pytest.fixture
def node(redis_nodes):
    (node,) = redis_nodes(1)
    with redis.Redis.from_url(node.url) as client:
        client.set("redlock:lock:a", "a1" * 20 + "{}", px=600_000)
        client.xadd("redlock:journal", {"e": '{"id": "1", "event": "TaskSkipped", "at": 1.0}'})
    return node


@pytest.fixture
def liar(node):
    """What stands before that node, and says the truth until it is told to lie."""
    with lying(node.port, honest) as liar:
        bootstrap([liar.url], RULES)
        yield liar


def read(url):
    places = read_places([url], RULES, {"a": 2}, 10)
    (status,) = places.all[0].nodes
    return status.state, [bool(place.views) for place in places.all], len(places.records)


def test_all_is_told(liar):
    """The twin of those below."""
    assert read(liar.url) == ("up", [True, False], 1)


def in_place_of(name, lie):
    def told(command, truth):
        return lie(command, truth) if command[0].upper() == name else iter([encoded(truth)])

    return told


def refusal(_command, _truth):
    yield b"-NOPERM this user has no permissions\r\n"


def nonsense(_command, _truth):
    yield b":7\r\n"


@pytest.mark.parametrize(
    ("command", "lie", "found"),
    [
        (b"XREVRANGE", refusal, ("up", [True, False], 0)),
        (b"XREVRANGE", nonsense, ("up", [True, False], 0)),
        (b"XREVRANGE", endless, ("up", [True, False], 0)),
        (b"EVAL", refusal, ("down", [False, False], 1)),
        (b"EVAL", nonsense, ("down", [False, False], 1)),
        (b"EVAL", endless, ("down", [False, False], 0)),
        (b"SET", refusal, ("unfit", [True, False], 1)),
        (b"SET", endless, ("down", [False, False], 0)),
        (b"INFO", refusal, ("down", [True, False], 1)),
        (b"INFO", nonsense, ("unfit", [True, False], 1)),
        (b"INFO", endless, ("down", [False, False], 0)),
        (b"EVALSHA", refusal, ("down", [True, False], 1)),
    ],
)
def test_what_a_node_does_not_tell_costs_no_other_answer(liar, command, lie, found):
    """But for what comes behind an answer that never ends."""
    liar.lie = in_place_of(command, lie)
    assert read(liar.url) == found


def test_an_error_leaves_no_answer_behind(node):
    (address,) = addresses_of([node.url])
    with connected(address) as connection:
        commands = (b"ECHO", b"1"), (b"NONSENSE",), (b"ECHO", b"2")
        one, error, two = replies(connection, *commands)
        assert (one, type(error), two) == (b"1", redis.ResponseError, b"2")
        with pytest.raises(redis.ResponseError):
            exchange(connection, *commands)
        assert exchange(connection, (b"ECHO", b"3")) == [b"3"]
