"""
A database that is spoken to as a server of Redis is, at a port of its own.

    with database_server("sqlite:////tmp/locks.db") as server:
        redis.Redis.from_url(server.url).set("a", "1", px=1000)

What locks need is answered by the package's own `Server`, a connection to the database for each
one to the port. What only tests ask is answered here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from celery_redlock.keyspace.commands import COMMANDS
from celery_redlock.keyspace.engine import Engine
from celery_redlock.keyspace.keys import Keyspace
from celery_redlock.keyspace.values import OK, Hash, Refused, SortedSet
from celery_redlock.lock.database import address, batch, postgresql_words, sqlite
from celery_redlock.lock.database.address import DatabaseAddress
from celery_redlock.lock.database.batch import MOST_AT_ONCE
from celery_redlock.lock.database.loaded import EARS, INBOX
from celery_redlock.lock.database.patterns import matcher
from celery_redlock.lock.database.resp import encoded
from celery_redlock.lock.database.rows import Head
from celery_redlock.lock.database.server import CHUNK, Server
from celery_redlock.lock.database.store import META, Broken, Busy, Store
from celery_redlock.testing.ports import HOST
from support.waiting import eventually

__all__ = ["DatabaseServer", "database_server", "hashes_by_name", "patient"]

#: How often a listener looks for messages that nobody tells it of [s].
LOOK_EVERY = 0.01
#: For how long it is known that somebody listens [us].
EARS_KEPT = 3600 * 10**6
MOST_KEYS = 10**6
#: Imported only where psycopg is here.
POSTGRESQL = "celery_redlock.lock.database.postgresql"


class DatabaseServer:
    """
    What `celery_redlock.testing.servers.Server` is to tests, before a database.

    Attributes:
        port: TCP port.
        scripts: Those that were loaded, over whichever connection.
    """

    def __init__(self, url: str) -> None:
        self._address = DatabaseAddress(url)
        self._address.make_tables()
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.scripts: dict[bytes, Any] = {}
        self.runs = threading.Event()
        self.runs.set()
        self._wires: list[Wire] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def pause(self) -> None:
        """Answer nothing, and still accept connections, as a process that was stopped does."""
        self.runs.clear()

    def resume(self) -> None:
        self.runs.set()

    def stop(self) -> None:
        self.resume()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for wire in self._wires:
            wire.hang_up()
        eventually(lambda: not self.is_busy, "end of all connections")

    @property
    def is_busy(self) -> bool:
        return any(wire.is_busy for wire in self._wires)

    def await_silence(self) -> None:
        """Wait until those who listened and have hung up are forgotten in the database, too."""
        eventually(lambda: not any(wire.listens_in_vain for wire in self._wires), "silence")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                theirs, _ = self._listener.accept()
                self._wires = [wire for wire in self._wires if wire.is_busy]
                try:
                    wire = Wire(self, theirs, self._address.store())
                except (Broken, Busy):
                    theirs.close()
                    continue
                self._wires.append(wire)
                wire.start()


class Wire(Server):
    """One connection to the port, and one to the database."""

    def __init__(self, server: DatabaseServer, theirs: socket.socket, store: Store) -> None:
        super().__init__(theirs, theirs, store)
        self._server = server
        self._is_resp3 = False
        self._channels: list[bytes] = []
        self._engine = self._batches._engine = Commands(self._is_asked_in_resp3)
        self._engine.scripts = server.scripts
        self._batches._outside |= {
            b"CLIENT": lambda *_: OK,
            b"CONFIG": lambda *_: OK,
            b"FLUSHALL": self._flush,
            b"HELLO": self._greet,
            b"KEYS": self._keys,
            b"PUBSUB": self._count_ears,
            b"SELECT": lambda *_: OK,
        }

    def _is_asked_in_resp3(self) -> bool:
        return self._is_resp3

    @property
    def listens_in_vain(self) -> bool:
        if not self._channels or not self.is_busy:
            return False
        with contextlib.suppress(OSError, ValueError):
            return bool(select.select([self._socket], [], [], 0)[0])
        return True

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _answer(self, commands: Sequence[Sequence[bytes]]) -> None:
        self._server.runs.wait()
        for command in commands:
            if command[0].upper() == b"SUBSCRIBE":
                self._channels = list(command[1:])
                self._hear()
                return
        for first in range(0, len(commands), MOST_AT_ONCE):
            replies = self._batches.answers(commands[first : first + MOST_AT_ONCE])
            encode = in_resp3 if self._is_resp3 else encoded
            self._socket.sendall(b"".join(map(encode, replies)))
            self._batches.sweep()

    # -- what only tests ask -----------------------------------------------------------

    def _greet(self, protocol: bytes, *_: bytes) -> Any:
        self._is_resp3 = protocol == b"3"
        return {b"server": b"redis", b"proto": 3} if self._is_resp3 else []

    def _keys(self, pattern: bytes = b"*") -> list[bytes]:
        found, matches = self._store.page(b"", b"", MOST_KEYS), matcher(pattern)
        now = self._store.read(()).micros
        kept = [key for key, ends in found if ends is None or now < ends]
        return [key for key in kept if key[:1] != b"\0" and matches(key)]

    def _flush(self, *_: bytes) -> bytes:
        self._server.await_silence()
        kept = f"key = {self._store.literal(META)} OR substr(key, 1, {len(EARS)}) = " + (
            self._store.literal(EARS)
        )
        self._store.run(f"DELETE FROM {self._store.table} WHERE NOT ({kept})")
        return OK

    def _count_ears(self, _: bytes, *channels: bytes) -> list[Any]:
        rows = self._store.read([EARS + channel for channel in channels]).rows
        known = {row.key for row in rows}
        return [it for one in channels for it in (one, int(EARS + one in known))]

    # -- who listens -------------------------------------------------------------------

    def _hear(self) -> None:
        """Listen to several channels over one connection, which the package never does."""
        store, told = self._store, {}
        ends = store.read(()).micros + EARS_KEPT
        for channel in self._channels:
            if store.hears:
                name = store._channel(channel)  # type: ignore[attr-defined]
                told[name] = channel
                store.run(f"LISTEN {name}")
            store.open_ears(channel, is_polled=not told, ends=ends)
        for n, channel in enumerate(self._channels):
            self._socket.sendall(self._pushed([b"subscribe", channel, n + 1]))
        try:
            while not select.select([self._socket], [], [], LOOK_EVERY)[0] or (
                self._socket.recv(CHUNK)
            ):
                for channel, message in self._told_of(told) if told else self._found():
                    self._socket.sendall(self._pushed([b"message", channel, message]))
        finally:
            for channel in self._channels:
                with contextlib.suppress(Broken, Busy):
                    store.close_ears(channel)

    def _told_of(self, told: dict[str, bytes]) -> Iterator[tuple[bytes, bytes]]:
        connection: Any = self._store._connection  # type: ignore[attr-defined]
        connection.pgconn.consume_input()
        while (one := connection.pgconn.notifies()) is not None:
            yield told[one.relname.decode()], bytes.fromhex(one.extra.decode())

    def _found(self) -> list[tuple[bytes, bytes]]:
        """Return what is in all inboxes, in the order in which it came."""
        store = self._store
        inboxes = {INBOX + channel: channel for channel in self._channels}
        try:
            (rows,) = store.run(
                f"DELETE FROM {store.table} WHERE key IN ({store.literals(inboxes)}) "
                "RETURNING part, key, value"
            )
        except Busy:
            return []
        return [(inboxes[bytes(key)], bytes(text)) for part, key, text in sorted(rows) if part]

    def _pushed(self, words: list[Any]) -> bytes:
        text = encoded(words)
        return b">" + text[1:] if self._is_resp3 else text


class Commands(Engine):
    """What scripts may call, and what tests use besides."""

    def __init__(self, is_asked_in_resp3: Callable[[], bool]) -> None:
        super().__init__(Keyspace())
        self._is_resp3 = is_asked_in_resp3
        self._more: dict[bytes, Callable[..., Any]] = {
            b"HINCRBY": self._hincrby,
            b"HKEYS": lambda key: list(self.keyspace.of_type(Hash, key) or ()),
            b"RPUSH": self._rpush,
            b"TTL": lambda key: math.ceil(self.keyspace.pttl(key) / 1000),
            b"TYPE": self._type,
            b"XLEN": lambda key: (self.keyspace.of_type(Head, key) or Head()).length,
            b"ZCARD": lambda key: len(self.keyspace.of_type(SortedSet, key) or ()),
        }

    def _do(self, name: bytes, words: Sequence[bytes]) -> Any:
        if name in self._more:
            return self._more[name](*words)
        if name == b"ZADD" and len(words) > 3:  # several members
            several = zip(words[1::2], words[2::2], strict=True)
            return sum(super(Commands, self)._do(name, (words[0], *one)) for one in several)
        reply = super()._do(name, words)
        is_scored = name == b"ZRANGE" and len(words) > 3
        if (
            not self._is_resp3()
            or not isinstance(reply, list)
            or not (is_scored or name == b"HGETALL")
        ):
            return reply
        pairs = list(zip(reply[::2], reply[1::2], strict=True))
        return [[one, float(score)] for one, score in pairs] if is_scored else dict(pairs)

    def _hincrby(self, key: bytes, field: bytes, more: bytes) -> int:
        number = int(self.keyspace.hget(key, field) or 0) + int(more)
        self.keyspace.hset(key, field, b"%d" % number)
        return number

    def _rpush(self, key: bytes, *words: bytes) -> int:
        """There are no lists: to whoever expects something else, an empty stream is as good."""
        if self.keyspace.find(key) is not None:
            raise Refused("WRONGTYPE Operation against a key holding the wrong kind of value")
        self.keyspace.change(key, Head())
        return len(words)

    def _type(self, key: bytes) -> bytes:
        names = {bytes: b"string", Hash: b"hash", SortedSet: b"zset", Head: b"stream"}
        found = self.keyspace.find(key)
        return b"none" if found is None else names[type(found)]


def in_resp3(reply: Any) -> bytes:
    if reply is None:
        return b"_\r\n"
    if isinstance(reply, float):
        return b",%b\r\n" % (b"%.17g" % reply)
    if isinstance(reply, dict):
        parts = [part for pair in reply.items() for part in pair]
        return b"%%%d\r\n%b" % (len(reply), b"".join(map(in_resp3, parts)))
    if isinstance(reply, (list, tuple)):
        return b"*%d\r\n%b" % (len(reply), b"".join(map(in_resp3, reply)))
    return encoded(reply)


@contextlib.contextmanager
def hashes_by_name() -> Iterator[None]:
    """
    Have hashes tell their fields by name, here and in memory: as rows they have no order.

    No script of ours needs one, but who compares replies does.
    """

    def hgetall(keys: Keyspace, key: bytes) -> list[bytes]:
        told = keys.hgetall(key)
        pairs = sorted(zip(told[::2], told[1::2], strict=True))
        return [part for pair in pairs for part in pair]

    by_name = replace(COMMANDS[b"HGETALL"], do=hgetall)
    with mock.patch.dict(COMMANDS, {b"HGETALL": by_name}):
        yield


@contextlib.contextmanager
def patient(seconds: int) -> Iterator[None]:
    """Have connections that are made meanwhile bear with a machine that stands still so long."""
    limits = tuple(re.sub(r"\d+$", str(seconds * 1000), one) for one in postgresql_words.LIMITS)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(batch, "LONGEST", seconds))
        stack.enter_context(mock.patch.object(sqlite, "PATIENCE", seconds))
        stack.enter_context(mock.patch.object(address, "TIMEOUT", seconds))
        if importlib.util.find_spec("psycopg"):
            for name, value in {"LIMITS": limits, "ECHO": seconds, "LONGEST": seconds}.items():
                stack.enter_context(mock.patch(f"{POSTGRESQL}.{name}", value))
            dialled = {"connect_timeout": seconds}
            stack.enter_context(mock.patch.dict(f"{POSTGRESQL}_url.OPTIONS", dialled))
        yield


@contextlib.contextmanager
def database_server(url: str) -> Iterator[DatabaseServer]:
    server = DatabaseServer(url)
    try:
        yield server
    finally:
        server.stop()
