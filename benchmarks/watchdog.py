"""
What it costs to keep 1 to 10,000 leases alive in one process, on five nodes.

Each candidate is a process of its own, which takes its leases, waits until the first of them is due
for renewal, and then does nothing: all it spends from there on is the watchdog's. Its CPU time is
read at the ends of whole renewal periods and held against the time that passed. ``Spread`` leases
fall due one by one all over the period, as those of tasks that start at any time; those taken ``at
once`` fall due together. The costlier one is judged. An observer notes lag and margin of every
renewal.

What a lease takes in memory is what the process has grown by since before it took any, when all
have been renewed: the resident memory of the same processes, and what `tracemalloc` counts in
others whose time is not taken. The larger one is judged, against 1,000 bytes. A short run has
shorter leases, and fewer in proportion: as many renewals per second as a long one.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import redis

from benchmarks import measure
from benchmarks.lock_cycle import our_locks
from benchmarks.measure import progress
from benchmarks.record import Plot, Record, Series, Table, Verdict
from celery_redlock import HeldLock, Redlock
from celery_redlock.events import Event, LeaseLost, LockRenewed
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.reading.health import check
from celery_redlock.testing.servers import servers

SIZES = (1, 10, 100, 1_000, 10_000)
#: From how many leases on memory is told, and resident memory: that of fewer is lost among what
#: else comes and goes in a process.
SOME, MANY = 100, 1_000
TTL = 30.0
#: With so many cycles leases have their default length, with fewer a shorter one.
CYCLES = 150
#: Renewal periods that are measured.
PERIODS = 2
#: Leases that are taken, renewed and given back first, so that all is there that is made once.
WARM_UP, WARM_UP_TTL = 100, 0.5

#: Of the largest number of leases, spread or at once: share of a core, bytes per lease, share of
#: the TTL by which a renewal is late, and that is left then.
MOST_CPU = 0.10
MOST_BYTES = 1_000
LONGEST_LAG = 1 / 3
LEAST_MARGIN = 1 / 3

COLUMNS = (
    "leases",
    "CPU of a core",
    "lowest",
    "highest",
    "node's CPU",
    "renewals",
    "lost",
    "lag p50 [ms]",
    "p99 [ms]",
    "longest [ms]",
    "margin / TTL",
)


#: Number of leases, figure, and the spread around it.
Point = tuple[int, float, float, float]


@dataclass(frozen=True)
class Load:
    """
    What a process holds.

    Attributes:
        leases: How many [1, > 0].
        ttl: Of each [s].
        spread: Whether they are taken evenly over a renewal period, not as fast as can be.
        traced: Whether Python counts what it allocates, which takes time.
    """

    leases: int
    ttl: float
    spread: bool = True
    traced: bool = False

    @property
    def period(self) -> float:
        """Time from one renewal to the next [s]."""
        return self.ttl / 3.0

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.leases:,} {'spread' if self.spread else 'at once'}"


class Renewals:
    """
    Notes what becomes of renewals; an observer that takes no memory beyond what it has at first.

    Args:
        most: How many it can note.
    """

    def __init__(self, most: int) -> None:
        self._lags, self._margins = array("d", bytes(8 * most)), array("d", bytes(8 * most))
        self.count = self.lost = 0

    def __call__(self, event: Event) -> None:
        """Note *event* if it is of a renewal, or of a lease that was lost."""
        if isinstance(event, LockRenewed):
            self._lags[self.count], self._margins[self.count] = event.lag, event.margin
            self.count += 1
        elif isinstance(event, LeaseLost):
            self.lost += 1

    @property
    def lags(self) -> list[float]:
        """How late each began [s], in order of size."""
        return sorted(self._lags[: self.count])

    @property
    def least_margin(self) -> float:
        """The least that was left of a lease when it was renewed [s]."""
        return min(self._margins[: self.count])


@dataclass(frozen=True)
class Found:
    """
    What a process that held leases found.

    Attributes:
        cpu: Its CPU time per time that passed [1].
        servers: That of a node, the mean of all [1].
        renewals: How many there were meanwhile.
        lags: How late renewals were: median, 99th percentile, longest [s].
        margin: The least that was left of a lease when it was renewed [s].
        lost: Leases that were lost.
        resident: Bytes that the process has grown by, per lease.
        allocated: Bytes that Python has allocated more, per lease; 0 where nobody counted.
    """

    cpu: float
    servers: float
    renewals: int
    lags: tuple[float, float, float]
    margin: float
    lost: int
    resident: float
    allocated: float


def hold(urls: Sequence[str], load: Load) -> Found:
    """Hold leases for some renewal periods and return what that took; in a process of its own."""
    noted = Renewals(4 * PERIODS * (load.leases + WARM_UP))
    locks = Redlock.from_urls(urls, ttl=load.ttl, prefix="watchdog", observers=[noted])
    warm_up(urls, locks)
    leases: list[HeldLock] = [None] * load.leases  # type: ignore[list-item]
    if load.traced:
        tracemalloc.start()
    memory, counted = resident(), allocated()
    take_all(locks, load, leases)
    noted.count = 0
    busy, spent, began = cpu_of(urls), time.process_time(), time.perf_counter()
    time.sleep(PERIODS * load.period)  # all that this process spends is the watchdog's
    spent, took = time.process_time() - spent, time.perf_counter() - began
    busy = cpu_of(urls) - busy
    memory, counted = resident() - memory, allocated() - counted
    lags = noted.lags
    found = Found(
        cpu=spent / took,
        servers=busy / took / len(urls),
        renewals=noted.count,
        lags=(statistics.median(lags), lags[int(0.99 * len(lags))], lags[-1]),
        margin=noted.least_margin,
        lost=noted.lost + sum(held.is_lost for held in leases),
        resident=memory / load.leases,
        allocated=counted / load.leases,
    )
    for held in leases:
        locks.give_back(held)
    return found


def warm_up(urls: Sequence[str], locks: Redlock) -> None:
    """Do all once that is done later, and go through the life of some leases to their end."""
    cpu_of(urls)
    check(locks)
    some = [
        locks.take(LockRequest(f"{os.getpid()} warm-up {n}", WARM_UP_TTL, 1.0))
        for n in range(WARM_UP)
    ]
    time.sleep(WARM_UP_TTL / 2)  # past a third of the lease: each is renewed
    for held in some:
        locks.give_back(held)
    time.sleep(WARM_UP_TTL / 2)  # past the next renewal, for the watchdog to let go of them


def take_all(locks: Redlock, load: Load, leases: list[HeldLock]) -> None:
    """Fill *leases*, and return when the first of them is due for renewal."""
    began = time.perf_counter()
    for number in range(len(leases)):
        if load.spread:
            sleep_until(began + number * load.period / len(leases))
        leases[number] = locks.take(LockRequest(f"{os.getpid()} {number}", load.ttl, 1.0))
    sleep_until(began + load.period)


def sleep_until(moment: float) -> None:
    """Sleep until `time.perf_counter` is at *moment* [s], if it is not yet."""
    time.sleep(max(0.0, moment - time.perf_counter()))  # until it is due


def resident() -> int:
    """Return how much memory this process has now [bytes]; Linux tells."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def allocated() -> int:
    """Return what Python has allocated since it was told to count [bytes]."""
    return tracemalloc.get_traced_memory()[0]


