"""The end of an execution: its reservation, its lock, and its finished marker."""

from __future__ import annotations

import time
from collections.abc import Callable

from celery_redlock.lock import clock
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.records import starts_name
from celery_redlock.lock.scripts.requests import Marker
from celery_redlock.process.deferral import defer_signals
from celery_redlock.process.log import get_logger
from celery_redlock.task.execution.claim import Claim, end_reservation
from celery_redlock.task.execution.outcome import (
    DONE,
    FINISHING,
    Outcome,
    Records,
    comes_again,
    records_after,
)
from celery_redlock.task.execution.waiting_line import leave_line

__all__ = ["complete", "end", "left_of"]

logger = get_logger(__name__)

#: Outcomes of a body of which no result is stored.
UNSTORED = {Outcome.REJECTED, Outcome.REQUEUED, Outcome.IGNORED}
#: How long a worker needs at most, most often, to hear of a release that a node has answered [s].
HINT_TAKES = 0.002


def end(
    claim: Claim,
    held: HeldLock | None,
    outcome: Outcome,
    comes_in: float,
    remember: Callable[[Records], None],
) -> None:
    """
    Release the lock, and store on the nodes what `records_after` says; never fails the task.

    *remember* is told before anything is sent: a greenlet may be killed meanwhile.
    """
    if outcome is Outcome.INTERRUPTED:  # it may be what kills its worker
        claim.starts = {}
    elif claim.starts and outcome in UNSTORED:
        claim.uncount(starts_name(claim.delivery.execution))
    records, reservation = Records(), claim.reservation
    remember(records)
    waiting = claim.delivery.envelope.waiting
    if waiting is not None and held is None and not comes_again(outcome, comes_in):
        leave_line(claim, waiting.name)  # with a lock it has left
    is_parents = held is not None and held.lost_reason == "fork"  # who goes on under it
    if is_parents or (held is None and reservation is None):
        return
    try:
        state = FINISHING if claim.task.acks_late else DONE
        marker = None if held is None else state
        records = records_after(outcome, claim.options, reservation, marker, comes_in)
        remember(records)
        if not records.after_result:
            end_reservation(claim, records)
    except Exception:  # the options are impossible; the task's own outcome stands
        logger.exception("%s may leave something on the nodes; it expires", claim)
    finally:
        if held is not None:
            release(claim, held, records)


def release(claim: Claim, held: HeldLock, records: Records) -> None:
    try:
        options, state, locks = claim.options, records.marker, claim.locks
        keep = left_of(options.min_hold, held.since) if options.min_hold else 0.0
        life = options.ttl if state == FINISHING else options.dedup_ttl
        marker = None if state is None else Marker(claim.delivery.execution, state, life)
        for other in held.others:
            locks.give_back(other, keep=keep)
        waits = claim.delivery.was_woken
        locks.give_back(held, keep=keep, marker=marker, waits=waits)
        if waits:  # or a busy worker has given this process another task before it hears of it
            time.sleep(HINT_TAKES)
    except Exception:  # the lease expires; the task's own outcome stands
        logger.exception("Releasing lock %r failed; it ends within %g s", held.name, held.ttl)


def left_of(min_hold: float, since: float) -> float:
    """Return for how long a lock that is held since then has to be kept [s], clock set or not."""
    return min(min_hold, max(0.0, since + min_hold - clock.wall()))


def complete(claim: Claim, records: Records, *, is_stored: bool) -> None:
    """Say that the execution has finished, its result stored; or that it is to run again."""
    with defer_signals():
        if records.after_result and is_stored:
            end_reservation(claim, records)
        state, life = (DONE, claim.options.dedup_ttl) if is_stored else (FINISHING, 0.0)
        claim.locks.mark(Marker(claim.delivery.execution, state, life))
