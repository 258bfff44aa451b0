"""
Directed schedules of those who wait: each shows what a guard of `simulation.waiting_guards` is for.

As in `simulation.schedules`, a story returns what went wrong in it, in words.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from celery_redlock.errors import LockTaken
from celery_redlock.lock.algorithm.effects import Sleep
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.records import Keys, line_key
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import release_request
from celery_redlock.lock.waiting.room import ThreadWaiting
from celery_redlock.lock.waiting.waiting import InLine, wait_request
from celery_redlock.testing import memory_quorum
from simulation.clocks import BEGIN
from simulation.crew import NAME
from simulation.ears import AGAIN
from simulation.hosts import Host, Process
from simulation.schedules import KEYS, A, B, C, Schedule, X, Y, broken
from simulation.world import RULES
from support.lua import ScriptNode

__all__ = ["LINE", "LINE_BREAKS"]

Z = 2
#: Leases that do not end while a story lasts.
LONG = replace(RULES, ttl=10.0, max_ttl=10.0)
#: How soon who is told gets a lock that becomes free [s]: two ways there and two back.
SOON = 0.05
#: How soon it gets one of which it is not told [s].
BY_ITSELF = 1.0 + SOON


class Noted(dict[str, float]):
    """When who asked last, and when anybody did."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def __setitem__(self, token: str, at: float) -> None:
        self.times.append(at)
        super().__setitem__(token, at)


class Line(Schedule):
    """Three nodes; clients x, y and z, which hear when a lock may be free."""

    def __init__(self, rules: Rules = LONG, limit: int = 1, crew: int = 3) -> None:
        super().__init__(rules, crew=crew, is_woken=True, limit=limit)
        self.z = self.hosts[Z]

    def take(self, host: Host, at: float, length: float = 0.0, wait: float = 0.0) -> None:
        """Have a client want the lock at a time, for as long, and release it; all times in s."""
        self.at(at, host.run, self.taking(host, length, wait))

    def taking(self, host: Host, length: float, wait: float) -> Process:
        """Yield what does that."""
        lease = yield from self.people.take(host, wait)
        if lease is not None:
            yield Sleep(length)
            self.people.end(lease)
            yield self.people.release(host, lease)

    def asked_from(self, at: float) -> list[float]:
        """Return when somebody asks for the lock, from a time on; complete once it has run [s]."""
        times = Noted()
        self.at(at, setattr, self, "asked", times)
        return times.times

    def granted_at(self, number: int, place: int = 0) -> float:
        """Return when a client was granted the lock for the first, or a later, time [s]."""
        own = [hold.granted for hold in self.holds if hold.token.startswith(f"{number:02x}")]
        return own[place] if len(own) > place else float("inf")

    def late(self, number: int, due: float, place: int = 0, soon: float = SOON) -> list[str]:
        """Run, and return that a client was granted the lock later than it was *due* [s]."""
        self.run(20.0)
        at = self.granted_at(number, place)
        late = [f"free since {due:g} s, granted to {number} at {at:.3f} s"]
        return broken(self) + (late if at > due + soon else [])


def oldest_first() -> list[str]:
    """Let x wait before z, and y release."""
    line = Line()
    line.take(line.y, 0.0, 1.0)
    line.take(line.x, 0.1, 0.1, wait=5.0)
    line.take(line.z, 0.2, 0.1, wait=5.0)
    late = line.late(X, 1.0)
    return late + (["z was granted the lock before x"] if line.granted_at(Z) < 1.1 else [])


def told() -> list[str]:
    """Let x wait for long, so that it seldom tries by itself, and y release."""
    line = Line()
    line.take(line.y, 0.0, 4.0)
    line.take(line.x, 0.1, wait=9.0)
    return line.late(X, 4.0)


def not_told() -> list[str]:
    """Let x wait for long, and hear nothing of a release of y's."""
    line = Line()
    line.chaos = replace(line.chaos, unheard=1.0)
    line.take(line.y, 0.0, 4.0)
    line.take(line.x, 0.1, wait=9.0)
    return line.late(X, 4.0, soon=BY_ITSELF)