def cpu_of(urls: Sequence[str]) -> float:
    """Return the CPU time that the servers at *urls* have taken, all together [s]."""
    told = 0.0
    for url in urls:
        with redis.Redis.from_url(url) as client:
            spent = client.info("cpu")
            told += spent["used_cpu_user"] + spent["used_cpu_sys"]
    return told


def found_by(urls: Sequence[str], loads: Sequence[Load]) -> list[Found]:
    """Return what a fresh process each finds with *loads*, all at the same time."""
    with ProcessPoolExecutor(len(loads), mp_context=get_context("spawn")) as processes:
        return list(processes.map(hold, [urls] * len(loads), loads))


def loads_of(cycles: int) -> list[Load]:
    """Return what is measured; with fewer cycles shorter leases, and fewer of them."""
    share = min(1.0, cycles / CYCLES)
    spread = [Load(max(1, round(size * share)), TTL * share) for size in SIZES]
    return [*spread, replace(spread[-1], spread=False)]


def figures(found: dict[Load, list[Found]]) -> Table:
    """Return what the leases cost in time, and how well they were kept."""
    rows = []
    for load, each in found.items():
        cpu = sorted(one.cpu for one in each)
        rows.append(
            (
                load.name,
                round(statistics.median(cpu), 4),
                round(cpu[0], 4),
                round(cpu[-1], 4),
                round(statistics.median(one.servers for one in each), 4),
                sum(one.renewals for one in each),
                sum(one.lost for one in each),
                *(round(1e3 * lag, 3) for lag in lags_of(each)),
                round(min(one.margin for one in each) / load.ttl, 3),
            )
        )
    ttl = next(iter(found)).ttl
    return Table(f"Leases of {ttl:g} s in one process, five nodes", COLUMNS, tuple(rows))


def lags_of(each: Sequence[Found]) -> tuple[float, float, float]:
    """Return median, 99th percentile and longest lag of some runs [s]."""
    p50, p99, longest = zip(*(one.lags for one in each), strict=True)
    return statistics.median(p50), statistics.median(p99), max(longest)


