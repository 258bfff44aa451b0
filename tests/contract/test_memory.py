"""
Nodes in memory run the scripts as real servers do, of each kind there is.

They run the very text that servers run, so what has to be held to servers is what is below it: the
commands that scripts call, how values cross between Redis and Lua, and what errors do.
"""

from __future__ import annotations

import re
import sys
import time
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from threading import Thread
from unittest import mock

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import (
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from celery_redlock.keyspace.commands import COMMANDS
from celery_redlock.lock.scripts.requests import (
    probe_request,
)
from celery_redlock.lock.scripts.scripting import registered
from celery_redlock.reading.read_script import EXPIRIES, READ
from celery_redlock.testing.model import NodeModel
from celery_redlock.unique.requests import (
    reservation_keys,
)
from support.both import Both
from support.eviction import POLICY, evict
from support.requests import (
    BOOT,
    KEYS,
    LINE,
    NAME,
    REQUESTS,
    RULES,
    TINY,
    WAITERS,
    X,
    enrolment,
    words_of,
)
from support.waiting import eventually

#: How many random sequences are tried on each kind of server.
SEQUENCES = 150
LONG = b"86400000"
#: Calls command after command: how many words, the words; answers with the last reply.
ONE_BY_ONE = b"""
local at, reply = 1, 'nothing'
while ARGV[at] do
  local words = tonumber(ARGV[at])
  reply = redis.call(unpack(ARGV, at + 1, at + words))
  at = at + 1 + words
end
return reply
"""

some = st.sampled_from
NAMES = some([b"a", b"b"])
FIELDS = some([b"f", b"g"])
VALUES = some([b"", b"1", b"007", b"9007199254740993", b"x\r\n\x00\xff"])
ODD_LENGTHS = [b"0", b"-1", b"1.5", b"no", b"05", b" 5", b"+5", b"5_0", b"9223372036854775807"]
LENGTHS = some([*[LONG] * 5, TINY, TINY, *ODD_LENGTHS])
SCORES = some([b"0", b"1", b"2", b"-inf", b"inf", b"1700000000000", b"0.1", b"nan", b"no"])
RANKS = some([b"0", b"0", b"1", b"-1", b"-2", b"5", b"no"])
PLAIN = st.one_of(
    st.tuples(st.just(b"GET"), NAMES),
    st.tuples(st.just(b"MGET"), NAMES, NAMES, st.just(b"none")),
    st.tuples(st.just(b"SET"), NAMES, VALUES),
    st.tuples(st.just(b"SET"), NAMES, VALUES, some([b"PX", b"px", b"PY"]), LENGTHS),
    st.tuples(st.just(b"DEL"), NAMES, NAMES),
    st.tuples(st.just(b"EXISTS"), NAMES, NAMES),
    st.tuples(st.just(b"PTTL"), NAMES),
    st.tuples(st.just(b"PEXPIRE"), NAMES, LENGTHS),
    st.tuples(st.just(b"RENAME"), NAMES, NAMES),
    st.tuples(st.just(b"HGET"), NAMES, FIELDS),
    st.tuples(st.just(b"HMGET"), NAMES, FIELDS, FIELDS),
    st.tuples(st.just(b"HSET"), NAMES, FIELDS, VALUES),
    st.tuples(st.just(b"HSET"), NAMES, FIELDS, VALUES, FIELDS, VALUES),
    st.tuples(st.just(b"HSET"), NAMES, FIELDS, VALUES, FIELDS),
    st.tuples(st.just(b"HDEL"), NAMES, FIELDS, FIELDS),
    st.tuples(st.just(b"HLEN"), NAMES),
    st.tuples(
        *(st.just(word) for word in (b"XADD",)), NAMES, st.just(b"MAXLEN"), st.just(b"~"),
        some([b"100", b"x"]), st.just(b"*"), st.just(b"e"), VALUES,
    ),
    st.tuples(st.just(b"ZADD"), NAMES, SCORES, FIELDS),
    st.tuples(st.just(b"ZREM"), NAMES, FIELDS),
    st.tuples(st.just(b"ZRANGE"), NAMES, RANKS, RANKS),
    st.tuples(st.just(b"PUBLISH"), NAMES, VALUES),
    st.tuples(some(sorted(set(COMMANDS) - {b"HGETALL"})), NAMES),  # mostly too few words, or many
    some([(b"get", b"a"), (b"FOO", b"a"), (b"TIME", b"a")]),
)  # fmt: skip
#: Outside of scripts their answers have another shape in RESP3.
IN_PAIRS = st.one_of(
    st.tuples(st.just(b"ZRANGE"), NAMES, RANKS, RANKS, some([b"WITHSCORES", b"WITHALL"])),
    st.tuples(st.just(b"HGETALL"), NAMES),
)
SCRIPTS = st.lists(st.one_of(*[PLAIN] * 20, IN_PAIRS), min_size=1, max_size=6).map(
    lambda steps: tuple(word for step in steps for word in (b"%d" % len(step), *step))
)
STEPS = st.one_of(PLAIN, SCRIPTS.map(lambda words: (b"EVAL", ONE_BY_ONE, b"0", *words)))
#: Of any length; lists of their own accord are mostly short.
STORIES = st.integers(1, 16).flatmap(lambda steps: st.lists(STEPS, min_size=steps, max_size=steps))


@pytest.fixture
def client(contract_node):
    with redis.Redis.from_url(contract_node.url) as client:
        yield client


@pytest.fixture
def both(client):
    return Both(client)


# -- commands ------------------------------------------------------------------------------------


def test_the_commands_are_those_that_the_scripts_call():
    """Not one more: whoever writes a script that calls another finds out in memory."""
    source = b"".join(script.source for script in (*registered(), READ, EXPIRIES))
    assert set(re.findall(rb"redis\.p?call\('(\w+)'", source)) == set(COMMANDS)
    assert set(re.findall(rb"redis\.(\w+)", source)) == {b"call", b"pcall"}


@pytest.mark.parametrize("protocol", [2, 3])
def test_commands_do_the_same_alone_and_in_scripts(contract_node, protocol):
    with redis.Redis.from_url(contract_node.url, protocol=protocol) as client:

        @settings(max_examples=SEQUENCES // 2)
        @given(STORIES)
        def tell(story):
            both = Both(client)
            with both.story():
                for words in story:
                    both.tell(*words)
                both.compare()

        tell()


#: Each command that writes has left something of its own at the end.
WRITTEN = [
    b"SET a 1 PX 86400000", b"RENAME a b", b"SET c 1", b"PEXPIRE c 86400000", b"SET d 1", b"DEL d",
    b"HSET h f 1 g 2", b"HDEL h f", b"XADD s MAXLEN ~ 100 * e 1", b"ZADD z 1 f", b"ZADD z 2 g",
    b"ZREM z f",
]  # fmt: skip


@pytest.mark.parametrize("name", [None, *sorted(n for n, one in COMMANDS.items() if one.writes)])
def test_a_command_that_only_says_that_it_did_is_found_out(both, name):
    """The comparison sees what is stored, and not only what is answered."""

    def say(keyspace, *words):
        untouched = copy(keyspace)
        untouched.store = dict(keyspace.store)
        return does(untouched, *words)

    does = COMMANDS[name].do if name else None
    idle = {name: replace(COMMANDS[name], do=say)} if name else {}
    with mock.patch.dict(COMMANDS, idle), pytest.raises(AssertionError) if name else nullcontext():
        for words in WRITTEN:
            both.tell(*words.split())
        both.compare()


def test_time_is_two_strings(both):
    both.run(b"local t = redis.call('TIME') return {#t, type(t[1]), type(t[2])}", [])
    assert both.answer == [2, b"string", b"string"]
    node = NodeModel(0, lambda: 12.000034)
    assert node.ask(b"TIME") == [b"12", b"34"]


def test_a_key_stands_exactly_as_long_as_asked_for():
    """A server rounds to milliseconds, and keeps it for up to one more, but never for less."""
    for begin in (1.0, 1.0004, 1_700_000_000.123999):
        now = begin
        node = NodeModel(0, lambda: now)  # noqa: B023  it is asked for while it is this one
        node.ask(b"SET", b"a", b"1", b"PX", b"5")
        assert node.ask(b"PTTL", b"a") == 5
        now = begin + 0.0049
        assert node.ask(b"EXISTS", b"a") == 1
        now = begin + 0.005
        assert node.ask(b"PTTL", b"a") == -2


def test_a_script_sees_one_moment_only():
    """The clock stands still in a script, as on servers."""
    ticks = iter(range(1, 99))
    node = NodeModel(0, lambda: float(next(ticks)))
    source = b"return {redis.call('TIME')[1], redis.call('TIME')[1]}"
    assert node.ask(b"EVAL", source, b"0") == [b"1", b"1"]


def test_what_info_says_of_copies(both):
    both.run(
        b"""
        local told = redis.call('INFO', 'replication')
        return {string.match(told, 'role:(%a+)'), string.match(told, 'master_replid:(%x+)'),
          string.find(string.match(told, 'replid2:(%x+)'), '[^0]') and 'of another' or 'none'}
        """,
        [],
    )
    assert len(both.answer) == 3


# -- values --------------------------------------------------------------------------------------

VALUES_IN_LUA = [
    "", "return nil", "return true", "return false", "return ''", "return 'x'", "return 7",
    "return 3.9", "return -3.9", "return 2^53", "return 2^63", "return -2^63", "return 1/0",
    "return -1/0", "return {}", "return {1, 2.9, 'x', -0.5}", "return {1, nil, 3}",
    "return {nil, 1}", "return {false, true, 1}", "return {{1, {}}, {'x'}}", "return {a = 1, 2}",
    "return {ok = 'FINE'}", "return {ok = 5}", "return {err = 5, 3}", "return {err = 'OOM full'}",
    "return {err = 'bare'}", "return {err = 'MINE own words'}", "return {1, {err = 'ERR x'}}",
    "return {1, {ok = 'FINE'}}", "return redis.call('SET', 'a', 'b')",
    "return redis.call('SET', 'a', 'b').ok", "return redis.call('GET', 'none')",
    "return redis.call('GET', 'none') == false", "return {redis.call('GET', 'none'), 1}",
    "return redis.call('MGET', 'none', KEYS[1])[1] == false", "return redis.call('PTTL', 'none')",
    "return type(redis.call('EXISTS', 'none'))", "return {KEYS, ARGV, #KEYS, #ARGV}",
    "return KEYS[3]", "KEYS[1] = 'x' return KEYS[1]", "redis.call('SET', 'a', 12) return 1",
    "redis.call('SET', 'a', 2^53) return redis.call('GET', 'a')",
    "redis.call('SET', 'a', -7) return redis.call('GET', 'a')",
    "return tostring(1e15) .. tostring(2^53) .. tostring(0.1) .. string.format('%.0f', 2^53)",
    "return tostring(tonumber('nan') ~= tonumber('nan')) .. tostring(tonumber('0x10'))",
    "return #ARGV[1] .. string.sub(ARGV[1], 2)", "return redis.pcall('HGET', 'text', 'f').err",
    "return pcall(redis.call, 'HGET', 'text', 'f')", "return select('#', unpack({1, 2, 3}))",
    "local t = {3, 1, 2} table.sort(t) return table.concat(t, ',')", "return math.max(1, 2.5)",
    "return pcall(error, 'x')", "return string.find('a.b', '.', 1, true)",
]  # fmt: skip


@pytest.mark.parametrize("source", VALUES_IN_LUA)
def test_values_cross_alike(both, source):
    both.tell(b"SET", b"text", b"x")
    both.run(source.encode(), [b"k", b"l"], b"x\r\n\x00\xff", b"2")
    both.compare()


# -- errors --------------------------------------------------------------------------------------

FAILING = [
    "redis.call('SET', 'a', '1') redis.call('HGET', 'text', 'f') redis.call('SET', 'b', '1')",
    "redis.call('SET', 'a', '1') redis.pcall('HGET', 'text', 'f') redis.call('SET', 'b', '1')",
    "return redis.pcall('HGET', 'text', 'f')", "return redis.call('FOO')", "return redis.pcall(1)",
    "return redis.call('GET')", "return redis.call('GET', 'a', 'b')", "return redis.call()",
    "return redis.call('GET', {})", "return redis.call('GET', nil)", "return redis.call(true)",
    "return redis.call('HSET', 'h', 'f')", "return nil + 1", "return 'x' < 1", "return +",
    "return unheard_of", "unheard_of = 1", "function f() end", "return print", "return require",
    "return redis.unheard_of()", "error('in words')", "error({err = 'MINE own words'})", "error()",
    "error(5)", "return string.rep()",
]  # fmt: skip


@pytest.mark.parametrize("source", FAILING)
def test_what_fails_in_a_script_ends_it_alike(both, source):
    both.tell(b"SET", b"text", b"x")
    both.run(source.encode(), [b"k"], b"v")
    both.compare()
    both.run(b"return {KEYS[1], ARGV[1]}", [b"k"], b"v")


def test_a_script_that_nobody_has_told_is_not_there(both):
    (digest,) = {both.client.script_load("return 5").encode()}
    both.tell(b"SCRIPT", b"FLUSH")
    both.tell(b"EVALSHA", digest, b"0")
    assert isinstance(both.answer, NoScriptError)
    both.tell(b"SCRIPT", b"LOAD", b"return 5")
    both.tell(b"EVALSHA", digest, b"0")
    assert both.answer == 5


# -- the scripts ---------------------------------------------------------------------------------

#: Of those who wait, some of them not heard of for long, or of nobody.
RECORDS = some([b"", b"c" * 20, b"c" * 16 + b"0002" + b"1" * 26, b"d" * 16 + b"0001" + b"9" * 26])
#: What somebody else may have written, or done.
BY_HAND = st.one_of(
    st.tuples(st.just(b"HSET"), st.just(WAITERS), some([b"1" * 32, b"f"]), RECORDS),
    st.tuples(
        st.just(b"ZADD"),
        st.just(LINE),
        some([b"0", b"-inf", b"9e12"]),
        some([b"", b"1" * 48, b"f" * 48 + b"0009", b"e" * 48 + b"inf"]),
    ),
    st.tuples(st.just(b"SET"), some([LINE, WAITERS]), VALUES),
    st.tuples(st.just(b"DEL"), some([LINE, WAITERS])),
    st.tuples(st.just(b"SET"), st.just(KEYS.lock), some([X.encode() + b"{}", b"by hand", b""])),
    st.tuples(st.just(b"SET"), st.just(KEYS.fence), some([b"007", b"2.5", b"", b"nan", b"1e300"])),
    st.tuples(st.just(b"SET"), st.just(KEYS.boot), some([BOOT, BOOT[:40], b"", b"s" + BOOT[1:]])),
    st.tuples(st.just(b"HSET"), some([*KEYS, *reservation_keys(RULES, NAME)]), FIELDS, VALUES),
    st.tuples(st.just(b"DEL"), some([*KEYS, *reservation_keys(RULES, NAME)])),
    some([(b"FLUSHALL",), (b"SCRIPT", b"FLUSH")]),
)
LIVE = some([READ, EXPIRIES])
STEPS_OF_OURS = st.one_of(
    *[REQUESTS.map(words_of)] * 30,
    BY_HAND,
    some([b"look", b"trust", b"quarantine", b"bootstrap"]).map(enrolment),
    LIVE.map(lambda script: (b"EVAL", script.source, b"1", KEYS.lock, b"8", b"redlock:", b"9")),
)


@pytest.mark.parametrize("protocol", [2, 3])
def test_the_scripts_do_the_same(contract_node, protocol):
    with redis.Redis.from_url(contract_node.url, protocol=protocol) as client:

        @settings(max_examples=SEQUENCES // 2)
        @given(st.lists(STEPS_OF_OURS, min_size=1, max_size=24))
        def tell(story):
            both = Both(client)
            with both.story():
                both.tell(*enrolment(b"bootstrap"))
                for words in story:
                    both.tell(*words)
                    if isinstance(both.answer, NoScriptError):  # what a client does then
                        source = {script.sha: script.source for script in registered()}[words[1]]
                        both.tell(b"EVAL", source, *words[2:])
                both.compare()

        tell()


@pytest.mark.parametrize("mode", [b"look", b"trust", b"quarantine"])
def test_a_server_that_was_a_replica_is_known_by_its_history(unwell, mode):
    unwell.tell(*enrolment(b"bootstrap"))
    unwell.client.replicaof("127.0.0.1", "1")
    unwell.client.replicaof("NO", "ONE")
    unwell.learn_history()
    assert unwell.node.has_followed
    unwell.tell(*enrolment(mode))
    unwell.tell(*words_of(probe_request(RULES)))
    unwell.compare()
    assert unwell.answer[0] == -2


@pytest.mark.parametrize("mode", [b"look", b"trust", b"quarantine", b"bootstrap"])
def test_a_server_that_has_evicted_keys_is_known_by_their_count(unwell, mode):
    """In memory as on servers; an operator's word covers those that were evicted before it."""
    unwell.tell(*enrolment(b"bootstrap"))
    unwell.client.config_set("maxmemory-policy", POLICY)
    evict(unwell.client, expires=100_000)
    unwell.node.evicted = unwell.client.info("stats")["evicted_keys"]
    assert unwell.node.evicted
    unwell.tell(*enrolment(mode))
    unwell.tell(*words_of(probe_request(RULES)))
    unwell.compare()
    assert unwell.answer[0] == (1 if mode == b"bootstrap" else -2)


# -- servers that are not well -------------------------------------------------------------------


@pytest.fixture
def unwell(redis_nodes, contract_server):
    (server,) = redis_nodes(1, binary=contract_server.binary)
    with redis.Redis.from_url(server.url) as client:
        yield Both(client)


#: What is called one by one in a script when nothing can be stored.
TRIED = [
    [b"GET a"], [b"SET a 1"], [b"DEL a"], [b"PEXPIRE a 1000"], [b"HSET h f 1"], [b"HDEL h f"],
    [b"RENAME a b"], [b"XADD s MAXLEN ~ 9 * e 1"], [b"DEL none", b"SET b 1"],
    [b"PEXPIRE none 1000", b"SET b 1"], [b"GET a", b"SET b 1"], [b"HDEL h g", b"HSET h g 1"],
]  # fmt: skip


def tried(both, commands):
    """Tell both some commands in one script, and the first of them alone."""
    steps = [step.split() for step in commands]
    both.tell(*steps[0])
    both.run(ONE_BY_ONE, [], *(word for step in steps for word in (b"%d" % len(step), *step)))
    answer = both.answer
    both.compare()
    return type(answer)


def filled(both):
    both.client.flushall()
    both.node.flush()
    both.tell(b"SET", b"a", b"1", b"PX", LONG)
    both.tell(b"HSET", b"h", b"f", b"1")


def test_a_full_server_refuses_what_needs_memory(unwell):
    """At the first write of a script, unless that was to delete or to expire: then it goes on."""
    answers = []
    for commands in TRIED:
        filled(unwell)
        unwell.client.config_set("maxmemory", 1)
        unwell.node.is_full = True
        answers.append(tried(unwell, commands))
        unwell.client.config_set("maxmemory", 0)
        unwell.node.is_full = False
    assert {OutOfMemoryError, bytes, int} <= set(answers)


def test_a_replica_refuses_to_write(unwell):
    answers = []
    for commands in TRIED:
        filled(unwell)
        unwell.client.replicaof("127.0.0.1", "1")
        unwell.node.is_replica = True
        answers.append(tried(unwell, commands))
        unwell.client.replicaof("NO", "ONE")
        unwell.node.is_replica = False
    assert {ReadOnlyError, bytes} == set(answers)


def test_a_user_who_may_not_is_refused(unwell):
    unwell.client.execute_command("ACL", "SETUSER", "default", "-pexpire")
    unwell.node.denied = frozenset({b"PEXPIRE"})
    unwell.tell(b"PEXPIRE", b"a", b"1000")
    assert isinstance(unwell.answer, NoPermissionError)
    source = b"redis.call('SET', 'a', '1') return redis.call('PEXPIRE', 'a', '9')"
    with pytest.raises(ResponseError) as theirs:  # each kind of server says it in other words
        unwell.client.eval(source, 0)
    with pytest.raises(ResponseError) as ours:
        unwell.node.ask(b"EVAL", source, b"0")
    assert ours.type is theirs.type
    unwell.compare()
    unwell.run(b"return redis.pcall('PEXPIRE', 'a', '9').err ~= nil", [])
    assert unwell.answer == 1


def test_a_server_whose_script_goes_on_and_on_is_busy(unwell):
    unwell.client.config_set("lua-time-limit", 1)
    endless = Thread(target=go_on, args=(unwell.client,))
    endless.start()
    try:
        eventually(lambda: isinstance(told(unwell.client), ResponseError), "it is busy")
        unwell.node.is_busy = True
        for words in ((b"GET", b"a"), (b"EVAL", b"return 1", b"0")):
            unwell.tell(*words)
    finally:
        eventually(lambda: is_killed(unwell.client), "end of the script")
        endless.join()


def go_on(client):
    with pytest.raises(ResponseError):
        client.eval("while true do end", 0)


def is_killed(client):
    try:
        return client.script_kill()
    except ResponseError:
        return False


def told(client):
    try:
        return client.get("a")
    except redis.RedisError as error:
        return error


def test_threads_ask_one_after_the_other():
    nodes = [NodeModel(position, time.time) for position in range(2)]
    count = b"""
    for i = 1, 5 do redis.call('SET', KEYS[1], redis.call('GET', KEYS[1]) + 1) end
    return redis.call('GET', KEYS[1])
    """

    def ask():
        for _ in range(100):
            for node in nodes:
                node.ask(b"EVAL", count, b"1", b"a")

    for node in nodes:
        node.ask(b"SET", b"a", b"0")
    threads = [Thread(target=ask) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [node.ask(b"GET", b"a") for node in nodes] == [b"2000", b"2000"]


def test_a_defect_of_the_node_itself_is_no_reply():
    node = NodeModel(0, time.time)
    node.keyspace.info = None
    with pytest.raises(TypeError):
        node.ask(b"EVAL", b"return redis.call('INFO')", b"0")
