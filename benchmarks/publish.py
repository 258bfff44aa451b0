"""
What it costs to publish a task that is unique, beside one that is not, and beside other libraries.

A duplicate is to cost one round of the lock cycle and little more, a new task at most one
round more than without. Run it with ``make bench``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks import measure
from benchmarks.lock_cycle import ROUND_TRIP, our_cycle, our_locks
from benchmarks.measure import Candidate, Target, alternate, table, verdicts
from benchmarks.record import Plot, Record, Series
from benchmarks.task_peers import (
    OURS,
    OURS_ON_ONE,
    PEERS,
    PLAIN,
    TASKS,
    app_of,
    enrol,
    settings,
)
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.health import check
from celery_redlock.testing.servers import servers
from support.proxy import proxied

FAR = ", 5 ms away"
CYCLE = "lock cycle, 5 nodes"
NEW, AGAIN = ", new", ", a duplicate"
LIBRARIES = (OURS, OURS_ON_ONE, *PEERS)

#: A new task asks the nodes once, which tests count. Here it may also take what the client and five
#: servers on its own two cores do besides.
TARGETS = (
    Target(OURS + AGAIN, (CYCLE,), 1.2),
    Target(OURS + NEW, (PLAIN, CYCLE), 1.3),
    Target(OURS + AGAIN + FAR, (CYCLE + FAR,), 1.2),
    Target(OURS + NEW + FAR, (PLAIN, CYCLE + FAR), 1.1),
)
numbers = itertools.count()


def task_of(name: str, broker: str, nodes: Sequence[str], **conf: Any) -> Any:
    """Return a task that does nothing, unique as *name* has it, of an app that is connected."""
    ours = {"unique_until": "finished"} if name in (OURS, OURS_ON_ONE) else {}
    conf = {"broker_url": broker, **settings(name, nodes), **conf}
    app = app_of(conf, **TASKS[name], **ours)
    if ours:
        check(plugin_for(app).locks)
    return app.tasks["nothing"]


def new_and_again(task: Any, name: str, suffix: str = "") -> Iterator[Candidate]:
    """Yield what publishes *task* with a new argument each time, and with one that is queued."""
    queued = task.delay("queued")

    def refused(result: Any) -> None:
        assert result.id in (queued.id, None)  # celery-once tells nothing of the one queued

    yield Candidate(name + NEW + suffix, lambda: task.delay(str(next(numbers))))
    yield Candidate(name + AGAIN + suffix, lambda: task.delay("queued"), undo=refused)


def on_loopback(broker: str, nodes: Sequence[str]) -> list[Candidate]:
    """Return what is compared where a round trip costs next to nothing."""
    enrol(nodes)
    plain = task_of(PLAIN, broker, nodes)
    found = [
        Candidate(CYCLE, our_cycle(our_locks(nodes, "cycle"))),
        Candidate(PLAIN, lambda: plain.delay(str(next(numbers)))),
    ]
    for name in LIBRARIES:
        found += new_and_again(task_of(name, broker, nodes), name)
    return found


def behind_a_network(broker: str, nodes: Sequence[str]) -> list[Candidate]:
    """Return what is compared where a round trip to the lock nodes takes 5 ms."""
    cycle = our_cycle(our_locks(nodes, "far-cycle"))
    our_locks(nodes, "far").close()
    task = task_of(OURS, broker, nodes, redlock_prefix="far")
    return [Candidate(CYCLE + FAR, cycle), *new_and_again(task, OURS, FAR)]


def picture(candidates: Sequence[Candidate]) -> Plot:
    """Return what a publish takes with each library."""
    by_name = {one.name: one for one in candidates}

    def point(word: str, one: Candidate) -> tuple[str, float, float, float]:
        p50, p10, p90 = (round(one.quantile(share) * 1e6, 1) for share in (0.5, 0.1, 0.9))
        return word, p50, p10, p90

    def of(name: str) -> Series:
        found = (("new", by_name[name + NEW]), ("a duplicate", by_name[name + AGAIN]))
        return Series(name, tuple(point(word, one) for word, one in found))

    plain = Series(PLAIN, (point("new", by_name[PLAIN]),))
    what = "What is published"
    series = (plain, *(of(name) for name in LIBRARIES))
    return Plot("publish", "Publish a unique task", what, "Time of delay() [us]", series, bars=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables; with ``--check`` return 1 if a target was missed."""
    chosen = measure.arguments(__doc__, arguments)
    record = Record("publish", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    with ExitStack() as stack:
        broker, *nodes = stack.enter_context(servers(6))
        near = on_loopback(broker.url, [node.url for node in nodes])
        alternate(near, chosen.rounds, chosen.cycles)
        record.show(table("On loopback: six servers and the client share this machine", near))
        ports = [node.port for node in nodes]
        links = stack.enter_context(proxied(ports, delay=ROUND_TRIP / 2))
        far = behind_a_network(broker.url, [link.url for link in links])
        alternate(far, chosen.rounds, max(3, chosen.cycles // 8))
        record.show(table("Behind a round trip of 5 ms to the lock nodes", far))
        record.draw(picture(near))
        record.judge(*verdicts([*near, *far], TARGETS))
    return record.end(chosen)


if __name__ == "__main__":
    sys.exit(main())
