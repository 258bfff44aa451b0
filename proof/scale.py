"""
A thousand workers, a million lock names, ten thousand locks a second: what nodes have to do then.

    PYTHONPATH=tests python -m proof.scale
    PYTHONPATH=tests python -m proof.scale --record

Simulated are the real client code, three zones, and nodes that are queues (`simulation.scale`);
what a command costs a node is measured in the same run (`proof.scale_costs`). With ``--record``
what was found is kept in ``proof/recorded/scale.json``, and ``docs/scale.md`` is made from that.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import proof
from benchmarks.record import Plot, Record, Series, Table, Verdict, read
from celery_redlock.lock.rules import Rules
from proof.scale_costs import Client, measured_client, measured_node
from simulation.scale import Load, Names, ScaleWorld, contend, quantile

__all__ = ["main"]

WORKERS, NAMES = 1000, 1_000_000
ZONES = {3: "ABC", 5: "AABBC"}
RATES, LENGTHS = (1e3, 1e4, 3e4), (0.1, 10.0)
#: What is not counted, at the beginning of a world [s].
WARM_UP = 0.2
#: The same where many want one lock: by then all of them have come [s].
SETTLED = 1.0
#: Of what one group of nodes can do.
SHARES = {3: (0.2, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2), 5: (0.2, 0.7, 0.9)}
CONTENDERS = (1, 4, 16, 64, 256)
EXPONENTS = (0.0, 0.8, 1.0, 1.2)
GROUPS = (1, 2, 4)
#: Of a load that is put to several groups, in what one can do.
OVERLOAD = 1.5
#: How long it is looked at, at least: by then clients have given nodes up [s].
OVERLOADED = 1.0
#: How late the messages of a node are that is slow, each way [s].
LATE = 0.010
#: For how long nodes remember a finished execution, and how often names come again [s].
DEDUP = (3600, 600, 0)
HOUR = 3600
GB, MB, MILLION = 1e9, 1e6, 1e6


@dataclass(frozen=True)
class Model:
    """
    What was measured, and how long to simulate.

    Attributes:
        costs: What a node has to do -> CPU time [s]; the expiry of a marker is in its release.
        client: Of a client.
        held: Bytes of a lock that is held.
        seconds: Counted of a world, where nothing else is said [s].
    """

    costs: Mapping[str, float]
    client: Client
    held: float
    seconds: float

    @property
    def capacity(self) -> float:
        """Locks per second of short tasks that keep the one core of a node busy."""
        return 1.0 / self.cost_of(0.0)

    def cost_of(self, length: float) -> float:
        """Return the CPU time of a node for a lock that is held for *length* on average [s]."""
        often = math.exp(Rules().ttl / 3.0 / length) - 1.0 if length else math.inf
        return self.costs["acquire"] + self.costs["release"] + self.costs["renew"] / often


@contextlib.contextmanager
def without_pauses() -> Iterator[None]:
    """Look for garbage afterwards: worlds have millions of objects that live as long as they."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def lived(
    model: Model, load: Load, seconds: float, *, cut: str = "", crew: int = WORKERS, **about: Any
) -> ScaleWorld:
    """Return a world that has served *load*; nothing crosses the border of the zone *cut*."""
    with without_pauses():
        world = ScaleWorld(
            crew=crew, costs=model.costs, client=model.client.cpu, count_from=WARM_UP, **about
        )
        world.serve(load)
        if cut:
            world.cut(cut, WARM_UP, seconds + 1.0)
        world.run(WARM_UP + seconds)
        clash = world.overlaps()
    assert not clash, clash
    return world


def ends_of(world: ScaleWorld, zone: str = "") -> Counter[str]:
    """Return how tries ended, of the workers in one zone or of all."""
    return sum((ends for at, ends in world.ends.items() if zone in at), Counter())


def waits_of(world: ScaleWorld, zone: str = "") -> list[float]:
    """Return how long it took from a task's coming to its grant [s]."""
    return [wait for at, waits in world.waits.items() if zone in at for wait in waits]


def in_ms(waits: Sequence[float], *shares: float) -> list[float]:
    """Return quantiles [ms]."""
    return [round(quantile(waits, share) * 1e3, 3) for share in shares]


# -- what was measured -------------------------------------------------------------------


