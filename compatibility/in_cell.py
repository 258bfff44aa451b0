"""
A pytest plug-in for runs in a cell: servers of its kind only, and what was found and came out.

    python -m pytest -p compatibility.in_cell ...

Loaded before the tests' conftest, which asks once which server programs there are.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import pytest
from redis.utils import HIREDIS_AVAILABLE

from celery_redlock.testing import servers
from compatibility.in_cell_names import FOUND, KIND, PROGRAM

__all__ = ["pytest_runtest_logreport", "pytest_sessionfinish"]

PACKAGES = ("celery", "kombu", "redis", "hiredis")

_kind: Literal["valkey", "redis"] = (
    "redis" if os.environ.get(KIND, "").startswith("Redis") else "valkey"
)
_find_binary = servers.find_binary
_counts: Counter[str] = Counter()
_not_well: list[str] = []


def find_binary(prefer: str | None = None) -> Path:
    """Return the server program of the cell's kind, as if there were no other."""
    if prefer not in (None, _kind):
        msg = f"this cell is about {_kind}"
        raise RuntimeError(msg)
    # Valkey is that of the environment; of Redis the machine may have several.
    program = os.environ.get(PROGRAM)
    return Path(program) if program else _find_binary(_kind)


servers.find_binary = find_binary


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count what became of each test."""
    if report.when == "call" or report.outcome != "passed":
        _counts["errors" if report.failed and report.when != "call" else report.outcome] += 1
    if report.failed:
        _not_well.append(report.nodeid)


def pytest_sessionfinish() -> None:
    """Leave what was found."""
    counts = {name: _counts[name] for name in ("passed", "failed", "errors", "skipped")}
    Path(os.environ[FOUND]).write_text(
        json.dumps({**counts, "found": found(), "not_well": _not_well})
    )


def found() -> dict[str, Any]:
    """Return the versions that the tests really ran with."""
    versions: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    if not HIREDIS_AVAILABLE:
        versions["hiredis"] = None
    told = subprocess.run(
        [str(find_binary()), "--version"], capture_output=True, text=True, check=True
    ).stdout
    number = re.search(r"v=([\d.]+)", told)
    versions["server"] = f"{_kind.capitalize()} {number.group(1) if number else '?'}"
    return versions
