"""
Search for a seed that breaks a law, or look at one again.

    PYTHONPATH=tests python -m simulation --seeds 200 --hours 1 --jobs 2
    PYTHONPATH=tests python -m simulation --profile "five nodes" --seed 7 --hours 1 --pace 10

Each seed is one world of one profile in turn. What a seed shows it shows again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from simulation.guards import GUARDS, switched_off
from simulation.profiles import PROFILES, Outcome, run

#: Which kinds of worlds are run in turn: an hour of the busy ones costs as much as five others.
KINDS = [*[name for name in PROFILES if "busy" not in name], *PROFILES]
#: Every so many seeds are run at full pace; the others slower, for an hour of them costs less.
FULL_PACE = 50
SLOWER = 10.0


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m simulation", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=20, help="how many worlds (20)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--profile", choices=PROFILES, help="only this kind of world")
    parser.add_argument("--hours", type=float, default=0.1, help="simulated hours of each (0.1)")
    parser.add_argument("--pace", type=float, help="how many times slower than leases of 0.3 s")
    parser.add_argument("--off", default="", help="guards to switch off, as in a,b")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (all cores)")
    parser.add_argument("--json", type=Path, help="where to leave what was found")
    chosen = parser.parse_args(arguments)
    chosen.off = list(filter(None, chosen.off.split(",")))
    if unknown := set(chosen.off) - set(GUARDS):
        parser.error(f"--off: no guard {min(unknown)!r}; there are {', '.join(GUARDS)}")
    return chosen


def worlds(chosen: argparse.Namespace) -> Iterator[tuple[str, int, float, float]]:
    """Yield profile, seed, seconds and pace of each world that is asked for."""
    names = [chosen.profile] if chosen.profile else KINDS
    seeds = range(chosen.seeds) if chosen.seed is None else [chosen.seed]
    for seed in seeds:
        pace = chosen.pace or (1.0 if seed % FULL_PACE == 0 else SLOWER)
        yield names[seed % len(names)], seed, chosen.hours * 3600.0, pace


def in_process(world: tuple[str, int, float, float], off: Sequence[str]) -> tuple[Outcome, float]:
    """Run one world with guards off; return its pace, too."""
    with switched_off(off):
        return run(*world), world[3]


def main() -> int:
    """Run what is asked for; return 1 if a law was broken."""
    chosen = options()
    todo = list(worlds(chosen))
    found: list[Outcome] = []
    started = time.monotonic()
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("fork")) as pool:
        for done in as_completed([pool.submit(in_process, world, chosen.off) for world in todo]):
            outcome, pace = done.result()
            found.append(outcome)
            tell(outcome, pace, f"{len(found)}/{len(todo)}")
    summary = summed_up(found, time.monotonic() - started)
    print(*(f"{name}: {value}" for name, value in summary.items() if name != "met"), sep="\n")
    if chosen.json:
        chosen.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if summary["violations"] else 0


def tell(outcome: Outcome, pace: float, how_far: str) -> None:
    """Print what came of a world, and how to see it again."""
    word = "BROKEN" if outcome.violations else "held"
    print(f"{how_far:>9}  seed {outcome.seed:<5} {outcome.profile:32}"
          f"{outcome.grants:7} grants  {word}", flush=True)  # fmt: skip
    for violation in outcome.violations[:3]:
        print(f"{'':11}{violation}")
    if outcome.violations:
        hours = outcome.seconds / 3600
        print(f'{"":11}again: python -m simulation --profile "{outcome.profile}" '
              f"--seed {outcome.seed} --hours {hours:g} --pace {pace:g}")  # fmt: skip


def summed_up(found: Sequence[Outcome], took: float) -> dict[str, Any]:
    """Return what was found over all, as plain JSON values."""
    met: Counter[str] = Counter()
    for outcome in found:
        faults = {name: count for name, count in outcome.met.items() if isinstance(name, str)}
        met.update(faults)
    return {
        "seeds": len(found),
        "hours": round(sum(outcome.seconds for outcome in found) / 3600, 2),
        "grants": sum(outcome.grants for outcome in found),
        "violations": sum(len(outcome.violations) for outcome in found),
        "broken": [[o.profile, o.seed, list(o.violations[:3])] for o in found if o.violations],
        "took": round(took, 1),
        "met": dict(sorted(met.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
