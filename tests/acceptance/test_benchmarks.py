"""The benchmarks run. What they find is for people to read: a timed test would be a coin toss."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_LOCKS = ("redis-py", "celery-", "pottery", "PING", "lock", "delay")
FIRST_WORDS = (*OF_LOCKS, "plain", "no observers", "default observers", "all observers")


@pytest.mark.parametrize(
    ("benchmark", "candidates", "targets"),
    [
        ("lock_cycle", 50, 10),
        ("contention", 34, 0),
        ("publish", 15, 4),
        ("throughput", 18, 6),
        ("watchdog", 0, 5),
        ("memory", 0, 0),
        ("startup", 0, 1),
        ("observers", 10, 4),
    ],
)
def test_a_benchmark_measures_every_candidate_and_prints_every_target(
    benchmark, candidates, targets
):
    """A short run ends well, with a row per candidate and a verdict per target."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{benchmark}", "--rounds", "1", "--cycles", "16"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(FIRST_WORDS)]
    assert len(rows) == candidates
    assert all(float(figure.replace(",", "")) > 0 for row in rows for figure in row.split()[-5:])
    verdicts = [line for line in done.stdout.splitlines() if line.startswith(("met", "MISSED"))]
    assert len(verdicts) == targets
