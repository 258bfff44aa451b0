"""
One execution of a task under a lock, from beginning to end: `Execution.run`.

    lock name --> acquire (or the policy) --> start --> body --> Outcome --> end

An execution is one publish of a task: a retry is another one, and so is a second publish under
the same task id; a message delivered again is the same one. Every acquisition has a token of
its own.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from celery.exceptions import Retry
from celery.utils.time import maybe_make_aware

from celery_redlock.deferral import defer_signals
from celery_redlock.errors import ConfigurationError, LockNotAcquired
from celery_redlock.lock import clock
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.requests import Marker
from celery_redlock.log import get_logger
from celery_redlock.plugin import locking
from celery_redlock.task.begin import acquire, refuse, start
from celery_redlock.task.current import latest_execution
from celery_redlock.task.delivery import Delivery, hide
from celery_redlock.task.envelope import HEADER, Envelope
from celery_redlock.task.interrupt import Interrupt, LockInterrupt, defer_interrupts
from celery_redlock.task.options import LockOptions
from celery_redlock.task.outcome import (
    DONE,
    FINISHING,
    DeliveryOver,
    Outcome,
    Records,
    outcome_of,
    records_after,
)
from celery_redlock.task.reporting import report
from celery_redlock.task.task_lock import lock_of, names_of_call
from celery_redlock.unique.reservations import Reservations

__all__ = ["Execution", "delay_in", "left_of"]

logger = get_logger(__name__)

#: How long a worker needs at most, most often, to hear of a release that a node has answered [s].
HINT_TAKES = 0.002


class Execution:
    """
    One execution, from its lock name to its release.

    Args:
        task: A `RedlockTask`.
        request: Of this delivery.
        outer: The execution whose body called this one with ``apply()``; None for none.

    Attributes:
        lock: What the task asks of its lock.
        delivery: This delivery.
        id: Id of the execution.
        reservation: That its message was published with; None for none.
        name: Lock name, the first of its *names*.
        held: Its lock, or what stands in for one; None before it has any.
        own_lock: The lock that this has to release; None if there is none. In report mode that is
            its note on the nodes, which nobody waits for, and *held* is none.
        interrupt: Tells the body that its lock is lost.
        records: What the nodes are to remember; None until its end begins.
    """

    def __init__(self, task: Any, request: Any, outer: Execution | None) -> None:
        self.task = task
        self.request = request
        self.outer = outer
        latest = latest_execution.get()
        self._before = latest if latest is not None and latest.is_traced else outer
        self.name = ""
        self.names: tuple[str, ...] = ()
        self.handled: BaseException | None = None
        self.held: HeldLock | None = None
        self.own_lock: HeldLock | None = None
        self.records: Records | None = None
        self.interrupt = Interrupt()
        self.lock = lock_of(task)
        self.plugin = self.lock.plugin
        if request.is_eager:
            self.plugin.refresh()
        is_local = request.is_eager or locking.disabled
        fields = request.__dict__
        if is_local:
            fields = {**fields, HEADER: None}
        self.delivery = delivery = Delivery.of(task, fields, str(request.hostname))
        self.id, self.reservation = delivery.execution, delivery.envelope.reservation
        hide(request)

    def run(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """
        Acquire the lock, run *body*, and release the lock on every way out.

        Returns:
            What *body* returns, or what the policy says in its place.
        """
        latest_execution.set(self)
        self.handled = sys.exc_info()[1]  # of who forked or called us within an `except`
        outcome, comes_in = Outcome.INTERRUPTED, 0.0
        try:
            if self.only_reports:
                report(self, args, kwargs)
            else:
                self.names = names_of_call(self.task, args, kwargs, self.delivery)
                self.name = self.names[0]
                try:
                    acquire(self)
                except LockNotAcquired as error:
                    result = refuse(self, error)
                    outcome = Outcome.SKIPPED
                    return result
            args, kwargs = start(self, args, kwargs)
            result = self.run_body(body, args, kwargs)
            outcome = Outcome.FINISHED
        except Exception as error:
            outcome = outcome_of(error, self.task)
            comes_in = delay_in(error)
            raise
        else:
            return result
        finally:
            try:
                self.end(outcome, comes_in)
            finally:  # nothing to do, unless a signal came before the line above had begun
                self.end(outcome, comes_in)

    # -- the body ---------------------------------------------------------------------

    def run_body(
        self,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run *body*; raises LockLost where it is interrupted because its lock is lost."""
        held = self.own_lock
        try:
            with self.interrupt:
                if held is not None and self.options.aborts_on_loss:
                    held.ensure_held()  # it may have been lost before there was a body to interrupt
                result = body(*args, **kwargs)
                if held is not None and not self.only_reports:
                    check_ended(result, self.task.name)
                return result
        except LockInterrupt as error:
            if held is None or error.interrupt is not self.interrupt:
                raise  # meant for the task that called apply() in its body
            lost = next((one for one in held.others if one.is_lost), held)
            raise lost.loss() from None
        finally:
            self.interrupt.disarm()  # a signal may strike before the ``with`` has called __exit__

    def hand_over_to(self, sig: Any) -> bool:
        """Pass the reservation on to *sig*, which replaces this task; return whether it has it."""
        if self.reservation is None or sig.get("subtask_type"):
            return False
        header = Envelope(reservation=self.reservation).header(self.request.id)
        sig.set(headers={**(sig.options.get("headers") or {}), **header})
        return True

    # -- after the body -----------------------------------------------------------------

    def end(self, outcome: Outcome, comes_in: float = 0.0) -> None:
        """
        Release the lock, and store on the nodes what `records_after` says.

        Once, with signals deferred, and without failing the task.

        Args:
            outcome: How this execution has ended.
            comes_in: When it is delivered again, if it is [s from now].
        """
        if self.records is not None:
            return
        with defer_interrupts():
            held, reservation = self.own_lock, self.reservation
            self.records = Records()
            is_parents = held is not None and held.lost_reason == "fork"  # who goes on under it
            if is_parents or (held is None and reservation is None):
                return
            try:
                state = FINISHING if self.task.acks_late else DONE
                marker = None if held is None else state
                self.records = records_after(outcome, self.options, reservation, marker, comes_in)
                if not self.records.after_result:
                    self.end_reservation(self.records)
            except Exception:  # the options are impossible; the task's own outcome stands
                logger.exception("%s may leave something on the nodes; it expires", self)
            finally:
                if held is not None:
                    self._release(held, self.records)

    def _release(self, held: HeldLock, records: Records) -> None:
        try:
            options, state = self.options, records.marker
            keep = left_of(options.min_hold, held.since) if options.min_hold else 0.0
            life = options.ttl if state == FINISHING else options.dedup_ttl
            marker = Marker(self.id, state, life) if state is not None else None
            for other in held.others:
                self.locks.give_back(other, keep=keep)
            waits = self.delivery.was_woken
            self.locks.give_back(held, keep=keep, marker=marker, waits=waits)
            if waits:  # or a busy worker has given this process another task before it hears of it
                time.sleep(HINT_TAKES)
        except Exception:  # the lease expires; the task's own outcome stands
            logger.exception("Releasing lock %r failed; it ends within %g s", held.name, held.ttl)

    def end_reservation(self, records: Records) -> None:
        """End the reservation as *records* say; never fails the task."""
        reservation = self.reservation
        if reservation is not None:
            try:
                reservation.end(self.reservations, records)
            except Exception:  # it expires; the task's own outcome stands
                logger.exception("Ending the reservation of %r failed", reservation.name)

    def completed(self, *, is_stored: bool) -> None:
        """Complete the records now that Celery has finished, having stored the result or not."""
        latest_execution.set(self._before)
        records = self.records
        if records is None or records.marker != FINISHING:
            return
        with defer_signals():
            if records.after_result and is_stored:
                self.end_reservation(records)
            done = Marker(self.id, DONE, self.options.dedup_ttl)
            self.locks.mark(done if is_stored else Marker(self.id, FINISHING, 0.0))

    # -- what it is -------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether its end has begun: its lock is released, or is about to be."""
        return self.records is not None

    def __str__(self) -> str:
        return f"{self.task.name}[{self.request.id}]"

    @property
    def is_traced(self) -> bool:
        """Whether Celery is not through with it: its result may still have to be stored."""
        return any(request is self.request for request in self.task.request_stack.stack)

    def is_of(self, task: Any, request: Any) -> bool:
        """
        Return whether *request* is of a call within the body of this execution.

        Celery copies a request where a task is called within its own body, so that the same one
        may come in another object.
        """
        is_same = task is self.task and number_of(request) == number_of(self.request)
        return is_same and not self.is_over

    @cached_property
    def options(self) -> LockOptions:
        """The options of the task; not asked for while locks are disabled."""
        options = self.delivery.adjust(self.lock.options_under(self.plugin.settings))
        if options.only_reports:  # nobody writes with the fence, and nothing is aborted
            options = replace(options, fence=False, aborts_on_loss=False)
        # Nothing delivers an eager one again.
        return replace(options, dedup_ttl=0.0) if self.request.is_eager else options

    @property
    def only_reports(self) -> bool:
        """Whether its body runs whatever the nodes say."""
        try:
            return not locking.disabled and self.options.only_reports
        except ConfigurationError:  # it is raised where it does not hide how the task fails
            return False

    @property
    def locks(self) -> Redlock:
        """The locks that its own is one of."""
        return self.plugin.locks_for(report=self.only_reports)

    @property
    def reservations(self) -> Reservations:
        """The reservations that its own is one of."""
        is_report = self.reservation is not None and self.reservation.is_report
        return self.plugin.reservations_for(report=is_report)

    @property
    def info(self) -> dict[str, Any]:
        """How it describes itself to others."""
        return self.delivery.info(self.task.name)


