"""
Queue of things that leave the process later, sent by a thread of ours.

    put --> [ oldest ... newest ] --every half second, or flush--> send, in batches

Putting something in never waits, whatever the receiver does: while it is away, the
newest things stay and the oldest make room.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from celery_redlock.process.forks import members
from celery_redlock.process.log import get_logger
from celery_redlock.process.mutex import new_mutex

__all__ = ["Outbox"]

logger = get_logger(__name__)

#: Things that wait at most; one of ours has about 500 bytes.
MOST = 5000
#: Things that are sent at once.
BATCH = 100
#: How long things are gathered before they are sent [s].
GATHER = 0.5
#: After so long without anything to send, the line is hung up [s].
IDLE = 30.0
#: Longest pause between two tries while the receiver is away [s]; it doubles from `GATHER` on.
LONGEST_PAUSE = 10.0
#: How often dropped things are reported, at most [s].
TELL_EVERY = 60.0

_every_outbox: weakref.WeakSet[Outbox] = members("outbox")


class Outbox:
    """
    Sends what it is given, from one thread per process that begins with the first thing.

    Args:
        what: What the things are, for the log.
        send: Sends a batch. What it raises means that nothing of it was sent.
        hang_up: Lets go of whatever *send* holds open; called from the same thread.
        most: How many things wait at most [> 0].
    """

    def __init__(
        self,
        what: str,
        send: Callable[[Sequence[Any]], None],
        hang_up: Callable[[], None],
        most: int = MOST,
    ) -> None:
        self._what = what
        self._send = send
        self._hang_up = hang_up
        self._most = most
        self._start_over()
        _every_outbox.add(self)

    def _start_over(self) -> None:
        """Hold nothing. After a fork: the parent sends what it has not sent yet."""
        self._things: deque[Any] = deque(maxlen=self._most)
        self._under_way: list[Any] = []
        self._dropped = 0
        self._starting = new_mutex()
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()
        self._hurried = threading.Event()
        self._tried = threading.Event()
        self._fails_since: float | None = None
        self._reported_at = -TELL_EVERY
        self._is_closed = False

    def put(self, thing: Any) -> None:
        if len(self._things) == self._most:
            self._dropped += 1
        self._things.append(thing)
        if not self._woken.is_set():
            self._woken.set()
            self._ensure_thread()

    def flush(self, within: float) -> None:
        """Send everything within so many [s], and drop what cannot be sent: the process ends."""
        if not self._is_pending:
            return
        self._tried.clear()
        self._hurried.set()
        if self._ensure_thread():
            self._tried.wait(within)
        self._dropped += len(self._things) + len(self._under_way)
        self._things.clear()
        self._under_way = []
        self._tell_of_dropped()

    def close(self) -> None:
        self._is_closed = True
        self._tried.clear()
        self._hurried.set()
        self._woken.set()

    @property
    def _is_pending(self) -> bool:
        return bool(self._things or self._under_way)

    def _ensure_thread(self) -> bool:
        with self._starting:
            if self._thread is not None and self._thread.is_alive():
                return True
            thread = threading.Thread(target=self._run, name="redlock-outbox", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the process ends; the next thing tries again
                self._woken.clear()
                return False
            self._thread = thread
            return True

    def _run(self) -> None:
        pause, pid = GATHER, os.getpid()
        while os.getpid() == pid and not (self._is_closed and self._tried.is_set()):
            if not self._is_pending:
                self._wait_for_more()
            self._hurried.wait(pause)
            self._woken.clear()
            pause = self._try(pause)
            if self._hurried.is_set():
                self._hurried.clear()
                self._hang_up()
                self._tried.set()

    def _wait_for_more(self) -> None:
        if not self._woken.wait(IDLE):
            self._hang_up()
            self._woken.wait()

    def _try(self, pause: float) -> float:
        """Send all there is; returns when to try again [s]."""
        try:
            self._send_all()
        except Exception as error:  # noqa: BLE001  of whatever transport there is
            self._hang_up()
            if self._fails_since is None:
                self._fails_since = time.monotonic()
                # Without the text of the error, which may contain an address.
                logger.warning(
                    "%s cannot be sent (%s); the newest %d are kept meanwhile",
                    *(self._what, type(error).__name__, self._most),
                )
            return min(2.0 * pause, LONGEST_PAUSE)
        if self._fails_since is not None:
            away = time.monotonic() - self._fails_since
            logger.info("%s are sent again, after %.1f s", self._what, away)
            self._fails_since = None
        self._tell_of_dropped()
        return GATHER

    def _send_all(self) -> None:
        while self._under_way or self._things:
            self._under_way += self._take(BATCH - len(self._under_way))
            self._send(self._under_way)
            self._under_way = []

    def _take(self, count: int) -> list[Any]:
        """Take up to *count* of the oldest things, less if others take them away meanwhile."""
        taken: list[Any] = []
        with contextlib.suppress(IndexError):
            while len(taken) < count:
                taken.append(self._things.popleft())
        return taken

    def _tell_of_dropped(self) -> None:
        now, dropped = time.monotonic(), self._dropped
        if dropped and now >= self._reported_at + TELL_EVERY:
            self._reported_at, self._dropped = now, 0
            logger.warning("%d %s were dropped, the oldest first", dropped, self._what)

    def after_fork_in_child(self) -> None:
        self._start_over()
