"""Events of beat: who leads, and what happened to a slot."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from celery_redlock.events.base import Event, LockEvent
from celery_redlock.events.metrics import DELAYS, LEADER, SLOTS, Changes, counter, histogram
from celery_redlock.events.wording import Record, length, reason_in, slot, task, text
from celery_redlock.words import LOSSES, iso_moment, number

__all__ = ["LeaderDeposed", "LeaderElected", "SlotPublished", "SlotSkipped"]


@dataclass(frozen=True)
class LeaderElected(LockEvent):
    """
    This process leads all schedulers of its name from now on.

    Attributes:
        fence: Number of its term; a later leader has a larger one.
    """

    celery_type = "leader-elected"
    is_of_task = False
    word = "leads"
    level = logging.INFO
    journal = "beat"
    metrics: ClassVar[Changes] = {
        counter("leader_elected", "How often this process became the leader."): 1,
        LEADER: 1,
    }

    fence: int | None

    @classmethod
    def what(cls, it: Record) -> str:
        """Return that it leads."""
        return f"Leads as {text(it, 'name')!r}, term {text(it, 'fence')}"


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

    celery_type = "leader-deposed"
    is_of_task = False
    word = "no longer leads"
    mark = "warn"
    level = logging.INFO
    journal = "beat"
    metrics: ClassVar[Changes] = {
        counter("leader_deposed", "Ends of this process's leadership.", "reason"): 1,
        LEADER: 0,
    }
    #: Why a term ended, in words.
    REASONS: ClassVar = {
        "resigned": "it resigned",
        "failed": "its scheduler raised an error",
        "clock": "the clock of its machine is too far ahead",
        "deposed": "a newer leader was met",
        **LOSSES,
    }

    reason: str
    led: float

    @classmethod
    def what(cls, it: Record) -> str:
        """Return that it no longer leads."""
        return f"No longer leads as {text(it, 'name')!r}, after {length(it, 'led')}"

    @classmethod
    def why(cls, it: Record) -> str:
        """Return why its term ended."""
        return reason_in(cls.REASONS, it, "reason")


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

    celery_type = "slot-published"
    word = "slot published"
    level = logging.INFO
    outcome = "published"
    introduces = "entry"
    metrics: ClassVar[Changes] = {
        SLOTS: 1,
        histogram(
            *("From when a slot was due to the publish of its task.", "entry"),
            prometheus="beat_slot_delay_seconds",
            bounds=DELAYS,
        ): "late",
    }

    task_id: str
    late: float

    @classmethod
    def what(cls, it: Record) -> str:
        """Return that it was published."""
        seconds = number(it.get("late"))
        late = f", {seconds:.1f} s late" if seconds >= 1 else ""
        return f"Published {slot(it)} as {task(it)}{late}"


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

    celery_type = "slot-skipped"
    word = "slot skipped"
    mark = "warn"
    level = logging.WARNING
    journal = "beat"
    metrics: ClassVar[Changes] = {SLOTS: 1}
    #: Why, in words.
    CAUSES: ClassVar = {
        "overlap": "the run of an earlier slot has not ended",
        "deadline": "too old to be made up for (redlock_beat_starting_deadline)",
        "duplicate": "the task is queued or running already",
        "uncertain": "an earlier leader died while publishing it, and the task recognises no copy",
    }

    cause: str
    since: float = 0.0

    @property
    def outcome(self) -> str:
        """What happened to it."""
        return self.cause

    @classmethod
    def what(cls, it: Record) -> str:
        """Return that it was skipped, and those before it."""
        since = it.get("since")
        earlier = f" and all since {iso_moment(since)}" if number(since) else ""
        return f"Skipped {slot(it)}{earlier}"

    @classmethod
    def why(cls, it: Record) -> str:
        """Return why."""
        return reason_in(cls.CAUSES, it, "cause")
