"""
What the first lock after an idle time costs: a connection that is proven, one that was replaced.

Nobody knows of a connection that was idle whether a firewall or load balancer has dropped it. Ours
asks the nodes to show that they are there, and replaces what is silent; the other way would be to
replace all of them each time. Measured are one acquire and release on three nodes, by way of the
same proxy, with connections that are in use, that were idle, that are replaced each time, and that
were dropped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks import measure
from benchmarks.lock_cycle import our_cycle, our_locks
from benchmarks.measure import Candidate, Target, alternate, table, verdicts
from benchmarks.record import Record, Verdict
from celery_redlock import Redlock
from celery_redlock.lock.nodes.link import Stale
from celery_redlock.testing.servers import servers
from support.proxy import Link, proxied

NODES = 3
ROUND_TRIPS = (0.0, 0.0025)
USED, PROVEN, REPLACED, DROPPED = "in use", "idle", "replaced each time", "dropped while idle"
#: Before any moment [s].
LONG_AGO = float("-inf")
#: Until the answers to a release have come, which nobody waits for [s].
ANSWERED = 0.02
#: How many times more a replacement takes than the proof, at least [1].
LEAST_SAVED = 2.0


def away(name: str, round_trip: float) -> str:
    """Return how *name* is called behind *round_trip* [s]."""
    return f"{name}, {round_trip * 1e3:g} ms away"


def idle(locks: Redlock) -> Callable[[object], None]:
    """Return what makes the connections look as if nobody had used them for long."""
    fanout = locks.fanout

    def idle(_: object = None) -> None:
        time.sleep(ANSWERED)  # an answer that comes later would show the connection as used
        with fanout._mutex:  # noqa: SLF001  as nothing public does
            fanout._look()  # noqa: SLF001
            for node in fanout.nodes:
                node.proven_at = LONG_AGO

    return idle


def dropped(locks: Redlock, links: Sequence[Link]) -> Callable[[object], None]:
    """Return what has the proxy swallow what is sent on the connections that are there."""
    make_idle = idle(locks)

    def dropped(_: object = None) -> None:
        make_idle(None)
        for link in links:
            link.drop_connections()

    return dropped


def replacing(locks: Redlock) -> Callable[[], object]:
    """Return a cycle that begins with new connections."""
    cycle, fanout = our_cycle(locks), locks.fanout

    def replace() -> object:
        with fanout._mutex:  # noqa: SLF001  as nothing public does
            for node in fanout.nodes:
                fanout._lose(node, Stale("replaced"))  # noqa: SLF001
            fanout._has_settled = False  # noqa: SLF001
        return cycle()

    return replace


def paused(_: object = None) -> None:
    """Let the answers to a release come."""
    time.sleep(ANSWERED)  # as the idle ones have, so that the same is measured


def candidates(stack: ExitStack, ports: Sequence[int], round_trip: float) -> list[Candidate]:
    """Return the four, each on locks of its own behind the same *round_trip* [s]."""

    def locks_on(prefix: str) -> tuple[Redlock, list[Link]]:
        links = stack.enter_context(proxied(ports, delay=round_trip / 2))
        locks = our_locks([link.url for link in links], f"{prefix}{round_trip}")
        stack.callback(locks.close)
        return locks, links

    used, proven = locks_on("used")[0], locks_on("proven")[0]
    replaced, (lost, links) = locks_on("replaced")[0], locks_on("dropped")
    drop = dropped(lost, links)
    return [
        Candidate(away(USED, round_trip), our_cycle(used), paused),
        Candidate(
            away(PROVEN, round_trip), our_cycle(proven), idle(proven), lambda: idle(proven)(None)
        ),
        Candidate(away(REPLACED, round_trip), replacing(replaced), paused),
        Candidate(away(DROPPED, round_trip), our_cycle(lost), drop, lambda: drop(None)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables; with ``--check`` return 1 if a target was missed."""
    chosen = measure.arguments(__doc__, arguments, rounds=10, cycles=10)
    record = Record("idle", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    with servers(NODES) as nodes:
        for round_trip in ROUND_TRIPS:
            with ExitStack() as stack:
                found = candidates(stack, [node.port for node in nodes], round_trip)
                alternate(found, chosen.rounds, chosen.cycles)
            title = f"Three nodes, {round_trip * 1e3:g} ms away by way of a proxy"
            record.show(table(title, found))
            used, proven, replaced, _ = found
            for verdict in verdicts(found, [Target(proven.name, (used.name,), 3.0)]):
                record.judge(verdict)
            saved = round(replaced.p50 / proven.p50, 4)
            told = f"{replaced.name} / {proven.name}"
            record.judge(Verdict(told, saved, LEAST_SAVED, at_least=True))
    return record.end(chosen)


if __name__ == "__main__":
    sys.exit(main())
