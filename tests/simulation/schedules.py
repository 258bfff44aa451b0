"""
Directed schedules: narrow races that chance does not find, and counterexamples that it found.

Each plays one story to its end and returns the laws that were broken in it, in words; with all
guards on none are. `MOST` tells which guards, off together, let each of them go wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from celery_redlock.errors import LockNotAcquired
from celery_redlock.lock.algorithm.acquiring import acquire
from celery_redlock.lock.algorithm.effects import Ask, Send, Sleep
from celery_redlock.lock.algorithm.renewal import Renewal
from celery_redlock.lock.algorithm.request import LockRequest, MarkerStands
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.nodes.link import Gone
from celery_redlock.lock.records import Keys, marker_key
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import Marker, probe_request, release_request
from simulation.clocks import BEGIN
from simulation.crew import NAME, Crew
from simulation.faults import Chaos
from simulation.hosts import Host, Process
from simulation.network import Link
from simulation.world import RULES, World

__all__ = ["BREAKS", "SCHEDULES", "broken"]

A, B, C = 0, 1, 2
X, Y = 0, 1
KEYS = Keys.of("redlock", NAME)


class Schedule(World):
    """Nodes, clients x and y, right clocks; each message takes as long as it is told."""

    def __init__(self, rules: Rules = RULES, size: int = 3, crew: int = 2, **more: Any) -> None:
        self.ways: dict[tuple[int, int], list[float]] = {}
        super().__init__(
            size=size,
            crew=crew,
            rules=rules,
            chaos=Chaos(rate=0.0, skew=0.0),
            delay=self.told_delay,
            still_read=1.0,
            **more,
        )
        self.people = Crew(self, until=0.0, limit=self.limit)
        self.x, self.y, *_ = self.hosts

    def told_delay(self, link: Link, command: list[bytes] | None) -> float:
        """Return the next delay of a client's messages to a node; a millisecond is usual."""
        ways = self.ways.get((link.host.number, link.position)) if command else None
        return ways.pop(0) if ways else 0.001

    def count_from_here(self) -> int:
        """Set back all clients' wall clocks, so that nodes count by one; return a fence of now."""
        for host in self.hosts:
            host.wall = replace(host.wall, offset=host.wall.offset - 100.0)
        return int(BEGIN * 1000) << 12

    def granted_to(self, host: Host) -> Generator[Any, Any, Lease]:
        """Yield what takes the lock now, which nobody else holds; return the lease."""
        lease = yield from self.people.take(host, wait=0.0)
        assert lease is not None
        return lease

    def take_and_release(self, host: Host, at: float, length: float = 0.0) -> Process:
        """Yield what takes the lock at a time, holds it, and gives it back."""
        yield Sleep(at)
        lease = yield from self.people.take(host, wait=0.0)
        if lease is not None:
            yield Sleep(length)
            self.people.end(lease)
            yield give_back(host, lease)

    def take_and_renew(self, host: Host, *times: float) -> Process:
        """Yield what takes the lock now and renews it at some times."""
        held = HeldLock((yield from self.granted_to(host)))
        for at in times:
            yield Sleep(at - self.now)
            yield from self.people.renew(host, held)
            if held.is_lost:
                return

    def take_and_extend(self, host: Host, *times: float) -> Process:
        """Yield what takes the lock now and extends it at some times, as `Redlock.extend`."""
        lease = yield from self.granted_to(host)
        for at in times:
            yield Sleep(at - self.now)
            renewal = Renewal(host.kernel, lease)
            outcome = renewal.outcome((yield Ask(renewal.request(), renewal.decided)))
            if isinstance(outcome, Lease):
                self.renewed(outcome, host.clock.when(outcome.valid_until))
                lease = outcome
            elif outcome is not None:
                self.people.end(lease)
                return


def give_back(host: Host, lease: Lease, marker: Marker | None = None) -> Send:
    return Send(release_request(host.rules, lease.name, lease.token, marker=marker))


def broken(world: World) -> list[str]:
    overlaps = [f"two held it: {one} and {other}" for one, other in world.overlaps()]
    return overlaps + [f"fences out of order: {a} and {b}" for a, b in world.disorder()]


# -- fences -----------------------------------------------------------------------------------


