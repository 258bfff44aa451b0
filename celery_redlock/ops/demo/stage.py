"""
The stage of the demo: lock servers, a broker, a worker, and the record of its tasks.

All of it is real and on the loopback interface, and all of it ends with the ``with``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import redis
from celery import states

from celery_redlock.ops.demo import app as demo_app
from celery_redlock.ops.demo.app import Run, read_runs
from celery_redlock.ops.screen import Progress, Stop
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.reaper import reaper
from celery_redlock.testing.servers import Server, servers

__all__ = ["Broken", "Stage", "Tally", "happened", "staged"]

LOCK_SERVERS = 3
#: Processes of the worker: all that run the bodies of a chapter, and more for what else arrives.
PROCESSES = 8
CELERY = (sys.executable, "-m", "celery", "-A", demo_app.__name__)
# Without mingle and gossip: they make workers know each other, and a start take a second.
OPTIONS = f"-c {PROCESSES} -l INFO -P prefork --without-mingle --without-gossip --without-heartbeat"
#: Longest start of the worker [s]; on an idle machine it takes two.
WORKER_START = 40.0
#: Longest wait for the end of some tasks [s].
PATIENCE = 25.0
#: How much of the worker's log is shown when something went wrong.
LOG_LINES = 40
#: How often is looked at what goes on [s].
GLANCE = 0.05


class Broken(Exception):
    """The demo itself cannot go on; says why."""


@dataclass(frozen=True)
class Tally:
    """The outcome of some orders: their runs, and how many have no run, an error, no end yet."""

    runs: list[Run]
    skipped: int
    failed: int
    open: int

    @property
    def running(self) -> int:
        return sum(run.over is None for run in self.runs)

    @property
    def ended(self) -> list[Run]:
        return [run for run in self.runs if run.over is not None and not run.is_killed]

    @property
    def words(self) -> str:
        done = len({run.invoice for run in self.ended})
        counts = {
            "running": self.running,
            "done": done,
            "again": len(self.ended) - done,
            "killed": sum(run.is_killed for run in self.runs),
            "skipped": self.skipped,
            "failed": self.failed,
            "waiting": max(0, self.open - self.running),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "sent"


class Stage:
    def __init__(
        self, stop: Stop, nodes: Sequence[Server], broker: Server, folder: Path, *, with_locks: bool
    ) -> None:
        self.nodes, self.with_locks = nodes, with_locks
        self.sent: list[str] = []
        self._stop, self._broker, self._folder = stop, broker, folder
        self._record, self._log = folder / "record.jsonl", folder / "worker.log"
        self._killed: dict[int, float] = {}
        self._worker: subprocess.Popen[bytes] | None = None
        self._workers = 0
        self._scene: dict[str, Any] = {
            "broker": broker.url,
            "nodes": None,  # the broker
            "record": str(self._record),
            "with_locks": with_locks,
        }
        demo_app.use(self._scene)
        self.rules = plugin_for(demo_app.app).settings.rules
        bootstrap([broker.url], self.rules)

    def grow(self) -> None:
        """Have the lock servers keep the locks in place of the broker."""
        self.end_worker()
        urls = self._scene["nodes"] = [node.url for node in self.nodes]
        bootstrap(urls, self.rules)
        self.start_worker()

    def order(self, invoices: Sequence[int], seconds: float) -> list[str]:
        orders = [demo_app.bill.delay(invoice, seconds).id for invoice in invoices]
        self.sent += orders
        return orders

    def runs(self) -> list[Run]:
        return read_runs(self._record, self._killed)

    def tally(self, orders: Sequence[str]) -> Tally:
        answers = [demo_app.app.backend.get_task_meta(order) for order in orders]
        ready = [answer for answer in answers if answer["status"] in states.READY_STATES]
        results = [answer["result"] for answer in ready]
        return Tally(
            runs=[run for run in self.runs() if run.task in orders],
            skipped=sum(isinstance(result, dict) and "skipped" in result for result in results),
            failed=sum(answer["status"] != states.SUCCESS for answer in ready),
            open=len(orders) - len(ready),
        )

    def unacknowledged(self) -> int:
        with redis.Redis.from_url(self._broker.url) as client:
            return int(client.hlen("unacked"))

    def wait(
        self, until: Callable[[], bool], longest: float, line: Callable[[], str] = str
    ) -> bool:
        """Show *line* until it is so, and return whether it is; raises Stopped, Broken."""
        deadline = time.monotonic() + longest
        progress = Progress("...")
        try:
            while not until():
                self._stop.check()
                if self._worker is not None and self._worker.poll() is not None:
                    raise Broken(f"the Celery worker has ended by itself\n{self.log_end}")
                if time.monotonic() > deadline:
                    return False
                progress.tell(f"   {line()}")
                time.sleep(GLANCE)
        finally:
            progress.clear()
        return True

    def watch(
        self, orders: Sequence[str], until: Callable[[Tally], bool], longest: float = PATIENCE
    ) -> Tally:
        tally = self.tally(orders)

        def is_so() -> bool:
            nonlocal tally
            tally = self.tally(orders)
            return until(tally)

        self.wait(is_so, longest, lambda: tally.words)
        return tally

    def finish(self, orders: Sequence[str]) -> Tally:
        return self.watch(orders, lambda tally: not (tally.open or tally.running))

    def start_worker(self) -> None:
        self._workers += 1
        name = f"worker-{self._workers}@demo"
        own = {
            demo_app.SCENE: json.dumps(self._scene),
            "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
            # Killed, it cannot take its temporary files along: they go with the folder.
            "TMPDIR": str(self._folder),
        }
        with self._log.open("ab") as log:
            # A session of its own: a terminal's Ctrl-C must not reach it, but SIGKILL must reach
            # its children.
            self._worker = subprocess.Popen(
                [*CELERY, "worker", "-n", name, *OPTIONS.split()],
                cwd=self._folder,
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        reaper.watch(str(self._folder), self._worker.pid, group=True, folder=self._folder)
        ready = f"{name} ready."
        if not self.wait(lambda: ready in self._log.read_text(errors="replace"), WORKER_START):
            raise Broken(f"no worker is ready after {WORKER_START:g} s\n{self.log_end}")
        happened(f"a Celery worker with {PROCESSES} processes is ready")

    @property
    def log_end(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(["The end of the worker's log:", *lines[-LOG_LINES:]])

    def end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        # Its children may outlive it, so the group is killed even if it has ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        over = time.monotonic()
        self._killed |= {run.pid: over for run in self.runs() if run.over is None}
        # The process id may now become somebody else's; the folder is still ours.
        reaper.watch(str(self._folder), None, folder=self._folder)

    def kill_process_of(self, run: Run) -> None:
        os.kill(run.pid, signal.SIGKILL)
        self._killed[run.pid] = time.monotonic()


def happened(text: str) -> None:
    click.echo(f"   - {text}")


@contextlib.contextmanager
def staged(stop: Stop, *, with_locks: bool) -> Iterator[Stage]:
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="redlock-demo-"))
        # Gone after the `with`, and even if this process is killed.
        reaper.watch(str(folder), None, folder=folder)
        stack.callback(reaper.forget, str(folder))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            *nodes, broker = stack.enter_context(servers(LOCK_SERVERS + 1))
        except RuntimeError as error:
            raise Broken(str(error)) from error
        stop.check()
        stage = Stage(stop, nodes, broker, folder, with_locks=with_locks)
        stack.callback(demo_app.app.close)
        stack.callback(stage.end_worker)
        happened("a Redis as message broker, and lock servers for later, are started")
        yield stage
