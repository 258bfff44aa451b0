"""
What the demo's story happens on: lock servers, a broker, a worker, and the record of its tasks.

All of it is real and on the loopback interface, and all of it ends with the ``with``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from celery import states
from rich.text import Text

from celery_redlock.ops import demo_app
from celery_redlock.ops.demo_app import Run, read_runs
from celery_redlock.ops.demo_screen import Screen
from celery_redlock.ops.demo_worker import PROCESSES, Worker
from celery_redlock.ops.reaper import reaper
from celery_redlock.ops.screen import Stop
from celery_redlock.ops.servers import Server, servers
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import bootstrap, node_statuses

__all__ = ["LOCK_SERVERS", "Broken", "Stage", "Tally", "staged"]

LOCK_SERVERS = 5
#: Longest start of the worker [s]; on an idle machine it takes two.
WORKER_START = 40.0
#: How often is looked at what goes on [s].
GLANCE = 0.05
#: How often the lock servers are asked how they are, where that is shown [s].
ASK_AGAIN = 0.4


class Broken(Exception):
    """The demo itself cannot go on; says why."""


@dataclass(frozen=True)
class Tally:
    """What became of some orders: their runs, and how many have no run, an error, no end yet."""

    runs: list[Run]
    skipped: int
    failed: int
    open: int

    @property
    def running(self) -> int:
        """How many bodies run at this moment."""
        return sum(run.over is None for run in self.runs)

    @property
    def done(self) -> int:
        """How many bodies have come to their end."""
        return sum(run.over is not None and not run.is_killed for run in self.runs)

    @property
    def words(self) -> str:
        """All of that in one line."""
        done = {run.invoice for run in self.runs if run.over is not None and not run.is_killed}
        counts = {
            "running": self.running,
            "done": len(done),
            "again": self.done - len(done),
            "killed": sum(run.is_killed for run in self.runs),
            "skipped": self.skipped,
            "failed": self.failed,
            "waiting": max(0, self.open - self.running),
        }
        return ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "sent"


class Stage:
    """
    The servers, the worker, and what is known of them.

    Attributes:
        sent: Ids of the tasks that were ordered. (An AsyncResult would call the broker when it is
            thrown away, which may be when there is no broker any more.)
    """

    def __init__(
        self,
        screen: Screen,
        stop: Stop,
        nodes: Sequence[Server],
        broker: Server,
        *,
        folder: Path,
        with_locks: bool,
    ) -> None:
        self.screen, self.with_locks = screen, with_locks
        self.sent: list[str] = []
        self._stop, self._nodes = stop, nodes
        self._record = folder / "record.jsonl"
        self._killed: dict[int, float] = {}
        self._urls = [node.url for node in nodes]
        self._states = ["up"] * len(nodes)
        self._asked = 0.0
        environment = {
            demo_app.BROKER: broker.url,
            demo_app.NODES: " ".join(self._urls),
            demo_app.RECORD: str(self._record),
            demo_app.WITHOUT_LOCKS: "" if with_locks else "yes",
        }
        demo_app.app.conf.update(demo_app.settings_in(environment))
        self.rules = plugin_for(demo_app.app).settings.rules
        self.worker = Worker(folder, environment)

    def prepare(self) -> None:
        """Let the lock servers vote, and have the worker ready; raises Broken and Stopped."""
        for node, result in bootstrap(self._urls, self.rules).items():
            if result != "enrolled":
                msg = f"lock server {node}: {result}"
                raise Broken(msg)
        self.start_worker()

    def order(self, invoices: Sequence[int], seconds: float) -> list[str]:
        """Order the billing of *invoices*; one takes so many *seconds*. Returns the task ids."""
        orders = [demo_app.bill.delay(invoice, seconds).id for invoice in invoices]
        self.sent += orders
        return orders

    def runs(self) -> list[Run]:
        """Return all runs, by start."""
        return read_runs(self._record, self._killed)

    def tally(self, orders: Sequence[str]) -> Tally:
        """Return what became of *orders*."""
        answers = [demo_app.app.backend.get_task_meta(order) for order in orders]
        ready = [answer for answer in answers if answer["status"] in states.READY_STATES]
        results = [answer["result"] for answer in ready]
        return Tally(
            runs=[run for run in self.runs() if run.task in orders],
            skipped=sum(isinstance(result, dict) and "skipped" in result for result in results),
            failed=sum(answer["status"] != states.SUCCESS for answer in ready),
            open=len(orders) - len(ready),
        )

    def wait(self, line: Callable[[], Text], until: Callable[[], bool], longest: float) -> bool:
        """Show *line* until something is so, and return whether it is; raises Stopped, Broken."""
        deadline = time.monotonic() + longest
        with self.screen.progress() as tell:
            while not until():
                self._stop.check()
                if self.worker.has_ended:
                    msg = "the Celery worker has ended by itself"
                    raise Broken(msg)
                if time.monotonic() > deadline:
                    return False
                tell(line())
                time.sleep(GLANCE)  # as often as a reader can see the line change
        return True

    def watch(
        self, orders: Sequence[str], until: Callable[[Tally], bool], longest: float = 15.0
    ) -> Tally:
        """Wait until what became of *orders* is as it should, show it, and return it."""
        tally = self.tally(orders)

        def is_so() -> bool:
            nonlocal tally
            tally = self.tally(orders)
            return until(tally)

        self.wait(lambda: self.servers() + Text(f"tasks: {tally.words}"), is_so, longest)
        return tally

    def finish(self, orders: Sequence[str], longest: float = 15.0) -> Tally:
        """Wait until all *orders* have ended, show it, and return what became of them."""
        return self.watch(orders, lambda tally: not (tally.open or tally.running), longest)

    def pause(self, seconds: float) -> None:
        """Leave a person time to read; a log needs none."""
        if self.screen.moves:
            self.wait(self.servers, lambda: False, seconds)

    def kill(self, *numbers: int) -> None:
        """End the lock servers of these numbers [counted from 1] with SIGKILL."""
        for number in numbers:
            self._nodes[number - 1].kill()
        self.screen.happened(f"{named(numbers)} killed")

    def restart(self, *numbers: int) -> None:
        """Start the lock servers of these numbers [counted from 1] with empty memory."""
        for number in numbers:
            self._nodes[number - 1].restart()
        self.screen.happened(f"{named(numbers)} started again")

    def kill_process_of(self, run: Run) -> None:
        """End the worker's child that is in the middle of *run*."""
        os.kill(run.pid, signal.SIGKILL)
        self._killed[run.pid] = time.monotonic()
        self.screen.happened(f"process {run.pid} of the worker is killed in mid-task")

    def kill_worker(self, *amid: Run) -> None:
        """End the worker and all its children, in the middle of some runs."""
        self.worker.kill()
        self._killed |= dict.fromkeys((run.pid for run in amid), time.monotonic())
        self.screen.happened("the worker is killed, with all its processes")

    def start_worker(self) -> None:
        """Start a worker and wait until it is ready; raises Broken and Stopped."""
        self.worker.start()
        line = Text("a Celery worker starts")
        if not self.wait(lambda: line, lambda: self.worker.is_ready, WORKER_START):
            msg = f"the Celery worker was not ready after {WORKER_START:g} s"
            raise Broken(msg)
        self.screen.happened(f"a Celery worker with {PROCESSES} processes is ready")

    def servers(self) -> Text:
        """Return how the lock servers are, in a few signs; asks them, but not too often."""
        if not self.with_locks:
            return Text("")
        if time.monotonic() - self._asked > ASK_AGAIN:
            self._asked = time.monotonic()
            self._states = [s.state for s in node_statuses(self._urls, self.rules)]
        return self.screen.servers(self._states) + Text("  ")


def named(numbers: Sequence[int]) -> str:
    """Return which lock servers have these *numbers*, as a sentence begins."""
    *most, last = map(str, numbers)
    return f"lock servers {', '.join(most)} and {last} are" if most else f"lock server {last} is"


@contextlib.contextmanager
def staged(screen: Screen, stop: Stop, *, with_locks: bool) -> Iterator[Stage]:
    """Set the stage for the body of a ``with``, and leave nothing behind; raises Broken."""
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
        stage = Stage(screen, stop, nodes, broker, folder=folder, with_locks=with_locks)
        stack.callback(demo_app.app.close)
        stack.callback(stage.worker.kill)
        yield stage
