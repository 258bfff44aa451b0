"""Contents of each page: from what its address asks for and what was read."""

from __future__ import annotations

import glob
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from celery_redlock.events import KINDS, kinds_in
from celery_redlock.lock.lease import quorum
from celery_redlock.ops.advice import DAY
from celery_redlock.ops.listing import reservation_in_words
from celery_redlock.ops.report import CAUSES, example_in_words, report_of
from celery_redlock.ops.web.chart import PARTS, hold_chart, time_chart
from celery_redlock.ops.web.format import moment, seconds, text
from celery_redlock.ops.web.reader import PATIENCE, Page, Reader
from celery_redlock.reading.holds import Holds
from celery_redlock.reading.journal_view import (
    OF_NODES,
    REFUSALS,
    Entry,
    blockers,
    counts_over_time,
    entries,
    is_refusal,
    older_than,
)
from celery_redlock.reading.quorum import Quorum
from celery_redlock.reading.search import Found, Search
from celery_redlock.reading.sentences import sentence, wording
from celery_redlock.reading.stored import LockView, ReservationView
from celery_redlock.reading.tally_reader import Tallies
from celery_redlock.settings import Settings
from celery_redlock.words import number, who

__all__ = ["EVENTS", "TIMES", "Asked", "lock_page", "main_page", "report_page", "task_page"]

#: Longest words that are searched. A name may be longer: a part of it would be another lock.
LONGEST, LONGEST_NAME = 200, 8192
#: How much of what happened, how many tasks and how many blockers a page shows.
ENTRIES, TASKS, BLOCKERS = 20, 10, 6
#: How many names that are reserved.
RESERVED = 20
#: How many locks, and how many refusals, are in the short answer; the tables have them all.
ANSWERS = 3
#: How many of those who wait the page of a lock shows.
WAITERS = 50
UNCLEAR = (
    "Cannot tell whether such a lock is held: too few nodes answered. Nothing that the others "
    "store matches."
)
NOTHING = (
    "Nothing matches: no live lock, and nothing in the journal. A task that is not here has run, "
    "waits in its queue, or was refused so long ago that the journal has forgotten."
)
#: In an address -> the events, and in words.
EVENTS: dict[str, tuple[tuple[str, ...], str]] = {
    "": ((), "anything"),
    "refused": (REFUSALS, "what was refused, or lost its lock"),
    "nodes": (OF_NODES, "nodes"),
    **{it: ((it,), KINDS[it].word) for it in kinds_in("refused", "nodes", "beat")},
}
#: In an address -> how long ago [s], and in words.
TIMES: dict[str, tuple[float, str]] = {
    "": (0.0, "any time"),
    "15m": (900.0, "last 15 minutes"),
    "1h": (3600.0, "last hour"),
    "6h": (6 * 3600.0, "last 6 hours"),
    "1d": (86400.0, "last day"),
    "7d": (7 * 86400.0, "last week"),
}


@dataclass(frozen=True)
class Asked:
    """What a page is asked for in its address, which can be bookmarked and shared."""

    q: str = ""  # words that are searched
    event: str = ""  # one of `EVENTS`
    since: str = ""  # one of `TIMES`
    before: str = ""  # id of the record behind which the list of events begins; "" for all
    name: str = ""  # of the task or lock that the page is about; "" for the page of all

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Asked:
        """Return what the arguments of an address ask for; malformed ones are left out."""
        event, since = given.get("event", ""), given.get("since", "")
        return cls(
            q=given.get("q", "")[:LONGEST].strip(),
            event=event if event in EVENTS else "",
            since=since if since in TIMES else "",
            before=given.get("before", "")[:LONGEST],
            name=given.get("name", "")[:LONGEST_NAME],
        )

    @property
    def filters(self) -> dict[str, str]:
        """What narrows the page down, as arguments of an address."""
        narrow = {"name": self.name, "q": self.q, "event": self.event, "since": self.since}
        return {key: value for key, value in narrow.items() if value}

    def search(self, now: float, task: str = "") -> Search:
        """Return the search at the time *now* [s, Unix time], of one *task* if given."""
        ago = TIMES[self.since][0]
        return Search(
            # The name is a word, too: nodes look for it by themselves.
            words=f"{task} {self.q}".strip(),
            events=EVENTS[self.event][0],
            since=now - ago if ago else 0.0,
            task=glob.escape(task) if task else None,
        )


class TaskRow(NamedTuple):
    """One task: how often it was refused or lost its lock, when last, and its hold times."""

    name: str
    refused: int
    at: Any
    holds: Holds


def main_page(settings: Settings, reader: Reader, asked: Asked) -> dict[str, Any]:
    search = asked.search(time.time())
    page = reader.page(search)
    records = page.matching(search)
    tasks = task_rows(records, holds_of(page))
    if asked.filters:
        named = Search("" if asked.event or asked.since else asked.q)
        tasks = [it for it in tasks if it.refused or (named.words and named.has_words(it.name))]
    return {
        **common(settings, page, asked, records),
        "reserved": reserved_for(page, search)[:RESERVED],
        "more_reserved": max(0, len(reserved_for(page, search)) - RESERVED),
        "tasks": tasks[:TASKS],
        "more_tasks": max(0, len(tasks) - TASKS),
    }


def task_page(settings: Settings, reader: Reader, asked: Asked) -> dict[str, Any]:
    now = time.time()
    search = asked.search(now, asked.name)
    page = reader.page(search)
    records = page.matching(search)
    refused = list(filter(is_refusal, records))
    in_its_way = blockers(refused)
    holds = holds_of(page).get(asked.name)
    begin = search.since or min((number(it.get("at")) for it in refused), default=now)
    counts = counts_over_time(refused, begin, now, PARTS)
    return {
        **common(settings, page, asked, records),
        "refused": len(refused),
        "kinds": Counter(wording(record).word for record in refused).most_common(),
        "blockers": in_its_way[:BLOCKERS],
        "more_blockers": max(0, len(in_its_way) - BLOCKERS),
        "over_time": time_chart(counts, max(1.0, now - begin)) if refused else None,
        "holds": holds,
        "hold_chart": hold_chart(holds) if holds and holds.count else None,
    }