def measured(seconds: float) -> Model:
    """Return what this machine says."""
    costs, over, held = measured_node()
    client = measured_client()
    costs = {**costs, "release": costs["release"] + over}
    return Model({**costs, "expiry": over}, client, held, seconds)


def inputs(model: Model, record: Record) -> None:
    """Show what the simulation was given."""
    says = {
        "acquire": "acquire, granted",
        "refuse": "acquire, refused",
        "renew": "renew",
        "release": "release, marker set and later expired",
        "expiry": "of that the expiry",
        "undo": "release of a lock that is another's",
    }
    rows = [(says[kind], round(model.costs[kind] * 1e6, 1)) for kind in says]
    rows.append(("client: acquire and release on five nodes", round(model.client.cpu * 1e6, 1)))
    record.show(Table("Measured: CPU time of a node, and of a client", ("", "us"), tuple(rows)))


def reality(model: Model, record: Record) -> None:
    """Compare one client on five nodes of this machine with the same in a world."""
    about: dict[str, Any] = {
        "zones": "AAAAA",
        "at_zones": "A",
        "trips": {"AA": model.client.trip},
        "spread": 0.0,
    }
    costs = {**model.costs, "release": model.costs["undo"]}  # no marker there
    world = ScaleWorld(crew=1, costs=costs, client=model.client.cpu, is_one_core=True, **about)
    until = 0.5
    steps = contend(world, world.hosts[0], "one", hold=0.0, rest=0.0, until=until)
    world.at(0.0, world.hosts[0].run, steps)
    world.run(until)
    simulated = until / ends_of(world)["granted"]
    real = model.client.cycle
    rows = [("a cycle on five nodes on one core", simulated, real), *apart(model)]
    told = tuple(
        (name, round(one * 1e6, 1), round(other * 1e6, 1), round(one / other, 3))
        for name, one, other in rows
    )
    columns = ("", "simulated", "real", "ratio")
    record.show(Table("Reality: one client on five nodes, median [us]", columns, told))
    near, *far = (abs(one / other - 1.0) for _, one, other in rows)
    record.judge(
        Verdict(
            "what a simulated cycle on loopback differs by from a real one", round(near, 3), 0.5
        ),
        Verdict("what a simulated acquire some ms away differs by", round(max(far), 3), 0.15),
    )


def apart(model: Model) -> Iterator[tuple[str, float, float]]:
    """Yield an acquire by how far nodes are: simulated, and as a benchmark recorded it [s]."""
    recorded, _ = read("lock_cycle")
    found = {row[0]: row[2] / 1e6 for table in recorded.tables for row in table.rows}
    for away in ("1 ms away", "5 ms away", "20 ms away"):
        trips = {"AA": found[f"PING, 1 node, {away}"]}
        world = ScaleWorld(
            crew=1, zones="AAAAA", at_zones="A", trips=trips, spread=0.0,
            costs=model.costs, client=model.client.cpu, is_one_core=True,
        )  # fmt: skip
        steps = contend(world, world.hosts[0], "one", hold=0.0, rest=0.0, until=1.0)
        world.at(0.0, world.hosts[0].run, steps)
        world.run(1.0)
        real = found[f"celery-redlock, acquire alone, {away}"]
        yield f"an acquire, {away}", quantile(waits_of(world), 0.5), real


# -- what nodes have to do -----------------------------------------------------------------


def loads(model: Model, record: Record) -> None:
    """Show what each node has to do at three rates, for short and for long tasks."""
    names = Names.zipf(NAMES)
    rows, short = [], []
    for nodes, zones in ZONES.items():
        for length, rate in itertools.product(LENGTHS, RATES):
            told = f"{nodes} nodes, {length:g} s, {rate:,.0f}/s"
            needed, clients = 100 * rate * model.cost_of(length), rate * model.client.cpu
            if needed > 100:  # more than it can do; what comes of that is told elsewhere
                rows.append((told, *[None] * 6, round(needed, 1), round(clients, 1)))
                continue
            seconds = max(0.2, min(3.0, 3000 / rate) * model.seconds)
            world = lived(model, Load(rate, length, names), seconds, zones=zones)
            ends, tally = ends_of(world), max(world.tallies, key=lambda one: one.busy)
            per_lock = sum(tally.commands.values()) / ends["granted"]
            if length == min(LENGTHS):
                short.append(per_lock)
            rows.append(
                (
                    told,
                    round(ends["granted"] / seconds),
                    round(100 * ends["taken"] / ends.total(), 2),
                    round(sum(tally.commands.values()) / seconds),
                    round(per_lock, 2),
                    round(tally.received / seconds / MB, 2),
                    round(tally.sent / seconds / MB, 2),
                    round(100 * tally.busy / seconds, 1),
                    round(clients, 1),
                )
            )
            progress(told)
    columns = ("nodes, task, rate", "granted/s", "taken %", "commands/s", "per lock", "in MB/s")
    title = "Load: what one node has to do, and all clients together"
    more = ("out MB/s", "CPU %", "client cores")
    record.show(Table(title, columns + more, tuple(rows)))
    most = max(short) / 2
    record.judge(Verdict("commands of a node per lock of a short task / 2", round(most, 3), 1.03))


