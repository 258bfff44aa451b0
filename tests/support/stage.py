"""
A stage for acceptance tests: lock nodes, a broker, workers, and their app as a client sees it.

The tasks stand in the test's own file, in a function ``declare(app)``. The test calls it for
its client, and every worker, which is started with ``-A support.stage``, calls it for itself:

    with stage(__file__, tmp_path, redlock_ttl=3.0) as it:
        it.worker(pool="threads")
        it.task("nap").delay(0.1).get(timeout=100)

One stage serves all tests of a module, so names of locks have to differ between them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from celery_redlock import Redlock
from celery_redlock.lock.nodes import connections
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.health import check
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.task.messages.envelope import Envelope, fresh_publish_id
from celery_redlock.testing.servers import Server, servers
from support.clients import let_go
from support.events import Body, bodies, read
from support.redelivery import look_often
from support.stored import clients_of
from support.waiting import eventually
from support.worker import Worker

__all__ = ["LASTING", "Stage", "copied_message", "stage"]

DEFAULTS = {
    "broker_connection_retry_on_startup": True,
    "worker_prefetch_multiplier": 1,
    "task_track_started": True,
    # So long that a loaded machine makes no node late; a test that is about it has its own.
    "redlock_node_timeout": 1.0,
    # Celery's own 3 s fail a nested chord whose parts such a machine is still storing.
    "result_chord_join_timeout": 60.0,
}

#: For a stage whose tests are to keep their locks, and to reach their nodes, however slow the
#: machine is: nobody's stall is as long as that. Those of expiry have shorter leases of their own.
LASTING = {"redlock_ttl": 120.0, "redlock_max_ttl": 120.0, "redlock_node_timeout": 1.0}


def copied_message() -> dict[str, Any]:
    """Return options of a message that can be published again, as if the broker had two of it."""
    task_id = str(uuid.uuid4())
    return {"task_id": task_id, "headers": Envelope(fresh_publish_id()).header(task_id)}


def make_app(file: str, conf: dict[str, Any], *, is_worker: bool) -> Celery:
    """Return an app with *conf* and the tasks that *file* declares."""
    if is_worker:
        look_often()
        connections.FIRST_CONNECT = 20.0  # a server that is slow to answer is not down
    app = Celery("stage", set_as_current=is_worker)
    app.conf.update(conf)
    declared_in(file)(app)
    return app


def declared_in(file: str) -> Callable[[Celery], None]:
    spec = importlib.util.spec_from_file_location("declared_tasks", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    declare: Callable[[Celery], None] = module.declare
    return declare


class Stage:
    """
    Everything that is on the stage.

    Attributes:
        nodes: The lock nodes.
        broker: The server for messages and results, unless the app's settings name others.
        events: File that the tasks record to; workers have its name as ``EVENTS``.
        app: The app as a client sees it.
        workers: All workers, in the order of their start; also one that did not get ready.
    """

    def __init__(
        self,
        file: str,
        folder: Path,
        broker: Server | None,
        nodes: list[Server],
        conf: dict[str, Any],
    ) -> None:
        self.nodes = nodes
        self._broker = broker
        self.events = folder / "events.jsonl"
        own: dict[str, Any] = {"redlock_nodes": [node.url for node in nodes]}
        if broker is not None:
            # The same database: a signal that hits redis-py while it connects costs its SELECT.
            own |= {"broker_url": broker.url, "result_backend": broker.url}
        self._file = file
        self.conf = {**DEFAULTS, **own, **conf}
        self.app = make_app(file, self.conf, is_worker=False)
        self.workers: list[Worker] = []
        self._numbers = itertools.count(1)  # threads start workers, and no two have one name
        self._folder = folder
        self._stack = ExitStack()

    def bootstrap(self) -> None:
        """Enrol the nodes and connect the client; to be called while no lock is held."""
        plugin = plugin_for(self.app)
        nodes, rules = self.conf["redlock_nodes"], plugin.settings.rules
        enrolled = {"enrolled"}  # of those that did not answer in time, at another try
        eventually(lambda: {*bootstrap(nodes, rules).values()} == enrolled, "enrolment of all")
        # Connecting takes a loaded machine longer than a first publish waits for it.
        eventually(lambda: check(plugin.locks) == {}, "connections")

    @property
    def broker(self) -> Server:
        assert self._broker is not None
        return self._broker

    def worker(self, conf: dict[str, Any] | None = None, **options: Any) -> Worker:
        """
        Start a worker.

        Args:
            conf: Settings that this worker has in place of those of the stage.
            **options: Those of `support.worker.Worker`.
        """
        mine = {**self.conf, **(conf or {})}
        env = {"EVENTS": str(self.events), "STAGE": json.dumps([self._file, mine])}
        options = {"name": f"w{next(self._numbers)}", "cwd": self._folder, **options}
        worker = Worker("support.stage", env={**env, **options.pop("env", {})}, **options)
        self.workers.append(worker)
        return self._stack.enter_context(worker)

    def start_workers(self, all_options: Iterable[dict[str, Any]]) -> None:
        with ThreadPoolExecutor(max_workers=16) as starters:
            list(starters.map(lambda options: self.worker(**options), all_options))

    def close(self) -> None:
        self._stack.close()
        if self.conf.get("redlock_nodes"):
            plugin_for(self.app).locks.close()
        let_go(self.app)

    def task(self, name: str) -> Any:
        return self.app.tasks[name]

    def locks(self, **settings: Any) -> Redlock:
        """Return locks of somebody else on the same nodes, with the app's rules or *settings*."""
        rules = plugin_for(self.app).settings.rules
        return Redlock.from_urls(
            [*self.conf["redlock_nodes"]],
            max_ttl=rules.max_ttl,
            ttl=rules.ttl,
            node_timeout=rules.node_timeout,
            **settings,
        )

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        """
        Hold the lock *name* as somebody else, for the body of a ``with``.

        The lease is as long as may be: a short one would ask of the machine that it lets the
        watchdog of this process run in time.
        """
        locks = self.locks()
        try:
            with locks.hold(name, ttl=locks.rules.max_ttl, wait=60.0):
                yield
        finally:
            locks.close()

    def bodies(self, name: str) -> list[Body]:
        return [body for body in bodies(read(self.events)) if body.name == name]

    def started(self, name: str, times: int = 1) -> list[Body]:
        return eventually(
            lambda: found if len(found := self.bodies(name)) >= times else None,
            f"start number {times} of {name!r}",
            timeout=100,
        )

    def wait_until_begun(self, pid: int) -> None:
        """
        Wait until a worker's main process knows that its child *pid* is at a task.

        A child that dies before that is not missed: Celery hands its task to another one.
        """

        def knows() -> bool:
            active = self.app.control.inspect(timeout=0.5).active() or {}
            return any(task["worker_pid"] == pid for tasks in active.values() for task in tasks)

        eventually(knows, f"a worker that knows of {pid}", timeout=100)

    def keys(self, pattern: str) -> set[str]:
        """Return the names of the keys on any node that fit *pattern*, past the library."""
        return {key.decode() for client in clients_of(self.nodes) for key in client.keys(pattern)}

    def no_key_is_for_ever(self) -> None:
        for client in clients_of(self.nodes):
            assert [key for key in client.keys("redlock:*") if client.pttl(key) == -1] == []

    def wait_until_free(self, *names: str) -> None:
        """
        Wait until no node stores any of the locks *names*; without names: any lock at all.

        Less long than a lease lasts, so that keys that were forgotten do not pass for released.
        """
        patterns = [f"redlock:lock:{name}" for name in names] or ["redlock:lock:*"]
        left: set[str] = set()

        def is_free() -> bool:
            left.clear()
            left.update(*map(self.keys, patterns))
            return not left

        try:
            eventually(is_free, "release", timeout=self.conf["redlock_ttl"] / 2)
        except AssertionError as error:
            raise AssertionError(f"{error}: {sorted(left)}") from None

    def wait_until_quiet(self) -> None:
        with redis.Redis.from_url(self.conf["broker_url"]) as client:
            eventually(
                lambda: not any(client.keys("celery")) and not client.exists("unacked"),
                "quiet at the broker",
                timeout=60,
                every=0.1,
            )

    def meta(self, task_id: str) -> dict[str, Any]:
        """Return what the result backend stores of a task, past Celery; ``{}`` for nothing."""
        with redis.Redis.from_url(self.conf["result_backend"]) as client:
            stored = client.get(f"celery-task-meta-{task_id}")
        return dict(json.loads(stored)) if stored else {}

    def log(self) -> str:
        return "\n".join(worker.log() for worker in self.workers)

    def wait_for_log(self, pattern: str, *, timeout: float = 60.0) -> None:
        eventually(lambda: re.search(pattern, self.log()), f"{pattern!r} logged", timeout=timeout)


@contextlib.contextmanager
def stage(file: str, folder: Path, *, nodes: int = 5, **conf: Any) -> Iterator[Stage]:
    """
    Set the stage for the tasks that *file* declares.

    Args:
        file: A Python file with a function ``declare(app)``.
        folder: An empty one.
        nodes: How many lock nodes, enrolled for the app's rules.
        **conf: Settings of the app, which win over those of the stage.
    """
    with ExitStack() as stack:
        needs_server = not {"broker_url", "result_backend"} <= {*conf}
        farm = stack.enter_context(servers(nodes + needs_server))
        broker = farm.pop(0) if needs_server else None
        it = Stage(file, folder, broker, farm, conf)
        stack.callback(it.close)
        if farm and "redlock_nodes" not in conf:
            it.bootstrap()
        yield it


if "STAGE" in os.environ:
    app = make_app(*json.loads(os.environ["STAGE"]), is_worker=True)