def report_page(settings: Settings, reader: Reader, _asked: Asked) -> dict[str, Any]:
    tallies, age = reader.tallies()
    found = tallies and report_of(
        reader.app, settings.rules, tallies, time.time() - DAY, len(settings.nodes)
    )
    return {"report": found, "CAUSES": CAUSES, "example": example_in_words, **freshness(age)}


def lock_page(settings: Settings, reader: Reader, asked: Asked) -> dict[str, Any]:
    found, age = reader.explain(asked.name, asked.search(time.time()))
    return {
        "found": found,
        "quorum": Quorum(found.lock.nodes, settings.rules) if found else None,
        "total": len(settings.nodes),
        "entries": entries(found.recent) if found else [],
        "most_waiters": WAITERS,
        **freshness(age),
    }


def common(
    settings: Settings, page: Page, asked: Asked, records: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what all pages need whose locks and *records* match a search."""
    total, found = len(settings.nodes), page.found or Found([])
    away = {node.node for node in page.nodes or () if node.state in ("quarantined", "unmarked")}
    is_known = total - len(away.union(found.silent)) >= quorum(total)
    rows = entries(records)
    older = older_than(rows, asked.before)
    is_asked = asked.q and page.found and page.records is not None
    words = Search(asked.q)
    return {
        **freshness(page.age),
        "page": page,
        "quorum": None if page.nodes is None else Quorum(page.nodes, settings.rules),
        "total": total,
        "silent": found.silent,
        "is_known": is_known,
        "leaked": sum(view.ttl is None for view in found.locks),
        "entries": older[:ENTRIES],
        "older": max(0, len(older) - ENTRIES),
        "all": len(rows),
        "answers": answers(found, reserved_for(page, words), rows, total, is_known=is_known)
        if is_asked
        else [],
    }


def reserved_for(page: Page, search: Search) -> list[ReservationView]:
    fields = ("task", "task_id", "host")
    return [
        it
        for it in page.reserved
        if search.has_words(it.name, *(it.reservation.info.get(field) for field in fields))
    ]


def freshness(age: float) -> dict[str, Any]:
    return {"is_stale": age > PATIENCE, "read_at": time.time() - age}


def holds_of(page: Page) -> dict[str, Holds]:
    return {name: it.holds for name, it in (page.tallies or Tallies()).tasks.items()}


def task_rows(records: Iterable[Mapping[str, Any]], holds: Mapping[str, Holds]) -> list[TaskRow]:
    """Return a row per task; the one with the newest refusal comes first."""
    refused: Counter[str] = Counter()
    last: dict[str, Any] = {}
    for record in filter(is_refusal, records):
        task = record.get("task")
        if isinstance(task, str) and task:
            refused[task] += 1
            last[task] = record.get("at")
    rows = (
        TaskRow(name, refused[name], last.get(name), holds.get(name, Holds()))
        for name in {*refused, *holds}
    )
    return sorted(rows, key=lambda row: (-number(row.at), -row.holds.count, row.name))


# --- why did my task not run? ----------------------------------------------------------------


def answers(
    found: Found,
    reserved: Sequence[ReservationView],
    rows: Sequence[Entry],
    nodes: int,
    *,
    is_known: bool,
) -> list[tuple[str, Mapping[str, Any]]]:
    """
    Return in sentences what a search has found, the present first; with the record of each.

    *rows* are newest first; *is_known* says whether enough nodes answered to exclude such a lock.
    """
    # The newest, whatever it says, and before it what somebody may have to act on.
    notable = [it for it in rows[1:] if wording(it.record).mark != "plain"]
    sentences: list[tuple[str, Mapping[str, Any]]] = [
        (of_lock(lock, nodes, len(found.silent)), {"task": None, **lock.holder, "name": lock.name})
        for lock in found.locks[:ANSWERS]
    ]
    sentences += [
        (of_reservation(it), {"task": None, **it.reservation.info, "name": it.name})
        for it in reserved[:ANSWERS]
    ]
    sentences += [(of_entry(it), it.record) for it in (*rows[:1], *notable)[:ANSWERS]]
    return sentences or [(NOTHING if is_known else UNCLEAR, {})]


def of_lock(lock: LockView, nodes: int, silent: int) -> str:
    name, holder = text(lock.name), text(who(lock.holder, time.time()), 400)
    on = f"{len(lock.stored_on)} of {nodes} nodes"
    if lock.ttl is None:
        return f"Lock {name} never expires, so nobody can take it until it is removed: {holder}."
    if lock.is_unclear(nodes, silent):
        few = "may vote" if lock.quarantined else "answered"
        return (
            f"Lock {name} is on at least {on}, for {holder}; too few {few} to say whether it is "
            "held."
        )
    if not lock.is_held(nodes):
        return (
            f"Lock {name} is on only {on}: an attempt under way, or what is left of one, by "
            f"{holder}."
        )
    return f"Lock {name} is held by {holder}; {seconds(lock.ttl) or 'long'} of its lease are left."


def of_reservation(view: ReservationView) -> str:
    return f"Name {text(view.name)} is reserved by {text(reservation_in_words(view.reservation))}."


def of_entry(entry: Entry) -> str:
    at = moment(entry.record.get("at"))
    return f"{f'{at.ago} ago: ' if at else ''}{text(sentence(entry.record), 600)}."
