"""
What the demo's story happens on: lock servers, a broker, a worker, and the record of its tasks.

All of it is real and on the loopback interface, and all of it ends with the ``with``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import redis
from celery import states

from celery_redlock.ops import demo_app
from celery_redlock.ops.demo_app import Run, Tally, in_counts, read_runs
from celery_redlock.ops.demo_screen import Screen
from celery_redlock.ops.screen import Stop
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import bootstrap, node_statuses
from celery_redlock.testing.reaper import reaper
from celery_redlock.testing.servers import Server, servers

__all__ = ["LOCK_SERVERS", "Broken", "Stage", "staged"]

LOCK_SERVERS = 5
#: Processes of the worker: all that run the bodies of a chapter, and more for what else arrives.
PROCESSES = 8
CELERY = (sys.executable, "-m", "celery", "-A", demo_app.__name__)
# Without mingle and gossip: they make workers know each other, and a start take a second.
OPTIONS = f"-c {PROCESSES} -l INFO -P prefork --without-mingle --without-gossip --without-heartbeat"
#: Longest start of the worker [s]; on an idle machine it takes two.
WORKER_START = 40.0
#: How often is looked at what goes on [s].
GLANCE = 0.05
#: How often the lock servers are asked how they are, where that is shown [s].
ASK_AGAIN = 0.4


class Broken(Exception):
    """The demo itself cannot go on; says why."""


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
        self._stop, self._nodes, self._folder = stop, nodes, folder
        self._record = folder / "record.jsonl"
        self._killed: dict[int, float] = {}
        self._urls, self._broker = [node.url for node in nodes], broker.url
        self._states, self._asked = ["up"] * len(nodes), 0.0
        self._worker: subprocess.Popen[bytes] | None = None
        self._workers = 0
        self._environment = {
            demo_app.BROKER: broker.url,
            demo_app.NODES: " ".join(self._urls),
            demo_app.RECORD: str(self._record),
            demo_app.WITHOUT_LOCKS: "" if with_locks else "yes",
        }
        demo_app.app.conf.update(demo_app.settings_in(self._environment))
        self.rules = plugin_for(demo_app.app).settings.rules

    # -- tasks ---------------------------------------------------------------------------

    def order(self, invoices: Sequence[int], seconds: float) -> list[str]:
        """Order the billing of *invoices*; one takes so many *seconds*. Returns the task ids."""
        orders = [demo_app.bill.delay(invoice, seconds).id for invoice in invoices]
        self.sent += orders
        return orders

    def runs(self) -> list[Run]:
        """Return all runs, by start."""
        return read_runs(self._record, self._killed)

    def tally(self, orders: Sequence[str]) -> Tally:
        """Return the outcome of *orders*."""
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
        """Return how many messages the broker would deliver again if the worker died now."""
        with redis.Redis.from_url(self._broker) as client:
            return int(client.hlen("unacked"))

    # -- waiting -------------------------------------------------------------------------

    def wait(self, line: Callable[[], str], until: Callable[[], bool], longest: float) -> bool:
        """Show *line* until something is so, and return whether it is; raises Stopped, Broken."""
        deadline = time.monotonic() + longest
        with self.screen.progress() as tell:
            while not until():
                self._stop.check()
                if self._worker is not None and self._worker.poll() is not None:
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
        """Wait until the outcome of *orders* is as it should be, show it, and return it."""
        tally = self.tally(orders)

        def is_so() -> bool:
            nonlocal tally
            tally = self.tally(orders)
            return until(tally)

        self.wait(lambda: f"{self.servers()}tasks: {tally.words}", is_so, longest)
        return tally

    def finish(self, orders: Sequence[str], longest: float = 15.0) -> Tally:
        """Wait until all *orders* have ended, show it, and return their outcome."""
        return self.watch(orders, lambda tally: not (tally.open or tally.running), longest)

    def pause(self, seconds: float) -> None:
        """Leave a person time to read; a log needs none."""
        if self.screen.moves:
            self.wait(self.servers, lambda: False, seconds)

    # -- lock servers --------------------------------------------------------------------

    def servers(self) -> str:
        """Return how the lock servers are, a sign each; asks them, but not too often."""
        if not self.with_locks:
            return ""
        if time.monotonic() - self._asked > ASK_AGAIN:
            self._asked = time.monotonic()
            states = [node.state for node in node_statuses(self._urls, self.rules)]
            self._states = [state if state in ("up", "down") else "silent" for state in states]
        counts = {"dead": self._states.count("down"), "silent": self._states.count("silent")}
        missing = f" ({in_counts(counts)})" if any(counts.values()) else ""
        return f"servers {''.join(map(self.screen.sign, self._states))}{missing}  "

    def enrol(self) -> None:
        """Let the lock servers vote."""
        for node, result in bootstrap(self._urls, self.rules).items():
            if result != "enrolled":
                msg = f"lock server {node}: {result}"
                raise Broken(msg)

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

    # -- worker --------------------------------------------------------------------------

    def start_worker(self) -> None:
        """Start a worker and wait until it is ready; raises Broken and Stopped."""
        self._workers += 1
        name = f"worker-{self._workers}@demo"
        path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        # Killed, it cannot take its temporary files along: they go with the folder.
        own = {"PYTHONPATH": path, "TMPDIR": str(self._folder)}
        with (self._folder / "worker.log").open("ab") as log:
            # A session of its own: a terminal's Ctrl-C must not reach it, but SIGKILL must reach
            # its children.
            self._worker = subprocess.Popen(
                [*CELERY, "worker", "-n", name, *OPTIONS.split()],
                cwd=self._folder,
                env={**os.environ, **self._environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        reaper.watch(str(self._folder), self._worker.pid, group=True, folder=self._folder)
        is_there = self.wait(
            lambda: "a Celery worker starts", lambda: f"{name} ready." in self.log, WORKER_START
        )
        if not is_there:
            msg = f"the Celery worker was not ready after {WORKER_START:g} s"
            raise Broken(msg)
        self.screen.happened(f"a Celery worker with {PROCESSES} processes is ready")

    @property
    def log(self) -> str:
        """What the workers wrote so far."""
        log = self._folder / "worker.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def end_worker(self) -> None:
        """End it and its children with SIGKILL; doing so again is no error."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        # Its children may outlive it, so the group is killed even if it has ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        # The process id may now become somebody else's; the folder is still ours.
        reaper.watch(str(self._folder), None, folder=self._folder)

    def kill_worker(self, *amid: Run) -> None:
        """End the worker and all its children, in the middle of some runs."""
        self.end_worker()
        self._killed |= dict.fromkeys((run.pid for run in amid), time.monotonic())
        self.screen.happened("the worker is killed, with all its processes")

    def kill_process_of(self, run: Run) -> None:
        """End the worker's child that is in the middle of *run*."""
        os.kill(run.pid, signal.SIGKILL)
        self._killed[run.pid] = time.monotonic()
        self.screen.happened(f"process {run.pid} of the worker is killed in mid-task")


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
        stack.callback(stage.end_worker)
        yield stage
