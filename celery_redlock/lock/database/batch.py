"""
Commands that wait are done in one transaction.

The keys that scripts name are locked and loaded in one trip; the real Lua runs over them in memory;
what has changed is written, and committed, in a second one. A key that was touched but not loaded,
or changed but not locked, is added, and the batch runs again: nothing was written yet. Those who
only read need one trip and no lock.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from celery_redlock.keyspace.engine import Engine
from celery_redlock.keyspace.keys import Keyspace
from celery_redlock.lock.database.loaded import Loaded, NotLoaded
from celery_redlock.lock.database.patterns import literal_begin, matcher
from celery_redlock.lock.database.plan import Plan, plan_of
from celery_redlock.lock.database.resp import parsed
from celery_redlock.lock.database.rows import entry_part, id_of_part
from celery_redlock.lock.database.store import Busy, Snapshot, Store

__all__ = ["MOST_AT_ONCE", "Batches"]

#: Commands in one transaction, at most.
MOST_AT_ONCE = 64
#: For how long a batch runs again, as others are in its way, or as it needs more keys [s].
LONGEST = 2.0
#: After so many transactions that write, so many keys are looked at, and deleted if they have
#: expired: so a limited part of all rows has.
SWEEP_EVERY, SWEPT = 32, 256
#: Key of how far they have been looked at.
SWEPT_TO = b"\0swept"
#: Keys, or entries of a stream, that are answered at once.
LONGEST_PAGE = 1000
#: Before and beyond every entry of a stream.
FIRST, LAST = b"", b"~"
LARGEST_COUNT = 9_999_999_999


class Batches:
    """Answers the commands of one connection to a *store*."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._engine = Engine(Keyspace())
        self._cursors: dict[bytes, bytes] = {}
        # Not from 0: many a connection ends after a few of them.
        self._since_sweep, self._now = random.randrange(SWEEP_EVERY), 0  # noqa: S311  no secret
        self._outside: dict[bytes, Callable[..., Any]] = {
            b"PING": lambda *_: b"PONG",
            b"SCAN": self._scan,
            b"XRANGE": self._xrange,
            b"XREVRANGE": self._xrevrange,
        }

    def answers(self, commands: Iterable[Sequence[bytes]]) -> list[Any]:
        """Return the replies to *commands*, in their order; errors are replies, too."""
        found: list[Any] = []
        together: list[Sequence[bytes]] = []
        for command in commands:
            outside = self._outside.get(command[0].upper())
            if outside is None:
                together.append(command)
                continue
            found += self._done(together)
            together = []
            try:
                found.append(outside(*command[1:]))
            except (ValueError, LookupError):
                found.append(ResponseError("syntax error"))
        return found + self._done(together)

    # -- transactions ------------------------------------------------------------------

    def _done(self, commands: Sequence[Sequence[bytes]]) -> list[Any]:
        if not commands:
            return []
        plan, ends = plan_of(commands), time.monotonic() + LONGEST
        while True:
            try:
                replies, plan = self._tried(commands, plan)
                if replies is not None:
                    return replies
            except Busy:
                if time.monotonic() > ends:
                    raise
            if time.monotonic() > ends:
                msg = "others are in the way"
                raise Busy(msg)

    def _tried(
        self, commands: Sequence[Sequence[bytes]], plan: Plan
    ) -> tuple[list[Any] | None, Plan]:
        """Return the replies once they are committed, or None; and with which plan to go on."""
        if plan.only_reads:
            loaded = self._over(plan.keys, self._store.read(sorted(plan.keys)))
        else:
            looked_at = sorted(plan.keys - plan.written)
            loaded = self._over(plan.keys, self._store.begin(sorted(plan.written), looked_at))
        try:
            replies = [self._engine.execute(command) for command in commands]
        except NotLoaded as error:
            following = plan.with_key(error.key)
        else:
            following = plan.with_written(loaded.changed)
            if following is plan:
                if not plan.only_reads:
                    self._store.commit(loaded.writes())
                    self._since_sweep += 1
                return replies, plan
        if not plan.only_reads:
            self._store.roll_back()
        return None, following

    def _over(self, keys: Iterable[bytes], snapshot: Snapshot) -> Loaded:
        self._now = snapshot.micros
        loaded = Loaded(keys, snapshot.rows, snapshot.micros)
        loaded.info = self._info
        self._engine.keyspace = loaded
        return loaded

    def sweep(self) -> None:
        """
        Delete some of what has expired, if it is time for that.

        It goes on where whichever connection did so last has come to.
        """
        if self._since_sweep < SWEEP_EVERY:
            return
        self._since_sweep = 0
        (place, *_) = [row.value for row in self._store.read([SWEPT_TO]).rows] or [b""]
        page = self._store.page(place, b"", SWEPT)
        following = page[-1][0] if len(page) == SWEPT else b""
        over = sorted(key for key, ends in page if ends is not None and ends < self._now)
        if over or following != place:
            try:
                self._delete(over, following)
            except Busy:
                self._since_sweep = SWEEP_EVERY

    def _delete(self, over: Sequence[bytes], following: bytes) -> None:
        keys = [SWEPT_TO, *over]
        loaded = self._over(keys, self._store.begin(keys, ()))
        loaded.set(SWEPT_TO, following)
        self._store.commit(loaded.writes(swept=True))

    def _info(self, section: bytes) -> bytes:
        store = self._store
        lines = {
            b"server": (
                f"redis_version:{store.version}",
                f"redlock_commits:{store.commits}",
                f"run_id:{store.run_id}",
                f"uptime_in_seconds:{max(0, store.micros_at_start - store.made) // 1_000_000}",
            ),
            b"replication": (
                "role:master",
                "connected_slaves:0",
                f"master_replid:{store.run_id}",
                f"master_replid2:{'0' * 40}",
            ),
            b"stats": ("evicted_keys:0",),
            b"memory": ("maxmemory_policy:noeviction",),
            b"commandstats": ("cmdstat_info:calls=1",),
        }
        asked = [section.lower()] if section else list(lines)
        found = [line for name in asked for line in lines.get(name, ())]
        return "".join(f"{line}\r\n" for line in found).encode()

    # -- what is asked outside scripts -------------------------------------------------

    def _scan(self, cursor: bytes, *words: bytes) -> list[Any]:
        options = dict(zip((word.upper() for word in words[::2]), words[1::2], strict=True))
        pattern = options.get(b"MATCH", b"*")
        count = min(int(options.get(b"COUNT", b"10")), LONGEST_PAGE)
        begin = literal_begin(pattern)
        after = self._cursors.pop(cursor) if cursor != b"0" else begin[:-1]
        below = begin[:-1] + bytes([begin[-1] + 1]) if begin and begin[-1] < 0xFF else b""  # noqa: PLR2004
        page = self._store.page(after, below, count)
        now = self._store.read(()).micros
        matches = matcher(pattern)
        keys = [
            key
            for key, ends in page
            if (ends is None or ends > now) and key[:1] != b"\0" and matches(key)
        ]
        if len(page) < count:
            return [b"0", keys]
        following = b"%d" % (int(cursor) + 1)
        self._cursors = {following: page[-1][0]}
        return [following, keys]

    def _xrange(self, key: bytes, first: bytes, last: bytes, *words: bytes) -> list[Any]:
        return self._entries(key, first, last, words, is_reversed=False)

    def _xrevrange(self, key: bytes, last: bytes, first: bytes, *words: bytes) -> list[Any]:
        return self._entries(key, first, last, words, is_reversed=True)

    def _entries(
        self, key: bytes, first: bytes, last: bytes, words: Sequence[bytes], *, is_reversed: bool
    ) -> list[Any]:
        count = LONGEST_PAGE
        if words:
            _, number = words
            count = min(int(number), count)
        if self._over([key], self._store.read([key])).find(key) is None:
            return []
        found = self._store.entries(key, bounds(first, last), count, is_reversed=is_reversed)
        return [[id_of_part(part), parsed(value)[0][0]] for part, value in found]


def bounds(first: bytes, last: bytes) -> tuple[bytes, bytes]:
    """Return beyond which entry, and below which, those from *first* to *last* are."""
    return (
        FIRST if first == b"-" else edge(first[1:]) if first[:1] == b"(" else edge(first, less=1),
        LAST if last == b"+" else edge(last[1:]) if last[:1] == b"(" else edge(last) + b"\0",
    )


def edge(ident: bytes, less: int = 0) -> bytes:
    time, _, count = ident.partition(b"-")
    place = int(time), int(count or 0) - less
    return entry_part(*place) if place[1] >= 0 else entry_part(place[0] - 1, LARGEST_COUNT)
