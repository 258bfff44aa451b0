"""
A world of many: a thousand workers, a million names, nodes whose CPU time is counted.

Clients are the same real code as in every other world. What is added: a node is one queue that
takes measured CPU time for each command; messages take as long as zones are apart, with a tail;
and a worker takes locks as tasks come to it, whether or not earlier ones were quick (open loop).

Of a command its effect is at its arrival and its answer after its turn in the queue: the order of
effects is that of the queue. A worker does one thing at a time, in as much time as its own CPU
takes; leases that it holds already when the world begins spare it the time until it holds so many.
"""

from __future__ import annotations

import heapq
import math
import random
import zlib
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

from celery_redlock.errors import LockTaken, QuorumUnavailable
from celery_redlock.lock.algorithm.acquiring import acquire
from celery_redlock.lock.algorithm.effects import Ask, Send, Sleep
from celery_redlock.lock.algorithm.renewal import Renewal
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import Lease, fence_proposal, renew_at, valid_until
from celery_redlock.lock.records import Keys
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import Marker, release_request
from celery_redlock.lock.scripts.scripting import pack
from celery_redlock.lock.scripts.scripts import ACQUIRE, RELEASE, RENEW
from simulation import laws
from simulation.clocks import Clock
from simulation.faults import Chaos
from simulation.hosts import GRAIN, Host, Process
from simulation.laws import Hold
from simulation.network import Link
from simulation.nodes import SimulatedNode
from simulation.world import World

__all__ = ["KINDS", "Load", "Names", "ScaleWorld", "Tally", "contend", "group_of", "quantile"]

#: What a node has to do: grant a lock, refuse one, renew, release and set a marker, and take back
#: what an attempt may have left behind.
KINDS = ("acquire", "refuse", "renew", "release", "undo")
#: Two zones -> median round trip between them [s].
ROUND_TRIPS = {"AA": 3e-4, "BB": 3e-4, "CC": 3e-4, "AB": 6e-4, "AC": 1e-3, "BC": 1.5e-3}
#: Of the logarithm of the time one way; at 0.6 one message in a hundred takes four times as long.
SPREAD = 0.6
DEFAULTS = Rules()
#: Clocks of machines that are kept right by NTP.
NTP = Chaos(rate=1e-5, skew=0.001)
#: How long a finished execution is remembered [s], as by default.
DEDUP_TTL = 3600.0


def group_of(name: str, groups: int) -> int:
    """Return which group of nodes has the lock *name*: the same in every process, for ever."""
    return zlib.crc32(name.encode()) % groups


@dataclass(frozen=True)
class Names:
    """
    Lock names, and how often each is wanted.

    Attributes:
        numbers: Of the names.
        weights: How often each is wanted or one before it, added up.
    """

    numbers: Sequence[int]
    weights: Sequence[float]

    @classmethod
    def zipf(cls, count: int, exponent: float = 0.0) -> Names:
        """Return *count* names of which the k-th is wanted as 1 / k^exponent; 0 for all alike."""
        return cls(range(count), list(accumulate((k + 1) ** -exponent for k in range(count))))

    @property
    def weight(self) -> float:
        """How often any is wanted."""
        return self.weights[-1]

    def draw(self, chance: random.Random) -> str:
        found = bisect(self.weights, chance.random() * self.weight)
        return self.text(self.numbers[min(found, len(self.numbers) - 1)])

    @staticmethod
    def text(number: int) -> str:
        """Return a name, as long as a task's name and the digest of its arguments."""
        return f"shop.bill:{number:032x}"

    def of_groups(self, groups: int) -> list[Names]:
        """Return them by the group of nodes that has their locks, wanted as often as before."""
        numbers: list[list[int]] = [[] for _ in range(groups)]
        weights: list[list[float]] = [[] for _ in range(groups)]
        before = 0.0
        for number, upto in zip(self.numbers, self.weights, strict=True):
            group = group_of(self.text(number), groups)
            numbers[group].append(number)
            weights[group].append(upto - before)
            before = upto
        return [Names(n, list(accumulate(w))) for n, w in zip(numbers, weights, strict=True)]


@dataclass(frozen=True)
class Load:
    """
    What is asked of all workers together.

    Attributes:
        rate: Tasks that want a lock [1/s].
        length: How long they hold it on average [s]; exponentially distributed.
        names: Which locks.
        wait: How long they wait for one that is taken [s].
        until: When no more come [s].
    """

    rate: float
    length: float
    names: Names
    wait: float = 0.0
    until: float = math.inf


