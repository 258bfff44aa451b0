"""`make compare`: some of its cells for real: ours, those of a library that fails, a control."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that an installed celery_redlock stays what is tested

from benchmarks.peers import runner  # noqa: E402


@pytest.mark.timeout(620)
def test_cells_come_out_as_they_are_recorded():
    columns = ("celery-redlock", "celery-singleton", "plain Task")
    options = [word for one in columns for word in ("--only", one)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", "spelt", "late", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    told = re.findall(r"^ *\d of 6  (.+) \[\d+ s\]$", done.stdout, re.MULTILINE)
    assert sorted(told) == [
        "late finisher, celery-redlock: ✓ newer lock stays",
        "late finisher, celery-singleton: ✗ frees the newer lock (1 let in)",
        "late finisher, plain Task: ✗ frees the newer lock (1 let in)",
        "three spellings, celery-redlock: ✓ one lock",
        "three spellings, celery-singleton: ✗ 3 at once",
        "three spellings, plain Task: ✗ 3 at once",
    ], done.stdout + done.stderr
    assert done.returncode == 0


def test_what_cannot_be_brought_about_is_no_verdict():
    """A cell that breaks says why, instead of failing for the library."""
    with pytest.raises(runner.CellFailed, match=r"spelt of nobody:\n(.|\n)*KeyError: 'nobody'"):
        runner.run("spelt", "nobody")
