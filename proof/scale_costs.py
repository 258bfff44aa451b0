"""
What `proof.scale` has to measure: CPU time and memory of a node, and a client's CPU time.

On the embedded server and on loopback, in short turns of which the lowest counts: CPU time is
what the machine says it was, but neighbours on the same caches only ever add to it.
"""

from __future__ import annotations

import itertools
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from uuid import uuid4

import redis

from benchmarks.lock_cycle import OF_CLIENT, OF_SERVERS, on
from celery_redlock import Redlock
from celery_redlock.lock.algorithm.participant import new_owner
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.nodes.guard import boot_marker
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import (
    Marker,
    Request,
    acquire_request,
    mark_request,
    release_request,
    renew_request,
)
from celery_redlock.reading.health import check
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.ports import HOST
from celery_redlock.testing.servers import Server, servers
from simulation.scale import Names

__all__ = ["Client", "measured_client", "measured_node"]

#: Connections that have a command each under way: what a busy node meets.
CONNECTIONS = 64
#: Commands of each kind in a turn, and turns.
COMMANDS, TURNS = 10 * CONNECTIONS, 15
#: Locks in a turn of a client: so short that some turns are not disturbed by neighbours.
CYCLES = 20
#: Keys whose expiry, or whose memory, is measured.
MANY = 30_000
#: How long a server is watched while nothing comes, or while keys expire [s]; at most; and how
#: long these stand: until all are there.
WATCHED, LONGEST, TTL = 3.0, 60.0, 10.0
RULES = Rules()


@dataclass(frozen=True)
class Client:
    """
    What was measured of a client on five nodes of this machine, all on another core.

    Attributes:
        cpu: CPU time of an acquire and a release [s].
        cycle: Wall-clock time of one, median [s].
        trip: A PING to one of the nodes, median [s].
    """

    cpu: float
    cycle: float
    trip: float


def a_lease(number: int) -> Lease:
    """Return the lease of a task, with all that it tells of itself."""
    task_id = str(uuid4())
    info = {"task": "shop.bill", "task_id": task_id, "execution": f"{task_id}/0/0"}
    fence = int(time.time() * 1000) << 12
    token = new_owner() + f"{number:08x}"
    return Lease(Names.text(number), token, fence, RULES.ttl, 0.0, time.time(), info)


def of_another(lease: Lease) -> Lease:
    """Return a lease of the same name by somebody else."""
    return Lease(lease.name, lease.token[::-1], lease.fence, lease.ttl, 0.0, 0.0, lease.info)


#: Kind of command -> what is put to a node of the lease of a task.
REQUESTS: dict[str, Callable[[Lease], Request]] = {
    "acquire": lambda one: acquire_request(RULES, one, one.info["execution"]),
    "refuse": lambda one: acquire_request(RULES, of_another(one), one.info["execution"] + "b"),
    "renew": lambda one: renew_request(RULES, one, repair=True),
    "undo": lambda one: release_request(RULES, one.name, one.token[::-1]),
    "release": lambda one: release_request(
        RULES, one.name, one.token, marker=Marker(one.info["execution"], "done", 3600.0)
    ),
}


class Pipes:
    """
    Bare connections to a node, each with one command under way at a time.

    Args:
        server: The node; is enrolled.
    """

    def __init__(self, server: Server) -> None:
        bootstrap([server.url], RULES)
        with closing(Redlock([server.url], RULES)) as locks:
            check(locks)  # loads the scripts
            label = locks.labels[0]
        self.redis = redis.Redis.from_url(server.url)
        boot = boot_marker(str(self.redis.info()["run_id"]), RULES.fingerprint([label]))
        self._boot = b"$%d\r\n%b\r\n" % (len(boot), boot)
        self._sockets = [socket.create_connection((HOST, server.port)) for _ in range(CONNECTIONS)]

    def close(self) -> None:
        """Hang up."""
        for one in self._sockets:
            one.close()
        self.redis.close()

    def put(self, requests: Sequence[Request], code: int) -> None:
        """Send requests, one per connection at a time; all answers begin with *code*."""
        calls = [Round(request, 1, None) for request in requests]
        packed = [c.packed + self._boot if c.is_guarded else c.packed for c in calls]
        for begin in range(0, len(packed), CONNECTIONS):
            crowd = list(zip(self._sockets, packed[begin : begin + CONNECTIONS], strict=False))
            for one, data in crowd:
                one.sendall(data)
            for one, _ in crowd:
                answer = one.recv(4096)
                assert answer.split(b"\r\n")[1] == b":%d" % code, answer

    def cpu(self) -> float:
        """Return the CPU time of the server so far [s]."""
        told = self.redis.info("cpu")
        return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])

    def memory(self) -> int:
        """Return what the server has in memory [bytes]."""
        return int(self.redis.info("memory")["used_memory"])


