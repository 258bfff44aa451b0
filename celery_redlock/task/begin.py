"""
Begin an execution: its lock, or the policy; then its reservation, and the newest arguments.

    acquire --> granted                       --> start --> body
            --> held by this same execution   --> a copy for later
            --> has finished before           --> ends without a state
            --> taken, or nobody knows        --> refuse, by policy
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery import states

from celery_redlock.errors import LockKeyError, LockNotAcquired, LockTaken, QuorumUnavailable
from celery_redlock.events import TaskQueued
from celery_redlock.lock import clock
from celery_redlock.lock.held import HeldLock, NotLocked
from celery_redlock.lock.records import place_name, shorten
from celery_redlock.lock.requests import Marker, release_request
from celery_redlock.lock.rounds import NO_TURN, Ask, MarkerStands, Turn, Wanted
from celery_redlock.lock.votes import Ballot, VoteKind, has_majority
from celery_redlock.lock.waiting import Ticket, leave_request, wait_request
from celery_redlock.log import get_logger
from celery_redlock.plugin import locking
from celery_redlock.task import refused
from celery_redlock.task.delivery import forget_serializer
from celery_redlock.task.interrupt import defer_interrupts
from celery_redlock.task.outcome import DONE, DeliveryOver, Outcome, Records
from celery_redlock.task.policies import Queue, Reschedule, RunUnlocked
from celery_redlock.task.redelivery import delays_in_broker, longest_countdown, requeue
from celery_redlock.task.reservation import NotItsTurn, Reservation, look_again, newest_call
from celery_redlock.task.task_lock import names_of
from celery_redlock.task.waiting import Waiting
from celery_redlock.unique.requests import OVER

if TYPE_CHECKING:
    from celery_redlock.lock.redlock import Redlock
    from celery_redlock.task.execution import Execution
    from celery_redlock.task.options import LockOptions

__all__ = ["acquire", "hand_on", "refuse", "start", "stop_waiting", "take"]

logger = get_logger(__name__)

#: How long to wait for the task's previous execution to release the lock [s].
PREVIOUS_GRACE = 2.0
#: When a copy comes back to see whether the result of what has finished is stored, as a share of
#: the lease: a marker that says "finishing" lives no longer, and its worker is then taken for dead.
SHARE_OF_LEASE = 1 / 3
#: When a copy comes back if nobody says how long the lock may be held [s].
LEASE_UNKNOWN = 1.0


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
    if outer is not None and has_replaced(execution, outer.held):
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


def has_replaced(execution: Execution, outer: HeldLock | None) -> bool:
    """Return whether the body that holds *outer* has become this one, in eager mode."""
    if outer is None or not execution.request.is_eager:
        return False
    is_ours = outer.lease.info.get("task_id") == execution.request.id
    return is_ours and outer.name == place_name(execution.name, outer.place)


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
        return take(execution, execution.options.wait, delivery.turn)
    except LockTaken as error:
        taken = error
    if is_eager:
        raise taken
    if delivery.is_previous_execution(taken.holder):
        try:
            return take(execution, PREVIOUS_GRACE)
        except LockTaken as error:
            taken = error
    after = taken.holder.get("ttl", LEASE_UNKNOWN)
    if delivery.is_same_execution(taken.holder):  # to fail would stand for that one's result
        raise set_aside(execution, after, "it runs elsewhere", Outcome.SET_ASIDE)
    if delivery.is_previous_execution(taken.holder):
        why = "the execution before it has not ended"
        raise set_aside(execution, after, why, Outcome.SET_ASIDE, taken)
    raise taken


def take(
    execution: Execution, wait: float, turn: Turn = NO_TURN, ends: float | None = None
) -> None:
    """
    Acquire the lock unless the execution has finished before.

    Args:
        execution: That wants it.
        wait: How long to keep trying [s].
        turn: With what the first attempt begins.
        ends: As of `Wanted`.
    """
    options, delivery, locks = execution.options, execution.delivery, execution.locks
    marker = execution.id if options.dedup_ttl else None
    asked = marker if delivery.may_be_repeated else None
    info, owner, waiting = execution.info, delivery.owner, delivery.envelope.waiting
    since = None if waiting is None else waiting.since
    lock = execution.name, options.ttl, wait, options.fence, info, asked, owner
    wanted = Wanted(*lock, turn, since, options.limit[0], ends)
    interrupt = execution.interrupt
    on_lost = (lambda _held: interrupt.fire()) if options.aborts_on_loss else None
    with defer_interrupts():  # or a lock that was granted might not be released
        if len(execution.names) == 1 == len(options.limit):
            held = locks.take(wanted, on_lost)
        else:
            held = take_all(locks, wanted, options.limits(execution.names), waiting, on_lost)
        execution.own_lock = held
        execution.held = execution.held or held
        if asked != marker:  # what an earlier publish under this task id has left
            locks.mark(Marker(execution.id, DONE, 0.0))
        if waiting is not None:
            stop_waiting(execution, waiting)


def stop_waiting(execution: Execution, waiting: Waiting) -> None:
    """Have the nodes forget that the task waits as a message."""
    locks, ticket = execution.plugin.locks, waiting.ticket(execution.task, execution.delivery)
    locks.driver.tell(leave_request(locks.rules, ticket))


def hand_on(locks: Redlock, waiting: Waiting | None, turn: Turn) -> None:
    """Have the next one get the lock that is kept for a task that does not take it."""
    if waiting is not None and turn.token is not None and turn.place is not None:
        name = place_name(waiting.name, turn.place)
        locks.driver.tell(release_request(locks.rules, name, turn.token, place=turn.place))


def take_all(
    locks: Redlock,
    wanted: Wanted,
    limits: Mapping[str, int],
    waiting: Waiting | None,
    on_lost: Callable[[HeldLock], None] | None,
) -> HeldLock:
    """
    Acquire the locks of all names, or none of them; each process takes them in the same order.

    Args:
        locks: On the nodes.
        wanted: As of the first name.
        limits: Each name, in their order, and how many places its lock has.
        waiting: That the task waited for one of them.
        on_lost: As of `Redlock.take`.

    Returns:
        The lock of the first name; its `others` are the rest.

    Raises:
        LockTaken, QuorumUnavailable, MarkerStands: As `Redlock.take`.
    """
    ends, held = clock.now() + wanted.wait, dict[str, HeldLock]()
    try:
        for name, limit in sorted(limits.items()):
            has_turn = waiting is not None and waiting.name == shorten(name)
            turn = wanted.turn if has_turn else NO_TURN
            wait = max(0.0, ends - clock.now())
            one = replace(wanted, name=name, wait=wait, turn=turn, limit=limit)
            held[name] = locks.take(one, on_lost)
    except BaseException:
        for lock in held.values():
            locks.give_back(lock)
        hand_on(locks, waiting, wanted.turn)  # it was woken for one name and refused another
        raise
    first = held.pop(wanted.name)
    first.others = tuple(held.values())
    return first


def finished_before(execution: Execution, state: str) -> DeliveryOver:
    """Return what ends a copy of an execution that has finished, is about to, or may have."""
    if state == DONE:
        logger.info("%s has finished before; this copy ends", execution)
        return DeliveryOver("this execution has finished before", Outcome.REPEATED)
    after = execution.options.ttl * SHARE_OF_LEASE
    return set_aside(execution, after, "it may have finished", Outcome.REPEATED)


def set_aside(
    execution: Execution,
    after: float,
    reason: str,
    outcome: Outcome,
    otherwise: Exception | None = None,
) -> DeliveryOver:
    """Requeue a copy and return what to raise; arguments as of `requeue`."""
    over = requeue(
        execution.task,
        execution.request,
        execution.delivery.copy,
        after,
        reason=reason,
        outcome=outcome,
        otherwise=otherwise,
    )
    logger.info("%s set aside for %d s: %s", execution, over.comes_in, reason)
    return over


def wait_for_turn(execution: Execution, after: float, otherwise: LockNotAcquired) -> DeliveryOver:
    """Requeue what has the reservation for the next run, and return what to raise."""
    why = "the run before it has not ended"
    return set_aside(execution, after, why, Outcome.REQUEUED, otherwise)


def refuse(execution: Execution, error: LockNotAcquired) -> Any:
    """Act on *error* by policy; returns the result of the task, or raises."""
    options, request = execution.options, execution.request
    if isinstance(error, LockTaken) and not request.is_eager:
        if options.reruns:
            raise wait_for_turn(execution, look_again(error.holder), error)
        if isinstance(options.on_conflict, Queue):
            options = join_queue(execution, error, options, options.on_conflict)
    copy, notify = execution.delivery.copy, execution.plugin.notify
    skipped = refused.refuse(execution.task, request, copy, error, options, notify)
    return skipped if request.is_eager else dict(skipped)  # for every result serializer


def join_queue(
    execution: Execution, error: LockTaken, options: LockOptions, policy: Queue
) -> LockOptions:
    """
    Have the task wait for its lock as a message.

    Returns:
        The options of a task that may not, as enough wait already.

    Raises:
        DeliveryOver: It waits.
    """
    delivery, plugin, task = execution.delivery, execution.plugin, execution.task
    before = delivery.envelope.waiting
    limits = options.limits(execution.names)
    waiting = Waiting.again(before, error.name, limits[error.name])
    if policy.max_waiting is not None and before is None:
        ticket = waiting.ticket(execution.task, delivery)
        if not may_wait(plugin.locks, ticket, policy.max_waiting):
            plugin.locks.driver.tell(leave_request(plugin.locks.rules, ticket))  # some noted it
            return replace(options, on_conflict=policy.overflow)
    longest = longest_countdown(task.app)
    # Where nothing can wake it, it is delivered as often as if it were rescheduled.
    countdown = (
        waiting.comes_by_itself(longest)
        if plugin.locks.listener is not None and not delays_in_broker(task.app)
        else Reschedule().countdown(waiting.times - 1, longest)
    )
    copy = delivery.copy._replace(waiting=waiting)
    over = requeue(
        task,
        execution.request,
        copy,
        countdown,
        reason="waits for its lock",
        outcome=Outcome.REQUEUED,
        otherwise=error,
    )
    about = refused.description(task, execution.request, error)
    plugin.notify(
        TaskQueued(**about, countdown=countdown, times=waiting.times, since=waiting.since)
    )
    raise over


def may_wait(locks: Redlock, ticket: Ticket, most: int) -> bool:
    """Note that *ticket* waits unless *most* do already; return whether it may."""
    ballot = locks.driver.ask(Ask(wait_request(locks.rules, ticket, most), has_answered))
    return not has_majority(ballot, VoteKind.REFUSED)


def has_answered(ballot: Ballot) -> bool:
    """Return whether a majority says that the task may wait, or that it may not."""
    return any(has_majority(ballot, kind) for kind in (VoteKind.GRANTED, VoteKind.REFUSED))


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
    if reservation.name == execution.name:
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
        raise wait_for_turn(execution, error.after, error.why) from None
    held.merged = started.merged
    newest = newest_call(started.arguments)
    if newest is not None and names_of(task, *newest) != execution.names:
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
