"""One who waits for a lock: noted on the nodes, and woken by their hints."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from celery_redlock.lock.algorithm.asks import Pause, Tell
from celery_redlock.lock.algorithm.client import Client
from celery_redlock.lock.algorithm.wanted import Wanted
from celery_redlock.lock.records import OWNER_LENGTH, line_key
from celery_redlock.lock.waiting.room import ThreadWaiting
from celery_redlock.lock.waiting.waiting import HEARD_FOR, InLine, leave_request, wait_request

if TYPE_CHECKING:
    from celery_redlock.lock.algorithm.attempt import Attempt

__all__ = ["Waiter"]

#: How often the oldest of a lock in a process tries without a hint [s]: it may be lost.
COMES_EVERY = 1.0
#: How often the others are noted again [s].
NOTED_EVERY = HEARD_FOR / 5


class Waiter:
    """
    One who wants a lock, and may wait for it.

    Attributes:
        name: Of the lock.
        attempt: The one under way, or that was granted the lock; None for none.
        started: When the latest attempt that failed began [s, our clock].
    """

    def __init__(self, client: Client, wanted: Wanted) -> None:
        self._client = client
        self._wanted = wanted
        self._who = wanted.known_as or wanted.owner or ""
        self._waiting: ThreadWaiting | None = None
        self.name = wanted.name
        self.attempt: Attempt | None = None
        self.started = 0.0

    def join(self) -> Generator[Tell, None, None]:
        """Have the nodes know that this waits; again with each attempt that was refused."""
        client, wanted, listener = self._client, self._wanted, self._client.listener
        if listener is None:
            return
        if self._waiting is None:
            self._who = self._who or client.new_token()[:OWNER_LENGTH]
            line = line_key(client.rules.prefix, wanted.name)
            self._waiting = ThreadWaiting(line, client.wall(), client.now)
            listener.enter(self._waiting)  # known by now: whoever is interrupted leaves
        yield Tell(wait_request(client.rules, self._in_line(listener.channel())))

    def _in_line(self, channel: str) -> InLine:
        wanted, waiting = self._wanted, self._waiting
        assert waiting is not None
        since = waiting.since if wanted.queued_since is None else wanted.queued_since
        return InLine(wanted.name, self._who, since, wanted.info, channel, wanted.limit)

    def pause(self, seconds: float, comes_in: float) -> Generator[Pause, bool, None]:
        """
        Pause before the next attempt.

        Args:
            seconds: For so long at most.
            comes_in: When it tries without a hint, if it is the oldest of its process; else it may
                become that, or is noted again in a while [s].
        """
        waiting, listener = self._waiting, self._client.listener
        if waiting is None or listener is None:
            yield Pause(comes_in)
            return
        now = self._client.now
        began = now()
        ends, noted = began + seconds, began + NOTED_EVERY
        while True:
            is_oldest = listener.room.is_oldest(waiting)
            due = min(ends, began + comes_in if is_oldest else noted)
            is_woken = yield Pause(max(0.0, min(due - now(), COMES_EVERY)), waiting)
            if is_woken or now() >= due:
                return

    def share(self, free: int) -> None:
        """Have others of this process try at once where more places are *free* than this takes."""
        waiting, listener = self._waiting, self._client.listener
        if free > 1 and waiting is not None and listener is not None:
            listener.room.free(waiting.line, free)  # this one may be among them

    def leave(self) -> Generator[Tell, None, None]:
        """Have the nodes forget that this waits; of a message they remember since when it does."""
        waiting, listener, rules = self._waiting, self._client.listener, self._client.rules
        if waiting is None or listener is None:
            return
        listener.leave(waiting)
        if self._wanted.known_as is None:
            yield Tell(leave_request(rules, self.name, self._who))
        else:
            yield Tell(wait_request(rules, self._in_line("")))
        self._waiting = None  # not before: whoever is interrupted leaves once more

    def clear(self) -> Generator[Tell, None, None]:
        """Leave nothing behind, nor what an attempt may have been granted."""
        if self.attempt is not None:
            yield Tell(self.attempt.release())
        yield from self.leave()
        self.attempt = None
