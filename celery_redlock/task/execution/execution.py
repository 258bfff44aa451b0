"""
One execution of a task under a lock, from beginning to end: `Execution.run`.

    lock name --> begin --> Granted --> start --> body --> Outcome --> end
                       '--> Refused --> the policy
                       '--> Superseded, by a newer call of a debounced task
                       '--> Finished, by another delivery of the same message

An execution is one publish of a task: a retry is another one, and so is a second publish under
the same task id; a message delivered again is the same one. Every acquisition has a token of
its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any

from celery.exceptions import Retry
from celery.utils.time import maybe_make_aware

from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.records import starts_name
from celery_redlock.task.execution.begin import begin
from celery_redlock.task.execution.begun import Begun, Finished, Granted, Refused, Superseded
from celery_redlock.task.execution.body import run_body
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.execution.end import complete, end
from celery_redlock.task.execution.interrupt import Interrupt, defer_interrupts
from celery_redlock.task.execution.outcome import (
    FINISHING,
    DeliveryOver,
    Outcome,
    Records,
    outcome_of,
)
from celery_redlock.task.execution.refused import end_copy, refuse, supersede
from celery_redlock.task.execution.reporting import report, report_unnamed
from celery_redlock.task.execution.start import Started, start
from celery_redlock.task.messages.delivery_info import hide
from celery_redlock.task.messages.envelope import Envelope
from celery_redlock.task.naming.task_lock import names_of_call

__all__ = [
    "Execution",
    "current_lock",
    "delay_in",
    "latest_execution",
    "running_execution",
]


class Execution:
    """
    One execution, from its lock name to its release.

    Args:
        task: A `RedlockTask`.
        request: Of this delivery.
        outer: The execution whose body called this one with ``apply()``; None for none.

    Attributes:
        claim: The task, its message, and its lock names.
        granted: How it has begun; None before that, and for one that does not run.
        own_lock: The lock that this has to release; None if there is none.
        handled: The error that was being handled when it began; None for none.
        interrupt: Tells the body that its lock is lost.
        records: What the nodes are to remember; None until its end begins.
    """

    def __init__(self, task: Any, request: Any, outer: Execution | None) -> None:
        self.task = task
        self.request = request
        self.outer = outer
        latest = latest_execution.get()
        self._before = latest if latest is not None and latest.is_traced else outer
        self.handled: BaseException | None = None
        self.granted: Granted | None = None
        self.own_lock: HeldLock | None = None
        self.records: Records | None = None
        self.interrupt = Interrupt()
        self.claim = Claim.of(task, request)
        hide(request)

    def run(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Acquire the lock, run *body*, and release the lock on every way out."""
        latest_execution.set(self)
        self.handled = sys.exc_info()[1]  # of who forked or called us within an `except`
        outcome, comes_in = Outcome.INTERRUPTED, 0.0
        try:
            result, outcome = self.steps(body, args, kwargs)
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

    def steps(
        self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Outcome]:
        """Return the result of the task, and how it has ended if no error says that."""
        begun = self.begin(args, kwargs)
        started = start(begun, args, kwargs) if isinstance(begun, Granted) else begun
        match started:
            case Started():
                call = body, started.args, started.kwargs
                return run_body(self.claim, self.own_lock, self.interrupt, *call), Outcome.FINISHED
            case Refused():
                started.claim.uncount()  # of the next run, which was granted them
                return refuse(started), Outcome.SKIPPED
            case Superseded():
                return supersede(started), Outcome.SKIPPED
            case Finished():
                raise end_copy(started)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Begun:
        """Ask for the lock, or in report mode note that the execution runs."""
        claim = self.claim
        claim.is_report = claim.only_reports
        try:
            claim.names = names_of_call(self.task, args, kwargs, claim.delivery)
            claim.call = args, kwargs
        except Exception as error:
            if not claim.is_report:
                raise
            self.granted = report_unnamed(claim, error)
            return self.granted
        with defer_interrupts():  # or a lock that was granted might not be released
            if claim.is_report:
                begun: Begun = report(claim)
            else:
                outer = None if self.outer is None else self.outer.granted
                begun = begin(claim, outer, self.interrupt.fire)
            self.claim = begun.claim
            if isinstance(begun, Granted):
                self.granted, self.own_lock = begun, begun.own
        return begun

    def hand_over_to(self, sig: Any) -> bool:
        """Pass the reservation on to *sig*, which replaces this task; return whether it has it."""
        reservation = self.claim.reservation
        if reservation is None or sig.get("subtask_type"):
            return False
        header = Envelope(reservation=reservation).header(self.request.id)
        sig.set(headers={**(sig.options.get("headers") or {}), **header})
        return True

    # -- its end --------------------------------------------------------------------

    def end(self, outcome: Outcome, comes_in: float = 0.0) -> None:
        """End once, with signals deferred; *outcome* and *comes_in* as of `end`."""
        if self.records is not None:
            return
        with defer_interrupts():
            end(self.claim, self.own_lock, outcome, comes_in, self.remember)

    def remember(self, records: Records) -> None:
        self.records = records

    def completed(self, *, is_stored: bool) -> None:
        """Complete the records now that Celery has finished, having stored the result or not."""
        latest_execution.set(self._before)
        if is_stored and self.claim.starts:  # not before: to store it may be what kills its worker
            self.claim.uncount(starts_name(self.id))
        if self.records is not None and self.records.marker == FINISHING:
            complete(self.claim, self.records, is_stored=is_stored)

    # -- what it is -------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.claim.delivery.execution

    @property
    def held(self) -> HeldLock | None:
        """Its lock, or what stands in for one; None before it has any."""
        return None if self.granted is None else self.granted.held

    @property
    def is_over(self) -> bool:
        """Whether its end has begun: its lock is released, or is about to be."""
        return self.records is not None

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


#: The execution that runs here, or has just run and waits for its result to be stored.
latest_execution: ContextVar[Execution | None] = ContextVar("celery_redlock_latest", default=None)


def running_execution() -> Execution | None:
    """Return the innermost execution that goes on here; None outside of any."""
    execution = latest_execution.get()
    while execution is not None and execution.is_over:
        execution = execution.outer
    return execution


def current_lock() -> HeldLock:
    """
    Return the lock of the task that runs here and now.

    Where a task runs without one by policy, or locks are switched off in tests, this is a
    `NotLocked` that says why.

    Raises:
        RuntimeError: No task with a lock runs here: outside a task, in a task called
            directly, or in another thread than the task's.
    """
    execution = latest_execution.get()
    # A thread with a copy of the context outlives a body; the lock of an outer one is not its own.
    if execution is None or execution.is_over or execution.held is None:
        msg = (
            "No lock is held here: current_lock() works in the body of a RedlockTask that a worker "
            "or apply() runs, in the body's own thread; a direct call takes no lock"
        )
        raise RuntimeError(msg)
    return execution.held


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
