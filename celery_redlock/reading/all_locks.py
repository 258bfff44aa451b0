"""
All locks and reservations on the nodes, for operators: read page by page, and merged.

Each node in turn is gone through with SCAN, never KEYS. For a page of its keys all nodes are asked
at once, and what they store is merged into one view per holder; a key that an earlier node has was
listed with that node's pages. So no more than a page is in memory, however many locks there are,
and no command keeps a node from its work for long.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from redis.exceptions import RedisError

from celery_redlock.lock.nodes.address import Address, addresses_of
from celery_redlock.lock.nodes.bounded import begin_exchange
from celery_redlock.lock.nodes.guard import exchange, read_as
from celery_redlock.lock.records import STARTS
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import ask_all, connected, is_voting
from celery_redlock.reading.read_script import (
    ABSENT,
    EXPIRIES,
    PAGE,
    READ,
    arguments_of_read,
    read_stored,
    with_ttl,
)
from celery_redlock.reading.stored import (
    LockView,
    ReservationView,
    StoredLock,
    burst_views,
    reservation_views,
    views_of,
)

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["AllLocks", "AllReservations", "Everywhere", "escape", "pages", "read_scan"]

View = TypeVar("View")
Read = TypeVar("Read")

#: Name of a place that counts the starts of one message: no lock.
STARTS_PLACE = re.compile(rf"{STARTS}(#[0-9]+)?\Z")
#: How many keys a node looks at for one SCAN; it serves others in between.
SCAN_COUNT = 500


class Everywhere(Generic[View]):
    """
    What all nodes store under lock names, to be gone through once, in no order.

    Nodes that do not answer are passed over, and one that fails is asked no more. What is written
    meanwhile may be missing, or be listed twice.

    Args:
        nodes: As the setting ``redlock_nodes``.
        rules: As all clients have them.
        pattern: Of the names, as of SCAN.
        longest: How long to go through the nodes at most [s]; then it `is_cut`.

    Attributes:
        silent: Labels of the nodes that did not answer (any more), in their order.
        voteless: Labels of those that do not vote, as one that was flushed: they may have forgotten
            locks.
    """

    #: Of the records whose names are gone through.
    KINDS: ClassVar[Sequence[str]]

    def __init__(
        self,
        nodes: Sequence[Any],
        rules: Rules,
        pattern: bytes = b"*",
        longest: float = math.inf,
    ) -> None:
        self._addresses = addresses_of(nodes, rules.prefix)
        self._rules = rules
        self._prefix = rules.prefix
        self._pattern = pattern
        self._longest = longest
        self._connections: dict[str, AbstractConnection] = {}
        self.is_cut = False
        self.silent: list[str] = []
        self.voteless: list[str] = []

    def views(self, name: str, locks: Mapping[str, StoredLock]) -> Iterable[View]:
        """Return what there is under a name; *locks*: node label -> what it stores."""
        raise NotImplementedError

    def __iter__(self) -> Generator[View, None, None]:
        voteless, labels = set[str](), [address.label for address in self._addresses]
        loads = [(b"SCRIPT", b"LOAD", script.source) for script in (READ, EXPIRIES)]

        def connect(address: Address) -> AbstractConnection | None:
            with contextlib.suppress(RedisError, OSError):
                connection = stack.enter_context(connected(address))
                if not is_voting(connection, self._rules, labels):
                    voteless.add(address.label)
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
                self.voteless = [label for label in labels if label in voteless]
                yield from self._go_through()
        finally:
            self.silent = [label for label in labels if label not in self._connections]

    def _go_through(self) -> Iterator[View]:
        ends = time.monotonic() + self._longest
        # As it was: a node that fails meanwhile moves no other.
        order = [(kind, label) for kind in self.KINDS for label in self._connections]
        for position, (kind, label) in enumerate(order):
            for names in self._pages(kind, label, ends):
                for other in order[:position]:
                    names = self._absent(*other, names) if names else names  # noqa: PLW2901  fewer
                if names:
                    yield from self._views(names)

    def _pages(self, kind: str, label: str, ends: float) -> Iterator[list[bytes]]:
        """Yield the names of a node's records, some at a time, until *ends* [s]."""

        def ask(scan: Sequence[Any]) -> Any:
            if scan[1] != b"0" and time.monotonic() > ends:  # the first page of each is read
                self.is_cut = True
                return None
            return self._ask(label, scan, functools.partial(read_scan, before=scan[1]))

        begin = self._key(kind, b"")
        for keys in pages(ask, escape(begin) + self._pattern):
            yield [key[len(begin) :] for key in keys]

    def _key(self, kind: str, name: bytes) -> bytes:
        return f"{self._prefix}:{kind}:".encode() + name

    def _absent(self, kind: str, label: str, names: list[bytes]) -> list[bytes]:
        """Return which of *names* a node has no record of; all of them if it does not answer."""
        keys = [self._key(kind, name) for name in names]
        read = functools.partial(with_ttl, ABSENT, names)
        absent = self._ask(label, (b"EVALSHA", EXPIRIES.sha, b"%d" % len(keys), *keys), read)
        return names if absent is None else absent

    def _views(self, names: Sequence[bytes]) -> Iterator[View]:
        locks = self._stored(names)
        for index, name in enumerate(names):
            stored = {label: of_node[index] for label, of_node in locks.items()}
            yield from self.views(name.decode(errors="replace"), stored)

    def _stored(self, names: Sequence[bytes]) -> dict[str, list[StoredLock]]:
        keys = [self._key("lock", name) for name in names]
        command = (b"EVALSHA", READ.sha, *arguments_of_read(keys, self._prefix))
        asked = [label for label in list(self._connections) if self._send(label, command)]
        read = functools.partial(read_stored, count=len(keys))
        replies = {label: self._receive(label, read) for label in asked}
        return {label: found for label, found in replies.items() if found is not None}

    def _ask(self, label: str, command: Sequence[Any], read: Callable[[Any], Read]) -> Read | None:
        """Return what *read* makes of the reply; None, and ask the node no more, if it fails."""
        return self._receive(label, read) if self._send(label, command) else None

    def _send(self, label: str, command: Sequence[Any]) -> bool:
        connection = self._connections.get(label)
        if connection is None:
            return False
        try:
            begin_exchange(connection)
            connection.send_packed_command(connection.pack_command(*command))
        except (RedisError, OSError):
            del self._connections[label]
            return False
        return True

    def _receive(self, label: str, read: Callable[[Any], Read]) -> Read | None:
        connection = self._connections[label]
        try:
            begin_exchange(connection)  # what it was asked may have come while another was late
            reply = connection.read_response(disable_decoding=True)
            return read_as("locks", read, reply)
        except (RedisError, OSError):
            del self._connections[label]
            return None


