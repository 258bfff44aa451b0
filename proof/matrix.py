"""
The mutation matrix: every guard off, and every pair of guards; which layer of the tests notices?

A layer that no mutant fails would be blind, and a mutant that no layer notices would be a guard
that nobody needs, or that nobody tests. Single guards are put to every layer; pairs, which may
cover for one another, to one layer after the other until one has noticed.

    python -m proof.matrix [--seeds N] [--jobs J] [--json FILE] [GUARD ...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import proof
from simulation.guards import ALL_GUARDS, GUARDS, RATE_GUARDS, WAITING_GUARDS, switched_off
from simulation.line import LINE
from simulation.profiles import PROFILES, violations
from simulation.rates import RATES
from simulation.schedules import SCHEDULES

__all__ = ["LAYERS", "main"]

TESTS = Path(__file__).parents[1] / "tests"
UNIT = (
    "call",
    "rounds",
    "votes",
    "renewal",
    "lease",
    "held",
    "rules",
    "watchdog",
    "execution",
    "reservations",
    "waiting",
    "waiter",
    "room",
    "waiting_room",
    "places",
    "several",
    "rate",
)
CONTRACT = ("scripts", "node", "waiting_scripts")
#: For how long things go wrong in each world that is searched [s, at pace 1].
LENGTH = 8.0
#: Longest run of a layer [s]; one that hangs has noticed.
PATIENCE = 600.0


def tests(folder: str, names: Sequence[str]) -> Callable[[int], bool]:
    """Return a layer that is made of test files."""
    files = [str(TESTS / folder / f"test_{name}.py") for name in names]

    def notices(_seeds: int) -> bool:
        # The plugin that the package brings is imported by now, and that is no error.
        quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout=60", *quiet]
        status = pytest.main([*options, *files])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RuntimeError(f"{folder}: pytest ended with {status!r}")
        return status is pytest.ExitCode.TESTS_FAILED

    return notices


def schedules(_seeds: int) -> bool:
    """Return whether a story ends badly."""
    return any(story() for story in (*LINE.values(), *RATES.values(), *SCHEDULES.values()))


def chance(seeds: int) -> bool:
    """Return whether some seed of some kind of world breaks a law."""
    return any(
        violations(profile.build(seed).live(LENGTH * profile.pace, **profile.crew))
        for seed in range(seeds)
        for profile in PROFILES.values()
    )


#: Name of a layer -> whether it notices, the quick ones first.
LAYERS: dict[str, Callable[[int], bool]] = {
    "schedules": schedules,
    "unit": tests("unit", UNIT),
    "contract": tests("contract", CONTRACT),
    "chance": chance,
}
NOTICED, SURVIVED = 10, 11


def notices(layer: str, off: Sequence[str], seeds: int) -> bool:
    """Return whether *layer* notices that guards are *off*; in a process of its own."""
    child = get_context("fork").Process(target=_try, args=(layer, off, seeds))
    child.start()
    child.join(PATIENCE)
    if child.is_alive():
        child.kill()
        child.join()
        return True
    if child.exitcode not in (NOTICED, SURVIVED):
        raise RuntimeError(f"{layer} without {', '.join(off)} ended with {child.exitcode}")
    return child.exitcode == NOTICED


def _try(layer: str, off: Sequence[str], seeds: int) -> None:
    os.setsid()  # servers of its tests end with it
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        with switched_off(off):
            found = LAYERS[layer](seeds)
    os._exit(NOTICED if found else SURVIVED)


def row(off: Sequence[str], seeds: int, *, all_layers: bool) -> dict[str, Any]:
    """Return which layers notice that guards are *off*; only the first one, or all of them."""
    seen: dict[str, bool] = {}
    for layer in LAYERS:
        seen[layer] = notices(layer, off, seeds)
        if seen[layer] and not all_layers:
            break
    return {"off": list(off), "noticed": seen}


def main() -> int:
    """Make the matrix; return 1 if a mutant survived, or if a layer fails with all guards on."""
    parser = argparse.ArgumentParser(
        prog="python -m proof.matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "guards", nargs="*", metavar="GUARD", help="only these, and their pairs; default: all"
    )
    parser.add_argument("--seeds", type=int, default=6, help="of each kind of world (6)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time (all cores)")
    parser.add_argument("--json", type=Path, help="where to leave the matrix")
    chosen = parser.parse_args()
    names = chosen.guards or list(ALL_GUARDS)
    if unknown := set(names) - set(ALL_GUARDS):
        parser.error(f"no guard {min(unknown)!r}; there are {', '.join(ALL_GUARDS)}")
    mutants: list[tuple[str, ...]] = [(), *((name,) for name in names)]
    mutants += pairs(names)
    started = time.monotonic()
    rows = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        work = [pool.submit(row, off, chosen.seeds, all_layers=len(off) < 2) for off in mutants]
        for done in work:
            rows.append(done.result())
            tell(rows[-1], f"{len(rows)}/{len(work)}")
    found = summed_up(rows, time.monotonic() - started)
    print(f"\n{found['mutants']} mutants, {len(found['survived'])} survived: {found['survived']}")
    if chosen.json:
        proof.save(chosen.json, found)
    return int(bool(found["survived"] or found["failed_with_all_on"]))


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of guards that may cover for one another, with one of *names* in each."""
    every = (
        pair for kind in (GUARDS, WAITING_GUARDS, RATE_GUARDS) for pair in combinations(kind, 2)
    )
    return [pair for pair in every if not set(names).isdisjoint(pair)]


def with_earlier(found: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Return what was *found*, with *earlier* rows of guards that were not tried now."""
    told = {tuple(row["off"]) for row in (*found["rows"], *found["pairs"])}
    order = list(ALL_GUARDS)

    def merged(kind: str) -> list[dict[str, Any]]:
        left = [row for row in earlier[kind] if tuple(row["off"]) not in told]
        known = [row for row in (*found[kind], *left) if set(row["off"]) <= set(order)]
        return sorted(known, key=lambda row: [order.index(name) for name in row["off"]])

    rows = {kind: merged(kind) for kind in ("rows", "pairs")}
    every = rows["rows"] + rows["pairs"]
    return {
        **found,
        **rows,
        "rules": {name: guard.rule for name, guard in ALL_GUARDS.items()},
        "mutants": len(every),
        "survived": [row["off"] for row in every if not any(row["noticed"].values())],
        "took": round(found["took"] + earlier["took"], 1),
    }


def tell(found: dict[str, Any], how_far: str) -> None:
    """Print a row."""
    seen = ", ".join(layer for layer, noticed in found["noticed"].items() if noticed)
    print(f"{how_far:>9}  {' + '.join(found['off']) or 'all on':45} {seen or '-'}", flush=True)


def summed_up(rows: Sequence[dict[str, Any]], took: float) -> dict[str, Any]:
    """Return the matrix as plain JSON values."""
    whole, mutants = rows[0], rows[1:]
    survived = [row["off"] for row in mutants if not any(row["noticed"].values())]
    return {
        "layers": list(LAYERS),
        "rules": {name: guard.rule for name, guard in ALL_GUARDS.items()},
        "failed_with_all_on": [layer for layer, seen in whole["noticed"].items() if seen],
        "rows": [row for row in mutants if len(row["off"]) == 1],
        "pairs": [row for row in mutants if len(row["off"]) == 2],
        "mutants": len(mutants),
        "survived": survived,
        "took": round(took, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
