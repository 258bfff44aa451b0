"""
What it takes until tasks run that wait behind one held lock, once it is released.

A worker with two children gets 30 tasks of 50 ms while somebody else holds their lock; meanwhile
100 plain tasks are published to it. Then the lock is released. Queued (``on_conflict="queue"``) and
rescheduled (``Reschedule(base=1, cap=30)``), with and without ``worker_eta_task_limit=10``, each
with a worker of its own, one after the other. Then three workers take one lock in turn: the pause
between two bodies is held against a round trip, and their order against that of the publishes.
At last a worker is always busy with other tasks.

What takes longer than a minute after the release is counted as not done.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from benchmarks import measure
from benchmarks.lock_cycle import our_locks
from benchmarks.record import Record, Table, Verdict
from celery_redlock import RedlockTask, Reschedule
from celery_redlock.testing.servers import Server, servers
from support.events import body, now, read
from support.worker import Worker

#: How long each of the tasks behind the lock takes [s].
LASTS = 0.05
#: These take less than a tenth of a second: they are published as often as there are tasks behind
#: the lock, before and meanwhile, and the median counts.
PLAIN = 100
#: After that they are published no more: beside rescheduled tasks they may take far longer [s].
ENOUGH = 15.0
#: For how long the lock is held before the plain tasks come [s].
HELD = 3.0
#: After that it is called not done [s].
LONGEST = 60.0
QUEUED, RESCHEDULED = "queued", "rescheduled"
POLICIES: dict[str, Any] = {QUEUED: "queue", RESCHEDULED: Reschedule(base=1, cap=30)}
LIMITS = {"": None, ", worker_eta_task_limit=10": 10}
#: Of a worker that is always busy: how many other tasks its queue has all the time, and how long
#: each takes [s]; how many short ones come among them, and how long those take [s].
BACKLOG, FILLS = 20, 0.3
SHORT, SHORT_LASTS = 31, 0.02


def marks_of(name: str) -> str:
    """Return the file that bodies of this *name* record to: read often, so it is to stay short."""
    return str(Path(os.environ["MARKS"], name))


def app_with(conf: dict[str, Any]) -> Celery:
    """Return an app with *conf*, the tasks behind a lock, and a plain one."""
    app = Celery("bench", set_as_current=False)
    app.conf.update(conf)
    options = {"ignore_result": True, "shared": False}

    def work(number: int) -> None:
        with body(marks_of("behind"), "behind", number=number):
            time.sleep(LASTS)  # stands for work

    for name, policy in POLICIES.items():
        app.task(name=name, base=RedlockTask, lock_key="x", on_conflict=policy, **options)(work)

    def pass_by(name: str) -> None:
        with body(marks_of(name), name):
            time.sleep(SHORT_LASTS)  # likewise

    app.task(name="short", **options)(pass_by)
    queued: Any = {"base": RedlockTask, "lock_key": "x", "on_conflict": "queue"}
    app.task(name="short queued", **queued, **options)(pass_by)

    @app.task(name="filler", **options)
    def filler() -> None:
        time.sleep(FILLS)  # likewise

    @app.task(name="plain", **options)
    def plain(name: str) -> None:
        with body(marks_of(name), name):
            pass

    return app


@dataclass
class Scene:
    """
    A broker, lock nodes, workers, and the app as a client has it.

    Attributes:
        app: The app.
        nodes: URLs of the lock nodes.
        broker: For messages.
        marks: Folder of the files that the tasks record to.
    """

    app: Celery
    nodes: list[str]
    broker: Server
    marks: Path

    def ended(self, name: str) -> list[float]:
        """Return when each body of *name* ended [s]."""
        return self.recorded(name, "end")

    def began(self, name: str) -> list[float]:
        """Return when each body of *name* began [s]."""
        return self.recorded(name, "start")

    def recorded(self, name: str, kind: str) -> list[float]:
        """Return when each body of *name* recorded this [s]."""
        file = self.marks / name
        return [event["at"] for event in read(file, kind)] if file.exists() else []

    def until(self, is_so: Callable[[], bool], longest: float) -> float:
        """Wait until *is_so*, at most so long; return how long that was [s]."""
        began = time.monotonic()
        while not is_so() and time.monotonic() < began + longest:
            time.sleep(0.01)  # seldom: the workers are what is measured
        return time.monotonic() - began

    def plain(self, name: str) -> float:
        """Return how long the plain tasks take, from the first publish to the last end [s]."""
        began = now()
        for _ in range(PLAIN):
            self.app.tasks["plain"].delay(name)
        self.until(lambda: len(self.ended(name)) >= PLAIN, LONGEST)
        ended = self.ended(name)
        return max(ended) - began if len(ended) == PLAIN else LONGEST

    def plain_in_turns(self, name: str, turns: int) -> list[float]:
        """Return how long they take each time, some times at most [s]."""
        took: list[float] = []
        while len(took) < turns and sum(took) < ENOUGH:
            took.append(self.plain(f"{name} {len(took)}"))
        return took

    @contextmanager
    def backlog(self) -> Iterator[None]:
        """Keep so many other tasks in the broker's queue."""
        ends = threading.Event()

        def feed() -> None:
            with redis.Redis.from_url(self.broker.url) as client:
                while not ends.wait(0.05):
                    for _ in range(BACKLOG - int(client.llen("celery"))):  # type: ignore[arg-type]
                        self.app.tasks["filler"].delay()

        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            yield
        finally:
            ends.set()
            feeder.join()

    def short(self, name: str) -> float:
        """Return how long so many short tasks of this *name* take, from their publish on [s]."""
        began = now()
        for _ in range(SHORT):
            self.app.tasks[name].delay(name)
        self.until(lambda: len(self.ended(name)) >= SHORT, 3 * LONGEST)
        ended = self.ended(name)
        return max(ended) - began if len(ended) == SHORT else 3 * LONGEST

    def pushes(self) -> int:
        """Return how many messages the broker has taken."""
        with redis.Redis.from_url(self.broker.url) as client:
            said: Any = client.info("commandstats")
        return int(said.get("cmdstat_lpush", {}).get("calls", 0))


