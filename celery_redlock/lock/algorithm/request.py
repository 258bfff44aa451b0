"""The request for a lock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celery_redlock.errors import LockKeyError, RedlockError
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

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            msg = f"a lock name is a string that is not empty, not {type(self.name).__name__}"
            raise LockKeyError(msg)
        if not is_text(self.name):
            msg = f"a lock name is text, without lone surrogates, unlike {self.name[:80]!r}"
            raise LockKeyError(msg)
