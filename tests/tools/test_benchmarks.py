"""The benchmarks run. What they find is for people to read: a timed test would be a coin toss."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.console import PATIENCE_WITH_NODES

ROOT = Path(__file__).parents[2]
#: Of a benchmark, on a machine that is busy with other tests [s]: two minutes alone.
LONGEST = 580


@pytest.mark.timeout(LONGEST + 20)
@pytest.mark.parametrize(
    ("benchmark", "rows", "targets", "cycles"),
    [
        ("lock_cycle", 66, 11, 4),
        ("awaited", 8, 3, 4),
        ("contention", 48, 0, 4),
        ("publish", 15, 4, 4),
        ("queue", 6, 5, 4),
        ("sites", 13, 1, 4),
        ("throughput", 18, 6, 4),
        ("watchdog", 8, 5, 16),
        ("memory", 6, 0, 4),
        ("startup", 20, 1, 4),
        ("observers", 10, 4, 4),
        ("reporting", 8, 2, 4),
        ("stores", 14, 3, 4),
    ],
)
def test_a_benchmark_measures_every_candidate_and_judges_every_target(
    benchmark, rows, targets, cycles
):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{benchmark}", "--rounds", "1", "--cycles", f"{cycles}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{PATIENCE_WITH_NODES}"},
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    blocks = done.stdout.strip().split("\n\n")
    bodies = list(zip(blocks[::2], blocks[1::2], strict=True))
    judged = [body for title, body in bodies if title.startswith("Targets")]
    verdicts = "\n".join(judged).splitlines()
    assert [line.split()[0] in ("met", "MISSED") for line in verdicts] == [True] * targets
    tables = [body for title, body in bodies if not title.startswith("Targets")]
    found = [line for body in tables for line in body.splitlines()[1:]]
    assert len(found) == rows
    assert all(re.search(r"\d", line.rpartition("  ")[2]) or line.endswith("-") for line in found)
