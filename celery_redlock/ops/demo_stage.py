"""
What the demo's story happens on: lock servers, a broker, a worker, and the record of its tasks.

All of it is real and on the loopback interface, and all of it ends with the ``with``.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.text import Text

from celery_redlock.ops import demo_app
from celery_redlock.ops.demo_orders import Order, Orders, Tally
from celery_redlock.ops.demo_screen import Screen
from celery_redlock.ops.demo_stop import StopRequests
from celery_redlock.ops.demo_worker import DemoWorker
from celery_redlock.ops.reaper import reaper
from celery_redlock.ops.servers import Server, servers
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import bootstrap, node_statuses

__all__ = ["LOCK_SERVERS", "Broken", "Stage", "staged"]

LOCK_SERVERS = 5
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

    Args:
        screen: Where waiting is shown.
        stop: Asked whenever something is waited for.
        nodes: The lock servers.
        broker: For messages and results.
        folder: Of the worker and the record; removed by who made it.
        with_locks: Whether the tasks take locks.

    Attributes:
        began: When [s, `time.monotonic`].
        rules: Of the locks.
        orders: What was ordered, and what became of it.
        worker: The Celery worker.
    """

    def __init__(
        self,
        screen: Screen,
        stop: StopRequests,
        nodes: Sequence[Server],
        broker: Server,
        *,
        folder: Path,
        with_locks: bool,
    ) -> None:
        self.screen = screen
        self._nodes = nodes
        self.began = time.monotonic()
        self._stop = stop
        record = folder / "record.jsonl"
        self.orders = Orders(record)
        self._urls = [node.url for node in nodes]
        self._states = ["up"] * len(nodes)
        self._asked = 0.0
        environment = {
            demo_app.BROKER: broker.url,
            demo_app.NODES: " ".join(self._urls),
            demo_app.RECORD: str(record),
            demo_app.WITHOUT_LOCKS: "" if with_locks else "yes",
        }
        demo_app.app.conf.update(demo_app.settings_in(environment))
        self.rules = plugin_for(demo_app.app).settings.rules
        self.worker = DemoWorker(folder, environment)

    def prepare(self) -> None:
        """Let the lock servers vote, and have the worker ready; raises Broken and Stopped."""
        for node, result in bootstrap(self._urls, self.rules).items():
            if result != "enrolled":
                msg = f"lock server {node}: {result}"
                raise Broken(msg)
        self.worker.start()
        line = Text("a Celery worker starts")
        if not self.wait(lambda: line, lambda: self.worker.is_ready, WORKER_START):
            msg = f"the Celery worker was not ready after {WORKER_START:g} s"
            raise Broken(msg)

    # -- waiting -------------------------------------------------------------------

    def wait(self, line: Callable[[], Text], until: Callable[[], bool], longest: float) -> bool:
        """
        Wait until something is so, and return whether it is.

        Args:
            line: What to show meanwhile.
            until: Whether it is so.
            longest: How long to wait [s].

        Raises:
            Stopped: Somebody asked the demo to end.
            Broken: The worker has ended by itself.
        """
        deadline = time.monotonic() + longest
        with self.screen.progress() as progress:
            while not until():
                self._stop.check()
                if not self.worker.is_alive:
                    msg = "the Celery worker has ended by itself"
                    raise Broken(msg)
                if time.monotonic() > deadline:
                    return False
                progress.tell(line())
                time.sleep(GLANCE)  # as often as a reader can see the line change
        return True

    def finish(self, orders: Sequence[Order], *jobs: str, longest: float = 15.0) -> Tally:
        """Wait until all *orders* of *jobs* have ended, show it, and return what became of them."""
        tally = self.orders.tally(orders, *jobs)

        def ended() -> bool:
            nonlocal tally
            tally = self.orders.tally(orders, *jobs)
            return not (tally.open or tally.running)

        self.wait(lambda: self.picture(tally), ended, longest)
        return tally

    def watch(self, orders: Sequence[Order], *jobs: str, seconds: float) -> Tally:
        """Show for so many *seconds* what becomes of *orders*, and return it."""
        self.wait(lambda: self.picture(self.orders.tally(orders, *jobs)), lambda: False, seconds)
        return self.orders.tally(orders, *jobs)

    def pause(self, seconds: float) -> None:
        """Leave a person time to read; a log needs none."""
        if self.screen.moves:
            self.wait(self.servers, lambda: False, seconds)

    # -- lock servers --------------------------------------------------------------

    def kill(self, *numbers: int) -> None:
        """End the lock servers of these numbers [counted from 1] with SIGKILL."""
        for number in numbers:
            self._nodes[number - 1].kill()
        self._tell(numbers, "killed")

    def restart(self, *numbers: int) -> None:
        """Start the lock servers of these numbers [counted from 1] with empty memory."""
        for number in numbers:
            self._nodes[number - 1].restart()
        self._tell(numbers, "started again")

    def _tell(self, numbers: Sequence[int], what: str) -> None:
        *most, last = map(str, numbers)
        named = f"servers {', '.join(most)} and {last} are" if most else f"server {last} is"
        self.screen.happened(f"lock {named} {what}")

    def picture(self, tally: Tally) -> Text:
        """Return the servers and *tally* in one line."""
        counts = {
            "running": tally.running,
            "done": tally.done,
            "skipped": tally.skipped,
            "failed": tally.failed,
            "waiting": max(0, tally.open - tally.running),
        }
        told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        return self.servers() + Text(f"  tasks: {told or 'sent'}")

    def servers(self) -> Text:
        """Return how the lock servers are, in a few signs; asks them, but not too often."""
        if time.monotonic() - self._asked > ASK_AGAIN:
            self._asked = time.monotonic()
            self._states = [s.state for s in node_statuses(self._urls, self.rules)]
        return self.screen.servers(self._states)


@contextlib.contextmanager
def staged(screen: Screen, stop: StopRequests, *, with_locks: bool) -> Iterator[Stage]:
    """
    Set the stage for the body of a ``with``, and leave nothing behind.

    Raises:
        Broken: Something did not start.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        try:
            *nodes, broker = stack.enter_context(servers(LOCK_SERVERS + 1))
        except RuntimeError as error:
            raise Broken(str(error)) from error
        stop.check()
        stage = Stage(screen, stop, nodes, broker, folder=folder, with_locks=with_locks)
        stack.callback(demo_app.app.close)
        stack.callback(stage.worker.stop)
        yield stage


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is gone after the ``with``, and even if this process is killed."""
    folder = Path(tempfile.mkdtemp(prefix="redlock-demo-"))
    reaper.watch(str(folder), None, folder=folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        reaper.forget(str(folder))
