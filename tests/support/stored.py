"""
What nodes store of a lock, past the library; and settings for tests that are to keep theirs.

A lock is granted, and given back, by a majority. The other nodes get to know of it later, so who
looks at all of them waits for them first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import redis

from celery_redlock.lock.records import Keys
from support.waiting import eventually

__all__ = [
    "RENEWED",
    "ROOMY",
    "clients_of",
    "do",
    "holders",
    "label",
    "urls_of",
    "value_of",
    "wait_until_free",
    "wait_until_taken",
]

#: Of locks that no slow machine loses, on nodes that it makes not late. Two node timeouts are
#: less than `RENEWED`.
ROOMY: dict[str, Any] = {"ttl": 60.0, "max_ttl": 60.0, "node_timeout": 2.5}
#: A lease that is renewed while a test looks on, every two seconds, and outlasts a stall [s].
RENEWED = 6.0


class Reachable(Protocol):
    @property
    def url(self) -> str: ...

    @property
    def port(self) -> int: ...


def label(server: Reachable) -> str:
    """Return how a server is called in words."""
    return f"127.0.0.1:{server.port}/0"


def do(server: Reachable, *command: Any) -> Any:
    with redis.Redis.from_url(server.url) as client:
        return client.execute_command(*command)


def urls_of(servers: Iterable[Reachable]) -> list[str]:
    return [server.url for server in servers]


def clients_of(servers: Iterable[Reachable]) -> Iterator[Any]:
    """Yield a client of each server, which is closed when the next one is asked for."""
    for server in servers:
        with redis.Redis.from_url(server.url) as client:
            yield client


def value_of(server: Reachable, name: str, prefix: str = "redlock") -> bytes | None:
    with redis.Redis.from_url(server.url) as client:
        value: bytes | None = client.get(Keys.of(prefix, name).lock)
        return value


def holders(servers: Sequence[Reachable], name: str) -> int:
    return sum(value_of(server, name) is not None for server in servers)


def wait_until_taken(servers: Sequence[Reachable], name: str, token: str = "") -> None:
    """Wait until the last of *servers*, too, has the lock: by now a majority of them granted it."""
    eventually(
        lambda: (
            all((value_of(server, name) or b"").startswith(token.encode()) for server in servers)
            and holders(servers, name) == len(servers)
        ),
        f"{name!r} on every node",
    )


def wait_until_free(servers: Sequence[Reachable], name: str, token: str = "") -> None:
    eventually(
        lambda: (
            not any(
                (value := value_of(server, name)) is not None and value.startswith(token.encode())
                for server in servers
            )
        ),
        f"no {name!r} on any node",
    )
