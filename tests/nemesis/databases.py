"""
A PostgreSQL as the lock node of a run, and what can happen to it.

The contenders are ours, those without the quarantine and those who never look; all of them in the
same table, by prefixes of their own.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery_redlock.lock.nodes.address import address_of
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.ports import reserved
from nemesis import checker
from nemesis.contenders import MAX_TTL, rules_of
from nemesis.field import CROWD, ClientProcess
from nemesis.log import Log, now
from nemesis.network import network
from nemesis.registers import Registers
from nemesis.run import first_grant, folder_of
from nemesis.verdict import Run, Score, breaks, broken_so_far, score, violations
from support.postgres import DURABLE, USER, Postgres, find_postgres, postgres
from support.waiting import eventually

__all__ = ["DATABASE_FAULTS", "DatabaseFault", "run_database"]

CONTENDERS = ("ours", "unguarded", "careless")
#: Within so much after the last strike everybody has to be served again [s].
PATIENCE = 60.0
OUTAGE = (0.3, 2.5 * MAX_TTL)
#: For how long a replica hears nothing before its primary dies, or a log is not written [s].
BEHIND = 0.5


class Ground:
    """
    What a nemesis can get its hands on.

    Attributes:
        server: The PostgreSQL that is asked.
        ways: The network before each of two ports.
        clients: Of all contenders.
        hits: What the strikes hit -> how often.
    """

    def __init__(self, folder: Path, fault: DatabaseFault, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.over = threading.Event()
        self.hits: Counter[str] = Counter()
        self._strikes = Log(folder / "strikes.jsonl")
        stack.callback(self._strikes.close)
        # Kept until the end: the servers, which may be bound beside these, come much later.
        places = [stack.enter_context(reserved()) for _ in range(2)]
        self._ports = [place.getsockname()[1] for place in places]
        self.ways = stack.enter_context(network(self._ports))
        self._settings = {**DURABLE, **dict(fault.settings)}
        self.server = self.another()
        #: By several hosts, as libpq knows them: the one that can be written to.
        hosts = ",".join(f"127.0.0.1:{way.port}" for way in self.ways)
        self.url = (
            f"postgresql://{USER}@{hosts}/postgres?target_session_attrs=read-write{fault.option}"
        )
        address: Any = address_of(self.url)
        address.make_tables()
        for contender in ("ours", "careless"):
            bootstrap([self.url], rules_of(contender))
        self.clients = [
            ClientProcess(contender, number, folder, [self.url])
            for contender in CONTENDERS
            for number in range(CROWD[contender][0])
        ]

    def another(self, copy_of: Postgres | None = None) -> Postgres:
        """Return another server, at the port that is free, which may be a replica."""
        port = self._ports.pop()
        self._ports.insert(0, port)
        at = {"listen_addresses": "127.0.0.1", "port": str(port)}
        return self.stack.enter_context(
            postgres(find_postgres(), {**self._settings, **at}, copy_of)
        )

    def start_clients(self) -> None:
        for contender in CONTENDERS:  # before there are many: SQLite does not wait for a first one
            Registers(self.folder / f"{contender}.sqlite").close()
        for client in self.clients:
            client.start()
            self.stack.callback(client.kill)
        eventually(lambda: all(c.is_ready for c in self.clients), "clients", timeout=120.0)

    @contextlib.contextmanager
    def struck(self, what: str) -> Iterator[None]:
        began = now()
        self.hits[what] += 1
        try:
            yield
        finally:
            self._strikes.write("strike", began, what=what, whom=[0], until=now())

    def wait(self, seconds: float) -> None:
        self.over.wait(seconds)

    def end(self) -> list[str]:
        """Have all clients end after their present hold; tell of those gone before."""
        gone = [f"{c.name} ended by itself: {c.last_words}" for c in self.clients if not c.alive]
        for client in self.clients:
            client.signal(signal.SIGTERM)
        for client in self.clients:
            client.wait(60.0)
        return gone


Strike = Callable[[Ground, random.Random], AbstractContextManager[None]]


@dataclass(frozen=True)
class DatabaseFault:
    """
    A fault, and who must break in a long run.

    Attributes:
        option: Of the URL.
        settings: Of the server, beside those that make it durable.
    """

    about: str
    strike: Strike
    lasting: tuple[float, float]
    gap: tuple[float, float]
    breaks: tuple[str, ...] = ()
    option: str = ""
    settings: tuple[tuple[str, str], ...] = ()


# -- strikes -------------------------------------------------------------------------


@contextlib.contextmanager
def kill_server(ground: Ground, rng: random.Random) -> Iterator[None]:
    with ground.struck("server killed (SIGKILL)"):
        ground.server.kill()
        ground.wait(rng.uniform(0.0, 0.5))
        ground.server.start()
    yield


@contextlib.contextmanager
def kill_backend(ground: Ground, rng: random.Random) -> Iterator[None]:
    """Kill a backend, whereupon PostgreSQL ends all others, and recovers."""
    with ground.struck("backend killed (SIGKILL)"):
        found = ground.server.children(f"postgres: {USER} ")
        if found:
            send(rng.choice(found), signal.SIGKILL)
    yield


@contextlib.contextmanager
def end_backends(ground: Ground, rng: random.Random) -> Iterator[None]:
    with ground.struck("connections ended (pg_terminate_backend)"):
        ground.server.do(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'celery-redlock' AND random() < 0.5"
        )
    yield


@contextlib.contextmanager
def cut_lines(ground: Ground, rng: random.Random) -> Iterator[None]:
    """Lose what the server answers, a commit's answer among it; or all that passes."""
    with ground.struck("lines cut"):
        for way in ground.ways:
            rng.choice([way.lose_replies, way.blackhole, way.reset])()
        try:
            yield
        finally:
            for way in ground.ways:
                way.pass_through()


