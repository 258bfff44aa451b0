"""
What a wake-up rests on: guards of those who wait, and of locks with several places.

Without one of these nobody holds a lock that another holds: a hint grants nothing. But somebody
waits in vain, is overtaken, or finds fewer places than there are. So they cover for none of the
`simulation.guards.GUARDS`, and pairs are made among themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_redlock.errors import LockNotAcquired
from celery_redlock.lock import records
from celery_redlock.lock.algorithm import acquiring, attempt, several
from celery_redlock.lock.scripts.scripts import RELEASE
from celery_redlock.lock.waiting import waiting
from celery_redlock.lock.waiting.room import Room
from celery_redlock.lock.waiting.waiting import LEAVE, WAIT
from simulation.guard import Guard

__all__ = ["WAITING_GUARDS"]


def one_key(name: str, _place: int) -> str:
    """Return one name for all places."""
    return name


def nothing(*_: Any) -> None:
    """Do nothing."""


def one_is_enough(_nodes: int) -> int:
    """Return how many nodes have to say something: any one."""
    return 1


def never(*_: Any) -> bool:
    return False


def keep_what_was_granted(client: Any, wanted: Any) -> Any:
    """Take the locks of all names, and keep those that were granted if one is not."""
    leases = {}
    try:
        for name, one in wanted.items():
            leases[name] = yield from acquiring.acquire(client, replace(one, wait=0.0))
    except LockNotAcquired as error:
        return error
    return leases


WAITING_GUARDS = {
    guard.name: guard
    for guard in (
        Guard(
            "hint",
            "a release tells somebody who waits",
            lua=(
                (
                    RELEASE,
                    "hint(KEYS[3], ARGV[5], ARGV[6], string.sub(ARGV[1], -RELEASE))",
                    "local told = 0",
                ),
            ),
        ),
        Guard(
            "oldest-first",
            "of all who wait the oldest is told",
            lua=((RELEASE, "'ZRANGE', line, '0', PASSED - 1", "'ZRANGE', line, '-1', '-1'"),),
        ),
        Guard(
            "taken-is-woken",
            "of a process that is told the one is woken whom the node has taken out of its line",
            ((Room, "_known_as", nothing),),
        ),
        Guard(
            "dead-passed",
            "one whose process does not listen any more is passed",
            lua=((RELEASE, "or heard > 0 then return end", "or heard >= 0 then return end"),),
        ),
        Guard(
            "told-once",
            "who was told is not in line any more: one that does nothing is not told again",
            lua=((RELEASE, "redis.pcall('ZREM', line, one)", "redis.pcall('EXISTS', line)"),),
        ),
        Guard(
            "too-small-a-limit",
            "nobody is told of a place that it cannot have",
            lua=((RELEASE, "> tonumber(number) then", "> -1 then"),),
        ),
        Guard(
            "free-wakes",
            "who waits as a message for a lock that is free tries, though nobody releases it",
            ((Room, "free", nothing),),
        ),
        Guard(
            "free-for-a-majority",
            "what one node says of a lock that it has no holder of wakes nobody",
            ((waiting, "quorum", one_is_enough),),
        ),
        Guard(
            "since-the-node-knows",
            "nobody has waited for longer than the node has known of it",
            lua=((WAIT, "math.max(first, tonumber(ARGV[4]))", "tonumber(ARGV[4])"),),
        ),
        Guard(
            "comes-by-itself",
            "the oldest of a process tries without a hint",
            ((Room, "is_oldest", never),),
        ),
        Guard(
            "registers-again",
            "once a node can be heard all of the process register again, and the oldest tries",
            ((Room, "register_all", nothing),),
        ),
        Guard(
            "leave",
            "who waits no more is not in line",
            lua=((LEAVE, "redis.call('ZREM', KEYS[1], ", "tostring("),),
        ),
        Guard(
            "quarantine-silent",
            "a node in quarantine has nobody in line",
            lua=((WAIT, "if code == -2 then redis.call('DEL', KEYS[1], KEYS[2]) end", ""),),
        ),
        Guard(
            "place-key",
            "each place of a lock is a lock of its own",
            tuple((at, "place_name", one_key) for at in (attempt, records)),
        ),
        Guard(
            "all-or-none",
            "who is refused one of several names holds none of the others",
            ((several, "acquire_now", keep_what_was_granted),),
        ),
    )
}
