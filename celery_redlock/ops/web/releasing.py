"""
Release of a lock on an operator's word: shown first, done then.

The page before it names the holder seen. What is then sent names the same holder, so a lock that
has changed hands in between stays where it is. Only our own form can send it (CSRF): it carries a
seal, made for one browser, lock and holder, and a restart makes all forms void.
"""

from __future__ import annotations

import secrets
from typing import NoReturn
from urllib.parse import unquote

from flask import Response, abort, make_response, render_template, request, session
from itsdangerous import BadData, URLSafeTimedSerializer
from werkzeug.exceptions import TooManyRequests

from celery_redlock.lock.lease import quorum
from celery_redlock.ops.web.format import LONG, text, visible
from celery_redlock.ops.web.guard import ENVIRONMENT, Door, is_from_our_page
from celery_redlock.ops.web.reader import Reader
from celery_redlock.process.log import get_logger
from celery_redlock.settings import Settings

__all__ = ["LIFETIME", "Desk"]

logger = get_logger(__name__)
#: For how long a form may be sent after it was shown [s]: what it says gets old.
LIFETIME = 600
HOW_TO_ALLOW = (
    "Releasing is off. To allow it, set redlock_web_token in the app's configuration, or "
    f"{ENVIRONMENT} in the environment of this command, to a secret of at least 16 characters."
)
#: What a node answered -> in words, and whether that is as wanted.
RESULTS = {
    "released": ("released", True),
    "free": ("nobody held it there", True),
    "held by another": ("held by another, and left alone", False),
    "not written by us": ("not written by celery-redlock, and left alone", False),
}


class Desk:
    """The views for releases; forms sealed with another *key* are void."""

    def __init__(self, settings: Settings, reader: Reader, door: Door, key: bytes) -> None:
        self._prefix = settings.rules.prefix
        self._nodes = len(settings.nodes)
        self._reader = reader
        self._door = door
        self._seals = URLSafeTimedSerializer(key)

    def confirm(self) -> Response:
        if self._door.token is None:
            abort(403, HOW_TO_ALLOW)
        return self._form(request.args.get("name", ""), request.args.get("seen", ""))

    def release(self) -> Response:
        # Quoted, as browsers send no field with a line break as it was.
        name, seen = unquote(request.form.get("name", "")), request.form.get("seen", "")
        token = self._door.token
        if token is None:
            refuse(name, "releasing is off", HOW_TO_ALLOW)
        if not is_from_our_page(request.headers):
            message = "This was sent by the page of another site. Nothing was released."
            refuse(name, "sent by another site", message)
        if not self._is_sealed(name, seen):
            message = (
                "This form is too old, or was not made for you. Nothing was released; go back "
                "to the page, and begin again with “Release…”."
            )
            refuse(name, "form void", message)
        given = request.form.get("token", "")
        try:
            is_right = self._door.attempts.is_right(request.remote_addr or "", given, token)
        except TooManyRequests:
            log_refusal(name, "too many wrong tokens")
            raise
        if not is_right:
            log_refusal(name, "wrong token")
            return self._form(name, seen, "That was not the token. Nothing was released.", 403)
        return self._outcome(name, self._reader.release(name, seen))

    def _is_sealed(self, name: str, seen: str) -> bool:
        """Return whether the form was made for this browser, lock and holder, not long ago."""
        try:
            seal, browser = request.form.get("seal", ""), session["browser"]
            return bool(self._seals.loads(seal, LIFETIME, salt=browser) == [name, seen])
        except (BadData, KeyError):
            return False

    def _form(self, name: str, seen: str, problem: str = "", code: int = 200) -> Response:
        if not name:
            abort(400, "No lock is named.")
        now = self._reader.lock(name)
        browser = session.setdefault("browser", secrets.token_urlsafe(32))
        page = render_template(
            "release.html",
            name=name,
            key=visible(f"{self._prefix}:lock:{name}"),
            seen=seen,
            lock=next((it for it in now.views if it.holder.get("token", "") == seen), None),
            reserved=next((it for it in now.reservations if it.reservation.seen == seen), None),
            others=[it for it in now.views if it.holder.get("token", "") != seen],
            nodes=self._nodes,
            silent=now.silent,
            is_known=now.is_known,
            seal=self._seals.dumps([name, seen], salt=browser),
            minutes=LIFETIME // 60,
            problem=problem,
        )
        return make_response(page, code)

    def _outcome(self, name: str, results: dict[str, str]) -> Response:
        gone = sum(result == "released" for result in results.values())
        now = self._reader.lock(name)
        # Whoever was seen cannot have a majority any more.
        is_done = sum(result in RESULTS for result in results.values()) >= quorum(self._nodes)
        is_known = is_done and now.is_known
        summary = text(", ".join(f"{node}: {result}" for node, result in results.items()), LONG)
        logger.warning("Release of lock %s for %s: %s", in_log(name), request.remote_addr, summary)
        page = render_template(
            "released.html",
            name=name,
            results=[(node, *result_in_words(result)) for node, result in results.items()],
            gone=gone,
            nodes=self._nodes,
            is_done=is_done,
            is_known=is_known,
            silent=now.silent,
            holders=now.views,
        )
        if not gone and not is_known:
            return make_response(page, 503)
        return make_response(page, 200 if gone or not now.views else 409)


def result_in_words(result: str) -> tuple[str, bool]:
    return RESULTS.get(result, (text(f"not asked: {result}", 200), False))


def refuse(name: str, why: str, message: str) -> NoReturn:
    log_refusal(name, why)
    abort(403, message)


def log_refusal(name: str, why: str) -> None:
    logger.warning("Refused to release lock %s for %s: %s", in_log(name), request.remote_addr, why)


def in_log(name: str) -> str:
    return ascii(text(name, LONG))
