"""The archives that are released, and venvs in which nothing else is installed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.built import IndexUnreachable, Venv, build, copy_sources

#: What a user may choose; all but those for whoever works on the project.
EXTRAS = "cli,demo,hiredis,otel,postgresql,prometheus,sqlite,testing,web"


@dataclass(frozen=True)
class Archives:
    """
    What is released.

    Attributes:
        sources: What it was built from: a copy, since somebody may be working on the original.
        wheel: The wheel.
        sdist: The source archive.
    """

    sources: Path
    wheel: Path
    sdist: Path


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    """Wheel and source archive, built from a copy of the sources that has no history."""
    folder = tmp_path_factory.mktemp("archives")
    copy_sources(folder / "sources")
    return Archives(folder / "sources", *build(folder / "sources", folder / "dist"))


def installed(factory: pytest.TempPathFactory, name: str, requirement: str) -> Venv:
    """Return a venv with *requirement*; without an index a skip at home and a failure in CI."""
    venv = Venv(factory.mktemp(name) / "venv")
    try:
        venv.install(requirement)
    except IndexUnreachable as failure:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no package index: {str(failure)[-300:]}")
    return venv


@pytest.fixture(scope="session")
def bare(archives: Archives, tmp_path_factory: pytest.TempPathFactory) -> Venv:
    return installed(tmp_path_factory, "bare", str(archives.wheel))


@pytest.fixture(scope="session")
def full(archives: Archives, tmp_path_factory: pytest.TempPathFactory) -> Venv:
    return installed(tmp_path_factory, "full", f"{archives.wheel}[{EXTRAS}]")


@pytest.fixture(scope="session")
def accompanied(archives: Archives, tmp_path_factory: pytest.TempPathFactory) -> Venv:
    return installed(tmp_path_factory, "accompanied", f"{archives.wheel}[companions]")
