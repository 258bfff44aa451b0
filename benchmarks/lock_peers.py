"""
Other lock libraries, each used as its README says, with its own defaults, behind one signature.

All keep their connections from one lock to the next, and make the object of a lock anew for each,
as programs do whose locks have many names.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import pottery
import redis
import redis_lock
import redlock

TTL = 30.0
#: How long a lock that nobody has is tried for [s]; some give up when nodes answer late.
PATIENCE = 20.0

#: Gives a lock back.
Release = Callable[[], object]
#: Tries to acquire the lock of that name for so long [s]; returns what gives it back, or None if
#: it was not to be had.
Take = Callable[[str, float], "Release | None"]


def redis_py(urls: Sequence[str]) -> Take:
    """Return redis-py's own lock, on the first of *urls*; who waits looks every 0.1 s."""
    client = redis.Redis.from_url(urls[0])

    def take(name: str, wait: float) -> Release | None:
        lock = client.lock(name, timeout=TTL, blocking_timeout=wait)
        return lock.release if lock.acquire() else None

    return take


def python_redis_lock(urls: Sequence[str]) -> Take:
    """Return python-redis-lock's, on the first of *urls*; who waits is woken up by the node."""
    client = redis.Redis.from_url(urls[0])

    def take(name: str, wait: float) -> Release | None:
        lock = redis_lock.Lock(client, name, expire=int(TTL))
        timeout = min(int(TTL), math.ceil(wait)) or None  # it takes whole seconds
        return lock.release if lock.acquire(blocking=wait > 0, timeout=timeout) else None

    return take


def pottery_redlock(urls: Sequence[str]) -> Take:
    """Return pottery's Redlock on all of *urls*; who waits looks every 0 to 0.2 s."""
    masters = {redis.Redis.from_url(url) for url in urls}

    def take(name: str, wait: float) -> Release | None:
        lock = pottery.Redlock(key=name, masters=masters, auto_release_time=TTL)
        timeout = wait if wait > 0 else -1
        return lock.release if lock.acquire(blocking=wait > 0, timeout=timeout) else None

    return take


def redlock_py(urls: Sequence[str]) -> Take:
    """Return redlock-py's Redlock on all of *urls*; who waits looks every 0.2 s."""
    manager = redlock.Redlock(list(urls))

    def take(name: str, wait: float) -> Release | None:
        deadline = time.monotonic() + wait
        while not (lock := manager.lock(name, int(TTL * 1000))):  # tries three times
            if time.monotonic() > deadline:
                return None
        return lambda: manager.unlock(lock)

    return take


#: Name -> how to connect, and on how many nodes it is.
PEERS: dict[str, tuple[Callable[[Sequence[str]], Take], int]] = {
    "redis-py Lock": (redis_py, 1),
    "python-redis-lock": (python_redis_lock, 1),
    "pottery Redlock": (pottery_redlock, 5),
    "redlock-py": (redlock_py, 5),
}


def cycle_of(take: Take, name: str) -> Callable[[], object]:
    """Return one acquire and release of the lock *name*, which nobody else wants."""

    def cycle() -> None:
        ends = time.monotonic() + PATIENCE
        while (release := take(name, 0.0)) is None:  # late on a loaded machine: its time, too
            assert time.monotonic() < ends, "somebody else has it"
        release()

    return cycle