def memory(model: Model, record: Record) -> None:
    """Show what a node has to keep in memory."""
    recorded, _ = read("memory")
    left = {row[0]: float(row[2]) for row in recorded.tables[0].rows}  # MB per million
    marker, fence = left["marker, no fence"], left["fence, no marker"]  # [bytes]
    rows = []
    for rate, dedup in itertools.product(RATES, DEDUP):
        own = min(rate * HOUR, NAMES)
        held = rate * max(LENGTHS) * model.held
        parts = [part / GB for part in (rate * dedup * marker, own * fence, held)]
        told = [round(part, 3) for part in (*parts, sum(parts))]
        rows.append((f"{rate:,.0f}/s, dedup_ttl = {dedup}", *told, round(2 * sum(parts), 2)))
    columns = ("tasks of 10 s", "markers", "fences", "locks", "in use", "maxmemory")
    record.show(Table("Memory: of each node, with 10^6 lock names [GB]", columns, tuple(rows)))
    sizes = (("a marker", marker), ("a fence", fence), ("a lock that is held", model.held))
    rounded = tuple((name, round(size)) for name, size in sizes)
    record.show(Table("Memory: what it is reckoned from [bytes]", ("", "bytes"), rounded))


# -- how long it takes -----------------------------------------------------------------------


def latencies(model: Model, record: Record) -> None:
    """Show how long a lock takes by where the worker is, and with a part of it all amiss."""
    names, rate, seconds = Names.zipf(NAMES), 3000.0, 3.0 * model.seconds
    stories: dict[str, dict[str, Any]] = {
        "all is well": {},
        "zone C cut off": {"cut": "C"},
        "zone A cut off": {"cut": "A"},
        "the first node slow": {"later": {0: LATE}},
    }
    rows, series = [], []
    for nodes, zones in ZONES.items():
        for story, about in stories.items():
            load = Load(rate, 0.1, names)
            world = lived(model, load, seconds, zones=zones, crew=300, **about)
            points = []
            for zone in "ABC":
                waits, ends = waits_of(world, zone), ends_of(world, zone)
                refused = round(100 * ends["unavailable"] / max(1, ends.total()), 2)
                found = in_ms(waits, 0.5, 0.99, 0.999)
                told = found if waits else [None] * 3
                rows.append((f"{nodes} nodes, {story}, worker in {zone}", *told, refused))
                if waits:
                    p50, p99, _ = found
                    points.append((f"{nodes} nodes, in {zone}", p50, p50, p99))
            if story in {"all is well", "zone C cut off"}:
                series.append((story, points))
            progress(f"{nodes} nodes, {story}")
    columns = ("", "p50 [ms]", "p99 [ms]", "p99.9 [ms]", "unavailable %")
    record.show(Table("Latency: from a task's coming to its lock", columns, tuple(rows)))
    stories_told = dict.fromkeys(story for story, _ in series)
    drawn = tuple(
        Series(story, tuple(p for other, points in series if other == story for p in points))
        for story in stories_told
    )
    title = "Latency: a lock, by zone of the worker: median, and p99"
    record.draw(Plot("latency", title, "", "Time [ms]", drawn, bars=True))


# -- contention --------------------------------------------------------------------------------


