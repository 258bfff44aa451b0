"""
The arithmetic of a lease: quorum, how long it may be trusted, fencing numbers.

Pure functions and one immutable value. Nothing here knows a node or a thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celery_redlock.lock import clock

__all__ = [
    "DRIFT_FLOOR",
    "Lease",
    "fence_proposal",
    "least_validity",
    "quarantine_for",
    "quorum",
    "valid_until",
]

#: Kept back from every lease beside the drift factor, for the resolution of PX [s].
DRIFT_FLOOR = 0.002
#: Bits of a fence below the wall-clock milliseconds; 53 bits last until 2039.
FENCE_BITS = 12


def quorum(nodes: int) -> int:
    """Return how many of *nodes* configured nodes make a majority [1 <= quorum <= nodes]."""
    return nodes // 2 + 1


def valid_until(started: float, ttl: float, drift_factor: float) -> float:
    """
    Return the last moment at which a lease may still be trusted [s, clock of *started*].

    Counted from when the round started, not when it ended: a slow quorum can only shorten a
    lease, never lengthen it.

    Source:
        redis.io/topics/distlock, "The Redlock algorithm", steps 3 and 4.
    """
    return started + ttl * (1.0 - drift_factor) - DRIFT_FLOOR


def least_validity(ttl: float) -> float:
    """Return how much of a fresh lease must be left to be useful [s]: a third."""
    return ttl / 3.0


def renew_at(started: float, ttl: float) -> float:
    return started + ttl / 3.0


def quarantine_for(max_ttl: float, drift_factor: float) -> float:
    """
    Return how long a node without memory must not vote [s].

    After this, no lease that the node may have forgotten can still be alive.

    Source:
        PROTOCOL 3.4; redis.io/topics/distlock, "delayed restarts".
    """
    return max_ttl * (1.0 + drift_factor) + 1.0


def fence_proposal(wall_ms: int, seen: int) -> int:
    """
    Return the fencing number to propose: above our wall clock, and the largest that was *seen*.

    Source:
        Hybrid logical clocks (Kulkarni et al., 2014); PROTOCOL 3.1.
    """
    return max(wall_ms << FENCE_BITS, seen + 1)


@dataclass(frozen=True, slots=True)
class Lease:
    """
    A lock that was acquired, as an immutable fact; extending gives another one.

    A process may hold tens of thousands, so they share what they can.

    Attributes:
        name: Lock name.
        token: Random proof of ownership, 40 hexadecimal digits; do not log it.
        fence: Fencing number, grows with every grant of this name; None when not asked for.
        ttl: Expiry written to every node [s].
        valid_until: Last moment at which the lease may be trusted [s, clock of
            `celery_redlock.lock.clock.now`, a monotonic clock].
        since: When the lock was first acquired [s, Unix time].
        info: Description of the holder; plain JSON values.
        renewals: How often it was renewed.
        margin: What was left of it at the latest of these renewals [s]; infinity before the first.
        place: Its number among the places of a lock with a limit, from 0.
    """

    name: str
    token: str = field(repr=False)
    fence: int | None
    ttl: float
    valid_until: float
    since: float
    info: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    renewals: int = field(default=0, repr=False, compare=False)
    margin: float = field(default=float("inf"), repr=False, compare=False)
    place: int = 0

    def remaining(self) -> float:
        """Return how long this lease may still be trusted [s, >= 0]."""
        return max(0.0, self.valid_until - clock.now())

    def renewed(self, valid_until: float, margin: float) -> Lease:
        """Return this lease after a renewal with *margin* left of it [s]."""
        return Lease(  # three times as fast as dataclasses.replace, for each renewal of each lock
            self.name,
            self.token,
            self.fence,
            self.ttl,
            max(valid_until, self.valid_until),
            self.since,
            self.info,
            self.renewals + 1,
            min(margin, self.margin),
            self.place,
        )