@contextmanager
def scene(workers: int, limit: int | None) -> Iterator[Scene]:
    """Set everything up."""
    with ExitStack() as stack:
        broker, *farm = stack.enter_context(servers(6))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="redlock-bench-"))
        nodes, marks = [node.url for node in farm], Path(folder)
        conf = {"broker_url": broker.url, "redlock_nodes": nodes, "worker_eta_task_limit": limit}
        env = {"BENCH": json.dumps(conf), "MARKS": str(marks)}
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
        our_locks(nodes, "redlock").close()
        for number in range(workers):
            options: Any = {"concurrency": 2, "name": f"w{number}", "env": env}
            stack.enter_context(Worker("benchmarks.queue", **options))
        app = app_with(conf)
        app.tasks["plain"].delay("warm")
        found = Scene(app, nodes, broker, marks)
        found.until(lambda: bool(found.ended("warm")), LONGEST)
        yield found
        app.close()


@dataclass(frozen=True)
class Behind:
    """
    What became of the tasks behind the lock.

    Attributes:
        done: How many were done in time.
        took: How long after the release the last of them ended [s].
        alone: What the plain tasks take before [s].
        beside: What they take while the others wait [s].
        messages: How many messages each of the tasks took.
    """

    done: int
    took: float
    alone: float
    beside: float
    messages: float


def behind(policy: str, limit: int | None, tasks: int) -> Behind:
    """Measure one policy with so many *tasks*."""
    with scene(1, limit) as it:
        alone = it.plain_in_turns("alone", tasks)
        locks, before = our_locks(it.nodes, "redlock"), it.pushes()
        with locks.hold("x", ttl=locks.rules.max_ttl):
            for number in range(tasks):
                it.app.tasks[policy].delay(number)
            time.sleep(HELD)  # all have met the holder, and wait
            beside = it.plain_in_turns("beside", tasks)
        it.until(lambda: len(it.ended("behind")) >= tasks, LONGEST)
        ended = it.ended("behind")
        took = max(ended) - it.began("behind")[0] if ended else LONGEST
        messages = (it.pushes() - before - len(beside) * PLAIN) / tasks
        locks.close()
    both = statistics.median(alone), statistics.median(beside)
    return Behind(len(ended), took, *both, messages)