def contention(model: Model, record: Record) -> None:
    """Show what many cost that want the same lock."""
    rows, series = [], []
    hold, seconds = 0.010, 3.0 * model.seconds
    for nodes, zones in ZONES.items():
        points = []
        for many in CONTENDERS:
            with without_pauses():
                world = ScaleWorld(
                    crew=many, zones=zones, costs=model.costs, client=model.client.cpu,
                    count_from=SETTLED,
                )  # fmt: skip
                until = SETTLED + seconds
                for host in world.hosts:
                    steps = contend(world, host, "hot", hold=hold, rest=hold, until=until)
                    world.at(world.chance.uniform(0.0, SETTLED), host.run, steps)
                world.run(until)
            assert not world.overlaps()
            granted = ends_of(world)["granted"]
            commands = max(sum(tally.commands.values()) for tally in world.tallies)
            gaps = in_ms(world.gaps, 0.5, 0.99)
            wasted = commands / granted - 2
            busy = max(tally.busy for tally in world.tallies) / seconds
            name = f"{nodes} nodes, {many} workers"
            longest = max(waits_of(world)) * 1e3
            rows.append(
                (name, round(granted / seconds, 1), round(max(0.0, wasted), 2), *gaps,
                 round(longest, 1), round(100 * busy, 2))
            )  # fmt: skip
            points.append((many, gaps[0], gaps[0], gaps[1]))
            progress(name)
        series.append(Series(f"{nodes} nodes", tuple(points)))
    columns = ("", "grants/s", "in vain", "hand-over p50", "p99 [ms]", "longest wait", "CPU %")
    title = "Contention: one name, held for 10 ms; commands of a node per grant in vain"
    record.show(Table(title, columns, tuple(rows)))
    title = "Contention: from a release to the next grant of the same name (p50 to p99)"
    record.draw(Plot("contention", title, "Workers", "Time [ms]", tuple(series), log="xy"))


def popularity(model: Model, record: Record) -> None:
    """Show what it does if few names are wanted by many."""
    rows, rate, seconds = [], 1e4, 0.4 * model.seconds
    for exponent in EXPONENTS:
        names = Names.zipf(NAMES, exponent)
        world = lived(model, Load(rate, 0.1, names), seconds)
        ends = ends_of(world)
        tally = max(world.tallies, key=lambda one: one.busy)
        commands = sum(tally.commands.values())
        rows.append(
            (
                f"1 / k^{exponent:g}" if exponent else "all alike",
                round(100 * names.weights[0] / names.weight, 4),
                round(ends["granted"] / seconds),
                round(100 * ends["taken"] / ends.total(), 2),
                round(commands / ends["granted"], 2),
                round(100 * tally.busy / seconds, 1),
                *in_ms(waits_of(world), 0.5, 0.99),
            )
        )
        progress(f"popularity {exponent:g}")
    columns = ("", "top name %", "granted/s", "taken %", "per lock", "CPU %", "p50 [ms]")
    title = "Popularity: 10,000 tasks/s of 0.1 s that do not wait, on 5 nodes; the k-th name by"
    record.show(Table(title, (*columns, "p99 [ms]"), tuple(rows)))


# -- what gives way first ------------------------------------------------------------------------


def saturation(model: Model, record: Record) -> None:
    """Show how waiting grows with the load, and what a group of nodes can do at most."""
    names = Names.zipf(NAMES)
    rows, series, knees = [], [], []
    for nodes, zones in ZONES.items():
        points, idle = [], 0.0
        for share in SHARES[nodes]:
            rate = share * model.capacity
            seconds = OVERLOADED if share > 1 else 0.4 * model.seconds
            world = lived(model, Load(rate, 0.1, names), seconds, zones=zones)
            ends, waits = ends_of(world), waits_of(world)
            p50, p99 = in_ms(waits, 0.5, 0.99)
            idle = idle or p99
            busy = max(tally.busy for tally in world.tallies) / seconds
            granted = ends["granted"] / seconds
            rows.append(
                (
                    f"{nodes} nodes, {share:g} of its capacity",
                    round(rate),
                    round(granted),
                    round(100 * busy, 1),
                    p50,
                    p99,
                    round(100 * ends["unavailable"] / max(1, ends.total()), 2),
                    round(rate * model.client.cpu, 1),
                )
            )
            points.append((round(rate), p50, p50, p99))
            if p99 < 2 * idle:
                knees.append((nodes, rate))
            progress(f"{nodes} nodes, {share:g}")
        series.append(Series(f"{nodes} nodes", tuple(points)))
    columns = ("", "wanted/s", "granted/s", "CPU %", "p50 [ms]", "p99 [ms]", "unavailable %")
    title = "Saturation: tasks of 0.1 s on one group of nodes"
    record.show(Table(title, (*columns, "client cores"), tuple(rows)))
    knee = min(max(rate for of, rate in knees if of == nodes) for nodes in ZONES)
    told = (
        ("a group, its nodes' CPU all used", round(model.capacity)),
        ("a group, p99 less than twice what it is when idle", round(knee)),
        ("a client process, its CPU all used", round(1 / model.client.cpu)),
    )
    record.show(Table("Saturation: most locks per second", ("", "locks/s"), told))
    title = "Saturation: from a task's coming to its lock (p50 to p99), one group of nodes"
    record.draw(
        Plot("saturation", title, "Locks wanted per second", "Time [ms]", tuple(series), log="y")
    )