def late_confirmation(*, is_cut_off: bool = False) -> list[str]:
    """
    Let y ask C and B, sleep past its lease on C, and confirm on A and B.

    While it sleeps x is granted A and C, and is done. Numbers: B gives y 2 and C gives it
    1; A and C give x 2. When y is back, A has counted on to 3 for it, and B stores 2.
    Or, with *is_cut_off*, y's first question never reaches A, where nobody's key is then.
    """
    world = Schedule()
    base = world.count_from_here()
    for node, stored in zip(world.nodes, (base + 1, base + 1, base), strict=True):
        node.put(KEYS.fence, b"%d" % stored, b"3600000")
    world.ways = {(Y, A): [0.309], (Y, B): [0.045]}
    if is_cut_off:
        world.y.links[A].sever()
        world.at(0.2, world.y.links[A].connect)
    world.y.run(world.take_and_release(world.y, at=0.0))
    world.at(0.0455, world.stop, world.y, 0.265)
    world.x.run(world.take_and_release(world.x, at=0.3015))
    world.run()
    return broken(world)


def cut_off_confirmation() -> list[str]:
    """As `late_confirmation`, but y's first question never reaches A."""
    return late_confirmation(is_cut_off=True)


def two_smallest() -> list[str]:
    """Let the nodes' numbers differ, and x and y take the lock one after the other."""
    world = Schedule()
    base = world.count_from_here()
    for node, stored in zip(world.nodes, (base + 9, base + 5, base), strict=True):
        node.put(KEYS.fence, b"%d" % stored, b"3600000")
    world.y.links[A].sever()
    world.x.links[C].sever()
    world.x.run(world.take_and_release(world.x, at=0.0, length=0.01))
    world.y.run(world.take_and_release(world.y, at=0.1, length=0.01))
    world.run(1.0)
    return broken(world)


def told_nobody() -> list[str]:
    """As `two_smallest`: what x was given has to be on B, of which y hears."""
    return two_smallest()


def clock_set_back() -> list[str]:
    """Let x's successor y have a clock that is behind: nodes have to count on by themselves."""
    world = Schedule()
    world.y.wall = replace(world.y.wall, offset=world.y.wall.offset - 0.2)
    world.x.run(world.take_and_release(world.x, at=0.0, length=0.01))
    world.y.run(world.take_and_release(world.y, at=0.05, length=0.01))
    world.run()
    return broken(world)


def clock_of_next_year() -> list[str]:
    """Let x's wall clock be a year ahead: its numbers would make those of all others worthless."""
    world = Schedule()
    world.x.wall = replace(world.x.wall, offset=world.x.wall.offset + 365 * 86400)
    world.x.run(world.take_and_release(world.x, at=0.0, length=0.01))
    world.y.run(world.take_and_release(world.y, at=0.1, length=0.01))
    world.run()
    latest = int((BEGIN + 60) * 1000) << 12
    far = [hold.fence for hold in world.holds if hold.fence > latest]
    return broken(world) + [f"a fence of next year: {fence}" for fence in far]


def planted_fence() -> list[str]:
    """Let somebody set the largest fence there is on A, and x, y and x take the lock in turn."""
    world = Schedule()
    world.nodes[A].put(KEYS.fence, b"%d" % 2**53, b"3600000")
    for at, host in ((0.0, world.x), (0.05, world.y), (0.1, world.x)):
        world.at(at, lambda host=host: host.run(world.take_and_release(host, at=0.0, length=0.01)))
    world.run()
    return broken(world)


def stray_fence() -> list[str]:
    """Let A say that its fence is the largest there is, and x take the lock twice."""
    world = Schedule()
    world.nodes[A].lies = lambda reply: [*reply[:2], b"%d" % 2**53] if is_grant(reply) else reply
    for at in (0.0, 0.1):
        world.at(at, lambda: world.x.run(world.take_and_release(world.x, at=0.0, length=0.01)))
    world.run()
    count = len(world.holds)
    return broken(world) + ([] if count == 2 else [f"x was granted the lock {count} times"])


def is_grant(reply: Any) -> bool:
    """Return whether a node grants, or confirms, with a fence."""
    return isinstance(reply, list) and len(reply) == 3 and reply[0] == 1 and reply[2] != b"0"


# -- leases --------------------------------------------------------------------------------------


