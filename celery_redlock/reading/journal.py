"""
The journal of what happened lately, for operators: a capped stream on each lock node.

Every record is written to all nodes over the connections that locks are taken on, and nobody waits
for it. A reader asks all nodes and takes each record once, so records outlive the process that
wrote them and the loss of nodes. It is no audit log: a node that is away when something happens
misses it, and old records make room for new ones.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from celery_redlock.lock.nodes.address import Address, addresses_of
from celery_redlock.lock.nodes.guard import exchange, read_as
from celery_redlock.lock.records import encode_info, ms, object_in
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import Request
from celery_redlock.lock.scripts.scripting import Script, read_release, register
from celery_redlock.reading.nodes import ask_all
from celery_redlock.words import number

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

    from celery_redlock.lock.redlock import Redlock

__all__ = [
    "JournalReader",
    "Record",
    "journal_key",
    "newest_command",
    "newest_of",
    "write_record",
]

Record = dict[str, Any]
#: How many records a node keeps, about; one has 200 to 600 bytes.
KEPT = 2000
#: How long a journal is kept after its last record [s]: a week.
RETENTION = 7 * 24 * 3600.0
#: Records that a reader remembers having seen.
REMEMBERED = 4 * KEPT
#: Records that a reader asks a node for at once.
PAGE = 500
#: A longer record is not written: nothing that we write is.
LONGEST = 8192

# KEYS 1 journal ; ARGV 1 record 2 how many are kept, about 3 for how long after the last one
RECORD_LUA = """
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'e', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {1, 0}
"""
RECORD = Script(RECORD_LUA, read_release, guarded=False)
register(RECORD)


def journal_key(prefix: str) -> bytes:
    return f"{prefix}:journal".encode()


def record_request(rules: Rules, record: bytes) -> Request:
    arguments = (record, b"%d" % KEPT, ms(RETENTION))
    return Request(RECORD, (journal_key(rules.prefix),), arguments)


def write_record(locks: Redlock, record: Record) -> None:
    """Write *record*, of plain JSON values, to the nodes of *locks* without waiting."""
    line = encode_info({"id": secrets.token_hex(8), **record})
    if len(line) <= LONGEST:
        locks.driver.tell(record_request(locks.rules, line))


class JournalReader:
    """Reads the journals of all nodes as one, on connections of its own."""

    def __init__(self, nodes: Sequence[Any], rules: Rules) -> None:
        self._prefix = rules.prefix
        self._addresses = addresses_of(nodes, rules.prefix)
        self._connections: dict[str, AbstractConnection] = {}
        self._after: dict[str, bytes] = {}
        self._seen: dict[str, None] = {}

    def recent(self, count: int = PAGE) -> list[Record]:
        """Return the newest *count* records of all nodes, oldest first, and go on from there."""
        return self._news(lambda connection, label: self._last(connection, label, count))[-count:]

    def new(self) -> list[Record]:
        return self._news(self._next)

    @property
    def silent(self) -> list[str]:
        """Labels of the nodes that did not answer when they were last asked."""
        return [it.label for it in self._addresses if it.label not in self._connections]

    def close(self) -> None:
        for label in list(self._connections):
            self._hang_up(label)

    def _news(self, read: Callable[[AbstractConnection, str], list[bytes]]) -> list[Record]:
        """Return what *read* finds on all nodes and was not met before, oldest first."""

        def ask(address: Address) -> list[bytes]:
            try:
                return read(self._connected(address), address.label)
            except (RedisError, OSError):  # the others have it, too
                self._hang_up(address.label)
                return []

        found = once(chain.from_iterable(ask_all(self._addresses, ask)))
        news = [record for ident, record in found.items() if ident not in self._seen]
        self._seen.update(dict.fromkeys(found))
        for ident in list(islice(self._seen, max(0, len(self._seen) - REMEMBERED))):
            del self._seen[ident]
        return sorted(news, key=when)

    def _last(self, connection: AbstractConnection, label: str, count: int) -> list[bytes]:
        (entries,) = exchange(connection, newest_command(self._prefix, count))
        found = read_as("the journal", entries_in, entries)
        self._after[label] = found[0][0] if found else b"0-0"
        return [line for _, line in reversed(found)]

    def _next(self, connection: AbstractConnection, label: str) -> list[bytes]:
        lines: list[bytes] = []
        while True:
            begin = b"(" + self._after.get(label, b"0-0")
            command = (b"XRANGE", journal_key(self._prefix), begin, b"+", b"COUNT", b"%d" % PAGE)
            (entries,) = exchange(connection, command)
            found = read_as("the journal", entries_in, entries)
            lines += [line for _, line in found]
            if not found or len(lines) > REMEMBERED:
                return lines
            self._after[label] = found[-1][0]

    def _connected(self, address: Address) -> AbstractConnection:
        if address.label not in self._connections:
            connection = address.connection()
            connection.connect()
            self._connections[address.label] = connection
        return self._connections[address.label]

    def _hang_up(self, label: str) -> None:
        connection = self._connections.pop(label, None)
        if connection is not None:
            with contextlib.suppress(RedisError, OSError):
                connection.disconnect()


def entries_in(entries: Any) -> list[tuple[bytes, bytes]]:
    found = [(ident, fields[1]) for ident, fields in entries]
    if not all(isinstance(part, bytes) for pair in found for part in pair):
        raise TypeError
    return found


def newest_command(prefix: str, count: int) -> Sequence[Any]:
    return b"XREVRANGE", journal_key(prefix), b"+", b"-", b"COUNT", b"%d" % count


def newest_of(replies: Iterable[Any], count: int) -> list[Record]:
    """Return the newest *count* records in *replies* to `newest_command`, oldest first."""
    lines: list[bytes] = []
    for reply in replies:
        with contextlib.suppress(RedisError):  # the others have it, too
            found = read_as("the journal", entries_in, reply)
            lines += [line for _, line in reversed(found)]
    return sorted(once(lines).values(), key=when)[-count:]


def once(lines: Iterable[bytes]) -> dict[str, Record]:
    """Return the records in *lines* by their ids; empty lines and those of others are left out."""
    found: dict[str, Record] = {}
    for record in map(object_in, lines):
        ident = record.get("id")
        if isinstance(ident, str):
            found.setdefault(ident, record)
    return found


def when(record: Record) -> float:
    return number(record.get("at"))
