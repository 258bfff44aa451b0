"""Commands and replies as they go over a connection of Redis: RESP 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError, ResponseError

from celery_redlock.keyspace.values import ERRORS

__all__ = ["encoded", "parsed"]

CODES = {kind: code for code, kind in ERRORS.items() if kind is not ResponseError}


def parsed(data: bytes) -> tuple[list[list[bytes]], bytes]:
    """Return the whole commands that *data* begins with, and what is left; ValueError if none."""
    commands, at = [], 0
    while at < len(data):
        words, end = command_at(data, at)
        if end < 0:
            break
        commands.append(words)
        at = end
    return commands, data[at:]


def command_at(data: bytes, at: int) -> tuple[list[bytes], int]:
    """Return the command that begins there, and where it ends; -1 if it is not whole."""
    count, at = number_at(data, at, b"*")
    words: list[bytes] = []
    while at >= 0 and len(words) < count:
        length, at = number_at(data, at, b"$")
        if at < 0 or len(data) < at + length + 2:
            return [], -1
        words.append(data[at : at + length])
        at += length + 2
    return words, at


def number_at(data: bytes, at: int, mark: bytes) -> tuple[int, int]:
    end = data.find(b"\r\n", at)
    if end < 0:
        return 0, -1
    if data[at : at + 1] != mark:
        msg = "no command of Redis"
        raise ValueError(msg)
    return int(data[at + 1 : end]), end + 2


def encoded(reply: Any) -> bytes:
    if type(reply) is int:
        return b":%d\r\n" % reply
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, RedisError):
        text = f"{CODES[type(reply)]} {reply}" if type(reply) in CODES else with_code(str(reply))
        return b"-%b\r\n" % " ".join(text.split()).encode()
    return array(reply)


def with_code(text: str) -> str:
    return text if text.partition(" ")[0].isupper() else f"ERR {text}"


def array(parts: Sequence[Any]) -> bytes:
    return b"*%d\r\n%b" % (len(parts), b"".join(map(encoded, parts)))
