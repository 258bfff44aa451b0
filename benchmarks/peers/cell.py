"""Run one cell and print what it has seen: ``python -m benchmarks.peers.cell ROW COLUMN``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from benchmarks.peers.runner import run_here

if __name__ == "__main__":
    print(json.dumps(asdict(run_here(*sys.argv[1:]))))
