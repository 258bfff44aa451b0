"""
The reservation in a worker: whose message this is, and whether it is its turn.

    publisher --header--> worker: started  (started: it ends; else it lives as long as the lock)
                                  retry, requeued, replaced, delivered again: it waits
                                  ended    (finished: it ends; success: only if it was one)
                          parent: revoked, expired, killed: it ends

What happens to it when the task has ended: `celery_redlock.task.execution.outcome`. Only the token
in the message ends a reservation, so a late task never ends another's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from kombu.utils import json

from celery_redlock.errors import LockKeyError, LockNotAcquired, LockTaken, QuorumUnavailable
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.records import is_short_name, shorten
from celery_redlock.task.options import UNIQUE_UNTIL, LockOptions
from celery_redlock.unique.requests import AS_IT_IS, OVER, Start
from celery_redlock.unique.reservations import Reservations
from celery_redlock.unique.reserving import NotStarted, Started

__all__ = ["NotItsTurn", "Reservation", "newest_call"]

#: What a message carries may come from anybody who can publish.
WELL_FORMED = re.compile(r"[0-9a-f]{40}")
#: What follows in the message of one that only reports.
REPORT = "report"


class NotItsTurn(Exception):
    """The task that is queued before this one has not ended."""

    def __init__(self, why: LockNotAcquired) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True)
class Reservation:
    """
    What a message was published with that stands for a lock name.

    Attributes:
        name: Lock name that it is for.
        token: Proof of ownership.
        until: ``unique_until`` of its task when it was published; that may have changed since.
        is_report: Whether the task was in report mode then: it keeps no other message out.
    """

    name: str
    token: str = field(repr=False)
    until: str
    is_report: bool = False

    @classmethod
    def of(cls, parts: Any) -> Reservation | None:
        """Parse what a message carries; None if absent or malformed."""
        if not (isinstance(parts, (list, tuple)) and len(parts) in (3, 4)):
            return None
        if not all(isinstance(part, str) and part for part in parts):
            return None
        name, token, until, *mode = parts
        if mode not in ([], [REPORT]):
            return None
        if until not in UNIQUE_UNTIL or not WELL_FORMED.fullmatch(token):
            return None
        if not is_short_name(name):
            return None
        return cls(name, token, until, bool(mode))

    @property
    def parts(self) -> list[str]:
        """What a message carries: the name as it is in keys, which no message is too small for."""
        parts = [shorten(self.name), self.token, self.until]
        return [*parts, REPORT] if self.is_report else parts

    def reruns(self, options: LockOptions) -> bool:
        return options.reruns and not self.is_report

    def hold(self, reservations: Reservations, longest: float) -> None:
        """Shorten it while its task waits *longest* [s]: it expires soon after a dead worker."""
        if self.until != "expired":
            reservations.end(self.name, self.token, "hand", life=longest)

    def start(
        self,
        reservations: Reservations,
        options: LockOptions,
        lock: HeldLock,
        info: dict[str, Any],
        *,
        comes_back: bool,
    ) -> Started:
        """
        Note that the task runs under *lock* now.

        Args:
            reservations: Those on the nodes.
            options: Of the task.
            lock: That it holds.
            info: Its description, with its ``execution``.
            comes_back: Whether its message is delivered again if the worker dies, so that the
                reservation has to outlive the lock.

        Raises:
            NotItsTurn: Another task of this name is queued before it.
        """
        reruns = self.reruns(options)
        if self.until == "expired" and not reruns:
            return Started()
        alone = self._alone_from_start(options, lock, comes_back=comes_back)
        start = Start(info, lock.token, info["execution"], alone, options.unique_for)
        started = reservations.start(self.name, self.token, start, wait=reruns)
        if isinstance(started, Started):
            return started
        if not started.holder and not lock.token:  # it has to run whatever the nodes say
            return Started()
        raise NotItsTurn(why_not(self.name, started))

    def _alone_from_start(
        self, options: LockOptions, lock: HeldLock, *, comes_back: bool
    ) -> float | str:
        if self.until == "started" and not self.reruns(options):
            return OVER
        if self.until == "expired":
            return AS_IT_IS
        is_under_lock = shorten(lock.name) == shorten(self.name) and lock.token
        return 0.0 if is_under_lock and not comes_back else options.unique_for

    def end(
        self, reservations: Reservations, how: str | None, life: float = 0.0, *, wait: bool = False
    ) -> None:
        """End it, now that its task has ended."""
        if how is not None:
            reservations.end(self.name, self.token, how, life=life, wait=wait)


def why_not(name: str, found: NotStarted) -> LockNotAcquired:
    if found.holder:
        return LockTaken(name, found.votes, found.holder)
    return QuorumUnavailable(name, found.votes)


def newest_call(arguments: bytes) -> tuple[list[Any], dict[str, Any]] | None:
    """
    Return positional and keyword arguments from what a trigger left on the nodes.

    Raises:
        LockKeyError: They are not arguments.
    """
    if not arguments:
        return None
    try:
        call = json.loads(arguments)
    except Exception as error:  # decoders of kombu's JSON are anybody's code
        raise LockKeyError("what was merged into this task is not JSON") from error
    if call is None:  # the name says it all
        return None
    if not (isinstance(call, list) and len(call) == 2):  # noqa: PLR2004  args and kwargs
        raise LockKeyError("what was merged into this task is not arguments")
    args, kwargs = call
    if not (isinstance(args, list) and isinstance(kwargs, dict)):
        raise LockKeyError("what was merged into this task is not arguments")
    return args, kwargs
