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
from celery_redlock.lock.algorithm.acquiring import LONGEST_PAUSE, acquire, pause_before
from celery_redlock.lock.algorithm.effects import Ask, Send, Sleep
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.algorithm.waiter import COMES_EVERY, Waiter
from celery_redlock.lock.lease import Lease, least_validity
from celery_redlock.lock.scripts.requests import release_request

__all__ = ["acquire_all"]

#: Lock name -> its lease, in the order in which they were granted.
Leases = dict[str, Lease]
Steps = Generator["Ask | Send | Sleep", Any, Leases]


def acquire_all(participant: Participant, requests: Sequence[LockRequest]) -> Steps:
    """Acquire the locks of all *requests* in the longest ``wait`` of them, or hold none."""
    ends, tries = participant.now() + max(one.wait for one in requests), 0
    since = requests[0].queued_since or participant.wall()
    in_order = {one.name: one for one in sorted(requests, key=lambda one: one.name)}
    waiter, leases = Waiter(participant, requests[0]), dict[str, Lease]()
    try:
        while True:
            answer = yield from acquire_now(participant, in_order)
            if isinstance(answer, dict):
                leases = answer
                yield from waiter.leave()
                return leases
            left = ends - participant.now()
            if left <= 0:
                raise answer  # noqa: TRY301  all that was left on the nodes goes below
            if waiter.name != answer.name:
                yield from waiter.leave()
                waiter = Waiter(participant, replace(in_order[answer.name], queued_since=since))
            if isinstance(answer, LockTaken) and participant.listener is not None:
                yield from waiter.join()
                lapses_in = answer.holder.get("ttl")
                pause = pause_before(participant, tries, left, COMES_EVERY, lapses_in)
                yield from waiter.pause(left, pause)
            else:
                yield Sleep(pause_before(participant, tries, left, LONGEST_PAUSE, None))
            tries += 1
    except GeneratorExit:  # dropped by its driver: nobody could send it
        raise
    except BaseException:
        yield from let_go(participant, leases)
        yield from waiter.leave()
        raise


def let_go(participant: Participant, leases: Leases) -> Generator[Send, None, None]:
    for lease in leases.values():
        yield Send(release_request(participant.rules, lease.name, lease.token, place=lease.place))


def acquire_now(
    participant: Participant, requests: Mapping[str, LockRequest]
) -> Generator[Ask | Send | Sleep, Any, Leases | LockNotAcquired]:
    """Acquire all of *requests* without waiting; return the leases, or why none is held."""
    leases: Leases = {}
    try:
        for name, one in requests.items():
            leases[name] = yield from acquire(participant, replace(one, wait=0.0))
        for name, lease in leases.items():  # nobody has renewed the first ones
            if participant.now() + least_validity(lease.ttl) > lease.valid_until:
                late = dict.fromkeys(participant.labels, "granted, but too late")
                raise QuorumUnavailable(name, late)  # noqa: TRY301  all are released below
    except GeneratorExit:  # dropped by its driver: nobody could send it
        raise
    except BaseException as error:
        yield from let_go(participant, leases)
        if isinstance(error, LockNotAcquired):
            return error
        raise
    return leases
