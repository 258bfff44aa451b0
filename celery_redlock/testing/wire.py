"""
Connections to nodes in memory, and the wait for their replies, in place of sockets.

Everything above is the library's own code: the fan-out, its nodes, the algorithm. To them a `Wire`
looks like a connection of redis-py, and `MemorySelector` like the one that waits for sockets.
"""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from celery_redlock.testing.clock import TickedClock

__all__ = ["Hear", "MemorySelector", "Wire"]

#: What a node does with a command that arrives over a wire.
Hear = Callable[["Wire", Sequence[bytes]], None]

#: Beyond the moment that was waited for: a float may fall short of it [s].
GRAIN = 1e-6


def commands(data: bytes) -> Iterator[list[bytes]]:
    """Yield the commands in what a client wrote (RESP)."""
    at = 0

    def number() -> int:
        nonlocal at
        end = data.index(b"\r\n", at)
        found, at = int(data[at + 1 : end]), end + 2
        return found

    while at < len(data):
        words = []
        for _ in range(number()):
            length = number()
            words.append(data[at : at + length])
            at += length + 2
        yield words


class Wire:
    """
    One connection to a node in memory.

    While it *is_greeting* the client is about to connect; the node answers that at once.
    """

    protocol = 2  # of redis, for `celery_redlock.lock.nodes.replies`

    def __init__(self, hear: Hear, clock: TickedClock) -> None:
        self._hear = hear
        self._clock = clock
        self._inbox: deque[tuple[float, Any]] = deque()
        self._is_closed = False
        self.is_greeting = True
        self._sock = self
        self._parser = Parser(self)

    # -- as the client's socket and connection -------------------------------------

    def settimeout(self, _seconds: float) -> None:
        """Never block; nothing here does."""

    def send(self, data: bytes) -> int:
        for command in commands(data):
            self._hear(self, command)
        return len(data)

    def shutdown(self, _how: int) -> None:
        """Refuse: what was sent along a wire is done, whoever hangs up."""
        raise OSError

    def pack_commands(self, asked: Sequence[Sequence[bytes]]) -> Sequence[Sequence[bytes]]:
        return asked

    def send_packed_command(self, asked: Sequence[Sequence[bytes]]) -> None:
        for command in asked:
            self._hear(self, command)

    def read_response(self, *, disable_decoding: bool) -> Any:  # noqa: ARG002  redis-py's
        """Return the next reply, whenever it comes; raises it if it is an error."""
        reply = self._inbox.popleft()[1]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def disconnect(self) -> None:
        self._is_closed = True
        self._inbox.clear()

    # -- between the two -------------------------------------------------------------

    def bring(self, reply: Any, at: float) -> None:
        """Have *reply* arrive *at* that moment [s], behind those that are under way."""
        if not self._is_closed:
            last = self._inbox[-1][0] if self._inbox else at
            self._inbox.append((max(at, last), reply))

    @property
    def readable_at(self) -> float:
        return self._inbox[0][0] if self._inbox else float("inf")

    def take(self) -> Any:
        """Return a reply that has arrived; raises as a socket does that would block."""
        if self.readable_at > self._clock.now():
            raise BlockingIOError
        return self._inbox.popleft()[1]


class Parser:
    """Reads replies as redis-py's parser does: errors are replies, too."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def read_response(self, *, disable_decoding: bool) -> Any:  # noqa: ARG002  redis-py's
        return self._wire.take()


class MemorySelector(selectors.BaseSelector):
    """Waits for replies by advancing the clock of all its wires."""

    def __init__(self, clock: TickedClock) -> None:
        self._clock = clock
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, -1, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the wires with replies, after *timeout* [s] at the latest."""
        if timeout and not self._ready():
            soonest = min([self._wire(key).readable_at for key in self._keys.values()], default=0.0)
            latest = self._clock.now() + timeout + GRAIN
            self._clock.advance(min(soonest, latest))
        return self._ready()

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        now = self._clock.now()
        ready = [key for key in self._keys.values() if self._wire(key).readable_at <= now]
        return [(key, selectors.EVENT_READ) for key in ready]

    @staticmethod
    def _wire(key: selectors.SelectorKey) -> Wire:
        return cast("Wire", key.fileobj)

    def close(self) -> None:
        self._keys.clear()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys
