"""Events of one lock: asked for, granted, renewed, lost, released."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar

from celery_redlock.events.base import LockEvent
from celery_redlock.events.metrics import (
    ACQUIRES,
    ANSWERS,
    HOLDS,
    LAGS,
    QUEUES,
    WAITS,
    Changes,
    counter,
    histogram,
)
from celery_redlock.events.wording import (
    Record,
    by_task,
    held_by,
    length,
    lock,
    of_task,
    task,
    text,
)
from celery_redlock.words import loss, number, votes_in_words

__all__ = [
    "LeaseLost",
    "LockAcquired",
    "LockConflict",
    "LockReleased",
    "LockRenewed",
    "LockUnavailable",
]


@dataclass(frozen=True)
class LockAcquired(LockEvent):
    """
    A lock was granted.

    Attributes:
        fence: Its fencing number, None when not asked for.
        waited: From the first request to the grant [s].
        queued_for: How long the task had waited as a message before that [s]; 0.0 if it had not.
        was_woken: Whether it was woken, and did not come by itself.
    """

    celery_type = word = "acquired"
    journal = "granted"
    outcome = "granted"
    metrics: ClassVar[Changes] = {
        ACQUIRES: 1,
        ANSWERS: "waited",
        histogram(
            *("From the first request for a lock to its grant.", "task"),
            prometheus="wait_seconds",
            bounds=WAITS,
        ): "waited",
        histogram(
            "For how long tasks had waited as messages when they got their locks, woken or not.",
            *("task", "woken=was_woken"),
            prometheus="queue_seconds",
            otel="queue.duration",
            bounds=QUEUES,
            begins=(True, False),
        ): "time_in_queue",
    }

    fence: int | None
    waited: float
    queued_for: float = field(default=0.0, kw_only=True)
    was_woken: bool = field(default=False, kw_only=True)

    @property
    def time_in_queue(self) -> float | None:
        """As ``queued_for``, None if it had not."""
        return self.queued_for or None

    @classmethod
    def what(cls, it: Record) -> str:
        fence = it.get("fence")
        number_of_it = "" if fence is None else f", fence {fence}"
        after = length(it, "waited")
        if number(it.get("queued_for")):
            how = "woken" if it.get("was_woken") else "came by itself"
            after = f"{length(it, 'queued_for')} in the queue ({how})"
        return f"Acquired {lock(it)}{of_task(it)} after {after}{number_of_it}"


@dataclass(frozen=True)
class LockConflict(LockEvent):
    """
    Somebody else holds the lock.

    Attributes:
        holder: Who, as in `LockTaken.holder`.
        waited: How long it was tried [s].
    """

    celery_type = "conflict"
    word = outcome = "taken"
    metrics: ClassVar[Changes] = {ACQUIRES: 1, ANSWERS: "waited"}

    holder: dict[str, Any]
    waited: float

    @classmethod
    def what(cls, it: Record) -> str:
        return f"Refused {lock(it)}{of_task(it)} after {length(it, 'waited')}"

    @classmethod
    def why(cls, it: Record) -> str:
        return held_by(it)


@dataclass(frozen=True)
class LockUnavailable(LockEvent):
    """
    No quorum could decide.

    Attributes:
        votes: What each node answered, by node label.
        waited: How long it was tried [s].
        retry_after: When quarantines end that are the cause [s from then]; None if none are.
    """

    celery_type = outcome = "unavailable"
    word = "no quorum"
    mark = "warn"
    level = logging.WARNING
    is_preliminary = True
    metrics: ClassVar[Changes] = {ACQUIRES: 1, ANSWERS: "waited"}

    votes: dict[str, str]
    waited: float
    retry_after: float | None = field(default=None, kw_only=True)

    @classmethod
    def what(cls, it: Record) -> str:
        whom = f" for {task(it)}" if it.get("task") else ""
        return f"No quorum for {lock(it)} after {length(it, 'waited')}{whom}"

    @classmethod
    def why(cls, it: Record) -> str:
        return votes_in_words(it.get("votes"))


@dataclass(frozen=True)
class LockRenewed(LockEvent):
    """
    The watchdog extended a lease.

    Attributes:
        margin: What was left of the old lease when the new one began [s].
        ttl: Of the lease [s].
        lag: How late the watchdog began the renewal [s, >= 0].
    """

    celery_type = word = "renewed"
    metrics: ClassVar[Changes] = {
        counter("renewals", "Leases extended by the watchdog.", "task", unit="{renewal}"): 1,
        histogram("What was left of a lease when renewed", "task", otel="lease.margin"): "margin",
        histogram(
            "How late the watchdog began a renewal.",
            prometheus="watchdog_lag_seconds",
            otel="watchdog.lag",
            bounds=LAGS,
        ): "lag",
    }

    margin: float
    ttl: float = field(default=0.0, kw_only=True)
    lag: float = field(default=0.0, kw_only=True)

    @classmethod
    def what(cls, it: Record) -> str:
        return f"Renewed {lock(it)}{of_task(it)} with {length(it, 'margin')} left"


@dataclass(frozen=True)
class LeaseLost(LockEvent):
    """
    A held lock can no longer be trusted.

    Attributes:
        reason: As in `LockLost.reason`.
        votes: As in `LockLost.votes`.
    """

    celery_type = "lost"
    word = "lock lost"
    mark = "bad"
    level = logging.ERROR
    journal = "refused"
    metrics: ClassVar[Changes] = {
        counter(
            *("lost", "Locks lost while they were held.", "task", "reason"),
            unit="{lock}",
            begins=("deadline", "stolen"),
        ): 1
    }

    reason: str
    votes: dict[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def counts_as(self) -> str:
        return "lost"

    @classmethod
    def what(cls, it: Record) -> str:
        return f"Lock {text(it, 'name')!r} is lost ({text(it, 'reason')}){by_task(it)}"

    @classmethod
    def why(cls, it: Record) -> str:
        return loss(text(it, "reason"), it.get("votes"))

    @classmethod
    def would(cls, it: Record) -> str:
        return f"Lock {text(it, 'name')!r} would have been lost ({text(it, 'reason')}){by_task(it)}"


@dataclass(frozen=True)
class LockReleased(LockEvent):
    """
    A lock was released.

    Attributes:
        held: From the grant to the release [s].
        ttl: Of the lease [s]; 0.0 where another process released it.
        lost: Why it was lost before that, as in `LockLost.reason`; "" if it was not.
    """

    celery_type = word = "released"
    metrics: ClassVar[Changes] = {
        histogram(
            *("From the grant of a lock to its release.", "task"),
            prometheus="hold_seconds",
            otel="hold.duration",
            bounds=HOLDS,
        ): "held"
    }

    held: float
    ttl: float = field(default=0.0, kw_only=True)
    lost: str = field(default="", kw_only=True)

    @classmethod
    def what(cls, it: Record) -> str:
        return f"Released {lock(it)}{of_task(it)} after {length(it, 'held')}"
