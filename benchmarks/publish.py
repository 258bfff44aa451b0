"""
What it costs to publish a task that is unique, beside one that is not.

A duplicate is to cost one round of the lock cycle and little more, a new task at most one
round more than without. Run it with ``make bench``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from celery import Celery, Task

from benchmarks import measure
from benchmarks.lock_cycle import ROUND_TRIP, our_cycle, our_locks
from benchmarks.measure import Candidate, Target, alternate, table, verdicts
from benchmarks.record import Record
from celery_redlock import RedlockTask
from celery_redlock.ops.servers import servers
from celery_redlock.plugin import plugin_for
from support.proxy import proxied

FAR = ", 5 ms away"
CYCLE, PLAIN = "lock cycle, 5 nodes", "delay(), plain task"
FRESH, DUPLICATE = "delay(), unique and new", "delay(), unique and a duplicate"

#: A new task asks the nodes once, which tests count. Here it may also take what the client and five
#: servers on its own two cores do besides.
TARGETS = (
    Target(DUPLICATE, (CYCLE,), 1.2),
    Target(FRESH, (PLAIN, CYCLE), 1.3),
    Target(DUPLICATE + FAR, (CYCLE + FAR,), 1.2),
    Target(FRESH + FAR, (PLAIN, CYCLE + FAR), 1.1),
)


def app_on(broker: str, nodes: Sequence[str], prefix: str) -> Celery:
    """Return an app with a unique task, connected, and one of them queued."""
    app = Celery("bench", broker=broker, set_as_current=False)
    app.conf.update(redlock_nodes=list(nodes), redlock_prefix=prefix, task_ignore_result=True)

    @app.task(name="plain", base=Task, shared=False)
    def plain(number: int) -> None:
        """Do nothing."""

    @app.task(name="unique", base=RedlockTask, unique_until="finished", shared=False)
    def unique(number: int) -> None:
        """Do nothing."""

    our_locks(nodes, prefix).close()
    plugin_for(app).locks.check()
    unique.delay(-1)
    return app


def candidates(broker: str, nodes: Sequence[str], suffix: str) -> list[Candidate]:
    """Return what is compared on *nodes*."""
    prefix = "far" if suffix else "near"
    app = app_on(broker, nodes, prefix)
    numbers = itertools.count()

    def duplicate() -> None:
        assert app.tasks["unique"].delay(-1).duplicate

    def with_a_new_number(task: str) -> Callable[[], object]:
        return lambda: app.tasks[task].delay(next(numbers))

    return [
        Candidate(CYCLE + suffix, our_cycle(our_locks(nodes, f"{prefix}-cycle"))),
        Candidate(DUPLICATE + suffix, duplicate),
        Candidate(FRESH + suffix, with_a_new_number("unique")),
        *([] if suffix else [Candidate(PLAIN, with_a_new_number("plain"))]),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables; with ``--check`` return 1 if a target was missed."""
    chosen = measure.arguments(__doc__, arguments)
    record = Record("publish", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    with ExitStack() as stack:
        broker, *nodes = stack.enter_context(servers(6))
        near = candidates(broker.url, [node.url for node in nodes], "")
        alternate(near, chosen.rounds, chosen.cycles)
        record.show(table("On loopback: six servers and the client share this machine", near))
        ports = [node.port for node in nodes]
        links = stack.enter_context(proxied(ports, delay=ROUND_TRIP / 2))
        far = candidates(broker.url, [link.url for link in links], FAR)
        alternate(far, chosen.rounds, max(3, chosen.cycles // 8))
        record.show(table("Behind a round trip of 5 ms to the lock nodes", far))
        record.judge(*verdicts([*near, *far], TARGETS))
    return record.end(chosen)


if __name__ == "__main__":
    sys.exit(main())