def told_to_nobody() -> list[str]:
    """Let x wait for long and listen to nobody for a while, in which y releases."""
    line = Line()
    line.take(line.y, 0.0, 6.0)
    line.take(line.x, 0.1, wait=9.0)
    assert line.x.ears is not None
    for node in (A, B, C):
        line.at(5.95, line.x.ears.lose, node)
    return line.late(X, 5.95 + AGAIN)


def not_the_oldest_here() -> list[str]:
    """Let x wait where somebody has waited for longer, of whom the nodes know nothing yet."""
    line = Line()
    line.take(line.y, 0.0, 1.5)
    line.take(line.x, 0.1, wait=9.0)
    assert line.x.ears is not None
    room, key = line.x.ears.room, line_key(LONG.prefix, NAME)
    line.at(0.2, room.enter, ThreadWaiting(key, BEGIN, line.x.now, "0" * 32))
    return line.late(X, 1.5)


def says_it_has_waited_for_years() -> list[str]:
    """Let z wait before x, whose message says that it came long before."""
    line = Line()

    def take(host: Host) -> Process:
        wanted = line.people.wanted(host, NAME, wait=9.0, queued_since=1.0)
        lease = yield from line.people.acquire(host, wanted)
        if lease is not None:
            yield Sleep(1.0)
            line.people.end(lease)
            yield line.people.release(host, lease)

    line.take(line.y, 0.0, 4.0)
    line.take(line.z, 0.1, 1.0, wait=9.0)
    line.at(0.2, line.x.run, take(line.x))
    return line.late(Z, 4.0)


def quarantined() -> list[str]:
    """Let a node be put in quarantine while x waits there, and y release: it says nothing."""
    node, said = ScriptNode(LONG, lambda: BEGIN), list[bytes]()

    def hear(_channel: bytes, message: bytes) -> int:
        said.append(message)
        return 1

    node.keyspace.hear = hear
    one = InLine(NAME, "1" * 32, BEGIN, {}, "c" * 16)
    node.vote(wait_request(LONG, one))
    node.ask(b"SET", Keys.of(LONG.prefix, NAME).quarantine, b"1", b"PX", b"60000")
    node.vote(wait_request(LONG, one))
    node.vote(release_request(LONG, NAME, "2" * 40))
    return [f"a node in quarantine said {said!r}"] if said else []


def killed_in_line() -> list[str]:
    """Let x be killed while it waits, and z wait behind it."""
    line = Line()
    line.take(line.y, 0.0, 1.0)
    line.take(line.x, 0.1, wait=5.0)
    line.at(0.2, line.kill, line.x)
    line.take(line.z, 0.3, wait=5.0)
    return line.late(Z, 1.0)


def stopped_in_line() -> list[str]:
    """Let x stand still when it is told; z waits behind it, and then y behind z."""
    line = Line()
    line.take(line.y, 0.0, 0.5)
    line.take(line.x, 0.1, wait=5.0)
    line.at(0.2, line.stop, line.x, 30.0)
    line.take(line.z, 0.3, 0.4, wait=5.0)
    line.take(line.y, 0.6, wait=10.0)
    line.run(15.0)
    return line.late(Y, line.granted_at(Z) + 0.4, place=1)


def lapsed() -> list[str]:
    """Let y forget its lock, and x queue for it as a message, which tries when it is told."""
    line = Line(RULES)
    line.y.run(line.granted_to(line.y))
    line.at(0.05, line.x.run, line.people.take_in_line(line.x, 60.0))
    line.run(60.0)
    at = line.granted_at(X)
    return [f"nobody has held it since 0.3 s, granted at {at:.3f} s"] if at > 3.0 else []


def gone() -> list[str]:
    """Let x give up, and z wait behind it."""
    line = Line()
    line.take(line.y, 0.0, 4.0)
    line.take(line.x, 0.1, wait=0.2)
    line.take(line.z, 0.5, wait=9.0)
    return line.late(Z, 4.0)


