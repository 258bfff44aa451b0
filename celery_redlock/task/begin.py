"""
Begin an execution: its lock, or the policy; then its reservation, and the newest arguments.

    acquire --> granted                       --> start --> body
            --> held by this same execution   --> a copy for later
            --> has finished before           --> ends without a state
            --> taken, or nobody knows        --> refuse, by policy
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from celery import states

from celery_redlock.errors import LockKeyError, LockNotAcquired, LockTaken, QuorumUnavailable
from celery_redlock.lock import clock
from celery_redlock.lock.held import HeldLock, NotLocked
from celery_redlock.lock.records import place_name, shorten
from celery_redlock.lock.wanted import MarkerStands
from celery_redlock.log import get_logger
from celery_redlock.plugin import locking
from celery_redlock.task import refused
from celery_redlock.task.delivery import forget_serializer
from celery_redlock.task.interrupt import defer_interrupts
from celery_redlock.task.outcome import DONE, DeliveryOver, Outcome, Records
from celery_redlock.task.policies import Queue, RunUnlocked
from celery_redlock.task.queueing import (
    join_queue,
    set_aside,
    wait_behind,
    wait_for_the_run_before,
)
from celery_redlock.task.reservation import NotItsTurn, Reservation, newest_call
from celery_redlock.task.taking import take
from celery_redlock.task.task_lock import names_of
from celery_redlock.unique.requests import OVER

if TYPE_CHECKING:
    from celery_redlock.task.execution import Execution

__all__ = ["acquire", "has_previous", "refuse", "start"]

logger = get_logger(__name__)

#: How long to wait for the task's previous execution to release the lock [s].
PREVIOUS_GRACE = 2.0
#: When a copy comes back to see whether the result of what has finished is stored, as a share of
#: the lease: a marker that says "finishing" lives no longer, and its worker is then taken for dead.
SHARE_OF_LEASE = 1 / 3


def acquire(execution: Execution) -> None:
    """
    Take the lock of *execution*, or its substitute.

    Raises:
        LockTaken, QuorumUnavailable: The policy decides.
        celery.exceptions.Ignore: This delivery is over: the execution has finished
            already, or runs elsewhere and a copy was published for later.
    """
    name, outer = execution.name, execution.outer
    if locking.disabled:
        execution.held = NotLocked(name, "locks are disabled in this process", clock.wall())
        return
    if outer is not None and has_replaced(execution, outer):
        execution.held = outer.held
        return
    try:
        hold_reservation(execution)
        take_in_turn(execution)
    except MarkerStands as marker:
        raise finished_before(execution, marker.state) from None
    except QuorumUnavailable as error:
        if not isinstance(refused.policy_for(error, execution.options), RunUnlocked):
            raise
        logger.warning("Running %s WITHOUT its lock: %s", execution, error)
        execution.held = NotLocked(name, "no quorum of lock nodes; run_unlocked", clock.wall())


def has_replaced(execution: Execution, outer: Execution) -> bool:
    """Return whether the body of *outer* has become this one, in eager mode, and has its locks."""
    held = outer.held
    if held is None or not execution.request.is_eager:
        return False
    is_ours = held.lease.info.get("task_id") == execution.request.id
    is_first = held.name == place_name(execution.name, held.place)
    return is_ours and is_first and set(execution.names) <= set(outer.names)


def hold_reservation(execution: Execution) -> None:
    """A message that was acknowledged early is in our hands alone until we have the lock."""
    reservation, options = execution.reservation, execution.options
    if reservation is not None and options.wait and not execution.task.acks_late:
        longest = options.wait + PREVIOUS_GRACE + options.ttl
        reservation.hold(execution.reservations, longest)


def take_in_turn(execution: Execution) -> None:
    """Acquire the lock; a task loses neither to itself nor to its previous execution."""
    delivery, is_eager = execution.delivery, execution.request.is_eager
    try:
        return take(execution, execution.options.wait)
    except LockTaken as error:
        taken = error
    if is_eager:
        raise taken
    if has_previous(execution, taken):
        try:
            return take(execution, PREVIOUS_GRACE)
        except LockTaken as error:
            taken = error
    if delivery.is_same_execution(taken.holder):  # to fail would stand for that one's result
        why = "it runs elsewhere"
        raise wait_behind(execution, taken, why, Outcome.SET_ASIDE)
    if has_previous(execution, taken):
        why = "the execution before it has not ended"
        raise wait_behind(execution, taken, why, Outcome.SET_ASIDE, taken)
    raise taken


def has_previous(execution: Execution, taken: LockTaken, ends: float | None = None) -> bool:
    """
    Return whether the execution before this one has the lock, or one of its places.

    Args:
        execution: That was refused.
        taken: Why.
        ends: Wait for no answer after that [s, our clock]; None for no such limit.
    """
    delivery, holders = execution.delivery, [taken.holder]
    limit = execution.options.limits(execution.names)[taken.name]
    if limit > 1 and delivery.may_have_previous:
        places = [place_name(taken.name, place) for place in range(limit)]
        asked = execution.locks.inspect_all(places, ends)
        holders += [view.holder for views in asked for view in views]
    return any(map(delivery.is_previous_execution, holders))


def finished_before(execution: Execution, state: str) -> DeliveryOver:
    """Return what ends a copy of an execution that has finished, is about to, or may have."""
    if state == DONE:
        logger.info("%s has finished before; this copy ends", execution)
        return DeliveryOver("this execution has finished before", Outcome.REPEATED)
    after = execution.options.ttl * SHARE_OF_LEASE
    return set_aside(execution, after, "it may have finished", Outcome.REPEATED)


def refuse(execution: Execution, error: LockNotAcquired) -> Any:
    """Act on *error* by policy; returns the result of the task, or raises."""
    options, request = execution.options, execution.request
    if isinstance(error, LockTaken) and not request.is_eager:
        if options.reruns:
            raise wait_for_the_run_before(execution, error)
        if isinstance(options.on_conflict, Queue):
            options = join_queue(execution, error, options.on_conflict)
    delivery, notify = execution.delivery, execution.plugin.notify
    skipped = refused.refuse(execution.task, request, delivery, error, options, notify)
    return skipped if request.is_eager else dict(skipped)  # for every result serializer


def start(
    execution: Execution, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """
    Note that *execution* runs now; return the arguments to run it with.

    Those are the newest that were merged into its reservation, if any.

    Raises:
        celery.exceptions.Ignore: Another task of this name is queued before this one; a
            copy was published for later.
        LockKeyError: What was merged into this task belongs to another name.
    """
    reservation, held, request = execution.reservation, execution.held, execution.request
    newest = None
    if reservation is not None and held is not None and is_for_lock(reservation, execution):
        try:
            newest = start_reservation(execution, reservation, held)
        except LockKeyError:
            if not execution.only_reports:
                raise
            logger.warning("%s runs with its own arguments", execution, exc_info=True)
    if newest is not None:
        request.args, request.kwargs = newest  # for a retry, or a copy
        args, kwargs = tuple(newest[0]), newest[1]
    report_started(execution)
    forget_serializer(request)
    return args, kwargs


def is_for_lock(reservation: Reservation, execution: Execution) -> bool:
    """
    Return whether *reservation* is for the lock that *execution* holds.

    A retry may have other arguments, and so another name; and anybody can publish a message
    that belongs to another. Such a reservation is ended with its token, but none is ever made.
    """
    if shorten(reservation.name) == shorten(execution.name):
        return True
    if reservation.until == "started" and not execution.options.reruns:
        execution.end_reservation(Records(reservation=OVER))
    return False


def start_reservation(execution: Execution, reservation: Reservation, held: HeldLock) -> Any:
    """Note in the reservation that its task runs; return the newest arguments, None for none."""
    task, known, options = execution.task, execution.reservations, execution.options
    is_of_other_mode = reservation.is_report is not execution.only_reports
    # In report mode the body has none, and what it stands under is its note.
    lock = execution.own_lock or held if reservation.is_report else held
    try:
        with defer_interrupts():
            started = reservation.start(
                known,
                options,
                lock,
                execution.info,
                comes_back=task.acks_late or is_of_other_mode,
            )
    except NotItsTurn as error:
        raise wait_for_the_run_before(execution, error.why) from None
    held.merged = started.merged
    newest = newest_call(started.arguments)
    if (
        newest is not None
        and names_of(task, *newest, execution.delivery.headers) != execution.names
    ):
        raise LockKeyError(f"Task {task.name!r}: what was merged into it makes another lock name")
    return newest


def report_started(execution: Execution) -> None:
    """
    Store STARTED if Celery would have done so, now that this delivery is the one that runs.

    Celery stores it for every delivery. A late copy would write it over a FAILURE, which
    is the result, and end without another word.
    """
    task, request = execution.task, execution.request
    is_wanted = execution.lock.stores_started and not request.is_eager
    if is_wanted and not is_ignored(task, request):
        who = {"pid": os.getpid(), "hostname": request.hostname}
        task.backend.store_result(request.id, who, states.STARTED, request=request)


def is_ignored(task: Any, request: Any) -> bool:
    """Return whether nobody wants the result. Before Celery 5.6 the task alone has a say."""
    from celery.app import trace  # noqa: PLC0415  a whole worker, and it is there by now

    ask = getattr(trace, "get_actual_ignore_result", lambda task, _request: task.ignore_result)
    return bool(ask(task, request))
