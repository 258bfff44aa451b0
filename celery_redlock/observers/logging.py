"""
Observer that is on by default: one log record per thing an operator wants to read.

Every record has two attributes beside its prose, for whoever counts or stores records: ``redlock``,
the name of the event, and ``redlock_event``, a flat dict of what is known: ``lock``, ``task``,
``task_id``, ``cause``, ``holder_task_id``, ``holder_host``, ``holder_pid``, ``holder_since`` [s,
Unix time] and the other fields of the event.

A task that is refused its lock is one line at WARNING, which says what happens to it and who holds
the lock; at INFO if it is skipped, the normal outcome (``redlock_skip_log_level``). Of one that is
rescheduled or queued again and again, the attempts 1, 2, 4, 8 ... are. What led to it is at INFO,
once a minute for each lock; grants and releases are at DEBUG. In report mode, what would have been
refused is at INFO, and the rest at DEBUG. A node is reported when it goes and comes back; in a
worker by its main process alone, for all its children.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from celery_redlock.events import Event, NodeDown, NodeEvent, NodeUp, TaskSkipped
from celery_redlock.observers.records import record_of, reported_as
from celery_redlock.process.log import get_logger
from celery_redlock.reading.sentences import sentence

__all__ = ["Log", "log_event"]

logger = get_logger("celery_redlock")

#: How long it is not said again that there is no quorum for a lock [s], and for how many at most.
PAUSE, MOST_NAMES = 60.0, 1000


class Log:
    """
    Writes events to the logger ``celery_redlock``, those of a skipped task at *skip_level*.

    *speaks_of_nodes* returns whether this process reports nodes; if not, they are at DEBUG.
    """

    def __init__(
        self,
        skip_level: str = "INFO",
        speaks_of_nodes: Callable[[], bool] = lambda: True,
    ) -> None:
        self._skip_level = int(getattr(logging, skip_level))
        self._speaks_of_nodes = speaks_of_nodes
        self._down: set[str] = set()
        self._logged: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        level = event.level if type(event) is not TaskSkipped else self._skip_level
        if getattr(event, "report", False):  # nothing was refused
            level = logging.INFO if reported_as(event) else logging.DEBUG
        elif level > logging.DEBUG:
            level = self._level(event, level)
        if logger.isEnabledFor(level):
            record = record_of(event)
            extra = {"redlock": record["event"], "redlock_event": fields_of(record)}
            logger.log(level, "%s", sentence(record), extra=extra)

    def _level(self, event: Any, level: int) -> int:
        if event.is_preliminary and event.task:
            if getattr(event, "retry_after", None) is not None:
                return logging.DEBUG  # of a quarantine the worker's main process speaks
            return logging.INFO if self._is_due(event.name) else logging.DEBUG
        times = getattr(event, "times", 1)
        if times & (times - 1):  # no power of two
            return logging.DEBUG
        if isinstance(event, NodeEvent):
            is_news = self._is_news(event)
            return level if is_news and self._speaks_of_nodes() else logging.DEBUG
        return level

    def _is_due(self, name: str) -> bool:
        """Return whether the last line about no quorum for this lock is long ago."""
        now = time.monotonic()
        if now - self._logged.get(name, float("-inf")) < PAUSE:
            return False
        if len(self._logged) >= MOST_NAMES:
            self._logged.clear()
        self._logged[name] = now
        return True

    def _is_news(self, event: NodeEvent) -> bool:
        if isinstance(event, NodeUp):
            is_news = event.node in self._down
            self._down.discard(event.node)
            return is_news
        if isinstance(event, NodeDown):
            is_news = event.node not in self._down
            self._down.add(event.node)
            return is_news
        return True


#: With its defaults, for `Redlock` outside of Celery.
log_event = Log()


def fields_of(record: dict[str, Any]) -> dict[str, Any]:
    fields = dict(record)
    for given in ("event", "at", "host", "pid"):  # a log record has these by itself
        del fields[given]
    holder = fields.pop("holder", {})
    if "name" in fields:
        fields["lock"] = fields.pop("name")
    return {**fields, **{f"holder_{key}": value for key, value in holder.items()}}