def sharding(model: Model, record: Record) -> None:
    """Show what several groups of nodes can do, each with its share of the names."""
    rate = OVERLOAD * model.capacity
    rows, granted_by = [], {}
    for exponent in (0.0, 1.0):
        names = Names.zipf(NAMES, exponent)
        for groups in GROUPS:
            seconds = OVERLOADED if groups == 1 else 0.3 * model.seconds
            ends, busiest, waits, most = Counter[str](), 0.0, list[float](), 0.0
            for mine in names.of_groups(groups):
                share = mine.weight / names.weight
                world = lived(model, Load(rate * share, 0.1, mine), seconds, zones=ZONES[3])
                ends += ends_of(world)
                busiest = max(busiest, *(tally.busy / seconds for tally in world.tallies))
                waits += waits_of(world)
                most = max(most, share)
            told = f"{groups} of 3 nodes, {'names all alike' if not exponent else '1 / k'}"
            granted_by[exponent, groups] = ends["granted"] / seconds
            rows.append(
                (
                    told,
                    round(rate),
                    round(ends["granted"] / seconds),
                    *(round(100 * ends[how] / ends.total(), 1) for how in ("taken", "unavailable")),
                    round(100 * most, 1),
                    round(100 * busiest, 1),
                    *in_ms(waits, 0.5, 0.99),
                )
            )
            progress(told)
    columns = ("groups", "wanted/s", "granted/s", "taken %", "unavailable %", "largest share %")
    title = "Sharding: more than one group can do, by hash over several; tasks of 0.1 s"
    record.show(Table(title, (*columns, "its CPU %", "p50 [ms]", "p99 [ms]"), tuple(rows)))
    ratio = granted_by[0.0, 2] / rate
    record.judge(
        Verdict("granted by two groups / wanted, at 1.5 times what one can do", round(ratio, 3),
                0.95, at_least=True)
    )  # fmt: skip


Section = Callable[[Model, Record], None]
SECTIONS: tuple[Section, ...] = (
    inputs,
    reality,
    loads,
    memory,
    latencies,
    contention,
    popularity,
    saturation,
    sharding,
)


def progress(told: str) -> None:
    """Say how far it is, in a line that is overwritten."""
    print(f"\r  {told:60}", end="\r", file=sys.stderr, flush=True)


def part(section: Section, model: Model) -> Record:
    """Return what a section shows, and print nothing."""
    record = Record(section.__name__)
    with contextlib.redirect_stdout(io.StringIO()):
        section(model, record)
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate it all and print the tables; with ``--record`` keep them and make the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="how much of each world (1.0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that simulate (1)")
    parser.add_argument("--record", action="store_true", help="keep what was found for the page")
    chosen = parser.parse_args(arguments)
    record = Record("scale", {"seconds": chosen.seconds, "workers": WORKERS, "names": NAMES})
    model = measured(chosen.seconds)
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("fork")) as pool:
        for found in pool.map(part, SECTIONS, itertools.repeat(model)):
            for table in found.tables:
                record.show(table)
            record.plots += found.plots
            if found.verdicts:
                record.judge(*found.verdicts)
    if chosen.record:
        from proof import scale_page  # noqa: PLC0415  matplotlib, for pictures alone

        proof.save(proof.RECORDED / "scale.json", asdict(record))
        scale_page.main()
    return int(not all(verdict.is_met for verdict in record.verdicts))


if __name__ == "__main__":
    sys.exit(main())
