"""
Keys of the records on the nodes, and descriptions of their holders.

A record (a lock, a finished marker, a reservation, a slot) is one Redis key per node, named
``prefix:kind:name``, and always has an expiry. What has a holder begins with the holder's token,
followed by a description of it, as JSON. Only the token is compared. Others may have written
into our keys, so what is read is parsed with care.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from celery_redlock.process.log import LONGEST_STORED, cut

__all__ = [
    "CHANNEL_LENGTH",
    "END_OF_TIME",
    "LONGEST_NAME",
    "OWNER_LENGTH",
    "PUBLIC_TOKEN_LENGTH",
    "RATE",
    "RELEASE_LENGTH",
    "STARTS",
    "TOKEN_LENGTH",
    "Keys",
    "channel",
    "encode_info",
    "holder_payload",
    "is_ours",
    "is_short_name",
    "is_text",
    "line_key",
    "lock_keys",
    "marker_key",
    "ms",
    "object_in",
    "own_name",
    "place_name",
    "probe_key",
    "rate_name",
    "read_holder",
    "record_key",
    "shorten",
    "shortened",
    "since_of",
    "starts_name",
    "waiters_key",
    "without_rate",
]

TOKEN_LENGTH = 40
#: Length of what a process is woken by: its part of a channel's name.
CHANNEL_LENGTH = 16
#: How much of the end of a token tells releases of one lock apart, for those who hear of them.
RELEASE_LENGTH = 8
#: How much of a token names the owner, where several attempts have one.
OWNER_LENGTH = 32
#: How much of a token may be shown.
PUBLIC_TOKEN_LENGTH = 8
#: Longest name that is part of a key as it is [bytes].
LONGEST_NAME = 110
#: How names end that are derived from others: on a place, that of its starts by a rate or by an
#: execution, or as what is left of a long one.
PLACE = re.compile(r"(#|%(?:25)*23)([0-9]{1,4}|rate|starts)\Z")
RATE, STARTS = "#rate", "#starts"
PLACE_OF_RATE = re.compile(rf"{RATE}(#[0-9]+)?\Z")
CUT = re.compile(r"(~|%(?:25)*7E)([0-9a-f]{32})\Z")
TOKEN = re.compile(rb"[0-9a-f]{%d}" % TOKEN_LENGTH)
#: Nothing that we write is nested so deep, and not every encoder can encode what is.
DEPTH = 8
#: No lock of ours is taken after this moment [s, Unix time].
END_OF_TIME = 1e11
#: Name of this machine, for others to see who holds a lock.
HOST = socket.gethostname()
_encoder = json.JSONEncoder(separators=(",", ":"), default=str)  # json.dumps would make one a call


# --- keys --------------------------------------------------------------------------------


class Keys(NamedTuple):
    """The Redis keys of one lock name, and of the node itself: *boot* and *quarantine*."""

    lock: bytes
    fence: bytes
    boot: bytes
    quarantine: bytes

    @staticmethod
    def of(prefix: str, name: str) -> Keys:
        head, short = prefix.encode(), name_in_key(name)
        return Keys(
            b"%b:lock:%b" % (head, short),
            b"%b:fence:%b" % (head, short),
            b"%b:node:boot" % head,
            b"%b:node:quarantine" % head,
        )


def ms(seconds: float) -> bytes:
    """Return *seconds* in whole milliseconds, at least one: PX 0 is an error."""
    return b"%d" % max(1, round(seconds * 1000))


def own_name(name: str) -> str:
    """
    Return *name* as the lock of a task has it; nobody's place, and no other name's short form.

    Where it ends as these do, the sign before is percent-encoded, as often as it takes: two names
    stay two. So customer ``5#1`` has another lock than the second place of customer ``5``.
    """
    is_long = len(name.encode()) >= LONGEST_NAME - 3  # a cut one may have lost a part of a letter
    match = PLACE.search(name) or (CUT.search(name) if is_long else None)
    if match is None:
        return name
    sign, rest = match.groups()
    code = {"#": "%23", "~": "%7E"}.get(sign) or f"%25{sign[1:]}"
    return f"{name[: match.start()]}{code}{rest}"


def place_name(name: str, place: int) -> str:
    """Return the name of the lock on a *place* of *name*; the first has the name itself."""
    return f"{shorten(name)}#{place}" if place else name


def rate_name(name: str) -> str:
    """Return the name under which the starts of *name* by its rate have their places."""
    return f"{cut(name, LONGEST_NAME - len(RATE))}{RATE}"


def without_rate(name: str) -> str:
    """Return the name whose starts, or one of them, have this *name*; itself if it is another."""
    return PLACE_OF_RATE.sub("", name)


def starts_name(execution: str) -> str:
    """Return the name under which the starts of an *execution* have their places."""
    return f"{execution}{STARTS}"


def line_key(prefix: str, name: str, place: int = 0) -> bytes:
    """Return the Redis key of who waits for a lock; *name* is that of its lock on that *place*."""
    return record_key(prefix, "line", name.removesuffix(f"#{place}") if place else name)


def waiters_key(prefix: str, name: str) -> bytes:
    """Return the Redis key of what a node knows of those who wait for the lock *name*."""
    return record_key(prefix, "waiters", name)


def lock_keys(prefix: str, name: str, limit: int) -> tuple[bytes, ...]:
    """Return the Redis keys of the places of a lock that has *limit* of them."""
    places = (place_name(name, place) for place in range(limit))
    return tuple(record_key(prefix, "lock", place) for place in places)


def record_key(prefix: str, kind: str, name: str) -> bytes:
    """Return the Redis key of the record of *kind* about *name*; shorter than 200 bytes."""
    key = f"{prefix}:{kind}:{name}".encode()
    if len(key) <= LONGEST_NAME:  # so the name is not cut
        return key
    return f"{prefix}:{kind}:".encode() + name_in_key(name)


def marker_key(prefix: str, marker: str) -> bytes:
    return record_key(prefix, "marker", marker)


def channel(prefix: str, process: str = "") -> bytes:
    """Return the Redis channel on which a process is woken; without it, what all begin with."""
    return f"{prefix}:wake:{process}".encode()


def probe_key(prefix: str) -> bytes:
    return f"{prefix}:node:probe".encode()


def shorten(name: str) -> str:
    """Return *name*, or if it is too long for a key its beginning and a digest of all of it."""
    return name_in_key(name).decode()


def name_in_key(name: str) -> bytes:
    encoded = name.encode()
    if len(encoded) <= LONGEST_NAME:
        return encoded
    return cut(name, LONGEST_NAME).encode()


def is_short_name(value: Any) -> bool:
    """Return whether *value* is a lock name as it is in a key, and in our other records."""
    return (
        type(value) is str
        and bool(value)
        and is_text(value)
        and len(value.encode()) <= LONGEST_NAME
    )


def is_text(value: str) -> bool:
    """Return whether *value* can be encoded: without lone surrogates, which JSON and argv have."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- holders -----------------------------------------------------------------------------


