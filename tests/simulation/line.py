"""
Directed schedules of those who wait: each shows what a guard of `simulation.waiting_guards` is for.

As in `simulation.schedules`, a story returns what went wrong in it, in words.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from celery_redlock.errors import LockTaken
from celery_redlock.lock.asks import Pause
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.requests import acquire_request, release_request
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.waiting import Ticket, wait_request
from celery_redlock.lock.wanted import Wanted
from celery_redlock.testing import memory_quorum
from simulation.clocks import BEGIN
from simulation.crew import NAME
from simulation.hosts import Host, Process
from simulation.schedules import KEYS, A, B, C, Schedule, X, Y, broken
from simulation.world import RULES
from support.lua import ScriptNode

__all__ = ["LINE", "LINE_BREAKS"]

Z = 2
#: Leases that do not end while a story lasts.
LONG = replace(RULES, ttl=10.0, max_ttl=10.0)
#: How soon who is next gets a lock that becomes free [s]: two ways there and two back.
SOON = 0.05


class Noted(dict[str, float]):
    """When who asked last, and when anybody did."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def __setitem__(self, token: str, at: float) -> None:
        self.times.append(at)
        super().__setitem__(token, at)


class Line(Schedule):
    """Three nodes; clients x, y and z, which are woken when their turn has come."""

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
            yield Pause(length)
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

    def late(self, number: int, due: float, place: int = 0) -> list[str]:
        """Run, and return that a client was granted the lock later than it was *due* [s]."""
        self.run(20.0)
        at = self.granted_at(number, place)
        late = (
            [f"free since {due:g} s, granted to {number} at {at:.3f} s"] if at > due + SOON else []
        )
        return broken(self) + late


def oldest_first() -> list[str]:
    """Let x wait before z, and y release."""
    line = Line()
    line.take(line.y, 0.0, 1.0)
    line.take(line.x, 0.1, 0.1, wait=5.0)
    line.take(line.z, 0.2, 0.1, wait=5.0)
    late = line.late(X, 1.0)
    return late + (["z was granted the lock before x"] if line.granted_at(Z) < 1.1 else [])


def own_ticket() -> list[str]:
    """Let x release on a node what it was granted there, and have a ticket there yet: in vain."""
    node = ScriptNode(RULES, lambda: BEGIN)
    node.keyspace.hear = lambda _channel, _message: 1
    ticket = Ticket(NAME, "1" * 32, BEGIN, {}, "1" * 40, "c" * 16)
    lease = Lease(NAME, ticket.token, None, RULES.ttl, 0.0, BEGIN, {})
    node.vote(acquire_request(RULES, lease, None))
    node.vote(wait_request(RULES, ticket))
    node.vote(release_request(RULES, NAME, ticket.token))
    left = node.ask(b"GET", KEYS.lock)
    return [f"the lock is kept for whoever released it: {left!r}"] if left else []


def killed_in_line() -> list[str]:
    """Let x be killed while it waits, and z wait behind it."""
    line = Line()
    line.take(line.y, 0.0, 1.0)
    line.take(line.x, 0.1, wait=5.0)
    line.at(0.2, line.kill, line.x)
    line.take(line.z, 0.3, wait=5.0)
    return line.late(Z, 1.0)


def stopped_in_line() -> list[str]:
    """Let x stand still when it is woken; z waits behind it, and then y behind z."""
    line = Line()
    line.take(line.y, 0.0, 0.5)
    line.take(line.x, 0.1, wait=5.0)
    line.at(0.2, line.stop, line.x, 30.0)
    line.take(line.z, 0.3, 0.4, wait=5.0)
    line.take(line.y, 0.6, wait=10.0)
    line.run(15.0)
    return line.late(Y, line.granted_at(Z) + 0.4, place=1)


def newcomer() -> list[str]:
    """Let y release while x waits, and ask again before x, which is further away."""
    line = Line()

    def twice() -> Process:
        yield from line.taking(line.y, 0.5, 0.0)
        yield Pause(0.003)
        yield from line.taking(line.y, 0.5, 0.0)

    line.y.run(twice())
    line.take(line.x, 0.1, wait=0.8)
    line.at(0.501, line.ways.update, {(X, node): [0.01] for node in (A, B, C)})
    return line.late(X, 0.5)


