"""
All locks that a call takes or may take: those of its names, each with its places.

A place is a lock of its own on the nodes. Those who wait for any place of a name are noted under
that name, which the first place has, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import RedisError

from celery_redlock.lock.records import place_name
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.votes import Verdict
from celery_redlock.reading.journal import Record, newest_command, newest_of
from celery_redlock.reading.nodes import NodeStatus, failed, visit_all
from celery_redlock.reading.one_lock import OneLock
from celery_redlock.reading.read_script import read_commands, read_replies
from celery_redlock.reading.stored import StoredLock
from celery_redlock.reading.waiters import Waiter, in_order

__all__ = ["Places", "read_lock", "read_places"]

T = TypeVar("T")


@dataclass(frozen=True)
class Places:
    """The places of all lock names of a call."""

    all: Sequence[OneLock]  # one at least; by their names, and then by their numbers
    #: The newest ones of the journal, oldest first, if they were asked for
    records: Sequence[Record] = ()

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(place.name for place in self.all))

    @property
    def state(self) -> str:
        """As of `OneLock`: held if all places of any name are, free if one of each name is."""
        return self._over_names(lambda place: place.state, "free", "held")

    @property
    def verdict(self) -> Verdict:
        """What a request for the locks would find now, likewise."""
        return self._over_names(lambda place: place.verdict, Verdict.GRANTED, Verdict.TAKEN)

    def _over_names(self, ask: Callable[[OneLock], T], free: T, taken: T) -> T:
        of_names = [
            combined([ask(place) for place in self.of(name)], if_any=free, if_all=taken)
            for name in self.names
        ]
        return combined(of_names, if_any=taken, if_all=free)

    def of(self, name: str) -> list[OneLock]:
        return [place for place in self.all if place.name == name]

    def up_to(self, limits: Mapping[str, int]) -> Places:
        """Return of each name as many as *limits* says, and those up to the last that is held."""
        kept: list[OneLock] = []
        for name in self.names:
            had = [place.number + 1 for place in self.of(name) if place.views]
            kept += self.of(name)[: max([limits.get(name, 0), *had])]
        return Places(kept or self.all[:1])

    @property
    def waiting(self) -> int:
        return sum(place.waiting for place in self.all)

    @property
    def waiters(self) -> list[Waiter]:
        return sorted((it for place in self.all for it in place.waiters), key=in_order)


def combined(answers: Sequence[T], *, if_any: T, if_all: T) -> T:
    """Return *if_any* if it is among *answers*, *if_all* if they are nothing else, else another."""
    if if_any in answers:
        return if_any
    return next((it for it in answers if it != if_all), if_all)


def read_lock(nodes: Sequence[Any], rules: Rules, name: str) -> OneLock:
    return read_places(nodes, rules, {name: 1}).all[0]


def read_places(
    nodes: Sequence[Any], rules: Rules, limits: Mapping[str, int], records: int = 0
) -> Places:
    """
    Return what each of *nodes* has of all places, in one visit.

    Args:
        nodes: As the setting ``redlock_nodes``.
        rules: As all clients have them.
        limits: Each lock name, and how many places it has.
        records: How many records of the journal to read.
    """
    wanted = [(name, number) for name, limit in limits.items() for number in range(limit)]
    reads = read_commands(rules, [place_name(*it) for it in wanted])
    journal = [newest_command(rules.prefix, records)] if records else []
    # The journal comes last: one that is too large costs no lock.
    visits = visit_all(nodes, rules, *reads, *journal)
    found = [locks_in(status, replies[: len(reads)], len(wanted)) for status, replies in visits]
    statuses = [status for status, _ in found]
    places = [
        OneLock(name, statuses, {it.node: locks[i] for it, locks in found if locks}, number)
        for i, (name, number) in enumerate(wanted)
    ]
    journals = [reply for _, replies in visits for reply in replies[len(reads) :]]
    return Places(places, newest_of(journals, records))


def locks_in(
    status: NodeStatus, replies: Sequence[Any], count: int
) -> tuple[NodeStatus, list[StoredLock]]:
    error = next((reply for reply in replies if isinstance(reply, Exception)), None)
    if error is None:
        try:
            return status, read_replies(replies, count)
        except RedisError as unread:
            error = unread
    return status if status.problem else failed(status.node, error), []
