"""Servers, workers and the client of one cell, and how a situation looks at them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from celery import Celery

from benchmarks.peers.app import CELL, Cell, make_app
from benchmarks.peers.contestants import BEATS, NODES
from benchmarks.peers.rows import OURS
from celery_redlock.testing.servers import Server, servers
from support.beats import Beat
from support.clients import let_go
from support.events import Body, Event, bodies, now, read
from support.waiting import eventually
from support.worker import Worker

ROOT = Path(__file__).parents[2]
APP = "benchmarks.peers.app"


class Scene:
    """
    All that a cell has.

    Attributes:
        app: As the client sees it.
        nodes: The lock servers.
        workers: All workers that were started.
    """

    def __init__(self, cell: Cell, nodes: list[Server], folder: Path) -> None:
        self.cell, self.nodes = cell, nodes
        self.app: Celery = make_app(cell)
        self.workers: list[Worker] = []
        self._folder, self._stack = folder, ExitStack()
        self._env = {CELL: cell.as_json(), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}

    def bootstrap(self) -> None:
        """Have nodes of ours vote at once."""
        if self.cell.column == OURS:
            from celery_redlock.plugin import plugin_for  # noqa: PLC0415
            from celery_redlock.reading.nodes import bootstrap  # noqa: PLC0415  ours alone

            told = bootstrap(self.cell.nodes, plugin_for(self.app).settings.rules)
            assert set(told.values()) == {"enrolled"}, told

    def worker(self, *, queue: str = "celery", concurrency: int = 2) -> Worker:
        """Start a worker."""
        worker = Worker(
            APP,
            name=f"w{len(self.workers) + 1}",
            concurrency=concurrency,
            args=["-Q", queue],
            env=self._env,
            cwd=self._folder,
            start_timeout=60,
        )
        self.workers.append(worker)
        return self._stack.enter_context(worker)

    def beat(self, name: str) -> Beat:
        """Start a beat with a schedule file of its own."""
        args = BEATS.get(self.cell.column, ("-S", "celery.beat:PersistentScheduler"))
        beat = Beat(APP, name=name, folder=self._folder, env=self._env, args=args)
        return self._stack.enter_context(beat)

    def close(self) -> None:
        """End everything."""
        self._stack.close()
        if self.cell.column == OURS:
            from celery_redlock.plugin import plugin_for  # noqa: PLC0415  ours alone

            plugin_for(self.app).locks.close()
        let_go(self.app)

    # -- what a situation does and sees ------------------------------------------------

    def call(self, *args: Any, queue: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Call the task; return the id of what came of it, and the name of what was raised."""
        options = {} if queue is None else {"queue": queue}
        try:
            result = self.app.tasks["work"].apply_async(args, kwargs, **options)
        except Exception as error:  # noqa: BLE001  what is raised is what is looked at
            return {"id": None, "raised": type(error).__name__}
        return {"id": getattr(result, "id", None), "raised": None}

    def events(self) -> list[Event]:
        """Return all that the tasks recorded."""
        return read(self.cell.events)

    def bodies(self, name: str = "job x") -> list[Body]:
        """Return the bodies of one name, in the order of their starts."""
        return [one for one in bodies(self.events()) if one.name == name]

    def started(self, times: int = 1, name: str = "job x") -> Body:
        """Wait for the start of body number *times* of *name*, and return it."""
        eventually(lambda: len(self.bodies(name)) >= times, f"start {times} of {name}", timeout=30)
        return self.bodies(name)[times - 1]

    def wait(self, condition: Callable[[], Any], patience: float) -> bool:
        """Wait for *condition* up to *patience* [s]; return whether it came true."""
        deadline = now() + patience
        while not condition():
            if now() > deadline:
                return False
            time.sleep(0.02)  # between two looks at files that others write
        return True

    def state(self, task_id: str | None) -> str:
        """Return the state that is stored of a task; empty for no task."""
        return self.app.AsyncResult(task_id).state if task_id else ""

    def answer(self, task_id: str | None, patience: float) -> str:
        """Return what the caller of a task gets: its value, or the name of what is raised."""
        try:
            return str(self.app.AsyncResult(task_id).get(timeout=patience))
        except Exception as error:  # noqa: BLE001  what is raised is what is looked at
            return type(error).__name__

    def silence(self, since: float, patience: float) -> dict[str, Any]:
        """
        Make the call again and again until its body starts.

        Args:
            since: When it should have been free [s, as `now`].
            patience: How long to try [s].

        Returns:
            ``silent``: seconds from *since* to that start, None if there was none in
            ``waited`` seconds.
        """
        known = {one.body for one in self.bodies()}
        begun = now()
        while now() < begun + patience:
            self.call("job")
            time.sleep(0.2)  # a caller that tries again, not one that floods the queue
            if fresh := [one for one in self.bodies() if one.body not in known]:
                return {"silent": fresh[0].started - since, "waited": patience}
        return {"silent": None, "waited": patience}


@contextmanager
def scene(row: str, column: str) -> Iterator[Scene]:
    """Set the scene of a cell, with servers of its own."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="redlock-peers-")))
        broker, *nodes = stack.enter_context(servers(1 + NODES.get(column, 1)))
        urls = [node.url for node in nodes]
        there = Scene(Cell(row, column, broker.url, urls, str(folder / "events")), nodes, folder)
        stack.callback(there.close)
        there.bootstrap()
        yield there
