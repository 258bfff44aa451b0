"""
What a lock costs on a database, beside one Valkey in the same run.

One acquire and release at a time, on loopback and 2.5 ms away; eight threads of one process, on
names of their own and on one; and a request for a lock that a thousand wait for. PostgreSQL commits
durably. SQLite has no network before it.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import Candidate, Target, alternate, table, verdicts
from benchmarks.record import Record, Table, Verdict
from celery_redlock import LockTaken, Redlock
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.nodes.address import address_of
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.waiting.waiting import InLine, wait_request
from celery_redlock.reading.health import check
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.ports import free_port
from celery_redlock.testing.servers import servers
from support.postgres import DURABLE, USER, Postgres, find_postgres, postgres
from support.proxy import proxied

VALKEY, POSTGRES, SQLITE = "one Valkey", "PostgreSQL", "SQLite"
AWAY = 0.0025
THREADS, WAITERS = 8, 1000


def locks_on(stack: ExitStack, url: str, prefix: str) -> Redlock:
    """Return locks on the node at *url*, which is enrolled and answers."""
    rules = Rules(ttl=60, max_ttl=60, node_timeout=5.0, prefix=prefix)
    address = address_of(url)
    if hasattr(address, "make_tables"):
        address.make_tables()
    bootstrap([url], rules)
    locks = Redlock([url], rules)
    stack.callback(locks.close)
    assert not check(locks)
    return locks


def cycle_of(locks: Redlock) -> Callable[[], object]:
    """Return one acquire and release of a name of its own."""
    name = secrets.token_hex(4)
    return lambda: locks.release(locks.acquire(name))


def crowd(locks: Redlock, *, is_one: bool, cycles: int) -> float:
    """Return cycles per second of eight threads, on *one* name or on eight."""
    names = [f"crowd {0 if is_one else number}" for number in range(THREADS)]

    def work(name: str) -> None:
        for _ in range(cycles):
            locks.release(locks.acquire(name, wait=60))

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, names))
    return THREADS * cycles / (time.perf_counter() - began)


def refused(locks: Redlock, waiters: int) -> Callable[[], object]:
    """Return a request for a lock that is held, and that so many wait for."""
    name = f"popular {waiters}"
    locks.acquire(name)
    for number in range(waiters):
        locks.driver.ask(
            Ask(wait_request(locks.rules, InLine(name, f"{number:032x}", 0.0, {}), waiters))
        )

    def ask() -> object:
        try:
            return locks.acquire(name)
        except LockTaken as taken:
            return locks.driver.ask(
                Ask(
                    wait_request(locks.rules, InLine(name, f"{0:032x}", 0.0, taken.holder), waiters)
                )
            )

    return ask


def deadlocks(server: Postgres) -> int:
    """Return how many PostgreSQL has counted."""
    import psycopg  # noqa: PLC0415  an extra

    where = {"host": str(server.folder), "port": server.at[-1], "user": USER}
    with psycopg.connect(**where, dbname="postgres") as asked:
        row = asked.execute("SELECT sum(deadlocks) FROM pg_stat_database").fetchone()
        return int(row[0]) if row else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables; with ``--check`` return 1 if a target was missed."""
    chosen = measure.arguments(__doc__, arguments, rounds=10, cycles=50)
    record = Record("stores", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    port = free_port()
    at = {"listen_addresses": "127.0.0.1", "port": str(port)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (valkey,) = stack.enter_context(servers(1))
        server = stack.enter_context(postgres(find_postgres(), {**DURABLE, **at}))

        def urls(ports: Sequence[int]) -> dict[str, str]:
            redis_port, postgres_port = ports
            return {
                VALKEY: f"redis://127.0.0.1:{redis_port}/0",
                POSTGRES: f"postgresql://{USER}@127.0.0.1:{postgres_port}/postgres",
            }

        here = urls([valkey.port, port]) | {SQLITE: f"sqlite:///{folder}/locks"}
        links = stack.enter_context(proxied([valkey.port, port], delay=AWAY / 2))
        away = urls([link.port for link in links])
        near = {name: locks_on(stack, url, "near") for name, url in here.items()}
        far = {name: locks_on(stack, url, "far") for name, url in away.items()}
        for title, several, limit in (
            ("An acquire and a release, loopback", near, 8.0),
            (f"An acquire and a release, {AWAY * 1e3:g} ms away", far, 2.5),
        ):
            found = [Candidate(name, cycle_of(locks)) for name, locks in several.items()]
            alternate(found, chosen.rounds, chosen.cycles)
            record.show(table(title, found))
            for verdict in verdicts(found, [Target(POSTGRES, (VALKEY,), limit)]):
                record.judge(verdict)
        rows = []
        for name, locks in near.items():
            rates = [crowd(locks, is_one=is_one, cycles=chosen.cycles) for is_one in (False, True)]
            rows.append((name, *(round(rate) for rate in rates)))
        columns = ("eight threads", "names of their own", "one name")
        record.show(Table("Acquires and releases per second", columns, tuple(rows)))
        for waiters in (1, WAITERS):
            found = [Candidate(name, refused(locks, waiters)) for name, locks in near.items()]
            alternate(found, chosen.rounds, max(2, chosen.cycles // 10))
            record.show(table(f"A refusal and its place among {waiters} who wait", found))
        record.judge(Verdict("deadlocks", float(deadlocks(server)), 0.0))
    return record.end(chosen)


if __name__ == "__main__":
    sys.exit(main())
