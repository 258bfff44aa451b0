"""Virtual environments of the cells: one per Python and Celery, the rest is changed in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from compatibility import AXES, ROOT, Cell

__all__ = ["PLACE", "SERVERS", "filled", "pythons", "redises"]

PLACE = ROOT / ".venv-matrix"
#: Servers that `compatibility.next_debian` brought from elsewhere.
SERVERS = PLACE / "servers"
#: What cells are about is not pinned in them.
FREE = re.compile(r"(celery|kombu|redis|hiredis)==")


def pythons(given: Iterable[str] = ()) -> dict[str, str]:
    """Return version -> program: those *given*, and for others what is on PATH."""
    named = [*given, *(f"python{version}" for version in AXES["python"])]
    programs: dict[str, str] = {}
    for name in named:
        program = shutil.which(name)
        version = version_of(program) if program else ""
        if program and version in AXES["python"]:
            programs.setdefault(version, program)
    return programs


def redises(given: Iterable[str] = ()) -> dict[str, str]:
    """Return kind of server -> program: those *given*, what is on PATH, and what was brought."""
    named = [*given, "redis-server", *map(str, sorted(SERVERS.glob("*/redis-server")))]
    programs: dict[str, str] = {}
    for name in named:
        if program := shutil.which(name):
            command = [program, "--version"]
            told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            if number := re.search(r"v=(\d+)\.", told):
                programs.setdefault(f"Redis {number[1]}", program)
    return programs


def version_of(program: str) -> str:
    """Return major and minor version of a Python; nothing if it does not run."""
    command = [program, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def place_of(cell: Cell) -> Path:
    """Return where the environment of *cell* is; cells of one place are run one by one."""
    return PLACE / f"python-{cell.python}-celery-{cell.celery}"


def filled(cell: Cell, program: str, extra: str) -> Path:
    """
    Return the Python of an environment with the versions of *cell*.

    Args:
        cell: Which.
        program: The Python to make it with.
        extra: Of ours, which has what the tests need.

    Raises:
        subprocess.CalledProcessError: What is wanted cannot be installed together.
    """
    python, stamp = place_of(cell) / "bin" / "python", place_of(cell) / f".filled-{extra}"
    if not python.exists():
        subprocess.run([program, "-m", "venv", "--clear", str(place_of(cell))], check=True)
    # Each Celery with the kombu of its own time: left to itself, pip takes the newest.
    wanted = [f"celery=={cell.celery}.*", f"kombu=={cell.celery}.*", f"redis=={cell.redis_py}.*"]
    wanted += ["hiredis>=3.2,<4"] if cell.hiredis == "on" else []
    if cell.hiredis == "off":
        pip(python, "uninstall", "--yes", "hiredis")
    ours = [] if is_newer(stamp) else ["-e", f".[{extra}]"]
    pip(python, "install", "-c", str(constraints()), *ours, *wanted)
    stamp.touch()
    return python


def is_newer(stamp: Path) -> bool:
    """Return whether what *stamp* is about was made after what it is made from."""
    sources = (ROOT / "pyproject.toml", ROOT / "constraints.txt")
    return stamp.exists() and all(
        stamp.stat().st_mtime > source.stat().st_mtime for source in sources
    )


def pip(python: Path, verb: str, *words: str) -> None:
    """Run pip, silently unless it fails."""
    command = [str(python), "-m", "pip", verb, "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
        done.check_returncode()


def constraints() -> Path:
    """Return the project's constraints without those that cells are about."""
    file = PLACE / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    PLACE.mkdir(exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines if not FREE.match(line)))
    return file
