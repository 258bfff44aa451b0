"""The Flask app of the page: what is served where, and to whom."""

from __future__ import annotations

import time
from typing import Any

from flask import Flask, Response, make_response, render_template, request
from werkzeug.exceptions import HTTPException

from celery_redlock.ops.web.asked import EVENTS, TIMES, Asked
from celery_redlock.ops.web.format import FILTERS, moment, text
from celery_redlock.ops.web.guard import Door, guard
from celery_redlock.ops.web.links import linked
from celery_redlock.ops.web.operator_token import Attempts
from celery_redlock.ops.web.releasing import add_release
from celery_redlock.ops.web.views import Reads, Site, lock_page, main_page, task_page
from celery_redlock.reading.quorum import MARKS, MEANINGS
from celery_redlock.reading.sentences import sentence, wording
from celery_redlock.settings import Settings
from celery_redlock.words import redlock_command

__all__ = ["make_app"]

#: What a browser may send in a form [bytes].
LONGEST_FORM = 16 * 1024
#: What templates may use beside what a page hands them.
NAMES = {
    "EVENTS": EVENTS,
    "TIMES": TIMES,
    "MARKS": MARKS,
    "MEANINGS": MEANINGS,
    "linked": linked,
    "redlock_command": redlock_command,
    "sentence": sentence,
    "wording": wording,
}


def make_app(title: str, settings: Settings, reader: Reads, door: Door) -> Flask:
    """
    Return the page as a WSGI app.

    Args:
        title: Name of the Celery app.
        settings: Of the app.
        reader: Where readings come from.
        door: To whom it is served.
    """
    site = Site(settings, reader)
    attempts = Attempts()
    app = Flask(__package__ or __name__)
    app.config["MAX_CONTENT_LENGTH"] = app.config["MAX_FORM_MEMORY_SIZE"] = LONGEST_FORM
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.jinja_env.filters.update(FILTERS, moment=lambda at: moment(at, time.time()))
    app.jinja_env.globals.update(NAMES, site=text(title), can_release=door.token is not None)
    guard(app, door, attempts)
    add_release(
        app, reader, door, attempts, nodes=len(settings.nodes), prefix=settings.rules.prefix
    )

    def shown(template: str, content: Any) -> Response:
        asked = Asked.of(request.args)
        return make_response(render_template(template, asked=asked, **content(site, asked)))

    @app.get("/")
    def page() -> Response:
        return shown("page.html", main_page)

    @app.get("/task")
    def task() -> Response:
        return shown("task.html", task_page)

    @app.get("/lock")
    def lock() -> Response:
        return shown("lock.html", lock_page)

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
