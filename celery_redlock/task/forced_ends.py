"""
Release for a child that was killed: by a hard time limit, a revoke, or the system.

    parent: delivery --> owner minted --> child takes the lock as that owner
            the child is lost --> marker "done", if Celery will not bring the message back
                              --> proven dead --> release what that owner holds

The parent never releases on the strength of what Celery says: its hooks for a hard limit and
a revoke run while the body still does. What the body of a child has started on its own, other
processes for example, is not known here.

Source:
    FACTS 6; the custom request class is Celery's `Task.Request`.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from billiard.einfo import ExceptionWithTraceback  # type: ignore[attr-defined]
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import bootsteps
from celery.exceptions import InvalidTaskError
from celery.worker.request import Request
from celery.worker.state import revoked, task_ready

from celery_redlock.errors import RedlockError
from celery_redlock.lock.redlock import ReleaseOutcome
from celery_redlock.lock.requests import Marker
from celery_redlock.log import get_logger
from celery_redlock.nodewatch import forks_held_off
from celery_redlock.plugin import locking, plugin_for
from celery_redlock.task.death import wait_until_dead
from celery_redlock.task.delivery import Delivery, mint_owner, note_serializer
from celery_redlock.task.execution import left_of
from celery_redlock.task.reservation import AGAIN, FAILED, FINISHED, REVOKED, Reservation
from celery_redlock.task.task_lock import lock_of

__all__ = ["NoteRevokes", "RedlockRequest"]

logger = get_logger(__name__)

#: How the parent learns that a child did not come to its own end.
FORCED = (WorkerLostError, TimeLimitExceeded, Terminated, SystemExit, KeyboardInterrupt)
#: How long to wait for a child that was told to die [s]. One that ignores it releases by itself
#: when its body ends, or is lost later and comes up again.
LONGEST_DYING = 600.0
#: How often a worker looks whether a task that waits in it was revoked [s].
LOOK_FOR_REVOKES = 0.5
#: Pause between two tries to release while the nodes do not answer [s].
PAUSE = 0.5
#: How much of a task id that is none is shown.
LONGEST_SHOWN = 60


class RedlockRequest(Request):
    """One delivery of a message of a `RedlockTask`, in the worker's parent process."""

    worker_pid: Any  # of the child; in other pools of who knows what
    _request_dict: dict[str, Any]
    _already_cancelled: bool
    _already_revoked: bool
    _was_rejected = _was_put_back = _is_retried = False
    _seen_to: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not (isinstance(self.id, str) and self.id):
            shown = repr(self.id)[:LONGEST_SHOWN]
            raise InvalidTaskError(f"task id must be a non-empty string, not {shown}")
        self._owner = mint_owner(self._request_dict)
        note_serializer(self._request_dict, self.message.content_type, self.task.serializer)
        self._delivery = Delivery.of(self.task, self._request_dict, self.hostname)
        self._queued = self._delivery.envelope.reservation
        if self._queued is not None:
            _queued_here.add(self)

    def is_owner(self, holder: dict[str, Any]) -> bool:
        """Return whether *holder*, of whose token only the beginning is told, is this delivery."""
        return bool(holder.get("token")) and self._owner.startswith(holder["token"])

    def reject(self, requeue: bool = False) -> None:  # noqa: FBT001, FBT002  Celery's signature
        """Reject the message, and remember whether the broker is to deliver it again."""
        self._was_rejected = self._was_rejected or not self.acknowledged
        self._was_put_back = self._was_put_back or (requeue and not self.acknowledged)
        super().reject(requeue=requeue)

    def on_failure(
        self,
        exc_info: Any,
        send_failed_event: bool = True,  # noqa: FBT001, FBT002  Celery's signature
        return_ok: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """
        Let Celery decide what becomes of the task; then release for a child that is lost.

        One that could return its error (*return_ok*), whatever that is, has released by itself.
        """
        try:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        finally:
            if not return_ok and is_forced(exc_info.exception):
                self._see_to_child()
                self._leave_queue_without_child()

    def on_timeout(self, soft: bool, timeout: float) -> None:  # noqa: FBT001  Celery's signature
        """Let Celery see to a time limit; in green pools it says no more of a hard one."""
        super().on_timeout(soft, timeout)
        if not soft:
            self._leave_queue_without_child()

    def terminate(self, *args: Any, **kwargs: Any) -> None:
        """Terminate the task; Celery may take seconds to note that the child is dead."""
        super().terminate(*args, **kwargs)
        self._see_to_child()
        self._leave_queue_without_child()

    def revoked(self) -> bool:
        """Return whether the task is revoked or has expired; then it stands for no name."""
        worker = self._delivery.envelope.worker
        if worker is not None and worker != self.hostname:  # a broadcast copy; its worker runs it
            task_ready(self)
            self.acknowledge()
            return True
        is_revoked = bool(super().revoked())
        if is_revoked:
            self.leave_queue(REVOKED)
        return is_revoked

    def leave_queue(self, became: str) -> None:
        """End the queued marker of a task that is not going to run, or to go on."""
        queued, self._queued = self._queued, None
        if queued is None or locking.disabled:
            return
        task: Any = self.task
        plugin = plugin_for(task.app)
        try:
            queued.end(plugin.reservations, lock_of(task).options, became, wait=False)
        except Exception:  # it ends by itself; Celery's own work must go on
            logger.exception("Ending the queued marker of %s[%s] failed", self.task.name, self.id)

    def _leave_queue_without_child(self) -> None:
        """The same where the body ran in this process, so that Celery's word suffices."""
        if self.worker_pid is not None and not plugin_for(self.task.app).has_children:
            self.leave_queue(self._became)

    @property
    def _became(self) -> str:
        """What became of the task, as far as the parent has to say it."""
        is_put_back = self._was_put_back or (self._already_cancelled and self.task.acks_late)
        if self._is_retried or is_put_back:
            return AGAIN
        return REVOKED if self._already_revoked else FAILED

    def _retry_worker_lost(self, *args: Any) -> bool:
        """Publish a retry for a child that was lost (Celery 5.7), and remember that."""
        self._is_retried = bool(super()._retry_worker_lost(*args))  # type: ignore[misc]
        return self._is_retried

    def cancel(self, *args: Any, **kwargs: Any) -> None:
        """As `terminate`, for a shutdown or a lost connection."""
        super().cancel(*args, **kwargs)
        self._see_to_child()

    def _see_to_child(self) -> None:
        if self._ran_in_child and self._seen_to != self.worker_pid:  # a revoke, and then its end
            self._seen_to = self.worker_pid
            self._end().see_to_it()

    @property
    def _ran_in_child(self) -> bool:
        """
        Whether a child process of this one has begun with the task.

        Of a task that is put back before that, the pool tells our own process id.
        """
        has_begun = self.worker_pid not in (None, os.getpid())
        return has_begun and plugin_for(self.task.app).has_children and not locking.disabled

    @property
    def _is_over(self) -> bool:
        """Whether Celery is done with this execution, so that no copy of it may run."""
        return self.acknowledged and not self._was_rejected and not self._already_cancelled

    def _end(self) -> ForcedEnd:
        return ForcedEnd(
            task=self.task,
            args=self.args,
            kwargs=self.kwargs,
            task_id=self.id,
            execution=self._delivery.execution,
            owner=self._owner,
            pid=self.worker_pid,
            since=self.time_start or time.time(),
            is_over=self._is_over,
            queued=self._queued,
            became=self._became,
            comes_in=float(self.task.default_retry_delay or 0.0) if self._is_retried else 0.0,
        )


#: Deliveries that carry a queued marker and have not come to an end.
_queued_here: weakref.WeakSet[RedlockRequest] = weakref.WeakSet()


def let_go_of_revoked() -> None:
    """
    End the queued markers of tasks that were revoked and wait in this worker.

    Celery itself looks when their time has come: for one that was put off, or waits behind long
    ones, that may be in an hour.
    """
    if revoked:
        for request in list(_queued_here):
            if request.id in revoked and request.time_start is None:
                request.leave_queue(REVOKED)


class NoteRevokes(bootsteps.StartStopStep):
    """
    Has a worker look whether a task that waits in it was revoked.

    A step of the consumer, as that starts its steps again with each connection to the broker: up
    to 5.6 Celery clears the worker's timer when one breaks.
    """

    requires = ("celery.worker.consumer.connection:Connection",)
    _entry: Any = None

    def start(self, consumer: Any) -> None:
        """Set the timer."""
        self._entry = consumer.timer.call_repeatedly(LOOK_FOR_REVOKES, let_go_of_revoked)

    def stop(self, consumer: Any) -> None:
        """Look no more, before the next connection."""
        entry, self._entry = self._entry, None
        if entry is not None:
            # A green timer returns the greenlet of the first firing, which is over by then.
            consumer.timer.cancel(getattr(entry, "entry", entry))


def is_forced(error: BaseException) -> bool:
    """Return whether *error* tells of a child that was lost, not of a body that failed."""
    return isinstance(error.exc if isinstance(error, ExceptionWithTraceback) else error, FORCED)


@dataclass(frozen=True, kw_only=True)
class ForcedEnd:
    """
    What is to be cleared away after a child.

    Attributes:
        task: Its task.
        args: Positional arguments, as delivered.
        kwargs: Keyword arguments, as delivered.
        task_id: Its id.
        execution: Id of its execution.
        owner: As which it took its lock.
        pid: Its process.
        since: When it began [s, Unix time]; its lock was granted then, or later.
        is_over: Whether this execution must not run again.
        queued: The marker that its message carries, if it does.
        became: What became of it, as of `Reservation.end`.
        comes_in: When it comes again, if it does [s].
    """

    task: Any
    args: Any
    kwargs: Any
    task_id: str
    execution: str
    owner: str
    pid: int
    since: float
    is_over: bool
    queued: Reservation | None
    became: str
    comes_in: float

    def see_to_it(self) -> None:
        """Clear away in a thread of its own: the parent's event loop must not wait for a death."""
        name = f"redlock-forced-end-{self.pid}"
        try:
            threading.Thread(target=self._clear_away, name=name, daemon=True).start()
        except RuntimeError:  # out of threads, or out of time; Celery's own work must go on
            logger.warning("No thread to release for %s; its lock ends by itself", self._told)

    def _clear_away(self) -> None:
        try:
            name = self.task.lock_name(self.args, self.kwargs)
            plugin = plugin_for(self.task.app)
            options = lock_of(self.task).options
            locks = plugin.locks
            holders = [view.holder for view in locks.inspect(name) if view.holder]
            if self.is_over and options.dedup_ttl and not self._is_held_by_another(holders):
                locks.mark(Marker(self.execution, "done", options.dedup_ttl), wait=True)
            since = next((h.get("since") for h in holders if self._is_ours(h)), None) or self.since
            if wait_until_dead(self.pid, LONGEST_DYING):
                if self.queued is not None:
                    became = FINISHED if self.became == REVOKED else self.became
                    comes_in = self.comes_in
                    self.queued.end(plugin.reservations, options, became, delay=comes_in, wait=True)
                self._release(locks, name, options, since)
        except RedlockError as error:  # the arguments make no name, the settings no locks
            logger.warning("Nothing to release for %s: %s", self._told, error)
        except Exception:
            logger.exception("Releasing for %s failed; its lock ends by itself", self._told)

    def _is_ours(self, holder: dict[str, Any]) -> bool:
        """Return whether *holder* is the child; of a token only the beginning is told."""
        return bool(holder.get("token")) and self.owner.startswith(holder["token"])

    def _is_held_by_another(self, holders: list[dict[str, Any]]) -> bool:
        """Return whether another delivery of this execution runs: then it is not over at all."""
        return any(h.get("execution") == self.execution and not self._is_ours(h) for h in holders)

    def _release(self, locks: Any, name: str, options: Any, since: float) -> None:
        """Release until a majority has answered, or the lease has ended without us."""
        died = time.monotonic()
        while True:
            keep = left_of(options.min_hold, since)
            with forks_held_off:
                outcome = locks.release_for(
                    name, self.owner, since=since, keep=keep, info=self._info
                )
            if outcome is ReleaseOutcome.RELEASED:
                logger.info("Released lock %r for %s", name, self._told)
            if outcome is not ReleaseOutcome.UNKNOWN or time.monotonic() > died + options.ttl:
                return
            time.sleep(PAUSE)  # until a quorum answers, or the lease has ended by itself

    @property
    def _info(self) -> dict[str, Any]:
        """What the child told others of itself."""
        return {"task": self.task.name, "task_id": self.task_id}

    @property
    def _told(self) -> str:
        return f"{self.task.name}[{self._info['task_id']}], whose process {self.pid} was lost"
