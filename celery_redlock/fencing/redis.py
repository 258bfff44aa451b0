"""
Fenced writes to Redis or Valkey: only the newest holder of a lock may set a key.

The largest fence is in a key of its own beside the value, and lives longer. That store
forgets what it loses: with a failover to a replica that lags behind, or with keys evicted, a
stale writer may be let in.
"""

from __future__ import annotations

import math
import re
from typing import cast

import redis

from celery_redlock.errors import StaleFence
from celery_redlock.fencing.number import checked

__all__ = ["fence_key", "fenced_set"]

#: KEYS: value, fence. ARGV: value, fence, life of the value and of the fence [ms, "" without end].
# The fence is stored as it came, and is a number only where it is compared.
SCRIPT = """
local seen = redis.call('GET', KEYS[2])
if seen then
    if not tonumber(seen) then return redis.error_reply('ERR no fence is stored at ' .. KEYS[2]) end
    if tonumber(seen) > tonumber(ARGV[2]) then return seen end
end
if ARGV[3] == '' then
    redis.call('SET', KEYS[1], ARGV[1])
    redis.call('SET', KEYS[2], ARGV[2])
else
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
    redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[4])
end
return false
"""


def fenced_set(
    client: redis.Redis | redis.RedisCluster,
    key: str,
    value: bytes | str | float,
    fence: int | None,
    *,
    ttl: float | None = None,
    remember: float = 86400.0,
) -> None:
    """
    Set a key, unless a later holder has set it.

    Args:
        client: Of the store. It need not be a lock node, and in general should not be one.
        key: The value's key. Its fence is at `fence_key`, also after the value was deleted;
            in the same slot of a cluster, unless the key has a closing brace without something
            in braces before it.
        value: The new value.
        fence: The holder's number.
        ttl: How long the value lives [s, > 0]; None: it never expires, nor does its fence.
        remember: How much longer than the value its fence lives [s, > 0]. A writer that was
            paused for longer than both is not recognised as stale.

    Raises:
        StaleFence: A later holder has set it. Nothing is changed.
        ValueError: *fence* is None, negative or too large, or a time is not > 0.
        TypeError: *fence* is not an ``int``.
    """
    number = checked(fence)
    lives = (
        ("", "") if ttl is None else (_ms("ttl", ttl), _ms("ttl", ttl) + _ms("remember", remember))
    )
    script = client.register_script(SCRIPT)
    seen = script(keys=[key, fence_key(key)], args=[value, number, *lives])
    if seen is not None:
        raise StaleFence(key, number, int(cast("bytes | str", seen)))


def fence_key(key: str) -> str:
    """Return the name of the key that has the largest fence *key* was set with."""
    # The first braces with something in them make the slot; else all of the key does. Of a key
    # with a closing brace alone no other one can be in the same slot.
    is_tagged = re.search(r"^[^{]*\{[^}]+\}", key) is not None
    return f"{key}:fence" if is_tagged or "}" in key else f"fence:{{{key}}}"


def _ms(name: str, seconds: float) -> int:
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"{name} must be > 0 and finite, got {seconds!r}")
    return max(1, round(seconds * 1000))
