"""
All locks that are held on the nodes, for operators: read page by page, and merged.

One node after the other is gone through with SCAN, never KEYS. For a page of its keys all nodes
are asked at once, and what they store is merged into one view per holder; a key that an earlier
node has was listed with that one's pages. So no more than a page is held, however many locks
there are, and no command keeps a node from its work for long.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from celery_redlock.lock.address import Address, addresses_of
from celery_redlock.lock.guard import exchange
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripting import Script, read_release
from celery_redlock.reading.nodes import ask_all, connected
from celery_redlock.reading.stored import (
    READ,
    LockView,
    arguments_of_read,
    read_stored,
    views_of,
)

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["AllLocks", "escape", "pages"]


#: How many keys a node looks at for one SCAN; it serves others in between.
SCAN_COUNT = 500
#: For how many locks a node is asked at once: well below a millisecond of its time.
PAGE = 100

# KEYS locks ; answers the positions of those that are not there
ABSENT_LUA = """
local absent = {}
for i, key in ipairs(KEYS) do
  if redis.call('EXISTS', key) == 0 then absent[#absent + 1] = i end
end
return absent
"""
ABSENT = Script(ABSENT_LUA, read_release, guarded=False)


class AllLocks:
    """
    The locks that somebody holds on any of the nodes, to be gone through once, in no order.

    Nodes that do not answer are passed over, and one that fails is asked no more. A lock that is
    taken, renewed or released meanwhile may be missing, or be listed twice.

    Args:
        nodes: As the setting ``redlock_nodes``.
        rules: As all clients have them.
        pattern: That the names have to match, in the language of Redis's SCAN.
        longest: For how long nodes are gone through, whether anything is found or not [s].

    Attributes:
        is_cut: Whether that was too short.
        silent: Labels of the nodes that did not answer (any more), in their order.
    """

    def __init__(
        self,
        nodes: Sequence[Any],
        rules: Rules,
        pattern: bytes = b"*",
        longest: float = math.inf,
    ) -> None:
        self._addresses = addresses_of(nodes)
        self._prefix = rules.prefix
        self._pattern = pattern
        self._longest = longest
        self._connections: dict[str, AbstractConnection] = {}
        self.is_cut = False
        self.silent: list[str] = []

    def __iter__(self) -> Iterator[LockView]:
        loads = [(b"SCRIPT", b"LOAD", script.source) for script in (READ, ABSENT)]

        def connect(address: Address) -> AbstractConnection | None:
            with contextlib.suppress(RedisError, OSError):
                connection = stack.enter_context(connected(address))
                exchange(connection, *loads)
                return connection
            return None

        try:
            with contextlib.ExitStack() as stack:
                # All at once, so nodes that hang cost no more time than one of them.
                for address, connection in zip(
                    self._addresses, ask_all(self._addresses, connect), strict=True
                ):
                    if connection is not None:
                        self._connections[address.label] = connection
                yield from self._go_through()
        finally:
            labels = (address.label for address in self._addresses)
            self.silent = [label for label in labels if label not in self._connections]

    def _go_through(self) -> Iterator[LockView]:
        """Yield what is held, node by node."""
        ends = time.monotonic() + self._longest
        order = list(self._connections)  # as it was: a node that fails meanwhile moves no other
        for position, label in enumerate(order):
            for keys in self._pages(label, ends):
                for other in order[:position]:
                    keys = self._absent(other, keys) if keys else keys  # noqa: PLW2901  fewer
                if keys:
                    yield from self._views(keys)

    def _pages(self, label: str, ends: float) -> Iterator[list[bytes]]:
        """Yield the keys of locks on a node, some at a time, until the time *ends* [s]."""

        def ask(scan: Sequence[Any]) -> Any:
            if scan[1] != b"0" and time.monotonic() > ends:  # the first page of each is read
                self.is_cut = True
                return None
            return self._ask(label, scan)

        return pages(ask, escape(f"{self._prefix}:lock:".encode()) + self._pattern)

    def _absent(self, label: str, keys: list[bytes]) -> list[bytes]:
        """Return which of *keys* a node does not have; all of them if it does not answer."""
        positions = self._ask(label, (b"EVALSHA", ABSENT.sha, b"%d" % len(keys), *keys))
        return keys if positions is None else [keys[i - 1] for i in positions]

    def _views(self, keys: Sequence[bytes]) -> Iterator[LockView]:
        """Yield who holds the locks at *keys*."""
        command = (b"EVALSHA", READ.sha, *arguments_of_read(keys, self._prefix))
        asked = [label for label in list(self._connections) if self._send(label, command)]
        replies = {label: self._receive(label) for label in asked}
        locks = {label: read_stored(reply) for label, reply in replies.items() if reply is not None}
        skip = len(f"{self._prefix}:lock:".encode())
        for index, key in enumerate(keys):
            name = key[skip:].decode(errors="replace")
            yield from views_of(name, {label: of_node[index] for label, of_node in locks.items()})

    def _ask(self, label: str, command: Sequence[Any]) -> Any:
        """Return a node's answer; None, and ask it no more, if there is none."""
        return self._receive(label) if self._send(label, command) else None

    def _send(self, label: str, command: Sequence[Any]) -> bool:
        connection = self._connections.get(label)
        if connection is None:
            return False
        try:
            connection.send_packed_command(connection.pack_command(*command))
        except (RedisError, OSError):
            del self._connections[label]
            return False
        return True

    def _receive(self, label: str) -> Any:
        try:
            return self._connections[label].read_response(disable_decoding=True)
        except (RedisError, OSError):
            del self._connections[label]
            return None


def pages(ask: Callable[[Sequence[Any]], Any], pattern: bytes) -> Iterator[list[bytes]]:
    """Yield a node's keys that match *pattern*, some at a time; *ask* returns None to end that."""
    cursor = b"0"
    while reply := ask(("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)):
        cursor, found = reply
        keys = list(dict.fromkeys(found))
        for begin in range(0, len(keys), PAGE):
            yield keys[begin : begin + PAGE]
        if cursor == b"0":
            return


def escape(text: bytes) -> bytes:
    """Return the pattern that matches *text* and nothing else."""
    return b"".join(
        b"\\" + text[i : i + 1] if text[i : i + 1] in b"*?[]^\\" else text[i : i + 1]
        for i in range(len(text))
    )
