"""
Observer that sends Celery events, for ``celery events``, Flower and whoever else listens.

Active in a worker that was started with ``-E`` (or has ``worker_send_task_events``); in other
processes, those that publish tasks and beat, where ``task_send_sent_event`` is set. The children
of a worker learn of ``-E`` when they are started: ``celery control enable_events`` at run time
does not reach them, so restart the worker with ``-E``.

What a worker's task did with its lock is ``task-redlock-acquired`` and so on, with the task's id as
``uuid``, so that consumers file it under the task. All else is in a group of its own,
``redlock-node-down`` and so on. In report mode, where nothing is refused, the same are called
``task-redlock-report-skipped`` and so on. Consumers take whatever is in the group ``task`` for news
of a task from the worker that runs it. For Celery's own `celery.events.state.State` a type that it
does not know is a state, which lasts until the task succeeds or fails: until then it shows
``REDLOCK-ACQUIRED`` where it had ``STARTED``, also of a task that is terminated or retried
afterwards. ``SUCCESS`` and ``FAILURE`` win, whatever comes before or after.

The thread that has the lock sends nothing: see `celery_redlock.observers.outbox`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

from celery import signals
from celery.app import trace
from celery.events.dispatcher import EventDispatcher
from celery.events.event import get_exchange
from celery.utils.nodenames import anon_nodename
from celery.utils.time import utcoffset
from kombu import Producer
from kombu.exceptions import EncodeError

from celery_redlock.events import Event
from celery_redlock.lock.records import shortened
from celery_redlock.observers.outbox import Outbox
from celery_redlock.observers.records import record_of
from celery_redlock.process.log import get_logger

__all__ = ["CeleryEvents"]

logger = get_logger(__name__)

#: How long the end of a process may wait for the last events to be sent [s].
LAST_WORDS = 1.0
#: Field of a record -> what it is called in an event. As attributes of Celery's `Task`, which
#: they become, ``event`` would replace a method, and ``name`` is the name of the task.
CALLED = {"at": "timestamp", "name": "lock", "task": "name", "task_id": "uuid"}
LEFT_OUT = ("event", "host", "holder_id")

_every_observer: weakref.WeakSet[CeleryEvents] = weakref.WeakSet()


class CeleryEvents:
    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin
        self._publishes = bool(plugin.app.conf.task_send_sent_event)
        self._line: Line | None = None
        self._outbox = Outbox("Celery events", self._send, self._hang_up)
        _every_observer.add(self)

    def __call__(self, event: Event) -> None:
        if self._plugin.sends_events or (self._publishes and not worker_name()):
            self._outbox.put((time.time(), event))

    def flush(self) -> None:
        self._outbox.flush(LAST_WORDS)

    def close(self) -> None:
        """Send what is left, and end the thread that sends."""
        self._outbox.close()

    def _send(self, batch: Sequence[tuple[float, Event]]) -> None:
        app = self._plugin.app
        if app is None:
            return  # the app is gone, and its broker with it
        if self._line is None or not self._line.is_ours:
            self._line = Line(app)
        worker = worker_name()
        messages = [message_of(event, at, worker) for at, event in batch]
        for group in ("task", "redlock"):
            of_group = [m for m in messages if m["type"].startswith(f"{group}-")]
            if of_group:
                self._line.send(group, of_group)

    def _hang_up(self) -> None:
        if self._line is not None and self._line.is_ours:
            self._line.close()


def worker_name() -> str:
    known: Any = getattr(trace, "_localized", ())  # from where Celery takes it for each task
    return str(known[-1]) if known else ""


def message_of(event: Event, at: float, worker: str) -> dict[str, Any]:
    """
    Return the body of the Celery event for *event*, at a time [s, Unix time].

    It has no ``clock``: a child never hears of other clocks, and to an event without one the
    consumer gives its own. *worker* is "" outside of workers.
    """
    record = shortened({**record_of(event), "at": at})
    if "holder_id" in record:  # of the task that was there first
        record["task_id"] = record["holder_id"]
    fields = {CALLED.get(key, key): value for key, value in record.items() if key not in LEFT_OUT}
    fields = {key: value for key, value in fields.items() if value or key not in ("uuid", "name")}
    is_filed = event.is_of_task and "uuid" in fields and bool(worker)
    name = event.celery_type or type(event).__name__
    group, mode = "task-" if is_filed else "", "report-" if record.get("report") else ""
    kind = f"{group}redlock-{mode}{name}"
    return {**fields, "type": kind, "hostname": worker or anon_nodename(), "utcoffset": utcoffset()}


class Line:
    """
    A connection of our own to the broker, along which events are sent in lists.

    Not one of Celery's pool: a task that publishes must not wait for it, nor find it broken.
    """

    def __init__(self, app: Any) -> None:
        self.pid = os.getpid()
        self._connection = app.connection_for_write()
        driver = self._connection.transport.driver_type
        self._is_deaf = driver in EventDispatcher.DISABLED_TRANSPORTS
        self._exchange = get_exchange(self._connection, name=app.conf.event_exchange)
        self._serializer = app.conf.event_serializer
        self._producer: Any = None

    @property
    def is_ours(self) -> bool:
        return self.pid == os.getpid()

    def send(self, group: str, messages: list[dict[str, Any]]) -> None:
        """Send *messages* of one group as one list; raises what the transport raises."""
        if self._is_deaf:
            return
        self._connect()
        if self._producer is None:
            self._producer = Producer(self._connection, self._exchange, auto_declare=False)
        try:
            self._producer.publish(
                messages,
                routing_key=f"{group}.multi",
                declare=[self._exchange],
                serializer=self._serializer,
                headers={"hostname": messages[0]["hostname"]},
                delivery_mode="transient",
                retry=False,
            )
        except EncodeError:  # sent again, it would be no better
            logger.exception("%d Celery events cannot be written and are dropped", len(messages))

    def _connect(self) -> None:
        """Try each address of the broker once; kombu would never give up, and nobody would know."""
        more = max(0, len(self._connection.alt or ()) - 1)
        self._connection.ensure_connection(max_retries=more)

    def close(self) -> None:
        """Drop the connection without telling the broker, which may be away."""
        self._producer = None
        if self._connection.connected:  # else the next try uses what this one has made
            with contextlib.suppress(Exception):
                self._connection.collect(LAST_WORDS)


@signals.worker_process_shutdown.connect(weak=False)
@signals.worker_shutdown.connect(weak=False)
@atexit.register
def _flush(**_: Any) -> None:
    for observer in list(_every_observer):
        observer.flush()
