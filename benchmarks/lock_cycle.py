"""
What one acquire and release costs, beside what others ask for it.

Every candidate takes its turn in every round of one run, so that a machine that slows
down slows all of them; what counts is the ratio of the medians. Run it with
``make bench``, or ``make bench ARGS="--rounds 50 --check"`` to have the targets checked.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pottery
import redis

from benchmarks import measure
from benchmarks.measure import Candidate, Target, alternate, table, verdicts
from benchmarks.record import Record
from celery_redlock import Lease, Redlock
from celery_redlock.lock.survey import bootstrap
from celery_redlock.ops.servers import Server, servers
from support.proxy import proxied

ROUND_TRIP = 0.005
TTL = 30.0


THEIRS, THEIRS_FAR = "redis-py Lock, 1 node", "redis-py Lock, 1 node, 5 ms away"
OURS, OURS_FAR = "celery-redlock, 5 nodes", "celery-redlock, 5 nodes, 5 ms away"
STOPPED = "celery-redlock, 5 nodes, 2 stopped"
ALONE, TRIP = "celery-redlock, acquire alone, 5 ms away", "PING, 1 node, 5 ms away"

TARGETS = (
    Target(OURS, (THEIRS,), 2.5),
    Target(STOPPED, (OURS,), 1.3),
    Target(OURS_FAR, (THEIRS_FAR,), 0.75),
    Target(ALONE, (TRIP,), 1.25),
)


def our_locks(urls: Sequence[str], prefix: str) -> Redlock:
    """Return locks on connected nodes, in a key space of their own."""
    locks = Redlock.from_urls(list(urls), ttl=TTL, prefix=prefix)
    bootstrap(urls, locks.rules)
    locks.check()
    return locks


def our_cycle(locks: Redlock) -> Callable[[], object]:
    """Return one acquire and release that waits for the grant and for nothing else."""
    return lambda: locks.release(locks.acquire("ours"), wait=False)


def redis_py_cycle(url: str) -> Callable[[], object]:
    """Return one acquire and release of redis-py's own lock, on one node."""
    client = redis.Redis.from_url(url)

    def cycle() -> None:
        lock = client.lock("theirs", timeout=TTL)
        lock.acquire()
        lock.release()

    return cycle


def pottery_cycle(urls: Sequence[str]) -> Callable[[], object]:
    """Return one acquire and release of pottery's Redlock."""
    masters = {redis.Redis.from_url(url) for url in urls}

    def cycle() -> None:
        lock = pottery.Redlock(key="theirs", masters=masters, auto_release_time=TTL)
        lock.acquire()
        lock.release()

    return cycle


def on_loopback(nodes: Sequence[Server]) -> list[Candidate]:
    """Return what is compared where a round trip costs next to nothing."""
    urls = [node.url for node in nodes]

    def pause() -> None:
        for node in nodes[:2]:
            node.pause()

    def resume() -> None:
        for node in nodes[:2]:
            node.resume()

    five = our_cycle(our_locks(urls, "five"))
    return [
        Candidate(THEIRS, redis_py_cycle(urls[0])),
        Candidate("celery-redlock, 1 node", our_cycle(our_locks(urls[:1], "one"))),
        Candidate("celery-redlock, 3 nodes", our_cycle(our_locks(urls[:3], "three"))),
        Candidate(OURS, five),
        Candidate(STOPPED, five, before=pause, after=resume),
        Candidate("pottery, 5 nodes", pottery_cycle(urls)),
    ]


def behind_a_network(urls: Sequence[str]) -> list[Candidate]:
    """Return what is compared where a round trip takes 5 ms."""
    locks = our_locks(urls, "far")

    def release(lease: Lease) -> None:
        locks.release(lease, wait=False)
        time.sleep(1.5 * ROUND_TRIP)  # so that no late reply of this one is read in the next

    return [
        Candidate(THEIRS_FAR, redis_py_cycle(urls[0])),
        Candidate(OURS_FAR, our_cycle(locks)),
        Candidate(TRIP, redis.Redis.from_url(urls[0]).ping),
        Candidate(ALONE, lambda: locks.acquire("alone"), undo=release),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables; with ``--check`` return 1 if a target was missed."""
    chosen = measure.arguments(__doc__, arguments)
    record = Record("lock_cycle", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    with ExitStack() as stack:
        nodes = stack.enter_context(servers(5))
        near = on_loopback(nodes)
        alternate(near, chosen.rounds, chosen.cycles)
        record.show(table("On loopback: five servers and the client share this machine", near))
        ports = [node.port for node in nodes]
        links = stack.enter_context(proxied(ports, delay=ROUND_TRIP / 2))
        far = behind_a_network([link.url for link in links])
        alternate(far, chosen.rounds, max(3, chosen.cycles // 8))
        record.show(table("Behind a round trip of 5 ms", far))
        record.judge(*verdicts([*near, *far], TARGETS))
    return record.end(chosen)


if __name__ == "__main__":
    sys.exit(main())
