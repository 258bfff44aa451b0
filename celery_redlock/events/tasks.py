"""Events of one task: what a policy did with it, and a publish of what is there already."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar

from celery_redlock.events.base import Event, LockEvent
from celery_redlock.events.metrics import Changes, counter, gauge
from celery_redlock.events.wording import Record, lock, refusal, task, text
from celery_redlock.words import number

__all__ = [
    "DuplicatePublished",
    "TaskQueued",
    "TaskRefused",
    "TaskRescheduled",
    "TaskRetried",
    "TaskSkipped",
    "TasksWaiting",
]


def by_cause(name: str, about: str, *more: str) -> Changes:
    begins = ("conflict", "unavailable", *more)
    return {counter(name, about, "task", "cause", unit="{task}", begins=begins): 1}


@dataclass(frozen=True)
class TaskEvent(LockEvent):
    """
    Something that a policy did with a task.

    Attributes:
        task: Name of the task.
        task_id: Its id.
        cause: ``"conflict"``, ``"rate"``, ``"deliveries"`` or ``"unavailable"``; ``"debounced"``,
            as a newer call has come. In report mode also ``"redelivered"``, of a copy beside the
            run of the original, ``"finished"``, of one that came after it, and ``"unnamed"``, of
            arguments that make no lock name.
        holder: Who holds the lock, as in `LockTaken.holder`, or the ``task_id`` of the newer call;
            empty if nobody knows.
    """

    journal = "refused"
    noted: ClassVar[tuple[str, ...]] = ("cause",)
    would_have_been: ClassVar[str] = ""

    task: str = field()  # given in any case, unlike that of other events
    task_id: str = field()
    cause: str
    holder: dict[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def counts_as(self) -> str:
        return self.cause

    @classmethod
    def why(cls, it: Record) -> str:
        return refusal(it)

    @classmethod
    def would(cls, it: Record) -> str:
        return f"Running {task(it)}, which would have {cls.would_have_been}"


@dataclass(frozen=True)
class TaskSkipped(TaskEvent):
    """The body of a task did not and will not run, by policy; the task succeeded."""

    celery_type = word = "skipped"
    would_have_been = "been skipped"
    mark = "warn"
    level = logging.INFO
    metrics = by_cause("skipped", "Tasks that were skipped.", "rate", "debounced")

    holder: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def what(cls, it: Record) -> str:
        return f"Skipped {task(it)}"


@dataclass(frozen=True)
class TaskRefused(TaskEvent):
    """The body of a task did not and will not run, by policy; the task failed."""

    celery_type = "refused"
    word = would_have_been = "failed"
    mark = "bad"
    level = logging.WARNING
    metrics = by_cause("refused", "Tasks that failed: no lock.", "rate", "deliveries")

    @classmethod
    def what(cls, it: Record) -> str:
        return f"Failed {task(it)}"


@dataclass(frozen=True)
class TaskRetried(TaskEvent):
    """
    A task is retried by Celery.

    Attributes:
        countdown: When [s from now].
    """

    celery_type = word = "retried"
    would_have_been = "been retried"
    mark = "warn"
    level = logging.WARNING
    noted = ("cause", "countdown")
    metrics = by_cause("retried", "Tasks that were retried: no lock.")

    countdown: float

    @classmethod
    def what(cls, it: Record) -> str:
        return f"Retry of {task(it)} in {number(it.get('countdown')):g} s"


@dataclass(frozen=True)
class TaskRescheduled(TaskEvent):
    """
    A task was rescheduled; it will be delivered again under the same id.

    Attributes:
        countdown: When [s from now].
        times: How often it was rescheduled by now [>= 1].
    """

    celery_type = word = "rescheduled"
    would_have_been = "been rescheduled"
    mark = "warn"
    level = logging.WARNING
    noted = ("cause", "countdown")
    metrics = by_cause("rescheduled", "How often tasks were rescheduled.")

    countdown: float
    times: int

    @classmethod
    def what(cls, it: Record) -> str:
        again = f"{number(it.get('countdown')):g} s (attempt {number(it.get('times')):g})"
        return f"Rescheduled {task(it)} in {again}"


@dataclass(frozen=True)
class TaskQueued(TaskEvent):
    """
    A task waits for its lock, by policy: it is woken when the lock is released.

    Attributes:
        countdown: When it comes if nobody wakes it [s from now].
        times: How often it was refused by now [>= 1].
        since: Since when it waits [s, Unix time].
    """

    celery_type = word = "queued"
    would_have_been = "been queued"
    level = logging.INFO
    noted = ("cause", "countdown")
    metrics = by_cause("queued", "How often tasks were queued behind a holder.")

    countdown: float
    times: int
    since: float

    @classmethod
    def what(cls, it: Record) -> str:
        return f"Queued {task(it)} (attempt {number(it.get('times')):g})"


@dataclass(frozen=True)
class TasksWaiting(Event):
    """
    How many tasks wait for their locks in this worker has changed; once a second at most.

    Attributes:
        task: Name of the tasks.
        count: How many wait and can be woken [>= 0].
    """

    celery_type = word = "waiting"
    metrics: ClassVar[Changes] = {
        gauge(
            *("waiting", "Tasks that wait for their locks in this worker, and can be woken."),
            "task",
            mode="livesum",
            otel="waiting",
            unit="{task}",
        ): "count"
    }

    task: str
    count: int

    @classmethod
    def what(cls, it: Record) -> str:
        count = number(it.get("count"))
        return f"{count:g} of task {text(it, 'task')} wait for their locks in this worker"


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

    celery_type = word = "duplicate"
    is_of_task = False  # its publisher reports it
    level = logging.INFO
    journal = "refused"
    noted = ("on_duplicate",)
    metrics: ClassVar[Changes] = {
        counter(
            *("duplicates", "Publishes of a task that was there already.", "task", "on_duplicate"),
            unit="{task}",
        ): 1
    }
    #: What a duplicate did, by its ``on_duplicate``.
    DID: ClassVar = {
        "join": "joined",
        "fail": "failed because of",
        "rerun": "asked for another run of",
    }

    task: str = field()
    holder_id: str
    on_duplicate: str
    merged: int = 0

    @property
    def holder(self) -> dict[str, Any]:
        """Who was there first, as far as it is known."""
        return {"task_id": self.holder_id}

    @property
    def counts_as(self) -> str:
        return "duplicate"

    @classmethod
    def did(cls, it: Record) -> str:
        """Return what it did, and of which task it is one."""
        did = cls.DID.get(text(it, "on_duplicate"), "was published beside")
        return f"{did} task {text(it, 'task')}[{text(it, 'holder_id')}]"

    @classmethod
    def what(cls, it: Record) -> str:
        return f"A duplicate {cls.did(it)}"

    @classmethod
    def why(cls, it: Record) -> str:
        merged = number(it.get("merged"))
        return f"{lock(it)}{f'; {merged:g} merged into the next run' if merged else ''}"

    @classmethod
    def would(cls, it: Record) -> str:
        return f"Published task {text(it, 'task')}, which would have {cls.did(it)}"
