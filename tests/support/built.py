"""The package as others get it: copies of its sources, the archives made of them, and venvs."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = [
    "ROOT",
    "IndexUnreachable",
    "Venv",
    "build",
    "contents",
    "copy_sources",
    "files_in",
    "run",
    "unpack",
]

ROOT = Path(__file__).parents[2]
#: Longest wait for a command: pip on a busy machine [s].
PATIENCE = 280.0
#: What would lead a command back to the sources, or tell it of a venv that is not its own.
LEADS_BACK = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SOURCE_DATE_EPOCH", "PYTHONSAFEPATH")
#: In what pip says when it cannot reach an index.
UNREACHABLE = re.compile(
    "NewConnectionError|Name or service not known|name resolution|Connection refused"
    "|Network is unreachable|timed out"
)


class IndexUnreachable(RuntimeError):
    """The package index did not answer."""


def run(*command: object, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """
    Run a command, and return its stdout; *env* is added to the environment.

    Raises:
        AssertionError: It failed; with all that it said.
    """
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**_environment(), **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{said}"
    return done.stdout


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in LEADS_BACK}


# -- sources ----------------------------------------------------------------------------


def _sources() -> set[str]:
    if (ROOT / ".git").exists() and shutil.which("git"):
        asked = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        listed = run(*asked, cwd=ROOT).split("\0")
        return {name for name in listed if (ROOT / name).is_file()}
    return set(_walk(ROOT, _ignored()))


def copy_sources(target: Path) -> None:
    """Copy the files that belong to the project, without its history."""
    for name in _sources():
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, place)


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _ignored() -> list[str]:
    lines = (ROOT / ".gitignore").read_text().splitlines()
    return [".git", *(line.rstrip("/") for line in lines if line and not line.startswith("#"))]


def _walk(folder: Path, ignored: list[str]) -> Iterator[str]:
    for entry in folder.iterdir():
        if any(fnmatch.fnmatch(entry.name, pattern) for pattern in ignored):
            continue
        if entry.is_dir():
            yield from _walk(entry, ignored)
        # What unpacking a source archive adds to what it was made from.
        elif entry != ROOT / "PKG-INFO":
            yield entry.relative_to(ROOT).as_posix()


# -- archives ---------------------------------------------------------------------------


def build(source: Path, out: Path, *, env: Mapping[str, str] | None = None) -> tuple[Path, Path]:
    run(sys.executable, "-m", "hatchling", "build", "-d", out, cwd=source, env=env)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def contents(archive: Path) -> dict[str, bytes]:
    """Return the files of a wheel, or of a source archive without its outermost folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            return {name: opened.read(name) for name in opened.namelist()}
    found = {}
    with tarfile.open(archive) as packed:
        for member in packed:
            if (file := packed.extractfile(member)) is not None:
                found[member.name.partition("/")[2]] = file.read()
    return found


def unpack(sdist: Path, target: Path) -> Path:
    for name, data in contents(sdist).items():
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return target


# -- venvs ------------------------------------------------------------------------------


class Venv:
    """A venv with nothing in it, not even pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)

    def install(self, *requirements: str) -> None:
        """
        Install, in the versions of constraints.txt.

        Raises:
            IndexUnreachable: The package index did not answer.
        """
        pip = (sys.executable, "-m", "pip", "--python", self.programs / "python")
        # What is used of it is compiled when it is used.
        options = ("--quiet", "--disable-pip-version-check", "--no-compile")
        try:
            pins = ("-c", ROOT / "constraints.txt")
            run(*pip, "install", *options, *pins, *requirements, cwd=self.folder)
        except AssertionError as failure:
            if UNREACHABLE.search(str(failure)):
                raise IndexUnreachable(str(failure)) from None
            raise

    def run(
        self, program: str, *words: object, cwd: Path, patience: float = PATIENCE
    ) -> tuple[int, str, str]:
        """Run a program of the venv, with nothing else but the system's on PATH."""
        done = subprocess.run(
            [str(self.programs / program), *map(str, words)],
            cwd=cwd,
            env={"PATH": f"{self.programs}:/usr/bin:/bin", "HOME": str(cwd), "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=patience,
        )
        return done.returncode, done.stdout, done.stderr
