"""
Every error this package raises.

The constructor arguments of an error are exactly its ``args``, and are plain
JSON values, so that pickle and Celery's JSON result backends carry it home
with all its fields.
"""

from __future__ import annotations

from typing import Any

from celery_redlock.process.log import cut, printable
from celery_redlock.words import LOSSES, loss, votes_in_words, who

__all__ = [
    "ConfigurationError",
    "DuplicateTask",
    "LockKeyError",
    "LockLost",
    "LockNotAcquired",
    "LockTaken",
    "QuorumUnavailable",
    "RateExceeded",
    "RedlockError",
    "StaleFence",
    "TooManyDeliveries",
]


class RedlockError(Exception):
    """Anything that celery-redlock raises."""

    def __repr__(self) -> str:
        # What Flower and Celery's log show: the sentence, not the fields that it is made of.
        return f"{type(self).__name__}({str(self)!r})"


class ConfigurationError(RedlockError, ValueError):
    """
    Settings or task options are impossible.

    Raised when a task is registered or a worker starts, never in the middle of
    a task. The message names the option, the value and the fix.
    """


class LockKeyError(RedlockError, ValueError):
    """
    The arguments of a task cannot be turned into a lock name.

    The message names the task and the argument, never the argument's value.
    """


class LockNotAcquired(RedlockError):
    """
    The lock was not acquired. Catch this for either cause; it is never raised itself.

    Attributes:
        name: Lock name.
        votes: What each node answered, node label -> plain words, without passwords.
    """

    cause = "was not acquired"
    #: What to ask for more, of ``celery -A app redlock ...``.
    command = "why"

    def __init__(self, name: str, votes: dict[str, str], *more: Any) -> None:
        super().__init__(name, votes, *more)
        self.name = name
        self.votes = votes

    def __str__(self) -> str:
        votes = f" [{votes_in_words(self.votes)}]" if self.votes else ""
        return f"Lock {cut(self.name)!r} {self._why()}{votes}; see 'redlock {self.command}'"

    def _why(self) -> str:
        return self.cause


class LockTaken(LockNotAcquired):
    """
    Another holder has the lock, so a quorum is out of reach.

    Attributes:
        holder: Who holds it, as far as the nodes said: ``token`` (the first eight
            characters, which prove nothing), ``task_id``, ``execution``, ``host``, ``pid``,
            ``since`` [s, Unix time] and ``ttl`` [s, what is left of its lease]; may be empty.
    """

    cause = "is held by"

    def __init__(
        self, name: str, votes: dict[str, str], holder: dict[str, Any] | None = None
    ) -> None:
        self.holder = holder or {}
        super().__init__(name, votes, self.holder)

    def _why(self) -> str:
        return f"{self.cause} {who(self.holder)}"


class RateExceeded(LockTaken):
    """
    As many executions have started as the rate of a name allows for now (``lock_rate``).

    Attributes:
        holder: Of one of these starts, as in `LockTaken`; ``ttl`` is when the next one is allowed
            [s from now].
    """

    cause = "has as many starts as its lock_rate allows"

    def _why(self) -> str:
        left = self.holder.get("ttl")
        return f"{self.cause}{f'; the next in {left:.1f} s' if left else ''}"


class QuorumUnavailable(LockNotAcquired):
    """
    No quorum of nodes could decide: unreachable, in quarantine, or too late.

    Attributes:
        retry_after: When asking again may help [s, >= 0], e.g. the rest of a
            quarantine; None when nobody knows.
    """

    cause = "could not be decided by a quorum of nodes"
    command = "status"

    def __init__(self, name: str, votes: dict[str, str], retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(name, votes, retry_after)

    def _why(self) -> str:
        return self.cause + (
            f" (try again in {self.retry_after:.0f} s)" if self.retry_after else ""
        )


class LockLost(RedlockError):
    """
    A lock that was held can no longer be trusted.

    Attributes:
        name: Lock name.
        reason: ``"deadline"`` (the lease ended before it was renewed), ``"stolen"``
            (a quorum no longer holds our token), ``"released"`` or ``"fork"`` (a
            child process does not inherit a lock).
        votes: What each node answered to the renewal that failed, by node label; empty where
            none did, because our own clock decided, the holder released it, or a fork.
    """

    def __init__(self, name: str, reason: str, votes: dict[str, str] | None = None) -> None:
        self.name = name
        self.reason = reason
        self.votes = votes or {}
        super().__init__(name, reason, self.votes)

    def __str__(self) -> str:
        text = f"Lock {cut(self.name)!r} is lost ({self.reason})"
        if self.reason in LOSSES:
            text += f": {loss(self.reason, self.votes)}"
        if not self.votes:
            return text
        return f"{text} [{votes_in_words(self.votes)}]; see 'redlock status'"


class TooManyDeliveries(RedlockError):
    """
    A message was started as often as it may be, and is delivered again (``max_deliveries``).

    Most likely it kills its worker each time.

    Attributes:
        task: Name of the task.
        task_id: Its id.
        most: How often it may be started.
    """

    def __init__(self, task: str, task_id: str, most: int) -> None:
        super().__init__(task, task_id, most)
        self.task = task
        self.task_id = task_id
        self.most = most

    def __str__(self) -> str:
        return (
            f"{self.task}[{printable(self.task_id)}] was started {self.most} times, and is "
            "delivered once more: max_deliveries allows no other start"
        )


class DuplicateTask(RedlockError):
    """
    The same task is already queued or running.

    Attributes:
        holder_id: Id of the task that was there first.
        lock_name: The name both share.
        votes: What each node answered, by node label.
    """

    def __init__(self, holder_id: str, lock_name: str, votes: dict[str, str] | None = None) -> None:
        self.holder_id = holder_id
        self.lock_name = lock_name
        self.votes = votes or {}
        super().__init__(holder_id, lock_name, self.votes)

    def __str__(self) -> str:
        text = f"Task {printable(self.holder_id)} has reserved {cut(self.lock_name)!r} already"
        return f"{text} [{votes_in_words(self.votes)}]" if self.votes else text


class StaleFence(RedlockError):
    """
    A store refused a write: a later holder of the lock has written already.

    What was to be written was decided on under a lock that has passed on. End the transaction
    without a commit, and begin again from the store's present state if the work is still wanted.

    Attributes:
        target: What was to be written to: a table, a guard row's lock name, or a Redis key.
        fence: The number that was refused.
        newest: The largest number seen there; None where the store did not say.
    """

    def __init__(self, target: str, fence: int, newest: int | None = None) -> None:
        super().__init__(target, fence, newest)
        self.target = target
        self.fence = fence
        self.newest = newest

    def __str__(self) -> str:
        by = "a newer one" if self.newest is None else str(self.newest)
        return f"Fence {self.fence} is stale: {self.target!r} was written to with {by}"
