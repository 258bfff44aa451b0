"""
Taking a lock away from its holder, on an operator's word: shown first, done then.

The page before it names the holder seen. What is then sent names the same holder, so a lock that
has changed hands in between stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flask import Flask, Response, abort, make_response, render_template, request

from celery_redlock.lock.lease import quorum
from celery_redlock.log import get_logger
from celery_redlock.ops.web.format import LONG, text, visible
from celery_redlock.ops.web.forms import COOKIE, LIFETIME, Seals
from celery_redlock.ops.web.guard import Door, is_from_our_page, too_early
from celery_redlock.ops.web.operator_token import ENVIRONMENT, Attempts
from celery_redlock.reading.one_lock import OneLock
from celery_redlock.reading.stored import LockView

__all__ = ["add_release"]

logger = get_logger(__name__)
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


class Releases(Protocol):
    """Who asks the nodes; see `celery_redlock.ops.web.reader.Reader`."""

    def lock(self, name: str) -> OneLock:
        """Return who holds the lock *name* at this moment."""

    def release(self, name: str, seen: str) -> dict[str, str]:
        """Release the lock *name* if its token begins with *seen*."""


@dataclass(frozen=True)
class Desk:
    """
    Where releases are asked for.

    Attributes:
        reader: Who asks the nodes.
        door: To whom the page is served.
        attempts: Who sent wrong tokens.
        seals: Of the forms.
        nodes: How many lock nodes there are.
        prefix: Of the Redis keys.
    """

    reader: Releases
    door: Door
    attempts: Attempts
    seals: Seals
    nodes: int
    prefix: str


def add_release(
    app: Flask, reader: Releases, door: Door, attempts: Attempts, *, nodes: int, prefix: str
) -> None:
    """Give *app* the views that release a lock."""
    desk = Desk(reader, door, attempts, Seals(), nodes, prefix)

    @app.get("/release")
    def confirm() -> Response:
        if door.token is None:
            abort(403, HOW_TO_ALLOW)
        return confirmation(desk, request.args.get("name", ""), request.args.get("seen", ""))

    @app.post("/release")
    def release() -> Response:
        return released(desk, request.form.get("name", ""), request.form.get("seen", ""))


def confirmation(desk: Desk, name: str, seen: str, problem: str = "", code: int = 200) -> Response:
    """Return the page that names the holder *seen* of the lock *name*, and asks for the token."""
    if not name:
        abort(400, "No lock is named.")
    now = desk.reader.lock(name)
    browser = desk.seals.browser(request.cookies.get(COOKIE))
    page = render_template(
        "release.html",
        name=name,
        key=visible(f"{desk.prefix}:lock:{name}"),
        seen=seen,
        lock=next((view for view in now.views if token_of(view) == seen), None),
        others=[view for view in now.views if token_of(view) != seen],
        nodes=desk.nodes,
        silent=now.silent,
        is_known=desk.nodes - len(now.silent) >= quorum(desk.nodes),
        seal=desk.seals.make(browser, name, seen),
        minutes=LIFETIME // 60,
        problem=problem,
    )
    response = make_response(page, code)
    response.set_cookie(
        COOKIE,
        browser,
        path="/release",
        secure=request.is_secure,
        httponly=True,
        samesite="Strict",
    )
    return response


def released(desk: Desk, name: str, seen: str) -> Response:
    """Release the lock *name* of the holder *seen* if all is in order, and tell what came of it."""
    token = desk.door.token
    if token is None:
        refused(name, "releasing is off")
        abort(403, HOW_TO_ALLOW)
    if not is_from_our_page(request.headers):
        refused(name, "sent by another site")
        abort(403, "This was sent by the page of another site. Nothing was released.")
    seal = request.form.get("seal", "")
    if not desk.seals.holds(seal, request.cookies.get(COOKIE), name, seen):
        refused(name, "form void")
        abort(
            403,
            "This form is too old, or was not made for you. Nothing was released; go back "
            "to the page, and begin again with “Release…”.",
        )
    checked = desk.attempts.check(request.remote_addr or "", request.form.get("token", ""), token)
    if checked is False:
        refused(name, "wrong token")
        return confirmation(desk, name, seen, "That was not the token. Nothing was released.", 403)
    if checked is not True:
        refused(name, "too many wrong tokens")
        return too_early(checked)
    return outcome(desk, name, desk.reader.release(name, seen))


def outcome(desk: Desk, name: str, results: dict[str, str]) -> Response:
    """Return the page that says what became of the lock *name* on each node."""
    gone = sum(1 for result in results.values() if result == "released")
    now = desk.reader.lock(name)
    # Whoever was seen cannot have a majority any more.
    is_done = sum(result in RESULTS for result in results.values()) >= quorum(desk.nodes)
    is_known = is_done and desk.nodes - len(now.silent) >= quorum(desk.nodes)
    told = ", ".join(f"{node}: {result}" for node, result in results.items())
    logger.warning(
        "Release of lock %s for %s: %s",
        ascii(text(name, LONG)),
        request.remote_addr,
        text(told, LONG),
    )
    page = render_template(
        "released.html",
        name=name,
        results=[(node, *result_in_words(result)) for node, result in results.items()],
        gone=gone,
        nodes=desk.nodes,
        is_done=is_done,
        is_known=is_known,
        silent=now.silent,
        holders=now.views,
    )
    if not gone and not is_known:
        return make_response(page, 503)
    return make_response(page, 200 if gone or not now.views else 409)


def token_of(view: LockView) -> str:
    """Return the public part of a holder's token; "" if it has none."""
    token = view.holder.get("token")
    return token if isinstance(token, str) else ""


def result_in_words(result: str) -> tuple[str, bool]:
    """Return what a node answered, in words, and whether that is as wanted."""
    return RESULTS.get(result, (text(f"not asked: {result}", 200), False))


def refused(name: str, why: str) -> None:
    """Log that somebody asked for the release of the lock *name* in vain."""
    logger.warning(
        "Refused to release lock %s for %s: %s", ascii(text(name, LONG)), request.remote_addr, why
    )
