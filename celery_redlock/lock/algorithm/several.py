"""
Several locks at once, all or none, sans I/O.

    acquire_all(): one after another, waiting for none --all granted--> leases
                       '--one refused--> all released, wait for that one -> from the beginning

Nobody waits for a lock while holding another: what is not used yet is free for others. All
clients ask in the same order, by name, so they cannot refuse each other without end: of those
who ask at once, nobody refuses the one that holds the last name.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from celery_redlock.errors import LockNotAcquired, LockTaken, QuorumUnavailable
from celery_redlock.lock.algorithm.asks import Ask, Pause, Tell
from celery_redlock.lock.algorithm.client import Client
from celery_redlock.lock.algorithm.rounds import LONGEST_PAUSE, acquire, pause_before
from celery_redlock.lock.algorithm.waiter import COMES_EVERY, Waiter
from celery_redlock.lock.algorithm.wanted import Wanted
from celery_redlock.lock.lease import Lease, least_validity
from celery_redlock.lock.scripts.requests import release_request

__all__ = ["acquire_all"]

#: Lock name -> its lease, in the order in which they were granted.
Leases = dict[str, Lease]
Steps = Generator["Ask | Tell | Pause", Any, Leases]


def acquire_all(client: Client, wanted: Sequence[Wanted]) -> Steps:
    """
    Acquire the locks of all *wanted*, trying until the longest ``wait`` of them has passed.

    Raises:
        LockTaken, QuorumUnavailable, wanted.MarkerStands: As `rounds.acquire`; no lock is held.
    """
    ends, tries = client.now() + max(one.wait for one in wanted), 0
    since = wanted[0].queued_since or client.wall()
    in_order = {one.name: one for one in sorted(wanted, key=lambda one: one.name)}
    waiter, leases = Waiter(client, wanted[0]), dict[str, Lease]()
    try:
        while True:
            answer = yield from acquire_now(client, in_order)
            if isinstance(answer, dict):
                leases = answer
                yield from waiter.leave()
                return leases
            left = ends - client.now()
            if left <= 0:
                raise answer  # noqa: TRY301  all that was left on the nodes goes below
            if waiter.name != answer.name:
                yield from waiter.leave()
                waiter = Waiter(client, replace(in_order[answer.name], queued_since=since))
            if isinstance(answer, LockTaken) and client.listener is not None:
                yield from waiter.join()
                lapses_in = answer.holder.get("ttl")
                pause = pause_before(client, tries, left, COMES_EVERY, lapses_in)
                yield from waiter.pause(left, pause)
            else:
                yield Pause(pause_before(client, tries, left, LONGEST_PAUSE, None))
            tries += 1
    except GeneratorExit:  # dropped by its driver: nobody could send it
        raise
    except BaseException:
        yield from let_go(client, leases)
        yield from waiter.leave()
        raise


def let_go(client: Client, leases: Leases) -> Generator[Tell, None, None]:
    """Release what is not to be held without the rest."""
    for lease in leases.values():
        yield Tell(release_request(client.rules, lease.name, lease.token, place=lease.place))


def acquire_now(
    client: Client, wanted: Mapping[str, Wanted]
) -> Generator[Ask | Tell | Pause, Any, Leases | LockNotAcquired]:
    """
    Acquire all of *wanted* without waiting; return the leases, or why none of them is held.

    Args:
        client: As of `acquire_all`.
        wanted: By lock name, in their order.
    """
    leases: Leases = {}
    try:
        for name, one in wanted.items():
            leases[name] = yield from acquire(client, replace(one, wait=0.0))
        for name, lease in leases.items():  # nobody has renewed the first ones
            if client.now() + least_validity(lease.ttl) > lease.valid_until:
                late = dict.fromkeys(client.labels, "granted, but too late")
                raise QuorumUnavailable(name, late)  # noqa: TRY301  all are released below
    except GeneratorExit:  # dropped by its driver: nobody could send it
        raise
    except BaseException as error:
        yield from let_go(client, leases)
        if isinstance(error, LockNotAcquired):
            return error
        raise
    return leases
