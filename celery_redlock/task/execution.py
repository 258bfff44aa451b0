"""
One execution of a task under a lock, a straight line down and back.

    trace -> RedlockTask.__call__ -> lock name -> acquire -> (policy) -> body -> release

An execution is one publish of a task: a retry is another one, and so is a second publish under
the same task id; a message delivered again is the same one. Every acquisition has a token of
its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from celery import signals, states
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.time import maybe_make_aware

from celery_redlock.deferral import signals_deferred
from celery_redlock.errors import (
    LockKeyError,
    LockNotAcquired,
    LockTaken,
    QuorumUnavailable,
)
from celery_redlock.lock import clock
from celery_redlock.lock.held import HeldLock, NotLocked
from celery_redlock.lock.requests import Marker
from celery_redlock.lock.rounds import MarkerStands, Wanted
from celery_redlock.log import get_logger
from celery_redlock.plugin import locking, plugin_for
from celery_redlock.task.current import _current, _running
from celery_redlock.task.delivery import Delivery, forget_serializer, take_owner
from celery_redlock.task.envelope import HEADER, Envelope, hide
from celery_redlock.task.interrupt import Interrupt, LockInterrupt, undisturbed
from celery_redlock.task.options import LockOptions
from celery_redlock.task.policies import RunUnlocked
from celery_redlock.task.redelivery import set_aside
from celery_redlock.task.refused import policy_for, refuse
from celery_redlock.task.reservation import (
    AGAIN,
    FAILED,
    FINISHED,
    IN_HAND,
    UNSTARTED,
    NotItsTurn,
    Reservation,
    look_again,
    newest_call,
    outcome_of,
)
from celery_redlock.task.task_lock import lock_of

__all__ = ["Execution", "left_of"]

logger = get_logger(__name__)

#: How long to wait for the task's own predecessor to give the lock back [s].
PREDECESSOR_GRACE = 2.0
#: State of the marker of an execution whose result is not stored yet. It lives for as long as a
#: lease: then whoever had it is taken for dead, as with the lock.
UNSTORED = "finishing"
#: How often a copy looks meanwhile whether the result was stored, as a share of that.
LOOKS = 1 / 3
#: After which a copy looks again if nobody says how long the lock may be held [s].
LOOK_AGAIN = 1.0


class Execution:
    """
    One execution: what it is called, its lock, and what is remembered of it.

    Args:
        task: A `RedlockTask`.
        request: Of this delivery.
        name: Lock name.
    """

    def __init__(self, task: Any, request: Any, name: str) -> None:
        self.task = task
        self.request = request
        self.name = name
        self._number = number_of(request)
        is_local = request.is_eager or locking.disabled
        fields = {**vars(request), HEADER: None} if is_local else vars(request)
        self._delivery = delivery = Delivery.of(task, fields, str(request.hostname))
        self.id = delivery.execution
        hide(request)
        self._plugin = plugin_for(task.app)
        if request.is_eager:
            self._plugin.refresh()
        self._owner = take_owner(request)
        self._interrupt = Interrupt()
        self._outer = _current.get()
        self._held: HeldLock | None = None
        self._options: LockOptions | None = None
        self._has_ended = self._finishing = self._is_replaced = self._is_over = False
        self._queued, self._slot = delivery.envelope.reservation, delivery.envelope.slot
        self._ending: Reservation | None = None
        self._became: str | None = None
        self._comes_in = 0.0
        before = _running.get()
        self._before = None if before is None or before._is_over else before  # noqa: SLF001

    @property
    def options(self) -> LockOptions:
        """The options of the task; not asked for while locks are disabled."""
        if self._options is None:
            options = lock_of(self.task).options
            self._options = options if self._slot is None else self._slot.adjust(options)
        return self._options

    def run(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """
        Acquire the lock, run *body*, and give the lock back on every way out.

        Returns:
            What *body* returns, or what the policy says in its place.
        """
        _running.set(self)
        try:
            try:
                held = self.acquire()
            except LockNotAcquired as error:
                return self.refused(error)
            args, kwargs = self._take_turn(held, args, kwargs)
            self._tell_started()
            forget_serializer(self.request)
            result = self._run_with(held, body, args, kwargs)
            self._has_ended, self._became = True, FINISHED
        except Exception as error:
            self._has_ended = has_finished(error, self.task)
            self._note(error)
            raise
        else:
            return result
        finally:
            try:
                self._give_back()
            finally:  # a signal between the body and the line above must not leave the lock behind
                self._give_back()
                self._is_over = True

    def is_of(self, task: Any, request: Any) -> bool:
        """
        Return whether *request* is of a call within the body of this execution.

        Celery copies a request where a task is called within its own body, so that the same one
        may come in another object.
        """
        return task is self.task and not self._is_over and number_of(request) == self._number

    # -- before the body -----------------------------------------------------------

    def acquire(self) -> HeldLock:
        """
        Return the lock, or what stands in for one.

        Raises:
            LockTaken, QuorumUnavailable: The policy decides.
            celery.exceptions.Ignore: This delivery is over: the execution has finished
                already, or runs elsewhere and a copy was published for later.
        """
        if locking.disabled:
            return NotLocked(self.name, "locks are disabled in this process", clock.wall())
        if self._outer is not None and self._is_part_of(self._outer):
            return self._outer
        try:
            self._stay_in_hand()
            return self._take_or_wait_for_kin()
        except MarkerStands as marker:
            raise self._finished_before(marker.state) from None
        except QuorumUnavailable as error:
            if not isinstance(policy_for(error, self.options), RunUnlocked):
                raise
            logger.warning(
                "Running %s[%s] WITHOUT its lock: %s", self.task.name, self.request.id, error
            )
            return NotLocked(self.name, "no quorum of lock nodes; run_unlocked", clock.wall())

    def _is_part_of(self, outer: HeldLock) -> bool:
        """Return whether this runs in the body that holds *outer* and has become this one."""
        is_ours = outer.lease.info.get("task_id") == self.request.id
        return bool(self.request.is_eager) and outer.name == self.name and is_ours

    def refused(self, error: LockNotAcquired) -> Any:
        """Act on *error* by policy; returns the result of the task, or raises."""
        is_next = self.options.reruns and not self.request.is_eager
        if is_next and isinstance(error, LockTaken):
            raise self._wait_for_turn(look_again(error.holder), error)
        try:
            skipped = refuse(
                self.task,
                self.request,
                self._delivery.copy,
                error,
                self.options,
                self._plugin.notify,
            )
        except Ignore:
            self._became = AGAIN
            raise
        self._became = FINISHED
        return skipped if self.request.is_eager else dict(skipped)  # for every result serializer

    def _take_or_wait_for_kin(self) -> HeldLock:
        """Acquire the lock; a task never loses to itself nor to what came before it."""
        try:
            return self._take(self.options.wait)
        except LockTaken as error:
            kin, taken = self._kinship(error.holder), error
        if kin == "predecessor":
            try:
                return self._take(PREDECESSOR_GRACE)
            except LockTaken as error:
                kin, taken = self._kinship(error.holder), error
        if kin is None:
            raise taken
        self._queued = None  # the one that runs has the marker, or the one before it ends
        otherwise = None if kin == "same" else taken  # a failure would stand for that one's result
        raise self._set_aside(taken.holder.get("ttl", LOOK_AGAIN), otherwise)

    def _set_aside(self, after: float, otherwise: LockNotAcquired | None = None) -> Ignore:
        return set_aside(self.task, self.request, self._delivery.copy, after, otherwise)

    def _take(self, wait: float) -> HeldLock:
        options = self.options
        marker, owner = self._marker_name(), self._owner
        asked = marker if self._delivery.may_be_repeated else None
        wanted = Wanted(self.name, options.ttl, wait, options.fence, self._info, asked, owner)
        on_lost = self._on_lost if options.aborts_on_loss else None
        with undisturbed():  # or a lock that was granted might not be given back
            self._held = held = self._plugin.locks.take(wanted, on_lost)
            if asked != marker:  # what an earlier publish under this task id has left
                self._plugin.locks.mark(Marker(self.id, "done", 0.0))
        return held

    @property
    def _info(self) -> dict[str, Any]:
        """What this tells others of itself."""
        told = {"task": self.task.name, "task_id": self.request.id, "execution": self.id}
        return told if self._slot is None else {**told, **self._slot.info}

    def _kinship(self, holder: dict[str, Any]) -> str | None:
        """Return how the holder is related: ``"same"`` execution, ``"predecessor"``, or not."""
        if self.request.is_eager or "task_id" not in holder:
            return None
        execution, task_id = holder.get("execution"), holder["task_id"]
        if execution == self.id:
            return "same" if self._delivery.may_be_repeated else None
        request, previous = self.request, self._delivery.envelope.previous
        comes_again = request.retries or request.replaced_task_nesting
        is_itself = task_id == request.id and (comes_again or execution == previous)
        # Celery makes a copy, which is published within its task, a child of that: of itself.
        may_be_parent = task_id is not None and task_id != request.id
        is_parent = may_be_parent and task_id == request.parent_id
        return "predecessor" if is_itself or is_parent else None

    def _marker_name(self) -> str | None:
        if not self.options.dedup_ttl or self.request.is_eager:
            return None
        return self.id

    def _finished_before(self, state: str) -> Ignore:
        """Return what ends a copy of an execution that has finished, is about to, or may have."""
        self._became = UNSTARTED  # what has finished has seen to its marker, unless it had another
        if state == "done":
            logger.info(
                "%s[%s] has finished before; this copy ends", self.task.name, self.request.id
            )
            return Ignore("this execution has finished before")
        return self._set_aside(self.options.ttl * LOOKS)

    # -- the queued marker ------------------------------------------------------------

    def _stay_in_hand(self) -> None:
        """
        Let the marker not outlive the message by much, if the worker dies while this waits.

        A message that was acknowledged early is in our hand alone until the lock is had.
        """
        if self._queued is None or self.task.acks_late or not self.options.wait:
            return
        longest = self.options.wait + PREDECESSOR_GRACE + self.options.ttl
        markers = self._plugin.reservations
        self._queued.end(markers, self.options, IN_HAND, delay=longest, wait=False)

    def _take_turn(
        self, held: HeldLock, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """
        Note in the queued marker that this runs, and return the newest arguments for it.

        Raises:
            celery.exceptions.Ignore: Another task of this name is queued before this one; a
                copy was published for later.
            LockKeyError: What was merged into this task belongs to another name.
        """
        if self._queued is None or not self._is_its_own(self._queued):
            return args, kwargs
        try:
            with undisturbed():
                markers, late = self._plugin.reservations, self.task.acks_late
                started = self._queued.start(
                    markers, self.options, held, self._info, comes_back=late
                )
        except NotItsTurn as error:
            raise self._wait_for_turn(error.after, error.why) from None
        held.merged = started.merged
        newest = newest_call(started.arguments)
        if newest is None:
            return args, kwargs
        if self.task.lock_name(*newest) != self.name:
            raise LockKeyError(
                f"Task {self.task.name!r}: what was merged into it makes another lock name"
            )
        self.request.args, self.request.kwargs = newest  # for a retry, or whoever comes again
        return newest

    def _is_its_own(self, queued: Reservation) -> bool:
        """
        Return whether the marker is for the lock that this holds.

        A retry may have other arguments, and so another name; and anybody can publish a message
        that tells of another's. Such a marker is ended with its token, but none is ever made.
        """
        if queued.name == self.name:
            return True
        if queued.until == "started" and not self.options.reruns:
            self._end_marker(queued, FINISHED)
        return False

    def _wait_for_turn(self, after: float, otherwise: LockNotAcquired) -> Ignore:
        ignore = self._set_aside(after, otherwise)
        self._became, self._comes_in = AGAIN, after
        return ignore

    def hand_over_to(self, sig: Any) -> None:
        """Let *sig*, of a `RedlockTask` that is to replace this one, have the marker."""
        if self._queued is None or sig.get("subtask_type"):
            return
        header = Envelope(reservation=self._queued).header(self.request.id)
        sig.set(headers={**(sig.options.get("headers") or {}), **header})
        self._is_replaced = True

    def _note(self, error: Exception) -> None:
        """Note what is to become of the marker, unless that is known already."""
        if self._became is None:
            late = self.task.acks_late
            self._became = outcome_of(error, is_replaced=self._is_replaced, is_late=late)
        if isinstance(error, Retry):
            self._comes_in = seconds_until(error.when)

    def _end_queued(self) -> None:
        queued, self._queued = self._queued, None
        if queued is None or self._became is None:
            return
        if self._finishing and self.options.reruns:  # or it would run once more, out of turn
            self._ending = queued
            return
        self._end_marker(queued, self._became or FINISHED)

    def _end_marker(self, queued: Reservation, became: str) -> None:
        try:
            markers = self._plugin.reservations
            queued.end(markers, self.options, became, delay=self._comes_in, wait=False)
        except Exception:  # it ends by itself; the task's own outcome stands
            logger.exception("Ending the queued marker of %r failed", queued.name)

    # -- the body ---------------------------------------------------------------------

    def _tell_started(self) -> None:
        """
        Store STARTED if Celery would have done so, now that this delivery is the one that runs.

        Celery stores it for every delivery. A late copy would write it over a FAILURE, which
        is the result, and end without another word.
        """
        if not lock_of(self.task).stores_started or self.request.is_eager:
            return
        if not is_ignored(self.task, self.request):
            who = {"pid": os.getpid(), "hostname": self.request.hostname}
            backend = self.task.backend
            backend.store_result(self.request.id, who, states.STARTED, request=self.request)

    def _run_with(
        self,
        held: HeldLock,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run *body*, which can ask for *held*, and which ends when that is lost."""
        try:
            _current.set(held)
            with self._interrupt:
                if self._held is not None and self.options.aborts_on_loss:
                    held.ensure_held()  # it may have been lost before there was a body to interrupt
                return body(*args, **kwargs)
        except LockInterrupt as error:
            if error.interrupt is not self._interrupt:
                raise  # meant for the task that called apply() in its body
            raise held.loss() from None
        finally:
            self._interrupt.disarm()  # a signal may strike before the ``with`` has called __exit__
            _current.set(self._outer)

    def _on_lost(self, _held: HeldLock) -> None:
        self._interrupt.fire()

    # -- after the body -----------------------------------------------------------------

    def _give_back(self) -> None:
        """Release the lock, once, undisturbed by signals; never fails the task."""
        _current.set(self._outer)  # a signal may have come in the way before
        if self._held is not None and self._held.lost_reason == "fork":
            self._held = self._queued = None  # of the parent, which goes on under them
        if self._held is None and self._queued is None:
            return
        with undisturbed():
            held, self._held = self._held, None
            marker = None if held is None else self._marker()
            self._end_queued()
            if held is None:
                return
            keep = left_of(self.options.min_hold, held.since)
            try:
                self._plugin.locks.give_back(held, keep=keep, marker=marker)
            except Exception:  # the lease ends by itself; the task's own outcome stands
                logger.exception(
                    "Releasing lock %r failed; it ends within %g s", held.name, held.ttl
                )

    def _marker(self) -> Marker | None:
        """
        Return what is to be remembered of this execution now that its body is over.

        In two steps where the message is acknowledged late: "finishing" now, "done" once the
        result is stored. A death in between leads to another run, never to a lost result.
        """
        name = self._marker_name()
        if name is None or not self._has_ended:
            return None
        if self.task.acks_late:
            self._finishing = True
            return Marker(name, UNSTORED, self.options.ttl)
        return Marker(name, "done", self.options.dedup_ttl)

    def stored(self, state: str | None) -> None:
        """Remember that the result is stored; called when Celery is through with the task."""
        _running.set(self._before)
        if self._finishing:
            is_stored = state in (states.SUCCESS, states.FAILURE, states.RETRY)
            done = Marker(self.id, "done", self.options.dedup_ttl)
            with signals_deferred():
                if self._ending is not None and is_stored:
                    self._end_marker(self._ending, self._became or FINISHED)
                self._plugin.locks.mark(done if is_stored else Marker(self.id, UNSTORED, 0.0))


