"""
What observers cost a worker: the time per task with none of them, with the default ones, with all.

The same prefork worker on five lock nodes runs tasks that do nothing, each under a lock of its
own. All workers of a run take short turns, in another order in every round; those whose turn it is
not are stopped by a signal. What counts is the median of the ratios within a round: other programs
slow a round down, and rarely one turn of it. Celery's own events cost more than all observers, so
workers are compared that both send them, or both do not. ``All`` is with metrics for Prometheus in
files, as workers with several processes need them, and OpenTelemetry with an SDK that makes and
batches every span and metric, and throws them away. Run it with ``make bench``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis
from celery import Celery, signals

from benchmarks import measure
from benchmarks.lock_cycle import our_locks
from benchmarks.measure import Candidate, nothing, progress, table
from benchmarks.record import Record, Verdict
from celery_redlock import RedlockTask
from celery_redlock.ops.servers import Server, servers
from support.worker import Worker

DEFAULT = ("logging", "journal", "celery")
ALL = (*DEFAULT, "prometheus", "otel")
#: Name -> what ``redlock_observers`` is, and whether Celery's events are on.
WORKERS: dict[str, tuple[Sequence[str], bool]] = {
    "no observers": ((), False),
    "default observers": (DEFAULT, False),
    "no observers, with -E": ((), True),
    "default observers, with -E": (DEFAULT, True),
    "all observers, with -E": (ALL, True),
}
SIZES = (1, 2)
#: What is left of the tasks per second [1]: of whom, beside whom, how much at least.
LEFT = (
    ("default observers", "no observers", 0.97),
    ("all observers, with -E", "no observers, with -E", 0.85),
)
#: Tasks per turn, for each cycle asked for; and turns for each round asked for.
TASKS = 2
TURNS = 4
#: Share of them that is run before the clock starts.
WARM_UP = 0.2
MARKS = "marks"
#: How long the last tasks of a turn may take to end [s].
LAST_RELEASE = 0.1
#: After which a turn is given up [s].
LONGEST_TURN = 30.0


def make_app(conf: dict[str, Any]) -> Celery:
    """Return an app with *conf* and a task that does nothing, unless it is to note the time."""
    app = Celery("bench", set_as_current="BENCH" in os.environ)
    app.conf.update(conf)

    @app.task(name="nothing", base=RedlockTask, ignore_result=True, shared=False)
    def nothing(name: str, mark: str = "") -> None:  # noqa: ARG001  the lock is of it
        if mark:
            with redis.Redis.from_url(conf["broker_url"]) as client:
                client.rpush(MARKS, json.dumps([mark, time.monotonic()]))

    return app


def set_up_telemetry(**_: Any) -> None:
    """Set up an SDK in a child that makes everything and sends it nowhere."""
    from opentelemetry import metrics, trace  # noqa: PLC0415  in some of the workers alone
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider, export  # noqa: PLC0415

    nowhere = Path(os.devnull).open("w")  # noqa: SIM115  as long as the child lives
    exporter = export.ConsoleSpanExporter(out=nowhere, formatter=lambda _span: "")
    provider = TracerProvider()
    provider.add_span_processor(export.BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()]))


class Contestant(Candidate):
    """One worker, stopped between its turns; `times` has one per turn: of a task [s]."""

    def __init__(self, name: str, size: int, broker: Server, nodes: Sequence[str]) -> None:
        super().__init__(name, nothing)
        observers, self._sends_events = WORKERS[name]
        self._size = size
        self._queue = f"{list(WORKERS).index(name)}-{size}"
        self._conf = {
            "broker_url": broker.url,
            "broker_connection_retry_on_startup": True,
            "task_default_queue": self._queue,
            "redlock_nodes": list(nodes),
            "redlock_observers": list(observers),
        }
        self._app = make_app(self._conf)
        self._client = redis.Redis.from_url(broker.url)
        self._worker: Worker | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have the worker there, but stopped, for the body of a ``with``."""
        env = {"BENCH": json.dumps(self._conf), "PYTHONPATH": os.pathsep.join(sys.path)}
        args = ["-E"] if self._sends_events else []
        with tempfile.TemporaryDirectory(prefix="redlock-bench-") as metrics:
            if "prometheus" in self._conf["redlock_observers"]:
                env["PROMETHEUS_MULTIPROC_DIR"] = metrics
            options = {"concurrency": self._size, "name": self._queue, "args": args, "env": env}
            with Worker("benchmarks.observers", **options) as self._worker:
                self._signal(signal.SIGSTOP)
                yield
                self._signal(signal.SIGCONT)
            self._client.close()
            self._app.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._worker is not None
        os.killpg(self._worker.pid, number)

    def turn(self, cycles: int) -> None:
        """Have some tasks done that were published before, and note how long one took."""
        count = cycles * TASKS
        marks = {int(count * WARM_UP): "begin", count - 1: "end"}
        for number in range(count):
            name = f"{self.name} {len(self.times)} {number}"
            self._app.tasks["nothing"].delay(name, mark=marks.get(number, ""))
        self._signal(signal.SIGCONT)
        assert self._worker is not None
        log = self._worker.log
        deadline, at = time.monotonic() + LONGEST_TURN, {}
        while len(at) < len(marks):
            assert time.monotonic() < deadline, f"{self.name} does not end:\n{log()}"
            time.sleep(0.01)  # looked at seldom: the worker is what is measured
            popped: Any = self._client.lpop(MARKS)
            at.update([json.loads(popped)] if popped else [])
        time.sleep(LAST_RELEASE)  # or it would be stopped with a lock in its hand
        self._signal(signal.SIGSTOP)
        self.times.append((at["end"] - at["begin"]) / (count - 1 - int(count * WARM_UP)))


def compare(record: Record, size: int, rounds: int, cycles: int) -> None:
    """Measure, show and judge workers of one size."""
    with ExitStack() as stack:
        broker, *farm = stack.enter_context(servers(6))
        nodes = [node.url for node in farm]
        our_locks(nodes, "redlock").close()
        everybody = [Contestant(name, size, broker, nodes) for name in WORKERS]
        with ThreadPoolExecutor() as starters:
            list(starters.map(lambda one: stack.enter_context(one.running()), everybody))
        for number in range(rounds + 1):
            for one in random.sample(everybody, len(everybody)):
                one.turn(cycles)
            progress(number, rounds)
    for one in everybody:
        del one.times[0]  # connections, and first sights of everything
    title = f"Time per task in a prefork worker with -c {size}; all share this machine"
    record.show(table(title, everybody))
    record.judge(*what_is_left({one.name: one.times for one in everybody}, size))


def what_is_left(times: dict[str, list[float]], size: int) -> Iterator[Verdict]:
    """Yield what is left of the tasks per second: the median of the ratios within a round."""
    for name, other, least in LEFT:
        ratio = statistics.median(b / a for a, b in zip(times[name], times[other], strict=True))
        yield Verdict(f"{name} / {other}, -c {size}", round(ratio, 4), least, at_least=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables; with ``--check`` return 1 if a target was missed."""
    chosen = measure.arguments(__doc__, arguments)
    record = Record("observers", {"rounds": chosen.rounds, "cycles": chosen.cycles})
    for size in SIZES:
        compare(record, size, TURNS * chosen.rounds, chosen.cycles)
    return record.end(chosen)


if "BENCH" in os.environ:
    app = make_app(json.loads(os.environ["BENCH"]))
    if "otel" in app.conf.redlock_observers:
        signals.worker_process_init.connect(set_up_telemetry, weak=False)

if __name__ == "__main__":
    sys.exit(main())