@contextlib.contextmanager
def stop_server(ground: Ground, rng: random.Random) -> Iterator[None]:
    with ground.struck("server stopped (SIGSTOP)"):
        ground.server.pause()
        try:
            yield
        finally:
            ground.server.resume()


@contextlib.contextmanager
def stop_clients(ground: Ground, rng: random.Random) -> Iterator[None]:
    """Stop clients, also amid a transaction."""
    with ExitStack() as stack, ground.struck("clients stopped (SIGSTOP)"):
        for client in rng.sample(ground.clients, 4):
            client.signal(signal.SIGSTOP)
            stack.callback(client.signal, signal.SIGCONT)
        yield


@contextlib.contextmanager
def promote(ground: Ground, rng: random.Random) -> Iterator[None]:
    """Kill the primary, and promote a replica that has not heard of the latest commits."""
    replica = ground.another(ground.server)
    with ground.struck("replica promoted"):
        for pid in ground.server.children("walsender"):
            send(pid, signal.SIGSTOP)
        ground.wait(BEHIND)
        ground.server.kill()
        replica.do("SELECT pg_promote()")
        ground.server = replica
    yield


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


DATABASE_FAULTS = {
    "db-kill9": DatabaseFault(
        "the server is killed, and recovers what it has committed",
        kill_server,
        (0.0, 1.0),
        (1.0, 3.0),
    ),
    "db-backends": DatabaseFault(
        "a backend is killed, whereupon all end", kill_backend, (0.0, 0.5), (0.5, 2.0)
    ),
    "db-ended": DatabaseFault(
        "half of the connections are ended", end_backends, (0.0, 0.0), (0.1, 0.5)
    ),
    "db-lines": DatabaseFault(
        "lines are cut, also between a commit and its answer",
        cut_lines,
        (0.05, 2.0),
        (0.3, 1.5),
    ),
    "db-stopped": DatabaseFault(
        "the server is stopped (SIGSTOP)", stop_server, OUTAGE, (0.3, 2.0), ("careless",)
    ),
    "db-clients": DatabaseFault(
        "clients are stopped (SIGSTOP), also amid a transaction",
        stop_clients,
        (MAX_TTL, 2 * MAX_TTL),
        (0.2, 1.0),
        ("careless",),
    ),
    "db-async": DatabaseFault(
        "a backend is killed, and commits are lost that were answered before they were kept",
        kill_backend,
        (0.0, 1.0),
        (1.0, 3.0),
        ("unguarded",),
        "&commit=async",
        (("wal_writer_delay", "2000ms"), ("wal_writer_flush_after", "16MB")),
    ),
    "db-promote": DatabaseFault(
        "a replica is promoted that lacks the latest commits",
        promote,
        (0.0, 1.0),
        (1.0, 3.0),
        ("unguarded",),
    ),
}


# -- a run ---------------------------------------------------------------------------


def run_database(
    name: str,
    seconds: float,
    seed: int,
    *,
    longest: float | None = None,
    tell: Callable[[str], None] = lambda _: None,
    over: threading.Event | None = None,
    logs: Path | None = None,
) -> Run:
    """Run a fault of `DATABASE_FAULTS`, as `nemesis.run.run` does one of the others."""
    fault, rng = DATABASE_FAULTS[name], random.Random(seed)
    with folder_of(name, logs) as folder, ExitStack() as stack:
        ground = Ground(folder, fault, stack)
        ground.over = over or ground.over
        ground.start_clients()
        began = told = now()
        strikes = 0
        while not ground.over.is_set():
            passed = now() - began
            is_long = passed >= seconds
            if is_long and (passed >= (longest or 0) or set(fault.breaks) <= broken_so_far(folder)):
                break
            ground.wait(rng.uniform(*fault.gap))
            with fault.strike(ground, rng):
                ground.wait(rng.uniform(*fault.lasting))
            strikes += 1
            if now() - told > 10.0:
                told = now()
                tell(f"{name}: {told - began:.0f} s, {strikes} strikes")
        ended, calm = now() - began, now()
        served = None if ground.over.is_set() else when_served(ground, calm)
        gone = ground.end()
        scores = scores_in(folder)
        result = Run(name, round(ended, 1), seed, strikes, dict(ground.hits), served, 0, scores)
        result.violations = [*violations(scores), *gone]
        if served is None and not ground.over.is_set():
            result.violations.append(f"not served within {PATIENCE:g} s of the end")
        found = breaks(scores)
        without = [name for name in fault.breaks if name not in found]
        result.counts = not without and strikes > 0
        result.why = f"did not break: {', '.join(without)}" if without else "felt"
        return result


def scores_in(folder: Path) -> dict[str, Score]:
    histories = checker.read(folder)
    return {name: score(folder, name, histories[name]) for name in CONTENDERS}


def when_served(ground: Ground, calm: float) -> float | None:
    ours = [client for client in ground.clients if client.contender == "ours"]
    while now() < calm + PATIENCE:
        time.sleep(0.25)
        granted = [first_grant(ground.folder, client.name, calm) for client in ours]
        if None not in granted:
            return round(max(at for at in granted if at is not None) - calm, 2)
    return None
