"""Deliveries of a task's message, as the tracer of a worker's child runs them, in this process."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import signal
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import redis
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import SoftTimeLimitExceeded
from celery.states import READY_STATES

from celery_redlock import Redlock, RedlockTask
from celery_redlock.lock.records import marker_key
from celery_redlock.plugin import plugin_for
from celery_redlock.process.deferral import DEFERRED, _Deferral
from celery_redlock.reading.health import connect
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.task.execution.execution import running_execution
from celery_redlock.task.execution.interrupt import here
from celery_redlock.task.messages.delivery import execution_id
from celery_redlock.testing.servers import Server
from resources.remains import Remains, looking_at

__all__ = ["SIGNALS", "Shop", "handled", "shop"]

#: What a signal raises, as in a child of the prefork pool.
SIGNALS: dict[str, type[BaseException]] = {
    "SIGUSR1": SoftTimeLimitExceeded,
    "SIGTERM": SystemExit,
    "SIGINT": KeyboardInterrupt,
}


#: Of the message that is delivered.
PUBLISH = "0" * 32


def execution_of(task_id: str) -> str:
    return execution_id("shop.bill", task_id, PUBLISH, 0, 0)


class Shop:
    """An app with one task, ``bill``, and what is known of its deliveries."""

    def __init__(self, app: Celery, servers: Sequence[Server], **options: Any) -> None:
        @app.task(base=RedlockTask, name="shop.bill", shared=False, lock_key="{name}", **options)
        def bill(name: str) -> str:
            return f"{name} is billed"

        self.app = app
        self.task: Any = app.tasks["shop.bill"]
        self.locks: Redlock = plugin_for(app).locks
        connect(self.locks, 60.0)
        self._trace = build_tracer("shop.bill", self.task, app=app)
        self._clients = [redis.Redis.from_url(server.url) for server in servers]
        self._numbers = itertools.count()
        self._prefix = secrets.token_hex(4)  # the results of all shops are in one dict
        self.name = ""
        self.next_name()
        self._handlers = handlers()
        self.deliver()
        assert not self.problems()
        self.next_name()

    def next_name(self) -> None:
        self.name = f"{self._prefix}{next(self._numbers)}"

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.locks.close()
        self.app.close()

    def deliver(self) -> None:
        """Run a delivery as a worker's child does; its task id is the name of its lock."""
        told = {"retries": 0, "delivery_info": {"routing_key": "celery"}, "is_eager": False}
        header = {"v": 1, "task_id": self.name, "id": PUBLISH}
        who = {"id": self.name, "task": "shop.bill", "hostname": "here"}
        request = {**told, **who, "redlock": header}
        self._trace(self.name, [self.name], {}, request)

    def problems(self) -> list[str]:
        marker = marker_key("redlock", execution_of(self.name))
        states = [client.get(marker) for client in self._clients]
        is_stored = self.app.AsyncResult(self.name).state in READY_STATES
        found = {
            "signals are masked": handlers() != self._handlers or _Deferral.current is not None,
            "an interrupt is armed": here.interrupt is not None,
            "a lock is current": running_execution() is not None,
            "a request is current": self.task.request.id is not None,
            "it counts as done, but has no result": states.count(b"done") > 2 and not is_stored,
        }
        return [what for what, is_so in found.items() if is_so]


def handlers() -> list[Any]:
    """Return who handles the signals that our own I/O holds back."""
    return [signal.getsignal(number) for number in DEFERRED if number in set(signal.Signals)]


@contextlib.contextmanager
def handled() -> Iterator[None]:
    def raises(error: type[BaseException]) -> Any:
        def handler(_number: int, _frame: FrameType | None) -> None:
            raise error

        return handler

    before = {
        name: signal.signal(getattr(signal, name), raises(error)) for name, error in SIGNALS.items()
    }
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


@contextlib.contextmanager
def shop(servers: Sequence[Server], **options: Any) -> Iterator[tuple[Shop, Remains]]:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        redlock_nodes=[server.url for server in servers],
        redlock_node_timeout=2.0,
        redlock_ttl=100.0,
        redlock_max_ttl=120.0,
    )
    app.conf.broker_transport_options = {"polling_interval": 0.01}
    bootstrap(app.conf.redlock_nodes, plugin_for(app).settings.rules)
    opened = Shop(app, servers, **options)
    try:
        with looking_at(opened.locks, servers) as remains:
            yield opened, remains
    finally:
        opened.close()
