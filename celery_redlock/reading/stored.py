"""A lock as nodes store it: on each of them, and its holder by what all of them store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import (
    PUBLIC_TOKEN_LENGTH,
    TOKEN_LENGTH,
    is_ours,
    read_holder,
    since_of,
)
from celery_redlock.reading.waiters import RecordedWaiter, oldest_since

__all__ = [
    "LockView",
    "ReservationView",
    "StoredLock",
    "StoredReservation",
    "age_of",
    "burst_views",
    "most_waiting",
    "newest_reservation",
    "renewals_of",
    "reservation_views",
    "views_of",
]


@dataclass(frozen=True)
class StoredReservation:
    """Who is queued for a lock, comes next, or is the newest of a burst, as one node stores it."""

    token: bytes = field(repr=False)  # its owner's; only its beginning, `seen`, is ever shown
    info: dict[str, Any]  # the owner's description
    left: float  # how long it stands by itself [s]
    is_running: bool  # whether its task has begun and not ended
    merged: int  # how many triggers have been merged into it
    has_run: bool = False  # whether its task has ended, and it still stands
    is_burst: bool = False  # whether it is the newest call of a burst: there is nothing to release

    @property
    def is_window(self) -> bool:
        """Whether it stands for a time, whatever happens to its task (``"expired"``)."""
        return self.info.get("until") == "expired"

    @property
    def seen(self) -> str:
        """The public part of the token, by which an operator names it."""
        return self.token[:PUBLIC_TOKEN_LENGTH].decode(errors="replace")

    @property
    def waiting(self) -> int:
        """How many messages it stands for that wait for the lock, merged ones included."""
        is_none = self.is_running or self.has_run or self.is_window or self.is_burst
        return 0 if is_none else 1 + self.merged


class StoredLock(NamedTuple):
    """What one node stores of one lock."""

    #: Of the key, never shown as it begins with the token; None if nobody holds it there
    value: bytes | None = None
    ttl: float | None = 0.0  # rest of the lease [s]; None for a key that never expires
    fence: int = 0  # largest fencing number given out there, 0 for none
    queued: StoredReservation | None = None  # who is queued or runs
    next: StoredReservation | None = None  # who waits for that one to end
    recorded: int = 0  # how many wait for the lock, as messages or in lock_wait
    waiters: Sequence[RecordedWaiter] = ()  # all of these; of a crowd the oldest alone
    #: It may have forgotten who has the lock, so this is no vote for anybody
    is_quarantined: bool = False
    burst: StoredReservation | None = None  # of ``debounce``, if it is open

    def __repr__(self) -> str:
        return f"<StoredLock {'free' if self.value is None else self.holder or 'not ours'}>"

    @property
    def is_foreign(self) -> bool:
        return self.value is not None and not is_ours(self.value)

    @property
    def holder(self) -> dict[str, Any]:
        """As in `LockTaken.holder`; empty if there is none, or none of ours."""
        return read_holder(self.value) if self.value is not None and is_ours(self.value) else {}

    @property
    def reservations(self) -> list[StoredReservation]:
        return [one for one in (self.queued, self.next) if one is not None]

    @property
    def waiting(self) -> int:
        reserved = sum(one.waiting for one in self.reservations)
        return reserved + self.recorded


@dataclass(frozen=True)
class LockView:
    """
    One holder of one lock, by what all nodes store.

    Attributes:
        name: Lock name (shortened if it is long).
        holder: As in `LockTaken.holder`, as of its latest renewal.
        ttl: Largest rest of the lease on any node [s]; None for a key that never expires, which
            nobody of ours has written.
        votes: Labels of the nodes that store this holder's token.
        quarantined: Of those that store it and must not vote: no vote, but a trace of a holder.
        fence: Largest fencing number any of them has given out, 0 for none.
        waiting: How many are known to wait for it to end: tasks with ``on_conflict="queue"``, all
            that try for ``lock_wait``, and messages of tasks with ``unique_until``, merged ones
            included.
        waiting_since: Since when the oldest of them waits [s, Unix time]; None if that is not
            known, as of messages of tasks with ``unique_until``.
        is_foreign: Whether something else than celery-redlock has written the key. Its value is
            then shown to nobody, and not released.
    """

    name: str
    holder: dict[str, Any]
    ttl: float | None
    votes: list[str] = field(default_factory=list)
    fence: int = 0
    waiting: int = 0
    waiting_since: float | None = None
    is_foreign: bool = False
    quarantined: list[str] = field(default_factory=list)

    @property
    def stored_on(self) -> list[str]:
        return [*self.votes, *self.quarantined]

    def is_held(self, nodes: int) -> bool:
        return len(self.votes) >= quorum(nodes)

    def is_unclear(self, nodes: int, silent: int) -> bool:
        """Return whether *silent* nodes, or quarantined ones, may make it a majority."""
        most = silent + len(self.stored_on)
        return len(self.votes) < quorum(nodes) <= most

    @property
    def age(self) -> float | None:
        return age_of(self.holder)

    @property
    def is_releasable(self) -> bool:
        token = self.holder.get("token")
        strange = "\N{REPLACEMENT CHARACTER}"  # the name in the key was no UTF-8, and is not known
        is_known = isinstance(token, str) and len(token) >= PUBLIC_TOKEN_LENGTH
        return is_known and not self.is_foreign and strange not in self.name


@dataclass(frozen=True)
class ReservationView:
    name: str  # shortened if it is long
    reservation: StoredReservation  # as it is where it stands longest
    votes: list[str]  # labels of the nodes that store it

    @property
    def stored_on(self) -> list[str]:
        return self.votes

    def is_known(self, nodes: int) -> bool:
        return len(self.votes) >= quorum(nodes)


def age_of(holder: Mapping[str, Any]) -> float | None:
    """Return for how long *holder* has had its lock [s]; None if it does not say."""
    since = since_of(holder)
    return None if since is None else max(0.0, time.time() - since)


def views_of(name: str, locks: Mapping[str, StoredLock]) -> list[LockView]:
    """Return who holds the lock *name*, the one on most nodes first; *locks* by node label."""
    holders: dict[bytes, dict[str, StoredLock]] = {}
    for label, one in locks.items():
        if one.value is not None:
            holders.setdefault(one.value[:TOKEN_LENGTH], {})[label] = one
    waiting = most_waiting(locks.values())
    since = oldest_since(waiter for one in locks.values() for waiter in one.waiters)
    views = [
        replace(view_of(name, of_one), waiting=waiting, waiting_since=since)
        for of_one in holders.values()
    ]
    return sorted(views, key=lambda view: (-len(view.votes), -len(view.quarantined)))


def most_waiting(locks: Iterable[StoredLock]) -> int:
    return max((one.waiting for one in locks), default=0)


def newest_reservation(found: Iterable[StoredReservation]) -> StoredReservation:
    return max(found, key=lambda one: (one.merged, one.left))


def reservation_views(name: str, locks: Mapping[str, StoredLock]) -> list[ReservationView]:
    return merged_views(name, {label: lock.reservations for label, lock in locks.items()})


def burst_views(name: str, locks: Mapping[str, StoredLock]) -> list[ReservationView]:
    """Return the newest call of the burst of *name*; several where nodes do not know the same."""
    bursts = {label: [lock.burst] for label, lock in locks.items() if lock.burst is not None}
    views = merged_views(name, bursts)
    return sorted(views, key=lambda view: -len(view.votes))


def merged_views(
    name: str, stored: Mapping[str, Iterable[StoredReservation]]
) -> list[ReservationView]:
    found: dict[bytes, list[tuple[str, StoredReservation]]] = {}
    for label, of_node in stored.items():
        for one in of_node:
            found.setdefault(one.token, []).append((label, one))
    return [
        ReservationView(
            name,
            newest_reservation(one for _, one in of_one),
            [label for label, _ in of_one],
        )
        for of_one in found.values()
    ]


def view_of(name: str, locks: Mapping[str, StoredLock]) -> LockView:
    values = list(dict.fromkeys(one.value or b"" for one in locks.values()))
    ttls = [one.ttl for one in locks.values()]
    is_foreign = not is_ours(values[0])
    return LockView(
        name,
        holder={} if is_foreign else max(map(read_holder, values), key=renewals_of),
        ttl=None if None in ttls else max(ttl or 0.0 for ttl in ttls),
        votes=[label for label, one in locks.items() if not one.is_quarantined],
        quarantined=[label for label, one in locks.items() if one.is_quarantined],
        fence=max(one.fence for one in locks.values()),
        is_foreign=is_foreign,
    )


def renewals_of(holder: Mapping[str, Any]) -> int:
    """Return how often *holder* has renewed its lease, as far as it says."""
    said = holder.get("renewals", 0)
    return said if isinstance(said, int) else 0
