"""
What somebody hostile, or something broken, may hand over: values, JSON, bytes, a server.

Strategies draw from what has a meaning here more often than chance would: numbers that do not
fit, text that acts on a terminal or a page, nesting, and the words that our own records have.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

from support.fake_server import FakeServer

__all__ = [
    "ACTING",
    "ESCAPES",
    "GREETING",
    "JSON",
    "NUMBERS",
    "TEXTS",
    "Impostor",
    "a_reply",
    "as_resp",
    "impostor",
    "in_json",
]

#: Text that acts on whoever prints it carelessly.
ESCAPES = ("\x1b[31mred", "\x1b]0;title\x07", "\x9b2J", "\r\nforged: line", "\0", "\u202egnp")
ACTING = (
    *ESCAPES,
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "{{ 7*7 }}",
    "%s%n{0}{a.b}",
    "\ud800",
    "\udcff",
    "x" * 5000,
    "",
)
TEXTS = st.text(max_size=30) | st.sampled_from(ACTING)
NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from(
        [10**400, -(10**400), 10**30, 2**53, 2**53 + 1, 2**63, -(2**63), -1, 0, 1e300, -1e300]
    )
    | st.sampled_from([math.nan, math.inf, -math.inf, 1e12, 4_102_444_800.0, 253402300800.0])
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)


def in_json(value: object) -> bytes:
    """Return *value* as somebody else's encoder may write it: NaN, lone surrogates and all."""
    return json.dumps(value).encode()


# --- as a server answers --------------------------------------------------------------------

GREETING = (
    "# Server\r\nredis_version:9.1.2\r\nrun_id:{run_id}\r\nuptime_in_seconds:100000\r\n"
    "role:master\r\ncluster_enabled:0\r\nmaxmemory_policy:noeviction\r\nconnected_slaves:0\r\n"
)

#: What a reply may be once it is parsed; RESP3 has floats, booleans and maps.
_LEAVES = (
    st.none()
    | st.integers(-10, 10)
    | NUMBERS
    | st.booleans()
    | st.binary(max_size=8)
    | st.sampled_from([b"0", b"1", b"-1", b"1e3", b" 7 ", b"1_000", b"9" * 31, b"nan", b"settled"])
    | st.sampled_from([b"a" * 40 + b"{}", b"\xff" * 40, b"f" * 40 + b'{"pid":', b"done", b"\xff"])
    | st.builds(ValueError, st.just("WRONGTYPE"))
)


def a_reply() -> st.SearchStrategy[Any]:
    """Return replies: anything at all, and what looks nearly like those of our scripts."""
    codes = st.integers(-8, 10) | st.sampled_from([True, 1.0, b"1", None, 10**30])
    now = st.just(1_800_000_000_000) | _LEAVES
    nearly = st.tuples(codes, now).flatmap(
        lambda begin: st.lists(_LEAVES, max_size=5).map(lambda rest: [*begin, *rest])
    )
    anything = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=4), max_leaves=6)
    return nearly | anything


def as_resp(value: Any) -> bytes:
    """Return a reply as bytes (RESP2); what RESP2 does not have becomes text."""
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(map(as_resp, value))
    if isinstance(value, int):  # of any length: a server may write what it likes
        return b":" + str(int(value)).encode() + b"\r\n"
    if isinstance(value, Exception):
        return f"-ERR {value}\r\n".encode()
    text = value if isinstance(value, bytes) else str(value).encode()
    return b"$%d\r\n%b\r\n" % (len(text), text)


class Impostor(FakeServer):
    """
    A server that greets like a lock node, and then answers what a test wants.

    Args:
        answer: Command, as a list of words -> bytes, or None for silence.
        run_id: What it calls its process.
    """

    def __init__(self, answer: Callable[[list[bytes]], bytes | None], run_id: str) -> None:
        super().__init__(lambda words, _wire: answer(words))
        self._info = GREETING.format(run_id=run_id).encode()

    def greeting(self, words: list[bytes]) -> bytes | None:
        if words[0] == b"INFO":
            return as_resp(self._info)
        if words[0] == b"SCRIPT":
            return as_resp(b"0" * 40)
        if words[0] == b"EVALSHA" and words[-1] in {b"look", b"trust", b"quarantine", b"bootstrap"}:
            return as_resp([b"enrolled", 1_800_000_000_000, 0, b""])
        return super().greeting(words)

    def close(self) -> None:
        super().close()
        for thread in self._threads:
            thread.join(60)


@contextlib.contextmanager
def impostor(
    answer: Callable[[list[bytes]], bytes | None], run_id: str = "e" * 40
) -> Iterator[Impostor]:
    server = Impostor(answer, run_id)
    try:
        yield server
    finally:
        server.close()