def busy() -> tuple[float, float]:
    """Return how long short tasks take in a worker that is always busy: plain, and queued [s]."""
    with scene(1, None) as it, it.backlog():
        time.sleep(HELD)  # the worker has as much to do as it takes
        return it.short("short"), it.short("short queued")


def pauses(tasks: int) -> tuple[list[float], float, float]:
    """
    Return what three workers make of tasks behind one lock.

    Returns:
        The pauses between two bodies and the time of a round trip [s], and the share of pairs of
        tasks that ran in another order than they were published in.
    """
    with scene(3, None) as it:
        locks = our_locks(it.nodes, "redlock")
        with locks.hold("x", ttl=locks.rules.max_ttl):
            for number in range(3 * tasks):
                it.app.tasks[QUEUED].delay(number)
            time.sleep(HELD)  # likewise
        it.until(lambda: len(it.ended("behind")) >= 3 * tasks, LONGEST)
        begins, ends = it.began("behind"), it.ended("behind")
        numbers = [event["number"] for event in read(it.marks / "behind", "start")]
        locks.close()
        with redis.Redis.from_url(it.nodes[0]) as client:
            trips = []
            for _ in range(500):
                began = time.perf_counter()
                client.ping()
                trips.append(time.perf_counter() - began)
    between = [b - e for e, b in zip(ends[:-1], begins[1:], strict=True)]
    inverted = [later < earlier for earlier, later in combinations(numbers, 2)]
    return between, statistics.median(trips), sum(inverted) / len(inverted)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables; with ``--check`` return 1 if a target was missed."""
    chosen = measure.arguments(__doc__, arguments, rounds=1, cycles=30)
    record = Record("queue", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    found = {
        f"{policy}{words}": behind(policy, limit, chosen.cycles)
        for policy in POLICIES
        for words, limit in LIMITS.items()
    }
    rows = tuple(
        (name, it.done, round(it.took, 2), round(it.alone, 2), round(it.beside, 2), it.messages)
        for name, it in found.items()
    )
    columns = ("", "done", "after [s]", "plain, alone [s]", "plain, beside [s]", "messages")
    of = f"{chosen.cycles} tasks of {LASTS * 1000:g} ms"
    title = f"{of} behind one lock, {PLAIN} plain ones beside them"
    record.show(Table(title, columns, rows))
    between, trip, inverted = pauses(chosen.cycles)
    low, high = (statistics.quantiles(between, n=100)[share] for share in (49, 98))
    record.show(
        Table(
            "Pause between two bodies of three workers [ms], in round trips, and out of order",
            ("", "p50", "p99", "p50 / round trip", "pairs in another order %"),
            (
                (
                    "hinted",
                    round(low * 1e3, 2),
                    round(high * 1e3, 2),
                    round(low / trip, 1),
                    round(100 * inverted, 1),
                ),
            ),
        )
    )
    plain, queued = busy()
    title = f"{SHORT} short tasks in a worker that is always busy"
    record.show(
        Table(
            title,
            ("", "plain [s]", "behind one lock [s]"),
            (("done after", round(plain, 1), round(queued, 1)),),
        )
    )
    record.judge(*promises(found, chosen.cycles))
    name = "short tasks behind one lock in a busy worker / plain ones"
    record.judge(Verdict(name, round(queued / plain, 2), 1.5))
    return record.end(chosen)


def promises(found: dict[str, Behind], tasks: int) -> Iterator[Verdict]:
    """Yield what was promised of tasks that are queued."""
    for words in LIMITS:
        name = f"{QUEUED}{words}"
        it = found[name]
        last, plain = it.took / (tasks * LASTS), it.beside / it.alone
        yield Verdict(f"{name}: the last one ends / the work itself", round(last, 3), 2.0)
        yield Verdict(f"{name}: plain tasks beside them / alone", round(plain, 3), 1.1)


if "BENCH" in os.environ and "MARKS" in os.environ:
    app = app_with(json.loads(os.environ["BENCH"]))

if __name__ == "__main__":
    sys.exit(main())