def slow_quorum() -> list[str]:
    """Let x stand still while its answers lie there, and y take the lock when x's keys lapse."""
    world = Schedule()
    world.x.run(world.take_and_release(world.x, at=0.0, length=1.0))
    world.at(0.0015, world.stop, world.x, 0.15)
    world.y.run(world.take_and_release(world.y, at=0.305, length=0.01))
    world.run()
    return broken(world)


def slow_clock() -> list[str]:
    """Let x's clock run 4 % slow, and y take the lock when x's keys lapse."""
    world = Schedule()
    world.x.clock = replace(world.x.clock, rate=0.96)
    world.x.run(world.take_and_release(world.x, at=0.0, length=1.0))
    world.y.run(world.take_and_release(world.y, at=0.3025, length=0.01))
    world.run()
    return broken(world)


def too_late_to_be_of_use() -> list[str]:
    """Let x read its quorum's answers when most of its lease is over."""
    world = Schedule()
    world.x.run(world.take_and_release(world.x, at=0.0, length=0.01))
    world.at(0.0015, world.stop, world.x, 0.25)
    world.run()
    short = [hold for hold in world.holds if hold.until - hold.granted < RULES.ttl / 3 - 1e-9]
    return broken(world) + [f"of no use: {hold}" for hold in short]


# -- renewals ------------------------------------------------------------------------------------


def repair_in_quarantine(*, y_learns: bool) -> list[str]:
    """
    Let x hold A and B; y is granted C, which then loses its memory; x renews on A and C twice.

    B's copy of x's key lapses, y's message arrives there, and y has B and what C said
    before its crash. (PROTOCOL 3.4, option 5)
    """
    world = Schedule()
    world.x.links[C].sever()
    world.x.run(world.take_and_renew(world.x, 0.273, 0.278))
    world.ways = {(Y, B): [0.039]}
    world.y.run(world.take_and_release(world.y, at=0.263, length=0.1))
    node = world.nodes[C]
    world.at(0.266, node.crash)
    world.at(0.267, node.start)
    world.at(0.268, world.x.links[C].connect)
    world.at(0.272, world.x.links[B].sever)
    if y_learns:
        world.at(0.290, world.y.links[C].lose, Gone("crashed"))
    world.run(3.0)
    return broken(world)


def repair_that_y_learns_of() -> list[str]:
    """As `repair_in_quarantine`, but y learns in time that C has crashed."""
    return repair_in_quarantine(y_learns=True)


def repair_that_y_does_not_see() -> list[str]:
    """As `repair_in_quarantine`, and y does not learn of the crash in time."""
    return repair_in_quarantine(y_learns=False)


def late_renewal() -> list[str]:
    """Let x extend in time, while the nodes hear of it after y took the lock and gave it back."""
    world = Schedule()
    world.ways = {(X, node): [0.001, 0.042] for node in (A, B, C)}
    world.x.run(world.take_and_extend(world.x, 0.280, 0.350))
    world.y.run(world.take_and_release(world.y, at=0.3055, length=0.003))
    world.run()
    return broken(world)


def revived() -> list[str]:
    """Let x's renewal be lost, y take the lock after x's lease, and x go on until it is told."""
    world = Schedule()
    world.ways = {(X, node): [0.001, 5.0] for node in (A, B, C)}

    def deaf() -> Process:
        lease = yield from world.granted_to(world.x)
        held = HeldLock(lease)
        yield Sleep(0.1)
        yield from world.people.renew(world.x, held)
        yield Sleep(0.4)
        if held.is_lost:
            world.people.end(lease)

    world.x.run(deaf())
    world.y.run(world.take_and_release(world.y, at=0.31, length=0.01))
    world.run(2.0)
    return broken(world)


def taken_away() -> list[str]:
    """
    Let an operator release x's lock, y have it for a moment, and then x renew.

    Whoever is told that its key was missing on a majority may not go on: y has been there.
    Without fences, for with them the nodes know.
    """
    world = Schedule()
    world.people.fence = False
    world.x.run(world.take_and_renew(world.x, 0.15, 0.17))
    for node in world.nodes:
        world.at(0.1, node.delete, KEYS.lock)
    world.y.run(world.take_and_release(world.y, at=0.11, length=0.01))
    world.run()
    (x, y) = world.holds
    late = [f"it goes on although y had it: {x}"] if x.end > 0.28 and y.granted < 0.28 else []
    return late if world.held[x.token].until > 0.3 else []


