"""
What a lock costs a worker: tasks that do nothing, plain, under our lock, and under others'.

The workers of a pool take short turns, in another order in every round; those whose turn it is not
are stopped by a signal. In a turn the tasks are published first, each with a lock of its own, and
then run, at Celery's own settings and without results. What counts is the median of the ratios
within a round: other programs slow a round down, and rarely one turn of it. The others take their
lock at publish and we where the task runs, so that they are beside us with both times together:
one ``delay()`` of one client and one task of the worker. Run it with ``make bench``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from celery import signals

from benchmarks import measure
from benchmarks.contestant import Contestant, take_turns
from benchmarks.record import Plot, Record, Series, Table, Verdict
from benchmarks.task_peers import OURS, PEERS, PLAIN, TASKS, app_of, enrol, settings
from celery_redlock import RedlockTask
from celery_redlock.task import base
from celery_redlock.testing.servers import Server, servers
from support.worker import Worker

#: Pool and how many tasks at once [1].
POOLS = (("prefork", 1), ("prefork", 2), ("prefork", 4), ("threads", 16), ("gevent", 100))
#: Those of a short run, of one round: starting workers is what takes its time.
FEW = POOLS[:3]
#: What is to be left of a plain task's tasks per second, in prefork [1].
LEFT = 0.85
#: Tasks per turn, for each cycle asked for.
TASKS_PER_CYCLE = 4
COLUMNS = ("", "tasks/s", "run p10", "run p50", "run p90", "publish", "both", "left")


def contestant(name: str, pool: str, size: int, broker: Server, nodes: Sequence[str]) -> Contestant:
    """Return a worker with tasks of *name*, and their publisher."""
    queue = f"{pool}-{size}-{list(TASKS).index(name)}"
    conf = {"broker_url": broker.url, "task_default_queue": queue, **settings(name, nodes)}
    env = {"BENCH": json.dumps([name, conf]), "PYTHONPATH": os.pathsep.join(sys.path)}
    options: Any = {"pool": pool, "concurrency": size, "name": queue, "env": env}
    worker = Worker("benchmarks.throughput", args=["-l", "WARNING"], **options)
    return Contestant(name, app_of(conf, **TASKS[name]), worker, at_once=size)


def spread(figures: Sequence[float]) -> tuple[float, float, float]:
    """Return median, p10 and p90, as a plot has them."""
    ordered = sorted(figures)
    low, high = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.1, 0.9))
    return statistics.median(ordered), low, high


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios within a round."""
    return round(statistics.median(a / b for a, b in zip(some, others, strict=True)), 4)


def figures(where: str, everybody: dict[str, Contestant]) -> Table:
    """Return what was found in one pool."""
    rows = []
    for name, one in everybody.items():
        times = (
            *(one.quantile(q) for q in (0.1, 0.5, 0.9)),
            *map(statistics.median, (one.published, one.both)),
        )
        in_us = (round(seconds * 1e6, 1) for seconds in times)
        rows.append((name, round(1 / one.p50, 1), *in_us, ratio(everybody[PLAIN].times, one.times)))
    title = f"{where}: tasks per second, time per task [us], what is left of the plain tasks/s [1]"
    return Table(title, COLUMNS, tuple(rows))


def judged(where: str, everybody: dict[str, Contestant]) -> Iterator[Verdict]:
    """Yield what is left of the tasks per second, and how we do beside the fastest others."""
    ours = everybody[OURS]
    if where.startswith("prefork"):
        left = ratio(everybody[PLAIN].times, ours.times)
        yield Verdict(f"tasks/s of {OURS} / {PLAIN}, {where}", left, LEFT, at_least=True)
    fastest = min((everybody[name] for name in PEERS), key=lambda one: statistics.median(one.both))
    text = f"publish and run of {OURS} / {fastest.name}, {where}"
    yield Verdict(text, ratio(ours.both, fastest.both), 1.0)


def pictures(found: dict[str, dict[str, Contestant]]) -> Iterator[Plot]:
    """Yield tasks per second in every pool, and publish and run in the first one."""

    def in_pools(name: str) -> tuple[tuple[str, float, float, float], ...]:
        each = ((where, found[where][name].times) for where in found)
        return tuple((where, *spread([1 / t for t in times])) for where, times in each)

    series = tuple(Series(name, in_pools(name)) for name in TASKS)
    yield Plot(
        "throughput",
        "Tasks that do nothing, per second",
        "Pool",
        "Tasks per second",
        series,
        bars=True,
    )
    where, everybody = next(iter(found.items()))

    def in_parts(one: Contestant) -> tuple[tuple[str, float, float, float], ...]:
        parts = {"publish": one.published, "run": one.times, "both": one.both}
        return tuple((part, *spread([t * 1e6 for t in times])) for part, times in parts.items())

    yield Plot(
        "publish_and_run",
        f"Publish a task that does nothing, and run it, {where}",
        "What",
        "Time per task [us]",
        tuple(Series(one.name, in_parts(one)) for one in everybody.values()),
        bars=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables; with ``--check`` return 1 if a target was missed."""
    chosen = measure.arguments(__doc__, arguments, rounds=12)
    record = Record("throughput", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    found: dict[str, dict[str, Contestant]] = {}
    with ExitStack() as stack:
        # The same for all pools: two of the others connect once in a process, and stay there.
        broker, *farm = stack.enter_context(servers(6))
        nodes = [node.url for node in farm]
        enrol(nodes)
        for pool, size in POOLS if chosen.rounds > 1 else FEW:
            where = f"{pool} -c {size}"
            found[where] = {name: contestant(name, pool, size, broker, nodes) for name in TASKS}
            take_turns(list(found[where].values()), chosen.rounds, chosen.cycles * TASKS_PER_CYCLE)
            record.show(figures(where, found[where]))
    for plot in pictures(found):
        record.draw(plot)
    record.judge(*(one for where, all_of_it in found.items() for one in judged(where, all_of_it)))
    return record.end(chosen)


def say_ready(sender: Any, **_: Any) -> None:
    """Say what a worker says at a more talkative level than its own."""
    print(f"{sender.hostname} ready.", flush=True)


if "BENCH" in os.environ:
    name, conf = json.loads(os.environ["BENCH"])
    app = app_of(conf, is_current=True, **TASKS[name])
    signals.worker_ready.connect(say_ready, weak=False)
    if TASKS[name]["base"] is not RedlockTask:  # others are not to pay for our being imported
        signals.task_postrun.disconnect(base._after_task)  # noqa: SLF001

if __name__ == "__main__":
    sys.exit(main())
