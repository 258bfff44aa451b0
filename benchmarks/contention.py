"""
Many clients that want one lock: how much they get done, how soon the next has it, how fair it is.

Each client is a process of its own with its own connections. All begin at once; each acquires with
all the patience there is, sleeps for 1 ms while it holds the lock, gives it back, and asks again.
At once: then whoever gives back is nearly always the first to ask, as no message can be as fast.
Or 10 ms later: then the lock goes to one who waits. All times are of the machine's one monotonic
clock. A grant counts from when the client knows of it until just before it gives the lock back, so
two that overlap were held by two at once: with ours that fails the run; of others it is told.

- *hand-over*: from just before one gives back to the next grant, whoever gets it;
- *again*: share of grants that went to the one that had just given back;
- *Jain*: Jain's fairness index of the clients' grants, 1 if all got the same, 1/n if one got all;
- *by lot*: what that index would be if every grant had been drawn by lot;
- *longest wait*: for one grant, of any client; one that got none has waited all the time.

Ours is on five nodes, and on one as others are; redis-py's and python-redis-lock's are on one.
Libraries on five nodes whose clients wait by looking 5 to 10 times a second are measured with few
clients. The libraries take turns, in another order in every round. Nothing is pinned: clients and
servers share what cores there are. There are no targets.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection

from benchmarks import measure
from benchmarks.lock_cycle import our_locks, size_of
from benchmarks.lock_peers import PEERS, TTL, Release, Take
from benchmarks.measure import progress
from benchmarks.record import Plot, Record, Series, Table
from celery_redlock import LockNotAcquired, Redlock
from celery_redlock.reading.health import check
from celery_redlock.testing.servers import servers

CLIENTS = (1, 2, 4, 8, 16, 32, 64)
#: Pause between a release and the same client's next acquire [s] -> with how many clients.
LOADS = {0.0: CLIENTS, 0.01: (2, 8, 32)}
#: With how many clients libraries are measured whose clients get little done.
FEW = (1, 2, 4, 8)
SLOW = ("pottery Redlock", "redlock-py")
#: How long the lock is held [s].
HOLD = 0.001
#: How long one turn takes for each cycle asked for [s].
PER_CYCLE = 0.0125
PREFIX = "contention"

#: From when to when a client held the lock, and since when it had waited [s].
Grant = tuple[float, float, float]


def ours(urls: Sequence[str]) -> Take:
    """Return ours, on all of *urls*."""
    locks = Redlock.from_urls(list(urls), ttl=TTL, prefix=f"{PREFIX}-{len(urls)}")
    check(locks)

    def take(name: str, wait: float) -> Release | None:
        try:
            lease = locks.acquire(name, wait=wait)
        except LockNotAcquired:
            return None
        return lambda: locks.release(lease, wait=False)

    return take


#: Name -> how to connect, and on how many nodes it is.
LIBRARIES: dict[str, tuple[Callable[[Sequence[str]], Take], int]] = {
    "celery-redlock": (ours, 5),
    "celery-redlock on one": (ours, 1),
    **PEERS,
}


def labelled(library: str) -> str:
    """Return how the tables call *library*."""
    return f"{library.removesuffix(' on one')}, {size_of(LIBRARIES[library][1])}"


def client(library: str, urls: Sequence[str], pause: float, parent: Connection) -> None:
    """Take part, in a process of its own, and tell *parent* of every grant."""
    connect, nodes = LIBRARIES[library]
    take = connect(urls[:nodes])
    warm_up = take(f"of {os.getpid()}", 0.0)
    assert warm_up is not None
    warm_up()
    parent.send("ready")
    begin, end = parent.recv()
    time.sleep(max(0.0, begin - time.monotonic()))  # all begin at one moment
    parent.send(grants_until(end, take, library, pause))


def grants_until(end: float, take: Take, name: str, pause: float) -> list[Grant]:
    """Acquire, hold and release over and over; return when the lock was held."""
    grants = []
    while (asked := time.monotonic()) < end:
        release = take(name, end - asked)
        granted = time.monotonic()
        if release is None:
            break
        time.sleep(HOLD)  # stands for what the lock is held for
        grants.append((granted, time.monotonic(), asked))
        release()
        time.sleep(pause)  # and for what is done without it
    return grants


@dataclass
class Outcome:
    """
    What came of one library with one number of clients, in all rounds.

    Attributes:
        library: Which.
        clients: How many.
        pause: After which each asks again [s].
        took: How long the turns were, together [s].
        grants: How many there were.
        overlaps: How many of them began while another still held.
        again: How many of them went to the one that had just given back.
        hand_overs: Each of them [s].
        fairness: Jain's index of each turn.
        by_lot: What it would be by chance, for each turn.
        longest_wait: For one grant [s].
    """

    library: str
    clients: int
    pause: float
    took: float = 0.0
    grants: int = 0
    overlaps: int = 0
    again: int = 0
    hand_overs: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    fairness: list[float] = field(default_factory=list)
    by_lot: list[float] = field(default_factory=list)
    longest_wait: float = 0.0

    def add(self, told: Sequence[Sequence[Grant]], begin: float, end: float) -> None:
        """Take in what the clients of one turn told."""
        inside = sorted(
            (granted, until, asked, who)
            for who, grants in enumerate(told)
            for granted, until, asked in grants
            if granted < end
        )
        counts = [sum(1 for grant in grants if grant[0] < end) for grants in told]
        for before, after in pairwise(inside):
            gap = after[0] - before[1]
            self.overlaps += gap < 0
            self.again += after[3] == before[3]
            self.hand_overs.append(gap)
        self.grants += len(inside)
        self.took += end - begin
        self.rates.append(len(inside) / (end - begin))
        self.fairness.append(jain(counts))
        self.by_lot.append(1 / (1 + (self.clients - 1) / max(1, len(inside))))
        waits = [granted - asked for granted, _, asked, _ in inside]
        left_out = [end - begin] if 0 in counts else []
        self.longest_wait = max([self.longest_wait, *waits, *left_out])

    def hand_over(self, share: float) -> float:
        """Return a quantile of the hand-overs [s]; of none at all, how long the turns took."""
        ordered = sorted(self.hand_overs) or [self.took]
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def row(self) -> tuple[object, ...]:
        """Return what the table says of it."""
        return (
            f"{labelled(self.library)}, {self.clients} client{'s' * (self.clients > 1)}",
            self.overlaps,
            100 * self.again / max(1, len(self.hand_overs)),
            statistics.median(self.rates),
            self.longest_wait * 1e3,
            self.hand_over(0.5) * 1e3,
            self.hand_over(0.99) * 1e3,
            statistics.median(self.fairness),
            statistics.median(self.by_lot),
        )


COLUMNS = (
    "",
    "overlaps",
    "again %",
    "grants/s",
    "longest wait ms",
    "hand-over p50 ms",
    "p99 ms",
    "Jain",
    "by lot",
)


def jain(counts: Sequence[int]) -> float:
    """
    Return Jain's fairness index of *counts*: between 1/n and 1; 1/n also if all are 0.

    Source:
        R. Jain, D. Chiu, W. Hawe: A quantitative measure of fairness, DEC-TR-301, 1984.
    """
    squares = sum(count * count for count in counts)
    return sum(counts) ** 2 / (len(counts) * squares) if squares else 1 / len(counts)


def turn(outcome: Outcome, urls: Sequence[str], length: float) -> None:
    """Have the clients of one library contend for *length* [s]."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.lock_cycle"])  # or each would import all by itself
    with ExitStack() as stack:
        channels = []
        for _ in range(outcome.clients):
            ours_end, its_end = context.Pipe()
            process = context.Process(
                target=client, args=(outcome.library, urls, outcome.pause, its_end)
            )
            process.start()
            its_end.close()
            stack.callback(process.join)
            stack.callback(process.terminate)
            channels.append(ours_end)
        for one in channels:
            assert one.recv() == "ready"
        begin = time.monotonic() + 0.1
        end = begin + length
        for one in channels:
            one.send((begin, end))
        outcome.add([one.recv() for one in channels], begin, end)