def first_answers() -> list[str]:
    """
    Let an operator release x's lock on A and B, y have it for a moment, and then x renew.

    Of those that missed its key A answers at once, and B after C, which kept it.
    Without fences, for with them the nodes know.
    """
    world = Schedule()
    world.people.fence = False
    world.ways = {(X, B): [0.001, 0.005]}
    world.x.run(world.take_and_renew(world.x, 0.15))
    for node in (A, B):
        world.at(0.1, world.nodes[node].delete, KEYS.lock)
    world.y.run(world.take_and_release(world.y, at=0.11, length=0.01))
    world.run()
    (x, y) = world.holds
    late = [f"it goes on although y had it: {x}"] if x.end > 0.28 and y.granted < 0.28 else []
    return late if world.held[x.token].until > 0.3 else []


def late_for_another() -> list[str]:
    """Let x renew in time, while the nodes hear of it when y has the lock already."""
    world = Schedule()
    world.ways = {(X, node): [0.001, 0.030] for node in (A, B, C)}
    world.x.run(world.take_and_renew(world.x, 0.280))
    world.y.run(world.take_and_release(world.y, at=0.305, length=0.2))
    world.run(0.35)
    owners = {(node.get(KEYS.lock) or b"")[:2] for node in world.nodes}
    return broken(world) + ([f"y's keys were taken over: {owners}"] if b"00" in owners else [])


# -- what is left behind --------------------------------------------------------------------------


def attempt_in_vain() -> list[str]:
    """Let y hold A and B, and x ask: C grants it, and has to be told that it was in vain."""
    world = Schedule()
    world.y.links[C].sever()
    world.y.run(world.take_and_release(world.y, at=0.0, length=0.2))
    world.x.run(world.take_and_release(world.x, at=0.05))
    world.run(0.15)
    left = world.nodes[C].get(KEYS.lock)
    return [f"an attempt left its key: {left!r}"] if left else []


def release_without_connection() -> list[str]:
    """Let x lose its connection to C before it releases, and find it again soon after."""
    world = Schedule()
    world.x.run(world.take_and_release(world.x, at=0.0, length=0.05))
    world.at(0.04, world.x.links[C].sever)
    world.at(0.10, world.x.links[C].connect)
    world.run(0.15)
    left = world.nodes[C].get(KEYS.lock)
    return [f"a release was lost: {left!r}"] if left else []


def small_buffers() -> list[str]:
    """Let a connection take a hundred bytes at a time, and x take the lock and give it back."""
    world = Schedule()
    world.room = 100
    world.x.run(world.take_and_release(world.x, at=0.0))
    world.run()
    left = [node for node in world.nodes if node.get(KEYS.lock)]
    return [] if world.holds and not left else [f"not granted, or left on {len(left)} nodes"]


def late_release() -> list[str]:
    """
    Let x give up an attempt at A that is slow, and connect anew and try again.

    What was sent down the old connection is read in the end: the release of the first attempt
    must not undo the second. Then y asks A and C.
    """
    world = Schedule()
    a, b, c = world.x.links
    b.sever()
    c.sever()
    world.ways = {(X, A): [0.05, 0.06]}
    world.x.run(world.take_and_release(world.x, at=0.0))
    for link in (a, b):
        world.at(0.07, link.sever)
        world.at(0.075, link.connect)
    world.at(0.08, lambda: world.x.run(world.take_and_release(world.x, at=0.0, length=0.15)))
    world.y.run(world.take_and_release(world.y, at=0.125, length=0.01))
    world.run(0.4)
    return broken(world)


def no_end() -> list[str]:
    """Let x take the lock and forget it."""
    world = Schedule()
    world.x.run(world.people.take(world.x, wait=0.0))
    world.run()
    return [f"a key without an end: {key!r}" for key in world.immortal()]


def late_word() -> list[str]:
    """Let an execution be marked as finishing after it was marked as done."""
    world = Schedule()
    marker = marker_key("redlock", "run:1")

    def finish() -> Process:
        lease = yield from world.granted_to(world.x)
        world.people.end(lease)
        for state in ("done", "finishing"):
            yield give_back(world.x, lease, Marker("run:1", state, 60.0))

    world.x.run(finish())
    world.run()
    states = {node.get(marker) for node in world.nodes}
    return [f"it is {states}, not done"] if states != {b"done"} else []


