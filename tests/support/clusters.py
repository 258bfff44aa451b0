"""A Redis Cluster of a test: three masters, and a replica of the one that has our keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis

from celery_redlock.testing.ports import free_port, reserved
from celery_redlock.testing.servers import Server, servers
from support.waiting import eventually

__all__ = ["Cluster", "cluster", "in_cluster_mode"]

#: How long a server is missed before another takes its place [ms]; a loaded machine is slow.
NODE_TIMEOUT = 2000
SLOTS = 16384
#: Of a call that moves all keys of a slot [ms].
LONGEST_MOVE = 5000


class Cluster:
    """
    A cluster of real servers.

    Attributes:
        masters: Those that have the slots at first.
        replica: Of the one that has our keys.
        slot: Where the keys of a prefix are.
    """

    def __init__(self, masters: Sequence[Server], replica: Server, tag: str) -> None:
        self.masters = list(masters)
        self.replica = replica
        self.slot: int = int(ask(self.masters[0], "CLUSTER", "KEYSLOT", tag))

    @property
    def servers(self) -> list[Server]:
        """All of them."""
        return [*self.masters, self.replica]

    def url(self, *, login: str = "", options: str = "", first: int = 0) -> str:
        """Return the cluster as a lock node; named by all servers, *first* by one of them."""
        servers = self.servers[first:] + self.servers[:first]
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        return f"redis+cluster://{login}{hosts}/{options}"

    @property
    def label(self) -> str:
        """How the node is called."""
        return f"127.0.0.1:{self.masters[0].port}@cluster"

    def home(self) -> Server:
        """Return who has our keys, once all servers that are up say so and it agrees."""
        return eventually(self._home, "one server that has our keys", every=0.05)

    def _home(self) -> Server | None:
        up = [server for server in self.servers if server.alive]
        with contextlib.suppress(redis.RedisError):
            ports = {port_of_slot(server, self.slot) for server in up}
            found = next((server for server in up if {server.port} == ports), None)
            return found if found and role(found) == "master" else None
        return None

    def come_home(self) -> None:
        """Have our slot where there is a replica, which has all that its master has."""

        def followed() -> Server | None:
            said = ask(self.replica, "ROLE")
            is_there = said[0] == "slave" and said[3] == "connected"
            return next((one for one in self.masters if is_there and one.port == said[2]), None)

        master = eventually(followed, "a replica", every=0.05)
        if self.home() is not master:
            self.migrate(master)
        with redis.Redis.from_url(master.url) as client:
            eventually(lambda: client.wait(1, 100), "a replica that has it all")

    def fail_over(self, *, kill: bool = False) -> Server:
        """Have the replica take its master's place, by force or for want of one; return it."""
        self.come_home()
        before, after = self.home(), self.replica
        if kill:
            before.kill()
        else:
            ask(after, "CLUSTER", "FAILOVER", "FORCE")
        eventually(lambda: self._home() is after, "failover", every=0.05)
        self.replica = before
        self.masters[self.masters.index(before)] = after
        return after

    def migrate(self, to: Server | None = None, *, keys: bool = True) -> Server:
        """
        Move our slot to another master, as redis-cli does; return that one.

        Without *keys* they are left behind, as when a cluster is mended that has lost a master.
        """
        source = self.home()
        target = to or next(server for server in self.masters if server is not source)
        if keys:
            ask(target, "CLUSTER", "SETSLOT", self.slot, "IMPORTING", node_id(source))
            ask(source, "CLUSTER", "SETSLOT", self.slot, "MIGRATING", node_id(target))
            while names := ask(source, "CLUSTER", "GETKEYSINSLOT", self.slot, 100):
                where = ("127.0.0.1", target.port, "", 0, LONGEST_MOVE)
                ask(source, "MIGRATE", *where, "REPLACE", "KEYS", *names)
        else:
            ask(source, "CLUSTER", "DELSLOTS", self.slot)
        for server in (target, source, *self.masters):
            with contextlib.suppress(redis.RedisError):  # a replica may not
                ask(server, "CLUSTER", "SETSLOT", self.slot, "NODE", node_id(target))
        eventually(lambda: self._home() is target, "a slot that moved", every=0.05)
        return target


def ask(server: Server, *command: Any) -> Any:
    """Return what one server answers."""
    with redis.Redis.from_url(server.url, decode_responses=True, protocol=2) as client:
        return client.execute_command(*command)


def node_id(server: Server) -> str:
    """Return what a server is called in its cluster."""
    return str(ask(server, "CLUSTER", "MYID"))


def role(server: Server) -> str:
    """Return what a server is."""
    with redis.Redis.from_url(server.url) as client:
        return str(client.info("replication")["role"])


def port_of_slot(server: Server, slot: int) -> int:
    """Return which server has a slot, as one of them says; 0 for none."""
    with redis.Redis.from_url(server.url, protocol=2) as client:
        raw = client.connection_pool.get_connection()
        try:
            raw.send_command("CLUSTER", "SLOTS")
            ranges = raw.read_response()
        finally:
            client.connection_pool.release(raw)
    owners = [it[2][1] for it in ranges if it[0] <= slot <= it[1]]
    return int(owners[0]) if owners else 0


def is_ok(server: Server) -> bool:
    """Return whether a server finds its cluster whole."""
    with redis.Redis.from_url(server.url, protocol=2) as client:
        raw = client.connection_pool.get_connection()
        try:
            raw.send_command("CLUSTER", "INFO")
            return b"cluster_state:ok" in raw.read_response()
        finally:
            client.connection_pool.release(raw)


def in_cluster_mode(bus: int | None = None) -> list[str]:
    """Return the options of a server of a cluster, whose *bus* is a port of its own."""
    # Without it a server takes the port 10,000 above its own, which may be another's.
    return ["--cluster-enabled", "yes", "--cluster-port", str(bus or free_port())]


@contextlib.contextmanager
def cluster(
    binary: Path, *, tag: str = "redlock", extra_args: Sequence[str] = ()
) -> Iterator[Cluster]:
    """
    Start a cluster.

    Args:
        binary: The server program.
        tag: Hash tag of the keys whose master is to have a replica.
        extra_args: More options of each server.
    """
    with ExitStack() as stack:
        farm, buses = [], []
        for _ in range(4):
            place = stack.enter_context(contextlib.closing(reserved(None)))
            buses.append(place.getsockname()[1])
            args = [*in_cluster_mode(buses[-1]), "--cluster-node-timeout", str(NODE_TIMEOUT)]
            args += ["--cluster-replica-validity-factor", "0", *extra_args]
            farm += stack.enter_context(servers(1, binary=binary, extra_args=args))
        *masters, replica = farm
        bounds = [SLOTS * n // 3 for n in range(4)]
        for server, begin, end in zip(masters, bounds, bounds[1:], strict=False):
            ask(server, "CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
        for server, bus in zip(farm[1:], buses[1:], strict=True):
            ask(masters[0], "CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        eventually(lambda: all(is_ok(one) for one in farm), "a whole cluster", every=0.05)
        it = Cluster(masters, replica, tag)
        home = node_id(it.home())
        eventually(lambda: replicates(replica, home), "a replica", every=0.05)
        yield it


def replicates(replica: Server, master: str) -> bool:
    """Make a server a replica, and return whether it has what its master has."""
    with contextlib.suppress(redis.RedisError):  # it may not have heard of its master yet
        if role(replica) == "master":
            ask(replica, "CLUSTER", "REPLICATE", master)
    with redis.Redis.from_url(replica.url) as client:
        return bool(client.info("replication").get("master_link_status") == "up")
