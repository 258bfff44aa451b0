"""Fenced writes with Django, on SQLite and PostgreSQL; the cases stand in fencing_django.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import celery_redlock

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).with_name("fencing_django.py")
PATH = [str(Path(celery_redlock.__file__).parents[1]), str(PROGRAM.parents[1])]


def run(case, database):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM), case, json.dumps(database)],
        env={"PYTHONPATH": ":".join(PATH)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=["sqlite", "postgresql"])
def settings(request, tmp_path):
    if request.param == "postgresql":
        return request.getfixturevalue("database").django
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "store.sqlite3")}


@pytest.mark.parametrize("case", ["in_order", "all_or_none", "no_fence", "guard", "guard_misused"])
def test_an_older_holder_does_not_write(settings, case):
    run(case, settings)


WAITED = ["waited", "waited_by_way_of_another_table", "waited_inherited", "waited_unfenced"]


@pytest.mark.parametrize("case", [*WAITED, "guard_made_twice"])
def test_of_two_at_the_same_time_the_older_one_does_not_write(database, case):
    run(case, database.django)
