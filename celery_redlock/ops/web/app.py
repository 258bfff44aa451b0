"""The Flask app of the page: what it serves under which address."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

from flask import Flask, Response, make_response, render_template, request
from werkzeug.exceptions import HTTPException

from celery_redlock.ops.web.asked import EVENTS, TIMES, Asked
from celery_redlock.ops.web.format import FILTERS, linked, text
from celery_redlock.ops.web.guard import Door, guard
from celery_redlock.ops.web.reader import Reader
from celery_redlock.ops.web.releasing import Desk
from celery_redlock.ops.web.views import lock_page, main_page, report_page, task_page
from celery_redlock.reading.quorum import MARKS, MEANINGS
from celery_redlock.reading.sentences import sentence, wording
from celery_redlock.settings import Settings
from celery_redlock.words import redlock_command

__all__ = ["make_app"]

#: What a browser may send in a form [bytes].
LONGEST_FORM = 16 * 1024
CONFIG = {
    "MAX_CONTENT_LENGTH": LONGEST_FORM,
    "MAX_FORM_MEMORY_SIZE": LONGEST_FORM,
    "SESSION_COOKIE_NAME": "redlock-web",
    "SESSION_COOKIE_PATH": "/release",
    "SESSION_COOKIE_SAMESITE": "Strict",
}
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
#: How a page is called on which there is an error, if not by the error's own name.
ERRORS = {401: "Who are you?", 429: "Not so fast"}


def make_app(title: str, settings: Settings, reader: Reader, door: Door) -> Flask:
    app = Flask(__package__ or __name__)
    app.config.update(CONFIG)
    key = app.secret_key = secrets.token_bytes(32)
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.jinja_env.filters.update(FILTERS)
    app.jinja_env.globals.update(NAMES, site=text(title), can_release=door.token is not None)
    guard(app, door)
    desk = Desk(settings, reader, door, key)

    def shown(template: str, content: Any) -> str:
        asked = Asked.of(request.args)
        return render_template(template, asked=asked, **content(settings, reader, asked))

    app.add_url_rule("/", "page", partial(shown, "page.html", main_page))
    app.add_url_rule("/task", "task", partial(shown, "task.html", task_page))
    app.add_url_rule("/report", "report", partial(shown, "report.html", report_page))
    app.add_url_rule("/lock", "lock", partial(shown, "lock.html", lock_page))
    app.add_url_rule("/release", "confirm", desk.confirm)
    app.add_url_rule("/release", "release", desk.release, methods=["POST"])

    @app.errorhandler(HTTPException)
    def fail(error: HTTPException) -> Response:
        code = error.code or 500
        page = render_template(
            "error.html", title=ERRORS.get(code, error.name), why=error.description or ""
        )
        headers = dict(error.get_headers())  # like Allow, which belongs to 405
        headers.pop("Content-Type", None)
        return make_response(page, code, headers)

    return app