def lapsed() -> list[str]:
    """Let y forget its lock, and x queue for it as a message, which asks when it is woken."""
    line = Line(RULES)
    line.y.run(line.granted_to(line.y))
    line.at(0.05, line.x.run, line.people.take_in_line(line.x, 60.0))
    line.run(60.0)
    at = line.granted_at(X)
    return [f"nobody has held it since 0.3 s, granted at {at:.3f} s"] if at > 3.0 else []


def gone() -> list[str]:
    """Let x give up, and z wait behind it."""
    line = Line()
    line.take(line.y, 0.0, 1.0)
    line.take(line.x, 0.1, wait=0.2)
    line.take(line.z, 0.5, wait=5.0)
    return line.late(Z, 1.0)


def one_node_says() -> list[str]:
    """Let A lose y's key, so that A alone wakes x, which queues as a message."""
    line = Line()
    line.take(line.y, 0.0, 3.0)
    line.at(0.1, line.x.run, line.people.take_in_line(line.x, 60.0))
    line.at(0.5, line.nodes[A].delete, KEYS.lock)
    asked = line.asked_from(0.6)
    late = line.late(X, 3.0)
    return late + [
        f"x was woken for a lock that is held, at {at:.3f} s" for at in asked if at < 3.0
    ]


def second_place() -> list[str]:
    """Let y and z have both places, x wait, and whoever has the second one release it."""
    line = Line(limit=2)

    def hold(host: Host) -> Process:
        lease = yield from line.people.take(host, wait=0.0)
        if lease is not None:
            yield Pause(0.5 if lease.place else 5.0)
            line.people.end(lease)
            yield line.people.release(host, lease)

    line.at(0.0, line.y.run, hold(line.y))
    line.at(0.02, line.z.run, hold(line.z))
    line.take(line.x, 0.1, wait=8.0)
    asked = line.asked_from(0.5)
    late = line.late(X, 0.55)
    return late + (["x had to ask twice"] if len(asked) > 1 else [])


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
        line.take(host, 0.1 * number, 1.0 - 0.1 * number)
        ways = {(3 + number, node): [0.002 + 0.001 * ((number + node) % 3)] for node in (A, B, C)}
        line.at(0.9, line.ways.update, ways)
    for host in (line.x, line.y, line.z):
        line.take(host, 0.5, 1.0, wait=8.0)
    return [each for number in (X, Y, Z) for each in line.late(number, 1.05)]


def refused_one_of_two() -> list[str]:
    """Let somebody hold b, and another one want a and b: then a is free for all."""
    with memory_quorum() as nodes:
        locks = nodes.locks
        locks.acquire("b")
        with suppress(LockTaken):
            locks.take_all([Wanted("a", 10.0), Wanted("b", 10.0)])
        try:
            locks.acquire("a")
        except LockTaken:
            return ["who was refused b holds a"]
    return []


LINE: dict[str, Callable[[], list[str]]] = {
    story.__name__: story
    for story in (
        oldest_first,
        own_ticket,
        killed_in_line,
        stopped_in_line,
        newcomer,
        lapsed,
        gone,
        one_node_says,
        second_place,
        both_places,
        crossing,
        refused_one_of_two,
    )
}
#: As `simulation.schedules.BREAKS`.
LINE_BREAKS: dict[str, tuple[str, ...]] = {
    "oldest_first": ("oldest-first",),
    "own_ticket": ("own-ticket",),
    "killed_in_line": ("dead-ticket",),
    "stopped_in_line": ("woken-once",),
    "newcomer": ("kept-for-the-woken",),
    "lapsed": ("free-wakes",),
    "gone": ("leave",),
    "one_node_says": ("woken-by-a-majority",),
    "second_place": ("handed-place",),
    "both_places": ("place-key",),
    "crossing": ("kept-for-nobody",),
    "refused_one_of_two": ("all-or-none",),
}
