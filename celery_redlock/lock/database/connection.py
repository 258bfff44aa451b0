"""A connection to a database that looks like one of redis-py's to a server of Redis."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import redis
from redis.connection import AbstractConnection

from celery_redlock.lock.database.server import Server
from celery_redlock.lock.database.store import Broken, Busy, Store
from celery_redlock.lock.nodes.guard import Unfit

__all__ = ["DatabaseConnection"]

#: Bytes that wait in a socket pair: what fits is taken without waiting.
BUFFER = 2**18


class UnfitDatabase(Unfit, redis.ConnectionError):
    """A database must not be the lock node; as no connection is made, that is an error of one."""


class DatabaseConnection(AbstractConnection):
    """One end of a socket pair; *connected* returns what the other end answers from."""

    def __init__(self, connected: Callable[[], Store], **options: Any) -> None:
        super().__init__(**options)
        self._connected = connected
        self._server: Server | None = None

    def _connect(self) -> socket.socket:
        try:
            store = self._connected()
        except Unfit as error:
            raise UnfitDatabase(str(error)) from None
        except (Broken, Busy) as error:
            raise redis.ConnectionError(str(error)) from None
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        ours.settimeout(self.socket_timeout)
        self._server = Server(theirs, ours, store)
        self._server.start()
        return ours

    def disconnect(self, *args: Any, **options: Any) -> None:
        super().disconnect(*args, **options)  # type: ignore[no-untyped-call]
        server, self._server = self._server, None
        if server is not None and server.is_busy:
            # It ends by itself, unless the database hangs.
            with contextlib.suppress(RuntimeError):  # no more threads, as when the interpreter ends
                threading.Thread(target=server.give_up, daemon=True).start()

    def repr_pieces(self) -> list[tuple[str, Any]]:
        return []

    def _host_error(self) -> str:
        return "a database"
