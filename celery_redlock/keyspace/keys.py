"""
The keys of a node that is no Redis, and what Redis commands do with them.

Values expire by the node's clock, exactly as long after they were set as was asked for. A server,
which counts in whole milliseconds, keeps them for up to one more. What no script uses is refused
in the words of Redis, which ``tests/contract/test_memory.py`` holds to real servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from celery_redlock.keyspace.values import (
    LARGEST,
    NEVER,
    OK,
    SYNTAX,
    WRONG_TYPE,
    Hash,
    Refused,
    SortedSet,
    Status,
    Stream,
    real,
    whole,
)

__all__ = ["Keyspace", "Store", "most_kept"]

#: Key -> a string, a hash, a sorted set or a stream, and when it expires [ms]. Values are replaced,
#: never changed, so that a copy of the store stays what it was.
Store = dict[bytes, tuple[Any, float]]


class Keyspace:
    """
    What a node stores.

    Attributes:
        store: Key -> value and end.
        micros: The node's clock [us, Unix time]; stands still during a command.
        info: Returns what INFO says of a section.
        hear: Receives what is published; returns how many listen.
    """

    def __init__(self) -> None:
        self.store: Store = {}
        self.micros = 0
        self.info: Callable[[bytes], bytes] = lambda _section: b""
        self.hear: Callable[[bytes, bytes], int] = lambda _channel, _message: 0

    @property
    def now(self) -> int:
        return self.micros // 1000

    def find(self, key: bytes) -> Any:
        found = self.store.get(key)
        if found is None:
            return None
        if self.micros / 1000 >= found[1]:
            del self.store[key]
            return None
        return found[0]

    def of_type(self, kind: type, key: bytes) -> Any:
        found = self.find(key)
        if found is not None and type(found) is not kind:
            raise Refused(WRONG_TYPE)
        return found

    def change(self, key: bytes, value: Any) -> None:
        """Set *key* to *value*; it expires when it would have."""
        is_there = self.find(key) is not None
        self.store[key] = (value, self.store[key][1] if is_there else NEVER)

    def _leave(self, key: bytes, rest: Any) -> None:
        """Set *key* to what is left there; without fields or members there is no key."""
        if rest:
            self.change(key, rest)
        else:
            self.store.pop(key, None)

    # -- strings -----------------------------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        found: bytes | None = self.of_type(bytes, key)
        return found

    def mget(self, *keys: bytes) -> list[bytes | None]:
        """MGET passes over what is no string."""
        found = [self.find(key) for key in keys]
        return [one if type(one) is bytes else None for one in found]

    def set(self, key: bytes, value: bytes, *options: bytes) -> Status:
        """SET without an end or with PX."""
        end = NEVER
        if options:
            if len(options) != 2 or options[0].upper() != b"PX":  # noqa: PLR2004  PX and how long
                raise Refused(SYNTAX)
            length = whole(options[1])
            if length <= 0 or length > LARGEST - self.now:
                raise Refused("ERR invalid expire time in 'set' command")
            end = self.micros / 1000 + length
        self.store[key] = (value, end)
        return OK

    # -- any key -----------------------------------------------------------------------

    def delete(self, *keys: bytes) -> int:
        return len([self.store.pop(key) for key in keys if self.find(key) is not None])

    def exists(self, *keys: bytes) -> int:
        return len([key for key in keys if self.find(key) is not None])

    def pttl(self, key: bytes) -> int:
        """PTTL: what is left [ms], -2 for no key, -1 for one without an end."""
        if self.find(key) is None:
            return -2
        end = self.store[key][1]
        return -1 if end == NEVER else int(end) - self.now  # as servers round both

    def pexpire(self, key: bytes, length: bytes) -> int:
        """PEXPIRE; with no time left it deletes the key."""
        left = whole(length)
        if left > LARGEST - self.now:
            raise Refused("ERR invalid expire time in 'pexpire' command")
        found = self.find(key)
        if found is None:
            return 0
        if left <= 0:
            del self.store[key]
        else:
            self.store[key] = (found, self.micros / 1000 + left)
        return 1

    def rename(self, key: bytes, to: bytes) -> Status:
        if self.find(key) is None:
            raise Refused("ERR no such key")
        self.store[to] = self.store.pop(key)
        return OK

    # -- hashes ------------------------------------------------------------------------

    def hget(self, key: bytes, field: bytes) -> bytes | None:
        found: Hash | None = self.of_type(Hash, key)
        return None if found is None else found.get(field)

    def hmget(self, key: bytes, *fields: bytes) -> list[bytes | None]:
        found: Hash = self.of_type(Hash, key) or Hash()
        return [found.get(field) for field in fields]

    def hgetall(self, key: bytes) -> list[bytes]:
        found: Hash = self.of_type(Hash, key) or Hash()
        return [part for pair in found.items() for part in pair]

    def hlen(self, key: bytes) -> int:
        return len(self.of_type(Hash, key) or ())

    def hset(self, key: bytes, *words: bytes) -> int:
        if len(words) % 2:
            raise Refused("ERR wrong number of arguments for 'hset' command")
        found: Hash = self.of_type(Hash, key) or Hash()
        changed = Hash(found)
        changed.update(zip(words[::2], words[1::2], strict=True))
        self.change(key, changed)
        return len(changed) - len(found)

    def hdel(self, key: bytes, *fields: bytes) -> int:
        found: Hash = self.of_type(Hash, key) or Hash()
        changed = Hash((field, value) for field, value in found.items() if field not in fields)
        self._leave(key, changed)
        return len(found) - len(changed)

    # -- sorted sets -------------------------------------------------------------------

    def zadd(self, key: bytes, score: bytes, member: bytes) -> int:
        number = real(score)
        found: SortedSet = self.of_type(SortedSet, key) or SortedSet()
        self.change(key, SortedSet({**found, member: number}))
        return int(member not in found)

    def zrem(self, key: bytes, member: bytes) -> int:
        found: SortedSet = self.of_type(SortedSet, key) or SortedSet()
        rest = SortedSet((one, score) for one, score in found.items() if one != member)
        self._leave(key, rest)
        return len(found) - len(rest)

    def zrange(self, key: bytes, first: bytes, last: bytes, *scores: bytes) -> list[bytes]:
        """ZRANGE by rank, perhaps WITHSCORES."""
        if scores not in ((), (b"WITHSCORES",)):
            raise Refused(SYNTAX)
        bounds = whole(first), whole(last)
        found: SortedSet = self.of_type(SortedSet, key) or SortedSet()
        ranked = sorted(found, key=lambda member: (found[member], member))
        begin, end = (n + len(ranked) if n < 0 else n for n in bounds)
        members = ranked[max(0, begin) : max(0, end + 1)]
        if not scores:
            return members
        return [part for it in members for part in (it, b"%.17g" % found[it])]

    # -- the rest ----------------------------------------------------------------------

    def xadd(self, key: bytes, *words: bytes) -> Any:
        """XADD with MAXLEN ~ and an id that the node makes; it keeps as many as asked for."""
        most = most_kept(words)
        found: Stream = self.of_type(Stream, key) or Stream()
        last = tuple(map(int, found[-1][0].split(b"-"))) if found else (0, 0)
        made = (self.now, 0) if self.now > last[0] else (last[0], last[1] + 1)
        entry = (b"%d-%d" % made, words[4:])
        self.change(key, Stream((*found, entry)[-most:] if most else ()))
        return entry[0]

    def publish(self, channel: bytes, message: bytes) -> int:
        return self.hear(channel, message)

    def time(self) -> list[bytes]:
        return [b"%d" % part for part in divmod(self.micros, 1_000_000)]

    def tell(self, *sections: bytes) -> bytes:
        if len(sections) > 1:
            raise Refused(SYNTAX)
        return self.info(*sections or (b"",))


def most_kept(words: Sequence[bytes]) -> int:
    """Return how many entries a stream keeps, by the *words* of XADD; Refused where Redis would."""
    if len(words) < 6 or len(words) % 2:  # noqa: PLR2004  MAXLEN ~ n * field value
        raise Refused("ERR wrong number of arguments for 'xadd' command")
    if (words[0].upper(), words[1], words[3]) != (b"MAXLEN", b"~", b"*"):
        raise Refused(SYNTAX)
    most = whole(words[2])
    if most < 0:
        raise Refused("ERR The MAXLEN argument must be >= 0.")
    return most
