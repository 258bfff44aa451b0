"""What one connection has done, another one finds, whatever a node keeps for either of them."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from support.both import TINY, Both

#: How many random sequences are tried on each kind of node.
SEQUENCES = 60
#: Reads, and then writes, in one script: two of them at once must not read the same.
COUNT = b"""
local sum = 0
for _, key in ipairs(KEYS) do
  redis.call('SET', key, (redis.call('GET', key) or 0) + 1, 'PX', 86400000)
  sum = sum + redis.call('GET', key)
end
return sum
"""
MOVE = b"""
local found = redis.call('HGET', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], found or 'new')
redis.call('ZADD', KEYS[3], redis.call('HLEN', KEYS[1]), ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return {found, redis.call('HLEN', KEYS[2]), redis.call('ZRANGE', KEYS[3], 0, -1)}
"""

some = st.sampled_from
KEYS = some([b"a", b"b"])
HASHES = some([b"h", b"i"])
FIELDS = some([b"f", b"g"])
LIVES = some([b"86400000", b"86400000", TINY])
STEPS = st.one_of(
    st.tuples(st.just(b"SET"), KEYS, some([b"1", b"2"]), st.just(b"PX"), LIVES),
    st.tuples(st.just(b"GET"), KEYS),
    st.tuples(st.just(b"DEL"), KEYS | HASHES, some([b"z", b"s"])),
    st.tuples(st.just(b"RENAME"), HASHES, HASHES),
    st.tuples(st.just(b"PTTL"), KEYS | HASHES),
    st.tuples(
        *map(st.just, (b"XADD", b"s", b"MAXLEN", b"~", b"100", b"*", b"e")), some([b"1", b"2"])
    ),
    st.tuples(*map(st.just, (b"EVAL", COUNT, b"2")), KEYS, KEYS),
    st.tuples(*map(st.just, (b"EVAL", MOVE, b"3")), HASHES, HASHES, st.just(b"z"), FIELDS, LIVES),
)


def raw(client):
    client.response_callbacks.clear()
    return client


def test_connections_in_turn_do_the_same_as_one(contract_node):
    """A node in memory has none; so whatever a connection keeps of its own shows."""
    with ExitStack() as stack:
        one, *others = (
            stack.enter_context(redis.Redis.from_url(contract_node.url)) for _ in range(3)
        )
        wires = [raw(other) for other in others]

        @settings(max_examples=SEQUENCES)
        @given(st.lists(st.tuples(some([0, 1]), STEPS), min_size=1, max_size=16))
        def tell(story):
            both = Both(one)
            with both.story():
                for which, words in story:
                    both._raw = wires[which]
                    both.tell(*words)
                both.compare()

        tell()


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_scripts_of_many_connections_come_one_after_the_other(contract_node, names):
    """Whatever the order in which they name their keys, and none gives up on another."""
    threads, turns = 4, 12

    def work(keys):
        with redis.Redis.from_url(contract_node.url) as client:
            answers.extend(client.eval(COUNT, len(keys), *keys) for _ in range(turns))

    answers: list[int] = []
    orders = [names if n % 2 else names[::-1] for n in range(threads)]
    workers = [threading.Thread(target=work, args=(order,)) for order in orders]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    with redis.Redis.from_url(contract_node.url) as client:
        assert {int(client.get(name)) for name in names} == {threads * turns}
    assert sorted(answers) == [len(names) * (n + 1) for n in range(threads * turns)]
