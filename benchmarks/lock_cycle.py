"""
What one acquire and release costs, beside what other libraries ask for it.

Every candidate takes its turn in every round of one run, so that a machine that slows down slows
all of them; what counts is the ratio of the medians. Ours is released with ``wait=False``, as
after a task; the others wait for their answers, having no other way. Measured are

- on loopback: all libraries, and ours on 1, 3, 5 and 7 nodes;
- on loopback with 1 or 2 of 5 nodes stopped (SIGSTOP), or refused (the process has ended), beside
  the same with all five up; each on servers of its own, so that what one has lived through does
  not follow another. What fails does so anew for every turn, after which two cycles are not
  counted; what the first of them costs has a table of its own;
- behind round trips of 0, 1, 5 and 20 ms, all by way of the same proxy.

Where the platform can pin, the client has one core and all servers (and the proxy) another, since
nodes are other machines. Left to the scheduler, a client and its one server may share a core or
not, and so may the client and any of five: the ratio then has several modes between one set of
processes and the next. That is shown, too, and judged beside pottery alone, both ways: its threads,
one per node, get in each other's way where they have more than one core, as they have wherever it
is used. Everything on loopback is repeated with fresh servers and connections, and medians are
over all repeats.

Run it with ``make bench``, or ``make bench ARGS="--rounds 50 --check"`` to have the targets
checked.
"""

from __future__ import annotations

import itertools
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import redis

from benchmarks import measure
from benchmarks.lock_peers import PEERS, TTL, cycle_of
from benchmarks.measure import Candidate, Target, alternate, nothing, table, verdicts
from benchmarks.record import Plot, Record, Series, Table, Verdict
from celery_redlock import Lease, Redlock
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.scripts.requests import acquire_request, release_request
from celery_redlock.reading.health import check, probe
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.ports import HOST
from celery_redlock.testing.servers import Server, servers
from support.proxy import Link, proxied

ROUND_TRIP = 0.005
ROUND_TRIPS = (0.0, 0.001, ROUND_TRIP, 0.02)
SIZES = (1, 3, 5, 7)
#: How often all is built anew on loopback; less if there are fewer rounds.
REPEATS = 4
#: After which nodes that were started again are given up [s].
LONGEST_RECOVERY = 10.0

CORES: set[int] = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
CAN_PIN = len(CORES) > 1
OF_CLIENT, OF_SERVERS = ({min(CORES)}, {max(CORES)}) if CAN_PIN else (CORES, CORES)
WHERE = "client and servers pinned to a core each" if CAN_PIN else "not pinned"

THEIRS, OURS = "redis-py Lock, 1 node", "celery-redlock, 5 nodes"
POTTERY = "pottery Redlock, 5 nodes"
FREE = ", not pinned"
FAULTS = ("1 stopped", "2 stopped", "1 refused", "2 refused")
HEALTHY = "celery-redlock, all 5 up"
ALONE, RELEASE = "celery-redlock, acquire alone", "celery-redlock, release alone"
TRIP = "PING, 1 node"


def away(name: str, round_trip: float = ROUND_TRIP) -> str:
    """Return how *name* is called behind *round_trip* [s]."""
    return f"{name}, {round_trip * 1e3:g} ms away"


def failing(fault: str) -> str:
    """Return how ours is called where some nodes fail."""
    return f"celery-redlock, {fault} of 5"


NEAR_TARGETS = (Target(OURS, (THEIRS,), 1.8),)
FAULT_TARGETS = tuple(
    Target(failing(fault), (HEALTHY,), limit, share)
    for fault in ("2 stopped", "2 refused")
    for share, limit in ((0.5, 1.1), (0.99, 2.0))
)
FAR_TARGETS = (
    Target(away(OURS), (away(THEIRS),), 0.6),
    Target(away(ALONE), (away(TRIP),), 1.1),
    Target(away(RELEASE), (away(TRIP),), 0.1),
)
#: How often ours fits into pottery's, at least [1].
POTTERY_LIMIT = 12.0


