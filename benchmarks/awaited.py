"""
What a lock costs in an event loop, beside the same in a thread.

- One acquire and release: awaited (`AsyncRedlock`), in the thread that asks (`Redlock`), and by
  `asyncio.to_thread`, as an async view has to call what is synchronous; on loopback, and behind a
  round trip of 5 ms by way of a proxy. All by turns in one run.
- Many locks held at once, in one loop and in as many threads: how long until all are held and
  released, and how many threads the process had.
- Many who wait for one lock, which each passes on at once: the time per hand-over.

Run it with ``make bench ARGS=awaited``.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks import measure
from benchmarks.lock_cycle import OF_CLIENT, OF_SERVERS, ROUND_TRIP, on, our_locks, started
from benchmarks.measure import Candidate, Target, alternate, table, verdicts
from benchmarks.record import Record, Table
from celery_redlock import AsyncRedlock, Redlock
from support.proxy import proxied

HOLDS, WAITERS = 1000, 300
#: Acquires and releases that are measured as one: a loop has to be entered for each measurement.
AT_A_TIME = 10
THREAD, LOOP, TO_THREAD = "in a thread", "in an event loop", "in a loop, by asyncio.to_thread"
AWAY = f", {ROUND_TRIP * 1e3:g} ms away"
TARGETS = (
    Target(LOOP, (THREAD,), 1.5),
    Target(LOOP, (TO_THREAD,), 1.0),
    Target(LOOP + AWAY, (THREAD + AWAY,), 1.1),
)


def cycles_of(locks: Redlock, loop: asyncio.AbstractEventLoop, where: str = "") -> list[Candidate]:
    """Return the same acquire and release in three ways."""
    awaited = AsyncRedlock.of(locks)

    def once() -> None:
        locks.release(locks.acquire("thread"))

    def in_thread() -> None:
        for _ in range(AT_A_TIME):
            once()

    async def in_loop() -> None:
        for _ in range(AT_A_TIME):
            await awaited.release(await awaited.acquire("loop"))

    async def by_thread() -> None:
        for _ in range(AT_A_TIME):
            await asyncio.to_thread(once)

    def driven(work: Callable[[], Any]) -> Callable[[], None]:
        return lambda: loop.run_until_complete(work())

    return [
        Candidate(THREAD + where, in_thread),
        Candidate(LOOP + where, driven(in_loop)),
        Candidate(TO_THREAD + where, driven(by_thread)),
    ]


def many_at_once(locks: Redlock, count: int) -> list[tuple[str, float, int]]:
    """Return how long *count* holds at once took [s], and with how many threads at most."""
    awaited, gate = AsyncRedlock.of(locks), threading.Barrier(count + 1)
    before, most = threading.active_count(), [0]

    async def one(number: int, all_held: asyncio.Event, held: list[int]) -> None:
        async with awaited.hold(f"many:{number}", wait=60):
            held.append(number)
            if len(held) == count:
                most[0] = threading.active_count()
                all_held.set()
            await all_held.wait()

    async def whole() -> None:
        all_held, held = asyncio.Event(), list[int]()
        await asyncio.gather(*[one(number, all_held, held) for number in range(count)])

    def one_thread(number: int) -> None:
        with locks.hold(f"many:{number}", wait=60):
            gate.wait()

    began = time.perf_counter()
    asyncio.run(whole())
    found = [(LOOP, time.perf_counter() - began, max(1, most[0] - before))]
    threads = [threading.Thread(target=one_thread, args=(n,)) for n in range(count)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    gate.wait()
    for thread in threads:
        thread.join()
    return [*found, (THREAD, time.perf_counter() - began, count)]


def handed_over(locks: Redlock, count: int) -> list[tuple[str, float]]:
    """Return how long each of *count* who wait for one lock takes to get and pass it on [s]."""
    awaited = AsyncRedlock.of(locks)
    lease = locks.acquire("line", wait=60)

    def wait_for_all() -> None:
        assert locks.listener is not None
        while sum(map(len, locks.listener.room._lines.values())) < count:  # noqa: SLF001
            time.sleep(0.01)  # seldom: it has the loop's own process, and is not measured

    async def one() -> None:
        async with awaited.hold("line", wait=600):
            pass

    async def whole() -> float:
        tasks = [asyncio.ensure_future(one()) for _ in range(count)]
        await asyncio.to_thread(wait_for_all)
        began = time.perf_counter()
        locks.release(lease)
        await asyncio.gather(*tasks)
        return time.perf_counter() - began

    def one_thread() -> None:
        with locks.hold("line", wait=600):
            pass

    found = [(LOOP, asyncio.run(whole()) / count)]
    lease = locks.acquire("line", wait=60)
    threads = [threading.Thread(target=one_thread) for _ in range(count)]
    for thread in threads:
        thread.start()
    wait_for_all()
    began = time.perf_counter()
    locks.release(lease)
    for thread in threads:
        thread.join()
    return [*found, (THREAD, (time.perf_counter() - began) / count)]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the tables."""
    chosen = measure.arguments(__doc__, arguments, rounds=20, cycles=100)
    record = Record("awaited", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    loop = asyncio.new_event_loop()
    with on(OF_CLIENT), ExitStack() as stack:
        nodes = started(stack, 3, OF_SERVERS)
        near = cycles_of(our_locks([node.url for node in nodes], "near"), loop)
        alternate(near, chosen.rounds, chosen.cycles)
        record.show(table(f"{AT_A_TIME} times acquire and release on three nodes", near))
        with on(OF_SERVERS):
            links = stack.enter_context(proxied([n.port for n in nodes], delay=ROUND_TRIP / 2))
        far = cycles_of(our_locks([link.url for link in links], "far"), loop, AWAY)
        alternate(far, chosen.rounds, max(3, chosen.cycles // 10))
        record.show(table(f"The same behind a round trip of {ROUND_TRIP * 1e3:g} ms", far))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        locks = our_locks([node.url for node in nodes], "many")
        repeats = max(1, chosen.rounds // 5)
        held = [many_at_once(locks, HOLDS) for _ in range(repeats)]
        passed = [handed_over(locks, WAITERS) for _ in range(repeats)]
    rows = [
        (
            name,
            round(statistics.median(run[at][1] for run in held), 3),
            held[0][at][2],
            round(statistics.median(run[at][1] for run in passed) * 1e3, 2),
        )
        for at, name in enumerate((LOOP, THREAD))
    ]
    columns = ("", "time [s]", "more threads", "hand-over [ms]")
    title = f"{HOLDS} locks held at once, and {WAITERS} who wait for one, medians of {repeats}"
    record.show(Table(title, columns, tuple(rows)))
    record.judge(*verdicts([*near, *far], TARGETS))
    return record.end(chosen)


if __name__ == "__main__":
    sys.exit(main())
