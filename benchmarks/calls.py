"""
What a lock costs in Python calls and in CPU time, in the process that runs or publishes a task.

Counted by ``cProfile``, so the count hardly depends on the machine: functions of Python and of C
that a task under a lock calls beyond what a plain one does, with five nodes on loopback and the
default settings. The CPU time, user and system, is of the same executions without the profiler,
in turns with the plain task. Run it with ``make bench``; tests hold the limits.
"""

from __future__ import annotations

import cProfile
import itertools
import pstats
import statistics
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from celery import Celery, Task
from celery.app.trace import build_tracer

from benchmarks import measure
from benchmarks.lock_cycle import our_locks
from benchmarks.record import Record, Table, Verdict
from celery_redlock import RedlockTask
from celery_redlock.testing.servers import servers

__all__ = ["LIMITS", "added", "contestants"]

EARLY, LATE = "run, acknowledged early", "run, acknowledged late"
FRESH, DUPLICATE = "publish, unique", "publish, a duplicate"
RUN, PUBLISH = "run, plain", "publish, plain"
#: What each is compared with.
AGAINST = {EARLY: RUN, LATE: RUN, FRESH: PUBLISH, DUPLICATE: PUBLISH}
#: Most calls that a lock may add [1]. How many replies come together varies, and with it the count.
LIMITS = {EARLY: 615, LATE: 680, FRESH: 435, DUPLICATE: -105}
#: What is counted of a task is summed up every thousand events, to which a test does not come: so
#: many calls more [1].
SUMMED = {EARLY: 55, LATE: 55, FRESH: 0, DUPLICATE: 55}
#: Where a call is charged: the first that a file of ours begins with; C functions to their callers.
PARTS = {
    "task/naming/keys": "name",
    "task/naming/arguments": "name",
    "task/naming/canonical": "name",
    "task/execution/interrupt": "signals",
    "task/execution/raising": "signals",
    "process/deferral": "signals",
    "task": "execution",
    "unique": "reservation",
    "lock/scripts/requests": "bytes",
    "lock/records": "bytes",
    "lock/scripts/scripting": "bytes",
    "lock/nodes/round": "bytes",
    "lock/rules": "bytes",
    "lock/nodes/node": "nodes",
    "lock/nodes/link": "nodes",
    "lock/nodes/fanout": "nodes",
    "lock/nodes/connections": "nodes",
    "lock/nodes/replies": "nodes",
    "lock/clock": "clocks",
    "lock/nodes/steps": "clocks",
    "lock": "votes and leases",
    "events": "events",
    "observers": "events",
    "plugin": "events",
}
ELSEWHERE = "Python, Celery, kombu"
#: How often each is counted.
REPEATS = 3
numbers = itertools.count()