@dataclass
class Tally:
    """
    What one node had to do.

    Attributes:
        commands: How many of each of `KINDS`.
        busy: CPU time that they took [s].
        received: Bytes of commands, without headers of TCP.
        sent: Bytes of answers.
    """

    commands: Counter[str] = field(default_factory=Counter)
    busy: float = 0.0
    received: int = 0
    sent: int = 0


class ScaleHost(Host):
    """A client that is one of thousands."""

    def new_token(self) -> str:
        """Return a token that nobody else has; 40 hexadecimal digits."""
        self.tokens += 1
        return f"{self.number:08x}{self.tokens:032x}"

    @property
    def zone(self) -> str:
        zones: str = self.world.at_zones  # type: ignore[attr-defined]
        return zones[self.number % len(zones)]


@dataclass
class ScaleWorld(World):
    """
    A world of many.

    Attributes:
        zones: Of the nodes, a letter each.
        at_zones: Of the workers, in turn.
        costs: What a node has to do -> CPU time [s].
        client: CPU time of a client for each lock, from acquire to release [s].
        trips: Two zones -> median round trip [s].
        spread: Of the logarithm of the time one way.
        later: Position of a node -> how much later its messages come, each way [s].
        is_one_core: Whether all nodes share one core, as on a machine for tests.
        count_from: What has ended earlier is not counted [s].
        tallies: Of each node.
        waits: Zone of a worker -> from a task's coming to its grant [s].
        ends: Zone of a worker -> how often a try ended how.
        gaps: From the end of a hold to the next grant of the same name [s].
    """

    rules: Rules = DEFAULTS
    chaos: Chaos = NTP
    zones: str = "AABBC"
    at_zones: str = "ABC"
    costs: Mapping[str, float] = field(default_factory=dict)
    client: float = 0.0
    trips: Mapping[str, float] = field(default_factory=lambda: ROUND_TRIPS)
    spread: float = SPREAD
    later: Mapping[int, float] = field(default_factory=dict)
    is_one_core: bool = False
    count_from: float = 0.0

    def __post_init__(self) -> None:
        crew, self.crew, self.size = self.crew, 0, len(self.zones)
        self.delay = self.under_way
        super().__post_init__()
        self.crew = crew
        self.tallies = [Tally() for _ in self.zones]
        self.waits: dict[str, list[float]] = defaultdict(list)
        self.ends: dict[str, Counter[str]] = defaultdict(Counter)
        self.gaps: list[float] = []
        self.held_of: dict[str, list[Hold]] = defaultdict(list)
        self._free_at = [0.0 for _ in self.zones]
        self._sizes: dict[str, tuple[int, int]] = {}
        self.hosts = [
            ScaleHost(self, i, self._host_clock(), Clock(self._skewed())) for i in range(crew)
        ]

    # -- how long things take --------------------------------------------------------

    def under_way(self, link: Link, command: list[bytes] | None) -> float:
        """Return how long a message is under way; an answer waits for the queue before it."""
        assert isinstance(link.host, ScaleHost)
        node, zones = link.position, sorted((self.zones[link.position], link.host.zone))
        tail = math.exp(self.chance.gauss(0.0, self.spread)) if self.spread else 1.0
        trip = self.trips["".join(zones)] / 2 * tail + self.later.get(node, 0.0)
        return trip if command is not None else trip + max(0.0, self._queue(node) - self.now)

    def _core(self, node: int) -> int:
        return 0 if self.is_one_core else node

    def _queue(self, node: int) -> float:
        return self._free_at[self._core(node)]

    def hits(self, node: SimulatedNode, command: list[bytes], reply: Any) -> None:
        """Note what a node answered, and that it is busy with that for a while."""
        kind, at, core = kind_of(command, reply), node.position, self._core(node.position)
        cost = self.costs.get(kind, 0.0)
        self._free_at[core] = max(self._free_at[core], self.now) + cost
        if self.now >= self.count_from:
            if kind not in self._sizes:  # all of a kind are about as long
                self._sizes[kind] = len(pack(*command)), len(packed(reply))
            tally, (received, sent) = self.tallies[at], self._sizes[kind]
            tally.commands[kind] += 1
            tally.busy += cost
            tally.received += received
            tally.sent += sent

    def cut(self, zone: str, since: float, until: float) -> None:
        """Have no message go into *zone* or out of it for a while, but within it."""
        links = [link for host in self.hosts for link in host.links]
        for link in links:
            assert isinstance(link.host, ScaleHost)
            if (self.zones[link.position] == zone) != (link.host.zone == zone):
                self.at(since, setattr, link, "up_cut_until", until)
                self.at(since, setattr, link, "down_cut_until", until)

    # -- what is noted ----------------------------------------------------------------

    def granted(self, host: Host, lease: Lease, until: float) -> None:
        """Note a grant, and how long after the end of the one before it."""
        super().granted(host, lease, until)
        holds = self.held_of[lease.name]
        if holds and holds[-1].ended < math.inf and self.now >= self.count_from:
            self.gaps.append(self.now - holds[-1].ended)
        holds.append(self.holds.pop())

    def overlaps(self) -> list[tuple[Hold, Hold]]:
        """Return who trusted the same lock at the same time."""
        return [pair for holds in self.held_of.values() for pair in laws.overlaps(holds)]

    def tried(self, host: Host, due: float, outcome: str) -> None:
        """Note how a try has ended that was due at a true time [s]."""
        assert isinstance(host, ScaleHost)
        if self.now >= self.count_from:
            self.ends[host.zone][outcome] += 1
            if outcome == "granted":
                self.waits[host.zone].append(self.now - due)

    # -- what is done -----------------------------------------------------------------

    def serve(self, load: Load, *, begin_full: bool = True) -> None:
        """Have all workers serve a load; as if they had done so for long, if not told otherwise."""
        for host in self.hosts:
            agenda = Agenda(self, host, load, load.rate / len(self.hosts))
            self.at(self.now, host.run, agenda.work(begin_full=begin_full))


