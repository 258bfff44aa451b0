"""
The replies that a connection has for us by now, read without waiting for more.

Where hiredis parses them, they are taken from it directly: redis-py's layers above it take several
times as long as the reply does, and learn that there is no more by an error from the socket. TLS
may hold back bytes that no selector sees, so there redis-py reads.
"""

from __future__ import annotations

import functools
import socket
import ssl
from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING, Any, cast

from redis.exceptions import ConnectionError as Lost
from redis.exceptions import RedisError

from celery_redlock.lock.nodes.bounded import LARGEST, BoundedSocket, socket_of

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["WOULD_BLOCK", "Replies", "replies_of"]

#: Yields what has come; raises `redis.RedisError` or OSError once the connection is dead, or
#: yields a `redis.ConnectionError`: the word of a server that is loading its data, for example.
Replies = Callable[[], Iterator[Any]]

#: What a socket that never blocks raises where another would wait.
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
#: Bytes that are taken at a time [counted].
SIZE = 16384


def replies_of(connection: AbstractConnection, owed: Sized) -> Replies:
    """
    Return what reads the replies on *connection*, which never blocks and has nothing unread.

    *owed* loses what was taken after each look.
    """
    sock = socket_of(connection)
    parser = cast("Any", connection)._parser  # noqa: SLF001  redis-py has no public way to it
    reader = getattr(parser, "_reader", None)  # hiredis's
    if reader is None or reader.has_data() or isinstance(sock, ssl.SSLSocket):
        own = cast("Any", connection)._sock  # noqa: SLF001
        return by_parser(parser, owed, own if isinstance(own, BoundedSocket) else Unbounded())
    return by_hiredis(sock, reader)


class Unbounded:
    """In place of a `BoundedSocket`, for a connection in memory."""

    taken = 0

    def allow(self, size: int) -> None:
        """Allow for any size."""


def by_parser(parser: Any, owed: Sized, sock: BoundedSocket | Unbounded) -> Replies:
    whole = sock.taken

    def replies() -> Iterator[Any]:
        nonlocal whole
        taken = 0
        while True:
            sock.allow(LARGEST - (sock.taken - whole))
            try:
                reply = parser.read_response(disable_decoding=True)
            except (RedisError, OSError) as error:
                if isinstance(error, WOULD_BLOCK) or isinstance(error.__context__, WOULD_BLOCK):
                    return
                raise
            whole = sock.taken
            yield reply
            taken += 1
            if taken >= len(owed):  # to see that there is no more would take another look
                return

    return replies


def by_hiredis(sock: socket.socket, reader: Any) -> Replies:
    gets = functools.partial(reader.gets, False)  # bytes stay bytes
    nothing = gets()

    taken = 0

    def replies() -> Iterator[Any]:
        nonlocal taken
        before, is_full = taken, True
        while is_full:  # else there was room for more, so there is no more
            try:
                data = sock.recv(SIZE)
            except BlockingIOError:
                break
            if not data:
                raise Lost("Connection closed by server.")
            reader.feed(data)
            taken += len(data)
            if taken > LARGEST:
                raise Lost("An answer without end.")
            is_full = bool(data[SIZE - 1 :])
        found = iter(gets, nothing)
        return found if taken <= LARGEST // 2 else counted_anew(found, taken - before)

    def counted_anew(found: Iterator[Any], came: int) -> Iterator[Any]:
        nonlocal taken
        for reply in found:
            taken = came  # what is no whole reply yet has come since the last look
            yield reply

    return replies
