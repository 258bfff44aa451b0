"""
What somebody else may have written into our keys: read as far as it makes sense.

Another program, a restored dump, another version of ours: nothing of it is taken for granted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["is_text", "object_in", "since_of"]

#: So deep is nothing that we write; what is nested like that cannot be encoded again everywhere.
DEPTH = 8
#: Nobody of ours has taken a lock after this moment [s, Unix time].
END_OF_TIME = 1e11


def object_in(stored: bytes) -> dict[str, Any]:
    """Return the JSON object in *stored*; empty if it is none, or none that we would write."""
    try:
        told = json.loads(stored, parse_constant=lambda _: None)  # NaN is no JSON
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) and is_shallow(told, DEPTH) else {}


def is_shallow(value: Any, depth: int) -> bool:
    """Return whether *value* is nested no deeper than that."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(is_shallow(item, depth - 1) for item in inner)


def is_text(value: str) -> bool:
    """Return whether *value* can be encoded: without lone surrogates, which JSON and argv have."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def since_of(holder: Mapping[str, Any]) -> float | None:
    """Return since when *holder* has its lock [s, Unix time]; None if it does not tell."""
    since = holder.get("since")
    if isinstance(since, bool) or not isinstance(since, (int, float)):
        return None
    return float(since) if 0 <= since < END_OF_TIME else None