def memory(found: dict[Load, list[Found]], traced: dict[Load, Found]) -> Table:
    """Return what a lease takes in memory."""
    rows = tuple(
        (
            load.name,
            round(statistics.median(one.resident for one in each)) if load.leases >= MANY else None,
            round(traced[load].allocated) if load in traced else None,
        )
        for load, each in found.items()
        if load.leases >= SOME
    )
    return Table("Memory per lease [bytes]", ("leases", "resident", "allocated"), rows)


def judged(found: dict[Load, list[Found]], traced: dict[Load, Found]) -> list[Verdict]:
    """Return whether the largest number of leases was kept in time, and at what cost."""
    most = max(load.leases for load in found)
    largest = {load: each for load, each in found.items() if load.leases == most}
    every = [one for each in largest.values() for one in each]
    ttl = next(iter(largest)).ttl
    cpu = max(statistics.median(one.cpu for one in each) for each in largest.values())
    grown = [statistics.median(one.resident for one in each) for each in largest.values()]
    size = max(*grown, *(traced[load].allocated for load in largest if load in traced))
    lag = max(one.lags[2] for one in every) / ttl
    margin = min(one.margin for one in every) / ttl
    lost = sum(one.lost for each in found.values() for one in each)
    return [
        Verdict("leases lost, all sizes", lost, 0),
        Verdict(f"longest lag of a renewal / TTL, {most:,} leases", round(lag, 5), LONGEST_LAG),
        Verdict(
            f"least margin at a renewal / TTL, {most:,} leases",
            round(margin, 4),
            LEAST_MARGIN,
            at_least=True,
        ),
        Verdict(f"CPU time / time, {most:,} leases", round(cpu, 4), MOST_CPU),
        Verdict(f"bytes per lease, {most:,} leases", round(size, 1), MOST_BYTES),
    ]


def pictures(found: dict[Load, list[Found]], traced: dict[Load, Found]) -> list[Plot]:
    """Return CPU, lag and memory over the number of leases."""
    spread = {load: each for load, each in found.items() if load.spread}

    def cpu(load: Load) -> Point:
        shares = sorted(100 * one.cpu for one in spread[load])
        return load.leases, statistics.median(shares), shares[0], shares[-1]

    def node(load: Load) -> Point:
        shares = sorted(100 * one.servers for one in spread[load])
        return load.leases, statistics.median(shares), shares[0], shares[-1]

    def lag(load: Load) -> Point:
        p50, p99, longest = (1e3 * seconds for seconds in lags_of(spread[load]))
        return load.leases, p99, p50, longest

    def grown(load: Load) -> Point:
        sizes = sorted(one.resident for one in spread[load])
        return load.leases, statistics.median(sizes), sizes[0], sizes[-1]

    def counted(load: Load) -> Point:
        size = traced[load].allocated
        return load.leases, size, size, size

    def series(label: str, point: Callable[[Load], Point], loads: Iterable[Load]) -> Series:
        return Series(label, tuple(point(load) for load in loads))

    many = [load for load in spread if load.leases >= MANY]
    leases = "Leases held by one process"
    return [
        Plot(
            "watchdog_cpu",
            "CPU time of renewing leases of 30 s",
            leases,
            "Share of one core [%]",
            (series("process", cpu, spread), series("each node", node, spread)),
            log="xy",
        ),
        Plot(
            "watchdog_lag",
            "How late renewals begin (p99; p50 to longest)",
            leases,
            "Lag [ms]",
            (series("renewals", lag, spread),),
            log="x",
        ),
        Plot(
            "watchdog_memory",
            "Memory per lease",
            leases,
            "Memory [bytes]",
            (
                series("allocated by Python", counted, traced),
                series("resident memory", grown, many),
            ),
            log="x",
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables; with ``--check`` return 1 if a target was missed."""
    chosen = measure.arguments(__doc__, arguments, rounds=1, cycles=CYCLES)
    record = Record("watchdog", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    loads = loads_of(chosen.cycles)
    found: dict[Load, list[Found]] = {load: [] for load in loads}
    with servers(5) as nodes:
        urls = [node.url for node in nodes]
        our_locks(urls, "watchdog").close()
        for number in range(chosen.rounds):
            for load in found:
                found[load] += found_by(urls, [load])
            progress(number + 1, chosen.rounds)
        some = [load for load in loads if load.spread and load.leases >= SOME]
        counting = found_by(urls, [replace(load, traced=True) for load in some])
    traced = dict(zip(some, counting, strict=True))
    record.show(figures(found))
    record.show(memory(found, traced))
    for plot in pictures(found, traced):
        record.draw(plot)
    record.judge(*judged(found, traced))
    return record.end(chosen)


if __name__ == "__main__":
    sys.exit(main())