def kind_of(command: Sequence[bytes], reply: Any) -> str:
    """Return which of `KINDS` a command was."""
    if command[1] == ACQUIRE.sha:
        return "acquire" if isinstance(reply, list) and reply[0] == 1 else "refuse"
    if command[1] == RELEASE.sha:
        return "undo" if command[3] == command[4] else "release"
    return "renew" if command[1] == RENEW.sha else "other"


def packed(reply: Any) -> bytes:
    """Return an answer as Redis writes it (RESP)."""
    if isinstance(reply, list):
        return b"*%d\r\n" % len(reply) + b"".join(map(packed, reply))
    return b":%d\r\n" % reply if isinstance(reply, int) else b"$%d\r\n%b\r\n" % (len(reply), reply)


def quantile(found: Sequence[float], share: float) -> float:
    """Return what *share* of what was found stays below; nan if nothing was."""
    ordered = sorted(found)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def take(
    world: ScaleWorld, host: Host, wanted: LockRequest, due: float
) -> Generator[Any, Any, Lease | None]:
    """Acquire a lock for a task that came at the true time *due*; None if that fails."""
    try:
        lease = yield from acquire(host.kernel, wanted)
    except LockTaken:
        world.tried(host, due, "taken")
    except QuorumUnavailable:
        world.tried(host, due, "unavailable")
    else:
        world.granted(host, lease, host.clock.when(lease.valid_until))
        world.tried(host, due, "granted")
        return lease
    return None


def contend(
    world: ScaleWorld, host: Host, name: str, *, hold: float, rest: float, until: float
) -> Process:
    """Yield what one of many does that all want the same lock, again and again."""
    yield Sleep(world.chance.uniform(0.0, rest))
    while world.now < until:
        yield Sleep(world.client)
        wanted = LockRequest(name, host.rules.ttl, until - world.now, fence=host.rules.fence)
        lease = yield from take(world, host, wanted, world.now)
        if lease is not None:
            yield Sleep(hold)
            world.ended(lease.token)
            yield Send(release_request(host.rules, name, lease.token))
            yield Sleep(rest)


