"""
Counting part of the journal's observer: what each task does, hour by hour.

Counting is a note in memory. The notes are summed up and sent to the nodes with an event a few
seconds later, in the thread of that event, or at the end of the process. So no thread of its own
ever connects, and an execution costs a few microseconds.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from celery_redlock.events import LockAcquired, LockReleased, TaskEvent
from celery_redlock.lock.records import is_text
from celery_redlock.observers.records import record_of
from celery_redlock.reading.holds import class_of
from celery_redlock.reading.tally import CAUSES, HOUR, HOW, REPORTED, Counts, together

__all__ = ["EVERY", "Tally"]

#: How often a process sends what it has counted [s], and with how many events at the latest.
EVERY, MOST = 5.0, 1000
#: Of an example, what is kept beside its holder.
EXAMPLE = ("at", "host", "pid", "name", "task_id", "holder_id", "reason", "votes", "report")
#: What is counted beside what is refused.
HOLDS = (LockAcquired, LockReleased)
#: A moment [s, Unix time], and what happened.
Recorded = tuple[float, Any]


class Tally:
    """
    Counts what tasks do, and sends the counts of an hour and task now and then.

    *reaches_all* returns whether every node is connected or down; in the first moments of a process
    some are about to be connected, and then the counts are sent some seconds later.
    """

    def __init__(
        self,
        send: Callable[[int, str, Counts], None],
        reaches_all: Callable[[], bool] = lambda: True,
    ) -> None:
        self._send, self._reaches_all = send, reaches_all
        self._is_late = False
        self._sent = float("-inf")
        self._recorded: deque[Recorded] = deque()  # its own steps are atomic: no lock
        self._pid = os.getpid()

    def __call__(self, event: Any) -> None:
        if not (event.journal == "refused" or type(event) in HOLDS) or not event.task:
            return
        if self._pid != os.getpid():  # what the parent recorded is the parent's
            self._recorded, self._pid = deque(), os.getpid()
        self._recorded.append((time.time(), event))
        if time.monotonic() - self._sent >= EVERY or len(self._recorded) >= MOST:
            if self._is_late or self._reaches_all():
                self.flush()
            else:
                self._sent, self._is_late = time.monotonic(), True

    def flush(self) -> None:
        if self._pid != os.getpid():
            return
        self._sent, self._is_late = time.monotonic(), False
        for (hour, task), counts in summed(taken_from(self._recorded)).items():
            self._send(hour, task, counts)


def taken_from(recorded: deque[Recorded]) -> Iterator[Recorded]:
    """Yield what was recorded, each once whoever else takes from it."""
    while True:
        try:
            yield recorded.popleft()
        except IndexError:
            return


def summed(recorded: Iterable[Recorded]) -> dict[tuple[int, str], Counts]:
    parts: dict[tuple[int, str], list[Counts]] = {}
    for at, event in recorded:
        if is_text(event.task):
            parts.setdefault((int(at // HOUR), event.task), []).append(counts_of(at, event))
    return {key: together(of_one, HOW) for key, of_one in parts.items()}


def counts_of(at: float, event: Any) -> Counts:
    """Return what happened *at* a moment [s, Unix time] as counts."""
    stamp, cause = round(at * 1000), cause_of(event)
    numbers, examples = {"first": stamp, "last": stamp}, {}
    if isinstance(event, LockReleased):
        held = round(event.held * 1000)
        numbers |= {f"hold:{class_of(event.held)}": 1, "held": held, "longest": held}
        if event.ttl:
            numbers["ttl"] = round(event.ttl * 1000)
    elif cause:
        numbers[f"{REPORTED}{cause}" if event.report else cause] = 1
        examples[f"example:{cause}"] = example_of(at, event)
    if isinstance(event, LockAcquired) or (isinstance(event, TaskEvent) and event.report):
        numbers["ran"] = 1
        if event.report:
            numbers[f"{REPORTED}ran"] = 1
    return Counts(numbers, examples)


def cause_of(event: Any) -> str:
    # What waits is refused again and again, and counts once.
    is_first = getattr(event, "times", 1) <= 1
    return event.counts_as if is_first and event.counts_as in CAUSES else ""


def example_of(at: float, event: Any) -> dict[str, Any]:
    """Return ids and places of both sides of *event*."""
    record = {**record_of(event), "at": round(at, 3)}
    example = {field: record[field] for field in EXAMPLE if field in record}
    return {**example, "holder": record["holder"]} if record.get("holder") else example