def redelivered(world: Schedule, at: float, unsevered: tuple[int, ...] = (A, B, C)) -> list[str]:
    """Let y run a copy of the execution run:1 at a time, and return what became of it."""
    became = []
    for node in {A, B, C} - set(unsevered):
        world.y.links[node].sever()

    def come() -> Process:
        yield Sleep(at)
        try:
            yield from acquire(world.y.kernel, LockRequest(NAME, RULES.ttl, marker="run:1"))
            became.append("it ran")
        except MarkerStands as marker:
            became.append(f"its marker stands: {marker.state!r}")
        except LockNotAcquired as error:
            became.append(type(error).__name__)

    world.y.run(come())
    world.run()
    return became


def planted_marker() -> list[str]:
    """Let somebody say on A that the execution run:1 has finished, which has yet to run."""
    world = Schedule()
    world.nodes[A].put(marker_key("redlock", "run:1"), b"done", b"3600000")
    return [became for became in redelivered(world, 0.0) if became != "it ran"]


def planted_word() -> list[str]:
    """Let somebody say on A that the execution run:1 is done, whose result is not stored yet."""
    world = Schedule()
    for node, state in zip(world.nodes, (b"done", b"finishing", b"finishing"), strict=True):
        node.put(marker_key("redlock", "run:1"), state, b"3600000")
    return [became for became in redelivered(world, 0.0) if "done" in became]


def finished_out_of_sight() -> list[str]:
    """
    Let x finish the execution run:1 while C is down, and y, which sees A and C, get a copy of it.

    C lost its memory and is in quarantine. A task that runs unlocked where no quorum can decide
    would run once more, and one that fails would lose its result.
    """
    world = Schedule()
    world.x.links[C].sever()
    world.crash(world.nodes[C], 0.1)

    def finish() -> Process:
        lease = yield from world.granted_to(world.x)
        yield Sleep(0.05)
        world.people.end(lease)
        yield give_back(world.x, lease, Marker("run:1", "done", 60.0))

    world.x.run(finish())
    became = redelivered(world, 0.2, unsevered=(A, C))
    return [what for what in became if "marker" not in what]


# -- nodes ---------------------------------------------------------------------------------------


def amnesia() -> list[str]:
    """Let x hold A and B, B lose its memory, and y, which has connected again, ask B and C."""
    world = Schedule(replace(RULES, ttl=3.0, max_ttl=3.0))
    world.x.links[C].sever()
    world.x.run(world.take_and_release(world.x, at=0.0, length=2.0))
    world.at(0.05, world.crash, world.nodes[B], 0.001)
    world.y.run(world.take_and_release(world.y, at=0.1))
    world.at(1.5, lambda: world.y.run(world.take_and_release(world.y, at=0.0, length=0.01)))
    world.run(4.0)
    return broken(world)


def late_boot_clock() -> list[str]:
    """Let all nodes lose their memory, come back and look old as their clocks are set; y asks."""
    world = Schedule(replace(RULES, ttl=3.0, max_ttl=3.0))
    world.x.run(world.take_and_release(world.x, at=0.0, length=2.0))
    for node in world.nodes:
        node.aged = 1e6
        world.at(0.05, world.crash, node, 0.1)
    world.y.run(world.take_and_release(world.y, at=0.1))  # it connects again
    world.at(1.0, lambda: world.y.run(world.take_and_release(world.y, at=0.0, length=0.1)))
    world.run(4.0)
    return broken(world)


def looked_at_late() -> list[str]:
    """Let x hold the lock of the only node, which loses its memory; y finds it two seconds up."""
    world = Schedule(replace(RULES, ttl=3.0, max_ttl=3.0), size=1)
    world.x.run(world.take_and_release(world.x, at=0.0, length=2.8))
    for host in (world.x, world.y):  # nobody is to see it before
        world.at(0.04, host.links[A].sever)
    world.at(0.05, world.crash, world.nodes[A], 0.1)
    world.at(2.3, world.y.links[A].connect)
    world.y.run(world.take_and_release(world.y, at=2.4, length=0.1))
    world.run(4.0)
    return broken(world)


