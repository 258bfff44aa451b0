"""
Ends by force, as the worker's main process learns of them: a hard time limit, a revoke, a crash.

    delivery --> owner minted --> child takes the lock as that owner
    Celery reports a lost child --> Outcome --> `celery_redlock.task.worker.lost_child`
    revoked before it began      --> its reservation ends
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

from billiard.einfo import ExceptionWithTraceback  # type: ignore[attr-defined]
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.exceptions import InvalidTaskError
from celery.worker.request import Request
from celery.worker.state import task_ready

from celery_redlock.plugin import locking, plugin_for
from celery_redlock.process.log import get_logger
from celery_redlock.task.execution.outcome import Outcome, outcome_of_loss, records_after
from celery_redlock.task.messages.delivery import Delivery
from celery_redlock.task.messages.delivery_info import mint_owner, note_queue, note_serializer
from celery_redlock.task.naming.task_lock import lock_of, names_told
from celery_redlock.task.worker.broadcasts import broadcast_queue
from celery_redlock.task.worker.lost_child import LostChild
from celery_redlock.task.worker.revokes import with_reservation
from celery_redlock.task.worker.waiting_room import WaitingRoom, room_of
from celery_redlock.task.worker.waiting_task import WaitingTask

__all__ = ["RedlockRequest"]

logger = get_logger(__name__)

#: How the parent learns that a child did not end by itself.
FORCED = (WorkerLostError, TimeLimitExceeded, Terminated, SystemExit, KeyboardInterrupt)


class RedlockRequest(Request):
    """One delivery of a message of a `RedlockTask`, in the worker's main process."""

    worker_pid: Any  # of the child; in other pools of who knows what
    _request_dict: dict[str, Any]
    _already_cancelled: bool
    _already_revoked: bool
    _was_rejected = _was_put_back = _is_retried = False
    _is_out_of_queue = False
    _cleared_away_for: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.id, (UUID, int)):  # as some publish it; all that is kept of it is text
            self.id = self._request_dict["id"] = str(self.id)
        if not (isinstance(self.id, str) and self.id):
            shown = repr(self.id)[:60]
            raise InvalidTaskError(f"task id must be a non-empty string, not {shown}")
        mint_owner(self._request_dict)
        note_queue(self._request_dict, broadcast_queue(self.task.app, self.message))
        note_serializer(self._request_dict, self.message.content_type, self.task.serializer)
        self._delivery = Delivery.of(self.task, self._request_dict, self.hostname)
        if self._delivery.envelope.reservation is not None:
            with_reservation.add(self)
        if self._delivery.envelope.reschedules and self.eta is not None:
            room_of(self.task.app).note_rescheduled(self)
        self._waits_as = None if self._delivery.envelope.waiting is None else self._wait()

    def is_owner(self, holder: dict[str, Any]) -> bool:
        return self._delivery.is_owner(holder)

    @property
    def lock_names(self) -> tuple[str, ...]:
        headers, sent = self._delivery.headers, self._delivery.envelope.names
        return names_told(self.task, self.args, self.kwargs, headers, sent)

    def _wait(self) -> WaitingTask | None:
        if self.eta is None or locking.disabled or self._is_of_another_worker:
            return None
        try:
            return room_of(self.task.app).enter(self, self._delivery)
        except Exception:  # it is delivered in any case; Celery's own work must go on
            logger.exception("%s[%s] cannot be woken", self.task.name, self.id)
            return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Celery makes a subclass for each task, whose way into the pool does not ask its base."""
        super().__init_subclass__(**kwargs)
        execute = cls.__dict__.get("execute_using_pool")
        if execute is not None:
            cls.execute_using_pool = waiting_no_more(execute)  # type: ignore[method-assign]

    def wait_no_more(self) -> None:
        self._out_of_room(WaitingRoom.leave)

    def _out_of_room(self, go: Callable[[WaitingRoom, WaitingTask], object]) -> None:
        if self._waits_as is not None:
            try:
                go(room_of(self.task.app), self._waits_as)
            except Exception:  # the nodes forget it by themselves
                logger.exception("%s[%s] may be waited for", self.task.name, self.id)

    # -- what Celery says happens to it ----------------------------------------------

    def reject(self, requeue: bool = False) -> None:  # noqa: FBT001, FBT002  Celery's signature
        self._was_rejected = self._was_rejected or not self.acknowledged
        self._was_put_back = self._was_put_back or (requeue and not self.acknowledged)
        super().reject(requeue=requeue)
        if not requeue and self.time_start is None:  # Celery cannot read when it is due
            self.leave_queue(Outcome.REVOKED)

    def _retry_worker_lost(self, *args: Any) -> bool:
        """Publish a retry for a lost child (Celery 5.7), and remember that."""
        self._is_retried = bool(super()._retry_worker_lost(*args))  # type: ignore[misc]
        return self._is_retried

    @property
    def outcome(self) -> Outcome:
        is_over = self.acknowledged and not self._was_rejected and not self._already_cancelled
        is_put_back = self._was_put_back or (self._already_cancelled and self.task.acks_late)
        return outcome_of_loss(
            is_over=is_over,
            comes_again=self._is_retried or is_put_back,
            is_revoked=self._already_revoked,
        )

    # -- where Celery reports an end by force -----------------------------------------

    def on_failure(
        self,
        exc_info: Any,
        send_failed_event: bool = True,  # noqa: FBT001, FBT002  Celery's signature
        return_ok: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """
        Let Celery decide what happens to the task; then release for a child that is lost.

        A child that returned an error (*return_ok*) has already released its lock. One that could
        not read its message has none, and no execution that ends the reservation.
        """
        try:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        finally:
            if not return_ok and is_forced(exc_info.exception):
                self._clear_away()
            elif not return_ok:
                self.leave_queue(self.outcome)

    def terminate(self, *args: Any, **kwargs: Any) -> None:
        """Terminate the task; Celery may take seconds to note that the child is dead."""
        super().terminate(*args, **kwargs)
        self._clear_away()

    def cancel(self, *args: Any, **kwargs: Any) -> None:
        """As `terminate`, for a shutdown or a lost connection."""
        super().cancel(*args, **kwargs)
        if plugin_for(self.task.app).has_children:
            self._clear_away()

    def on_timeout(self, soft: bool, timeout: float) -> None:  # noqa: FBT001  Celery's signature
        """Let Celery handle a time limit; in green pools it reports no more of a hard one."""
        super().on_timeout(soft, timeout)
        if not (soft or plugin_for(self.task.app).has_children):
            self._clear_away()

    def revoked(self) -> bool:
        """Return whether the task is revoked or has expired; then it reserves no name."""
        if self._is_of_another_worker:
            task_ready(self)
            self.acknowledge()
            return True
        is_revoked = bool(super().revoked())
        if is_revoked:
            self.leave_queue(Outcome.REVOKED)
            self._out_of_room(WaitingRoom.withdraw)
        return is_revoked

    # -- what is done about it --------------------------------------------------------

    @property
    def _is_of_another_worker(self) -> bool:
        """Whether this is a copy of a broadcast task, which goes to all of them again."""
        return self._delivery.envelope.worker not in {None, self.hostname}

    def _clear_away(self) -> None:
        """Release for a child once it is dead; in pools without children, at once."""
        if self.worker_pid is None:
            return
        if not plugin_for(self.task.app).has_children:
            comes_again = self.outcome in (Outcome.RETRIED, Outcome.REQUEUED)
            # A body that was revoked may still run here, and ends the reservation itself.
            is_revoked = self._already_revoked and not comes_again
            self.leave_queue(Outcome.REVOKED if is_revoked else self.outcome)
        elif self.worker_pid not in (os.getpid(), self._cleared_away_for) and not locking.disabled:
            # Ours is the id of a task that is put back before it began; the same one comes twice
            # for a revoke, and then its end.
            self._cleared_away_for = self.worker_pid
            self.lost_child().clear_away_in_thread()

    def lost_child(self) -> LostChild:
        return LostChild(
            task=self.task,
            args=self.args,
            kwargs=self.kwargs,
            delivery=self._delivery,
            pid=self.worker_pid,
            since=self.time_start or time.time(),
            outcome=self.outcome,
            comes_in=float(self.task.default_retry_delay or 0.0) if self._is_retried else 0.0,
        )

    def leave_queue(self, outcome: Outcome) -> None:
        """End the reservation of a task that will not run, or not go on; once."""
        reservation = self._delivery.envelope.reservation
        if reservation is None or self._is_out_of_queue or locking.disabled:
            return
        self._is_out_of_queue = True
        task: Any = self.task
        plugin = plugin_for(task.app)
        try:
            options = self._delivery.adjust(lock_of(task).options)
            records = records_after(outcome, options, reservation, None)
            known = plugin.reservations_for(report=reservation.is_report)
            reservation.end(known, records.reservation, records.life)
        except Exception:  # it expires; Celery's own work must go on
            logger.exception("Ending the reservation of %s[%s] failed", self.task.name, self.id)


def waiting_no_more(execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    def execute_using_pool(self: RedlockRequest, pool: Any, **kwargs: Any) -> Any:
        self.wait_no_more()
        return execute(self, pool, **kwargs)

    return execute_using_pool


def is_forced(error: BaseException) -> bool:
    return isinstance(error.exc if isinstance(error, ExceptionWithTraceback) else error, FORCED)