@contextmanager
def on(cores: set[int]) -> Iterator[None]:
    """Run the body, and what is started in it, on *cores*, where the platform can do so."""
    if not CAN_PIN:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def move(cores: set[int]) -> Callable[[], object]:
    """Return what takes this thread to *cores*, where the platform can do so."""
    return (lambda: os.sched_setaffinity(0, cores)) if CAN_PIN else nothing


def our_locks(urls: Sequence[str], prefix: str) -> Redlock:
    """
    Return locks on connected nodes, in a key space of their own.

    A round that the machine was too busy for is tried again, which counts, and ends no run.
    """
    locks = Redlock.from_urls(list(urls), ttl=TTL, wait=1.0, prefix=prefix)
    bootstrap(urls, locks.rules)
    check(locks)
    return locks


def our_cycle(locks: Redlock) -> Callable[[], object]:
    """Return one acquire and release that waits for the grant and for nothing else."""
    return lambda: locks.release(locks.acquire("ours"), wait=False)


def size_of(nodes: int) -> str:
    """Return how many *nodes*, in words."""
    return f"{nodes} node{'s' if nodes > 1 else ''}"


def peers(urls: Sequence[str]) -> list[Candidate]:
    """Return the other libraries, each on as many of *urls* as it needs."""
    return [
        Candidate(f"{name}, {size_of(nodes)}", cycle_of(connect(urls[:nodes]), name))
        for name, (connect, nodes) in PEERS.items()
    ]


def started(stack: ExitStack, count: int, cores: set[int]) -> list[Server]:
    """Return servers on *cores* that end with *stack*."""
    with on(cores):
        return stack.enter_context(servers(count))


# -- on loopback -----------------------------------------------------------------------


def on_loopback(stack: ExitStack) -> list[Candidate]:
    """Return what is compared where a round trip costs next to nothing."""
    urls = [node.url for node in started(stack, max(SIZES), OF_SERVERS)]
    locks = {size: our_locks(urls[:size], f"of-{size}") for size in SIZES}
    for one in locks.values():
        stack.callback(one.close)
    ours = [Candidate(f"celery-redlock, {size_of(n)}", our_cycle(locks[n])) for n in SIZES]
    return [*peers(urls), *ours, floor(locks[5]), *left_to_the_scheduler(stack)]


def left_to_the_scheduler(stack: ExitStack) -> list[Candidate]:
    """Return those that are judged, with nothing pinned."""
    urls = [node.url for node in started(stack, 5, CORES)]
    with on(CORES):
        locks = our_locks(urls, "free")
        others = [one for one in peers(urls) if one.name in (THEIRS, POTTERY)]
    stack.callback(locks.close)
    there, back = move(CORES), move(OF_CLIENT)
    return [
        replace(one, name=one.name + FREE, before=there, after=back)
        for one in (*others, Candidate(OURS, our_cycle(locks)))
    ]


# -- nodes that fail -------------------------------------------------------------------


class Farm:
    """Five servers and locks on them; the first few can fail and come back."""

    def __init__(self, stack: ExitStack) -> None:
        self.nodes = started(stack, 5, OF_SERVERS)
        self.urls = [node.url for node in self.nodes]
        self.locks = our_locks(self.urls, "faults")
        self.cycle = our_cycle(self.locks)
        stack.callback(self.locks.close)

    def fail(self, fault: str) -> None:
        """Have nodes stop or refuse connections, as one of `FAULTS` says."""
        number, what = fault.split()
        for node in self.nodes[: int(number)]:
            if what == "stopped":
                node.pause()
            else:
                node.kill()
                assert is_refused(node.port)

    def recover(self, fault: str) -> None:
        """Undo `fail`; return when all five vote."""
        number, what = fault.split()
        for node in self.nodes[: int(number)]:
            if what == "stopped":
                node.resume()
            else:
                with on(OF_SERVERS):
                    node.restart()
        if what == "refused":  # or they would be quarantined for a minute, having lost their memory
            bootstrap(self.urls, self.locks.rules)
        deadline = time.monotonic() + LONGEST_RECOVERY
        while any(node.state != "up" for node in probe(self.locks)):
            assert time.monotonic() < deadline, f"not all are up: {probe(self.locks)}"
            time.sleep(0.005)  # the nodes share the machine: they need it more than we do

    def candidate(self, fault: str) -> Candidate:
        """Return our cycle where *fault* happens anew for every turn."""
        return Candidate(
            failing(fault),
            self.cycle,
            before=lambda: self.fail(fault),
            after=lambda: self.recover(fault),
        )


