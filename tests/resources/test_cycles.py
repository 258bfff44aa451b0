"""Locking does not cost more the longer it goes on, and the dead among the nodes cost nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")


def measure(tmp_path, *arguments):
    file = tmp_path / "figures.json"
    command = [sys.executable, "-W", "ignore", "-m", "resources", "--json", str(file), *arguments]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=False
    )
    assert file.exists(), ended.stderr.decode()
    return ended.returncode, json.loads(file.read_text())


@pytest.mark.timeout(900)  # ten seconds, unless the machine is busy with a lot else
def test_many_cycles_with_two_dead_nodes_leave_nothing_behind(tmp_path):
    status, told = measure(tmp_path)
    assert told["grown"] == []
    assert status == 0
    assert all(row["cycles"] >= 1000 and row["before"] >= 0 for row in told["rows"])


@pytest.mark.timeout(900)
def test_what_leaks_is_found(tmp_path):
    status, told = measure(tmp_path, "--leaks", "--cycles", "2500")
    assert status == 1
    grown = " ".join(told["grown"])
    assert "sockets of connects" in grown
    assert "threads:" in grown
    assert "objects known to the garbage collector" in grown
