"""
A room for all that wait for locks in a process, threads and messages alike.

    enter --> a node takes the oldest out of its line, and sends a hint that the lock may be free
          --> that one is woken, or if it is already, the oldest here --> leave, or wait again
          --> registered again as it was taken out and not woken, or as a node can be heard: it
              takes whom nobody hears out of its line

A hint counts once a majority of nodes has sent it, or a round trip of the first one's node later:
others, further away, then have the release before the attempt. If not, the majority wakes the same
one again. Pure but for the clock, so that a simulation has the same room.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from celery_redlock.lock import clock
from celery_redlock.lock.records import OWNER_LENGTH, RELEASE_LENGTH
from celery_redlock.process.deferral import allow_signals
from celery_redlock.process.mutex import new_mutex

__all__ = ["Room", "ThreadWaiting", "Waiting"]

#: How long a hint waits for those of other nodes that mean the same [s].
BELATED = 1.0
#: Most hints that do so: those of other nodes then count as new.
MOST_HINTS = 1000
#: Who has not run for so long cannot [s]: its loop is blocked, stopped or closed. Twice what a
#: waiter sleeps at most.
CANNOT_RUN = 2.0
#: Who has not run for so long is gone [s].
GONE = 60.0
NEVER = float("inf")

by_age = attrgetter("since")
takes_free = attrgetter("takes_free")


class Waiting:
    """Somebody who waits for a lock in this process."""

    takes_free = True  # or else it waits for a release

    def __init__(self, line: bytes, since: float, who: str = "") -> None:
        self.line = line  # Redis key of the line
        self.since = since  # [s, Unix time]
        self.who = who  # as nodes know it
        self.is_woken = False  # and has not waited again since
        self.ran_at = NEVER  # [s, our clock]; a message always can

    def wake(self, after: float) -> None:
        """Have it try for the lock in so many seconds; called with the room's mutex held."""
        raise NotImplementedError

    def register_again(self) -> None:
        """Have the nodes told once more that it waits; called with the room's mutex held."""
        raise NotImplementedError


class ThreadWaiting(Waiting):
    """
    A thread that waits; it sleeps in `wait`.

    No event: a signal may strike a thread at any point, and would leave an event's own lock taken,
    on which the listener's threads would hang.

    Attributes:
        is_to_register: Whether it sleeps no longer before the nodes were told that it waits.
    """

    def __init__(
        self, line: bytes, since: float, now: Callable[[], float] = clock.now, who: str = ""
    ) -> None:
        super().__init__(line, since, who)
        self.is_to_register = False
        self._now = now
        self.ran_at = now()
        self._wakes_at = NEVER
        self._bell = threading.Lock()
        self._bell.acquire()

    def wake(self, after: float) -> None:
        """If it does not sleep, its next `wait` ends by then."""
        self._wakes_at = min(self._wakes_at, self._now() + after)
        self._ring()

    def register_again(self) -> None:
        self.is_to_register = True
        self._ring()

    def _ring(self) -> None:
        if self._bell.locked():
            self._bell.release()

    def seconds_left(self, ends: float) -> float:
        if self._wakes_at == NEVER:
            self.is_woken = False
        if self.is_to_register:
            return 0.0
        return min(ends, self._wakes_at) - self._now()

    def was_woken(self) -> bool:
        """Return whether its time has come; once."""
        is_woken = self._now() >= self._wakes_at
        if is_woken:
            self._wakes_at = NEVER
        return is_woken

    def wait(self, seconds: float) -> bool:
        """Sleep until woken, at most so long [s]; return whether it was woken."""
        ends = self._now() + seconds
        with allow_signals():
            while (left := self.seconds_left(ends)) > 0:
                self._bell.acquire(timeout=left)
        return self.was_woken()


@dataclass
class Hint:
    """That a lock may be free by a release."""

    at: float  # when the first node said so [s, our clock]
    counts_at: float  # if no more do
    nodes: set[int] = field(default_factory=set)  # positions of those that did
    waiting: Waiting | None = None  # who was woken by it
    is_said: bool = False  # by a majority


