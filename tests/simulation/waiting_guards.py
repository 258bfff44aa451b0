"""
What hands a lock on: guards of those who wait, and of locks with several places.

Without one of these nobody holds a lock that another holds: what a wake-up says grants nothing.
But somebody waits in vain, is overtaken, or finds fewer places than there are. So they cover for
none of the `simulation.guards.GUARDS`, and pairs are made among themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_redlock.errors import LockNotAcquired
from celery_redlock.lock import (
    attempt,
    listener,
    places,
    requests,
    rounds,
    several,
    waiter,
    waiting,
)
from celery_redlock.lock.scripts import RELEASE
from celery_redlock.lock.waiting import LEAVE, WAIT
from celery_redlock.task import waiting_room
from simulation.guard import Guard

__all__ = ["WAITING_GUARDS"]


def first_place(*_: Any) -> int:
    """Return the first place, whichever is free."""
    return 0


def one_key(name: str, _place: int) -> str:
    """Return one name for all places."""
    return name


def one_is_enough(_nodes: int) -> int:
    """Return how many nodes have to say something: any one."""
    return 1


def keep_what_was_granted(client: Any, wanted: Any, _turns: Any) -> Any:
    """Take the locks of all names, and keep those that were granted if one is not."""
    leases = {}
    try:
        for name, one in wanted.items():
            leases[name] = yield from rounds.acquire(client, replace(one, wait=0.0))
    except LockNotAcquired as error:
        return error
    return leases


WAITING_GUARDS = {
    guard.name: guard
    for guard in (
        Guard(
            "oldest-first",
            "of all who wait the oldest is woken",
            lua=((RELEASE, "'ZRANGE', ready, '0', '0'", "'ZRANGE', ready, '-1', '-1'"),),
        ),
        Guard(
            "own-ticket",
            "a release wakes nobody with the token that it releases",
            lua=((RELEASE, "if string.sub(ticket, 1, #own) ~= own then", "if true then"),),
        ),
        Guard(
            "dead-ticket",
            "a ticket whose process does not listen any more is not waited for",
            lua=((RELEASE, "if heard > 0 then return ticket end", "return ticket"),),
        ),
        Guard(
            "woken-once",
            "who was woken has no ticket any more: one that does nothing is not woken again",
            lua=((RELEASE, ", next)", ", 'nobody')"),),
        ),
        Guard(
            "kept-for-the-woken",
            "a lock that is handed over is nobody else's meanwhile",
            ((requests, "HAND_OVER", b"1"),),
        ),
        Guard(
            "free-wakes",
            "who waits for a lock that is free is woken, though nobody releases it",
            lua=((WAIT, "if redis.call('EXISTS', KEYS[i]) == 0 then", "if false then"),),
        ),
        Guard(
            "leave",
            "who waits no more leaves no ticket",
            lua=((LEAVE, "redis.call('ZREM', KEYS[2], ARGV[2])", "local left = true"),),
        ),
        Guard(
            "woken-by-a-majority",
            "nobody is woken for what fewer than a majority of nodes says",
            ((listener, "quorum", one_is_enough),),
        ),
        Guard(
            "handed-place",
            "who is woken for a place tries that place",
            tuple((room, "place_of", first_place) for room in (waiter, waiting_room)),
        ),
        Guard(
            "place-key",
            "each place of a lock is a lock of its own",
            tuple((room, "place_name", one_key) for room in (attempt, places, requests, waiting)),
        ),
        Guard(
            "kept-for-nobody",
            "one of several places is kept for nobody, as each node may keep another",
            lua=((RELEASE, "string.sub(described, 1, 1) == SEVERAL", "false"),),
        ),
        Guard(
            "all-or-none",
            "who is refused one of several names holds none of the others",
            ((several, "acquire_now", keep_what_was_granted),),
        ),
    )
}
