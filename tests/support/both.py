"""A real server and a node in memory that are told the same, at the same moment, and compared."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from hypothesis import reject
from redis.exceptions import RedisError

from celery_redlock.keyspace.values import NEVER, SortedSet
from celery_redlock.lock.database.loaded import NO_RENAME
from celery_redlock.lock.nodes.guard import read_info
from celery_redlock.lock.scripts.scripting import registered
from celery_redlock.lock.waiting.waiting import WAIT
from celery_redlock.testing.model import NodeModel
from support.requests import TINY

__all__ = ["Both"]

#: How servers name themselves, and which script has failed where.
SELF = re.compile(
    r" script: .*$| Please use EVAL\.|(lua )?redis (lib )?|valkey |this user |user default ",
    re.IGNORECASE,
)
#: An id that a server makes of its clock.
MADE = re.compile(rb"\d+-\d+")
#: A moment [ms, Unix time].
MOMENT = re.compile(rb"\d{13}")
#: A score as text: some servers say 0.1, and others 0.10000000000000001, which is the same one.
SCORE = re.compile(rb"-?\d+\.\d+(e-?\d+)?")
#: Of somebody who waits: whom it is reached by, two moments, and a description.
RECORD = re.compile(rb"(.{20})(\d{13})(\d{13})(.*)", re.DOTALL)
#: Up to here a number is no time, but a count, or a score that was made up: no tolerance.
FEW = 100
#: The shortest life of a key that is not waited out: that of a probe [ms].
SHORTEST = 1000
#: What PTTL says of a key that is not there; -1 of one that stays.
NONE = -2
#: How long a value in a hash may be [bytes].
LONGEST_IN_ORDER = 2**16


class Both:
    """
    One server and a node in memory.

    The node's clock stands where the server's was right before it was asked. So replies, values
    and what is left of each key are the same but for how long that took.

    Attributes:
        client: Of the server.
        node: The one in memory.
        slack: By how much times may differ: as long as the longest step took [ms].
        answer: The server's last one.
    """

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client
        self._raw: Any = redis.Redis(connection_pool=client.connection_pool)
        self._raw.response_callbacks.clear()  # what redis-py makes of replies is no matter here
        self._micros = 0
        self.slack = 0.0
        self.node = NodeModel(0, lambda: self._micros / 1_000_000)
        self.answer: Any = None
        self.client.flushall()
        # A hash tells its fields in the order in which they came: in a table they have none.
        self.client.config_set("hash-max-ziplist-value", LONGEST_IN_ORDER)
        for script in registered():  # as every client that connects sees to
            self.client.script_load(script.source)
        self.node.greet()
        self.learn_history()

    @contextmanager
    def story(self) -> Iterator[None]:
        """Tell a story: where one step took longer than a key lives, a difference says nothing."""
        try:
            yield
        except AssertionError:
            if self.slack < SHORTEST / 2:
                raise
            reject()

    def learn_history(self) -> None:
        told = read_info(self.client.eval("return redis.call('INFO', 'replication')", 0))
        self.node.history = told["master_replid"].encode()
        self.node.has_followed = set(told["master_replid2"]) != {"0"}

    def tell(self, *words: bytes) -> None:
        """Tell both a command; their answers must be the same. What is not to stay lapses."""
        pipe = self._raw.pipeline(transaction=False).time().execute_command(*words).time()
        before, self.answer, after = pipe.execute(raise_on_error=False)
        if not isinstance(before, RedisError):  # a server that is busy tells no time, either
            self._set_clock(before, after)
        if NO_RENAME.endswith(str(self.answer)):
            reject()  # of streams: no script of ours does that
        ours, theirs = self.node.execute(words), self.answer
        if WAIT.sha in words and isinstance(ours, list) and isinstance(theirs, list):
            # Its last numbers are times, as short as they may be: for how long somebody has waited,
            # and when a place lapses.
            for mine, other in zip(ours[3:], theirs[3:], strict=True):
                assert_near(mine, other, self.slack, words)
            ours, theirs = ours[:3], theirs[:3]
        assert_same(words, ours, theirs, self.slack)
        if TINY in words:
            time.sleep((int(TINY) + 2) / 1000.0)

    def run(self, source: bytes, keys: Sequence[bytes], *arguments: bytes) -> None:
        self.tell(b"EVAL", source, b"%d" % len(keys), *keys, *arguments)

    def compare(self) -> None:
        """Compare what is stored, but for keys that may lapse while they are read."""
        names = sorted(self.client.keys())
        pipe = self.client.pipeline(transaction=False).time()
        for name in names:
            pipe.type(name).pttl(name)
        before, *told, after = pipe.time().execute()
        self._set_clock(before, after)
        kinds = dict(zip(names, told[::2], strict=True))
        left = dict(zip(names, told[1::2], strict=True))
        stored = {name: self._stored(name, kind) for name, kind in kinds.items() if kind != b"none"}
        now = self._micros // 1000
        margin = (in_micros(self.client.time()) - self._micros) / 1000.0 + 2 * self.slack + 2
        mine = {
            key: -1 if end == NEVER else int(end) - now
            for key, (_, end) in self.node.store.items()
            if now < end
        }
        brief = {
            key
            for key in {*mine, *left}
            if all(
                side.get(key, NONE) != -1 and side.get(key, NONE) < margin for side in (mine, left)
            )
        }
        assert set(mine) - brief == set(stored) - brief
        for key in set(mine) - brief:
            assert_same(key, self._in_memory(key), stored[key], self.slack)
            assert_near(mine[key], left[key], self.slack, key)

    def _stored(self, key: bytes, kind: bytes) -> Any:
        if kind == b"string":
            return self.client.get(key)
        if kind == b"hash":
            return sorted(self.client.hgetall(key).items())
        if kind == b"zset":
            return scores_of(self.client.zrange(key, 0, -1, withscores=True))
        return [sorted(fields.items()) for _, fields in self.client.xrange(key)]

    def _in_memory(self, key: bytes) -> Any:
        value = self.node.store[key][0]
        if isinstance(value, bytes):
            return value
        if isinstance(value, SortedSet):
            return scores_of(value.items())
        if isinstance(value, dict):
            return sorted(value.items())
        return [sorted(zip(words[::2], words[1::2], strict=True)) for _, words in value]

    def _set_clock(self, before: Any, after: Any) -> None:
        self._micros = in_micros(before)
        self.slack = max(self.slack, (in_micros(after) - self._micros) / 1000.0)


def scores_of(members: Iterable[tuple[bytes, float]]) -> list[tuple[bytes, Any]]:
    """Return the members of a sorted set by name; scores may be moments [ms]."""
    return sorted((name, float(score)) for name, score in members)


def in_micros(told: Any) -> int:
    seconds, micros = told
    return int(seconds) * 1_000_000 + int(micros)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def said(error: RedisError) -> tuple[type[Exception], str]:
    return type(error), SELF.sub("", str(error)).strip().lower()


def assert_near(ours: float, theirs: float, slack: float, what: Any) -> None:
    """Compare two times or numbers [ms]; what is below 0 says that there is none."""
    assert (ours < 0) == (theirs < 0), f"{what}: {ours} and {theirs}"
    assert abs(ours - theirs) <= (0 if ours < 0 else 2 * slack + 2), f"{what}: {ours}, {theirs}"


def assert_same(what: Any, ours: Any, theirs: Any, slack: float) -> None:
    differ = f"{what}: {ours!r} and {theirs!r}"
    if isinstance(theirs, RedisError):
        assert isinstance(ours, RedisError), differ
        assert said(ours) == said(theirs), differ
    elif isinstance(theirs, list | tuple):
        assert isinstance(ours, list | tuple), differ
        assert len(ours) == len(theirs), differ
        for one, other in zip(ours, theirs, strict=True):
            assert_same(what, one, other, slack)
    elif isinstance(theirs, float) and isinstance(ours, bytes):  # a score, in RESP3
        assert float(ours) == theirs, differ
    elif is_number(theirs) and is_number(ours) and FEW < abs(theirs) < math.inf:
        assert_near(ours, theirs, slack, differ)
    elif isinstance(theirs, bytes) and MADE.fullmatch(theirs):
        assert isinstance(ours, bytes), differ
        assert MADE.fullmatch(ours), differ
    elif isinstance(theirs, bytes) and SCORE.fullmatch(theirs) and isinstance(ours, bytes):
        assert float(ours) == float(theirs), differ
    elif isinstance(theirs, bytes) and MOMENT.fullmatch(theirs) and ours != theirs:
        assert_near(int(ours), int(theirs), slack, differ)
    elif isinstance(theirs, bytes) and RECORD.fullmatch(theirs) and ours != theirs:
        assert isinstance(ours, bytes), differ
        mine, other = RECORD.fullmatch(ours), RECORD.fullmatch(theirs)
        assert mine, differ
        assert other, differ
        assert_same(what, mine.groups(), other.groups(), slack)
    else:
        assert (type(ours), ours) == (type(theirs), theirs), differ