def is_refused(port: int) -> bool:
    """Return whether nobody listens on *port*."""
    try:
        socket.create_connection((HOST, port), timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    return False


def with_faults(stack: ExitStack) -> list[Candidate]:
    """Return ours with all nodes up, and with some that fail."""
    return [
        Candidate(HEALTHY, Farm(stack).cycle),
        *(Farm(stack).candidate(fault) for fault in FAULTS),
    ]


def first_cycles(farm: Farm, count: int) -> list[Candidate]:
    """Return what the first cycle after a fault takes, and the one after it, *count* times."""
    found = []
    for fault in FAULTS:
        first, second = (
            Candidate(f"celery-redlock, {fault}: {which} cycle", farm.cycle)
            for which in ("first", "second")
        )
        for _ in range(count):
            farm.cycle()
            farm.fail(fault)
            for one in (first, second):
                before = time.perf_counter()
                one.cycle()
                one.times.append(time.perf_counter() - before)
            farm.recover(fault)
        found += [first, second]
    return found


# -- behind a network ------------------------------------------------------------------


def behind_a_network(links: Sequence[Link], round_trip: float) -> list[Candidate]:
    """Return what is compared behind *round_trip* [s]."""
    urls = [link.url for link in links]
    locks = our_locks(urls, f"far-{round_trip:g}")
    leases: list[Lease] = []

    def quiet() -> None:
        time.sleep(1.5 * round_trip)  # so that no late reply of this one is read in the next

    def release(lease: Lease) -> None:
        locks.release(lease, wait=False)
        quiet()

    def acquire(_: object = None) -> None:
        quiet()
        leases.append(locks.acquire("released"))
        quiet()

    return [
        *peers(urls),
        Candidate(OURS, our_cycle(locks)),
        Candidate(ALONE, lambda: locks.acquire("alone"), undo=release),
        Candidate(
            RELEASE,
            lambda: locks.release(leases.pop(), wait=False),
            before=acquire,
            undo=acquire,
            after=lambda: release(leases.pop()),
        ),
        Candidate(TRIP, redis.Redis.from_url(urls[0]).ping),
        quorum_of_pings(links),
        floor(locks),
    ]


def floor(locks: Redlock) -> Candidate:
    """
    Return the least that a cycle can cost here: the bytes of ours, packed before, by bare sockets.

    That is the round trip and the servers' time, without tokens, deadlines, errors and threads.
    """
    for _ in range(100):
        if not (silent := check(locks)):  # which waits for each, so a few times are enough
            break
    else:
        msg = f"not connected: {silent}"
        raise RuntimeError(msg)
    lease, nodes = locks.acquire("floor"), locks.fanout.nodes
    acquire = Round(acquire_request(locks.rules, lease, None), len(nodes), None).packed
    release = Round(release_request(locks.rules, lease.name, lease.token), len(nodes), None).packed
    asked = [(socket.create_connection(n.sock.getpeername()), acquire + n._boot) for n in nodes]  # noqa: SLF001
    selector, answers = selectors.DefaultSelector(), dict.fromkeys((one for one, _ in asked), 0)
    for one in answers:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as redis-py does
        selector.register(one, selectors.EVENT_READ)
    granted = itertools.count(1, 2)  # the answers of a node by then: one to each request before

    def cycle() -> None:
        enough = next(granted)
        for one, data in asked:
            one.send(data)
        while sum(count >= enough for count in answers.values()) <= len(asked) // 2:
            for key, _ in selector.select():
                answers[key.fileobj] += key.fileobj.recv(4096).count(b"*")  # type: ignore[index,union-attr]
        for one in answers:
            one.send(release)

    return Candidate(f"the floor: the same bytes by bare sockets, {len(nodes)} nodes", cycle)


def quorum_of_pings(links: Sequence[Link]) -> Candidate:
    """Return the least that a round can cost on these nodes: PING to all, answers of a majority."""
    sockets = [socket.create_connection((HOST, link.port)) for link in links]
    selector = selectors.DefaultSelector()
    for one in sockets:
        selector.register(one, selectors.EVENT_READ)

    def answers() -> int:
        return sum(key.fileobj.recv(64).count(b"PONG") for key, _ in selector.select())  # type: ignore[union-attr]

    def ask() -> int:
        for one in sockets:
            one.send(b"PING\r\n")
        found = 0
        while found <= len(sockets) // 2:
            found += answers()
        return found

    def rest(found: int) -> None:
        while found < len(sockets):
            found += answers()

    return Candidate(f"PING, {len(sockets)} nodes, {len(sockets) // 2 + 1} answers", ask, undo=rest)


# -- the run ---------------------------------------------------------------------------


def repeated(
    build: Callable[[ExitStack], list[Candidate]], rounds: int, cycles: int
) -> list[list[Candidate]]:
    """Measure what *build* returns, with everything built anew for each repeat."""
    repeats = min(REPEATS, rounds)
    found = []
    for _ in range(repeats):
        with ExitStack() as stack:
            found.append(build(stack))
            alternate(found[-1], rounds // repeats, cycles)
    return found


def gathered(repeats: Iterable[Sequence[Candidate]]) -> list[Candidate]:
    """Return candidates with the times of all repeats."""
    return [
        replace(same[0], times=[t for one in same for t in one.times])
        for same in zip(*repeats, strict=True)
    ]


def ratios(repeats: Sequence[Sequence[Candidate]]) -> Table:
    """Return, for each repeat, what ours costs beside redis-py's: whether it has several modes."""
    rows = []
    for number, candidates in enumerate(repeats):
        p50 = {one.name: one.p50 * 1e6 for one in candidates}
        both = [(p50[THEIRS + end], p50[OURS + end]) for end in ("", FREE)]
        figures = [one for theirs, ours in both for one in (theirs, ours, ours / theirs)]
        rows.append((f"repeat {number + 1}", *(round(one, 3) for one in figures)))
    title = f"Medians of each repeat: redis-py, ours, ratio ({WHERE}), and the same not pinned [us]"
    columns = ("", "redis-py", "ours", "ratio", "redis-py", "ours", "ratio")
    return Table(title, columns, tuple(rows))


def far(chosen_rounds: int, cycles: int) -> dict[float, list[Candidate]]:
    """Return what was measured behind each round trip [s]."""
    found = {}
    with ExitStack() as whole:
        ports = [node.port for node in started(whole, 5, OF_SERVERS)]
        for round_trip in ROUND_TRIPS:
            with ExitStack() as stack:
                with on(OF_SERVERS):
                    links = stack.enter_context(proxied(ports, delay=round_trip / 2))
                candidates = behind_a_network(links, round_trip)
                alternate(candidates, chosen_rounds, max(3, cycles // 16))
            found[round_trip] = [replace(c, name=away(c.name, round_trip)) for c in candidates]
    return found


def at_least(name: str, against: str, limit: float, candidates: Sequence[Candidate]) -> Verdict:
    """Return whether *name* takes *limit* times what *against* takes, or more."""
    p50 = {one.name: one.p50 for one in candidates}
    found = round(p50[name] / p50[against], 4)
    return Verdict(f"{name} / {against}", found, limit, at_least=True)


def added_by_release(candidates: Sequence[Candidate]) -> Verdict:
    """Return by how many round trips a cycle is longer than its acquire."""
    p50 = {one.name: one.p50 for one in candidates}
    added = (p50[away(OURS)] - p50[away(ALONE)]) / p50[away(TRIP)]
    text = f"({away(OURS)} - {away(ALONE)}) / {away(TRIP)}"
    return Verdict(text, round(added, 4), 0.1)


def point(x: float | str, one: Candidate, unit: float) -> tuple[float | str, float, float, float]:
    """Return median, p10 and p90 of a candidate, in *unit* [s]."""
    return (x, *(round(one.quantile(share) / unit, 4) for share in (0.5, 0.1, 0.9)))  # type: ignore[return-value]


def plots(
    near: Sequence[Candidate],
    faults: Sequence[Candidate],
    beyond: dict[float, list[Candidate]],
) -> list[Plot]:
    """Return the pictures."""
    named = {one.name: one for one in near}
    libraries = [
        *(f"{name}, {size_of(nodes)}" for name, (_, nodes) in PEERS.items()),
        OURS,
    ]
    sizes = Series(
        "celery-redlock",
        tuple(point(n, named[f"celery-redlock, {size_of(n)}"], 1e-6) for n in SIZES),
    )
    lines = tuple(
        Series(
            name,
            tuple(
                point(trip * 1e3, {one.name: one for one in candidates}[away(name, trip)], 1e-3)
                for trip, candidates in beyond.items()
            ),
        )
        for name in libraries
    )
    cycle = "one cycle: median, p10 to p90"
    failed = tuple(point(one.name.removeprefix("celery-redlock, "), one, 1e-6) for one in faults)
    return [
        Plot(
            "lock_cycle_libraries",
            f"Acquire and release on loopback, {WHERE}",
            "",
            f"{cycle} [us]",
            tuple(Series(name, (point("", named[name], 1e-6),)) for name in libraries),
            bars=True,
            log="y",
        ),
        Plot(
            "lock_cycle_round_trips",
            "Acquire and release behind a network",
            "round trip to each node [ms]",
            f"{cycle} [ms]",
            lines,
            log="y",
        ),
        Plot(
            "lock_cycle_faults",
            f"Acquire and release on five nodes of which some fail, {WHERE}",
            "",
            f"{cycle} [us]",
            (Series("celery-redlock", failed),),
            bars=True,
        ),
        Plot(
            "lock_cycle_nodes",
            f"Acquire and release on loopback by the number of nodes, {WHERE}",
            "nodes",
            f"{cycle} [us]",
            (sizes, Series("redis-py Lock", (point(1, named[THEIRS], 1e-6),))),
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables; with ``--check`` return 1 if a target was missed."""
    chosen = measure.arguments(__doc__, arguments, rounds=20, cycles=150)
    rounds, cycles = chosen.rounds, chosen.cycles
    record = Record("lock_cycle", {"rounds": rounds, "cycles": cycles, "pinned": CAN_PIN})
    with on(OF_CLIENT):
        repeats = repeated(on_loopback, rounds, cycles)
        near = gathered(repeats)
        record.show(table(f"On loopback: {WHERE}", near))
        record.show(ratios(repeats))
        faults = gathered(repeated(with_faults, rounds, cycles))
        record.show(table(f"On loopback, five nodes of which some fail: {WHERE}", faults))
        with ExitStack() as stack:
            firsts = first_cycles(Farm(stack), rounds)
        record.show(table("The first two cycles after nodes fail", firsts))
        beyond = far(rounds, cycles)
        for round_trip, candidates in beyond.items():
            title = f"Behind a round trip of {round_trip * 1e3:g} ms, by way of a proxy"
            record.show(table(title, candidates))
    for plot in plots(near, faults, beyond):
        record.draw(plot)
    on_this = [
        *verdicts(near, NEAR_TARGETS),
        at_least(POTTERY, OURS, POTTERY_LIMIT, near),
        *verdicts(faults, FAULT_TARGETS),
    ]
    record.judge(
        at_least(POTTERY + FREE, OURS + FREE, POTTERY_LIMIT, near),
        *(replace(one, text=f"{one.text}; {WHERE}") for one in on_this),
        *verdicts(beyond[ROUND_TRIP], FAR_TARGETS),
        added_by_release(beyond[ROUND_TRIP]),
    )
    return record.end(chosen)


if __name__ == "__main__":
    sys.exit(main())
