"""
All locks that are held on the nodes, for operators: gone through page by page, and merged.

One node after the other is gone through with SCAN, never KEYS. For a page of its keys all nodes
are asked at once, and what they say is merged into one view per holder; a key that an earlier
node has was told of with that one's pages. So no more than a page is held, however many locks
there are, and no command keeps a node from its work for long.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.exceptions import RedisError

from celery_redlock.lock.address import addresses_of
from celery_redlock.lock.guard import exchange
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import TOKEN_LENGTH, is_ours, read_holder
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripting import Script, read_release
from celery_redlock.reading.nodes import connected

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["LiveLocks", "LockView", "glob", "live_locks", "number"]


#: Digits of the largest number that a script of ours writes, and a few more.
LONGEST_NUMBER = 20
#: How many keys a node looks at for one SCAN; it serves others in between.
SCAN_COUNT = 500
#: For how many locks a node is asked at once: well below a millisecond of its time.
PAGE = 100

# KEYS locks ; ARGV 1 length of the prefix 'redlock:lock:' without 'lock:' 2 that prefix
# Per lock: value or '', rest of its lease, fence, how many messages wait for it to end. A key of
# another type is no lock: it is in nobody's way (MGET passes over it, here and in ACQUIRE).
READ_LUA = """
local skip = tonumber(ARGV[1])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local function waits(key)
  local m = redis.pcall('HMGET', key, 'until', 'started', 'merged')
  if m.err or not m[1] or (tonumber(m[1]) or 0) <= now or m[2] ~= '' then return 0 end
  return 1 + (tonumber(m[3]) or 0)
end
local names, fences, found = {}, {}, {}
for i, key in ipairs(KEYS) do
  names[i] = string.sub(key, skip + 6)
  fences[i] = ARGV[2] .. 'fence:' .. names[i]
end
local values = redis.call('MGET', unpack(KEYS))
fences = redis.call('MGET', unpack(fences))
for i, key in ipairs(KEYS) do
  if values[i] then
    local queued, next = ARGV[2] .. 'queued:' .. names[i], ARGV[2] .. 'next:' .. names[i]
    local waiting = 0
    if redis.call('EXISTS', queued, next) > 0 then waiting = waits(queued) + waits(next) end
    found[i] = {values[i], redis.call('PTTL', key), fences[i] or '0', waiting}
  else found[i] = '' end
