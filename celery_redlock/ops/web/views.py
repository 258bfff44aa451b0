"""Contents of each page: from what its address asks for and what was read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from celery_redlock.lock.lease import quorum
from celery_redlock.ops.advice import DAY
from celery_redlock.ops.report import CAUSES, example_in_words, report_of
from celery_redlock.ops.web.answers import answers
from celery_redlock.ops.web.asked import Asked
from celery_redlock.ops.web.chart import PARTS, hold_chart, time_chart
from celery_redlock.ops.web.reader import PATIENCE, Page, Reader
from celery_redlock.reading.holds import Holds
from celery_redlock.reading.journal_view import (
    blockers,
    counts_over_time,
    entries,
    is_refusal,
    older_than,
)
from celery_redlock.reading.quorum import Quorum
from celery_redlock.reading.search import Found, Search
from celery_redlock.reading.sentences import wording
from celery_redlock.reading.stored import ReservationView
from celery_redlock.reading.tally_reader import Tallies
from celery_redlock.settings import Settings
from celery_redlock.words import number

__all__ = ["lock_page", "main_page", "report_page", "task_page"]

#: How much of what happened, how many tasks and how many blockers a page shows.
ENTRIES, TASKS, BLOCKERS = 20, 10, 6
#: How many names that are reserved.
RESERVED = 20
#: How many of those who wait the page of a lock shows.
WAITERS = 50


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
    tasks, reserved = task_rows(records, holds_of(page)), reserved_for(page, search)
    if asked.filters:
        named = Search("" if asked.event or asked.since else asked.q)
        tasks = [it for it in tasks if it.refused or (named.words and named.has_words(it.name))]
    return {
        **common(settings, page, asked, records),
        "reserved": reserved[:RESERVED],
        "more_reserved": max(0, len(reserved) - RESERVED),
        "tasks": tasks[:TASKS],
        "more_tasks": max(0, len(tasks) - TASKS),
    }


def task_page(settings: Settings, reader: Reader, asked: Asked) -> dict[str, Any]:
    now = time.time()
    search = asked.search(now, asked.name)
    page = reader.page(search)
    records = page.matching(search)
    refused = list(filter(is_refusal, records))
    found = blockers(refused)
    holds = holds_of(page).get(asked.name)
    begin = search.since or min((number(it.get("at")) for it in refused), default=now)
    counts = counts_over_time(refused, begin, now, PARTS)
    return {
        **common(settings, page, asked, records),
        "refused": len(refused),
        "kinds": Counter(wording(record).word for record in refused).most_common(),
        "blockers": found[:BLOCKERS],
        "more_blockers": max(0, len(found) - BLOCKERS),
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
