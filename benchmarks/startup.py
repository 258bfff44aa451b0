"""
What celery-redlock adds to a start: of an interpreter, of the first task, of a worker.

Imports: fresh interpreters take turns, one of each kind in every round; each tells how long its
import took and is timed as a whole, with compiled files in place. First tasks: fresh processes with
an app on five nodes run tasks one after another; the first one connects to all of them. Workers:
``celery worker`` processes take turns, on the same broker, with an app that has a plain task or one
under a lock on five nodes; timed from exec to the signal ``worker_ready``.

What counts of the import is the median of the differences within a round.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import measure
from benchmarks.lock_cycle import our_locks
from benchmarks.measure import progress
from benchmarks.record import Plot, Record, Series, Table, Verdict
from celery_redlock.testing.servers import servers
from support.worker import Worker

CELERY, WITH_OURS = "import celery", "import celery; import celery_redlock"
TASK = "from celery import Celery, Task"
#: What is imported -> what it is held against.
IMPORTS = {
    CELERY: CELERY,
    WITH_OURS: CELERY,
    TASK: CELERY,
    f"{TASK}; from celery_redlock import RedlockTask": TASK,
    f"{TASK}; import redis": TASK,
}
#: What they are called where there is little room, in the same order.
SHORT = ("celery", "+ celery_redlock", "Celery, Task", "+ RedlockTask", "+ redis")
#: How much longer the second import of the target may take than the first [ms].
MOST_MORE = 30.0
#: Tells how long *what* takes; nothing else is imported that celery could share.
IMPORT = "import time; t = time.perf_counter(); {what}; print(time.perf_counter() - t)"

PREFIX = "startup"
#: Of the environment: compiled files are kept, and used.
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
APP = """
import json, os, sys, time
from celery import Celery, Task, signals

conf, locked = json.loads(os.environ["BENCH"])
app = Celery("bench")
app.conf.update(conf)
base = Task
if locked:
    from celery_redlock import RedlockTask as base

@app.task(base=base, name="nothing", ignore_result=True)
def nothing(name):
    pass

@signals.worker_ready.connect
def tell(**_):
    print(f"READY {time.monotonic()}", flush=True)
"""
#: How long each of some tasks takes [s], in a process that has done none before.
TASKS = """
from startup_app import app, nothing, time
app.finalize()
for number in range({count}):
    started = time.perf_counter()
    nothing.apply((str(number),)).get()
    print(time.perf_counter() - started)
"""
PLAIN, LOCKED = "plain task", "RedlockTask, five nodes"
POOLS = ("solo", "prefork")

#: Name -> times of all rounds [s].
Times = dict[str, list[float]]


def python(program: str, folder: str, **env: str) -> list[float]:
    """Return the numbers that a fresh interpreter prints."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **COMPILED, **env},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [float(line) for line in done.stdout.splitlines()]


def imports(rounds: int, folder: str) -> tuple[Times, Times]:
    """Return how long the imports take, and the processes as a whole."""
    inside: Times = {name: [] for name in IMPORTS}
    whole: Times = {name: [] for name in IMPORTS}
    for number in range(rounds + 1):
        for name in IMPORTS:
            started = time.perf_counter()
            inside[name] += python(IMPORT.format(what=name), folder)
            whole[name].append(time.perf_counter() - started)
        progress(number, rounds)
    for times in (*inside.values(), *whole.values()):
        del times[0]  # it may have compiled
    return inside, whole


def tasks(rounds: int, count: int, folder: str, confs: dict[str, str]) -> Times:
    """Return how long the first task of a process takes, the second, and later ones."""
    found: Times = {}
    for _ in range(rounds):
        for name, conf in confs.items():
            times = python(TASKS.format(count=count), folder, BENCH=conf)
            for which, some in (("first", times[:1]), ("second", times[1:2]), ("later", times[2:])):
                found.setdefault(f"{which}, {name}", []).append(statistics.median(some))
    return found


