"""Looks at the nodes during a run: no lock may be without an expiry, and none stay behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import redis

from celery_redlock.testing.servers import Server

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

__all__ = ["Sampler", "client_of", "lock_keys"]

#: Between two looks [s].
EVERY = 1.0


def client_of(node: Server) -> redis.Redis:
    """Return a client of a node that does not wait for long, and is connected only when used."""
    return redis.Redis.from_url(node.url, socket_timeout=0.5, socket_connect_timeout=0.5)


def lock_keys(client: redis.Redis, contenders: Sequence[str]) -> list[tuple[str, int]]:
    """Return the lock keys of *contenders* on a node, each with what is left of it [ms], or -1."""
    prefixes = tuple(f"{contender}:lock:".encode() for contender in contenders)
    found = client.scan_iter("*:lock:*", count=1000)
    keys = [key for key in found if key.startswith(prefixes)]
    asked = client.pipeline(transaction=False)
    for key in keys:
        asked.pttl(key)
    return [(key.decode(), int(left)) for key, left in zip(keys, asked.execute(), strict=True)]


class Sampler:
    """
    Looks again and again, in a thread, for the body of a ``with``.

    Attributes:
        seen: How many keys it looked at.
        eternal: Those that had no expiry.
    """

    def __init__(self, nodes: Sequence[Server], contenders: Sequence[str]) -> None:
        self.seen = 0
        self.eternal: set[str] = set()
        self._clients = [client_of(node) for node in nodes]
        self._contenders = contenders
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        for client in self._clients:
            client.close()

    def _run(self) -> None:
        while not self._over.wait(EVERY):
            for client in self._clients:
                with contextlib.suppress(redis.RedisError, OSError):  # it is down just now
                    self._look(client)

    def _look(self, client: redis.Redis) -> None:
        for key, left in lock_keys(client, self._contenders):
            self.seen += 1
            if left == -1:
                self.eternal.add(key)