def flushed_out_of_sight() -> list[str]:
    """Let x hold the lock of the only node, up for long, which is flushed; y connects again."""
    world = Schedule(replace(RULES, ttl=3.0, max_ttl=3.0), size=1)
    world.nodes[A].aged = 100.0
    world.x.run(world.take_and_release(world.x, at=0.0, length=1.0))
    for host in (world.x, world.y):  # or it would find its mark gone, and quarantine the node
        world.at(0.04, host.links[A].sever)
    world.at(0.05, world.nodes[A].flush)
    world.at(0.1, world.y.links[A].connect)
    world.y.run(world.take_and_release(world.y, at=0.2, length=0.1))
    world.run(2.0)
    return broken(world)


def empty_heir() -> list[str]:
    """Let x hold the only node, and another server take its place that is old and knows nothing."""
    world = Schedule(replace(RULES, ttl=3.0, max_ttl=3.0), size=1)
    (node,) = world.nodes
    world.x.run(world.take_and_release(world.x, at=0.0, length=2.0))

    def come_after() -> None:
        world.crash(node, 0.001)
        node.aged, node.has_succeeded = 1e6, True

    world.at(0.05, come_after)
    world.y.run(world.take_and_release(world.y, at=0.1))  # it connects
    world.at(1.0, lambda: world.y.run(world.take_and_release(world.y, at=0.0, length=0.1)))
    world.run(4.0)
    return broken(world)


def minority() -> list[str]:
    """Let x hear of A and B alone, and y of C alone."""
    world = Schedule()
    world.people.fence = False
    world.x.links[C].sever()
    world.y.links[A].sever()
    world.y.links[B].sever()
    world.x.run(world.take_and_release(world.x, at=0.0, length=0.2))
    world.y.run(world.take_and_release(world.y, at=0.05, length=0.01))
    world.run(0.4)
    return broken(world)


def anybodys_release() -> list[str]:
    """Let x ask for what y holds, and take its attempt back on every node."""
    world = Schedule()
    world.y.run(world.take_and_release(world.y, at=0.0, length=0.2))

    def ask_and_undo() -> Process:
        yield Sleep(0.05)
        yield Send(release_request(world.rules, NAME, "f" * 40))
        yield Sleep(0.01)
        yield from world.take_and_release(world.x, at=0.0, length=0.01)

    world.x.run(ask_and_undo())
    world.run()
    return broken(world)


def jumping_clock(*, is_new_connection: bool = False) -> list[str]:
    """Let x hold A and B, A's clock jump past its lease, and y ask A and C."""
    rules = replace(RULES, ttl=3.0, max_ttl=3.0)
    world = Schedule(rules)
    world.x.links[C].sever()
    world.y.run(world.take_and_release(world.y, at=0.0))
    world.x.run(world.take_and_release(world.x, at=0.1, length=2.0))
    world.at(0.5, world.clocks[A].step, 3.0)
    if is_new_connection:
        world.at(0.6, world.y.links[A].lose, Gone("reset"))
    world.y.run(world.take_and_release(world.y, at=0.0))
    world.at(1.0, lambda: world.y.run(world.take_and_release(world.y, at=0.0, length=0.1)))
    world.run(8.0)
    return broken(world)


def jump_between_connections() -> list[str]:
    """As `jumping_clock`, but y has to connect again in between. Found by chance."""
    return jumping_clock(is_new_connection=True)


def clock_that_stood_still() -> list[str]:
    """
    Let x's machine stand still, and x look at the nodes: to it, all have been set forward.

    y has held another lock all the while, and renews it.
    """
    world = Schedule(replace(RULES, ttl=3.0, max_ttl=3.0))
    world.x.run(world.take_and_release(world.x, at=0.0))
    world.y.run(world.take_and_release(world.y, at=0.1))
    world.at(0.5, world.halt, world.x, 0.5)
    world.at(1.1, lambda: world.x.run(world.take_and_release(world.x, at=0.0)))
    world.at(1.5, lambda: world.y.run(world.take_and_release(world.y, at=0.0, length=0.01)))
    world.run(2.0)
    held_back = [node.position for node in world.nodes if node.get(KEYS.quarantine)]
    blamed = [f"nodes were quarantined for x's clock: {held_back}"] if held_back else []
    return broken(world) + blamed


def lease_that_stood_still() -> list[str]:
    """
    Let x's machine stand still while it holds the lock, and x look at the nodes before it ends.

    Its keys end when they would have; so must its lease, and y then takes the lock.
    """
    world = Schedule(replace(RULES, ttl=3.0, max_ttl=3.0))
    world.at(0.5, world.halt, world.x, 1.0)

    def take_and_look() -> Process:
        yield from world.granted_to(world.x)
        yield Sleep(2.0)
        yield Ask(probe_request(world.rules), lambda _: False)

    world.x.run(take_and_look())
    world.y.run(world.take_and_release(world.y, at=3.1, length=0.1))
    world.run(5.0)
    return broken(world)


