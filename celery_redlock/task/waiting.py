"""
That a task waits for its lock, as its message says, and when it comes if nobody wakes it.

    refused, policy "queue" --> a copy that says since when it waits (`Waiting`), for much later
    a worker receives it     --> `celery_redlock.task.waiting_room` has it woken
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from celery_redlock.lock import clock
from celery_redlock.lock.records import END_OF_TIME, is_text, shorten
from celery_redlock.lock.waiting import MOST_PLACES, Ticket

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

    from celery_redlock.task.delivery import Delivery

__all__ = ["Waiting"]

#: When a task comes that nobody wakes [s], the first time and at most; twice as long each time.
FIRST_BY_ITSELF, LONGEST_BY_ITSELF = 60, 600
#: Share of that by which it may come earlier: not all at once [1].
JITTER = 0.1
#: Longest lock name in a message, as `shorten` makes it [characters].
LONGEST_NAME = 110
#: Most times a task may come by itself; larger numbers are forged.
MOST_TIMES = 2**31 - 1


@dataclass(frozen=True)
class Waiting:
    """
    That a task waits for its lock.

    Attributes:
        name: Of the lock; shortened if it is long.
        since: When the lock was first refused [s, Unix time].
        times: How often it was refused by now [>= 1].
        limit: How many places the lock has.
        is_woken: Whether a release is to wake it. What waits for something else, and has waited
            for the lock, keeps its `since`, and is not woken: it would find the lock free at once.
    """

    name: str
    since: float
    times: int = 1
    limit: int = 1
    is_woken: bool = True

    @classmethod
    def again(cls, before: Self | None, name: str, limit: int, *, is_woken: bool = True) -> Self:
        """
        Return that a task waits that was refused its lock.

        Args:
            before: As it came.
            name: Of the lock.
            limit: How many places that has.
            is_woken: Whether a release is to wake it.
        """
        short = shorten(name)
        if before is None:
            return cls(short, round(clock.wall(), 3), 1, limit, is_woken)
        if before.name != short:  # another of its names: it does not go to the end of that queue
            return cls(short, before.since, 1, limit, is_woken)
        times = min(before.times + 1, MOST_TIMES)
        return replace(before, times=times, limit=limit, is_woken=is_woken)

    @property
    def unwoken(self) -> Self:
        """The same, not to be woken."""
        return replace(self, is_woken=False)

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """Parse what a message says; None if absent or malformed."""
        if type(value) is not dict:
            return None
        name: Any = value.get("name")
        since: Any = value.get("since")
        times: Any = value.get("times")
        limit: Any = value.get("limit", 1)
        is_woken: Any = value.get("woken", True)
        is_name = isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and is_text(name)
        is_moment = type(since) in (int, float) and 0 <= since < END_OF_TIME
        is_count = type(times) is int and 0 < times <= MOST_TIMES
        is_limit = type(limit) is int and 0 < limit <= MOST_PLACES
        if not (is_name and is_moment and is_count and is_limit and type(is_woken) is bool):
            return None
        return cls(name, float(since), times, limit, is_woken)

    @property
    def parts(self) -> dict[str, Any]:
        """What a message carries."""
        parts: dict[str, Any] = {"name": self.name, "since": self.since, "times": self.times}
        if self.limit != 1:
            parts["limit"] = self.limit
        if not self.is_woken:
            parts["woken"] = False
        return parts

    def ticket(self, task: Any, delivery: Delivery, token: str = "", channel: str = "") -> Ticket:
        """
        Return what the nodes know of the task while it waits.

        Args:
            task: The task.
            delivery: Of its message.
            token: That it is woken by; empty where it cannot be woken.
            channel: Of the process that waits with it; likewise.
        """
        info = {"task": task.name, "task_id": delivery.task_id}
        return Ticket(self.name, delivery.execution, self.since, info, token, channel, self.limit)

    def comes_by_itself(self, longest: float) -> int:
        """Return when the task comes if nobody wakes it [whole s]; *longest* the broker bears."""
        ceiling = min(LONGEST_BY_ITSELF, longest, FIRST_BY_ITSELF * 2.0 ** min(self.times - 1, 10))
        return max(1, math.floor(clock.jitter((1 - JITTER) * ceiling, ceiling)))
