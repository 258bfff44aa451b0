"""Runs cells, each in a process of its own: libraries keep their connection in their module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.peers.record import Found

ROOT = Path(__file__).parents[2]
#: After which a cell is given up [s]; the longest take 30 s, and much more on a loaded machine.
LONGEST_CELL = 180


class CellFailed(Exception):
    """A situation could not be brought about: this is no verdict on anybody."""


def run_here(row: str, column: str) -> Found:
    """Run one cell in this process, which may load the libraries of one column only."""
    from benchmarks.peers.scene import scene  # noqa: PLC0415  it loads Celery, its parent need not
    from benchmarks.peers.situations import SITUATIONS  # noqa: PLC0415

    started = time.monotonic()
    with scene(row, column) as there:
        try:
            seen = SITUATIONS[row](there)
        except AssertionError:
            for worker in there.workers:
                print(f"---- {worker.pid}\n{worker.log()}", file=sys.stderr)
            raise
    return Found(row, column, seen, round(time.monotonic() - started, 1))


def run(row: str, column: str) -> Found:
    """
    Run one cell in a process of its own.

    Raises:
        CellFailed: It could not be run; the message has its log.
    """
    command = [sys.executable, "-m", "benchmarks.peers.cell", row, column]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}"},
            capture_output=True,
            text=True,
            timeout=LONGEST_CELL,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise CellFailed(f"{row} of {column}: {late}") from late
    if done.returncode:
        raise CellFailed(f"{row} of {column}:\n{done.stderr}")
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def run_all(chosen: Sequence[tuple[str, str]], jobs: int) -> Iterator[Found | CellFailed]:
    """Run cells, *jobs* of them at the same time; yield what came of each as it ends."""
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(run, row, column) for row, column in chosen]
        try:
            for future in as_completed(futures):
                failure = future.exception()
                if failure is None:
                    yield future.result()
                elif isinstance(failure, CellFailed):
                    yield failure
                else:
                    raise failure
        finally:
            for future in futures:
                future.cancel()
