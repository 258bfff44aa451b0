"""Explore both models, with all guards on and with some off, and print what was found."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from exploration.variants import (
    FENCING_GUARDS,
    REPAIR_GUARDS,
    Row,
    explore_fencing,
    explore_repair,
)

#: Guards that only matter where a node restarts.
OF_RESTARTS = {"quarantined-renewal", "dead-yes", "restart-guard"}
#: Without both, time does not bound what can happen to a holder.
UNTIMELY = {"renewal-deadline", "own-clock"}
HEADING = f"{'guards off':52} {'model':46} {'broken':>8} {'states':>10} {'s':>7}  kind"


def main() -> int:
    """Explore, print a table, and the ways to what is broken; return 1 if all guards were on."""
    parser = argparse.ArgumentParser(prog="python -m exploration", description=__doc__)
    parser.add_argument("--all", action="store_true", help="the larger bounds: some seven minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the result")
    chosen = parser.parse_args()
    print(HEADING)
    rows = []
    for row in every_row(is_large=chosen.all):
        rows.append(row)
        print(as_line(row), flush=True)
    for row in rows:
        if row.example:
            print(f"\n{', '.join(row.guards_off)} ({row.model}):")
            print("\n".join(f"  {step}" for step in row.example))
    if chosen.json:
        chosen.json.write_text(json.dumps({"rows": [as_record(row) for row in rows]}, indent=1))
    return int(any(row.violating for row in rows if not row.guards_off))


def every_row(*, is_large: bool) -> Iterator[Row]:
    """Yield one row after the other."""
    yield explore_fencing()
    for guard in FENCING_GUARDS:
        yield explore_fencing(frozenset({guard}), shortest=is_large)
    for other in ("write-back", "exact-fence"):  # either covers for a fence that is too small
        yield explore_fencing(frozenset({"largest-fence", other}), shortest=is_large)
    yield explore_fencing(frozenset({"restart-guard"}), restarts=1)
    if is_large:
        yield explore_fencing(restarts=1)
        yield explore_fencing(rounds=3)
        yield explore_fencing(bumps=1)
    for learns in (True, False):
        yield from lattice(3 if is_large else 2, restarts=1, learns=learns)
    yield from lattice(4, restarts=0)
    if is_large:
        yield explore_repair(ttl=3)
        yield explore_repair(ttl=3, learns=False)
        yield explore_repair(rounds=3)


def lattice(most: int, *, restarts: int, learns: bool = True) -> Iterator[Row]:
    """Yield up to *most* guards off together, but none beyond what breaks every configuration."""
    guards = [guard for guard in REPAIR_GUARDS if restarts or guard not in OF_RESTARTS]
    if not learns:
        guards.remove("dead-yes")  # nobody hears that a connection is dead
    hopeless: list[frozenset[str]] = []
    for number in range(most + 1):
        for off in map(frozenset, combinations(guards, number)):
            if any(less <= off for less in hopeless):
                continue
            rounds = 1 if restarts and off >= UNTIMELY else 2  # or there are too many states
            row = explore_repair(off, restarts=restarts, learns=learns, rounds=rounds)
            if row.violating == row.configurations:
                hopeless.append(off)
            yield row


def as_line(row: Row) -> str:
    off = ", ".join(row.guards_off) or "none"
    broken = f"{row.violating}/{row.configurations}"
    return f"{off:52} {row.model:46} {broken:>8} {row.states:>10} {row.seconds:>7.1f}  {row.kind}"


def as_record(row: Row) -> dict[str, object]:
    return {**row._asdict(), "seconds": round(row.seconds, 2), "kind": row.kind}


if __name__ == "__main__":
    sys.exit(main())
