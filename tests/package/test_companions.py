"""The wheel beside what others wrote, in a venv that knows nothing of the sources."""

from __future__ import annotations

import shutil

import pytest

from support.built import ROOT

COMPANIONS = sorted(path.name for path in (ROOT / "tests" / "companions").glob("test_*.py"))
#: Of one file [s]: schedules are by the minute, and the first has everything built and installed.
LONGEST = 600.0
pytestmark = pytest.mark.timeout(2 * LONGEST)


@pytest.mark.parametrize("file", COMPANIONS)
def test_a_day_with_the_wheel(accompanied, archives, tmp_path, file):
    """The tests are a copy of the project's own; the package beside them is not."""
    shutil.copytree(archives.sources / "tests", tmp_path / "tests")
    shutil.copy(archives.sources / "pyproject.toml", tmp_path)
    words = ("-q", "-n0", "-p", "no:cacheprovider", f"tests/companions/{file}")
    code, out, err = accompanied.run("pytest", *words, cwd=tmp_path, patience=LONGEST)
    assert code == 0, out + err
    assert "skipped" not in out
