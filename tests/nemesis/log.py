"""
What a client writes down: JSON lines, each in one write, so that a kill -9 costs the last at most.

Stamped with ``CLOCK_MONOTONIC``, which all processes of a machine share and nobody can set. It is
not the clock that the library counts leases on.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["Log", "now"]


def now() -> float:
    """Return the one true time of a run [s]."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Log:
    """One file of events."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, kind: str, at: float | None = None, **fields: Any) -> None:
        """Add an event of *kind* that was true *at* that time [s], or is true now."""
        event = {"kind": kind, "at": now() if at is None else at, **fields}
        os.write(self._file, json.dumps(event).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)
