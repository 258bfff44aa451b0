"""
Lock and unlock many times, two of five nodes being dead, and compare what there is afterwards.

One node is killed and one stopped, so that one refuses every connect and the other leaves
every connect hanging. The three that are left all have to answer; each ends our connection
now and then, as a server that restarts or a firewall would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import redis

from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.health import check
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.servers import Server, servers
from resources.census import Census, take_census
from support.waiting import eventually

__all__ = ["Row", "compare", "grown", "run_cycles"]

RULES = Rules(ttl=30.0, max_ttl=60.0, node_timeout=0.2)
#: Cycles before the first look: the notes for the dead are as many as are kept, the heap of the
#: watchdog is as long as it gets, what is cached is cached, and memory has been as full of garbage
#: as it gets.
WARM_UP = 2500
#: Of many cycles, so much [1].
WARM_UP_SHARE = 0.1
#: After how many cycles a node ends our connection.
HANG_UP = 400
#: Growth that is noise: the watchdog's heap, of up to 256 entries, is full or just swept; and what
#: was given back may stay with the process, in pieces: a megabyte of it or two, however long it
#: goes on [kB, kB, counted, counted].
NOISE = {"memory": 2048, "allocated": 300, "blocks": 4000, "objects": 2000}
#: What each number is called in print.
WORDS = {
    "threads": "threads",
    "connecting": "threads that connect the two dead nodes",
    "descriptors": "descriptors other than sockets",
    "sockets": "sockets to the three nodes that answer",
    "attempts": "sockets of connects under way, at most one per dead node",
    "memory": "private resident memory [kB]",
    "allocated": "memory that the C library has given out [kB]",
    "blocks": "blocks of Python's allocator",
    "objects": "objects known to the garbage collector",
}
DEAD = 2


@dataclass(frozen=True)
class Row:
    what: str
    before: int
    after: int
    cycles: int


def compare(before: Census, after: Census, cycles: int) -> list[Row]:
    return [
        Row(words, getattr(before, what), getattr(after, what), cycles)
        for what, words in WORDS.items()
    ]


def grown(before: Census, after: Census) -> list[str]:
    problems = []
    for what, words in WORDS.items():
        least, most = getattr(before, what), getattr(after, what)
        allowed = DEAD if what == "attempts" else least + NOISE.get(what, 0)
        if most > allowed:
            problems.append(f"{words}: {least} before, {most} after")
    return problems


def run_cycles(cycles: int, plant: Callable[[], None] = lambda: None) -> tuple[Census, Census]:
    """
    Lock and unlock *cycles* times.

    Args:
        cycles: How often, after the warm-up.
        plant: Called before the first cycle; a leak, to see that it is found.

    Returns:
        What there was before and after.
    """
    with servers(5) as farm:
        urls = [server.url for server in farm]
        # Those that did not answer in time, at another try: all that are left have to vote.
        eventually(lambda: {*bootstrap(urls, RULES).values()} == {"enrolled"}, "enrolment of all")
        locks = Redlock(urls, RULES)
        eventually(lambda: check(locks) == {}, "connections")
        farm[0].kill()
        farm[1].pause()
        plant()
        live = farm[DEAD:]
        _lock_and_unlock(locks, live, max(WARM_UP, int(cycles * WARM_UP_SHARE)))
        before = _settled(locks, live)
        _lock_and_unlock(locks, live, cycles)
        after = _settled(locks, live)
        locks.close()
        return before, after


def _lock_and_unlock(locks: Redlock, live: Sequence[Server], cycles: int) -> None:
    for number in range(cycles):
        if number % HANG_UP == 0:
            _hang_up(live[number // HANG_UP % len(live)])
        name = f"{cycles}:{number}"
        if number % 3 == 0:
            with locks.hold(name, wait=60):
                pass
        else:
            locks.release(locks.acquire(name, wait=60), wait=number % 3 == 1)


def _hang_up(server: Server) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.client_kill_filter(_type="normal", skipme=True)


def _settled(locks: Redlock, live: Sequence[Server]) -> Census:
    """Return what there is once the nodes that answer owe nothing, and the others are given up."""
    dead, nodes = locks.fanout.nodes[:DEAD], locks.fanout.nodes[DEAD:]

    def is_settled() -> bool:
        locks.inspect("nobody's")
        are_connected = all(node.connection is not None and not node._owed for node in nodes)
        return are_connected and all(node.connection is None for node in dead)

    eventually(is_settled, "connection to every node that answers")
    return take_census([server.port for server in live])
