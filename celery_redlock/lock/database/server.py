"""
The other end of a connection: a thread that reads commands, and answers from a database.

A reply is written when its transaction is committed. Whatever goes wrong with the database ends the
connection, as when a server of Redis goes away: then nobody knows whether a commit was done, and
the lock's own code deals with that. Commands that have come are done before the thread ends, and
before the process does.
"""

from __future__ import annotations

import contextlib
import fcntl
import selectors
import socket
import struct
import termios
import threading
import time
import weakref
from collections.abc import Sequence

from redis.exceptions import ResponseError

from celery_redlock.lock.database.batch import MOST_AT_ONCE, Batches
from celery_redlock.lock.database.resp import encoded, parsed
from celery_redlock.lock.database.store import Broken, Busy, Store
from celery_redlock.process.ending import before_end
from celery_redlock.process.forks import members
from celery_redlock.process.log import get_logger

__all__ = ["Server"]

logger = get_logger(__name__)

#: How much is read at once [bytes].
CHUNK = 2**16
#: For how long it is known that somebody listens, and how often that is told again [s].
EARS_KEPT, EARS_TOLD = 15.0, 5.0
#: How often one looks who is not told [s].
LOOK_EVERY = 0.2
#: Longest wait for what is under way, once nobody waits for it any more [s].
GRACE = 2.0


class Server:
    """Serves *theirs*, one end of a socket pair whose other end is *ours*, from a *store*."""

    def __init__(self, theirs: socket.socket, ours: socket.socket, store: Store) -> None:
        self._socket = theirs
        self._ours = weakref.ref(ours)
        self._store = store
        self._batches = Batches(store)
        self._selector: selectors.BaseSelector | None = None
        self._works = False
        self._thread = threading.Thread(target=self._serve, name="redlock-database", daemon=True)
        _every_server.add(self)

    def start(self) -> None:
        self._thread.start()

    def after_fork_in_child(self) -> None:
        """Close our copies without a word: the thread is the parent's, and so is the connection."""
        _every_server.discard(self)  # or a child of this one closes what has the same number then
        for end in (self._socket, self._ours()):
            if end is not None:
                end.close()
        if self._selector is not None:
            self._selector.close()
        self._store.forget()

    @property
    def is_settled(self) -> bool:
        """Whether all that has come is answered."""
        try:
            has_more = waiting_in(self._socket) > 0
        except (OSError, ValueError):  # it is closed
            return True
        return not (has_more or self._works) or not self._thread.is_alive()

    def give_up(self) -> None:
        """Let it end what it is doing, but not for good, as where a database hangs."""
        self._thread.join(GRACE)
        if self._thread.is_alive():
            self._store.hang_up()

    @property
    def is_busy(self) -> bool:
        return self._thread.is_alive()

    # -- in the thread -----------------------------------------------------------------

    def _serve(self) -> None:
        data = b""
        try:
            with self._watching() as self._selector:
                while True:
                    self._works = False
                    self._await(self._selector)
                    self._works = True  # before it is read: see `is_settled`
                    if not (more := self._socket.recv(CHUNK)):
                        break
                    commands, data = parsed(data + more)
                    self._answer(commands)
        except (Broken, Busy, OSError, ValueError) as error:
            logger.debug("A connection to a database ends: %s", error)
            if self._works:
                self._say(error)
        finally:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._store.close()

    def _watching(self) -> selectors.BaseSelector:
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ)
        if self._store.fileno() >= 0:
            selector.register(self._store.fileno(), selectors.EVENT_READ)
        return selector

    def _await(self, selector: selectors.BaseSelector) -> None:
        """
        Wait until a command has come; raises Broken if the database hangs up before that.

        So an idle connection is closed to whoever uses it, too, who makes another one then and
        loses no request with this one.
        """
        while self._socket not in [key.fileobj for key, _ in selector.select()]:
            self._store.heard()  # nobody listens here yet, so what has been told is for others

    def _say(self, error: Exception) -> None:
        """Say why the connection ends, as a server of Redis does that cannot answer anybody yet."""
        with contextlib.suppress(OSError):
            self._socket.sendall(encoded(ResponseError(f"LOADING {error}")))

    def _answer(self, commands: Sequence[Sequence[bytes]]) -> None:
        for first in range(0, len(commands), MOST_AT_ONCE):
            batch = commands[first : first + MOST_AT_ONCE]
            channel = next((one[1] for one in batch if one[0].upper() == b"SUBSCRIBE"), None)
            if channel is not None:
                self._listen(channel)
                return
            self._socket.sendall(b"".join(map(encoded, self._batches.answers(batch))))
            self._batches.sweep()

    def _listen(self, channel: bytes) -> None:
        self._works = False  # nothing that is told here has to arrive
        is_told = self._store.listen(channel)
        try:
            told_at = self._open_ears(channel, is_told=is_told)
            # Not before: a release meanwhile would tell nobody, and who listens count on it.
            self._socket.sendall(encoded([b"subscribe", channel, 1]))
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                if is_told:
                    selector.register(self._store.fileno(), selectors.EVENT_READ)
                while True:
                    if time.monotonic() - told_at > EARS_TOLD:
                        told_at = self._open_ears(channel, is_told=is_told)
                    ready = selector.select(EARS_TOLD if is_told else LOOK_EVERY)
                    if self._socket in [key.fileobj for key, _ in ready]:
                        if not self._socket.recv(CHUNK):
                            return
                        self._socket.sendall(encoded([b"pong", b""]))
                    told = self._store.heard() if is_told else self._store.empty_inbox(channel)
                    for message in told:
                        self._socket.sendall(encoded([b"message", channel, message]))
        finally:
            with contextlib.suppress(Broken, Busy):
                self._store.close_ears(channel)

    def _open_ears(self, channel: bytes, *, is_told: bool) -> float:
        """Let it be known for a while that somebody listens; return since when [s, our clock]."""
        now = time.monotonic()
        ends = self._store.read(()).micros + int(EARS_KEPT * 1e6)
        self._store.open_ears(channel, is_polled=not is_told, ends=ends)
        return now


def waiting_in(sock: socket.socket) -> int:
    """Return how many bytes have come and were not read [bytes]."""
    (found,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.FIONREAD, b"    "))
    return int(found)


def settle() -> None:
    """Wait until all that was told is in the databases, for two seconds at most."""
    until = time.monotonic() + GRACE
    while not all(server.is_settled for server in list(_every_server)):
        if time.monotonic() > until:
            return
        time.sleep(0.002)


_every_server: weakref.WeakSet[Server] = members("database")
before_end(settle)