def contestants(nodes: Sequence[str]) -> dict[str, Callable[[], object]]:
    """Return what does each thing once, ready to be measured, with locks on *nodes*."""
    our_locks(nodes, "redlock").close()
    app = Celery("bench", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(redlock_nodes=list(nodes), task_ignore_result=True)

    def task(name: str, **options: Any) -> Any:
        def body(number: int) -> None:
            """Do nothing."""

        return app.task(name=name, shared=False, lazy=False, **options)(body)

    unique = task("unique", base=RedlockTask, unique_until="finished")
    plain = task("plain", base=Task)
    unique.delay(-1)
    return {
        RUN: running(plain),
        EARLY: running(task("early", base=RedlockTask)),
        LATE: running(task("late", base=RedlockTask, acks_late=True)),
        PUBLISH: lambda: plain.delay(next(numbers)),
        FRESH: lambda: unique.delay(next(numbers)),
        DUPLICATE: lambda: unique.delay(-1),
    }


def running(task: Any) -> Callable[[], object]:
    """Return what runs *task* once as a worker's child does, as a message of its own."""
    trace = build_tracer(task.name, task, app=task.app)

    def run() -> None:
        task_id = str(uuid.uuid4())
        ours = {"v": 1, "task_id": task_id, "id": uuid.uuid4().hex}
        request = {"id": task_id, "task": task.name, "retries": 0, "hostname": "w@h"}
        delivery = {"exchange": "", "routing_key": "celery"}
        trace(
            task_id, (next(numbers),), {}, {**request, "delivery_info": delivery, "redlock": ours}
        )

    return run


def counted(cycle: Callable[[], object], times: int) -> Counter[str]:
    """Return the calls of one *cycle*, by part: the average of so many *times*."""
    for _ in range(10):
        cycle()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(times):
        cycle()
    profile.disable()
    return Counter({part: many / times for part, many in by_part(pstats.Stats(profile)).items()})


def by_part(stats: Any) -> Counter[str]:
    """Return how many calls of each part are in *stats*."""
    found: Counter[str] = Counter()
    for (file, _line, _name), (_primitive, calls, _own, _all, callers) in stats.stats.items():
        if file == "~":  # written in C
            for (caller, _, _), (many, *_) in callers.items():
                found[part_of(caller)] += many
        else:
            found[part_of(file)] += calls
    return found


def part_of(file: str) -> str:
    """Return the part of our code that *file* belongs to."""
    _, is_ours, inside = file.rpartition("celery_redlock/")
    parts = (part for begin, part in PARTS.items() if is_ours and inside.startswith(begin))
    return next(parts, ELSEWHERE)


def added(what: dict[str, Callable[[], object]], times: int) -> dict[str, Counter[str]]:
    """
    Return by part how many calls each of `AGAINST` makes more than what it is compared with.

    On a machine that is busy replies come one by one, and each is looked at: the fewest count.
    """
    made = {
        name: min((counted(cycle, times) for _ in range(REPEATS)), key=Counter.total)
        for name, cycle in what.items()
    }
    found = {name: Counter(made[name]) for name in AGAINST}
    for name, other in AGAINST.items():
        found[name].subtract(made[other])
    return found


def cpu_times(
    what: dict[str, Callable[[], object]], rounds: int, cycles: int
) -> dict[str, list[float]]:
    """Return the CPU time of one cycle [s], of each round; all take turns."""
    times: dict[str, list[float]] = {name: [] for name in what}
    for number in range(rounds):
        for name, cycle in what.items():
            started = time.process_time()
            for _ in range(cycles):
                cycle()
            times[name].append((time.process_time() - started) / cycles)
        measure.progress(number + 1, rounds)
    return times


def tables(found: dict[str, Counter[str]], cpu: dict[str, list[float]]) -> Iterator[Table]:
    """Yield calls by part, and CPU times."""
    parts = [*dict.fromkeys(PARTS.values()), ELSEWHERE]
    rows = [(part, *(round(found[name][part]) for name in AGAINST)) for part in parts]
    rows.append(("together", *(round(sum(found[name].values())) for name in AGAINST)))
    yield Table("Calls that the lock adds, five nodes [1]", ("", *AGAINST), tuple(rows))
    medians = {name: statistics.median(times) * 1e6 for name, times in cpu.items()}
    each = (
        (name, round(medians[name], 1), round(medians[name] - medians[AGAINST.get(name, name)], 1))
        for name in cpu
    )
    yield Table("CPU time, user and system [us]", ("", "p50", "added"), tuple(each))


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, measure and print the tables; with ``--check`` return 1 if a limit was missed."""
    chosen = measure.arguments(__doc__, arguments, cycles=200)
    record = Record("calls", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    with servers(5) as nodes:
        what = contestants([node.url for node in nodes])
        found = added(what, 5 * chosen.cycles)
        for shown in tables(found, cpu_times(what, chosen.rounds, chosen.cycles)):
            record.show(shown)
    for name, limit in LIMITS.items():
        most = limit + SUMMED[name]
        record.judge(Verdict(f"calls added: {name}", round(sum(found[name].values())), most))
    return record.end(chosen)


if __name__ == "__main__":
    sys.exit(main())