class Agenda:
    """
    What a worker has to do when: take locks as tasks come, renew and release those it holds.

    Args:
        world: Where it lives.
        host: Which process.
        load: On all workers.
        rate: Tasks that come to this one [1/s].
    """

    def __init__(self, world: ScaleWorld, host: Host, load: Load, rate: float) -> None:
        self.world, self.host, self.load, self.rate = world, host, load, rate
        self._todo: list[tuple[float, int, Callable[[], Process]]] = []
        self._count = 0

    def plan(self, when: float, what: Callable[[], Process]) -> None:
        """Note what is to be done at *when* [s, the worker's clock]."""
        self._count += 1
        heapq.heappush(self._todo, (when, self._count, what))

    def work(self, *, begin_full: bool) -> Process:
        """Yield all that the worker does."""
        host = self.host
        if begin_full:
            for _ in range(self._held_already()):
                self.begin_held()
        self.next_task(host.now())
        while self._todo:
            when, _, what = heapq.heappop(self._todo)
            if when > host.now():
                yield Sleep(when - host.now() + GRAIN)
            yield from what()

    def _held_already(self) -> int:
        """Return how many locks a worker holds at any moment: by Poisson, about."""
        mean = self.rate * self.load.length
        return max(0, round(self.world.chance.gauss(mean, math.sqrt(mean))))

    def next_task(self, now: float) -> None:
        """Plan the coming of the next task."""
        due = now + self.world.chance.expovariate(self.rate)
        if self.host.clock.when(due) < self.load.until:
            self.plan(due, partial(self.run_task, due))

    def run_task(self, due: float) -> Process:
        """Take the lock for a task, and plan what becomes of it."""
        self.next_task(due)
        world, host = self.world, self.host
        yield Sleep(world.client)
        execution, info = self.told()
        name = self.load.names.draw(world.chance)
        wanted = LockRequest(name, host.rules.ttl, self.load.wait, info=info, marker=execution)
        lease = yield from take(world, host, wanted, host.clock.when(due))
        if lease is not None:
            ends = host.now() + world.chance.expovariate(1.0 / self.load.length)
            self.hold(HeldLock(lease), execution, ends, renew_at(host.now(), lease.ttl))

    def begin_held(self) -> None:
        """Begin with a lock that was taken, and renewed, before the world began."""
        world, host, chance = self.world, self.host, self.world.chance
        now, ttl, name = host.now(), host.rules.ttl, self.load.names.draw(chance)
        if name in world.held_of:
            return
        age = chance.expovariate(1.0 / self.load.length) % (ttl / 3.0)
        wall = host.kernel.wall() - age
        trusted = valid_until(now - age, ttl, host.rules.drift_factor)
        execution, info = self.told()
        fence = fence_proposal(int(wall * 1000), 0)
        lease = Lease(name, host.new_token(), fence, ttl, trusted, wall, info)
        value, key = lease.token.encode(), Keys.of(host.rules.prefix, name).lock
        for node in world.nodes:
            node.store[key] = (value, node.wall() * 1000 + (ttl - age) * 1000)
        world.asked[lease.token] = world.now
        world.granted(host, lease, host.clock.when(trusted))
        ends = now + chance.expovariate(1.0 / self.load.length)
        self.hold(HeldLock(lease), execution, ends, renew_at(now - age, ttl))

    def told(self) -> tuple[str, dict[str, str]]:
        """Return the id of a new execution, and what it tells of itself."""
        number = self.world.chance.getrandbits(48)
        task_id = f"{number >> 16:08x}-0000-4000-8000-{number:012x}"
        execution = f"{task_id}/0/0"
        return execution, {"task": "shop.bill", "task_id": task_id, "execution": execution}

    def hold(self, held: HeldLock, execution: str, ends: float, due: float) -> None:
        """Plan what is to be done next with a lock that is held."""
        if due < ends:
            self.plan(due, partial(self.renew, held, execution, ends))
        else:
            self.plan(ends, partial(self.release, held, execution))

    def renew(self, held: HeldLock, execution: str, ends: float) -> Process:
        """Renew once, as the watchdog does."""
        renewal = Renewal(self.host.kernel, held.lease)
        ballot = yield Ask(renewal.request(), renewal.decided)
        outcome = renewal.outcome(ballot)
        if isinstance(outcome, Lease) and held.renewed(outcome):
            self.world.renewed(outcome, self.host.clock.when(outcome.valid_until))
            self.hold(held, execution, ends, renew_at(renewal.started, held.ttl))
        elif outcome is None:
            self.hold(held, execution, ends, renewal.started + held.ttl / 12.0)
        else:
            self.world.tried(self.host, self.world.now, "lost")
            self.world.ended(held.token)

    def release(self, held: HeldLock, execution: str) -> Process:
        """Give the lock back, and leave a marker for the execution."""
        self.world.ended(held.token)
        marker = Marker(execution, "done", DEDUP_TTL)
        yield Send(release_request(self.host.rules, held.name, held.token, marker=marker))
