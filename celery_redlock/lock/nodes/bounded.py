"""
Connections whose every exchange ends by a deadline, and takes no more memory than it may.

A socket's own timeout is for one read: a server that sends a byte now and then keeps a client
waiting for good, and one that sends without end fills its memory. So the socket of a connection
is one that knows until when an exchange may last, and how many bytes it may bring.
"""

from __future__ import annotations

import functools
import socket
import time
from typing import TYPE_CHECKING, Any, cast

from redis.exceptions import ConnectionError as Lost
from redis.exceptions import InvalidResponse, NoPermissionError

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = [
    "LARGEST",
    "BoundedSocket",
    "begin_exchange",
    "bounded",
    "end_exchange",
    "socket_of",
]

#: Longest exchange [s], unless the URL allows for more with its ``socket_timeout``.
LONGEST = 3.0
#: Largest answer to one [bytes].
LARGEST = 2**24


class BoundedSocket:
    """
    A socket, or TLS socket, that ends an exchange longer than *longest* [s] by TimeoutError.

    One that brings too much ends by OSError; *taken* counts the bytes that have come.
    """

    def __init__(self, raw: socket.socket, longest: float) -> None:
        self.raw = raw
        self._longest = longest
        self._timeout = raw.gettimeout()
        self._ends, self._left = float("inf"), float("inf")
        self.taken = 0
        # No code of ours on the way out, which a signal could tear apart.
        self.shutdown, self.close, self.fileno = raw.shutdown, raw.close, raw.fileno

    def begin(self) -> None:
        self._ends, self._left = time.monotonic() + self._longest, LARGEST

    def end(self) -> None:
        self._ends = self._left = float("inf")
        self.raw.settimeout(self._timeout)

    def allow(self, size: int) -> None:
        self._left = size

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds
        self.raw.settimeout(seconds)

    def recv(self, size: int, *flags: int) -> bytes:
        self._wait_no_longer()
        data = self.raw.recv(size, *flags)
        self._take(len(data))
        return data

    def recv_into(self, buffer: Any, *args: int) -> int:
        self._wait_no_longer()
        count = self.raw.recv_into(buffer, *args)
        self._take(count)
        return count

    def sendall(self, data: Any, *flags: int) -> None:
        self._wait_no_longer()
        self.raw.sendall(data, *flags)

    def _wait_no_longer(self) -> None:
        if self._ends == float("inf") or self._timeout == 0:
            return
        left = self._ends - time.monotonic()
        if left <= 0:
            msg = f"no whole answer within {self._longest:g} s"
            raise TimeoutError(msg)
        self.raw.settimeout(left if self._timeout is None else min(left, self._timeout))

    def _take(self, count: int) -> None:
        self._left -= count
        self.taken += count
        if self._left < 0:
            msg = f"an answer of more than {LARGEST // 2**20} MiB"
            raise OSError(msg)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


class _Bounded:
    """Of a connection of redis-py's: its socket is bounded, from its first greeting on."""

    host: str
    client_name: str | None
    socket_timeout: float | None
    via = ""  # the network address to connect to, of several that its host has
    in_cluster = False  # whether the node is a cluster, of which this server has our keys

    def connect(self) -> None:
        try:
            cast("Any", super()).connect()
        except NoPermissionError:
            if self.client_name is None:
                raise
            self.client_name = None  # it may be CLIENT that we must not use, which nobody needs
            cast("Any", super()).connect()

    def _connect(self) -> BoundedSocket:
        name, self.host = getattr(self, "host", ""), self.via or getattr(self, "host", "")
        self._name = name
        try:
            raw = cast("Any", super())._connect()  # noqa: SLF001
        except UnicodeError as error:
            msg = f"there can be no host of this name: {error}"
            raise Lost(msg) from None
        finally:
            self.host = name
        sock = BoundedSocket(raw, max(LONGEST, 2 * (self.socket_timeout or 0.0)))
        sock.begin()
        return sock

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> Any:
        self.host = self._name  # which its certificate is for
        timeout = sock.gettimeout()
        sock.settimeout(LONGEST if timeout is None else timeout)  # also for the handshake
        wrapped = cast("Any", super())._wrap_socket_with_ssl(sock)  # noqa: SLF001
        wrapped.settimeout(timeout)
        return wrapped

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return cast("Any", super()).read_response(*args, **options)
        except MemoryError:  # it has announced more than there can be
            msg = "an answer that is too large"
            raise InvalidResponse(msg) from None
        except (ValueError, RecursionError):
            msg = "an answer that no server gives"
            raise InvalidResponse(msg) from None


@functools.cache
def bounded(kind: type) -> type:
    return type(f"Bounded{kind.__name__}", (_Bounded, kind), {})


def begin_exchange(connection: AbstractConnection) -> None:
    sock = getattr(connection, "_sock", None)
    if isinstance(sock, BoundedSocket):
        sock.begin()


def end_exchange(connection: AbstractConnection) -> None:
    """Bound no more what *connection* brings: from now on somebody else does."""
    sock = getattr(connection, "_sock", None)
    if isinstance(sock, BoundedSocket):
        sock.end()


def socket_of(connection: AbstractConnection) -> Any:
    """Return the socket of *connection*, which redis-py has no public way to."""
    sock = cast("Any", connection)._sock  # noqa: SLF001
    return sock.raw if isinstance(sock, BoundedSocket) else sock
