"""Redis commands that the library's scripts use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from celery_redlock.keyspace.keys import Keyspace

__all__ = ["COMMANDS", "Command"]


@dataclass(frozen=True, slots=True)
class Command:
    do: Callable[..., Any]
    least: int  # arguments at least
    most: float = float("inf")  # at most
    writes: bool = False  # whether it may change the keys
    grows: bool = False  # whether it may need memory, so that a full server refuses it

    def fits(self, words: Sequence[bytes]) -> bool:
        return self.least <= len(words) <= self.most


# A keyspace over rows has ways of its own for streams and for messages.
COMMANDS = {
    b"DEL": Command(Keyspace.delete, 1, writes=True),
    b"EXISTS": Command(Keyspace.exists, 1),
    b"GET": Command(Keyspace.get, 1, 1),
    b"HDEL": Command(Keyspace.hdel, 2, writes=True),
    b"HGET": Command(Keyspace.hget, 2, 2),
    b"HGETALL": Command(Keyspace.hgetall, 1, 1),
    b"HLEN": Command(Keyspace.hlen, 1, 1),
    b"HMGET": Command(Keyspace.hmget, 2),
    b"HSET": Command(Keyspace.hset, 3, writes=True, grows=True),
    b"INFO": Command(Keyspace.tell, 0),
    b"MGET": Command(Keyspace.mget, 1),
    b"PEXPIRE": Command(Keyspace.pexpire, 2, 2, writes=True),
    b"PTTL": Command(Keyspace.pttl, 1, 1),
    b"PUBLISH": Command(lambda keys, *words: keys.publish(*words), 2, 2),
    b"RENAME": Command(lambda keys, *words: keys.rename(*words), 2, 2, writes=True),
    b"SET": Command(Keyspace.set, 2, writes=True, grows=True),
    b"TIME": Command(Keyspace.time, 0, 0),
    b"XADD": Command(lambda keys, *words: keys.xadd(*words), 4, writes=True, grows=True),
    b"ZADD": Command(Keyspace.zadd, 3, 3, writes=True, grows=True),
    b"ZRANGE": Command(Keyspace.zrange, 3, 4),
    b"ZREM": Command(Keyspace.zrem, 2, 2, writes=True),
}
