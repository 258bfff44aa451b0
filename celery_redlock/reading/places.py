"""
All locks that a call takes or may take: those of its names, each with its places.

A place is a lock of its own on the nodes. Those who wait for any place of a name are noted under
that name, which the first place has, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from celery_redlock.lock.records import place_name
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.votes import Verdict
from celery_redlock.reading.one_lock import OneLock, read_locks
from celery_redlock.reading.stored import LockView
from celery_redlock.reading.waiters import Waiter, in_order

__all__ = ["Place", "Places", "read_places"]

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """
    One place of a lock name.

    Attributes:
        lock: What the nodes have of it; its name is the place's own.
        name: Lock name that it is a place of.
        number: From 0.
    """

    lock: OneLock
    name: str
    number: int = 0

    @property
    def holder(self) -> LockView | None:
        """Who has a majority of the nodes; None for nobody."""
        most = next(iter(self.lock.views), None)
        return most if most and most.is_held(len(self.lock.nodes)) else None

    @property
    def state(self) -> str:
        """``"held"``, ``"free"``, or ``"unavailable"`` if no quorum could say."""
        verdict = self.lock.verdict
        if self.holder is not None or verdict is Verdict.TAKEN:
            return "held"
        return "free" if verdict is Verdict.GRANTED else "unavailable"


@dataclass(frozen=True)
class Places:
    """
    The places of all lock names of a call.

    Attributes:
        all: One at least; by their names, and then by their numbers.
    """

    all: Sequence[Place]

    @classmethod
    def only(cls, lock: OneLock) -> Places:
        """Return that *lock* is all there is."""
        return cls([Place(lock, lock.name)])

    @property
    def names(self) -> list[str]:
        """The lock names."""
        return list(dict.fromkeys(place.name for place in self.all))

    @property
    def state(self) -> str:
        """As of `Place`: held if all places of any name are, free if one of each name is."""
        found = [[place.state for place in self.of(name)] for name in self.names]
        of_names = [combined(it, if_any="free", if_all="held") for it in found]
        return combined(of_names, if_any="held", if_all="free")

    @property
    def verdict(self) -> Verdict:
        """What a request for the locks would find now, likewise."""
        found = [[place.lock.verdict for place in self.of(name)] for name in self.names]
        of_names = [combined(it, if_any=Verdict.GRANTED, if_all=Verdict.TAKEN) for it in found]
        return combined(of_names, if_any=Verdict.TAKEN, if_all=Verdict.GRANTED)

    def of(self, name: str) -> list[Place]:
        """Return the places of one lock name."""
        return [place for place in self.all if place.name == name]

    def up_to(self, number: int) -> Places:
        """Return those with so small a *number*, and those up to the last that somebody has."""
        last = max([number, *(place.number for place in self.all if place.lock.views)])
        return Places([place for place in self.all if place.number <= last])

    @property
    def waiting(self) -> int:
        """How many are known to wait for any of them."""
        return sum(place.lock.waiting for place in self.all)

    @property
    def waiters(self) -> list[Waiter]:
        """Who waits for any of them as a message or in ``lock_wait``, the oldest first."""
        return sorted((it for place in self.all for it in place.lock.waiters), key=in_order)


def combined(answers: Sequence[T], *, if_any: T, if_all: T) -> T:
    """Return *if_any* if it is among *answers*, *if_all* if they are nothing else, else another."""
    if if_any in answers:
        return if_any
    return next((it for it in answers if it != if_all), if_all)


def read_places(nodes: Sequence[Any], rules: Rules, limits: Mapping[str, int]) -> Places:
    """
    Return what each of *nodes* has of all places; all are asked at once.

    Args:
        nodes: As the setting ``redlock_nodes``.
        rules: As all clients have them.
        limits: Each lock name, and how many places it has.
    """
    wanted = [(name, number) for name, limit in limits.items() for number in range(limit)]
    locks = read_locks(nodes, rules, [place_name(name, number) for name, number in wanted])
    return Places([Place(lock, *of) for lock, of in zip(locks, wanted, strict=True)])
