"""
The run with Celery: real workers, whose children are killed and stopped in the middle of tasks.

Two prefork workers work off changes of a few registers, one after the other under a lock each.
Children are killed, or stopped for longer than the lease; workers are killed, and others started;
lock nodes are killed and come back empty; messages are published twice. Every change must be
taken by the fenced register at last and none be lost there, and the plain register, which the
same bodies write at the same moment, has to lose some: else nobody was ever late.

With Redis as the broker a worker that is killed may take along a message that it has fetched and
not yet noted (kombu's, and the same for any task). Of such a message no worker's log tells: the
last that is said of its task is that a copy was published, if anything. Those are counted apart, as
long as there are no more of them than kills.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery.utils import uuid

from celery_redlock.task.messages.envelope import Envelope, fresh_publish_id
from nemesis import checker
from nemesis.contenders import MAX_TTL
from nemesis.leftovers import Sampler
from nemesis.log import now
from nemesis.registers import Registers
from nemesis.run import folder_of
from nemesis.verdict import Run, score
from support.stage import Stage, stage
from support.worker import Worker

__all__ = ["ABOUT", "run_celery"]

ABOUT = "real workers: children killed and stopped, workers and nodes killed"
TASKS = str(Path(__file__).with_name("celery_tasks.py"))
WORKERS = 2
CHILDREN = 3
NAMES = ("a", "b", "c")
#: How many changes are under way at most.
CROWD = 10
#: After the last strike everything has to be done within so much [s].
PATIENCE = 90.0
CONF: dict[str, Any] = {
    "redlock_ttl": MAX_TTL,
    "redlock_max_ttl": MAX_TTL,
    "redlock_node_timeout": 0.3,
    "redlock_dedup_ttl": 60.0,
    "task_ignore_result": True,
    "broker_transport_options": {
        "visibility_timeout": 5,
        # Whoever is killed while it gives back what others had keeps all from doing so for as long;
        # five minutes by default.
        "unacked_mutex_expire": 5,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
}


#: What a worker says of a message when it has it.
RECEIVED = "] received"


class Nemesis:
    """
    Strikes at random, and starts what has to be there.

    Attributes:
        hits: What it hit -> how often.
        injections: How often it struck.
    """

    def __init__(self, it: Stage, rng: random.Random) -> None:
        self.hits: Counter[str] = Counter()
        self.injections = 0
        self._it, self._rng = it, rng
        self._stopped: list[tuple[float, int]] = []
        self._down: list[tuple[float, int]] = []

    def start_workers(self) -> None:
        alive = sum(worker.alive for worker in self._it.workers)
        options = [
            {"concurrency": CHILDREN, "name": f"n{len(self._it.workers) + n}"} for n in (1, 2)
        ]
        self._it.start_workers(options[: WORKERS - alive])

    def strike(self) -> None:
        strikes = (self._stop_child, self._kill_child, self._kill_node, self._kill_worker)
        self._rng.choices(strikes, (6, 3, 2, 1))[0]()
        self.injections += 1

    def mend(self, *, everything: bool = False) -> None:
        due = float("inf") if everything else now()
        for _, pid in [entry for entry in self._stopped if entry[0] <= due]:
            send(pid, signal.SIGCONT)
        self._stopped = [entry for entry in self._stopped if entry[0] > due]
        for _, position in [entry for entry in self._down if entry[0] <= due]:
            self._it.nodes[position].start()
        self._down = [entry for entry in self._down if entry[0] > due]
        self.start_workers()

    def _child(self) -> int | None:
        workers = [worker for worker in self._it.workers if worker.alive]
        children = [pid for worker in workers for pid in children_of(worker)]
        free = [pid for pid in children if pid not in {stopped for _, stopped in self._stopped}]
        return self._rng.choice(free) if free else None

    def _stop_child(self) -> None:
        child = self._child()
        if child is not None and send(child, signal.SIGSTOP):
            self.hits["children stopped"] += 1
            self._stopped.append((now() + self._rng.uniform(0.5, 2.5) * MAX_TTL, child))

    def _kill_child(self) -> None:
        child = self._child()
        if child is not None and send(child, signal.SIGKILL):
            self.hits["children killed"] += 1

    def _kill_worker(self) -> None:
        worker = self._rng.choice([worker for worker in self._it.workers if worker.alive])
        worker.kill(children=self._rng.random() < 0.5)
        self.hits["workers killed"] += 1

    def _kill_node(self) -> None:
        if len(self._down) < 2:
            position = self._rng.choice(sorted({0, 1, 2, 3, 4} - {p for _, p in self._down}))
            self._it.nodes[position].kill()
            self.hits["nodes killed"] += 1
            self._down.append((now() + self._rng.uniform(0.1, MAX_TTL), position))


def children_of(worker: Worker) -> list[int]:
    with contextlib.suppress(OSError):
        told = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text()
        return [int(child) for child in told.split()]
    return []


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal, and return whether there was anybody to take it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def history_of(task_id: str, it: Stage) -> list[str]:
    lines = [line for worker in it.workers for line in worker.log().splitlines()]
    return sorted(line for line in lines if task_id in line and line.startswith("["))


class Changes:
    def __init__(self, it: Stage, rng: random.Random, folder: Path) -> None:
        self.ids: list[str] = []
        self._it, self._rng, self._folder = it, rng, folder
        self._read: Counter[Path] = Counter()
        self._done: set[int] = set()

    def publish(self, hits: Counter[str]) -> None:
        """Publish one, and now and then a second message of the same publish."""
        arguments = (self._rng.choice(NAMES), len(self.ids), self._rng.uniform(0.02, 0.5))
        task_id = uuid()
        message = {"task_id": task_id, "headers": Envelope(fresh_publish_id()).header(task_id)}
        self._it.task("change").apply_async(arguments, **message)
        self.ids.append(task_id)
        if self._rng.random() < 0.1:
            self._it.task("change").apply_async(arguments, **message)
            hits["duplicates"] += 1

    def pending(self) -> list[int]:
        for path in self._folder.glob("client-*.jsonl"):
            with path.open("rb") as log:
                log.seek(self._read[path])
                for line in log:
                    if not line.endswith(b"\n"):
                        break
                    self._read[path] += len(line)
                    if b'"done"' in line:
                        self._done.add(json.loads(line)["number"])
        return [number for number in range(len(self.ids)) if number not in self._done]


def run_celery(
    seconds: float,
    seed: int,
    *,
    tell: Callable[[str], None],
    over: threading.Event,
    logs: Path | None = None,
) -> Run:
    """
    Run it and return what came of it.

    Args:
        seconds: For how long strikes come [s].
        seed: Of the strikes.
        tell: Is told now and then how far it is.
        over: Ends the run early once it is set.
        logs: Where to leave all logs, in a folder named ``celery``.
    """
    rng = random.Random(seed)
    with folder_of("celery", logs) as folder:
        with stage(TASKS, folder, **CONF) as it, Sampler(it.nodes, ["redlock"]) as sampler:
            Registers(folder / "tasks.sqlite").close()
            nemesis, changes = Nemesis(it, rng), Changes(it, rng, folder)
            nemesis.start_workers()
            began = now()
            drive(it, nemesis, changes, rng, began + seconds, tell=tell, over=over)
            nemesis.mend(everything=True)
            ended, calm = now() - began, now()
            pending = settle(it, nemesis, changes, calm + PATIENCE, over)
            served = round(now() - calm, 2) if not pending else None
            told = {n: history_of(changes.ids[n], it) for n in pending}
            dropped = [n for n in pending if not told[n] or RECEIVED not in told[n][-1]]
            for number, lines in told.items():
                (folder / f"change-{number}.log").write_text("\n".join(lines))
        history = checker.read(folder).get("tasks", checker.History())
        for claim in history.claims:
            if claim.ended is None and claim.lost is None:
                claim.lost = "killed"  # its worker gives the lock back at once, in its place
        tasks = score(folder, "tasks", history)
        if len(dropped) <= nemesis.hits["workers killed"]:
            nemesis.hits["messages dropped by the broker's client"] += len(dropped)
            pending = sorted(set(pending) - set(dropped))
        if over.is_set():
            pending = []
        nemesis.hits["changes"] = len(changes.ids)
        wrong = {
            "no grant at all": not tasks.grants,
            f"{tasks.overlaps} overlaps, up to {tasks.longest_overlap:g} s": tasks.overlaps,
            f"{tasks.disorders} fences out of order": tasks.disorders,
            f"{tasks.lost_updates} updates lost under the fence": tasks.lost_updates,
            f"changes that were never made: { {n: told[n][-1:] for n in pending} }": pending,
            f"no expiry: {sorted(sampler.eternal)}": sampler.eternal,
        }
        result = Run(
            "celery",
            round(ended, 1),
            seed,
            nemesis.injections,
            dict(nemesis.hits),
            served,
            sampler.seen,
            {"tasks": tasks},
            [what for what, happened in wrong.items() if happened],
        )
        result.counts = tasks.lost_plain_updates > 0 and not over.is_set()
        result.why = (
            "the register without a fence lost updates"
            if tasks.lost_plain_updates
            else "the register without a fence lost nothing"
        )
        return result


def drive(
    it: Stage,
    nemesis: Nemesis,
    changes: Changes,
    rng: random.Random,
    until: float,
    *,
    tell: Callable[[str], None],
    over: threading.Event,
) -> None:
    next_strike, told, began = now() + 2.0, now(), now()
    while now() < until and not over.is_set():
        for _ in range(CROWD - len(changes.pending())):
            changes.publish(nemesis.hits)
        if now() >= next_strike:
            nemesis.strike()
            next_strike = now() + rng.uniform(0.2, 1.5)
        nemesis.mend()
        over.wait(0.1)
        if now() - told >= max(10.0, (until - began) / 10.0):
            told = now()
            tell(f"celery: {told - began:.0f} s, {nemesis.injections} strikes")


def settle(
    it: Stage, nemesis: Nemesis, changes: Changes, deadline: float, over: threading.Event
) -> list[int]:
    """Wait until all is done that was not dropped, and return the numbers of what is not."""
    while not over.is_set():
        pending = changes.pending()
        if not pending or now() > deadline:
            return pending
        if now() > deadline - PATIENCE / 2:
            log = it.log()
            if not any(changes.ids[number] in log for number in pending):
                return pending  # nobody has ever seen them: nobody will
        time.sleep(0.5)
    return changes.pending()
