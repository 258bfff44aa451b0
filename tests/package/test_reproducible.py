"""Whoever builds the same sources gets the same bytes."""

from __future__ import annotations

import os
import random
import shutil
import sys

import pytest

from support.built import build, run, unpack

#: Of a machine that differs in all that a build could look at.
ELSEWHERE = {
    "TZ": "Asia/Kathmandu",
    "LC_ALL": "C",
    "LANG": "tr_TR.UTF-8",
    "PYTHONHASHSEED": "7",
    "USER": "somebody",
}
#: What may lie about in a folder in which somebody works.
LITTER = (
    "notes.txt",
    ".env",
    "dist/celery_redlock-0.0.1.tar.gz",
    "build/docs/index.html",
    ".venv/lib/thing.py",
    ".mypy_cache/3.13/cache.json",
    "celery_redlock/__pycache__/errors.cpython-313.pyc",
    "celery_redlock/lock/__pycache__/gone.cpython-313.pyc",
    "tests/unit/__pycache__/test_x.cpython-313.pyc",
    "example_worker/celerybeat-schedule.db",
)


@pytest.fixture
def lived_in(archives, tmp_path):
    """A copy of the sources in a folder in which somebody has worked for years."""
    folder = tmp_path / "another place, of ünusual name"
    shutil.copytree(archives.sources, folder)
    for name in LITTER:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("litter")
    chance = random.Random(7)
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.utime(path, (moment := chance.randrange(315532800, 1700000000), moment))
    return folder


def test_two_checkouts_make_the_same_archives(archives, lived_in, tmp_path):
    before = os.umask(0o077)
    try:
        wheel, sdist = build(lived_in, tmp_path / "dist", env=ELSEWHERE)
    finally:
        os.umask(before)
    assert (wheel.name, sdist.name) == (archives.wheel.name, archives.sdist.name)
    assert wheel.read_bytes() == archives.wheel.read_bytes()
    assert sdist.read_bytes() == archives.sdist.read_bytes()


def test_the_source_archive_makes_the_same_archives(archives, tmp_path):
    sources = unpack(archives.sdist, tmp_path / "sources")
    wheel, sdist = build(sources, tmp_path / "dist")
    assert wheel.read_bytes() == archives.wheel.read_bytes()
    assert sdist.read_bytes() == archives.sdist.read_bytes()


def test_pip_makes_the_same_wheel_of_the_source_archive(archives, tmp_path):
    """Given the same version of the build backend: its name is in the wheel."""
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", *options, "-w", tmp_path, archives.sdist, cwd=tmp_path)
    assert (tmp_path / archives.wheel.name).read_bytes() == archives.wheel.read_bytes()


def test_a_difference_would_be_seen(archives, tmp_path):
    """The twin: a date that the builder asks for is in every file's head, and nowhere else."""
    sources = unpack(archives.sdist, tmp_path / "sources")
    wheel, sdist = build(sources, tmp_path / "dist", env={"SOURCE_DATE_EPOCH": "1700000000"})
    assert wheel.read_bytes() != archives.wheel.read_bytes()
    assert sdist.read_bytes() != archives.sdist.read_bytes()
