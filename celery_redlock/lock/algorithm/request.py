"""The request for a lock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from celery_redlock.errors import LockKeyError, RedlockError
from celery_redlock.lock.lease import least_validity
from celery_redlock.lock.records import is_text

__all__ = ["LockRequest", "MarkerStands"]


class MarkerStands(RedlockError):
    """
    No lock was taken: a marker says that none is needed any more, or may say so.

    *state* is what a majority of nodes says in it. Empty where no majority says the same, or
    where so few nodes answered that either is possible: ask again later.
    """

    def __init__(self, state: str) -> None:
        super().__init__(state)
        self.state = state


@dataclass(frozen=True)
class LockRequest:
    """The request for a lock; times are in seconds."""

    name: str
    ttl: float
    wait: float = 0.0
    fence: bool = True
    #: Description of the holder; plain JSON values.
    info: dict[str, Any] = field(default_factory=dict)
    #: Name of a marker that, where it stands, makes the lock needless.
    marker: str | None = None
    #: 32 hexadecimal digits that all tokens of this begin with, so that whoever knows them can
    #: release for a holder that is dead; None for tokens that nobody else knows.
    owner: str | None = field(default=None, repr=False)
    #: How many places the lock has: it is granted on any of them.
    limit: int = 1
    #: Since when it has waited as a message [Unix time], whether a hint has ended that, and as what
    #: the nodes know it since then, 32 hexadecimal digits.
    queued_since: float | None = None
    was_woken: bool = False
    known_as: str | None = field(default=None, repr=False)
    #: Give up by then whatever the nodes do, a split vote included [our clock].
    ends: float | None = None
    #: Whether its place stands for its whole ttl, neither renewed nor released: it counts a start.
    stands: bool = False
    #: For how long after it was asked for the grant is of use [s]; None for as long as a lease.
    within: float | None = None
    #: At how many places to look for one that this execution has, where it once had more of them.
    looks_at: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            msg = f"a lock name is a string that is not empty, not {type(self.name).__name__}"
            raise LockKeyError(msg)
        if not is_text(self.name):
            msg = f"a lock name is text, without lone surrogates, unlike {self.name[:80]!r}"
            raise LockKeyError(msg)

    def for_grant_in(self, takes: float) -> LockRequest:
        """
        Return the same for nodes that are so far away that a grant takes so long [s].

        What has to be granted soon may then come later, and its place stands for longer by that.
        """
        more = 0.0 if self.within is None else 2 * takes - self.within
        if self.within is None or more <= 0:
            return self
        return replace(self, ttl=self.ttl + more, within=self.within + more)

    def is_late(self, now: float, valid_until: float) -> bool:
        """Return whether a grant that is valid until then is of no use any more [s, our clock]."""
        least = least_validity(self.ttl) if self.within is None else 0.0
        return now + least > valid_until