#: Kind of command -> first element of the answer.
CODES = {"acquire": 1, "refuse": 0, "renew": 1, "undo": 0, "release": 1}


def node_costs(pipes: Pipes, numbers: Iterator[int]) -> dict[str, float]:
    """Return the CPU time that a busy node takes for each kind of command [s]."""
    found: dict[str, list[float]] = {kind: [] for kind in REQUESTS}
    for _ in range(TURNS):
        leases = [a_lease(number) for number in itertools.islice(numbers, COMMANDS)]
        for kind, request in REQUESTS.items():
            requests = [request(lease) for lease in leases]
            before = pipes.cpu()
            pipes.put(requests, CODES[kind])
            found[kind].append((pipes.cpu() - before) / COMMANDS)
    return {kind: min(times) for kind, times in found.items()}


def expiry(pipes: Pipes) -> float:
    """Return the CPU time that a key takes when its time is over [s]; on a node without keys."""
    before, since = pipes.cpu(), time.monotonic()
    time.sleep(WATCHED)
    idle = (pipes.cpu() - before) / (time.monotonic() - since)
    few = int(pipes.redis.dbsize())
    pipes.put([mark_request(RULES, Marker(str(uuid4()), "done", TTL)) for _ in range(MANY)], 1)
    before, since = pipes.cpu(), time.monotonic()
    there = int(pipes.redis.dbsize()) - few
    while pipes.redis.dbsize() > few:
        assert time.monotonic() < since + LONGEST, "keys whose time is over stand yet"
        time.sleep(WATCHED)
    taken = pipes.cpu() - before - idle * (time.monotonic() - since)
    return max(0.0, taken) / there


def lock_bytes(pipes: Pipes, numbers: Iterator[int]) -> float:
    """Return what a lock that is held takes in a node's memory, without its fence [bytes]."""
    before = pipes.memory()
    for _ in range(MANY // COMMANDS):
        leases = [a_lease(number) for number in itertools.islice(numbers, COMMANDS)]
        without = [
            Lease(o.name, o.token, None, o.ttl, o.valid_until, o.since, o.info) for o in leases
        ]
        pipes.put([acquire_request(RULES, one, None) for one in without], 1)
    return (pipes.memory() - before) / (MANY // COMMANDS * COMMANDS)


def measured_node() -> tuple[dict[str, float], float, float]:
    """Return CPU time of each kind of command [s], of an expiry [s], and a lock's bytes."""
    numbers = itertools.count()
    with servers(1) as (server,), closing(Pipes(server)) as pipes:
        over, held = expiry(pipes), lock_bytes(pipes, numbers)
        return node_costs(pipes, numbers), over, held


def client_on(urls: Sequence[str], turns: int) -> Client:
    """Return what a client takes that has five nodes on the other core."""
    bootstrap(urls, RULES)
    used, cycle, trips = [], [], []
    with ExitStack() as stack:
        locks = stack.enter_context(closing(Redlock(urls, RULES)))
        check(locks)
        wire = stack.enter_context(closing(redis.Redis.from_url(urls[0])))
        bare = socket.create_connection(("127.0.0.1", wire.get_connection_kwargs()["port"]))
        stack.enter_context(closing(bare))
        for turn in range(turns):
            times, began = [], time.process_time()
            for number in range(CYCLES):
                started = time.perf_counter()
                locks.release(locks.acquire(f"{turn} {number}"), wait=False)
                times.append(time.perf_counter() - started)
            used.append((time.process_time() - began) / CYCLES)
            cycle.append(statistics.median(times))
            trips.append(statistics.median([ping(bare) for _ in range(CYCLES)]))
    return Client(min(used), min(cycle), min(trips))


def ping(bare: socket.socket) -> float:
    """Return how long a PING takes [s]."""
    started = time.perf_counter()
    bare.sendall(b"PING\r\n")
    bare.recv(64)
    return time.perf_counter() - started


def measured_client(turns: int = 150) -> Client:
    """Return what a client takes on five nodes of this machine."""
    with on(OF_SERVERS), servers(5) as farm, on(OF_CLIENT):
        return client_on([server.url for server in farm], turns)
