"""
Observer that records what went wrong on the lock nodes, where every operator's tool finds it.

Grants, renewals and releases are not written, only counted (`celery_redlock.observers.tally`), but
for grants to tasks that had queued. So a task that gets its lock at once costs next to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery_redlock.events import NodeDown, NodeEvent, NodeQuarantined, NodeUp
from celery_redlock.observers.records import record_of

if TYPE_CHECKING:
    from celery_redlock.observers.tally import Tally

__all__ = ["JournalObserver"]

#: Each process reports one node so many times in so long [s], and then its last state.
NODE_RECORDS, NODE_PAUSE = 3, 30.0
#: Two quarantines of a node that end so close together are one, met by two connections [s].
SAME_END = 2.0


class JournalObserver:
    """Has *write* record what is worth knowing later, and *tally* count all else."""

    def __init__(self, write: Callable[[dict[str, Any]], None], tally: Tally) -> None:
        self._write = write
        self._tally = tally
        self._down: set[str] = set()
        self._ends: dict[str, float] = {}
        self._written: dict[str, list[float]] = {}
        self._late: dict[str, NodeEvent] = {}

    def __call__(self, event: Any) -> None:
        self._tally(event)
        if self._late:
            self._catch_up()
        if not event.journal or (event.journal == "granted" and not event.queued_for):
            return
        if event.journal != "nodes" or self._is_news(event):
            self._write(record_of(event))

    def _is_news(self, event: NodeEvent) -> bool:
        """Return whether to write this now: no end of what was not, nothing twice or too often."""
        if isinstance(event, NodeUp):
            if event.node not in self._down:
                return False
            self._down.discard(event.node)
        elif isinstance(event, NodeDown):
            self._down.add(event.node)
        elif isinstance(event, NodeQuarantined):
            before, ends = self._ends.get(event.node, 0.0), time.monotonic() + event.left
            self._ends[event.node] = ends
            if abs(ends - before) < SAME_END:
                return False
        if self._is_too_soon(event.node):
            self._late[event.node] = event
            return False
        self._written[event.node] = [*self._written.get(event.node, ()), time.monotonic()]
        return True

    def _is_too_soon(self, node: str) -> bool:
        since = time.monotonic() - NODE_PAUSE
        self._written[node] = [at for at in self._written.get(node, ()) if at > since]
        return len(self._written[node]) >= NODE_RECORDS

    def _catch_up(self) -> None:
        """Write the last state of nodes that had too much to report before."""
        for node, event in list(self._late.items()):
            if not self._is_too_soon(node):
                self._late.pop(node, None)
                self._written[node].append(time.monotonic())
                self._write(record_of(event))

    def flush(self) -> None:
        self._tally.flush()
