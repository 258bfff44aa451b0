"""
Run all benchmarks one after the other, or those that are named; with --record make the page.

python -m benchmarks [NAME ...] [--rounds R] [--cycles C] [--check] [--record]

All options are handed to each benchmark. A target that is missed ends nothing: with --check the
exit status tells of it at the end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import takewhile

from benchmarks.record import BENCHMARKS


def run(names: Sequence[str], options: Sequence[str]) -> list[str]:
    """Run benchmarks, each in a process of its own; return those that did not end well."""
    failed = []
    for number, name in enumerate(names, 1):
        print(f"\n== {name} ({number} of {len(names)})", flush=True)
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options], check=False)
        print(f"\n   {name} took {time.monotonic() - started:.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
    return failed


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for; return 1 if a benchmark failed, or with --check missed a target."""
    names = tuple(takewhile(lambda word: not word.startswith("-"), arguments))
    options = arguments[len(names) :]
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown or {"-h", "--help"} & set(options):
        print(__doc__.strip(), f"\nNames are {', '.join(BENCHMARKS)}.")
        return 2 if unknown else 0
    failed = run(names or BENCHMARKS, options)
    if "--record" in options:
        from benchmarks import report  # noqa: PLC0415  matplotlib, for the page alone

        failed += ["report"] if report.main() else []
    print("\n" + (f"Not well: {', '.join(failed)}" if failed else "All is well"))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