class AllLocks(Everywhere[LockView]):
    KINDS = ("lock",)

    def views(self, name: str, locks: Mapping[str, StoredLock]) -> list[LockView]:
        is_count = STARTS_PLACE.search(name) is not None
        return [] if is_count else views_of(name, locks)


class AllReservations(Everywhere[ReservationView]):
    """
    The reservations of names, and the bursts that are open.

    But for those of tasks that hold their lock: `AllLocks` has it.
    """

    KINDS = ("queued", "next", "debounce")

    def views(self, name: str, locks: Mapping[str, StoredLock]) -> Iterator[ReservationView]:
        is_held = any(lock.value is not None for lock in locks.values())
        for view in reservation_views(name, locks):
            if not (is_held and view.reservation.is_running):
                yield view
        yield from burst_views(name, locks)


def pages(ask: Callable[[Sequence[Any]], Any], pattern: bytes) -> Iterator[list[bytes]]:
    """Yield a node's keys that match *pattern*, some at a time; *ask* returns None to end that."""
    cursor = b"0"
    while reply := ask(("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)):
        cursor, keys = reply
        for begin in range(0, len(keys), PAGE):
            yield keys[begin : begin + PAGE]
        if cursor == b"0":
            return


def read_scan(reply: Any, before: bytes) -> tuple[bytes, list[bytes]]:
    """Return the next cursor and the keys, each once, in a reply to SCAN with the one *before*."""
    cursor, found = reply
    if cursor == before != b"0":  # or it would never end
        raise ValueError
    if not (isinstance(cursor, bytes) and all(isinstance(key, bytes) for key in found)):
        raise TypeError
    return cursor, list(dict.fromkeys(found))


def escape(text: bytes) -> bytes:
    return b"".join(
        b"\\" + text[i : i + 1] if text[i : i + 1] in b"*?[]^\\" else text[i : i + 1]
        for i in range(len(text))
    )
