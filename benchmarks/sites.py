"""
Ten who wait for one lock on two sites, with hints and without, while a node is away.

Two processes, each with five threads that acquire, hold for 10 ms, release and rest as long. Two
nodes are near the first and one near the second; a message to the other site takes half of the
round trip between them. One node is down, or was restarted and remembers nothing, or a third
process with ten threads that wait stands still. Without hints everybody only asks again. At last
300 threads in 100 processes wait for one lock.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import Any

import redis

from benchmarks import measure
from benchmarks.record import Record, Table, Verdict
from celery_redlock import LockNotAcquired, Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.servers import Server, servers
from support.proxy import proxied

#: Round trips between the sites [s].
APART = (0.001, 0.005, 0.02)
CASES = ("all up", "one down", "one restarted empty", "ten more stand still")
PREFIX, NAME = "sites", "x"
THREADS, HOLD, REST = 5, 0.01, 0.01
#: How long they contend [s], for each cycle asked for.
PER_CYCLE = 0.2
#: For how long the lock is held first [s]: all wait by then.
ALL_WAIT = 1.5
#: When each lock was held: from when until when [s].
Grants = list[tuple[float, float]]


class RulesOfSites(Rules):
    """Those of clients that reach the same nodes by other names, as the proxies have them."""

    def fingerprint(self, nodes: Iterable[str]) -> str:
        """Return the same for all names."""
        return super().fingerprint(str(len(list(nodes))))


def connected(urls: Sequence[str], *, hints: bool) -> Redlock:
    """Return locks on the nodes at *urls*."""
    locks = Redlock(list(urls), RulesOfSites(prefix=PREFIX))
    if not hints:
        locks.participant.listener = None
    return locks


def contend(locks: Redlock, ends: float, found: Grants) -> None:
    """Acquire, hold and release over and over."""
    while (left := ends - time.time()) > 0:
        try:
            lease = locks.acquire(NAME, wait=left)
        except LockNotAcquired:
            continue
        granted = time.time()
        time.sleep(HOLD)  # stands for what the lock is held for
        found.append((granted, time.time()))
        locks.release(lease, wait=False)
        time.sleep(REST)  # stands for what is done without it


def site(urls: Sequence[str], hints: bool, threads: int, parent: Any) -> None:  # noqa: FBT001
    """Contend with so many threads, in a process of its own, and tell *parent* of every grant."""
    locks = connected(urls, hints=hints)
    with suppress(LockNotAcquired):  # on a slow machine
        locks.release(locks.acquire(f"of {os.getpid()}"))
    parent.send("ready")
    ends = parent.recv()
    found: Grants = []
    crew = [threading.Thread(target=contend, args=(locks, ends, found)) for _ in range(threads)]
    for one in crew:
        one.start()
    for one in crew:
        one.join()
    parent.send(found)


@contextmanager
def people(sites: Sequence[tuple[Sequence[str], int]], *, hints: bool) -> Iterator[list[Any]]:
    """Start a process for each site; yield the process and the way to it, of each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["celery_redlock.testing.servers", "support.proxy"])
    with ExitStack() as stack:
        crew = []
        for urls, threads in sites:
            ours, its = context.Pipe()
            process = context.Process(target=site, args=(urls, hints, threads, its))
            process.start()
            its.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            crew.append((process, ours))
        for _, way in crew:
            assert way.recv() == "ready"
        yield crew


def grants(case: str, apart: float, *, hints: bool, length: float) -> Grants:
    """Return when the lock was held in *length* [s]."""
    with ExitStack() as stack:
        nodes = stack.enter_context(servers(3))
        near = [stack.enter_context(proxied([node.port for node in nodes])) for _ in range(2)]
        for number, links in enumerate(near):
            for place, link in enumerate(links):
                link.delay(0.0 if (place == 2) == (number == 1) else apart / 2)
        ways = [[link.url for link in links] for links in near]
        bootstrap(ways[0], RulesOfSites(prefix=PREFIX))
        places = [(urls, THREADS) for urls in ways]
        if case == "ten more stand still":
            places.append((ways[0], 2 * THREADS))
        crew = stack.enter_context(people(places, hints=hints))
        if case in {"one down", "one restarted empty"}:
            nodes[1].kill()
        if case == "one restarted empty":
            nodes[1].start()
        locks = connected(ways[0], hints=hints)
        held = locks.acquire(NAME, wait=5.0)
        ends = time.time() + ALL_WAIT + length
        for _, way in crew:
            way.send(ends)
        time.sleep(ALL_WAIT)
        if case == "ten more stand still":
            os.kill(crew.pop()[0].pid, signal.SIGSTOP)
        locks.release(held)
        locks.close()
        found = [grant for _, way in crew for grant in way.recv()]
    return sorted(found)


def longest_pause(found: Grants) -> float | None:
    """Return for how long the lock was free, at most [s]; None of fewer than two grants."""
    pauses = (after[0] - before[1] for before, after in pairwise(found))
    return max((round(one, 3) for one in pauses), default=None)


def crowd(processes: int, threads: int, length: float) -> tuple[int, float]:
    """
    Return how many grants many who wait had, and how many requests each cost a node.

    Args:
        processes: How many there are.
        threads: That wait in each of them.
        length: For how long [s].
    """
    with servers(3) as nodes:
        urls = [node.url for node in nodes]
        bootstrap(urls, RulesOfSites(prefix=PREFIX))
        with people([(urls, threads)] * processes, hints=True) as crew:
            before = requests(nodes)
            ends = time.time() + length
            for _, way in crew:
                way.send(ends)
            found = [grant for _, way in crew for grant in way.recv()]
            return len(found), (requests(nodes) - before) / len(nodes) / max(1, len(found))


def requests(nodes: Sequence[Server]) -> int:
    """Return how many scripts the nodes have run."""
    total = 0
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            said: Any = client.info("commandstats")
        total += int(said.get("cmdstat_evalsha", {}).get("calls", 0))
    return total


def on_sites(length: float) -> Iterator[tuple[str, float, int, float | None, int, float | None]]:
    """Yield grants of each case, and the longest spell with a free lock: with hints, and none."""
    for apart in APART:
        for case in CASES:
            hints = grants(case, apart, hints=True, length=length)
            none = grants(case, apart, hints=False, length=length)
            with_hints, without = longest_pause(hints), longest_pause(none)
            yield case, apart * 1e3, len(hints), with_hints, len(none), without


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables; with ``--check`` return 1 if the target was missed."""
    chosen = measure.arguments(__doc__, arguments, rounds=1, cycles=30)
    length = PER_CYCLE * chosen.cycles
    record = Record("sites", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    columns = ("ten threads", "apart ms", "hints", "longest free s", "none", "longest free s")
    at_sites = tuple(on_sites(length))
    record.show(Table("Grants on two sites, with hints and without", columns, at_sites))
    processes = min(100, 4 * chosen.cycles)
    granted, asked = crowd(processes, 3, length)
    record.show(
        Table(
            f"{3 * processes} threads in {processes} processes wait for one lock",
            ("", "grants", "scripts on each node for a grant"),
            (("hints", granted, round(asked, 1)),),
        )
    )
    ratios = [none / max(1, hints) for _, _, hints, _, none, _ in at_sites]
    record.judge(Verdict("grants without hints / with hints, at most", round(max(ratios), 2), 1.0))
    return record.end(chosen)


if __name__ == "__main__":
    sys.exit(main())
