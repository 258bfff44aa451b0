"""
What a rate rests on: guards of the places that starts take.

A place is a lock that nobody renews or releases; what makes it one is guarded by
`simulation.guards.GUARDS`. These guards make a window of it, and pairs are made among themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_redlock.errors import LockNotAcquired
from celery_redlock.lock.algorithm import several
from celery_redlock.lock.algorithm.acquiring import acquire
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.task.rate import Rate
from simulation.crew import Crew
from simulation.guard import Guard
from simulation.hosts import Host

__all__ = ["RATE_GUARDS"]


def released(crew: Crew, host: Host, starts: Any) -> Any:
    """End a start as a lock ends."""
    for lease in starts:
        yield crew.release(host, lease)


def own_count(_crew: Crew, host: Host, name: str) -> str:
    """Return a name of the starts that no other client counts by."""
    return f"{name}{host.number}"


def whenever(participant: Any, requests: Any) -> Any:
    """Take the locks of all names, however long ago the first was asked for."""
    leases = {}
    try:
        for name, one in requests.items():
            leases[name] = yield from acquire(participant, replace(one, wait=0.0))
    except LockNotAcquired as error:
        yield from several.let_go(participant, leases)
        return error
    return leases


def only_later(one: LockRequest, takes: float) -> LockRequest:
    """Return *one* for a grant that may come later, and a place that stands no longer."""
    return replace(far(one, takes), ttl=one.ttl)


far = LockRequest.for_grant_in

RATE_GUARDS = {
    guard.name: guard
    for guard in (
        Guard(
            "start-stands",
            "a start counts for its whole window, whatever becomes of it",
            ((Crew, "leave", released),),
        ),
        Guard(
            "start-slack",
            "the place of a start stands for longer than the window, as the start comes later",
            ((Rate, "stands_for", property(lambda rate: rate.window)),),
        ),
        Guard(
            "start-in-time",
            "a start of which the grant comes late is given back",
            ((LockRequest, "is_late", lambda *_: False),),
        ),
        Guard(
            "all-starts-in-time",
            "so is the first of several starts if another one takes long",
            ((several, "acquire_now", whenever),),
        ),
        Guard(
            "longer-where-far",
            "where a start may come later, as its nodes are far away, its place stands for longer",
            ((LockRequest, "for_grant_in", only_later),),
        ),
        Guard(
            "counted-together",
            "the starts of all clients are counted together",
            ((Crew, "starts_of", own_count),),
        ),
    )
}
