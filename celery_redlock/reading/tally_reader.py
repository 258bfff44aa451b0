"""Reader of what tasks did (`celery_redlock.reading.tally`): all nodes as one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from celery_redlock.lock.nodes.address import Address, addresses_of
from celery_redlock.lock.nodes.guard import read_as, replies
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import ask_all, connected
from celery_redlock.reading.tally import (
    EXAMPLES,
    FIELDS,
    HOUR,
    RETENTION,
    Counts,
    TaskTally,
    hour_key,
    largest,
    read_counts,
    tally_key,
)

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["Tallies", "TallyReader"]

#: Tasks of an hour that are read, and hashes that a node is asked for at once.
TASKS, PAGE = 10_000, 500
#: After so long hours that are over are read again [s]: a process that had nothing to do adds its
#: last counts to them with its next event.
AGAIN = 600.0


@dataclass(frozen=True)
class Tallies:
    #: By name; who ran most often comes first
    tasks: Mapping[str, TaskTally] = field(default_factory=dict)
    silent: Sequence[str] = ()  # labels of the nodes that did not answer

    @property
    def first(self) -> float:
        """When anything was first counted [s, Unix time]; 0.0 if nothing was."""
        return min((it.first for it in self.tasks.values()), default=0.0)

    @property
    def last(self) -> float:
        return max((it.last for it in self.tasks.values()), default=0.0)


#: Hour -> task -> what it did.
Hours = Mapping[int, Mapping[str, Counts]]


class TallyReader:
    """Reads the tallies of all nodes as one, on connections of its own."""

    def __init__(self, nodes: Sequence[Any], rules: Rules) -> None:
        self._addresses = addresses_of(nodes, rules.prefix)
        self._prefix = rules.prefix
        self._over: dict[int, Mapping[str, Counts]] = {}
        self._over_since = float("-inf")

    def read(self, since: float, now: float) -> Tallies:
        """Return what tasks did, in whole hours; *since* at most `RETENTION` ago [s, Unix time]."""
        newest = int(now // HOUR)
        if not 0.0 <= now - self._over_since < AGAIN:
            self._over, self._over_since = {}, now
        hours = range(int(max(since, now - RETENTION) // HOUR), newest + 1)
        wanted = [hour for hour in hours if hour not in self._over]
        found, silent = self._ask(wanted)
        if not silent:  # a process may still add to the hour before this one
            self._over |= {hour: found[hour] for hour in wanted if hour < newest - 1}
        parts: dict[str, list[Counts]] = {}
        for hour in hours:
            for task, counts in (found.get(hour) or self._over.get(hour) or {}).items():
                parts.setdefault(task, []).append(counts)
        tasks = {task: TaskTally.of(counts) for task, counts in parts.items()}
        return Tallies(dict(sorted(tasks.items(), key=lambda it: (-it[1].ran, it[0]))), silent)

    def _ask(self, hours: Sequence[int]) -> tuple[Hours, list[str]]:
        def ask(address: Address) -> Hours | None:
            try:
                with connected(address) as connection:
                    read = functools.partial(hours_on, connection, self._prefix)
                    return read_as("counts", read, hours)
            except (RedisError, OSError):
                return None

        answers = ask_all(self._addresses, ask)
        answered = [answer for answer in answers if answer is not None]
        silent = [a.label for a, it in zip(self._addresses, answers, strict=True) if it is None]
        return {hour: of_all([node[hour] for node in answered]) for hour in hours}, silent


def of_all(nodes: Sequence[Mapping[str, Counts]]) -> dict[str, Counts]:
    tasks = dict.fromkeys(task for node in nodes for task in node)
    return {task: largest(node[task] for node in nodes if task in node) for task in tasks}


def hours_on(connection: AbstractConnection, prefix: str, hours: Sequence[int]) -> Hours:
    last = b"%d" % (TASKS - 1)
    listed = answers(connection, [(b"ZRANGE", hour_key(prefix, it), b"0", last) for it in hours])
    names = [
        (hour, task)
        for hour, members in zip(hours, listed, strict=True)
        for task in filter(None, map(name_in, members or ()))
    ]
    found: dict[int, dict[str, Counts]] = {hour: {} for hour in hours}
    fields = [field.encode() for field in (*FIELDS, *EXAMPLES)]
    left = iter(names)
    while page := list(islice(left, PAGE)):
        asked = [(b"HMGET", tally_key(prefix, *it), *fields) for it in page]
        for (hour, task), reply in zip(page, answers(connection, asked), strict=True):
            counts = read_counts(reply) if reply else Counts({}, {})
            if counts.numbers:
                found[hour][task] = counts
    return found


def answers(connection: AbstractConnection, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the replies to *commands*; None where a key is none of ours."""
    found = replies(connection, *commands) if commands else []
    for one in found:
        if isinstance(one, Exception) and not str(one).startswith("WRONGTYPE"):
            raise RedisError(str(one))
    return [None if isinstance(one, Exception) else one for one in found]


def name_in(member: Any) -> str:
    return member.decode(errors="ignore") if isinstance(member, bytes) else ""