def contend(rounds: int, length: float) -> list[Outcome]:
    """Return what came of every library with every number of clients, smallest number first."""
    outcomes = [
        Outcome(library, clients, pause)
        for pause, sizes in LOADS.items()
        for clients in sizes
        for library in LIBRARIES
        if library not in SLOW or (clients in FEW and not pause)
    ]
    with servers(5) as nodes:
        urls = [node.url for node in nodes]
        for size in {nodes for connect, nodes in LIBRARIES.values() if connect is ours}:
            our_locks(urls[:size], f"{PREFIX}-{size}").close()
        for number in range(rounds):
            for one in random.sample(outcomes, len(outcomes)):
                turn(one, urls, length)
            progress(number + 1, rounds)
    return outcomes


def middle(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, least and most."""
    return (round(statistics.median(values), 4), round(min(values), 4), round(max(values), 4))


#: End of a plot's name -> its title, its axis, its figures, and which axes are logarithmic.
PLOTS: dict[str, tuple[str, str, Callable[[Outcome], tuple[float, float, float]], str]] = {
    "rate": (
        f"Grants of one lock that is held for {HOLD * 1e3:g} ms",
        "grants per second: median, least, most",
        lambda one: middle(one.rates),
        "xy",
    ),
    "hand_over": (
        "From one client's release to the next grant",
        "hand-over [s]: median, p10 to p99",
        lambda one: (one.hand_over(0.5), one.hand_over(0.1), one.hand_over(0.99)),
        "xy",
    ),
    "fairness": (
        "Jain's fairness index of the clients' grants",
        "1 if all got the same: median, least, most",
        lambda one: middle(one.fairness),
        "x",
    ),
}


def plots(outcomes: Sequence[Outcome]) -> Iterator[Plot]:
    """Yield the pictures of each load."""
    for pause in LOADS:
        suffix = "_after_a_pause" if pause else ""
        for name, (title, y, figures, log) in PLOTS.items():
            lines = tuple(
                Series(labelled(library), points)
                for library in LIBRARIES
                if (
                    points := tuple(
                        (one.clients, *figures(one))
                        for one in outcomes
                        if one.library == library and one.pause == pause
                    )
                )
            )
            whole = f"{title}; {how_soon(pause)}"
            yield Plot(f"contention_{name}{suffix}", whole, "clients", y, lines, log=log)


def how_soon(pause: float) -> str:
    """Return when a client asks again, in words."""
    return f"asked for again after {pause * 1e3:g} ms" if pause else "asked for again at once"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables; fail if two ever held our lock at once."""
    chosen = measure.arguments(__doc__, arguments, rounds=2, cycles=160)
    length = PER_CYCLE * chosen.cycles
    record = Record("contention", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    outcomes = contend(chosen.rounds, length)
    for pause in LOADS:
        rows = tuple(one.row() for one in outcomes if one.pause == pause)
        held = f"held for {HOLD * 1e3:g} ms, {how_soon(pause)}"
        record.show(
            Table(f"One lock, {held}; {length:g} s per turn on this machine", COLUMNS, rows)
        )
    for plot in plots(outcomes):
        record.draw(plot)
    for one in outcomes:
        assert LIBRARIES[one.library][0] is not ours or not one.overlaps, f"two held it: {one}"
    return record.end(chosen)


if __name__ == "__main__":
    sys.exit(main())
