"""
Run the proofs one after the other, or those that are named; with --record make the page.

python -m proof [NAME ...] [--record] [-- OPTION ...]

What stands behind `--` is handed to the one proof that is named: `simulation -- --seeds 20`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import proof
from proof import matrix, report

SPREES = ("--timeout=3600", *(f"tests/acceptance/test_{w}_spree.py" for w in ("beat", "killing")))
#: Name -> what is run, and about how long that takes on two cores.
PROOFS: dict[str, tuple[list[str], str]] = {
    "simulation": (["-m", "simulation", "--seeds", "200", "--hours", "1"], "half an hour"),
    "exploration": (["-m", "exploration", "--all"], "a quarter of an hour"),
    "matrix": (["-m", "proof.matrix"], "a quarter of an hour"),
    "resources": (["-m", "resources", "--cycles", "100000"], "two minutes"),
    "nemesis": (["-m", "nemesis", "--minutes", "10"], "three quarters of an hour"),
    "sprees": (
        ["-m", "pytest", "-k", "spree or whatever_happens or whatever_is_killed", *SPREES],
        "half an hour",
    ),
}
#: How long the sprees are, which `make test-all` runs for seconds.
LONG = {"REDLOCK_SPREE_SECONDS": "600", "REDLOCK_SPREE_KILLS": "200"}
#: What is run if nothing is named; real servers and real time come by ``make nemesis``.
USUAL = ("simulation", "exploration", "matrix", "resources")
ROOT = Path(__file__).parents[1]


def run(name: str, options: Sequence[str], *, is_recorded: bool) -> int:
    """Run one proof in a process of its own, keep what it found if asked to; return its status."""
    command, _ = PROOFS[name]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        whole = [*command, *options]
        keep = ["--json", str(found)] if is_recorded else []
        environment = {**LONG, **os.environ, "PYTHONPATH": paths}
        done = subprocess.run([sys.executable, *whole, *keep], env=environment, check=False)
        if found.exists():
            path = proof.RECORDED / f"{name}.json"
            told = {**json.loads(found.read_text()), "command": " ".join(["python", *command])}
            proof.save(path, with_others(told, path))
    return done.returncode


def with_others(told: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return what a run told, with what was recorded of faults and guards that it left out."""
    if not path.exists():
        return told
    if "pairs" in told:
        return matrix.with_earlier(told, json.loads(path.read_text()))
    if "runs" not in told:
        return told
    repeated = {run["fault"] for run in told["runs"]}
    others = [run for run in json.loads(path.read_text())["runs"] if run["fault"] not in repeated]
    return {**told, "runs": sorted([*others, *told["runs"]], key=lambda run: str(run["fault"]))}


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for; return 1 if a proof failed."""
    words, options = list(arguments), []
    if "--" in words:
        words, options = words[: words.index("--")], words[words.index("--") + 1 :]
    is_recorded = "--record" in words
    names = [word for word in words if word != "--record"]
    unknown = [name for name in names if name not in PROOFS]
    if unknown or (options and len(names) != 1):
        print(__doc__.strip(), "\n\nNames, and how long each takes on two cores:")
        print(*(f"  {name:12} {time}" for name, (_, time) in PROOFS.items()), sep="\n")
        return 0 if set(unknown) <= {"-h", "--help"} and not options else 2
    failed = []
    for number, name in enumerate(names or USUAL, 1):
        print(f"\n== {name} ({number} of {len(names or USUAL)}): {PROOFS[name][1]}", flush=True)
        started = time.monotonic()
        if run(name, options, is_recorded=is_recorded):
            failed.append(name)
        print(f"\n   {name} took {time.monotonic() - started:.0f} s", flush=True)
    if is_recorded and report.main():
        failed.append("report")
    print("\n" + (f"Not well: {', '.join(failed)}" if failed else "All is well"))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
