"""A held lock: its current lease, and whether it can still be trusted."""

from __future__ import annotations

from collections.abc import Callable

from celery_redlock.errors import LockLost
from celery_redlock.lock import clock
from celery_redlock.lock.lease import Lease
from celery_redlock.process.forks import around_fork

__all__ = ["HeldLock", "NotLocked", "ensure_not_forked", "this_process"]

#: Represents this process; a forked child has another.
process = object()


def this_process() -> object:
    """Return what a forked child has another of."""
    return process


def ensure_not_forked(began_in: object) -> None:
    """Return if what began in that process is this one's to go on with."""
    if process is not began_in:
        msg = "this began before the fork: the parent of this process goes on with it"
        raise RuntimeError(msg)


class HeldLock:
    """
    A lock that is held, as long as its lease is renewed in time.

    The watchdog replaces the lease; whether it is lost is decided here and now, by this
    process's own clock, whether or not the watchdog got to run. A lost lock stays lost.

    Attributes:
        others: The other locks of a task that has several names, in the order they were taken.
        lag: How much later than it was due the last renewal began [s, >= 0].
        merged: How many triggers were merged into this run, with ``on_duplicate="rerun"``.
    """

    __slots__ = (
        "_began",
        "_has_ended",
        "_lease",
        "_on_lost",
        "_process",
        "_reason",
        "_votes",
        "lag",
        "merged",
        "others",
    )

    def __init__(self, lease: Lease, on_lost: Callable[[HeldLock], None] | None = None) -> None:
        self._lease = lease
        self._reason: str | None = None
        self._votes: dict[str, str] = {}
        self._on_lost = on_lost
        self._process = process
        self._began = clock.now()
        self._has_ended = False
        self.lag = 0.0
        self.merged = 0
        self.others: tuple[HeldLock, ...] = ()

    def __repr__(self) -> str:
        state = f"lost: {self.lost_reason}" if self.is_lost else f"{self.remaining():.1f} s left"
        return f"<{type(self).__name__} {self.name!r} fence={self.fence} {state}>"

    @property
    def lease(self) -> Lease:
        """The current lease."""
        return self._lease

    @property
    def name(self) -> str:
        """Lock name."""
        return self._lease.name

    @property
    def token(self) -> str:
        """Random proof of ownership; do not log it."""
        return self._lease.token

    @property
    def fence(self) -> int | None:
        """Fencing number for the stores the holder writes to, None when not asked for."""
        return self._lease.fence

    @property
    def place(self) -> int:
        """Its number among the places of a lock with a ``lock_limit``, from 0; the name says it."""
        return self._lease.place

    @property
    def ttl(self) -> float:
        """Lease written to every node [s]."""
        return self._lease.ttl

    @property
    def since(self) -> float:
        """When the lock was acquired [s, Unix time]."""
        return self._lease.since

    @property
    def renewals(self) -> int:
        """How often the lease was renewed."""
        return self._lease.renewals

    @property
    def held_for(self) -> float:
        """How long it has been held [s], even if the wall clock is set."""
        return clock.now() - self._began

    def remaining(self) -> float:
        """Return how long the lease may still be trusted [s, >= 0]; the watchdog adds to it."""
        return 0.0 if self.is_lost else self._lease.remaining()

    @property
    def is_lost(self) -> bool:
        """Whether the lock can no longer be trusted."""
        return self.lost_reason is not None

    @property
    def lost_reason(self) -> str | None:
        """Why it is lost, as in `LockLost.reason`; None while it is held."""
        if self._reason is None:
            if self._process is not process:
                self._reason, self._votes = "fork", {}
            elif clock.now() >= self._lease.valid_until:
                self._reason = "deadline"
        return self._reason

    def ensure_held(self) -> None:
        """
        Return if the lock, and its `others`, can be trusted at this moment.

        Raises:
            LockLost: The lease has ended, a quorum holds another token, the lock was
                released, or this is a forked child of the holder.
        """
        if self.lost_reason is not None:
            raise self.loss()
        for other in self.others:
            other.ensure_held()

    def loss(self) -> LockLost:
        """Return the error for a lock that is lost."""
        return LockLost(self.name, self.lost_reason or "deadline", self._votes)

    def renewed(self, lease: Lease) -> bool:
        """Take over a new lease; returns False if it came too late and the lock is lost."""
        if self.is_lost:
            return False
        self._lease, self._votes = lease, {}
        return True

    def not_renewed(self, votes: dict[str, str]) -> None:
        """Keep each node's answer to a failed renewal, to explain a loss."""
        if self._reason is None:
            self._votes = votes

    def lose(self, reason: str) -> None:
        """Mark the lock as lost and call the holder back, once."""
        if self._reason is None:
            self._reason = reason
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost(self)

    def released(self) -> None:
        """Mark the lock as released by its holder, who is not called back."""
        self._on_lost = None
        if self._reason is None:
            self._reason, self._votes = "released", {}

    def ends(self) -> bool:
        """Return whether its end is still to be notified; once."""
        is_first, self._has_ended = not self._has_ended, True
        return is_first


class NotLocked(HeldLock):
    """
    Given to a body in place of a lock where it runs without one, by policy or in tests.

    ``fence`` is None, ``ensure_held`` never raises, and ``why`` says the cause in plain words.
    """

    __slots__ = ("why",)

    def __init__(self, name: str, why: str, since: float) -> None:
        super().__init__(Lease(name, "", None, 0.0, float("inf"), since))
        self.why = why

    def __repr__(self) -> str:
        return f"<NotLocked {self.name!r}: {self.why}>"

    def remaining(self) -> float:
        """Return infinity: there is no lease that could end."""
        return float("inf")

    @property
    def lost_reason(self) -> str | None:
        """None: what was never held is not lost."""
        return None


def _forget_parent() -> None:
    global process  # noqa: PLW0603  what it stands for has changed
    process = object()


around_fork("held", _forget_parent)
