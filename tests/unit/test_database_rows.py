"""Keys as rows, commands as bytes, and what a batch needs: without a database."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import NoScriptError, ResponseError

from celery_redlock.keyspace.values import NEVER, Hash, SortedSet
from celery_redlock.lock.database.batch import bounds
from celery_redlock.lock.database.loaded import EARS, Loaded, NotLoaded
from celery_redlock.lock.database.patterns import literal_begin, matcher
from celery_redlock.lock.database.plan import plan_of
from celery_redlock.lock.database.resp import encoded, parsed
from celery_redlock.lock.database.rows import Row, difference, entry_part, id_of_part, values_of
from celery_redlock.lock.scripts.scripting import pack
from celery_redlock.lock.scripts.scripts import ACQUIRE, INSPECT

WORDS = st.binary(max_size=8)
VALUES = st.one_of(
    WORDS,
    st.dictionaries(WORDS, WORDS, min_size=1, max_size=4).map(Hash),
    st.dictionaries(WORDS, st.floats(-1e15, 1e15), min_size=1, max_size=4).map(SortedSet),
)
ENDS = st.one_of(st.just(NEVER), st.integers(1, 10**15).map(lambda us: us / 1000))


def stored(rows, key, before, after):
    """Return the rows of *key* once it was changed so."""
    is_anew, gone, more = difference(key, before, after)
    kept = {} if is_anew else {row.part: row for row in rows}
    kept = {part: row for part, row in kept.items() if part not in gone}
    return list((kept | {row.part: row for row in more}).values())


@given(st.lists(st.tuples(VALUES, ENDS), min_size=1, max_size=5))
def test_a_value_is_what_its_rows_say_however_it_came_about(states):
    rows, before = [], None
    for after in states:
        rows = stored(rows, b"k", before, after)
        assert values_of(rows) == {b"k": after}
        assert {type(value) for value, _ in values_of(rows).values()} == {type(after[0])}
        before = after


@given(st.lists(st.lists(WORDS, min_size=1, max_size=4), max_size=5), st.data())
def test_commands_may_come_in_any_pieces(commands, data):
    packed = b"".join(pack(*words) for words in commands)
    found, left = [], b""
    while packed:
        size = data.draw(st.integers(1, len(packed)))
        more, left = parsed(left + packed[:size])
        found += more
        packed = packed[size:]
    assert (found, left) == (commands, b"")


def test_what_is_no_command_is_refused():
    with pytest.raises(ValueError, match="no command"):
        parsed(b"GET / HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (1, b":1\r\n"),
        (None, b"$-1\r\n"),
        (b"a\r\n", b"$3\r\na\r\n\r\n"),
        ([1, [b"x", None]], b"*2\r\n:1\r\n*2\r\n$1\r\nx\r\n$-1\r\n"),
        (NoScriptError("No matching script."), b"-NOSCRIPT No matching script.\r\n"),
        (ResponseError("two\r\nlines"), b"-ERR two lines\r\n"),
        (ResponseError("WRONGTYPE of a key"), b"-WRONGTYPE of a key\r\n"),
    ],
)
def test_replies_are_those_of_redis(reply, expected):
    assert encoded(reply) == expected


def evalsha(script, *keys):
    return [b"EVALSHA", script.sha, b"%d" % len(keys), *keys, b"argument"]


def test_a_batch_locks_what_it_names_and_shares_what_all_look_at():
    plan = plan_of([evalsha(ACQUIRE, b"r:lock:n", b"r:node:boot", b"r:node:quarantine")])
    assert plan.written == {b"r:lock:n"}
    assert plan.keys == {b"r:lock:n", b"r:node:boot", b"r:node:quarantine"}
    assert plan.with_key(EARS + b"c").written == plan.written
    assert plan.with_key(b"other").written == {b"r:lock:n", b"other"}
    assert plan.with_written([b"r:node:boot"]).written == {b"r:lock:n", b"r:node:boot"}
    assert plan.with_written([b"r:lock:n"]) is plan


def test_who_only_reads_locks_nothing_until_something_was_written():
    plan = plan_of([evalsha(INSPECT, b"r:lock:n", b"r:fence:n"), [b"GET", b"x"], [b"PING"]])
    assert plan.only_reads
    assert not plan.written
    assert not plan.with_key(b"y").written
    changed = plan.with_written([b"x"])
    assert not changed.only_reads
    assert changed.written == plan.keys


def test_a_message_is_told_by_a_batch_that_commits():
    assert not plan_of([[b"PUBLISH", b"c", b"m"]]).only_reads


def test_a_key_that_was_not_loaded_is_asked_for():
    loaded = Loaded([b"a"], [], 1)
    assert loaded.get(b"a") is None
    with pytest.raises(NotLoaded) as missing:
        loaded.get(b"b")
    assert missing.value.key == b"b"


def test_what_has_expired_is_absent_and_no_change():
    rows = [Row(b"a", b"", 1, b"", 5), Row(b"a", b":f", 1, b"v", None)]
    loaded = Loaded([b"a"], rows, 6)
    assert loaded.hget(b"a", b"f") is None
    assert not loaded.changed
    assert loaded.writes().keys == []
    assert loaded.writes(swept=True).keys == [b"a"]
    loaded.hset(b"a", b"g", b"w")
    writes = loaded.writes()
    assert writes.keys == [b"a"], "what is left of the old value goes first"
    assert [row.part for row in writes.rows] == [b"", b":g"]


PLAIN = st.text("ab:-[]*?^\\", max_size=6).map(str.encode)


@given(PLAIN)
def test_a_pattern_begins_as_its_keys_do(pattern):
    begin = literal_begin(pattern)
    assert not set(begin) & set(b"*?[\\")
    assert pattern.startswith(begin)


@given(st.text("ab*?", max_size=5), st.text("ab", max_size=5))
def test_stars_and_question_marks_are_those_of_a_shell(pattern, key):
    expected = fnmatch.fnmatchcase(key, pattern)
    assert bool(matcher(pattern.encode())(key.encode())) == expected


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        (b"a\\*b", b"a*b", True),
        (b"a\\*b", b"axb", False),
        (b"[ab]x", b"bx", True),
        (b"[^ab]x", b"bx", False),
        (b"redlock:lock:*", b"redlock:lock:\n\xff", True),
        (b"a.c", b"abc", False),
    ],
)
def test_patterns_are_those_of_redis(pattern, key, expected):
    assert bool(matcher(pattern)(key)) == expected


def test_bounds_of_a_stream_leave_out_what_is_asked_to_be_left_out():
    first, last = entry_part(5, 0), entry_part(5, 3)
    after, below = bounds(b"5-0", b"5-3")
    assert after < first < last < below
    after, below = bounds(b"(5-0", b"(5-3")
    assert after == first
    assert below == last
    after, below = bounds(b"-", b"+")
    assert after < entry_part(0, 0) < entry_part(10**15, 10**9) < below
    assert id_of_part(last) == b"5-3"
