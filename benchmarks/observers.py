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
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from celery import Celery, signals

from benchmarks import measure
from benchmarks.contestant import Contestant, declare, take_turns
from benchmarks.lock_cycle import our_locks
from benchmarks.measure import table
from benchmarks.record import Record, Verdict
from celery_redlock import RedlockTask
from celery_redlock.testing.servers import Server, servers
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


def app_with(conf: dict[str, Any]) -> Celery:
    """Return an app with *conf* and the task of all contestants, each call under its own lock."""
    app = Celery("bench", set_as_current="BENCH" in os.environ)
    app.conf.update(conf)
    declare(app, base=RedlockTask, ignore_result=True)
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


def contestant(
    name: str, size: int, broker: Server, nodes: Sequence[str], metrics: str
) -> Contestant:
    """Return a worker with observers as *name* has it, which may keep files in *metrics*."""
    observers, sends_events = WORKERS[name]
    queue = f"{list(WORKERS).index(name)}-{size}"
    conf = {
        "broker_url": broker.url,
        "broker_connection_retry_on_startup": True,
        "task_default_queue": queue,
        "redlock_nodes": list(nodes),
        "redlock_observers": list(observers),
    }
    env = {"BENCH": json.dumps(conf), "PYTHONPATH": os.pathsep.join(sys.path)}
    if "prometheus" in observers:
        env["PROMETHEUS_MULTIPROC_DIR"] = metrics
    options: Any = {"concurrency": size, "name": queue, "env": env}
    worker = Worker("benchmarks.observers", args=["-E"] if sends_events else [], **options)
    return Contestant(name, app_with(conf), worker, at_once=size)


def compare(record: Record, size: int, rounds: int, cycles: int) -> None:
    """Measure, show and judge workers of one size."""
    with ExitStack() as stack:
        broker, *farm = stack.enter_context(servers(6))
        nodes = [node.url for node in farm]
        our_locks(nodes, "redlock").close()
        metrics = stack.enter_context(tempfile.TemporaryDirectory(prefix="redlock-bench-"))
        everybody = [contestant(name, size, broker, nodes, metrics) for name in WORKERS]
        take_turns(everybody, rounds, cycles * TASKS)
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
    app = app_with(json.loads(os.environ["BENCH"]))
    if "otel" in app.conf.redlock_observers:
        signals.worker_process_init.connect(set_up_telemetry, weak=False)

if __name__ == "__main__":
    sys.exit(main())
