"""What proves the guarantee, run by ``make proof`` and ``make nemesis``, recorded and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.record import machine

__all__ = ["RECORDED", "save"]

RECORDED = Path(__file__).parent / "recorded"


def save(path: Path, found: dict[str, Any]) -> None:
    """Leave what was found, and on which machine, as JSON."""
    path.parent.mkdir(exist_ok=True)
    told = machine()
    del told["command"]  # of the runner; what it ran is in what was found
    path.write_text(json.dumps({**found, "machine": told}, indent=1) + "\n")
