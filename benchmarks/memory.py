"""
What executions leave on a lock node: keys and memory, by the million.

Tasks run through Celery's own tracer, in this process and without a message: all happens that
happens in a worker's child. Each kind of task gets servers of its own. Keys and ``used_memory`` of
a node are read before, half way and at the end; what stands in the table is the rise per execution,
*times a million*. That the halves agree is what allows to say so.

Nothing of it stays for ever: a fence is kept for an hour after its last use (``fence_retention``),
a marker for ``dedup_ttl``, one hour too unless set. A million executions leave what the tables say
if they all run within that hour, which takes 278 a second.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import redis
from celery import Celery
from celery.app.trace import build_tracer

from benchmarks import measure
from benchmarks.lock_cycle import our_locks
from benchmarks.measure import progress
from benchmarks.record import Plot, Record, Series, Table
from celery_redlock import RedlockTask
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.health import check
from celery_redlock.testing.servers import servers

PREFIX = "memory"
MILLION = 1_000_000
#: Executions in each half of a turn, for each cycle asked for.
EXECUTIONS = 100
#: Run before the first look, so that connections and scripts are there.
WARM_UP = 200
#: How many keys of a kind are asked for their size.
SAMPLE = 500
#: First word of a key after the prefix -> as the tables have it.
FENCE, MARKER = "fence", "marker"
#: Name -> options of the task, and whether every execution has a lock name of its own.
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "fence and marker (default)": ({}, True),
    "marker, no fence": ({"fence": False}, True),
    "fence, no marker": ({"dedup_ttl": 0}, True),
    "neither": ({"fence": False, "dedup_ttl": 0}, True),
    "fence and marker, one name": ({}, False),
    "fence, no marker, one name": ({"dedup_ttl": 0}, False),
}


@dataclass
class Left:
    """
    What one kind of task left on a node, per execution; one entry for each round.

    Attributes:
        keys: How many keys [1].
        halves: Bytes, by the first half and by the second.
        sizes: Kind of key -> bytes of one, by MEMORY USAGE.
    """

    keys: list[float] = field(default_factory=list)
    halves: list[tuple[float, float]] = field(default_factory=list)
    sizes: dict[str, float] = field(default_factory=dict)

    @property
    def memory(self) -> list[float]:
        """Bytes, by both halves together."""
        return [statistics.mean(halves) for halves in self.halves]


def app_with(nodes: Sequence[str], options: dict[str, Any]) -> Celery:
    """Return an app with a task that does nothing, under a lock, connected."""
    app = Celery("bench", broker="memory://", set_as_current=False)
    app.conf.update(redlock_nodes=list(nodes), redlock_prefix=PREFIX, task_ignore_result=True)

    @app.task(name="nothing", base=RedlockTask, shared=False, **options)
    def nothing(name: str) -> None:
        """Do nothing."""

    check(plugin_for(app).locks)
    return app


def executor(app: Celery) -> Callable[[str], None]:
    """Return what runs the task of *app* under a lock of a name, as a worker does."""
    trace: Any = build_tracer("nothing", app.tasks["nothing"], app=app)

    def execute(name: str) -> None:
        task_id = str(uuid4())
        request = {"id": task_id, "delivery_info": {}, "retries": 0, "hostname": "bench"}
        outcome = trace(task_id, (name,), {}, request)
        assert outcome.info is None, outcome

    return execute


def measured(left: Left, options: dict[str, Any], names: Iterator[str], executions: int) -> None:
    """Have *executions* run, twice, on servers of their own, and note what they leave."""
    with servers(5) as farm:
        nodes = [server.url for server in farm]
        our_locks(nodes, PREFIX).close()
        app = app_with(nodes, options)
        execute = executor(app)
        with redis.Redis.from_url(nodes[0]) as node:
            looks = []
            for count in (WARM_UP, executions, executions):
                for name in itertools.islice(names, count):
                    execute(name)
                plugin_for(app).locks.inspect("")  # is answered after all that was sent before
                looks.append((node.dbsize(), memory_of(node)))
            (_, before), (half_keys, half), (keys, end) = looks
            left.keys.append((keys - half_keys) / executions)
            left.halves.append(((half - before) / executions, (end - half) / executions))
            left.sizes = sizes_of(node)


def memory_of(node: redis.Redis) -> int:
    """Return what a node has in memory [bytes]; a buffer of 16 KiB comes and goes."""
    return int(node.info("memory")["used_memory"])


def sizes_of(node: redis.Redis) -> dict[str, float]:
    """Return what a key of each kind takes [bytes]."""
    sizes: dict[str, list[int]] = {FENCE: [], MARKER: []}
    for key in node.scan_iter(f"{PREFIX}:*", count=1000):
        kind = key.decode().split(":")[1]
        if kind in sizes and len(sizes[kind]) < SAMPLE:
            sizes[kind].append(node.memory_usage(key) or 0)
    return {kind: statistics.mean(found) for kind, found in sizes.items() if found}


def names_of(*, has_own: bool) -> Iterator[str]:
    """Return lock names, as long as those of usual tasks: new ones, or always the same."""
    return (
        f"order {number:08d}" for number in (itertools.count() if has_own else itertools.repeat(0))
    )


def figures(found: dict[str, Left], executions: int) -> Table:
    """Return what a million executions leave."""
    rows = []
    for name, left in found.items():
        first, second = (statistics.median(half) for half in zip(*left.halves, strict=True))
        rows.append(
            (
                name,
                round(statistics.median(left.keys) * MILLION),
                round(statistics.median(left.memory), 1),
                round(first, 1),
                round(second, 1),
                *(
                    round(left.sizes[kind]) if kind in left.sizes else None
                    for kind in (FENCE, MARKER)
                ),
            )
        )
    title = f"What executions leave on a node; a million extrapolated from {2 * executions:,}"
    columns = ("keys", "memory [MB]", "first half", "second half", "a fence [B]", "a marker [B]")
    return Table(title, ("", *columns), tuple(rows))


def picture(found: dict[str, Left]) -> Plot:
    """Return the memory as bars."""
    points = []
    for name, left in found.items():
        memory = sorted(left.memory)
        points.append((name, statistics.median(memory), memory[0], memory[-1]))
    return Plot(
        "memory",
        "Memory of a lock node per million executions (extrapolated)",
        "Task",
        "Memory [MB]",
        (Series("used_memory", tuple(points)),),
        bars=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    chosen = measure.arguments(__doc__, arguments, rounds=1, cycles=100)
    record = Record("memory", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    executions = chosen.cycles * EXECUTIONS
    found = {name: Left() for name in KINDS}
    for number in range(chosen.rounds):
        for name, (options, has_own) in KINDS.items():
            measured(found[name], options, names_of(has_own=has_own), executions)
        progress(number + 1, chosen.rounds)
    record.show(figures(found, executions))
    record.draw(picture(found))
    return record.end(chosen)


if __name__ == "__main__":
    sys.exit(main())
