"""Run tests in the cells of the matrix: a pairwise cover of all versions, or those named."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import machine
from compatibility import AXES, RECORD, ROOT, Cell, page
from compatibility.cover import cell_of, every_cell, pairwise, position
from compatibility.environments import filled, place_of, pythons, redises
from compatibility.in_cell_names import FOUND, KIND, PROGRAM

#: What one Celery may do unlike another, with a real worker: retries, chains, chords, messages that
#: are put back, and locks that are kept while nodes die.
WITH_WORKERS = tuple(
    f"tests/acceptance/test_execution.py::test_{name}"
    for name in (
        "a_lock_is_kept_while_a_minority_of_nodes_dies",
        "a_retry_is_never_refused_by_its_own_lock",
        "a_chain_of_tasks_of_one_name_runs_to_its_end",
        "a_message_that_was_put_back_runs_again",
        "a_chord_with_equal_members_ends",
        "a_skip_may_be_passed_on",
    )
)
#: Likewise: queues behind a lock, places of a limit, tasks of others, and report mode.
WITH_WORKERS += tuple(
    f"tests/acceptance/test_{name}"
    for name in (
        "queue.py::test_one_runs_and_one_waits",
        "queue.py::test_a_child_that_is_killed_wakes_the_next",
        "queue.py::test_parts_of_workflows_wait_like_all",
        "lock_limit.py::test_without_the_limit_there_are_more",
        "lock_limit.py::test_a_place_is_free_again_when_its_holder_is_killed",
        "lock_limit.py::test_several_names_are_taken_together",
        "protected.py::test_retries_run_under_the_lock",
        "protected.py::test_a_second_publish_is_joined",
        "protected.py::test_the_lock_of_a_revoked_task_is_free_for_the_next",
        "report_mode.py::test_tasks_go_from_one_mode_to_the_other_while_workers_of_both_run",
    )
)
#: What is run in a cell: the extra that brings what it needs, and the tests.
DEPTHS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fast": ("test", ("tests/contract", *WITH_WORKERS)),
    "companions": ("companions", ("tests/companions",)),
    "whole": ("acceptance", ("tests/contract", "tests/integration", "tests/acceptance")),
}
#: Those about the demo, the pages and the example say nothing about versions.
ELSEWHERE = ("demo", "readme", "benchmarks", "example_worker", "pages")
#: Longest run of one cell [s].
PATIENCE = 3600.0
Result = dict[str, Any]


class Programs(NamedTuple):
    """
    What this machine has of what cells need.

    Attributes:
        pythons: By version.
        redises: By kind, as cells name it. Valkey comes with the environment.
    """

    pythons: dict[str, str]
    redises: dict[str, str]

    def lacks(self, cell: Cell) -> list[str]:
        """Return what *cell* needs and is not there."""
        python = [] if cell.python in self.pythons else [f"Python {cell.python}"]
        is_there = cell.server in self.redises or not cell.server.startswith("Redis")
        return python + ([] if is_there else [cell.server])


def run(cell: Cell, programs: Programs, depth: str, options: Sequence[str]) -> Result:
    """
    Run the tests in one cell; return what came out.

    A test that failed is run once more by itself. A second failure is one; a test that then passes
    did not fail for its versions' sake, and is counted as such, apart.
    """
    extra, paths = DEPTHS[depth]
    what = {**cell._asdict(), "depth": depth, "tests": list(paths)}
    began = time.monotonic()
    try:
        python = filled(cell, programs.pythons[cell.python], extra)
    except subprocess.CalledProcessError as problem:
        return {**what, "failed": 1, "problem": f"not installable: {problem}"}
    server = programs.redises.get(cell.server, "")

    def tried(words: Sequence[str]) -> Result:
        return pytest_in(cell, python, server, [*words, *options])

    told = tried([*left_out(depth), *paths])
    again = told.pop("not_well", [])
    if again:
        second = tried([*dict.fromkeys(again)])
        second.pop("not_well", None)
        passed = second.get("passed", 0)
        told = {
            **told,
            "passed": told["passed"] + passed,
            "failed": second["failed"],
            "errors": second["errors"],
            "second_try": passed,
        }
    return {**what, **told, "seconds": round(time.monotonic() - began)}


def pytest_in(cell: Cell, python: Path, server: str, words: Sequence[str]) -> Result:
    """
    Run pytest in *cell*; return what its plug-in found, and print how it went if not well.

    Args:
        cell: Which.
        python: Its Python.
        server: Program of its lock nodes; "" takes what is in the environment.
        words: Options of pytest, and the tests.
    """
    with tempfile.TemporaryDirectory(prefix="cell-") as folder:
        found, log = Path(folder) / "found.json", Path(folder) / "log"
        command = [str(python), "-m", "pytest", "-q", "-p", "compatibility.in_cell"]
        command += ["-p", "no:cacheprovider", *words]
        environment = {**os.environ, KIND: cell.server, PROGRAM: server, FOUND: str(found)}
        environment["CI"] = ""
        with log.open("w") as out:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE,
                check=False,
            )
        nothing = {"passed": 0, "failed": 0, "errors": 1}
        told: Result = json.loads(found.read_text()) if found.exists() else nothing
        if done.returncode:
            print(f"\n== {cell}\n{log.read_text()[-8000:]}")
            if not told["failed"] + told["errors"]:
                told["errors"] = 1
    return told


def left_out(depth: str) -> list[str]:
    """Return options that leave out what says nothing about versions."""
    files = [f"tests/acceptance/test_{name}.py" for name in ELSEWHERE]
    return [f"--ignore={name}" for name in files] if depth == "whole" else []


def run_all(cells: Sequence[Cell], arguments: argparse.Namespace) -> list[Result]:
    """Run *cells*, as many at once as asked for; those of one environment one by one."""
    programs = Programs(pythons(arguments.python), redises(arguments.server))
    missing = {name: None for cell in cells for name in programs.lacks(cell)}
    if missing:
        print(f"Not on PATH, and not given by --python or --server: {', '.join(missing)}")
    rows: dict[Path, list[Cell]] = {}
    for cell in cells:
        if not programs.lacks(cell):
            rows.setdefault(place_of(cell), []).append(cell)
    results: list[Result] = []
    writing = threading.Lock()

    def run_row(row: Sequence[Cell]) -> None:
        for cell in row:
            result = run(cell, programs, arguments.depth, arguments.options)
            with writing:
                results.append(result)
                if arguments.record:
                    record(results)
            total = sum(map(len, rows.values()))
            print(f"{len(results):3} of {total}  {cell}: {page.outcome(result)}", flush=True)

    with ThreadPoolExecutor(arguments.jobs) as threads:
        list(threads.map(run_row, rows.values()))
    return results


def record(results: Sequence[Result]) -> None:
    """Keep what came out, beside what cells that were not run again told before."""
    known = json.loads(RECORD.read_text())["cells"] if RECORD.exists() else []
    by_cell = {cell_of(result): result for result in [*known, *results]}
    cells = [by_cell[cell] for cell in sorted(by_cell, key=lambda cell: position(AXES, cell))]
    where = machine()
    where = {name: where[name] for name in ("system", "processor", "cores") if name in where}
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps({"machine": where, "cells": cells}, indent=1) + "\n")


def chosen(arguments: argparse.Namespace) -> list[Cell]:
    """Return the cells that are asked for."""
    cells = every_cell(AXES) if arguments.all or arguments.cell else pairwise(AXES)
    if not arguments.cell:
        return cells
    unknown = set(arguments.cell) - {cell.name for cell in cells}
    if unknown:
        sys.exit(f"no such cell: {', '.join(sorted(unknown))}; one is {cells[0].name}")
    return [cell for cell in cells if cell.name in arguments.cell]


def main(words: Sequence[str]) -> int:
    """Run what is asked for; return 1 if a test failed in a cell, or no cell could be run."""
    parser = argparse.ArgumentParser(prog="python -m compatibility", description=__doc__)
    parser.add_argument("cell", nargs="*", help="like 3.10/5.4/6.4/redis7/on; default: the cover")
    parser.add_argument("--all", action="store_true", help="every cell of the product")
    parser.add_argument("--list", action="store_true", help="only name the cells")
    parser.add_argument("--depth", choices=DEPTHS, default="fast", help="which tests")
    parser.add_argument("--jobs", type=int, default=1, help="how many cells at once")
    parser.add_argument("--python", action="append", default=[], help="a Python; may be repeated")
    parser.add_argument("--server", action="append", default=[], help="a redis-server; likewise")
    parser.add_argument("--record", action="store_true", help="keep what came out for the page")
    parser.add_argument("-o", dest="options", action="append", default=[], help="option of pytest")
    arguments = parser.parse_args(words)
    cells = chosen(arguments)
    if arguments.list:
        print(*(cell.name for cell in cells), sep="\n")
        return 0
    results = run_all(cells, arguments)
    if arguments.record:
        page.main()
    bad = [cell_of(result).name for result in results if not page.is_well(result)]
    print(f"{len(results)} cells, not well: {', '.join(bad) or 'none'}")
    return int(bool(bad) or not results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
