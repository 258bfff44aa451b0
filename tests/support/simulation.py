"""
A world in which clients, nodes and the network between them misbehave, repeatably.

One heap of what happens when. Clients are generators that run the *real* algorithm,
`rounds.acquire` and `Renewal`, and yield what it yields (`Ask`, `Tell`, `Pause`); a `Call`
of `celery_redlock.lock.node` counts their votes. Nodes are the Lua scripts of
`celery_redlock.lock.scripts` told again in Python. All times are of a true clock that
nobody but this file can read; every client and node has its own, wrong by rate and offset.

Everything random comes from one seed, so a seed that shows a fault shows it again.

The laws, checked on the `Hold`s a run leaves behind:

- `overlaps` (exclusion): nobody trusts a lock while another does.
- `disorder` (fences): unique, and growing for whoever asks after a grant.
- `World.progressed` (progress): when all faults are over, everybody gets the lock.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from celery_redlock.errors import LockNotAcquired
from celery_redlock.lock.call import Call
from celery_redlock.lock.lease import Lease, renew_at
from celery_redlock.lock.renewal import Renewal
from celery_redlock.lock.requests import Request, release_request
from celery_redlock.lock.rounds import Ask, Client, Pause, Tell, Wanted, acquire
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts import ACQUIRE, MARK, RELEASE, RENEW, Script
from celery_redlock.lock.votes import OWNER_LENGTH, TOKEN_LENGTH, Vote, VoteKind

__all__ = [
    "CALM",
    "HARSH",
    "Chaos",
    "Clock",
    "Crew",
    "Hold",
    "Host",
    "Interrupted",
    "Link",
    "SimulatedNode",
    "SwingingClock",
    "World",
    "disorder",
    "overlaps",
]

Process = Generator["Ask | Tell | Pause", Any, Any]
#: One way from a client to a node or back [s]; the request, or None for a reply.
Delay = Callable[["Link", "Request | None"], float]

#: Everything is an order of magnitude faster than in life, the quarantine excepted.
RULES = Rules(ttl=0.3, max_ttl=0.3, node_timeout=0.05)
NAME = "k"
#: Wall-clock time at which worlds begin [s, Unix time].
BEGIN = 1_700_000_000.0
#: A quarter of the period in which a node's clock gains and loses time [s].
SWING = 0.5
#: When a lease ends that is lost [s, any clock].
LOST = float("-inf")
#: Rounding of floating-point times [s].
GRAIN = 1e-9


class Interrupted(BaseException):
    """Hits a client in the middle of an acquire, as a time limit would."""


@dataclass(frozen=True)
class Clock:
    """
    A clock that is wrong.

    Attributes:
        offset: What it shows at the beginning [s].
        rate: How fast it runs [1, 1.0 is right].
    """

    offset: float
    rate: float = 1.0

    def read(self, now: float) -> float:
        """Return what it shows at the true time *now* [s]."""
        return self.offset + self.rate * now

    def when(self, shown: float) -> float:
        """Return the true time at which it shows *shown* [s]."""
        return (shown - self.offset) / self.rate


@dataclass(frozen=True)
class SwingingClock:
    """
    A wall clock that is kept right on the whole: too fast for a while, then too slow.

    Attributes:
        offset: What it shows at the beginning, about [s].
        rate: How wrong its pace is at any moment [1].
        phase: Where in its swing it begins [s].
    """

    offset: float
    rate: float
    phase: float = 0.0

    def read(self, now: float) -> float:
        """Return what it shows at the true time *now* [s]."""
        swing = (now + self.phase) % (4 * SWING)
        return self.offset + now + self.rate * abs(swing - 2 * SWING)


@dataclass(frozen=True)
class Chaos:
    """
    How often things go wrong, each in events per second of the whole world.

    Attributes:
        crash: A node loses its memory and comes back.
        freeze: A node stands still for a while.
        stop: A client stands still for a while.
        cut: A client and a node cannot hear each other for a while.
        reset: A connection breaks.
        interrupt: A client is interrupted if it is acquiring.
        slow: Share of messages that take long [1, not per second].
        rate: How wrong clocks run at most [1].
        skew: How wrong wall clocks are at most [s].
    """

    crash: float = 0.0
    freeze: float = 0.0
    stop: float = 0.0
    cut: float = 0.0
    reset: float = 0.0
    interrupt: float = 0.0
    slow: float = 0.0
    rate: float = 0.02
    skew: float = 0.12


CALM = Chaos()
HARSH = Chaos(crash=0.8, freeze=0.6, stop=1.5, cut=1.0, reset=1.0, interrupt=1.0, slow=0.05)


@dataclass
class Hold:
    """
    One grant, as its holder saw it; times are true times [s].

    Attributes:
        token: Whose.
        fence: Its fencing number.
        asked: When its acquire was sent.
        granted: When it was granted.
        until: When its lease ended, by the holder's own clock.
        ended: When the holder gave it back or learnt that it is lost.
    """

    token: str
    fence: int
    asked: float
    granted: float
    until: float
    ended: float = float("inf")

    @property
    def end(self) -> float:
        """When the holder stopped trusting it."""
        return min(self.until, self.ended)


def overlaps(holds: Iterable[Hold]) -> list[tuple[Hold, Hold]]:
    """Return the pairs of holds that were trusted at the same time; there must be none."""
    found = []
    latest: Hold | None = None
    for hold in sorted(holds, key=lambda hold: hold.granted):
        if latest is not None and hold.granted < latest.end - GRAIN:
            found.append((latest, hold))
        if latest is None or hold.end > latest.end:
            latest = hold
    return found


def disorder(holds: Iterable[Hold]) -> list[tuple[Hold, Hold]]:
    """Return the pairs with one fence, or with a smaller one for who asked after the grant."""
    return [
        (one, other)
        for one, other in combinations(sorted(holds, key=lambda hold: hold.granted), 2)
        if one.fence == other.fence or (one.granted < other.asked and one.fence > other.fence)
    ]


class SimulatedNode:
    """A lock node: the Lua scripts in Python, over a dict with expiry."""

    #: Whether it repairs nothing once it gave a larger fence to another.
    heeds_fences = True

    def __init__(self, world: World, position: int, clock: Clock | SwingingClock) -> None:
        self.world = world
        self.position = position
        self.clock = clock
        self.store: dict[bytes, tuple[bytes, float]] = {}
        self.boots = 0
        self.is_up = True
        self.frozen_until = 0.0

    # -- as a server -------------------------------------------------------------

    @property
    def run_id(self) -> bytes:
        """Another one after every restart."""
        return b"%02d%038d" % (self.position, self.boots)

    def now_ms(self) -> float:
        """Return the node's wall clock [ms]."""
        return self.clock.read(self.world.now) * 1000.0

    def get(self, key: bytes) -> bytes | None:
        """Return a value, or None if there is none any more."""
        value, expires = self.store.get(key, (None, 0.0))
        return value if expires > self.now_ms() else None

    def put(self, key: bytes, value: bytes, ttl: bytes) -> None:
        """Store a value for *ttl* [ms]."""
        self.store[key] = (value, self.now_ms() + int(ttl))

    def pttl(self, key: bytes) -> int:
        """Return for how long a key stands yet [ms], -2 for one that does not exist."""
        return -2 if self.get(key) is None else int(self.store[key][1] - self.now_ms())

    def crash(self) -> None:
        """Lose all memory and end all connections."""
        self.is_up = False
        self.boots += 1
        self.store.clear()
        self.frozen_until = 0.0

    def execute(self, request: Request, boot_id: bytes) -> list[Any]:
        """Return the reply of a script, as a Redis client reads it."""
        run = {ACQUIRE: self.acquire, RENEW: self.renew, RELEASE: self.release, MARK: self.mark}
        boot = (boot_id,) if request.script.guarded else ()
        return run[request.script](request.keys, (*request.arguments, *boot))

    # -- the scripts -------------------------------------------------------------

    def standing(
        self, boot: bytes, quarantine: bytes, boot_id: bytes, length: bytes
    ) -> tuple[int, int]:
        """As GUARD: 1 if the node may vote."""
        if length == b"0":
            return 1, 0
        found = self.get(boot)
        if found != boot_id:
            if found is not None and found[:41] == boot_id[:41]:
                return -6, 0
            self.put(boot, boot_id, b"2592000000")
            self.put(quarantine, b"1", length)
        left = self.pttl(quarantine)
        return (1, 0) if left == -2 else (-2, left)

    def acquire(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """As ACQUIRE_LUA."""
        lock, fence_key, marker_key, boot, quarantine = keys
        token, info, ttl, proposed, retention, skew, length, boot_id = arguments
        now = int(self.now_ms())
        code, left = self.standing(boot, quarantine, boot_id, length)
        if code != 1:
            return [code, now, left]
        marker = self.get(marker_key) if marker_key != lock else None
        if marker is not None:
            return [-3, now, marker]
        held = self.get(lock)
        if held is not None and held[:TOKEN_LENGTH] != token:
            return [0, now, self.pttl(lock), held, self.get(fence_key) or b"0"]
        fence = b"0"
        if proposed != b"0":
            if int(proposed) > (now + int(skew)) * 4096:
                return [-5, now]
            fence = b"%d" % max(int(self.get(fence_key) or 0) + 1, int(proposed))
            self.put(fence_key, fence, retention)
        self.put(lock, token + info, ttl)
        return [1, now, fence]

    def renew(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """As RENEW_LUA."""
        lock, fence_key, boot, quarantine = keys
        token, info, ttl, least, retention, repair, length, boot_id = arguments
        now = int(self.now_ms())
        code, left = self.standing(boot, quarantine, boot_id, length)
        held = self.get(lock)
        kind = 1
        passed = self.heeds_fences and 0 < int(least) < int(self.get(fence_key) or 0)
        if held is None and repair == b"1" and not passed:
            kind = 2
        elif held is None or held[:TOKEN_LENGTH] != token:
            return [0, now, self.pttl(lock), held or b"", self.get(fence_key) or b"0"]
        self.put(lock, token + info, ttl)
        fence = b"0"
        if least != b"0":
            fence = b"%d" % max(int(self.get(fence_key) or 0), int(least))
            self.put(fence_key, fence, retention)
        return self.renewal_vote(kind, code, [now, fence], left)

    def renewal_vote(self, kind: int, code: int, told: list[Any], left: int) -> list[Any]:
        """Return what a renewal that was stored counts for: nothing in quarantine."""
        return [kind, *told] if code == 1 else [code, told[0], left]

    def release(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """As RELEASE_LUA."""
        lock, marker_key = keys
        token, kept, state, marker_ttl = arguments
        held = self.get(lock)
        mine = held is not None and self.is_owner(held, token)
        if mine and kept == b"0":
            del self.store[lock]
        elif mine:
            self.put(lock, held or b"", kept)
        if marker_key != lock and (state == b"done" or self.get(marker_key) != b"done"):
            self.put(marker_key, state, marker_ttl)
        return [1 if mine else 0, 0]

    def is_owner(self, held: bytes, token: bytes) -> bool:
        """Return whether the value of a lock begins with *token*, or with its owner's part."""
        return len(token) >= OWNER_LENGTH and held.startswith(token)

    def mark(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """As MARK_LUA."""
        state, ttl = arguments
        if ttl == b"0":
            if self.get(keys[0]) == state:
                del self.store[keys[0]]
        else:
            self.put(keys[0], state, ttl)
        return [1, 0]


class Link:
    """One client's way to one node: a connection at a time, each first in, first out."""

    def __init__(self, world: World, host: Host, node: SimulatedNode) -> None:
        self.world = world
        self.host = host
        self.node = node
        self.cut_until = 0.0
        self.connect()

    def connect(self) -> None:
        """Begin a new connection: it knows which process it leads to, and is in order."""
        self.is_broken = False
        self.number = getattr(self, "number", -1) + 1
        self.boots = self.node.boots
        self.boot_id = self.node.run_id + b":" + self.world.fingerprint
        self.last_up = self.last_down = 0.0

    def send(self, call: Call) -> None:
        """Send a call's request, or have it vote unreachable if there is no connection."""
        if self.is_broken:
            call.take(self.node.position, Vote(VoteKind.UNREACHABLE, reason="not connected"))
            return
        self.last_up = self._arrival(self.last_up, call.request)
        self.world.at(self.last_up, self._arrive, call, self.number, self.boots, self.boot_id)

    def _arrival(self, last: float, request: Request | None) -> float:
        arrival: float = max(self.world.now, self.cut_until) + self.world.delay(self, request)
        return max(arrival, last) if self.world.is_fifo else arrival

    def _arrive(self, call: Call, number: int, boots: int, boot_id: bytes) -> None:
        node, world = self.node, self.world
        if not node.is_up or node.boots != boots:
            return  # it was sent to a process that is no more
        if number != self.number and world.chance.random() < 0.5:
            return  # the connection broke; what the server had not read may be lost
        if node.frozen_until > world.now:
            world.at(node.frozen_until, self._arrive, call, number, boots, boot_id)
            return
        reply = node.execute(call.request, boot_id)
        if number == self.number:
            self.last_down = self._arrival(self.last_down, None)
            world.at(self.last_down, self.host.hear, self._take, call, number, reply)

    def _take(self, call: Call, number: int, reply: list[Any]) -> None:
        if number == self.number and not self.is_broken:
            vote = call.request.script.read(reply)
            self.world.met.add((call.request.script, vote.kind))
            call.take(self.node.position, vote)

    def break_off(self) -> None:
        """Break the connection: yes votes that came through it are void until it is decided."""
        if self.is_broken:
            return
        self.is_broken = True
        call = self.host.call
        if call is not None:
            call.withdraw(self.node.position, "connection lost")
            call.take(self.node.position, Vote(VoteKind.UNREACHABLE, reason="connection lost"))
            self.host.look()
        self._reconnect()

    def _reconnect(self) -> None:
        if self.node.is_up and self.cut_until <= self.world.now:
            self.connect()
        else:
            self.world.at(self.world.now + 0.02, self._reconnect)


class Host:
    """
    One client: a process on a machine with a clock of its own.

    Attributes:
        kernel: What `rounds.acquire` knows of the client.
        steps: What it is doing.
        call: What it is waiting for, if anything.
    """

    def __init__(self, world: World, number: int, clock: Clock, wall: Clock) -> None:
        self.world = world
        self.number = number
        self.clock = clock
        self.links: list[Link] = []
        self.tokens = 0
        self.kernel = Client(
            world.rules,
            tuple(f"node-{node.position}" for node in world.nodes),
            now=self.now,
            wall=lambda: wall.read(world.now),
            chance=world.chance.uniform,
            new_token=self.new_token,
        )
        self.steps: Process | None = None
        self.call: Call | None = None
        self.stopped_until = 0.0
        self.is_acquiring = False
        self._ticket = 0  # of the wait that is under way: what ends another one is stale

    def now(self) -> float:
        """Return what the client's clock shows [s]."""
        return self.clock.read(self.world.now)

    def new_token(self) -> str:
        """Return a token that nobody else has."""
        self.tokens += 1
        return f"{self.number:02d}{self.tokens:038d}"

    def run(self, steps: Process) -> None:
        """Begin to do what *steps* say."""
        self.steps = steps
        self._resume(self._ticket, None)

    def interrupt(self) -> None:
        """Raise `Interrupted` where the client is, if it is acquiring."""
        if self.is_acquiring and self.stopped_until <= self.world.now:
            self.call = None
            self._advance(lambda: self.steps.throw(Interrupted()))  # type: ignore[union-attr]

    def hear(self, what: Callable[..., None], *arguments: Any) -> None:
        """Do something as soon as the client runs: what came in while it stood still is read."""
        if self.stopped_until > self.world.now:
            self.world.at(self.stopped_until, self.hear, what, *arguments)
        else:
            what(*arguments)
            self.look()

    def look(self) -> None:
        """Go on if what is waited for is decided."""
        if self.call is not None and not self.call.is_open:
            if self.stopped_until > self.world.now:
                self.world.at(self.stopped_until, self.look)
            else:
                self._resume(self._ticket, self.call.ballot)

    def _resume(self, ticket: int, value: Any) -> None:
        if ticket != self._ticket:
            return
        if self.stopped_until > self.world.now:  # after all that it has yet to hear
            self.world.at(self.stopped_until + GRAIN, self._resume, ticket, value)
            return
        self.call = None
        self._advance(lambda: self.steps.send(value))  # type: ignore[union-attr]

    def _advance(self, step: Callable[[], Any]) -> None:
        """Do steps until one takes time."""
        self._ticket += 1
        try:
            doing = step()
            while isinstance(doing, Tell):
                self._send(Call(doing.request, len(self.links), None), doing.skip)
                doing = self.steps.send(None)  # type: ignore[union-attr]
        except StopIteration:
            return
        if isinstance(doing, Pause):
            self._wake_after(doing.seconds, None)
        else:
            self._ask(doing)

    def _ask(self, step: Ask) -> None:
        if step.request.script is ACQUIRE:
            self.world.asked[step.request.arguments[0].decode()] = self.world.now
        call = self.call = Call(step.request, len(self.links), step.decided)
        self._send(call)
        self._wake_after(self.world.rules.node_timeout, call.ballot)
        self.look()

    def _send(self, call: Call, skip: frozenset[int] = frozenset()) -> None:
        for link in self.links:
            if link.node.position not in skip:
                link.send(call)

    def _wake_after(self, seconds: float, value: Any) -> None:
        due = self.world.now + seconds / self.clock.rate
        self.world.at(due, self._resume, self._ticket, value)


class Crew:
    """
    What clients do all day: take the lock, hold it for a while, renew, give it back.

    Args:
        world: Where they live.
        until: When they stop [s, true time]; afterwards each takes the lock once more.
        fence: Whether they ask for fences.
        hold: How long they hold the lock on average [ttl], and rest at most.
    """

    def __init__(
        self, world: World, until: float, *, fence: bool = True, hold: float = 1.0
    ) -> None:
        self.world = world
        self.until = until
        self.fence = fence
        self.length = hold * world.rules.ttl

    def work(self, host: Host) -> Process:
        """Yield what one client does."""
        world, chance, ttl = self.world, self.world.chance, self.world.rules.ttl
        while world.now < self.until:
            yield Pause(chance.uniform(0.0, self.length / 2))
            lease = yield from self.take(host, chance.uniform(0.0, 2 * ttl))
            if lease is not None:
                yield from self.hold(host, lease, chance.expovariate(1.0 / self.length))
        # All is well again, and whatever was left behind has lapsed.
        yield Pause(world.rules.quarantine + 2 * ttl)
        lease = yield from self.take(host, wait=20.0)
        if lease is not None:
            self.end(lease)
            yield self.release(host, lease)
            world.progressed.add(host.number)

    def take(self, host: Host, wait: float) -> Generator[Any, Any, Lease | None]:
        """Acquire the lock, None if that fails."""
        host.is_acquiring = True
        wanted = Wanted(NAME, self.world.rules.ttl, wait, fence=self.fence)
        try:
            lease = yield from acquire(host.kernel, wanted)
        except (LockNotAcquired, Interrupted):
            return None
        finally:
            host.is_acquiring = False
        self.world.granted(host, lease)
        return lease

    def hold(self, host: Host, lease: Lease, length: float) -> Process:
        """Hold the lock for *length* [s], renewing it as the watchdog would, or not at all."""
        habit = self.world.chance.random()
        ends = host.now() + length
        due = renew_at(host.now(), lease.ttl) if habit < 0.8 else float("inf")
        while host.now() < ends and not self.is_over(host, lease):
            if host.now() >= due:
                lease, due = yield from self.renew(host, lease)
            yield Pause(max(0.0, min(due, ends, self.deadline(lease)) - host.now()) + GRAIN)
        if habit > 0.9:
            return
        self.end(lease)
        yield self.release(host, lease)

    def renew(self, host: Host, lease: Lease) -> Generator[Any, Any, tuple[Lease, float]]:
        """Return the lease after one renewal, and when the next one is due [s]."""
        renewal = Renewal(host.kernel, lease)
        ballot = yield Ask(renewal.request(), renewal.decided)
        outcome = renewal.outcome(ballot)
        if isinstance(outcome, str) or self.is_over(host, lease):  # as HeldLock.renewed has it
            self.end(lease)
            return replace(lease, valid_until=LOST), float("inf")
        if isinstance(outcome, Lease):
            self.world.renewed(host, outcome)
            return outcome, renew_at(renewal.started, lease.ttl)
        return lease, renewal.started + lease.ttl / 12.0 * self.world.chance.uniform(0.75, 1.25)

    def is_over(self, host: Host, lease: Lease) -> bool:
        """Return whether the holder's own clock says that its lease has ended."""
        return host.now() >= self.deadline(lease)

    def deadline(self, lease: Lease) -> float:
        """Return when the holder stops on its own [s, its clock]."""
        return lease.valid_until

    def end(self, lease: Lease) -> None:
        """Note that the holder trusts its lock no longer."""
        hold = self.world.held[lease.token]
        hold.ended = min(hold.ended, self.world.now)

    def release(self, host: Host, lease: Lease) -> Tell:
        """Return what gives the lock back."""
        return Tell(release_request(self.world.rules, lease.name, lease.token))


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
        is_fifo: Whether a client's messages to a node stay in order.
        delay: How long messages are under way; random by default.
        holds: All grants so far.
        held: The last one of each token.
        asked: When a token was last sent in an acquire.
        progressed: Numbers of the clients that got the lock when all was well again.
        met: Which answers came to which requests.
    """

    seed: int = 0
    size: int = 3
    crew: int = 3
    rules: Rules = RULES
    chaos: Chaos = CALM
    is_fifo: bool = True
    delay: Any = None  # a Delay once made
    now: float = 0.0
    holds: list[Hold] = field(default_factory=list)
    held: dict[str, Hold] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    progressed: set[int] = field(default_factory=set)
    met: set[tuple[Script, VoteKind]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.fingerprint = b"%016d" % self.size
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.delay = self.delay or self.random_delay
        self.nodes = [SimulatedNode(self, i, self._node_clock()) for i in range(self.size)]
        for node in self.nodes:  # enrolled long ago
            node.put(b"redlock:node:boot", node.run_id + b":" + self.fingerprint, b"2592000000")
        self.hosts = [
            Host(self, i, self._host_clock(), Clock(self._skewed())) for i in range(self.crew)
        ]
        for host in self.hosts:
            host.links = [Link(self, host, node) for node in self.nodes]

    def _skewed(self) -> float:
        return BEGIN + self.chance.uniform(-self.chaos.skew, self.chaos.skew)

    def _node_clock(self) -> SwingingClock:
        rate, phase = self.chance.uniform(0.0, self.chaos.rate), self.chance.uniform(0, 4 * SWING)
        return SwingingClock(self._skewed(), rate, phase)

    def _host_clock(self) -> Clock:
        rate = self.chance.uniform(-self.chaos.rate, self.chaos.rate)
        return Clock(self.chance.uniform(0.0, 1000.0), 1.0 + rate)

    def random_delay(self, _link: Link, _request: Request | None) -> float:
        """Return how long a message is under way [s]: mostly short, now and then very long."""
        if self.chance.random() < self.chaos.slow:
            return self.chance.uniform(0.0, 2 * self.rules.ttl)
        return self.chance.uniform(0.0002, 0.004)

    # -- time ----------------------------------------------------------------------

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        """Have something happen at the true time *when* [s], after what was planned before."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, what, arguments))

    def run(self, until: float = float("inf")) -> None:
        """Let happen all that is planned up to *until* [s]."""
        while self._heap and self._heap[0][0] <= until:
            when, _, what, arguments = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            what(*arguments)

    def live(self, seconds: float, **crew_does: Any) -> World:
        """Let everybody work for *seconds* while things go wrong, and then in peace."""
        crew = Crew(self, seconds, **crew_does)
        for host in self.hosts:
            host.run(crew.work(host))
        for name, happen in self._faults().items():
            self._plan(getattr(self.chaos, name), happen, seconds)
        self.run()
        return self

    # -- what goes wrong -----------------------------------------------------------

    def _faults(self) -> dict[str, Callable[[], None]]:
        chance, ttl = self.chance, self.rules.ttl
        return {
            "crash": lambda: self.crash(chance.choice(self.nodes), chance.uniform(0.0, ttl)),
            "freeze": lambda: self.freeze(chance.choice(self.nodes), chance.uniform(0.0, 2 * ttl)),
            "stop": lambda: self.stop(chance.choice(self.hosts), chance.uniform(0.0, 2 * ttl)),
            "cut": lambda: self.cut(self._some_link(), chance.uniform(0.0, 4 * ttl)),
            "reset": lambda: self._some_link().break_off(),
            "interrupt": lambda: chance.choice(self.hosts).interrupt(),
        }

    def _plan(self, rate: float, happen: Callable[[], None], until: float) -> None:
        when = self.chance.expovariate(rate) if rate else until
        while when < until:
            self.at(when, happen)
            when += self.chance.expovariate(rate)

    def _some_link(self) -> Link:
        return self.chance.choice(self.chance.choice(self.hosts).links)

    def crash(self, node: SimulatedNode, length: float) -> None:
        """Have a node lose its memory and come back after *length* [s]."""
        if not node.is_up:
            return
        node.crash()
        self.at(self.now + length, setattr, node, "is_up", True)
        for host in self.hosts:  # each learns of it when it does
            self.at(
                self.now + self.delay(host.links[node.position], None), self._notice, host, node
            )

    def _notice(self, host: Host, node: SimulatedNode) -> None:
        link = host.links[node.position]
        if link.boots != node.boots:
            host.hear(link.break_off)

    def freeze(self, node: SimulatedNode, length: float) -> None:
        """Have a node stand still for *length* [s]."""
        if node.is_up:
            node.frozen_until = max(node.frozen_until, self.now + length)

    def stop(self, host: Host, length: float) -> None:
        """Have a client stand still for *length* [s]."""
        host.stopped_until = max(host.stopped_until, self.now + length)

    def cut(self, link: Link, length: float) -> None:
        """Keep a client and a node from hearing each other for *length* [s]."""
        link.cut_until = max(link.cut_until, self.now + length)

    # -- what is noted -------------------------------------------------------------

    def granted(self, host: Host, lease: Lease) -> None:
        """Note a grant."""
        until = host.clock.when(lease.valid_until)
        hold = Hold(lease.token, lease.fence or 0, self.asked[lease.token], self.now, until)
        self.held[lease.token] = hold
        self.holds.append(hold)

    def renewed(self, host: Host, lease: Lease) -> None:
        """Note that a lease goes on."""
        self.held[lease.token].until = host.clock.when(lease.valid_until)

    def overlaps(self) -> list[tuple[Hold, Hold]]:
        """Return who trusted the lock at the same time."""
        return overlaps(self.holds)

    def disorder(self) -> list[tuple[Hold, Hold]]:
        """Return whose fences are equal or out of order."""
        return disorder(self.holds)

    def leftovers(self) -> list[bytes]:
        """Return the locks that any node still stores."""
        return [
            value
            for node in self.nodes
            for key in list(node.store)
            if b":lock:" in key and (value := node.get(key)) is not None
        ]
