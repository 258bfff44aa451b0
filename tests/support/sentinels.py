"""A node of a test that is found by Sentinels: a master, a replica, and who watches them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis

from celery_redlock.testing.servers import Server, servers
from support.waiting import eventually

__all__ = ["NEVER", "SentinelServer", "Service", "service"]

#: How long a master is missed before it is replaced [ms]; a loaded machine is slow at times.
DOWN_AFTER = 2000
#: So long that no machine is slow enough for a failover that nobody wants.
NEVER = 600_000


class SentinelServer(Server):
    """A Sentinel."""

    def __init__(self, settings: Sequence[str], *, binary: Path | None = None) -> None:
        super().__init__(binary=binary)
        self._settings = settings

    def _command(self, folder: Path) -> list[str]:
        file = folder / "sentinel.conf"
        if not file.exists():  # later the Sentinel itself keeps there what it knows
            where = [f"port {self.port}", f"dir {folder}", "bind 127.0.0.1"]
            file.write_text("\n".join([*where, *self._settings, ""]))
        return [str(self.binary), str(file), "--sentinel"]


class Service:
    """
    A master and its replica under the eyes of Sentinels.

    Attributes:
        name: Of the service.
        servers: The two.
        sentinels: All of them.
    """

    def __init__(
        self, name: str, servers: Sequence[Server], sentinels: Sequence[SentinelServer]
    ) -> None:
        self.name = name
        self.servers = servers
        self.sentinels = sentinels

    def node(self, **options: Any) -> dict[str, Any]:
        return {"sentinels": [s.url for s in self.sentinels], "service": self.name, **options}

    @property
    def label(self) -> str:
        return f"{self.name}@sentinel/0"

    def master(self) -> Server:
        """Return whom all Sentinels call the master; waits until they agree, and it does."""
        return eventually(self._agreed, f"master of {self.name}", every=0.05)

    def _agreed(self) -> Server | None:
        ports = {sentinel_says(one, "get-master-addr-by-name", self.name) for one in self.sentinels}
        found = [server for server in self.servers if {str(server.port)} == ports]
        return next((server for server in found if role(server) == "master"), None)

    def fail_over(self) -> Server:
        before = self.master()
        before.kill()
        return eventually(
            lambda: next((s for s in [self._agreed()] if s not in (None, before)), None),
            f"new master of {self.name}",
            timeout=60,
            every=0.05,
        )

    def wait_until_watched(self) -> None:
        eventually(
            lambda: all(self._is_known_to(one) for one in self.sentinels),
            f"Sentinels that know all of {self.name}",
            timeout=60,
            every=0.05,
        )

    def _is_known_to(self, sentinel: SentinelServer) -> bool:
        with redis.Redis.from_url(sentinel.url) as client:
            state = client.sentinel_masters()[self.name]
        others, replicas = state["num-other-sentinels"], state["num-slaves"]
        return (others, replicas) == (len(self.sentinels) - 1, len(self.servers) - 1)


def sentinel_says(sentinel: SentinelServer, question: str, name: str) -> str:
    with redis.Redis.from_url(sentinel.url, decode_responses=True) as client:
        return str(client.execute_command("SENTINEL", question, name)[1])


def role(server: Server) -> str:
    with redis.Redis.from_url(server.url) as client, contextlib.suppress(redis.RedisError):
        return str(client.info("replication")["role"])
    return ""


@contextlib.contextmanager
def service(
    name: str,
    binary: Path,
    *,
    sentinels: int = 3,
    down_after: int = DOWN_AFTER,
    extra_args: Sequence[str] = (),
) -> Iterator[Service]:
    """
    Start a master with a replica, and Sentinels that know them and each other.

    Args:
        name: Of the service.
        binary: The server program; it is also the Sentinels'.
        sentinels: How many.
        down_after: How long a master is missed before it is replaced [ms].
        extra_args: More options of master and replica.
    """
    with ExitStack() as stack:
        (master,) = stack.enter_context(servers(1, binary=binary, extra_args=extra_args))
        replicate = ("--replicaof", "127.0.0.1", str(master.port))
        (replica,) = stack.enter_context(
            servers(1, binary=binary, extra_args=(*replicate, *extra_args))
        )
        settings = [
            f"sentinel monitor {name} 127.0.0.1 {master.port} {sentinels // 2 + 1}",
            f"sentinel down-after-milliseconds {name} {down_after}",
            f"sentinel failover-timeout {name} 5000",
        ]
        watchers = [SentinelServer(settings, binary=binary) for _ in range(sentinels)]
        for watcher in watchers:
            stack.callback(watcher.stop)
            watcher.start()
        it = Service(name, [master, replica], watchers)
        it.wait_until_watched()
        yield it
