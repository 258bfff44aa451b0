"""The command line of these checks; see `resources`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path

from celery_redlock.testing.servers import servers
from resources.calls import CALLS, is_handed_over, staged, strike
from resources.cycles import compare, grown, run_cycles
from resources.exits import FATES, measure_exits
from resources.leaks import plant_all
from resources.strikes import Strikes


def count_cycles(options: argparse.Namespace) -> int:
    before, after = run_cycles(options.cycles, plant_all if options.leaks else lambda: None)
    rows, problems = compare(before, after, options.cycles), grown(before, after)
    for row in rows:
        print(f"{row.what:60} {row.before:8} {row.after:8}")
    for problem in problems:
        print(f"grown: {problem}")
    if options.json is not None:
        told = {"rows": [asdict(row) for row in rows], "grown": problems}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if problems else 0


def time_exits(options: argparse.Namespace) -> int:
    rows, slowest = [], 0.0
    for fate in FATES:
        for end in measure_exits(fate):
            rows.append({"nodes": fate, "ends by": end.way, "seconds": round(end.took, 3)})
            slowest = max(slowest, end.took)
            print(f"{fate:20} {end.way:25} {end.took:6.3f} s")
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return 1 if slowest > 1 else 0


def strike_bytecodes(options: argparse.Namespace) -> int:
    logging.disable()
    rows, left = [], 0
    with servers(5) as farm, staged(farm) as stage:
        for what in CALLS:
            strikes = Strikes(interrupt, by="opcode", visits=options.visits)
            found = list(strike(stage, what, KeyboardInterrupt, strikes))
            unclean = [each for each in found if each.problems]
            known = [each for each in unclean if is_handed_over(each.place)]
            left += len(unclean) - len(known)
            rows.append({"call": what, "moments": len(found), "handed over": len(known)})
            print(rows[-1])
            for each in unclean:
                print(f"  {each.place} [{each.place.bytecode}] {each.problems}")
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows, "left": left}, indent=1) + "\n")
    return 1 if left else 0


def interrupt() -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m resources", description=__doc__)
    cycles = int(os.environ.get("REDLOCK_SIM_CYCLES", "10000"))
    parser.add_argument("--cycles", type=int, default=cycles, help="how often to lock and unlock")
    parser.add_argument("--leaks", action="store_true", help="plant leaks, which are to be found")
    parser.add_argument("--exits", action="store_true", help="measure how processes end")
    parser.add_argument("--opcodes", action="store_true", help="interrupt calls at every bytecode")
    parser.add_argument("--visits", type=int, default=1, help="of one bytecode, that are struck")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    if options.opcodes:
        return strike_bytecodes(options)
    return time_exits(options) if options.exits else count_cycles(options)


if __name__ == "__main__":
    sys.exit(main())