def promoted_again(*, is_new_connection: bool = True) -> list[str]:
    """
    Let x hold A and B, B be a replica of an older copy of itself for a moment, and y ask B and C.

    It is the same process, and has the marker of its enrolment still.
    """
    world = Schedule(replace(RULES, ttl=3.0, max_ttl=3.0))
    b = world.nodes[B]
    for node in world.nodes:
        node.put(KEYS.boot + b":history", node.history, b"2592000000")
    copy = dict(b.store)
    world.x.links[C].sever()
    world.x.run(world.take_and_release(world.x, at=0.0, length=2.0))
    world.at(0.5, b.follow, copy, b"another")

    def look_and_take() -> Process:
        yield Sleep(1.0)
        if not is_new_connection:
            yield Ask(probe_request(world.rules), lambda _: False)
        yield from world.take_and_release(world.y, at=0.0, length=0.01)

    if is_new_connection:
        world.at(0.6, world.y.links[B].lose, Gone("reset"))
    world.y.run(look_and_take())
    world.run(4.0)
    return broken(world)


def promoted_behind_a_connection() -> list[str]:
    """As `promoted_again`, and y's connection lasts; as workers do, y looks at the nodes."""
    return promoted_again(is_new_connection=False)


def evicted(*, is_known: bool = True) -> list[str]:
    """
    Let x hold the lock on the one node there is, and y ask for it once the node has evicted it.

    y has been connected all the while; as it does when it *is_known* that the node may evict.
    """
    world = Schedule(replace(RULES, ttl=3.0, max_ttl=3.0), size=1)
    node = world.nodes[A]
    node.policy = "volatile-ttl" if is_known else ""
    for host in world.hosts:
        host.links[A].connect()
    world.x.run(world.take_and_release(world.x, at=0.0, length=2.0))
    world.at(0.5, node.evict, KEYS.lock)

    def look_and_take() -> Process:
        yield Sleep(1.0)
        if not is_known:
            yield Ask(probe_request(world.rules), lambda _: False)
        yield from world.take_and_release(world.y, at=0.0, length=0.01)

    world.y.run(look_and_take())
    world.run(4.0)
    return broken(world)


def evicted_before_a_look() -> list[str]:
    """As `evicted`, of a node that was set to evict later; as workers do, y looks at it."""
    return evicted(is_known=False)


def evicted_with_its_marker() -> list[str]:
    """Let the one node, which has been up for long, evict all it has, and y connect and ask."""
    world = Schedule(replace(RULES, ttl=3.0, max_ttl=3.0), size=1)
    node = world.nodes[A]
    node.policy, node.aged = "allkeys-lru", 1e6
    world.x.run(world.take_and_release(world.x, at=0.0, length=2.0))

    def evict_all() -> None:
        for key in list(node.store):
            node.evict(key)

    world.at(0.5, evict_all)
    world.at(0.6, world.y.links[A].lose, Gone("reset"))
    world.y.run(world.take_and_release(world.y, at=1.0, length=0.01))
    world.run(4.0)
    return broken(world)


def idle_months() -> list[str]:
    """Let x look at the nodes after twenty days, and take the lock after forty."""
    world = Schedule()

    def look() -> Process:
        yield Sleep(20 * 86400.0)
        yield Ask(probe_request(world.rules), lambda _: False)
        yield from world.take_and_release(world.x, at=20 * 86400.0)

    world.x.run(look())
    world.run()
    return [] if world.holds else ["nodes that were looked at forgot that they are enrolled"]


def other_settings() -> list[str]:
    """Let a client with another longest TTL, and so another quarantine, ask."""
    world = Schedule()
    world.x.rules = replace(RULES, max_ttl=0.6)
    world.x.fingerprint = world.x.rules.fingerprint(world.x.labels)
    for link in world.x.links:
        link.lose(Gone("begins anew"))
    world.x.run(world.take_and_release(world.x, at=3.0, length=0.01))
    world.run(4.0)
    return ["a client with other settings was granted the lock"] if world.holds else []