def holder_payload(info: dict[str, Any], since: float) -> dict[str, Any]:
    return {**info, "host": HOST, "pid": os.getpid(), "since": round(since, 3)}


def encode_info(info: dict[str, Any]) -> bytes:
    encoded = _encoder.encode(info)
    if len(encoded) > LONGEST_STORED:  # else nothing in it can be longer
        encoded = _encoder.encode(shortened(info))
    return encoded.encode()


def shortened(value: Any) -> Any:
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    return [shortened(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_holder(value: bytes) -> dict[str, Any]:
    """Parse the holder's description in a value; of its token, only the public part."""
    # A value that others have written describes nobody: the key is taken all the same.
    public = value[:PUBLIC_TOKEN_LENGTH].decode("ascii", "replace")
    return {**object_in(value[TOKEN_LENGTH:]), "token": public}


def is_ours(value: bytes) -> bool:
    return TOKEN.match(value) is not None


def object_in(stored: bytes) -> dict[str, Any]:
    """Parse the JSON object in *stored*; empty if malformed, or nested deeper than we write."""
    try:
        found = json.loads(stored, parse_constant=lambda _: None)  # NaN is no JSON
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and is_shallow(found, DEPTH) else {}


def is_shallow(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(is_shallow(item, depth - 1) for item in inner)


def since_of(holder: Mapping[str, Any]) -> float | None:
    """Return since when *holder* has its lock [s, Unix time]; None if absent or malformed."""
    since = holder.get("since")
    if isinstance(since, bool) or not isinstance(since, (int, float)):
        return None
    return float(since) if 0 <= since < END_OF_TIME else None
