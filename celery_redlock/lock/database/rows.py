"""
Values of a keyspace as rows.

A key is a row without a part, which says of which kind its value is and until when it is kept. The
fields of a hash, and the members of a sorted set, are rows of the same key with a part each; so one
that changes is one row that is written. A stream's row has its last id and its length, and its
entries are rows of another key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from celery_redlock.keyspace.values import NEVER, Hash, SortedSet

__all__ = [
    "Head",
    "Row",
    "Writes",
    "difference",
    "entries_key",
    "entry_part",
    "id_of_part",
    "values_of",
]

STRING, HASH, SORTED_SET, STREAM, ENTRY = range(5)
#: What a part begins with: it may be empty in Redis, but is not in a row.
MARK = b":"


class Row(NamedTuple):
    key: bytes
    part: bytes
    kind: int
    value: bytes
    ends: int | None  # [us, Unix time]


class Head(NamedTuple):
    """What is known of a stream while a script runs: its last id, and how many entries it has."""

    last: tuple[int, int] = (0, 0)
    length: int = 0
    fresh: tuple[Row, ...] = ()  # entries that are not written yet
    is_new: bool = False  # whether none of its entries is written yet


KINDS: dict[type, int] = {bytes: STRING, Hash: HASH, SortedSet: SORTED_SET, Head: STREAM}


class Writes(NamedTuple):
    """What a transaction writes: whole keys and parts go first."""

    keys: list[bytes]
    parts: list[tuple[bytes, bytes]]
    rows: list[Row]
    #: Streams' keys of entries -> how many of them are kept.
    trimmed: dict[bytes, int]
    #: What is told: channel, and message.
    told: list[tuple[bytes, bytes]]


def values_of(rows: Iterable[Row]) -> dict[bytes, tuple[Any, float]]:
    """Return the values in *rows*, and until when each is kept [ms]; also of what has expired."""
    heads: dict[bytes, Row] = {}
    parts: dict[bytes, list[Row]] = {}
    for row in rows:
        if row.part:
            parts.setdefault(row.key, []).append(row)
        else:
            heads[row.key] = row
    return {
        key: (value_of(head, parts.get(key, ())), NEVER if head.ends is None else head.ends / 1000)
        for key, head in heads.items()
    }


def value_of(head: Row, parts: Iterable[Row]) -> Any:
    if head.kind == STRING:
        return head.value
    if head.kind == STREAM:
        begin, _, length = head.value.partition(b" ")
        time, _, count = begin.partition(b"-")
        return Head((int(time), int(count)), int(length))
    if head.kind == HASH:
        return Hash((row.part[1:], row.value) for row in parts)
    return SortedSet((row.part[1:], float(row.value)) for row in parts)


def difference(
    key: bytes, before: tuple[Any, float] | None, after: tuple[Any, float]
) -> tuple[bool, list[bytes], list[Row]]:
    """
    Return whether *key* is to be deleted first, which of its parts are, and what rows are written.

    *before* is what has not expired there.
    """
    value, end = after
    ends = None if end == NEVER else math.floor(end * 1000 + 0.5)
    kind = KINDS[type(value)]
    head = Row(key, b"", kind, head_value(value), ends)
    is_new = isinstance(value, Head) and value.is_new
    if before is None or type(before[0]) is not type(value) or is_new:
        fresh = [Row(key, part, kind, text, None) for part, text in texts(value)]
        return before is not None, [], [head, *fresh]
    old, new = dict(texts(before[0])), dict(texts(value))
    rows = [Row(key, part, kind, text, None) for part, text in new.items() if old.get(part) != text]
    is_same = before[1] == end and head_value(before[0]) == head.value
    return False, [part for part in old if part not in new], rows if is_same else [head, *rows]


def head_value(value: Any) -> bytes:
    if isinstance(value, Head):
        return b"%d-%d %d" % (*value.last, value.length)
    return value if isinstance(value, bytes) else b""


def texts(value: Any) -> Iterator[tuple[bytes, bytes]]:
    for part, of_part in value.items() if isinstance(value, Mapping) else ():
        yield MARK + part, of_part if isinstance(of_part, bytes) else b"%.17g" % of_part


# --- streams -------------------------------------------------------------------------------


def entries_key(key: bytes) -> bytes:
    return key + b"\0"


def entry_part(time: int, count: int) -> bytes:
    return b"%016d-%010d" % (time, count)


def id_of_part(part: bytes) -> bytes:
    time, _, count = part.partition(b"-")
    return b"%d-%d" % (int(time), int(count))
