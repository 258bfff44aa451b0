"""
The recipe of Celery's task cookbook, and a lock that leaks, which is the control.

The recipe is "Ensuring a task is only executed one at a time": inside the task, a key made of its
name and its arguments is added to a cache, which fails if the key is there; it expires by itself;
it is deleted at the end, unless the task took so long that it may be somebody else's by then.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from hashlib import md5
from typing import Any

import redis
from celery import Task

#: The share of its life that a key is not deleted in, for safety; the recipe has 3 s of 10 min.
MARGIN = 0.1


class Cache:
    """As much of a cache as the recipe needs: `add` is atomic, as the recipe demands."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)

    def add(self, key: str, value: str, seconds: int) -> bool:
        """Store what is not there yet; return whether it was stored."""
        return bool(self._client.set(key, value, nx=True, ex=seconds))

    def delete(self, key: str) -> None:
        """Forget a key."""
        self._client.delete(key)


@contextmanager
def cache_lock(cache: Cache, key: str, owner: str, expire: int) -> Iterator[bool]:
    """Yield whether the lock was free; it is this block's then."""
    own_until = time.monotonic() + expire * (1 - MARGIN)
    acquired = cache.add(key, owner, expire)
    try:
        yield acquired
    finally:
        if acquired and time.monotonic() < own_until:
            cache.delete(key)


def one_at_a_time(body: Callable[..., Any], url: str, expire: int) -> Callable[..., Any]:
    """Return *body* under the recipe's lock; it returns None if another one has it."""
    cache, signature = Cache(url), inspect.signature(body)

    @wraps(body)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A body of the recipe makes the key of its parameters, which have their defaults there.
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        values = [str(value) for value in bound.args[1:]]
        key = f"{self.name}-lock-{md5(' '.join(values).encode()).hexdigest()}"
        with cache_lock(cache, key, self.app.oid, expire) as acquired:
            return body(self, *args, **kwargs) if acquired else None

    return locked


class Leaky(Task):
    """A lock taken at publish that only a success gives back: rows about leaks must see that."""

    abstract = True

    def _lock(self, args: Any, kwargs: Any) -> tuple[Any, str]:
        client = redis.Redis.from_url(self.app.conf["leaky_url"])
        return client, f"leaky {self.name} {[*(args or ())]} {kwargs or {}}"

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Publish if the lock is free."""
        client, key = self._lock(args, kwargs)
        if client.set(key, "taken", nx=True, ex=self.app.conf["leaky_ttl"]):
            return super().apply_async(args, kwargs, **options)
        return None

    def on_success(self, _retval: Any, _task_id: str, args: Any, kwargs: Any) -> None:
        """Give the lock back."""
        client, key = self._lock(args, kwargs)
        client.delete(key)
