"""The keys that a transaction has loaded, as a keyspace: what is missing, and what has changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery_redlock.keyspace.keys import Keyspace, most_kept
from celery_redlock.keyspace.values import SYNTAX, WRONG_TYPE, Refused, Status
from celery_redlock.lock.database.rows import (
    ENTRY,
    Head,
    Row,
    Writes,
    difference,
    entries_key,
    entry_part,
    values_of,
)
from celery_redlock.lock.scripts.scripting import pack

__all__ = ["EARS", "INBOX", "NO_RENAME", "Loaded", "NotLoaded"]

#: What the key of who listens to a channel begins with, and that of what such a one is yet to hear.
EARS, INBOX = b"\0ears:", b"\0inbox:"
NO_RENAME = "ERR a stream in a database cannot be renamed"


class NotLoaded(Exception):
    """A command touches a key that was not loaded."""

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self.key = key


class Loaded(Keyspace):
    """The *keys* of a transaction, which begin as *rows* say, at *micros* [us, Unix time]."""

    def __init__(self, keys: Iterable[bytes], rows: Iterable[Row], micros: int) -> None:
        super().__init__()
        self.micros, self.hear = micros, self._publish
        self._keys = frozenset(keys)
        self._before = values_of(rows)
        self.store = {key: it for key, it in self._before.items() if micros / 1000 < it[1]}
        self._trimmed: dict[bytes, int] = {}
        self._told: list[tuple[bytes, bytes]] = []

    def find(self, key: bytes) -> Any:
        if key not in self._keys and key not in self.store:
            raise NotLoaded(key)
        return super().find(key)

    @property
    def changed(self) -> set[bytes]:
        """Keys that are to be written, or deleted before their time."""
        before = self._before
        written = {key for key, it in self.store.items() if before.get(key) is not it}
        return written | {key for key in before if key not in self.store and not self._is_over(key)}

    def _is_over(self, key: bytes) -> bool:
        return key in self._before and self.micros / 1000 >= self._before[key][1]

    def writes(self, *, swept: bool = False) -> Writes:
        """Return what is to be written; where it *swept*, what has expired is deleted, too."""
        deleted = {key for key in self.changed if key not in self.store}
        if swept:
            deleted |= {key for key in self._before if self._is_over(key)} - set(self.store)
        keys, parts, rows = list(deleted), list[tuple[bytes, bytes]](), list[Row]()
        for key in self.changed - deleted:
            before = None if self._is_over(key) else self._before.get(key)
            is_anew, gone, more = difference(key, before, self.store[key])
            keys += [key] if is_anew or self._is_over(key) else []
            parts += [(key, part) for part in gone]
            rows += more
            value = self.store[key][0]
            rows += value.fresh if isinstance(value, Head) else ()
        return Writes(keys, parts, rows, self._trimmed, self._told)

    # -- streams, of which only the head is loaded ---------------------------------------

    def xadd(self, key: bytes, *words: bytes) -> Any:
        if words[0].upper() == b"NOMKSTREAM":
            if self.find(key) is None:
                return None
            raise Refused(SYNTAX)
        most = most_kept(words)
        found = self.find(key)
        if found is not None and not isinstance(found, Head):
            raise Refused(WRONG_TYPE)
        head = found or Head(is_new=True)
        made = (self.now, 0) if self.now > head.last[0] else (head.last[0], head.last[1] + 1)
        length = head.length + 1
        entry = Row(entries_key(key), entry_part(*made), ENTRY, pack(*words[4:]), None)
        if length > most + most // 8 + 8:
            self._trimmed[entries_key(key)] = length = most
        self.change(key, Head(made, length, (*head.fresh, entry), head.is_new))
        return b"%d-%d" % made

    def rename(self, key: bytes, to: bytes) -> Status:
        """RENAME, but of a stream, whose entries are rows of its name."""
        if isinstance(self.find(key), Head):
            raise Refused(NO_RENAME)
        self.find(to)  # what is there is replaced, and so has to be known
        return super().rename(key, to)

    # -- hints ---------------------------------------------------------------------------

    def _publish(self, channel: bytes, message: bytes) -> int:
        """PUBLISH: tell who listens, if there is one; a poller finds it in its inbox."""
        ears = self.find(EARS + channel)
        if ears is None:
            return 0
        if ears == b"poll":
            inbox = INBOX + channel
            found = self.find(inbox)
            entry = b"%016d-%06d" % (self.micros, len(found or ()))
            super().hset(inbox, entry, message)
            self.store[inbox] = (self.store[inbox][0], self.micros / 1000 + 60_000)
        else:
            self._told.append((channel, message))
        return 1
