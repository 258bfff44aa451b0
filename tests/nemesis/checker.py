"""
Reads the logs of a run and says what went wrong. Shares no code with what it judges.

    asked ... granted --- tick --- tick --- tick ... (until)
                 |<-------- claimed ---------------->|

A client claims the lock from the moment after it was granted to the last moment up to which it
was told that it may trust it: its end if it ended it, the end of its lease if it was killed or
stopped, its last look at the lock if that was taken away. Nothing is claimed that the client
could not have acted upon, so two claims of one name that meet are a violation, whatever the clocks
of nodes did.

- exclusion: no two claims of one name meet;
- order: fences differ, and whoever asked after a grant gets a larger one;
- progress: when the fault is over, every client acquires within a bound;
- updates: of a register that is read, changed and written under the lock none is lost.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Claim", "History", "disorders", "late_clients", "lost_updates", "overlaps", "read"]


@dataclass
class Claim:
    """
    One hold of a lock as its client saw it.

    Attributes:
        name: Lock name.
        client: Who held it.
        asked: When it began to ask [s].
        granted: When it had the answer [s].
        fence: Its fencing number, None without.
        until: To when it was told to trust the lock, at the latest look [s].
        seen: Its latest look at a lock that it could trust [s].
        ended: When it gave the lock back while it could still trust it [s], or None.
        lost: Why it was told that the lock is lost, or None.
        renewals: How often the lease was renewed by the latest look.
    """

    name: str
    client: str
    asked: float
    granted: float
    fence: int | None
    until: float
    seen: float
    ended: float | None = None
    lost: str | None = None
    renewals: int = 0

    def __str__(self) -> str:
        how = (
            "ended" if self.ended is not None else f"lost: {self.lost}" if self.lost else "cut off"
        )
        return (
            f"{self.client} on {self.name!r}, asked {self.asked:.4f}, granted {self.granted:.4f}, "
            f"seen {self.seen:.4f}, until {self.until:.4f}, end {self.end:.4f} ({how}), "
            f"{self.renewals} renewals, fence {self.fence}"
        )

    @property
    def is_open(self) -> bool:
        return self.ended is None and self.lost is None

    @property
    def end(self) -> float:
        """The last moment at which the client could have acted as the holder [s]."""
        if self.ended is not None:
            return self.ended
        if self.lost is not None and self.lost != "deadline":
            return self.seen
        return self.until


@dataclass
class History:
    """
    What the clients of one contender wrote down.

    Attributes:
        claims: In the order of their grants.
        refused: Why an attempt failed -> how often.
        news: What happened to nodes, as the clients saw it -> how often.
        clients: All that were ever started.
    """

    claims: list[Claim] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    news: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    clients: set[str] = field(default_factory=set)

    @property
    def cut_short(self) -> int:
        """How many holds have no end: their clients were killed."""
        return sum(claim.is_open for claim in self.claims)

    def end_as_seen(self) -> None:
        """Count holds without an end up to their latest look: they may yet be ended there."""
        for claim in self.claims:
            if claim.is_open:
                claim.ended = claim.seen


def read(folder: Path) -> dict[str, History]:
    found: dict[str, History] = defaultdict(History)
    for path in sorted(folder.glob("client-*.jsonl")):
        events = lines_of(path)
        born = next(events, None)
        if born is not None:
            history = found[born["contender"]]
            history.clients.add(born["client"])
            replay(events, born["client"], history)
    for history in found.values():
        history.claims.sort(key=lambda claim: claim.granted)
    return dict(found)


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log; a last line that was cut off is none."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def replay(events: Iterable[dict[str, Any]], client: str, history: History) -> None:
    claim = Claim("", client, 0.0, 0.0, None, 0.0, 0.0)
    for event in events:
        kind, at = event["kind"], event["at"]
        if kind == "granted":
            name, fence, until = event["name"], event["fence"], event["until"]
            claim = Claim(name, client, event["asked"], at, fence, until, at)
            history.claims.append(claim)
        elif kind == "tick":
            claim.seen, claim.until = at, max(claim.until, event["until"])
            claim.renewals = event["renewals"]
        elif kind == "ended":
            claim.ended = at
        elif kind == "lost":
            claim.lost = event["why"]
        elif kind == "refused":
            history.refused[event["why"]] += 1
        elif kind == "node":
            history.news[event["what"]] += 1


def by_name(claims: Iterable[Claim]) -> Iterator[list[Claim]]:
    names: dict[str, list[Claim]] = defaultdict(list)
    for claim in sorted(claims, key=lambda claim: claim.granted):
        names[claim.name].append(claim)
    yield from names.values()


def overlaps(claims: Iterable[Claim]) -> list[tuple[Claim, Claim]]:
    """
    Return every two claims of one name that meet; the earlier grant first.

    A client that was stopped before it saw its grant, until the lease was over, claims nothing.
    """
    pairs: list[tuple[Claim, Claim]] = []
    for same in by_name(claim for claim in claims if claim.end > claim.granted):
        running: list[Claim] = []
        for later in same:
            running = [earlier for earlier in running if earlier.end > later.granted]
            pairs.extend((earlier, later) for earlier in running)
            running.append(later)
    return pairs


def disorders(claims: Iterable[Claim]) -> list[tuple[Claim, Claim]]:
    """Return claims whose fence is not above that of a grant they were asked for after."""
    wrong: list[tuple[Claim, Claim]] = []
    for same in by_name(claim for claim in claims if claim.fence is not None):
        holders: dict[int | None, Claim] = {}
        for claim in same:
            if claim.fence in holders:
                wrong.append((holders[claim.fence], claim))
            holders[claim.fence] = claim
        largest: Claim | None = None
        returned = iter(same)
        candidate = next(returned, None)
        for claim in sorted(same, key=lambda claim: claim.asked):
            while candidate is not None and candidate.granted < claim.asked:
                if largest is None or (candidate.fence or 0) > (largest.fence or 0):
                    largest = candidate
                candidate = next(returned, None)
            if largest is not None and (claim.fence or 0) < (largest.fence or 0):
                wrong.append((largest, claim))
    return wrong


def late_clients(history: History, calm: float, bound: float) -> list[str]:
    """Return the clients that were granted nothing within *bound* [s] after *calm* [s]."""
    served = {c.client for c in history.claims if calm <= c.granted <= calm + bound}
    return sorted(history.clients - served)


def lost_updates(path: Path, table: str) -> int:
    """
    Return how many increments of a register are missing from its value.

    Each writer added one row for what it read in the transaction that stored one more than that.
    """
    if not path.exists():
        return 0
    with closing(sqlite3.connect(path)) as store:
        writes = "SELECT count(*) FROM writes WHERE register = ?"
        values = f"SELECT coalesce(sum(value), 0) FROM {table}"
        # In one statement, for writers may be at it.
        return int(store.execute(f"SELECT ({writes}) - ({values})", [table]).fetchone()[0])
