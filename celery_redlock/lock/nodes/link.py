"""
One long-lived connection to a node: what it is yet to take, and the replies it owes.

Redis answers a connection in the order of its requests, so the n-th reply belongs to the n-th
request and nothing else is needed to match them. Nothing here waits: what a node cannot take
right now is sent when it can.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from celery_redlock.lock import clock
from celery_redlock.lock.nodes.bounded import end_exchange, socket_of
from celery_redlock.lock.nodes.replies import WOULD_BLOCK, Replies, replies_of
from celery_redlock.lock.nodes.round import Round

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["NEVER", "PATIENCE", "Gone", "Link", "Owed", "Stale"]

#: Oldest unanswered request with which a connection is kept [s].
PATIENCE = 2.0
#: Longest wait for a node to read what it was sent before a connection was closed [s].
LONGEST_FAREWELL = 30.0
#: How much may wait until a node takes it before its connection is given up [bytes].
LARGEST_UNSENT = 2**20
#: How much is read at once from a node whose answers nobody wants any more [bytes].
LARGEST_READ = 2**16
NEVER = float("inf")

#: A reply that a node owes: to which round (None for one of our own), and since when [s].
Owed = tuple["Round | None", float]


class Gone(Exception):
    """The connection to a node is no longer usable; says why."""


class Stale(Gone):
    """The connection was idle for long, and something on the way has dropped it."""


class Link:
    """A connection that is written and read without waiting, once a node was greeted."""

    def __init__(self) -> None:
        self.connection: AbstractConnection | None = None
        self.unsent = b""  # goes out as soon as the socket can be written to
        #: Since when the node owes an answer and has taken nothing more [s].
        self.quiet_since = NEVER
        self._took_more = -NEVER  # when it last took some of what waited to be sent [s]
        self._owed: list[Owed] = []
        self._replies: Replies = lambda: iter(())

    def _open(self, connection: AbstractConnection) -> None:
        self._owed.clear()
        self.quiet_since = NEVER
        end_exchange(connection)
        self.sock = socket_of(connection)
        self.sock.settimeout(0)
        self.unsent = b""
        self._replies = replies_of(connection, self._owed)
        self.connection = connection

    def _write(self, data: bytes, now: float) -> None:
        """Send *data* behind what waits to be sent; what cannot be sent now waits, too."""
        if self.quiet_since == NEVER:
            self.quiet_since = now
        if self.unsent:
            self.unsent += data
            self.flush()
            return
        try:
            self.unsent = data[self.sock.send(data) :]
        except WOULD_BLOCK:
            self.unsent = data
        except OSError as error:
            raise Gone(str(error)) from error

    def flush(self) -> None:
        """Send more of what waits; raises Gone if the connection is dead, or takes too little."""
        waiting, self.unsent = self.unsent, b""
        if waiting:
            now = clock.now()
            self._write(waiting, now)
            if len(self.unsent) < len(waiting):
                self._took_more = now
                self.quiet_since = now if self._owed else NEVER
        if len(self.unsent) > LARGEST_UNSENT:
            msg = "takes no more requests"
            raise Gone(msg)


def read_out_in_thread(connection: AbstractConnection) -> None:
    """
    Hang up once the other end has read all that was sent to it, e.g. a release.

    A node that is behind sends its answers to a connection that was closed, is told so, and
    throws away what it has not read. So it is read from until it hangs up.
    """
    run = threading.Thread(target=read_out, args=(connection,), daemon=True)
    try:
        run.start()
    except RuntimeError:  # out of threads, or at the end of the process
        connection.disconnect()


def read_out(connection: AbstractConnection) -> None:
    sock = socket_of(connection)
    with contextlib.suppress(OSError):
        sock.settimeout(PATIENCE)
        sock.shutdown(socket.SHUT_WR)
        ends = clock.now() + LONGEST_FAREWELL
        while sock.recv(LARGEST_READ) and clock.now() < ends:
            pass
    connection.disconnect()