class Room:
    """All that wait for locks in one process. Safe from any thread."""

    def __init__(
        self,
        majority: int,
        round_trip: Callable[[int], float],
        now: Callable[[], float] = clock.now,
    ) -> None:
        self._majority = majority
        self._round_trip = round_trip
        self._now = now
        self._mutex = new_mutex()
        self._lines: dict[bytes, list[Waiting]] = {}
        self._known: dict[tuple[bytes, bytes], Waiting] = {}  # by line, and as nodes know them
        self._hints: dict[bytes, Hint] = {}

    @property
    def is_empty(self) -> bool:
        return not self._lines or not self._has_anybody()

    def _has_anybody(self) -> bool:
        since = self._now() - GONE
        with self._mutex:
            return any(one.ran_at >= since for line in self._lines.values() for one in line)

    def enter(self, waiting: Waiting) -> None:
        with self._mutex:
            insort(self._lines.setdefault(waiting.line, []), waiting, key=by_age)
            self._known[waiting.line, waiting.who.encode()] = waiting

    def leave(self, waiting: Waiting) -> None:
        with self._mutex:
            line = self._lines.get(waiting.line, [])
            if waiting in line:
                line.remove(waiting)
            if not line:
                self._lines.pop(waiting.line, None)
            known_as = waiting.line, waiting.who.encode()
            if self._known.get(known_as) is waiting:
                del self._known[known_as]

    def has_waited_since(self, waiting: Waiting, since: float) -> None:
        """Have *waiting* in line by what the nodes know of it [s, Unix time]."""
        with self._mutex:
            line = self._lines.get(waiting.line, [])
            if waiting in line:
                line.remove(waiting)
                waiting.since = since
                insort(line, waiting, key=by_age)

    def is_oldest(self, waiting: Waiting) -> bool:
        """
        Return whether it takes a free lock, and nobody here has waited longer for that one.

        To be asked by *waiting* itself: it runs.
        """
        if waiting.ran_at != NEVER:
            waiting.ran_at = self._now()
        # Without the mutex: another thread may be about to leave an empty line.
        return waiting.takes_free and self.oldest(waiting.line) in (None, waiting)

    def oldest(self, line: bytes) -> Waiting | None:
        """Return who has waited longest here of those who take a free lock of *line*, and can."""
        return next(filter(takes_free, self._running(self._lines.get(line, ()))), None)

    def _running(self, waiting: Iterable[Waiting]) -> Iterator[Waiting]:
        since = self._now() - CANNOT_RUN
        return (one for one in waiting if one.ran_at >= since)

    def free(self, line: bytes, places: int) -> None:
        """Have as many of the oldest in *line* try as *places* of their lock are free."""
        with self._mutex:
            able = filter(takes_free, self._running(self._lines.get(line, ())))
            for waiting in islice(able, places):
                if not waiting.is_woken:
                    waiting.is_woken = True
                    waiting.wake(0.0)

    def register_all(self) -> None:
        """Have the nodes told once more of all who wait."""
        with self._mutex:
            for line in self._lines.values():
                for waiting in reversed(line):  # the oldest tries, and may release soon
                    waiting.register_again()

    def hear(self, position: int, message: bytes) -> None:
        """Take a hint of the node at *position*: of which release, whom it took, of which line."""
        release, line = message[:RELEASE_LENGTH], message[RELEASE_LENGTH + OWNER_LENGTH :]
        with self._mutex:
            if line in self._lines:
                taken = self._known_as(line, message[RELEASE_LENGTH : -len(line)])
                hint = self._hint(position, release + line)
                hint.nodes.add(position)
                self._act(hint, line, taken)
                if taken is not None and not (taken is hint.waiting and taken.is_woken):
                    taken.register_again()

    def _known_as(self, line: bytes, who: bytes) -> Waiting | None:
        return self._known.get((line, who))

    def _hint(self, position: int, message: bytes) -> Hint:
        now = self._now()
        while self._hints and (
            len(self._hints) > MOST_HINTS or next(iter(self._hints.values())).at < now - BELATED
        ):
            del self._hints[next(iter(self._hints))]
        hint = Hint(now, now + self._round_trip(position))
        return self._hints.setdefault(message, hint)

    def _act(self, hint: Hint, line: bytes, taken: Waiting | None) -> None:
        """Wake somebody by a new hint; by a majority once more, as the first time may be early."""
        now, is_said = self._now(), len(hint.nodes) >= self._majority
        if hint.is_said:
            return
        if hint.waiting not in self._lines[line]:  # nobody yet, or one who has left
            if hint.waiting is not None and now >= hint.counts_at:
                return
            hint.waiting = self._next(line, taken)
        elif not is_said:
            return
        hint.is_said = is_said
        hint.waiting.is_woken = True
        hint.waiting.wake(0.0 if is_said else hint.counts_at - now)

    def _next(self, line: bytes, taken: Waiting | None) -> Waiting:
        in_line = self._lines[line]
        if taken is not None and not taken.is_woken and taken in self._running([taken]):
            return taken
        asleep = (one for one in self._running(in_line) if not one.is_woken)
        return next(asleep, None) or next(self._running(in_line), in_line[0])
