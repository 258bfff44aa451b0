"""
What happened, as frozen facts for observers. Times are seconds.

An event never carries a token or an argument value. `Event` is any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from celery_redlock.log import get_logger

__all__ = [
    "DuplicatePublished",
    "Event",
    "LeaderDeposed",
    "LeaderElected",
    "LeaseLost",
    "LockAcquired",
    "LockConflict",
    "LockReleased",
    "LockRenewed",
    "LockUnavailable",
    "NodeClockJump",
    "NodeDown",
    "NodeMeasured",
    "NodeQuarantined",
    "NodeUp",
    "Notify",
    "Observer",
    "SlotPublished",
    "SlotSkipped",
    "TaskQueued",
    "TaskRefused",
    "TaskRescheduled",
    "TaskRetried",
    "TaskSkipped",
    "TasksWaiting",
    "broadcast",
]

logger = get_logger(__name__)


@dataclass(frozen=True)
class Event:
    """Anything that observers receive."""


class Observer(Protocol):
    """
    Receives events, in the thread in which they happen.

    It should return soon. What it raises is logged and harms no lock. If it has a method
    ``close()``, that is called when the app's settings have changed and others take its place.
    """

    def __call__(self, event: Event) -> None:
        """Handle *event*."""


#: Takes an event and never raises.
Notify = Callable[[Event], None]


def broadcast(observers: Iterable[Observer]) -> Notify:
    """Return a function that tells all *observers*, whatever any of them raises."""
    return partial(tell, tuple(observers))


def tell(observers: Iterable[Observer], event: Event) -> None:
    """Notify all *observers* of *event*, whatever any of them raises."""
    for observer in observers:
        try:
            observer(event)
        except Exception:  # an observer must never cost a lock
            logger.exception("Observer %r failed on %s", observer, type(event).__name__)


@dataclass(frozen=True)
class LockEvent(Event):
    """
    Something that concerns one lock.

    Attributes:
        name: Lock name. It holds argument values if a template or a callable of the user's puts
            them there, and there are as many names as such values: no label for a metric.
        task: Name of the task that wants or holds it; "" outside of tasks.
        task_id: Its id; "" outside of tasks.
        report: Whether the task is in report mode (``redlock_mode``): nothing was refused,
            delayed or aborted, and this is what would have happened.
    """

    name: str
    task: str = field(default="", kw_only=True)
    task_id: str = field(default="", kw_only=True)
    report: bool = field(default=False, kw_only=True)


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

    fence: int | None
    waited: float
    queued_for: float = field(default=0.0, kw_only=True)
    was_woken: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class LockConflict(LockEvent):
    """
    Somebody else holds the lock.

    Attributes:
        holder: Who, as in `LockTaken.holder`.
        waited: How long it was tried [s].
    """

    holder: dict[str, Any]
    waited: float


@dataclass(frozen=True)
class LockUnavailable(LockEvent):
    """
    No quorum could decide.

    Attributes:
        votes: What each node answered, by node label.
        waited: How long it was tried [s].
    """

    votes: dict[str, str]
    waited: float


@dataclass(frozen=True)
class LockRenewed(LockEvent):
    """
    The watchdog extended a lease.

    Attributes:
        margin: What was left of the old lease when the new one began [s].
        ttl: Of the lease [s].
        lag: How late the watchdog began the renewal [s, >= 0].
    """

    margin: float
    ttl: float = field(default=0.0, kw_only=True)
    lag: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True)
class LeaseLost(LockEvent):
    """
    A held lock can no longer be trusted.

    Attributes:
        reason: As in `LockLost.reason`.
        votes: As in `LockLost.votes`.
    """

    reason: str
    votes: dict[str, str] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class LockReleased(LockEvent):
    """
    A lock was released.

    Attributes:
        held: From the grant to the release [s].
        ttl: Of the lease [s]; 0.0 where another process released it.
        lost: Why it was lost before that, as in `LockLost.reason`; "" if it was not.
    """

    held: float
    ttl: float = field(default=0.0, kw_only=True)
    lost: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class NodeEvent(Event):
    """
    Something that concerns one lock node.

    Attributes:
        node: Its label, without a password.
    """

    node: str


@dataclass(frozen=True)
class NodeDown(NodeEvent):
    """
    A node does not answer.

    Attributes:
        reason: Why, in plain words.
    """

    reason: str


@dataclass(frozen=True)
class NodeUp(NodeEvent):
    """A node answers (again)."""


@dataclass(frozen=True)
class NodeQuarantined(NodeEvent):
    """
    A node lost its memory and does not vote for a while.

    Attributes:
        left: How much longer [s].
    """

    left: float


@dataclass(frozen=True)
class NodeClockJump(NodeEvent):
    """
    A node's clock was stepped, as far as can be known: other nodes' clocks do not say it was ours.

    Attributes:
        jump: By how much [s]; forward is positive, and lets keys expire early.
    """

    jump: float


@dataclass(frozen=True)
class NodeMeasured(NodeEvent):
    """
    How near a node is, and what its clock says; every few seconds while it is asked.

    Attributes:
        latency: From a request to its answer, our own share included [s].
        clock_offset: How far its wall clock is ahead of ours [s]; good to half the latency.
        quarantine: For how long it does not vote yet [s]; 0.0 if it does.
        leaked: How many keys of ours on it never expire; None where they have not been counted.
    """

    latency: float
    clock_offset: float
    quarantine: float = field(default=0.0, kw_only=True)
    leaked: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class TaskEvent(LockEvent):
    """
    Something that a policy did with a task.

    Attributes:
        task: Name of the task.
        task_id: Its id.
        cause: ``"conflict"`` or ``"unavailable"``. In report mode also ``"redelivered"``, of a copy
            beside the run of the original, ``"finished"``, of one that came after it, and
            ``"unnamed"``, of arguments that make no lock name.
        holder: Who holds the lock, as in `LockTaken.holder`; empty if nobody knows.
    """

    task: str = field()  # given in any case, unlike that of other events
    task_id: str = field()
    cause: str
    holder: dict[str, Any] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class DuplicatePublished(LockEvent):
    """
    A task was to be published that is queued or running already.

    Attributes:
        task: Task name.
        holder_id: Id of the task that was there first.
        on_duplicate: ``"join"``, ``"fail"`` or ``"rerun"``.
        merged: How many triggers have been merged into the next run, this one included; 0 if
            none was, or if this one is published as the next run.
    """

    task: str = field()
    holder_id: str
    on_duplicate: str
    merged: int = 0


@dataclass(frozen=True)
class TaskSkipped(TaskEvent):
    """The body of a task did not and will not run, by policy; the task succeeded."""

    holder: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskRefused(TaskEvent):
    """The body of a task did not and will not run, by policy; the task failed."""


@dataclass(frozen=True)
class TaskRetried(TaskEvent):
    """
    A task is retried by Celery.

    Attributes:
        countdown: When [s from now].
    """

    countdown: float


@dataclass(frozen=True)
class TaskRescheduled(TaskEvent):
    """
    A task was rescheduled; it will be delivered again under the same id.

    Attributes:
        countdown: When [s from now].
        times: How often it was rescheduled by now [>= 1].
    """

    countdown: float
    times: int


@dataclass(frozen=True)
class TaskQueued(TaskEvent):
    """
    A task waits for its lock, by policy: it is woken when the lock is released.

    Attributes:
        countdown: When it comes if nobody wakes it [s from now].
        times: How often it was refused by now [>= 1].
        since: Since when it waits [s, Unix time].
    """

    countdown: float
    times: int
    since: float


@dataclass(frozen=True)
class TasksWaiting(Event):
    """
    How many tasks wait for their locks in this worker has changed; once a second at most.

    Attributes:
        task: Name of the tasks.
        count: How many wait and can be woken [>= 0].
    """

    task: str
    count: int


@dataclass(frozen=True)
class LeaderElected(LockEvent):
    """
    This process leads all schedulers of its name from now on.

    Attributes:
        fence: Number of its term; a later leader has a larger one.
    """

    fence: int | None


@dataclass(frozen=True)
class LeaderDeposed(LockEvent):
    """
    This process does not lead any more.

    Attributes:
        reason: ``"resigned"``, ``"failed"`` if the wrapped scheduler raised an error, ``"clock"``
            if the clock of this machine is too far ahead, ``"deposed"`` if a newer leader was
            met, or as in `LockLost.reason`.
        led: For how long it did [s].
    """

    reason: str
    led: float


@dataclass(frozen=True)
class SlotEvent(Event):
    """
    Something that concerns one slot of a schedule.

    Attributes:
        entry: Name of the schedule's entry.
        task: Name of its task.
        due: When the slot was due [s, Unix time].
    """

    entry: str
    task: str
    due: float


@dataclass(frozen=True)
class SlotPublished(SlotEvent):
    """
    The task of a slot was published.

    Attributes:
        task_id: Its id.
        late: For how long the slot had been due [s].
    """

    task_id: str
    late: float


@dataclass(frozen=True)
class SlotSkipped(SlotEvent):
    """
    The task of a slot is not published.

    Attributes:
        cause: ``"overlap"`` if the run of an earlier slot has not ended, ``"deadline"`` if the slot
            is too old, ``"uncertain"`` if an earlier leader died while it published it, or
            ``"duplicate"`` if the task is queued already and has ``unique_until``.
        since: Where all slots since then are skipped, this one being the newest: when the one
            before them was due [s, Unix time]; else 0.0.
    """

    cause: str
    since: float = 0.0
