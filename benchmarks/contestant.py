"""A worker as a candidate: it does in its turn what was published before, and is stopped else."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from celery import Celery

from benchmarks.measure import Candidate, nothing, progress
from support.worker import Worker

#: Environment variable: the file in which a task that was told to notes the time.
MARKS = "BENCH_MARKS"
#: Of the tasks of a turn, the share that is run before the clock starts.
WARM_UP = 0.2
#: How long the last tasks of a turn may take to end [s].
LAST_RELEASE = 0.1
#: After which a turn is given up [s].
LONGEST_TURN = 30.0


def declare(app: Celery, before: Callable[[], None] = nothing, **options: Any) -> None:
    """Declare the task of all contestants: it does *before*, and may be to note the time."""

    @app.task(name="nothing", shared=False, **options)
    def nothing(name: str, mark: str = "") -> None:  # noqa: ARG001  the lock is of it
        before()
        if mark:
            with Path(os.environ[MARKS]).open("a") as marks:
                marks.write(f"{mark} {time.monotonic()}\n")


class Contestant(Candidate):
    """
    One worker and what publishes its tasks; `times` has one per turn: of a task [s].

    Args:
        name: As the tables have it.
        app: Publishes.
        worker: Runs what *app* publishes; is started and ended here.
        at_once: How many tasks it has in hand [1]; so many are run at least, and as many again,
            before the clock starts.

    Attributes:
        published: One per turn: of a ``delay()`` [s].
    """

    def __init__(self, name: str, app: Celery, worker: Worker, *, at_once: int = 1) -> None:
        super().__init__(name, nothing)
        self._app, self._worker, self._at_once = app, worker, at_once
        self.published: list[float] = []
        self._marks = Path(os.devnull)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have the worker there, but stopped, for the body of a ``with``."""
        with tempfile.TemporaryDirectory(prefix="redlock-bench-") as folder:
            self._marks = Path(folder, "marks")
            self._worker.env[MARKS] = str(self._marks)
            with self._worker:
                self._signal(signal.SIGSTOP)
                yield
            self._app.close()

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._worker.pid, number)

    def turn(self, cycles: int) -> None:
        """Publish some tasks, have them done, and note how long one of them took."""
        warm_up = max(int(cycles * WARM_UP), 2 * self._at_once)
        self._marks.write_text("")
        self._publish(warm_up, cycles)
        self._signal(signal.SIGCONT)
        begin, end = self._begin_and_end()
        time.sleep(LAST_RELEASE)  # or it would be stopped with a lock in its hand
        self._signal(signal.SIGSTOP)
        self.times.append((end - begin) / cycles)

    def _publish(self, warm_up: int, cycles: int) -> None:
        task, last = self._app.tasks["nothing"], warm_up + cycles
        marks = {warm_up: "begin", last: "end"}
        name = f"{self._app.conf.task_default_queue} {len(self.times)}"
        started = time.perf_counter()
        for number in range(last + 1):
            task.delay(f"{name} {number}", marks.get(number, ""))
        self.published.append((time.perf_counter() - started) / (last + 1))

    def _begin_and_end(self) -> tuple[float, float]:
        deadline = time.monotonic() + LONGEST_TURN
        while True:
            told = dict(line.split() for line in self._marks.read_text().splitlines())
            if len(told) == 2:
                return float(told["begin"]), float(told["end"])
            log = self._worker.log
            assert time.monotonic() < deadline, f"{self.name} does not end:\n{log()}"
            time.sleep(0.01)  # looked at seldom: the worker is what is measured

    @property
    def both(self) -> list[float]:
        """One per turn: of a ``delay()`` and of a task [s]."""
        return [sum(parts) for parts in zip(self.published, self.times, strict=True)]

    def forget_first(self) -> None:
        """Forget the first turn: connections, and first sights of everything."""
        del self.times[0], self.published[0]


def take_turns(everybody: Sequence[Contestant], rounds: int, tasks: int) -> None:
    """Give every worker its turn in every round, and one before that is not counted."""
    with ExitStack() as stack:
        with ThreadPoolExecutor() as starters:
            list(starters.map(lambda one: stack.enter_context(one.running()), everybody))
        for number in range(rounds + 1):
            for one in random.sample(everybody, len(everybody)):
                one.turn(tasks)
            progress(number, rounds)
    for one in everybody:
        one.forget_first()