def left_of(min_hold: float, since: float) -> float:
    """Return for how long a lock that is held since then has to be kept [s], clock set or not."""
    return min(min_hold, max(0.0, since + min_hold - clock.wall()))


#: Of what a result backend can store as it is.
PLAIN = frozenset({type(None), bool, int, float, str, bytes, dict, list, tuple})


def check_ended(result: Any, task: str) -> None:
    """Raise TypeError if *result*, of the body of *task*, is something that has yet to run."""
    if type(result) in PLAIN:  # most are
        return
    is_generator = inspect.isgenerator(result) or inspect.isasyncgen(result)
    if not (is_generator or inspect.isawaitable(result) or isinstance(result, Future)):
        return
    if inspect.iscoroutine(result):
        result.close()  # nobody is to wait for it
    raise TypeError(
        f"{task} returned a {type(result).__name__}, which runs after it has returned, without the "
        "lock; wait for its end in the body"
    )


def delay_in(error: Exception) -> float:
    """Return when the task that ended with *error* is delivered again, if it is [s from now]."""
    if isinstance(error, DeliveryOver):
        return error.comes_in
    when = error.when if isinstance(error, Retry) else None
    if isinstance(when, datetime):
        return (maybe_make_aware(when) - datetime.now(timezone.utc)).total_seconds()
    return float(when or 0.0)


def number_of(request: Any) -> tuple[Any, Any, Any]:
    """Return what distinguishes this run of a task from its retries and replacements."""
    return request.id, request.retries or 0, request.replaced_task_nesting or 0
