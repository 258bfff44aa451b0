"""Servers whose memory is full, so that they evict keys."""

from __future__ import annotations

from typing import Any

import redis

from celery_redlock.testing.servers import Server
from support.waiting import eventually

__all__ = ["POLICY", "evict", "evicting"]

#: It evicts first what expires first: locks.
POLICY = "volatile-ttl"
FILLER, SIZE = "cache:filler", 1_000_000


def evicting(server: Server, policy: str = POLICY) -> Any:
    """Return a client of a server that may evict keys from now on."""
    client = redis.Redis.from_url(server.url)
    client.config_set("maxmemory-policy", policy)
    return client


def evict(client: Any, expires: int = 7_200_000) -> None:
    """
    Have a server evict all that expires earlier than a filler, in so many milliseconds.

    Two hours: locks and fences, but not the boot marker.
    """
    client.set(FILLER, b"x" * SIZE, px=expires)

    def is_evicted() -> bool:
        # Each time by what is used now: what the command's own buffer took is freed soon.
        client.config_set("maxmemory", client.info("memory")["used_memory"] - SIZE // 2)
        return not client.exists(FILLER)

    eventually(is_evicted, "eviction")
    client.config_set("maxmemory", 0)
