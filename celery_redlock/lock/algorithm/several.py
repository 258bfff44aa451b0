"""
Several locks at once, all or none, sans I/O.

    acquire_all(): one after another, waiting for none --all granted--> leases
                       '--one refused--> all released, wait for that one -> from the beginning

Nobody waits for a lock while holding another: what is not used yet is free for others. All
clients ask in the same order, by name, so they cannot refuse each other without end: of those
who ask at once, nobody refuses the one that holds the last name. What stands comes last: it counts
a start. So does, of that, what has to be granted soon: the start is to follow at once.
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
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.scripts.requests import release_request

__all__ = ["acquire_all"]

#: How often all are asked for anew as those granted first have come too late.
LATE_TRIES = 3
#: Rounds for one of several places: on one, a look at all, on another.
MOST_ROUNDS = 3

#: Lock name -> its lease, in the order in which they were granted.
Leases = dict[str, Lease]
Steps = Generator["Ask | Send | Sleep", Any, Leases]


def acquire_all(participant: Participant, requests: Sequence[LockRequest]) -> Steps:
    """Acquire the locks of all *requests*, each within its ``wait``, or hold none."""
    began, tries = participant.now(), 0
    since = requests[0].queued_since or participant.wall()
    in_order = {one.name: one for one in sorted(requests, key=by_order)}
    waiter, leases = Waiter(participant, requests[0]), dict[str, Lease]()
    try:
        while True:
            answer = yield from acquire_now(participant, in_order)
            if isinstance(answer, dict):
                leases = answer
                if in_order[waiter.name].stands:
                    waiter.share(2)  # the next one looks when a place lapses; nobody tells it
                yield from waiter.leave()
                return leases
            left = began + in_order[answer.name].wait - participant.now()
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


def by_order(one: LockRequest) -> tuple[bool, bool, str]:
    return one.stands, one.within is not None, one.name


def let_go(participant: Participant, leases: Leases) -> Generator[Send, None, None]:
    for lease in leases.values():
        yield Send(release_request(participant.rules, lease.name, lease.token, place=lease.place))


def acquire_now(
    participant: Participant, requests: Mapping[str, LockRequest]
) -> Generator[Ask | Send | Sleep, Any, Leases | LockNotAcquired]:
    """Acquire all of *requests* without waiting; return the leases, or why none is held."""
    leases: Leases = {}
    try:
        for left in reversed(range(LATE_TRIES)):
            for name, one in requests.items():
                leases[name] = yield from acquire(participant, replace(one, wait=0.0))
            late = first_late(participant, requests, leases)
            if late is None:
                break
            if requests[late].within is None or not left:
                votes = dict.fromkeys(participant.labels, "granted, but too late")
                raise QuorumUnavailable(late, votes)  # noqa: TRY301  all are released below
            yield from let_go(participant, leases)
            leases.clear()
    except GeneratorExit:  # dropped by its driver: nobody could send it
        raise
    except BaseException as error:
        yield from let_go(participant, leases)
        if isinstance(error, LockNotAcquired):
            return error
        raise
    return leases


def first_late(
    participant: Participant, requests: Mapping[str, LockRequest], leases: Leases
) -> str | None:
    """Return the first name that was granted too long ago: nobody has renewed its lease."""
    now = participant.now()
    waited = [
        now - lease.valid_until + one.within + lease.ttl - one.ttl
        for one, lease in ((requests[name], lease) for name, lease in leases.items())
        if one.within is not None
    ]
    if waited:  # the first of them for all that came after it
        participant.learn_time(max(waited), rounds=MOST_ROUNDS * len(waited))
    late = (name for name, one in requests.items() if one.is_late(now, leases[name].valid_until))
    return next(late, None)
