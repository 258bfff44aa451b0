"""Values, numbers and errors as Redis has them."""

from __future__ import annotations

import math

from redis.exceptions import (
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

__all__ = [
    "LARGEST",
    "NEVER",
    "OK",
    "SYNTAX",
    "WRONG_TYPE",
    "Hash",
    "Refused",
    "SortedSet",
    "Status",
    "Stream",
    "real",
    "whole",
]

#: When a key without an end expires [ms].
NEVER = float("inf")
#: The largest number that Redis counts with.
LARGEST = 2**63 - 1

#: First word of an error -> what redis-py raises for it; it leaves that word out then.
ERRORS: dict[str, type[RedisError]] = {
    "ERR": ResponseError,
    "NOPERM": NoPermissionError,
    "NOSCRIPT": NoScriptError,
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
}
SYNTAX = "ERR syntax error"
NO_INTEGER = "ERR value is not an integer or out of range"
NO_FLOAT = "ERR value is not a valid float"
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class Refused(Exception):
    """An error in answer to a command; in Redis' words, its code first."""

    @property
    def reply(self) -> RedisError:
        code, _, message = str(self).partition(" ")
        return ERRORS[code](message) if code in ERRORS else ResponseError(str(self))


class Status(bytes):
    """A reply like OK, which is not text to Lua."""

    __slots__ = ()


class Hash(dict[bytes, bytes]):
    """Fields and their values."""


class SortedSet(dict[bytes, float]):
    """Members and their scores."""


class Stream(tuple[tuple[bytes, tuple[bytes, ...]], ...]):
    """Entries in their order: an id, and its fields and values."""

    __slots__ = ()


OK = Status(b"OK")


def whole(word: bytes) -> int:
    """Return the number in *word*; raises Refused where Redis would."""
    try:
        number = int(word)
    except ValueError:
        raise Refused(NO_INTEGER) from None
    if word != b"%d" % number or abs(number) > LARGEST:
        raise Refused(NO_INTEGER)
    return number


def real(word: bytes, otherwise: str = NO_FLOAT) -> float:
    """Return the score in *word*; raises Refused, which says *otherwise*, where Redis would."""
    try:
        number = float(word)
    except ValueError:
        raise Refused(otherwise) from None
    if math.isnan(number):
        raise Refused(otherwise)
    return number
