"""
The queued marker in a worker: whose message this is, and what becomes of the marker.

    publisher --header--> worker: started  (started: it ends; else it lives as long as the lock)
                                  retry, put off, replaced, delivered again: it waits
                                  ended    (finished: it ends; success: only if it was one)
                          parent: revoked, expired, killed: it ends

Only the token in the message ends a marker, so whoever comes late ends nobody else's.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery.exceptions import Ignore, Reject, Retry
from kombu.utils import json

from celery_redlock.errors import LockKeyError
from celery_redlock.lock.queued import AS_IT_IS, OVER, Queued, Started
from celery_redlock.task.options import LockOptions

__all__ = ["HEADER", "NotItsTurn", "QueuedTask", "outcome_of"]

logger = logging.getLogger(__name__)

#: Header that carries the lock name and the marker's token.
HEADER = "redlock_queued"
#: What a message carries may come from anybody who can publish.
WELL_FORMED = re.compile(r"[0-9a-f]{40}")
#: Longest and shortest time after which a task that is next looks whether it is its turn [s].
LOOK_AGAIN = 1.0, 10.0
#: Share of the time that the one before it has run so far [1]: short runs are not kept waiting.
PATIENCE = 0.25

#: What became of a task, or of its turn.
FINISHED, FAILED, AGAIN, REVOKED = "finished", "failed", "again", "revoked"


class NotItsTurn(Exception):
    """
    The task that is queued before this one has not ended.

    Attributes:
        after: When to look again [s].
    """

    def __init__(self, after: float) -> None:
        super().__init__(after)
        self.after = after


@dataclass(frozen=True)
class QueuedTask:
    """
    A task that was published with a marker.

    Attributes:
        name: Lock name that the marker is for.
        token: Proof of ownership.
        task: Task name, and `task_id` its id, for others to see.
        task_id: See there.
    """

    name: str
    token: str
    task: str
    task_id: str

    @classmethod
    def of(cls, headers: Mapping[str, Any] | None, task: str, task_id: str) -> QueuedTask | None:
        """Return what *headers* of a message say; None if it is nothing, or no sense."""
        told = (headers or {}).get(HEADER)
        if not (isinstance(told, (list, tuple)) and len(told) == 2):  # noqa: PLR2004  name, token
            return None
        name, token = told
        if not (isinstance(name, str) and name and isinstance(token, str)):
            return None
        if not WELL_FORMED.fullmatch(token) or re.search("[\ud800-\udfff]", name):
            return None
        return cls(name, token, task, task_id)

    @property
    def header(self) -> dict[str, Any]:
        """What a message carries along."""
        return {HEADER: [self.name, self.token]}

    @property
    def info(self) -> dict[str, Any]:
        """What the marker tells of its owner."""
        return {"task": self.task, "task_id": self.task_id}

    def start(
        self, queued: Queued, options: LockOptions, lock: Any, *, comes_back: bool
    ) -> Started:
        """
        Note that the task runs under *lock* now.

        Args:
            queued: The markers on the nodes.
            options: Of the task.
            lock: That it holds.
            comes_back: Whether its message is delivered again if the worker dies, so that the
                marker has to outlive the lock.

        Raises:
            NotItsTurn: Another task of this name is queued before it.
        """
        if options.unique_until == "expired" and not options.reruns:
            return Started()
        told = queued.start(
            self.name,
            self.token,
            self.info,
            lock_token=lock.token,
            life=self._life_from_start(options, lock, comes_back=comes_back),
            wait=options.reruns,
        )
        if isinstance(told, Started):
            return told
        raise NotItsTurn(LOOK_AGAIN[0] if told is None else look_again(told, {}))

    def _life_from_start(self, options: LockOptions, lock: Any, *, comes_back: bool) -> float | str:
        if options.unique_until == "started":
            return OVER
        if options.unique_until == "expired":
            return AS_IT_IS
        is_under_lock = lock.name == self.name and lock.token
        return 0.0 if is_under_lock and not comes_back else options.unique_for

    def end(
        self, queued: Queued, options: LockOptions, became: str, *, delay: float = 0.0, wait: bool
    ) -> None:
        """
        Let the marker have what becomes of it.

        Args:
            queued: The markers on the nodes.
            options: Of the task.
            became: ``"finished"``, ``"failed"``, ``"again"`` or ``"revoked"``.
            delay: When it comes again [s from now].
            wait: As of `Queued.end`.
        """
        if options.unique_until == "expired":
            return
        how = OVER
        if became == AGAIN:
            how = "wait"
        elif became == FAILED and options.unique_until == "success":
            how = "window"
        queued.end(self.name, self.token, how, life=options.unique_for + delay, wait=wait)


def outcome_of(error: BaseException | None, *, is_replaced: bool) -> str | None:
    """
    Return what became of a task that ended with *error*, None if that is not known here.

    What is not an Exception, like SystemExit or the end of a greenlet, tore the body apart: the
    message may come again, and what becomes of the marker is for the parent to say.
    """
    if error is None:
        return FINISHED
    if isinstance(error, Retry):
        return AGAIN
    if isinstance(error, Ignore):
        return AGAIN if is_replaced else FINISHED
    if isinstance(error, Reject):
        return AGAIN if error.requeue else FAILED  # type: ignore[attr-defined]
    return FAILED if isinstance(error, Exception) else None


def look_again(ttl: float, holder: Mapping[str, Any]) -> float:
    """
    Return when to look whether it is the turn of a task that is next [s].

    Args:
        ttl: For how long the one before it stands at most [s]; 0.0 if nobody knows.
        holder: As in `LockTaken.holder`.
    """
    since = holder.get("since")
    ran = time.time() - since if isinstance(since, (int, float)) else 0.0
    shortest, longest = LOOK_AGAIN
    patience = min(longest, max(shortest, PATIENCE * ran))
    return min(patience, ttl) if ttl else patience


def newest_call(arguments: bytes) -> tuple[list[Any], dict[str, Any]] | None:
    """
    Return positional and keyword arguments from what a trigger left on the nodes.

    Raises:
        LockKeyError: They are no arguments.
    """
    if not arguments:
        return None
    try:
        call = json.loads(arguments)
    except ValueError as error:
        raise LockKeyError("what was merged into this task is no JSON") from error
    if call is None:  # the name says it all
        return None
    if not (isinstance(call, list) and len(call) == 2):  # noqa: PLR2004  args and kwargs
        raise LockKeyError("what was merged into this task are no arguments")
    args, kwargs = call
    if not (isinstance(args, list) and isinstance(kwargs, dict)):
        raise LockKeyError("what was merged into this task are no arguments")
    return args, kwargs
