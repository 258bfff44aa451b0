"""The Flask app of the page: views that read, and what all of them share."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from flask import Flask, Response, make_response, render_template, request
from werkzeug.exceptions import HTTPException

from celery_redlock.lock.lease import quorum
from celery_redlock.ops.listing import count_up, verdict
from celery_redlock.ops.web.answer import answer
from celery_redlock.ops.web.chart import HEIGHT, WIDTH, charts
from celery_redlock.ops.web.finding import SHOWN, holds_by_task, record_matches
from celery_redlock.ops.web.guard import Door, guard
from celery_redlock.ops.web.happened import happening
from celery_redlock.ops.web.operator_token import Attempts
from celery_redlock.ops.web.reading import PATIENCE, Page
from celery_redlock.ops.web.releasing import add_release
from celery_redlock.ops.web.rows import lock_row, node_row
from celery_redlock.ops.web.words import moment, text_of
from celery_redlock.reading.one_lock import OneLock
from celery_redlock.settings import Settings

__all__ = ["Reads", "make_app"]

#: How many records a page shows.
RECORDS_SHOWN = 200
LONGEST_SEARCH = 200
#: What a browser may send in a form [bytes].
LONGEST_FORM = 16 * 1024


class Reads(Protocol):
    """Where a page has its readings from; see `celery_redlock.ops.web.reading.Reader`."""

    def page(self, search: str) -> Page:
        """Return what a page with *search* shows."""

    def lock(self, name: str) -> OneLock:
        """Return who holds the lock *name* at this moment."""

    def release(self, name: str, seen: str) -> dict[str, str]:
        """Release the lock *name* if its token begins with *seen*."""


@dataclass(frozen=True)
class Site:
    """
    What is served.

    Attributes:
        title: Name of the Celery app.
        settings: Of the app.
        reader: Where readings come from.
        door: To whom it is served.
    """

    title: str
    settings: Settings
    reader: Reads
    door: Door


def make_app(title: str, settings: Settings, reader: Reads, door: Door) -> Flask:
    """
    Return the page as a WSGI app.

    Args:
        title: Name of the Celery app.
        settings: Of the app.
        reader: Where readings come from.
        door: To whom it is served.
    """
    site = Site(title, settings, reader, door)
    attempts = Attempts()
    app = Flask(__package__ or __name__)
    app.config["MAX_CONTENT_LENGTH"] = app.config["MAX_FORM_MEMORY_SIZE"] = LONGEST_FORM
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.context_processor(lambda: {"site": text_of(title).short})
    guard(app, door, attempts)
    add_release(
        app, reader, door, attempts, nodes=len(settings.nodes), prefix=settings.rules.prefix
    )

    @app.get("/")
    def page() -> Response:
        return shown("page.html", site, search_in_url())

    @app.get("/fragment")
    def fragment() -> Response:
        return shown("fragment.html", site, search_in_url())

    @app.errorhandler(HTTPException)
    def fail(error: HTTPException) -> Response:
        if error.response is not None:
            return make_response(error.get_response())
        why = error.description or ""
        response = make_response(
            render_template("error.html", title=error.name, why=why), error.code or 500
        )
        for name, value in error.get_headers():  # like Allow, which belongs to 405
            if name.lower() != "content-type":
                response.headers[name] = value
        return response

    return app


def search_in_url() -> str:
    """Return what is searched for."""
    return request.args.get("q", "")[:LONGEST_SEARCH].strip()


def shown(template: str, site: Site, search: str) -> Response:
    """Return *template* filled with what the reader says about *search*."""
    return make_response(render_template(template, **content(site, search)))


def content(site: Site, search: str) -> dict[str, Any]:
    """Return what the templates of the page need."""
    page, now, total = site.reader.page(search), time.time(), len(site.settings.nodes)
    found, silent = page.found, page.found.silent if page.found else []
    locks = [lock_row(it, total, now, silent=len(silent)) for it in found.locks] if found else []
    is_known = total - len(silent) >= quorum(total)
    told = happenings(page, search, now)
    holds = holds_by_task(
        record
        for record in (page.records.holds if page.records else ())
        if record_matches(record, search)
    )
    first = page.records.holds[0].get("at") if page.records and page.records.holds else None
    return {
        "search": search,
        "read_at": moment(now - page.age, now),
        "age": round(page.age, 1),
        "is_stale": page.age > PATIENCE,
        "nodes": None if page.nodes is None else [node_row(node) for node in page.nodes],
        "verdict": None if page.nodes is None else verdict(page.nodes, site.settings).splitlines(),
        "has_quorum": page.nodes is not None and count_up(page.nodes) >= quorum(total),
        "found": found,
        "silent": [text_of(label) for label in silent],
        "is_known": is_known,
        "locks": locks,
        "leaked": sum(lock.is_leaked for lock in locks),
        "bound": SHOWN,
        "records": page.records,
        "happenings": told[:RECORDS_SHOWN],
        "older": len(told) - RECORDS_SHOWN,
        "charts": charts(holds),
        "tasks": sum(1 for task in holds if task.count),
        "holds_since": moment(first, now),
        "size": (WIDTH, HEIGHT),
        "answers": answer(locks, told, is_known=is_known)
        if search and found and page.records
        else [],
        "can_release": site.door.token is not None,
    }


def happenings(page: Page, search: str, now: float) -> list[Any]:
    """Return what happened that matches *search*, newest first."""
    if page.records is None:
        return []
    matching = [record for record in page.records.happened if record_matches(record, search)]
    return [happening(record, now) for record in reversed(matching)]
