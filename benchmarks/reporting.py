"""
What report mode costs a worker: plain tasks, and the same ones under ``redlock_mode="report"``.

Two prefork workers with two children each take short turns, in another order in every round; the
one whose turn it is not is stopped by a signal. Their task sleeps, as one that waits for another
service does; with ``redlock_protect`` it gets a lock of its own for each call. What counts is the
median of the ratios within a round. The five nodes, the broker and both workers share the cores of
this machine, so that what the nodes do is missing to the tasks, too. The process that publishes
imports `celery_redlock.protect`, as it should. Run it with ``make bench``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from celery import Celery

import celery_redlock.protect  # noqa: F401  so that a message says of which publish it is
from benchmarks import measure
from benchmarks.contestant import Contestant, declare, take_turns
from benchmarks.lock_cycle import our_locks
from benchmarks.measure import table
from benchmarks.record import Record, Verdict
from celery_redlock.testing.servers import Server, servers
from support.worker import Worker

PLAIN, REPORTING = "plain Task", "the same in report mode"
#: How long a task sleeps [ms].
LENGTHS = (50, 20, 5, 0)
#: What is left of the tasks per second [1], where the task does as much as most do.
LEFT = 0.9
#: From that length on [ms]: a shorter one is in its round to the nodes for a tenth of its time.
JUDGED_FROM = 20
SIZE = 2
#: Tasks per turn, for each cycle asked for: a turn is long enough for the counts, sent every 5 s.
TASKS = 4


def app_with(conf: dict[str, Any]) -> Celery:
    """Return an app with *conf* and the task of both, which sleeps as the configuration says."""
    app = Celery("bench", set_as_current="BENCH" in os.environ)
    app.conf.update(conf)
    length = conf["bench_length"] / 1e3
    declare(app, ignore_result=True, before=lambda: time.sleep(length))  # stands for work
    return app


def contestant(name: str, length: int, broker: Server, nodes: Sequence[str]) -> Contestant:
    """Return a worker whose task takes *length* [ms]."""
    queue = f"{length}-{len(name)}"
    conf = {"broker_url": broker.url, "task_default_queue": queue, "bench_length": length}
    if name == REPORTING:
        conf |= {"redlock_nodes": list(nodes), "redlock_mode": "report"}
        conf |= {"redlock_protect": {"nothing": {"unique_on": ["name"]}}}
    env = {"BENCH": json.dumps(conf), "PYTHONPATH": os.pathsep.join(sys.path)}
    worker = Worker("benchmarks.reporting", concurrency=SIZE, name=queue, env=env)
    return Contestant(name, app_with(conf), worker, at_once=SIZE)


def compare(record: Record, length: int, rounds: int, cycles: int) -> None:
    """Measure, show and judge tasks of one *length* [ms]."""
    with ExitStack() as stack:
        broker, *farm = stack.enter_context(servers(6))
        nodes = [node.url for node in farm]
        our_locks(nodes, "redlock").close()
        plain, reporting = (contestant(name, length, broker, nodes) for name in (PLAIN, REPORTING))
        take_turns([plain, reporting], rounds, cycles * TASKS)
    title = f"Time per task of {length} ms, prefork -c {SIZE}"
    record.show(table(title, [plain, reporting]))
    if length >= JUDGED_FROM:
        both = zip(plain.times, reporting.times, strict=True)
        left = statistics.median(mine / its for mine, its in both)
        text = f"tasks/s in report mode / {PLAIN}, tasks of {length} ms"
        record.judge(Verdict(text, round(left, 4), LEFT, at_least=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables; with ``--check`` return 1 if a target was missed."""
    chosen = measure.arguments(__doc__, arguments)
    record = Record("reporting", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    for length in LENGTHS:
        compare(record, length, chosen.rounds, chosen.cycles)
    return record.end(chosen)


if "BENCH" in os.environ:
    app = app_with(json.loads(os.environ["BENCH"]))

if __name__ == "__main__":
    sys.exit(main())