def changed_list() -> list[str]:
    """
    Let x go by A, B and C, and y by these and by four nodes that nobody has used yet.

    When y's nodes would have sat out their quarantine, x holds the lock on its own, and y asks.
    """
    world = Schedule(size=7)
    for host in world.hosts:
        host.kill()
    for node in world.nodes:
        node.delete(KEYS.boot)
    world.x.go_by(world.nodes[:3])
    world.run(0.5)
    world.y.go_by(world.nodes)
    world.x.run(world.take_and_release(world.x, at=2.0, length=0.2))
    world.y.run(world.take_and_release(world.y, at=2.05, length=0.01))
    world.run(4.0)
    return broken(world)


SCHEDULES: dict[str, Callable[[], list[str]]] = {
    story.__name__: story
    for story in (
        late_confirmation,
        cut_off_confirmation,
        two_smallest,
        told_nobody,
        clock_set_back,
        clock_of_next_year,
        planted_fence,
        stray_fence,
        slow_quorum,
        slow_clock,
        too_late_to_be_of_use,
        repair_that_y_learns_of,
        repair_that_y_does_not_see,
        late_renewal,
        revived,
        taken_away,
        first_answers,
        late_for_another,
        attempt_in_vain,
        release_without_connection,
        small_buffers,
        late_release,
        no_end,
        late_word,
        planted_marker,
        planted_word,
        finished_out_of_sight,
        amnesia,
        late_boot_clock,
        looked_at_late,
        flushed_out_of_sight,
        empty_heir,
        minority,
        anybodys_release,
        jumping_clock,
        jump_between_connections,
        clock_that_stood_still,
        lease_that_stood_still,
        promoted_again,
        promoted_behind_a_connection,
        evicted,
        evicted_before_a_look,
        evicted_with_its_marker,
        idle_months,
        other_settings,
        changed_list,
    )
}
#: Guards that, off together, let a story go wrong; with any of them on it ends well.
BREAKS: dict[str, tuple[str, ...]] = {
    "late_confirmation": ("exact-fence",),
    "cut_off_confirmation": ("confirm-sets-nothing",),
    "two_smallest": ("largest-fence",),
    "told_nobody": ("write-back",),
    "clock_set_back": ("growing-fence",),
    "clock_of_next_year": ("near-fence",),
    "planted_fence": ("bounded-fence", "stray-fence"),
    "stray_fence": ("stray-fence",),
    "slow_quorum": ("from-the-question",),
    "slow_clock": ("drift",),
    "too_late_to_be_of_use": ("of-use",),
    "repair_that_y_learns_of": ("quarantined-renewal", "dead-yes"),
    "repair_that_y_does_not_see": ("quarantined-renewal",),
    "late_renewal": ("renewal-deadline", "repaired-majority", "repair-heeds-fence"),
    "revived": ("own-clock",),
    "taken_away": ("repaired-majority",),
    "first_answers": ("repaired-later",),
    "late_for_another": ("owner-renewal",),
    "attempt_in_vain": ("release-in-vain",),
    "release_without_connection": ("undelivered",),
    "small_buffers": ("partial-writes",),
    "late_release": ("fresh-token",),
    "no_end": ("expiry",),
    "late_word": ("done-stays-done",),
    "planted_marker": ("marked-majority",),
    "planted_word": ("marked-majority",),
    "finished_out_of_sight": ("marker-in-doubt",),
    "amnesia": ("restart-guard",),
    "late_boot_clock": ("age-unbelieved",),
    "looked_at_late": ("whole-quarantine",),
    "flushed_out_of_sight": ("flush-seen",),
    "empty_heir": ("heir-seen",),
    "minority": ("configured-quorum",),
    "anybodys_release": ("owner-release",),
    "jumping_clock": ("clock-jump",),
    "jump_between_connections": ("clock-memory",),
    "clock_that_stood_still": ("others-clocks",),
    "lease_that_stood_still": ("lost-time",),
    "promoted_again": ("was-replica",),
    "promoted_behind_a_connection": ("was-replica",),
    "evicted": ("every-vote-looks",),
    "evicted_before_a_look": ("evicted-keys",),
    "evicted_with_its_marker": ("evicted-keys",),
    "idle_months": ("probe-remembers",),
    "other_settings": ("other-settings",),
    "changed_list": ("others-enrol-none",),
}