def boots(rounds: int, folder: str, confs: dict[str, str]) -> Times:
    """Return how long workers take from exec to ready."""
    found: Times = {f"{pool}, {name}": [] for pool in POOLS for name in confs}
    for _ in range(rounds):
        for pool in POOLS:
            for name, conf in confs.items():
                env = {**COMPILED, "BENCH": conf}
                worker = Worker("startup_app", pool=pool, concurrency=1, env=env, cwd=folder)
                started = time.monotonic()
                with worker:
                    ready = worker.wait_for_log(r"READY (\S+)")
                found[f"{pool}, {name}"].append(float(ready[1]) - started)
    return found


def table(title: str, found: Times, against: dict[str, str]) -> Table:
    """Return medians and spread [ms], and the difference to another row's within a round."""
    rows = []
    for name, times in found.items():
        spread = (1e3 * time for time in (statistics.median(times), min(times), max(times)))
        added = 1e3 * more(found, name, against[name]) if against.get(name, name) != name else None
        rows.append((name, *spread, added))
    return Table(f"{title} [ms]", ("", "p50", "lowest", "highest", "more"), tuple(rows))


def more(found: Times, name: str, than: str) -> float:
    """Return by how much *name* takes longer than another: median of the differences [s]."""
    return statistics.median(a - b for a, b in zip(found[name], found[than], strict=True))


def beside_plain(found: Times) -> dict[str, str]:
    """Return which row of *found* with a lock is beside which without."""
    return {name: name.replace(LOCKED, PLAIN) for name in found if LOCKED in name}


def bars(label: str, found: Times, called: dict[str, str]) -> Series:
    """Return medians with lowest and highest [ms] of those that are *called* something."""
    points = []
    for name, short in called.items():
        times = [1e3 * one for one in found[name]]
        points.append((short, statistics.median(times), min(times), max(times)))
    return Series(label, tuple(points))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables; with ``--check`` return 1 if a target was missed."""
    chosen = measure.arguments(__doc__, arguments)
    record = Record("startup", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    half = max(1, chosen.rounds // 2)  # a worker takes ten times as long as an import
    with servers(6) as (broker, *farm), tempfile.TemporaryDirectory(prefix="bench-") as folder:
        nodes = [node.url for node in farm]
        our_locks(nodes, PREFIX).close()
        Path(folder, "startup_app.py").write_text(APP)
        conf = {"broker_url": broker.url, "redlock_nodes": nodes, "redlock_prefix": PREFIX}
        confs = {name: json.dumps([conf, name == LOCKED]) for name in (PLAIN, LOCKED)}
        inside, whole = imports(chosen.rounds, folder)
        first = tasks(half, max(3, chosen.cycles), folder, confs)
        ready = boots(half, folder, confs)
    record.show(table("Imports in a fresh interpreter", inside, IMPORTS))
    record.show(table("The whole process that does nothing else", whole, IMPORTS))
    record.show(table("Tasks of a fresh process, apply()", first, beside_plain(first)))
    record.show(
        table("Worker with one task at a time, from exec to ready", ready, beside_plain(ready))
    )
    for plot in pictures(inside, whole, first, ready):
        record.draw(plot)
    added = 1e3 * more(inside, WITH_OURS, CELERY)
    record.judge(Verdict(f"{WITH_OURS} - {CELERY} [ms]", round(added, 2), MOST_MORE))
    return record.end(chosen)


def pictures(inside: Times, whole: Times, first: Times, ready: Times) -> Iterator[Plot]:
    """Yield imports, and first tasks and workers without a lock and with one."""
    short = dict(zip(IMPORTS, SHORT, strict=True))
    both = (bars("import", inside, short), bars("whole process", whole, short))
    yield Plot("imports", "Imports", "Program", "Time [ms]", both, bars=True)
    for name, title, found in (
        ("first_task", "The first task of a process", first),
        ("worker_start", "Worker, from exec to ready", ready),
    ):
        short = {one: one.partition(",")[0] for one in found}
        sides = [
            bars(side, found, {one: x for one, x in short.items() if side in one})
            for side in (PLAIN, LOCKED)
        ]
        yield Plot(name, title, "", "Time [ms]", tuple(sides), bars=True)


if __name__ == "__main__":
    sys.exit(main())
