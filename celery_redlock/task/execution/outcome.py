"""
How an execution ended, and what the lock nodes are to remember of it then.

    child:   its body has ended --> Outcome --> records_after() --> written with the release
    parent:  its child is dead  --> Outcome --> records_after() --> written in its place

Pure functions: the same rule whoever applies it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore, Reject, Retry

if TYPE_CHECKING:
    from celery_redlock.task.messages.reservation import Reservation
    from celery_redlock.task.options import LockOptions

__all__ = [
    "DONE",
    "FINISHING",
    "DeliveryOver",
    "Outcome",
    "PutBack",
    "Records",
    "comes_again",
    "has_finished",
    "outcome_of",
    "outcome_of_loss",
    "records_after",
]

#: States of a finished marker: the body is over and its result not stored yet, or all is done.
FINISHING, DONE = "finishing", "done"


class Outcome(enum.Enum):
    """How an execution ended."""

    #: The body returned.
    FINISHED = "finished"
    #: It raised, or its lock was refused, and the failure is the result.
    FAILED = "failed"
    #: The body raised, but Celery rejects the message: a dead-letter exchange may bring it back.
    REJECTED = "rejected"
    #: A retry was published: an execution of its own, with the same reservation.
    RETRIED = "retried"
    #: The message, a copy of it, or what replaces the task is still to run.
    REQUEUED = "requeued"
    #: The body raised Ignore; or it was revoked while it ran, but not acknowledged.
    IGNORED = "ignored"
    #: The body did not run, and by policy the task succeeds.
    SKIPPED = "skipped"
    #: A copy of an execution that has finished before, or is about to.
    REPEATED = "repeated"
    #: A copy of an execution that runs elsewhere, or that waits for the one before it.
    SET_ASIDE = "set aside"
    #: Torn apart by what is no Exception; the worker's parent knows what happens to the message.
    INTERRUPTED = "interrupted"
    #: Revoked or expired before it began, or in a pool whose bodies may go on after that.
    REVOKED = "revoked"
    #: Revoked while it ran, acknowledged, and its process is dead.
    TERMINATED = "terminated"


@dataclass(frozen=True)
class Records:
    """
    What the lock nodes are to remember of an execution that has ended.

    Attributes:
        marker: State of its finished marker, `FINISHING` or `DONE`; None for no marker.
        reservation: How its reservation ends, as of `Reservations.end`; None to leave it alone.
        life: How long the reservation stands by itself from now on, where it does [s].
        after_result: Whether the reservation ends when the result is stored, not before.
    """

    marker: str | None = None
    reservation: str | None = None
    life: float = 0.0
    after_result: bool = False


#: Whether the execution has finished, so that a redelivered copy must not run; and how its
#: reservation ends: None to leave it alone, "failed" for a rule of its own below.
TABLE: dict[Outcome, tuple[bool, str | None]] = {
    Outcome.FINISHED: (True, "over"),
    Outcome.FAILED: (True, "failed"),
    Outcome.REJECTED: (False, "failed"),
    Outcome.RETRIED: (True, "wait"),
    Outcome.REQUEUED: (False, "wait"),
    Outcome.IGNORED: (False, "over"),
    Outcome.SKIPPED: (False, "over"),
    Outcome.REPEATED: (False, "unstarted"),
    Outcome.SET_ASIDE: (False, None),
    Outcome.INTERRUPTED: (False, None),
    Outcome.REVOKED: (False, "idle"),
    Outcome.TERMINATED: (True, "over"),
}


def records_after(
    outcome: Outcome,
    options: LockOptions,
    reservation: Reservation | None,
    marker: str | None,
    comes_in: float = 0.0,
) -> Records:
    """
    Return what the nodes are to remember of an execution that ended with *outcome*.

    ===========  ===============  ===========
    outcome      finished marker  reservation
    ===========  ===============  ===========
    FINISHED     yes              over
    FAILED       yes              failed
    REJECTED     no               failed
    RETRIED      yes              wait
    REQUEUED     no               wait
    IGNORED      no               over
    SKIPPED      no               over
    REPEATED     no               unstarted
    SET_ASIDE    no               -
    INTERRUPTED  no               -
    REVOKED      no               idle
    TERMINATED   yes              over
    ===========  ===============  ===========

    The words for the reservation are those of `Reservations.end`. *failed* is *window* with
    ``unique_until="success"``, where a failure leaves the name taken, and *over* otherwise. With
    ``"expired"`` a reservation stands to the end of its window whatever happens; with
    ``on_duplicate="rerun"`` it becomes *ran* unless the task is still to run, so that nothing is
    merged into it any more.

    Args:
        outcome: How it ended.
        options: Of the task.
        reservation: That its message carries; None if it carries none.
        marker: State of the marker if there is to be one: `FINISHING` where the broker keeps the
            message until the result is stored, so that a death in between leads to another run;
            `DONE` where it does not; None without the lock, as the marker goes with its release.
        comes_in: When the task is delivered again, if it is [s from now].
    """
    is_over, end = TABLE[outcome]
    if not (is_over and options.dedup_ttl):
        marker = None
    if reservation is None or end is None:
        return Records(marker)
    reruns = reservation.reruns(options)
    if reservation.until == "expired":
        end = "ran" if reruns and end != "wait" else None
    elif end == "failed":
        stays = reservation.until == "success" and not reruns
        end = "window" if stays else "over"
    # Sooner, a duplicate would run once more before this execution is known to have finished.
    after_result = marker == FINISHING and reruns
    return Records(marker, end, options.unique_for + comes_in, after_result)


class DeliveryOver(Ignore):
    """
    This delivery ends without a state: its execution is still to run, runs elsewhere, or has ended.

    Attributes:
        outcome: Of the execution.
        comes_in: When it is delivered again, if it is [s from now].
    """

    def __init__(self, reason: str, outcome: Outcome, comes_in: float = 0.0) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.comes_in = comes_in

    def __reduce__(self) -> tuple[Any, ...]:
        return Ignore, self.args  # for the worker's parent, which needs no more


class PutBack(Reject):
    """
    The broker is to deliver this message again, as no copy of it could be published.

    Attributes:
        outcome: Of the execution.
    """

    def __init__(self, reason: Any, outcome: Outcome) -> None:
        super().__init__(reason, requeue=True)
        self.outcome = outcome

    def __reduce__(self) -> tuple[Any, ...]:
        return Reject, (self.reason, True)  # type: ignore[attr-defined]


def outcome_of(error: Exception, task: Any) -> Outcome:
    """Return how an execution of *task* ended that raised *error*, of our own or of the body."""
    if isinstance(error, (DeliveryOver, PutBack)):
        return error.outcome
    if isinstance(error, Retry):
        return Outcome.RETRIED
    if isinstance(error, Reject):
        comes_again = error.requeue and task.acks_late  # type: ignore[attr-defined]
        return Outcome.REQUEUED if comes_again else Outcome.REJECTED
    if isinstance(error, Ignore):
        return Outcome.IGNORED
    return Outcome.FAILED if acknowledges_failure(task) else Outcome.REJECTED


def comes_again(outcome: Outcome, comes_in: float) -> bool:
    """Return whether the same execution is still to run, by its *outcome*, and when it comes."""
    is_to_run = outcome in {Outcome.REQUEUED, Outcome.SET_ASIDE, Outcome.INTERRUPTED}
    return is_to_run or (outcome is Outcome.REPEATED and comes_in > 0)


def has_finished(outcome: Outcome) -> bool:
    """Return whether a redelivered copy of an execution that ended with *outcome* must not run."""
    return TABLE[outcome][0]


def acknowledges_failure(task: Any) -> bool:
    """Return whether Celery acknowledges the message of *task* when its body has failed."""
    on_failure = getattr(task, "acks_on_failure", None)  # since Celery 5.7
    if on_failure is None:
        on_failure = task.acks_on_failure_or_timeout
    return not task.acks_late or bool(on_failure)


def outcome_of_loss(*, is_over: bool, comes_again: bool, is_revoked: bool) -> Outcome:
    """
    Return how an execution ended whose child process is lost, or was told to die.

    Args:
        is_over: Whether Celery has acknowledged its message, so that it must not run again.
        comes_again: Whether its message was put back, or a retry published in its place.
        is_revoked: Whether that was a revoke.
    """
    if comes_again:
        return Outcome.RETRIED if is_over else Outcome.REQUEUED
    if is_revoked:
        return Outcome.TERMINATED if is_over else Outcome.IGNORED
    return Outcome.FAILED if is_over else Outcome.REJECTED
