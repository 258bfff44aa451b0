"""
The waiting state that a message carries: for which lock, since when, how often refused.

    refused, policy "queue" --> a copy that says since when it waits (`Waiting`), for much later
    a worker receives it     --> `celery_redlock.task.worker.waiting_room` has it woken
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from celery_redlock.lock import clock
from celery_redlock.lock.records import END_OF_TIME, RATE, is_text, shorten
from celery_redlock.lock.waiting.waiting import InLine

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

__all__ = ["Waiting", "Wakes"]

#: When a task comes that nobody wakes [s], the first time and at most; twice as long each time.
FIRST_BY_ITSELF, LONGEST_BY_ITSELF = 60, 600
#: Share of that by which it may come earlier: not all at once [1].
JITTER = 0.1
#: Longest lock name in a message, as `shorten` makes it [characters].
LONGEST_NAME = 110
#: Most times a task may come by itself; larger numbers are forged.
MOST_TIMES = 2**31 - 1


class Wakes(enum.Enum):
    #: A lock that is released, or that nobody holds.
    FREE = "free"
    #: A lock that is released: it waits for another one to end, and would find a free lock at once.
    RELEASE = "release"
    #: Nothing: it waits for its time. It has waited for the lock, and keeps its `Waiting.since`.
    NOTHING = "nothing"


#: What a message says -> what that means.
SAID: dict[bool | str, Wakes] = {True: Wakes.FREE, False: Wakes.NOTHING, "release": Wakes.RELEASE}


@dataclass(frozen=True)
class Waiting:
    """
    A task that waits for its lock.

    Attributes:
        name: Of the lock; shortened if it is long.
        since: When the lock was first refused [s, Unix time].
        times: How often it was refused by now [>= 1].
    """

    name: str
    since: float
    times: int = 1
    wakes_it: Wakes = Wakes.FREE

    @classmethod
    def again(cls, before: Self | None, name: str, wakes_it: Wakes = Wakes.FREE) -> Self:
        """The state after another refusal; *before* is the one that the message came with."""
        short = shorten(name)
        if before is None:
            return cls(short, round(clock.wall(), 3), 1, wakes_it)
        if before.name != short:  # another of its names: it does not go to the end of that queue
            return cls(short, before.since, 1, wakes_it)
        times = min(before.times + 1, MOST_TIMES)
        return replace(before, times=times, wakes_it=wakes_it)

    @property
    def unwoken(self) -> Self:
        return replace(self, wakes_it=Wakes.NOTHING)

    @classmethod
    def of(cls, value: Any) -> Self | None:
        if type(value) is not dict:
            return None
        name: Any = value.get("name")
        since: Any = value.get("since")
        times: Any = value.get("times")
        woken: Any = value.get("woken", True)
        is_name = isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and is_text(name)
        is_moment = type(since) in (int, float) and 0 <= since < END_OF_TIME
        is_count = type(times) is int and 0 < times <= MOST_TIMES
        if not (is_name and is_moment and is_count and type(woken) in (bool, str)):
            return None
        wakes_it = SAID.get(woken)
        return None if wakes_it is None else cls(name, float(since), times, wakes_it)

    @property
    def parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"name": self.name, "since": self.since, "times": self.times}
        if self.wakes_it is not Wakes.FREE:
            parts["woken"] = self.wakes_it is Wakes.RELEASE and "release"
        return parts

    def in_line(
        self, task: str, task_id: Any, execution: str, channel: str = "", limit: int = 1
    ) -> InLine:
        """As the nodes know it; *channel* is empty where nothing wakes it."""
        info = {"task": task, "task_id": task_id}
        asks = self.wakes_it is Wakes.FREE
        lapses = asks and self.name.endswith(RATE)
        return InLine(self.name, execution, self.since, info, channel, limit, asks, lapses)

    def comes_by_itself(self, longest: float) -> int:
        """When it comes if nobody wakes it [whole s]; *longest* is what the broker bears."""
        ceiling = min(LONGEST_BY_ITSELF, longest, FIRST_BY_ITSELF * 2.0 ** min(self.times - 1, 10))
        return max(1, math.floor(clock.jitter((1 - JITTER) * ceiling, ceiling)))
