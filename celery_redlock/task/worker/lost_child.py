"""
Release for a child process that was killed: by a hard time limit, a revoke, or the system.

    the child is lost --> marker "done", if Celery will not bring the message back
                      --> proven dead --> reservation ended, lock of its owner released

The parent never releases on the strength of what Celery says: its hooks for a hard limit and
a revoke run while the body still does. What the body of a child has started on its own, other
processes for example, is not known here.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from celery_redlock.errors import RedlockError
from celery_redlock.lock.algorithm.results import ReleaseOutcome
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import rate_name
from celery_redlock.lock.scripts.requests import Marker
from celery_redlock.lock.waiting.waiting import leave_request
from celery_redlock.plugin import plugin_for
from celery_redlock.process.log import get_logger
from celery_redlock.task.execution.end import left_of
from celery_redlock.task.execution.outcome import DONE, Outcome, records_after
from celery_redlock.task.messages.delivery import Delivery
from celery_redlock.task.naming.task_lock import lock_of, names_told, places_of
from celery_redlock.task.worker.death import wait_until_dead
from celery_redlock.task.worker.node_watch import forks_held_off

__all__ = ["LostChild"]

logger = get_logger(__name__)

#: How long to wait for a child that was told to die [s]. One that ignores it releases by itself
#: when its body ends, or is lost later and comes up again.
LONGEST_DYING = 600.0
#: Pause between two tries to release while the nodes do not answer [s].
PAUSE = 0.5


@dataclass(frozen=True, kw_only=True)
class LostChild:
    """
    A child process that is dead, or was told to die, and what it leaves behind.

    Attributes:
        task: Its task.
        args: Positional arguments, as delivered.
        kwargs: Keyword arguments, as delivered.
        delivery: What its message is known by.
        pid: Its process.
        since: When it began [s, Unix time]; its lock was granted then, or later.
        outcome: How its execution has ended.
        comes_in: When its task is delivered again, if it is [s].
    """

    task: Any
    args: Any
    kwargs: Any
    delivery: Delivery
    pid: int
    since: float
    outcome: Outcome
    comes_in: float

    def clear_away_in_thread(self) -> None:
        """Clear away in a thread of its own: the parent's event loop must not wait for a death."""
        name = f"redlock-forced-end-{self.pid}"
        try:
            threading.Thread(target=self._clear_away, name=name, daemon=True).start()
        except (
            RuntimeError
        ):  # no more threads, or the end of the process; Celery's own work must go on
            logger.warning("No thread left to release for %s; its lock expires", self)

    def _clear_away(self) -> None:
        try:
            places = places_of(self.task, self._names, self.args, self.kwargs)
            plugin = plugin_for(self.task.app)
            options = self.delivery.adjust(lock_of(self.task).options)
            reservation = self.delivery.envelope.reservation
            records = records_after(self.outcome, options, reservation, DONE, self.comes_in)
            locks = plugin.locks_for(report=options.only_reports)
            asked = locks.inspect_all([name for name, _ in places])
            holders = [view.holder for views in asked for view in views if view.holder]
            if records.marker is not None and not self._is_held_by_another(holders):
                done = Marker(self.delivery.execution, records.marker, options.dedup_ttl)
                locks.mark(done, wait=True)
            held_since = (h.get("since") for h in holders if self.delivery.is_owner(h))
            since = next(held_since, None) or self.since
            if wait_until_dead(self.pid, LONGEST_DYING):
                if reservation is not None:
                    known = plugin.reservations_for(report=reservation.is_report)
                    reservation.end(known, records.reservation, records.life, wait=True)
                self._leave(plugin.locks)
                ends = time.monotonic() + options.ttl  # by then its leases have ended without us
                for name, place in self._held(locks, places):
                    self._release(locks, name, place, options, since, ends)
        except RedlockError as error:  # the arguments make no name, the settings no locks
            logger.warning("Nothing to release for %s: %s", self, error)
        except Exception:
            logger.exception("Releasing for %s failed; its lock expires", self)

    @property
    def _names(self) -> tuple[str, ...]:
        delivery = self.delivery
        return names_told(
            self.task, self.args, self.kwargs, delivery.headers, delivery.envelope.names
        )

    def _leave(self, locks: Any) -> None:
        """Have the nodes forget that it waited for its locks, as a message or in ``lock_wait``."""
        names = list(self._names)
        if lock_of(self.task).options.most_starts:
            names += map(rate_name, self._names)
        for name in names:
            locks.driver.tell(leave_request(locks.rules, name, self.delivery.owner or ""))
            if self.outcome not in {Outcome.RETRIED, Outcome.REQUEUED}:  # else another waits on
                locks.driver.tell(leave_request(locks.rules, name, self.delivery.execution))

    def _is_held_by_another(self, holders: list[dict[str, Any]]) -> bool:
        """Return whether another delivery of this execution runs: then it is not over."""
        return any(
            holder.get("execution") == self.delivery.execution
            and not self.delivery.is_owner(holder)
            for holder in holders
        )

    def _held(self, locks: Any, places: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return those of *places* that it may hold: a lock may have a thousand."""
        if len(places) == 1:
            return places
        asked = locks.inspect_all([name for name, _ in places])
        return [
            place
            for place, views in zip(places, asked, strict=True)
            if sum(not view.problem for view in views) < quorum(len(views))
            or any(self.delivery.is_owner(view.holder) for view in views)
        ]

    def _release(
        self, locks: Any, name: str, place: int, options: Any, since: float, ends: float
    ) -> None:
        """Release until a majority has answered, or the lease has ended without us."""
        info = {"task": self.task.name, "task_id": self.delivery.task_id}
        while True:
            keep = left_of(options.min_hold, since)
            with forks_held_off:
                owner = self.delivery.owner
                outcome = locks.release_for(
                    name, owner, since=since, keep=keep, info=info, place=place
                )
            if outcome is ReleaseOutcome.RELEASED:
                logger.info("Released lock %r for %s", name, self)
            if outcome is not ReleaseOutcome.UNKNOWN or time.monotonic() > ends:
                return
            time.sleep(PAUSE)  # until a quorum answers, or the lease has ended by itself

    def __str__(self) -> str:
        return f"{self.task.name}[{self.delivery.task_id}], whose process {self.pid} was lost"