@signals.task_postrun.connect(weak=False)
def _after_task(task_id: Any = None, task: Any = None, state: str | None = None, **_: Any) -> None:
    """Tell the execution that its result is stored now."""
    running = _running.get()
    if running is not None and running.task is task and running.request.id == task_id:
        running.stored(state)


def leave_queue(task: Any, request: Any) -> None:
    """End the marker of a message whose arguments make no lock name: it fails before it runs."""
    if request.is_eager or locking.disabled:
        return
    queued = Envelope.of(vars(request).get(HEADER), request.id).reservation
    if queued is None:
        return
    try:
        plugin = plugin_for(task.app)
        queued.end(plugin.reservations, lock_of(task).options, FAILED, wait=False)
    except Exception:  # it ends by itself; the task's own error stands
        logger.exception("Ending the queued marker of %r failed", queued.name)


def is_ignored(task: Any, request: Any) -> bool:
    """Return whether nobody wants the result. Before Celery 5.6 the task alone has a say."""
    from celery.app import trace  # noqa: PLC0415  a whole worker, and it is there by now

    ask = getattr(trace, "get_actual_ignore_result", lambda task, _request: task.ignore_result)
    return bool(ask(task, request))


def left_of(min_hold: float, since: float) -> float:
    """Return for how long a lock that is held since then has to be kept [s], clock set or not."""
    return min(min_hold, max(0.0, since + min_hold - clock.wall()))


def seconds_until(when: Any) -> float:
    """Return when a retry comes [s from now], which is told as a date or in seconds."""
    if isinstance(when, datetime):
        return (maybe_make_aware(when) - datetime.now(timezone.utc)).total_seconds()
    return float(when or 0.0)


def has_finished(error: Exception, task: Any) -> bool:
    """
    Return whether an execution that ended with *error* must not run when it is delivered again.

    With Ignore and Reject the message may be meant to come again, and with a failure that is not
    acknowledged: a dead-letter exchange may bring it back. (What is not an Exception, like
    SystemExit or the end of a greenlet, tore the body apart: that has not finished.)
    """
    if isinstance(error, (Ignore, Reject)):
        return False
    on_failure = getattr(task, "acks_on_failure", None)  # since Celery 5.7
    if on_failure is None:
        on_failure = task.acks_on_failure_or_timeout
    return not task.acks_late or bool(on_failure) or isinstance(error, Retry)


def number_of(request: Any) -> tuple[Any, Any, Any]:
    """Return what tells this run of a task from its retries and from what replaced it."""
    return request.id, request.retries or 0, request.replaced_task_nesting or 0