def one_node_says() -> list[str]:
    """Let A lose y's key, so that A alone says that it has no holder to x, which queues."""
    line = Line()
    line.take(line.y, 0.0, 3.0)
    line.at(0.1, line.x.run, line.people.take_in_line(line.x, 60.0))
    line.at(0.5, line.nodes[A].delete, KEYS.lock)
    asked = line.asked_from(0.6)
    late = line.late(X, 3.0)
    return late + [
        f"x was woken for a lock that is held, at {at:.3f} s" for at in asked if at < 3.0
    ]


def smaller_limit() -> list[str]:
    """Let y and z have both places, a client with a limit of one wait, and x behind it."""
    line = Line(limit=2, crew=4)
    other = line.hosts[3]

    def hold(host: Host) -> Process:
        lease = yield from line.people.take(host, wait=0.0)
        if lease is not None:
            yield Sleep(4.0 if lease.place else 9.0)
            line.people.end(lease)
            yield line.people.release(host, lease)

    def wait_for_the_first() -> Process:
        wanted = replace(line.people.wanted(other, NAME, wait=9.0), limit=1)
        yield from line.people.acquire(other, wanted)

    line.at(0.0, line.y.run, hold(line.y))
    line.at(0.02, line.z.run, hold(line.z))
    line.at(0.1, other.run, wait_for_the_first())
    line.take(line.x, 0.2, wait=9.0)
    return line.late(X, 4.02)


def both_places() -> list[str]:
    """Let x and y want a lock with two places at the same time."""
    line = Line(limit=2)
    line.take(line.y, 0.0, 1.0)
    line.take(line.x, 0.1, 1.0, wait=0.5)
    return line.late(X, 0.1)


def crossing() -> list[str]:
    """Let three release their places at once, in another order on each node; x, y and z wait."""
    line = Line(limit=3, crew=6)
    for number, host in enumerate(line.hosts[3:]):
        line.take(host, 0.1 * number, 4.0 - 0.1 * number)
        ways = {(3 + number, node): [0.002 + 0.001 * ((number + node) % 3)] for node in (A, B, C)}
        line.at(3.9, line.ways.update, ways)
    for host in (line.x, line.y, line.z):
        line.take(host, 0.5, 1.0, wait=8.0)
    return [each for number in (X, Y, Z) for each in line.late(number, 4.05)]


def refused_one_of_two() -> list[str]:
    """Let somebody hold b, and another one want a and b: then a is free for all."""
    with memory_quorum() as nodes:
        locks = nodes.locks
        locks.acquire("b")
        with suppress(LockTaken):
            locks.take_all([LockRequest("a", 10.0), LockRequest("b", 10.0)])
        try:
            locks.acquire("a")
        except LockTaken:
            return ["who was refused b holds a"]
    return []


LINE: dict[str, Callable[[], list[str]]] = {
    story.__name__: story
    for story in (
        told,
        not_told,
        told_to_nobody,
        not_the_oldest_here,
        oldest_first,
        says_it_has_waited_for_years,
        killed_in_line,
        stopped_in_line,
        quarantined,
        lapsed,
        gone,
        one_node_says,
        smaller_limit,
        both_places,
        crossing,
        refused_one_of_two,
    )
}
#: As `simulation.schedules.BREAKS`.
LINE_BREAKS: dict[str, tuple[str, ...]] = {
    "told": ("hint",),
    "not_told": ("comes-by-itself",),
    "told_to_nobody": ("registers-again",),
    "not_the_oldest_here": ("taken-is-woken",),
    "oldest_first": ("oldest-first",),
    "says_it_has_waited_for_years": ("since-the-node-knows",),
    "killed_in_line": ("dead-passed",),
    "stopped_in_line": ("told-once",),
    "quarantined": ("quarantine-silent",),
    "lapsed": ("free-wakes",),
    "gone": ("leave",),
    "one_node_says": ("free-for-a-majority",),
    "smaller_limit": ("too-small-a-limit",),
    "both_places": ("place-key",),
    "crossing": ("told-once",),
    "refused_one_of_two": ("all-or-none",),
}
