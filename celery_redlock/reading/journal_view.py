"""Views of the journal's records: one row per cause, and why a task did not run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery_redlock.events import kinds_in
from celery_redlock.lock.records import is_text, shorten
from celery_redlock.words import number

__all__ = [
    "REFUSALS",
    "Blocker",
    "Entry",
    "blockers",
    "counts_over_time",
    "entries",
    "is_refusal",
    "is_refusal_of",
    "older_than",
]

Record = Mapping[str, Any]
#: Events that say why something did not run, or not to its end.
REFUSALS = kinds_in("refused")
#: What happens to a node, which every process notices by itself.
OF_NODES = kinds_in("nodes")
#: Reports of one cause come within this time [s].
TOGETHER = 60.0


@dataclass
class Entry:
    record: Record  # the newest report
    reporters: list[tuple[Any, Any]]  # host and process of each


def is_refusal(record: Record) -> bool:
    """Return whether *record* says why something did not run, or not to its end."""
    return record.get("event") in REFUSALS and not record.get("report")


def is_refusal_of(record: Record, name: str) -> bool:
    found = record.get("name")
    is_named = isinstance(found, str) and is_text(found) and shorten(found) == shorten(name)
    return is_named and is_refusal(record)


def entries(records: Sequence[Record]) -> list[Entry]:
    """Return *records* as entries, newest first; reports of one cause are one entry."""
    found: list[Entry] = []
    open_: dict[tuple[Any, Any], Entry] = {}
    for record in reversed(records):
        reporter = str(record.get("host")), str(record.get("pid"))
        cause = str(record.get("event")), str(record.get("node"))
        entry = open_.get(cause)
        if (
            entry is not None
            and reporter not in entry.reporters
            and number(entry.record.get("at")) - number(record.get("at")) <= TOGETHER
        ):
            entry.reporters.append(reporter)
            continue
        found.append(Entry(record, [reporter]))
        if record.get("event") in OF_NODES:
            open_[cause] = found[-1]
    return found


def older_than(found: Sequence[Entry], ident: str) -> Sequence[Entry]:
    """Return the entries behind the one whose record is *ident*; all for "", none if unknown."""
    if not ident:
        return found
    ids = [entry.record.get("id") for entry in found]
    return found[ids.index(ident) + 1 :] if ident in ids else []


def counts_over_time(records: Iterable[Record], begin: float, end: float, parts: int) -> list[int]:
    """Return how many of *records* fall into each of so many equal *parts* of a time [s, Unix]."""
    length = max(end - begin, 1.0) / parts
    places = Counter(int((number(it.get("at")) - begin) // length) for it in records)
    return [places[i] + (places[parts] if i == parts - 1 else 0) for i in range(parts)]


@dataclass
class Blocker:
    """Who was in a task's way."""

    name: Any  # of the lock
    holder: Record  # as it last described itself; empty if there was no quorum
    times: int  # how often something was refused for it
    at: Any  # when last [s, Unix time]


def blockers(records: Iterable[Record]) -> list[Blocker]:
    """Return who held the locks that *records*, oldest first, were refused; the newest first."""
    found: dict[tuple[str, str], Blocker] = {}
    for record in records:
        if "cause" not in record or not is_refusal(record):
            continue
        reported = record.get("holder")
        holder = reported if isinstance(reported, dict) and record["cause"] == "conflict" else {}
        key = str(record.get("name")), f"{holder.get('task_id')} {holder.get('execution')}"
        before = found.pop(key, None)
        times = before.times + 1 if before else 1
        found[key] = Blocker(record.get("name"), holder, times, record.get("at"))
    return list(reversed(found.values()))