end
return found
"""

# KEYS locks ; answers the positions of those that are not there
ABSENT_LUA = """
local absent = {}
for i, key in ipairs(KEYS) do
  if redis.call('EXISTS', key) == 0 then absent[#absent + 1] = i end
end
return absent
"""
READ = Script(READ_LUA, read_release, guarded=False)
ABSENT = Script(ABSENT_LUA, read_release, guarded=False)


@dataclass(frozen=True)
class LockView:
    """
    One lock that somebody holds.

    Attributes:
        name: Lock name (shortened if it is very long).
        holder: As in `LockTaken.holder`.
        ttl: Largest rest of the lease on any node [s]; None for a key that never expires, which
            nobody of ours has written.
        votes: Labels of the nodes that store this holder's token.
        fence: Largest fencing number any of them has given out, 0 for none.
        waiting: How many messages are known to wait for it to end, merged ones included; only of
            tasks with ``unique_until``.
        is_foreign: Whether something else than celery-redlock has written the key. Its value is
            then told nobody; `release_seen` does not touch it.
    """

    name: str
    holder: dict[str, Any]
    ttl: float | None
    votes: list[str] = field(default_factory=list)
    fence: int = 0
    waiting: int = 0
    is_foreign: bool = False

    def is_held(self, nodes: int) -> bool:
        """Return whether this holder has a majority of so many *nodes*."""
        return len(self.votes) >= quorum(nodes)


class Entry(NamedTuple):
    """What a node has of one lock; *ttl* in milliseconds, as it tells."""

    value: bytes
    ttl: int
    fence: bytes
    waiting: int


def live_locks(nodes: Sequence[Any], rules: Rules) -> Iterator[LockView]:
    """Yield the locks that somebody holds on any of *nodes*, in no order; see `LiveLocks`."""
    return iter(LiveLocks(nodes, rules))


class LiveLocks:
    """
    The locks that somebody holds on any of the nodes, to be gone through once, in no order.

    Nodes that do not answer are passed over. A lock that is taken, renewed or given back
    meanwhile may be missing, or be told of twice.

    Args:
        nodes: As the setting ``redlock_nodes``.
        rules: As all clients have them.
        like: Pattern that the names have to match, in the language of Redis's SCAN.
        longest: For how long nodes are gone through, whether anything is found or not [s].

    Attributes:
        is_cut: Whether that was too short.
        silent: Labels of the nodes that did not answer (any more), in their order.
    """

    def __init__(
        self,
        nodes: Sequence[Any],
        rules: Rules,
        like: bytes = b"*",
        longest: float = math.inf,
    ) -> None:
        self._addresses = addresses_of(nodes)
        self._rules = rules
        self._like = like
        self._longest = longest
        self.is_cut = False
        self.silent: list[str] = []

    def __iter__(self) -> Iterator[LockView]:
        roll = Roll(self._rules.prefix, self._like, self._longest)
        try:
            with contextlib.ExitStack() as stack:
                for address in self._addresses:
                    with contextlib.suppress(RedisError, OSError):
                        roll.add(address.label, stack.enter_context(connected(address)))
                yield from roll.call()
        finally:
            labels = (address.label for address in self._addresses)
            self.is_cut = roll.is_cut
            self.silent = [label for label in labels if label not in roll.answering]


class Roll:
    """
    The nodes that answer, by label and in their order; one that fails is asked no more.

    Args:
        prefix: First part of every Redis key.
        like: Pattern of names, as of `LiveLocks`.
        longest: As of `LiveLocks`.

    Attributes:
        is_cut: Whether time was up before all was gone through.
    """

    def __init__(self, prefix: str, like: bytes = b"*", longest: float = math.inf) -> None:
        self._prefix = f"{prefix}:".encode()
        self._like = like
        self._longest = longest
        self.is_cut = False
        self._nodes: dict[str, AbstractConnection] = {}

    @property
    def answering(self) -> set[str]:
        """Labels of the nodes that have answered whatever they were asked."""
        return set(self._nodes)

    def add(self, label: str, connection: AbstractConnection) -> None:
        """Have the node at *connection* tell, too; raises redis-py's errors."""
        exchange(connection, *((b"SCRIPT", b"LOAD", script.source) for script in (READ, ABSENT)))
        self._nodes[label] = connection

    def call(self) -> Iterator[LockView]:
        """Yield what is held, node by node."""
        ends = time.monotonic() + self._longest
        order = list(self._nodes)  # as it was: a node that fails meanwhile moves no other
        for position, label in enumerate(order):
            for keys in self._pages(label, ends):
                for other in order[:position]:
                    keys = self._absent(other, keys) if keys else keys  # noqa: PLW2901  fewer
                if keys:
                    yield from self._merged(keys)

    def _pages(self, label: str, ends: float) -> Iterator[list[bytes]]:
        """Yield the keys of locks on a node, some at a time, until the time *ends* [s]."""
        cursor, pattern = b"0", glob(self._prefix) + b"lock:" + self._like
        while True:
            scan = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", SCAN_COUNT)
            answers = self._ask(label, scan)
            if answers is None:
                return
            cursor, found = answers
            keys = list(dict.fromkeys(found))
            for begin in range(0, len(keys), PAGE):
                yield keys[begin : begin + PAGE]
            if cursor == b"0":
                return
            if time.monotonic() > ends:
                self.is_cut = True
                return

    def _absent(self, label: str, keys: list[bytes]) -> list[bytes]:
        """Return which of *keys* a node does not have; all of them if it does not answer."""
        positions = self._ask(label, (b"EVALSHA", ABSENT.sha, b"%d" % len(keys), *keys))
        return keys if positions is None else [keys[i - 1] for i in positions]

    def _merged(self, keys: Sequence[bytes]) -> Iterator[LockView]:
        answers = self._ask_all(keys)
        skip = len(self._prefix) + len("lock:")
        for index, key in enumerate(keys):
            views: dict[bytes, LockView] = {}
            for label, entries in answers.items():
                if entries[index]:
                    entry = Entry(*entries[index])
                    token = entry.value[:TOKEN_LENGTH]
                    name = key[skip:].decode(errors="replace")
                    views[token] = with_vote(views.get(token), name, label, entry)
            yield from views.values()

    def _ask_all(self, keys: Sequence[bytes]) -> dict[str, list[Any]]:
        """Ask every node for *keys*, all before the first is waited for."""
        numbers = (b"%d" % len(self._prefix), self._prefix)
        command = (b"EVALSHA", READ.sha, b"%d" % len(keys), *keys, *numbers)
        for label, connection in list(self._nodes.items()):
            try:
                connection.send_packed_command(connection.pack_command(*command))
            except (RedisError, OSError):
                del self._nodes[label]
        answers = {}
        for label in list(self._nodes):
            answer = self._read(label)
            if answer is not None:
                answers[label] = answer
        return answers

    def _ask(self, label: str, command: Sequence[Any]) -> Any:
        connection = self._nodes.get(label)
        if connection is None:
            return None
        try:
            connection.send_packed_command(connection.pack_command(*command))
        except (RedisError, OSError):
            del self._nodes[label]
            return None
        return self._read(label)

    def _read(self, label: str) -> Any:
        """Return a node's answer; None, and ask it no more, if there is none."""
        try:
            return self._nodes[label].read_response(disable_decoding=True)
        except (RedisError, OSError):
            del self._nodes[label]
            return None


def with_vote(view: LockView | None, name: str, label: str, entry: Entry) -> LockView:
    """Return *view*, or a new one, with what one more node says."""
    ttl = None if entry.ttl == -1 else max(0, entry.ttl) / 1000.0
    if view is None:
        is_foreign = not is_ours(entry.value)
        holder = {} if is_foreign else read_holder(entry.value)
        view = LockView(name, holder, ttl, is_foreign=is_foreign)
    return replace(
        view,
        ttl=None if ttl is None or view.ttl is None else max(ttl, view.ttl),
        votes=[*view.votes, label],
        fence=max(view.fence, number(entry.fence)),
        waiting=max(view.waiting, entry.waiting),
    )


def number(fence: bytes) -> int:
    """Return the fencing number in *fence*, 0 if somebody else wrote it."""
    return int(fence) if fence.isdigit() and len(fence) <= LONGEST_NUMBER else 0


def glob(text: bytes) -> bytes:
    """Return the pattern that matches *text* and nothing else."""
    return b"".join(
        b"\\" + text[i : i + 1] if text[i : i + 1] in b"*?[]^\\" else text[i : i + 1]
        for i in range(len(text))
    )
