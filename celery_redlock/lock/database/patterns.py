"""Patterns of keys, as SCAN has them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

__all__ = ["literal_begin", "matcher"]

WILD = re.compile(rb"[*?\[\\]")
PIECE = re.compile(rb"\\(.)|(\*)|(\?)|\[(\^?)((?:\\.|[^\]])*)\]|(.)", re.DOTALL)


def literal_begin(pattern: bytes) -> bytes:
    """Return what every key that matches *pattern* begins with."""
    found = WILD.search(pattern)
    return pattern[: found.start()] if found else pattern


def matcher(pattern: bytes) -> Callable[[bytes], Any]:
    def piece(found: re.Match[bytes]) -> bytes:
        escaped, star, any_one, inverse, chosen, plain = found.groups()
        if star:
            return b".*"
        if any_one:
            return b"."
        if chosen is not None:
            return b"[%b%b]" % (inverse, chosen.replace(b"[", b"\\["))
        return re.escape(escaped or plain)

    return re.compile(PIECE.sub(piece, pattern), re.DOTALL).fullmatch
