"""Search for keys of ours that never expire, page by page: no program of ours writes such."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any

from redis.exceptions import RedisError

from celery_redlock.lock.nodes.address import addresses_of
from celery_redlock.lock.nodes.guard import exchange, read_as
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.all_locks import SCAN_COUNT, escape, read_scan
from celery_redlock.reading.nodes import connected
from celery_redlock.reading.read_script import ENDLESS, EXPIRIES, with_ttl

__all__ = ["Leaks", "leaked_pages"]

#: How many pages a node is asked for at a time; it serves others in between.
PAGES = 10


def leaked_pages(
    ask: Callable[..., Any], prefix: str, cursor: bytes = b"0"
) -> Iterator[tuple[bytes, int, list[bytes]]]:
    """
    Yield, page by page, the next cursor, how many keys were looked at, and which never expire.

    *ask* is called with a command and returns the reply, or None where it is forbidden, which ends
    this.
    """
    pattern = escape(f"{prefix}:".encode()) + b"*"
    while page := ask("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT):
        cursor, keys = read_as("keys", functools.partial(read_scan, before=cursor), page)
        found = ask("EVAL", EXPIRIES.source, len(keys), *keys) if keys else None
        read = functools.partial(with_ttl, ENDLESS, keys)
        yield cursor, len(keys), read_as("keys", read, found) if found else []
        if cursor == b"0":
            return


class Leaks:
    """
    Counts leaked keys, a few pages of each node at a time, however many keys there are.

    A node on which this user must not run SCAN is passed over.
    """

    def __init__(self, nodes: Sequence[Any], rules: Rules) -> None:
        self._addresses = addresses_of(nodes, rules.prefix)
        self._prefix = rules.prefix
        self._under_way: dict[str, tuple[bytes, int]] = {}

    def look(self, labels: Collection[str]) -> dict[str, int]:
        """Go on with the nodes of these *labels*; return the count of each that is through."""
        found = {}
        for address in self._addresses:
            if address.label in labels:
                try:
                    with connected(address) as connection:
                        count = self._go_on(address.label, connection)
                except (RedisError, OSError):
                    self._under_way.pop(address.label, None)
                    continue
                if count is not None:
                    found[address.label] = count
        return found

    def _go_on(self, label: str, connection: Any) -> int | None:
        """Read some pages; return how many keys never expire, None if there are more pages."""
        cursor, count = self._under_way.pop(label, (b"0", 0))
        pages = leaked_pages(lambda *it: exchange(connection, it)[0], self._prefix, cursor)
        for cursor, _, leaked in islice(pages, PAGES):  # noqa: B007  the last one is kept
            count += len(leaked)
        if cursor == b"0":
            return count
        self._under_way[label] = cursor, count
        return None
