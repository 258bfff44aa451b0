"""What each page shows, made of what was read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from celery_redlock.lock.lease import quorum
from celery_redlock.ops.web.answer import Sentence, answer
from celery_redlock.ops.web.asked import Asked
from celery_redlock.ops.web.chart import PARTS, hold_chart, time_chart
from celery_redlock.ops.web.format import moment
from celery_redlock.ops.web.reader import PATIENCE, Page
from celery_redlock.ops.why import Explanation
from celery_redlock.reading.holds import Holds, holds_by_task
from celery_redlock.reading.journal_view import (
    blockers,
    counts_over_time,
    entries,
    is_refusal,
    older_than,
)
from celery_redlock.reading.one_lock import OneLock
from celery_redlock.reading.quorum import Quorum
from celery_redlock.reading.search import Search
from celery_redlock.reading.sentences import wording
from celery_redlock.settings import Settings
from celery_redlock.words import number

__all__ = ["Reads", "Site", "lock_page", "main_page", "task_page"]

#: How much of what happened, how many tasks and how many blockers a page shows.
ENTRIES, TASKS, BLOCKERS = 20, 10, 6


class Reads(Protocol):
    """Where a page has its readings from; see `celery_redlock.ops.web.reader.Reader`."""

    def page(self, search: Search) -> Page:
        """Return what a page with *search* shows."""

    def explain(self, name: str) -> tuple[Explanation | None, float]:
        """Return what is known of the lock *name*, and the age of that [s]."""

    def lock(self, name: str) -> OneLock:
        """Return who holds the lock *name* at this moment."""

    def release(self, name: str, seen: str) -> dict[str, str]:
        """Release the lock *name* if its token begins with *seen*."""


@dataclass(frozen=True)
class Site:
    """
    What is served.

    Attributes:
        settings: Of the app.
        reader: Where readings come from.
    """

    settings: Settings
    reader: Reads


@dataclass
class TaskRow:
    """
    What the journal says of one task.

    Attributes:
        name: Its name.
        refused: How often it did not run, or not to its end.
        at: When that was last [s, Unix time]; None for never.
        holds: How long its locks were held.
    """

    name: str
    refused: int
    at: Any
    holds: Holds


def main_page(site: Site, asked: Asked) -> dict[str, Any]:
    """Return what the page of everything shows."""
    now = time.time()
    search = asked.search(now)
    page = site.reader.page(search)
    told = matching(page, search)
    holds = holds_of(page, search)
    tasks = task_rows(told, holds)
    if asked.filters:
        named = Search("" if asked.event or asked.since else asked.q)
        tasks = [it for it in tasks if it.refused or (named.words and named.has_words(it.name))]
    return {
        **common(site, page, asked, told, now),
        "tasks": tasks[:TASKS],
        "more_tasks": max(0, len(tasks) - TASKS),
    }


def task_page(site: Site, asked: Asked) -> dict[str, Any]:
    """Return what the page of one task shows."""
    now = time.time()
    search = asked.search(now, asked.name)
    page = site.reader.page(search)
    told = matching(page, search)
    refused = [record for record in told if is_refusal(record)]
    in_its_way = blockers(refused)
    holds = holds_of(page, search).get(asked.name)
    begin = search.since or min((number(it.get("at")) for it in refused), default=now)
    counts = counts_over_time(refused, begin, now, PARTS)
    return {
        **common(site, page, asked, told, now),
        "refused": len(refused),
        "kinds": Counter(wording(record).word for record in refused).most_common(),
        "begin": begin,
        "blockers": in_its_way[:BLOCKERS],
        "more_blockers": max(0, len(in_its_way) - BLOCKERS),
        "over_time": time_chart(counts, max(1.0, now - begin)) if refused else None,
        "holds": holds,
        "hold_chart": hold_chart(holds) if holds and holds.count else None,
    }


def lock_page(site: Site, asked: Asked) -> dict[str, Any]:
    """Return what the page of one lock shows."""
    found, age = site.reader.explain(asked.name)
    search = asked.search(time.time())
    recent = [it for it in (found.recent if found else ()) if search.has_record(it)]
    return {
        "found": found,
        "total": len(site.settings.nodes),
        "entries": entries(recent),
        **freshness(age),
    }


def common(
    site: Site, page: Page, asked: Asked, told: Sequence[Mapping[str, Any]], now: float
) -> dict[str, Any]:
    """Return what all pages need whose locks and records match a search."""
    total, found = len(site.settings.nodes), page.found
    silent = found.silent if found else []
    is_known = total - len(silent) >= quorum(total)
    rows = entries(told)
    older = older_than(rows, asked.before)
    answers: list[Sentence] = []
    if asked.q and found and page.records:
        answers = answer(found.locks, rows, total, len(silent), is_known=is_known)
    return {
        **freshness(page.age),
        "nodes": page.nodes,
        "quorum": None if page.nodes is None else Quorum(page.nodes, site.settings.rules),
        "total": total,
        "found": found,
        "silent": silent,
        "is_known": is_known,
        "leaked": sum(view.ttl is None for view in found.locks) if found else 0,
        "records": page.records,
        "entries": older[:ENTRIES],
        "older": max(0, len(older) - ENTRIES),
        "all": len(rows),
        "answers": answers,
        "since": moment(first_of(page), now),
    }


def freshness(age: float) -> dict[str, Any]:
    """Return how old what was read is."""
    return {"age": round(age, 1), "is_stale": age > PATIENCE, "read_at": time.time() - age}


def first_of(page: Page) -> Any:
    """Return when the oldest record was written; None if there is none."""
    if not page.records:
        return None
    return next((it.get("at") for it in (*page.records.happened, *page.records.holds)), None)


def matching(page: Page, search: Search) -> list[dict[str, Any]]:
    """Return the records that fit *search*, oldest first."""
    records = page.records.happened if page.records else ()
    return [record for record in records if search.has_record(record)]


def holds_of(page: Page, search: Search) -> dict[str, Holds]:
    """Return how long each task held its locks in the time of *search*, and of its task if any."""
    of_time = Search(since=search.since, task=search.task)
    records = page.records.holds if page.records else ()
    return holds_by_task(record for record in records if of_time.has_record(record))


def task_rows(told: Iterable[Mapping[str, Any]], holds: Mapping[str, Holds]) -> list[TaskRow]:
    """Return a row per task; the one that something happened to last comes first."""
    rows = {task: TaskRow(task, 0, None, it) for task, it in holds.items()}
    for record in told:
        task = record.get("task")
        if isinstance(task, str) and task and is_refusal(record):
            row = rows.setdefault(task, TaskRow(task, 0, None, Holds()))
            row.refused, row.at = row.refused + 1, record.get("at")
    return sorted(rows.values(), key=lambda row: (-number(row.at), -row.holds.count, row.name))
