"""
The base of all events, and how observers are notified.

Sinks (the log, Celery events, the journal, metrics, the page) are loops over the attributes of a
class. So a new event is one class beside those of its kind, and one test.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal, Protocol

from celery_redlock.events.metrics import Changes
from celery_redlock.events.wording import Record
from celery_redlock.process.log import get_logger

__all__ = ["Event", "Notify", "Observer", "broadcast"]

logger = get_logger("celery_redlock.events")

#: A part of the journal.
Part = Literal["refused", "granted", "nodes", "beat", ""]


@dataclass(frozen=True)
class Event:
    """
    Anything that observers receive.

    What follows is of the class, the same for all of its kind; fields come with the kinds.

    Attributes:
        celery_type: What its Celery event is called, after ``redlock-``.
        is_of_task: Whether consumers of Celery events file it under a task. Only what happens in
            the process that runs the task may be: it would be shown as running elsewhere.
        word: One word or two, for a column.
        mark: ``"bad"`` if something is broken, ``"warn"`` if something did not go as it
            should, else ``"plain"``.
        level: At which it is logged.
        is_preliminary: Whether another event follows that says what happens to the task.
        journal: Part of the journal that keeps it: ``"refused"`` for why a task did not run, or not
            to its end, ``"granted"`` for grants after a time in the queue, ``"nodes"`` for what
            every process notices by itself, ``"beat"``; "" for none.
        metrics: What is counted and measured.
        noted: Attributes that the span of the task keeps, for what a policy did.
    """

    celery_type: ClassVar[str] = ""
    is_of_task: ClassVar[bool] = False
    word: ClassVar[str] = ""
    mark: ClassVar[Literal["bad", "warn", "plain"]] = "plain"
    level: ClassVar[int] = logging.DEBUG
    is_preliminary: ClassVar[bool] = False
    journal: ClassVar[Part] = ""
    metrics: ClassVar[Changes] = {}
    noted: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def what(cls, it: Record) -> str:
        """Return what happened, and to whom; *it* is the event's record."""
        known = ("name", "task", "task_id", "node", "entry", "reason", "cause")
        parts = [f"{key} {it[key]}" for key in known if it.get(key)]
        return " ".join([str(it.get("event") or "?"), *parts])

    @classmethod
    def why(cls, it: Record) -> str:  # noqa: ARG003  kinds look at it
        """Return why it did; "" where there is no more to say."""
        return ""

    @classmethod
    def would(cls, it: Record) -> str:  # noqa: ARG003
        """Return what is said in report mode, where it has not happened; "" for the same."""
        return ""

    @property
    def counts_as(self) -> str:
        """Which cause it is, of those that tallies and reports count; "" for none."""
        return ""


class Observer(Protocol):
    """
    Receives events, in the thread in which they happen.

    It should return soon. What it raises is logged and harms no lock. If it has a method
    ``close()``, that is called when the app's settings have changed and others take its place.
    """

    def __call__(self, event: Event) -> None:
        """Handle *event*."""


#: Takes an event and never raises.
Notify = Callable[[Event], None]


def broadcast(observers: Iterable[Observer]) -> Notify:
    """Return a function that tells all *observers*, whatever any of them raises."""
    return partial(tell, tuple(observers))


def tell(observers: Iterable[Observer], event: Event) -> None:
    """Notify all *observers* of *event*, whatever any of them raises."""
    for observer in observers:
        try:
            observer(event)
        except Exception:  # an observer must never cost a lock
            logger.exception("Observer %r failed on %s", observer, type(event).__name__)


@dataclass(frozen=True)
class LockEvent(Event):
    """
    Something that concerns one lock.

    Attributes:
        name: Lock name. It holds argument values if a template or a callable of the user's puts
            them there, and there are as many names as such values: no label for a metric.
        task: Name of the task that wants or holds it; "" outside of tasks.
        task_id: Its id; "" outside of tasks.
        report: Whether the task is in report mode (``redlock_mode``): nothing was refused,
            delayed or aborted, and this is what would have happened.
    """

    is_of_task = True

    name: str
    task: str = field(default="", kw_only=True)
    task_id: str = field(default="", kw_only=True)
    report: bool = field(default=False, kw_only=True)
