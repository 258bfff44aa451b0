"""
A world in which clients, nodes and the network between them misbehave, repeatably.

One heap of what happens when. Clients are generators that run the *real* algorithm,
`acquiring.acquire` and `Renewal`, and yield what it yields (`Ask`, `Send`, `Sleep`); votes are
counted by the real `Call`, connections kept by the real `Node`, leases trusted by the real
`HeldLock`. Nodes run the library's own Lua. All times are of a true clock that
nobody but this world can read; every client and node has its own, wrong by rate and offset.

Everything random comes from one seed, so a seed that shows a fault shows it again.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from celery_redlock.lock import clock as real_clock
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.nodes.guard import boot_marker
from celery_redlock.lock.records import Keys
from celery_redlock.lock.rules import Rules
from celery_redlock.task.rate import Rate
from simulation import laws
from simulation.clocks import BEGIN, SWING, Clock, NodeClock
from simulation.crew import Crew
from simulation.faults import CALM, Chaos, Faults
from simulation.hosts import Host
from simulation.laws import Hold, Wait
from simulation.network import Link
from simulation.nodes import SimulatedNode, Store

__all__ = ["RULES", "Delay", "World"]

#: One way from a client to a node or back [s]; the command, or None for a reply.
Delay = Callable[[Link, "list[bytes] | None"], float]
#: Everything is an order of magnitude faster than in life, the quarantine excepted.
RULES = Rules(ttl=0.3, max_ttl=0.3, node_timeout=0.05)


@dataclass
class World:
    """
    Nodes, clients, and what happens to them.

    Attributes:
        seed: Of all that is random.
        size: How many nodes.
        crew: How many clients.
        rules: Of the cluster.
        chaos: How often what goes wrong.
        delay: How long messages are under way; random by default.
        still_read: Share of what was sent down a connection that broke and is read all the same.
        peace: When all faults are over [s].
        limit: How many places each lock has.
        holds: All grants so far.
        held: The last one of each token.
        is_woken: Whether those who wait hear that a lock may be free.
        wanted: Everybody who has wanted a lock, in the order in which their waiting ended.
        rate: Of starts of one name; None for no starts.
        starts: Name -> when something with that rate has started [s].
        stops: Number of a client -> from when until when it stood still.
        room: How much a connection takes at a time [bytes]; None for all.
        asked: When a token was last sent in an acquire.
        progressed: Numbers of the clients that got the lock when all was well again.
        met: How often which command was answered how, and what went wrong.
    """

    seed: int = 0
    size: int = 3
    crew: int = 3
    rules: Rules = RULES
    chaos: Chaos = CALM
    delay: Any = None  # a Delay once made
    still_read: float = 0.5
    is_woken: bool = False
    room: int | None = None
    now: float = 0.0
    peace: float = float("inf")
    limit: int = 1
    rate: Rate | None = None
    starts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    holds: list[Hold] = field(default_factory=list)
    held: dict[str, Hold] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    progressed: set[int] = field(default_factory=set)
    met: Counter[Any] = field(default_factory=Counter)
    wanted: list[Wait] = field(default_factory=list)
    stops: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.delay = self.delay or self.random_delay
        self.clocks = [self._node_clock() for _ in range(self.size)]
        self.nodes = [SimulatedNode(i, self._reader(clock)) for i, clock in enumerate(self.clocks)]
        labels = [f"node-{node.position}" for node in self.nodes]
        for node in self.nodes:  # enrolled long ago
            node.keyspace.hear = partial(self.published, node)
            node.policy = "volatile-ttl" if self.chaos.evict else ""
            boot_id = boot_marker(node.run_id.decode(), self.rules.fingerprint(labels))
            node.put(Keys.of(self.rules.prefix, "").boot, boot_id, b"2592000000")
        self.hosts = [
            Host(self, i, self._host_clock(), Clock(self._skewed())) for i in range(self.crew)
        ]

    def _reader(self, clock: NodeClock) -> Callable[[], float]:
        return lambda: clock.read(self.now)

    def _skewed(self) -> float:
        return BEGIN + self.chance.uniform(-self.chaos.skew, self.chaos.skew)

    def _node_clock(self) -> NodeClock:
        rate, phase = self.chance.uniform(0.0, self.chaos.rate), self.chance.uniform(0, 4 * SWING)
        return NodeClock(self._skewed(), rate, phase)

    def _host_clock(self) -> Clock:
        rate = self.chance.uniform(-self.chaos.rate, self.chaos.rate)
        return Clock(self.chance.uniform(0.0, 1000.0), 1.0 + rate)

    def random_delay(self, _link: Link, _command: list[bytes] | None) -> float:
        """Return how long a message is under way [s]: mostly short, now and then very long."""
        if self.now < self.peace and self.chance.random() < self.chaos.slow:
            return self.chance.uniform(0.0, 2 * self.rules.ttl)
        return 0.0002 + 0.0038 * self.chance.random()

    # -- time ----------------------------------------------------------------------

    def at(self, when: float, what: Callable[..., Any], *arguments: Any) -> None:
        """Have something happen at the true time *when* [s], after what was planned before."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, what, arguments))

    def run(self, until: float = float("inf")) -> None:
        """Let happen all that is planned up to *until* [s]."""
        clock = real_clock.now
        try:
            while self._heap and self._heap[0][0] <= until:
                when, _, what, arguments = heapq.heappop(self._heap)
                self.now = max(self.now, when)
                what(*arguments)
        finally:
            real_clock.now = clock

    def live(self, seconds: float, **crew_does: Any) -> World:
        """Let everybody work for *seconds* while things go wrong, and then in peace."""
        self.begin(seconds, **crew_does)
        self.run()
        return self

    def begin(self, seconds: float, **crew_does: Any) -> None:
        """Have everybody work for *seconds* once the world runs."""
        self.peace = self.now + seconds
        crew = Crew(self, self.peace, **crew_does)
        self.limit, self.rate = crew.limit, crew.rate

        def reborn(number: int) -> None:
            host = self.hosts[number]
            host.begin()
            host.run(crew.work(host))

        for host in self.hosts:
            host.run(crew.work(host))
        Faults(self, reborn).plan(crew.until)

    # -- what goes wrong -----------------------------------------------------------

    def crash(self, node: SimulatedNode, length: float, kept: Store | None = None) -> None:
        """Have a node lose its memory, but for what was *kept*, and come back after a while [s]."""
        if not node.is_up:
            return
        node.crash(kept)
        self.at(self.now + length, node.start)
        for host in self.hosts:  # each learns of it when it does
            link = host.links[node.position]
            link.crashed(after=self.delay(link, None))
            if host.ears is not None:
                host.ears.lose(node.position)

    def freeze(self, node: SimulatedNode, length: float) -> None:
        if node.is_up:
            node.frozen_until = max(node.frozen_until, self.now + length)

    def stop(self, host: Host, length: float) -> None:
        host.stopped_until = max(host.stopped_until, self.now + length)
        self.stops[host.number].append((self.now, self.now + length))

    def halt(self, host: Host, length: float) -> None:
        """Have a client stand still for *length* [s], and its clock, too."""
        host.lose_time(length)  # nobody reads it meanwhile
        self.stop(host, length)

    def kill(self, host: Host) -> None:
        """Have a client die; what it held it trusts no more."""
        host.kill()
        for hold in self._trusted():
            if hold.token.startswith(f"{host.number:02x}"):
                hold.ended = self.now

    def published(self, node: SimulatedNode, channel: bytes, message: bytes) -> int:
        """Have clients hear what a node publishes, unless it is lost; return how many should."""
        listening = 0
        for host in self.hosts:
            if host.ears is not None and host.ears.is_subscribed(node, channel):
                listening += 1
                if self.chance.random() >= self.chaos.unheard:
                    when = host.links[node.position].arrival(0.0, None)
                    self.at(when, host.ears.hear, node.position, message)
        return listening

    def waited(self, host: Host, name: str, came: float, *, is_granted: bool) -> None:
        """Note that a client has wanted a lock since it *came*, and does no more [s, true time]."""
        self.wanted.append(Wait(name, came, self.now, is_granted, tuple(self.stops[host.number])))

    def revoke(self) -> None:
        """Take the lock away from its present holder on all nodes, on an operator's word."""
        for hold in self._trusted():
            hold.ended = self.now
            key = Keys.of(self.rules.prefix, hold.name).lock
            for node in self.nodes:
                if (node.get(key) or b"").startswith(hold.token.encode()):
                    node.delete(key)

    def _trusted(self) -> list[Hold]:
        """Return the holds that are trusted now; nobody holds on for a hundred others."""
        return [hold for hold in self.holds[-100:] if hold.end > self.now]

    # -- what is noted -------------------------------------------------------------

    def granted(self, host: Host, lease: Lease, until: float) -> None:
        """Note a grant that its holder trusts *until* a true time [s]."""
        asked = self.asked.pop(lease.token)
        hold = Hold(lease.token, lease.fence or 0, asked, self.now, until, name=lease.name)
        self.held[lease.token] = hold
        self.holds.append(hold)

    def started(self, name: str) -> None:
        """Note that something starts now."""
        self.starts[name].append(self.now)

    def renewed(self, lease: Lease, until: float) -> None:
        self.held[lease.token].until = until

    def trusted_for(self, host: Host, seconds: float) -> None:
        """Note that a client trusts what it holds for so much longer, having lost time [s]."""
        for hold in self._trusted():
            if hold.token.startswith(f"{host.number:02x}"):
                hold.until += seconds

    def ended(self, token: str) -> None:
        """Note that a holder trusts its lock no longer."""
        hold = self.held[token]
        hold.ended = min(hold.ended, self.now)

    def hits(self, _node: SimulatedNode, command: list[bytes], reply: Any) -> None:
        code = reply[0] if isinstance(reply, list) else type(reply).__name__
        self.met[command[1][:12], code] += 1

    def note(self, fault: str) -> None:
        self.met[fault] += 1

    def overlaps(self) -> list[tuple[Hold, Hold]]:
        """Return who trusted the lock at the same time."""
        return laws.overlaps(self.holds)

    def crowd(self) -> list[Hold]:
        """Return who trusted a place of a lock while all of them were trusted by others."""
        return laws.crowd(self.holds, self.limit)

    def rush(self) -> list[tuple[float, float]]:
        """Return from when until when more have started than may in a window of nodes' clocks."""
        if self.rate is None:
            return []
        window = self.rate.window / (1.0 + self.chaos.rate)
        every = self.starts.values()
        return [it for starts in every for it in laws.rush(starts, self.rate.burst, window)]

    def disorder(self) -> list[tuple[Hold, Hold]]:
        """Return whose fences are equal or out of order."""
        return laws.disorder(self.holds)

    def leftovers(self) -> list[bytes]:
        """Return the locks that any node still stores."""
        locks = Keys.of(self.rules.prefix, "").lock
        return [
            value
            for node in self.nodes
            for key in sorted(node.store)
            if key.startswith(locks) and (value := node.get(key)) is not None
        ]

    def immortal(self) -> list[bytes]:
        """Return the keys that have no end."""
        return [
            key
            for node in self.nodes
            for key, (_, expires) in node.store.items()
            if expires == float("inf")
        ]
