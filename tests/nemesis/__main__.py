"""The command line; see ``--help``."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from nemesis.celery_run import ABOUT, run_celery
from nemesis.clocks import LIBRARY
from nemesis.databases import DATABASE_FAULTS, run_database
from nemesis.faults import FAULTS
from nemesis.report import status_of, table
from nemesis.run import run
from nemesis.verdict import Run
from proof import timeline

__all__ = ["main"]

EXIT = """
Exit status: 0 all is well, 1 a promise was broken, 2 a run shows nothing, because a contender
that had to break did not (more minutes help), or because libfaketime is missing in CI.
"""


def parser() -> argparse.ArgumentParser:
    faults = "\n".join(f"  {fault.name:<17}{fault.about}" for fault in FAULTS.values())
    faults += "".join(f"\n  {name:<17}{it.about}" for name, it in DATABASE_FAULTS.items())
    faults += f"\n  {'celery':<17}{ABOUT}"
    made = argparse.ArgumentParser(
        prog="python -m nemesis",
        description="Take locks on real servers while a nemesis strikes; see what breaks.",
        epilog=f"faults:\n{faults}\n{EXIT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("faults", nargs="*", metavar="FAULT", help="which, see below; default: each")
    made.add_argument("--minutes", type=float, default=10.0, help="of each run; default 10")
    made.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the strikes")
    made.add_argument("--jobs", type=int, default=4, help="runs at the same time; default 4")
    made.add_argument("--json", type=Path, metavar="FILE", help="write what came of it there, too")
    made.add_argument(
        "--logs",
        type=Path,
        metavar="DIR",
        help="leave the logs of all clients there, and a timeline of each contender as HTML",
    )
    return made


def chosen(names: Sequence[str]) -> list[str]:
    """Return the faults to run; those whose tools are missing only in CI, where they must not."""
    known = [*FAULTS, *DATABASE_FAULTS, "celery"]
    unknown = set(names) - set(known)
    if unknown:
        raise SystemExit(f"no fault is called {min(unknown)!r}; there are {', '.join(known)}")
    wanted = list(names or known)
    clocks = {fault.name for fault in FAULTS.values() if "clocks" in fault.needs}
    without = [name for name in wanted if name in clocks and LIBRARY is None]
    if without:
        print(f"skipped, as libfaketime is not installed: {', '.join(without)}", file=sys.stderr)
        if os.environ.get("CI") == "true":
            raise SystemExit(2)
    return [name for name in wanted if name not in without]


def main(words: Sequence[str] | None = None) -> int:
    options = parser().parse_args(words)
    names = chosen(options.faults)
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    signal.signal(signal.SIGINT, lambda *_: over.set())
    print(f"{len(names)} runs of {options.minutes:g} min, seed {options.seed}", flush=True)
    results: list[Run] = []
    with ThreadPoolExecutor(options.jobs) as jobs:
        futures = [jobs.submit(one, name, options, over) for name in names]
        for result in in_order_of_their_ends(futures, over):
            results.append(result)
            print(f"\n{table(result)}", flush=True)
            if options.json:
                told = {"runs": [result.as_json() for result in results]}
                options.json.write_text(json.dumps(told, indent=1) + "\n")
    return status_of(results)


def one(name: str, options: argparse.Namespace, over: threading.Event) -> Run:
    """Run the fault *name*; a run that fails is a result, too: the others go on."""
    seconds, seed = options.minutes * 60, options.seed
    try:
        if name == "celery":
            return run_celery(seconds, seed, tell=tell, over=over, logs=options.logs)
        if name in DATABASE_FAULTS:
            return run_database(name, seconds, seed, tell=tell, over=over, logs=options.logs)
        result = run(FAULTS[name], seconds, seed, tell=tell, over=over, logs=options.logs)
    except Exception as error:  # noqa: BLE001
        return Run(name, 0.0, seed, 0, {}, None, 0, {}, [f"the run failed: {error!r}"])
    if options.logs:
        timeline.draw(options.logs / name, about(result))
    return result


def about(result: Run) -> str:
    return (
        f"Fault {result.fault!r}: {FAULTS[result.fault].about}. {result.injections} strikes in "
        f"{result.seconds:.0f} s, seed {result.seed}, by python -m nemesis."
    )


def in_order_of_their_ends(futures: Sequence[Future[Run]], over: threading.Event) -> Iterator[Run]:
    waiting = list(futures)
    while waiting:
        time.sleep(0.2)  # and not for a future: a signal has to get through
        if over.is_set():
            for future in waiting:
                future.cancel()
        done = [future for future in waiting if future.done()]
        waiting = [future for future in waiting if not future.done()]
        yield from (future.result() for future in done if not future.cancelled())


def tell(progress: str) -> None:
    print(f"  {progress}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
