"""
Listen on all lock nodes for the locks that this process waits for.

One thread and one connection per node, while somebody waits and for a minute after that. What is
heard is a hint: `celery_redlock.lock.waiting.room` says whom it wakes, who has to acquire the lock
yet.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from celery_redlock.lock import clock
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.nodes.bounded import begin_exchange, end_exchange
from celery_redlock.lock.records import CHANNEL_LENGTH, channel
from celery_redlock.lock.waiting.room import Room, Waiting
from celery_redlock.process.deferral import defer_signals
from celery_redlock.process.forks import members
from celery_redlock.process.log import get_logger
from celery_redlock.process.mutex import new_mutex

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

    from celery_redlock.lock.nodes.address import Address

__all__ = ["Listener"]

logger = get_logger(__name__)

#: How long the connections are kept when nobody waits any more [s].
IDLE = 60.0
#: How often a node that says nothing is asked whether it is there [s].
PING_EVERY = 15.0
#: How often a thread looks whether it is still wanted [s].
LOOK_EVERY = 5.0
#: Pause before a node is connected again [s].
SHORTEST_BACKOFF, LONGEST_BACKOFF = 0.2, 10.0


class Listener:
    """All that one process hears from the nodes. Safe from any thread, and after a fork."""

    def __init__(
        self, addresses: Sequence[Address], prefix: str, round_trip: Callable[[int], float]
    ) -> None:
        self._addresses = tuple(addresses)
        self._prefix = prefix
        self._round_trip = round_trip
        self._user: Callable[[], object] = lambda: self
        self.start_over()
        _every_listener.add(self)

    def serve(self, user: object) -> None:
        """Hear no more once *user* is gone: dropped, and never closed."""
        self._user = weakref.ref(user)

    def start_over(self) -> None:
        self._mutex = new_mutex()
        self._process = secrets.token_hex(CHANNEL_LENGTH // 2)
        self.room = Room(quorum(len(self._addresses)), self._round_trip)
        self._listening: set[int] = set()
        self._unused_since = clock.now()
        self._closed = threading.Event()
        self._connections: set[AbstractConnection] = set()

    def after_fork_in_child(self) -> None:
        """Close our copies: or a node would take the parent for alive as long as we are."""
        inherited = self._connections
        self.start_over()
        for connection in inherited:
            connection.disconnect()  # shuts nothing down: not our pid

    def close(self) -> None:
        with self._mutex:
            # First that others can listen: a signal may strike in between.
            closed, self._closed, self._listening = self._closed, threading.Event(), set()
            closed.set()
        for connection in list(self._connections):
            hang_up(connection)
        self.room.register_all()  # who still waits has us listen again

    def channel(self) -> str:
        return self._process

    def enter(self, waiting: Waiting) -> None:
        self.room.enter(waiting)
        self.listen()

    def listen(self) -> None:
        """Listen to all nodes; again, where a `close` has ended that."""
        with self._mutex:
            missing = set(range(len(self._addresses))) - self._listening
        for position in missing:
            self._start(position)

    def leave(self, waiting: Waiting) -> None:
        self.room.leave(waiting)
        self._unused_since = clock.now()

    def _start(self, position: int) -> None:
        name = f"redlock-listen-{self._addresses[position].label}"
        run, closed = self._listen, self._closed
        thread = threading.Thread(target=run, args=(position, closed), name=name, daemon=True)
        # Without signals, or the standard library's own locks might stay locked.
        with (
            defer_signals(),
            contextlib.suppress(RuntimeError),
        ):  # no threads: all come by themselves
            thread.start()

    # -- in the thread of a node -------------------------------------------------------

    def _listen(self, position: int, closed: threading.Event) -> None:
        with self._mutex:  # not by whoever starts this thread: a signal may strike in between
            if closed.is_set() or position in self._listening:
                return
            self._listening.add(position)
        backoff = SHORTEST_BACKOFF
        while not closed.is_set():
            connection = None
            try:
                connection = self._subscribed(position)
                backoff = SHORTEST_BACKOFF
                # A release before this has taken all of this process out of the node's lines.
                self.room.register_all()
                self._hear_all(position, connection, closed)
                break
            except Exception as error:  # noqa: BLE001  the node says nothing until it is back
                logger.debug("Not listening to %s: %s", self._addresses[position].label, error)
            finally:
                if connection is not None:
                    self._connections.discard(connection)
                    connection.disconnect()
            closed.wait(clock.jitter(backoff / 2, backoff))
            backoff = min(2 * backoff, LONGEST_BACKOFF)
            if self._is_idle(position, closed):
                return

    def _subscribed(self, position: int) -> AbstractConnection:
        connection = self._addresses[position].connection()
        self._connections.add(connection)
        try:
            connection.connect()
            connection.send_command("SUBSCRIBE", channel(self._prefix, self._process))
            connection.read_response(disable_decoding=True)  # or why not, as without the right
            end_exchange(connection)
        except BaseException:
            self._connections.discard(connection)
            connection.disconnect()
            raise
        return connection

    def _hear_all(
        self, position: int, connection: AbstractConnection, closed: threading.Event
    ) -> None:
        """Hear what the node says, until nobody has waited for a while."""
        heard_at, is_asked = clock.now(), False
        while not closed.is_set():
            if not self._addresses[position].is_current(connection):
                msg = "another server is the node now"  # where hints to this one count as unheard
                raise ConnectionError(msg)
            if connection.can_read(timeout=LOOK_EVERY):
                begin_exchange(connection)
                reply = connection.read_response(disable_decoding=True)
                end_exchange(connection)
                heard_at, is_asked = clock.now(), False
                if isinstance(reply, list) and reply[0] == b"message":
                    self.room.hear(position, reply[2])
                continue
            if self._is_idle(position, closed):
                return
            silent_for = clock.now() - heard_at
            if silent_for > 2 * PING_EVERY:
                msg = f"silent for {silent_for:.0f} s"
                raise ConnectionError(msg)
            if silent_for > PING_EVERY and not is_asked:
                connection.send_command("PING", check_health=False)
                is_asked = True

    def _is_idle(self, position: int, closed: threading.Event) -> bool:
        with self._mutex:
            is_unused = self.room.is_empty and clock.now() - self._unused_since > IDLE
            is_idle = is_unused or self._user() is None
            if is_idle and not closed.is_set():
                self._listening.discard(position)
            return is_idle


def hang_up(connection: AbstractConnection) -> None:
    """End what a thread reads from *connection*; it is that thread's to close."""
    sock = getattr(connection, "_sock", None)  # redis-py has no public way to it
    if sock is not None:
        with contextlib.suppress(OSError):  # the node has hung up
            sock.shutdown(socket.SHUT_RDWR)


_every_listener: weakref.WeakSet[Listener] = members("listener")
