"""Wait for a lock: registered on the nodes, and woken by their hints."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from celery_redlock.lock.algorithm.effects import Send, Sleep
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.records import OWNER_LENGTH, line_key
from celery_redlock.lock.waiting.room import ThreadWaiting
from celery_redlock.lock.waiting.waiting import HEARD_FOR, InLine, leave_request, wait_request

if TYPE_CHECKING:
    from celery_redlock.lock.algorithm.attempt import Attempt

__all__ = ["Waiter"]

#: How often the oldest of a lock in a process tries without a hint [s]: it may be lost.
COMES_EVERY = 1.0
#: How often the others register again [s].
NOTED_EVERY = HEARD_FOR / 5


_numbers = itertools.count()


def who_is_next(channel: str) -> str:
    """Return an id under which nobody else waits: those of one process sort as they came."""
    return channel + f"{next(_numbers):0{OWNER_LENGTH - len(channel)}x}"


class Waiter:
    """
    One who wants a lock, and may wait for it.

    Attributes:
        attempt: The one under way, or that was granted the lock; None for none.
        started: When the latest attempt that failed began [s, our clock].
    """

    def __init__(self, participant: Participant, request: LockRequest) -> None:
        self._participant = participant
        self._request = request
        self._who = request.known_as or request.owner or ""
        self._waiting: ThreadWaiting | None = None
        self.name = request.name
        self.attempt: Attempt | None = None
        self.started = 0.0

    def join(self) -> Generator[Send, None, None]:
        """Register with the nodes; again with each attempt that was refused."""
        participant, request = self._participant, self._request
        listener = participant.listener
        if listener is None:
            return
        if self._waiting is None:
            self._who = self._who or who_is_next(listener.channel())
            line = line_key(participant.rules.prefix, request.name)
            here = line, participant.wall(), participant.now, self._who
            self._waiting = participant.waiting(*here)
            listener.enter(self._waiting)  # known by now: whoever is interrupted leaves
        else:
            listener.listen()
        self._waiting.is_to_register = False  # before it is: else one that comes now were lost
        yield Send(wait_request(participant.rules, self._in_line(listener.channel())))

    def _in_line(self, channel: str) -> InLine:
        request, waiting = self._request, self._waiting
        assert waiting is not None
        since = waiting.since if request.queued_since is None else request.queued_since
        return InLine(request.name, self._who, since, request.info, channel, request.limit)

    def pause(self, seconds: float, comes_in: float) -> Generator[Sleep | Send, Any, None]:
        """
        Pause before the next attempt, for so many *seconds* at most.

        The oldest of its process tries without a hint in *comes_in* seconds. The others may become
        that, or are registered again in a while. If all are to be registered again, the oldest
        tries at once: a release may have been told to nobody.
        """
        waiting, listener = self._waiting, self._participant.listener
        if waiting is None or listener is None:
            yield Sleep(comes_in)
            return
        now = self._participant.now
        began = now()
        ends, again = began + seconds, began + NOTED_EVERY
        while True:
            is_oldest = listener.room.is_oldest(waiting)
            due = min(ends, began + comes_in if is_oldest else again)
            is_woken = yield Sleep(max(0.0, min(due - now(), COMES_EVERY)), waiting)
            if is_woken or now() >= due or (is_oldest and waiting.is_to_register):
                return
            if waiting.is_to_register:
                yield from self.join()

    def share(self, free: int) -> None:
        """Have others of this process try at once where more places are *free* than this takes."""
        waiting, listener = self._waiting, self._participant.listener
        if free > 1 and waiting is not None and listener is not None:
            listener.room.free(waiting.line, free)  # this one may be among them

    def leave(self) -> Generator[Send, None, None]:
        """Deregister from the nodes; of a message they remember since when it waits."""
        waiting, listener = self._waiting, self._participant.listener
        rules = self._participant.rules
        if waiting is None or listener is None:
            return
        listener.leave(waiting)
        if self._request.known_as is None:
            yield Send(leave_request(rules, self.name, self._who))
        else:
            yield Send(wait_request(rules, self._in_line("")))
        self._waiting = None  # not before: whoever is interrupted leaves once more

    def clear(self) -> Generator[Send, None, None]:
        """Leave nothing behind, nor what an attempt may have been granted."""
        if self.attempt is not None:
            yield Send(self.attempt.release())
        yield from self.leave()
        self.attempt = None
