"""
Who may ask for a page, and what a browser may do with it.

Loopback alone is no protection: every page in the operator's browser can send requests there.
So the name of the host is checked (a foreign name that points at us, "DNS rebinding"), what
another site sends is refused, and nothing of ours may be framed, or load anything from elsewhere.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from flask import Flask, Response, abort, make_response, render_template, request

from celery_redlock.log import get_logger
from celery_redlock.ops.web.operator_token import Attempts

__all__ = ["Door", "guard", "is_from_our_page", "is_invited", "is_loopback"]

logger = get_logger(__name__)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    # Not "no-referrer": browsers would then hide the origin of our own form from us.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(:[0-9]{1,5})?")


@dataclass(frozen=True)
class Door:
    """
    Where the page is served, and to whom.

    Attributes:
        host: Where it listens.
        names: Other names by which it may be called.
        token: The operator's; None if there is none.
    """

    host: str = "127.0.0.1"
    names: tuple[str, ...] = ()
    token: str | None = None

    @property
    def is_private(self) -> bool:
        """Whether only programs of this machine can reach it: another name says that others do."""
        return all(is_loopback(name) for name in (self.host, *self.names))

    def admits(self, header: str | None) -> bool:
        """Return whether a request may call us so: loopback, where we listen, or by a name."""
        called = name_in(header)
        if called is None:
            return False
        known = {plain(name) for name in (self.host, *self.names)}
        if called in known or is_loopback(called):
            return True
        # An address cannot be made to point elsewhere, and "everywhere" has no name of its own.
        return is_address(called) and plain(self.host) in {"0.0.0.0", "::"}  # noqa: S104


def guard(app: Flask, door: Door, attempts: Attempts) -> None:
    """Have *app* let in only whom *door* admits, and put our headers on every response."""

    @app.before_request
    def admit() -> Response | None:
        if not door.admits(request.headers.get("Host")):
            abort(
                421,
                "This page is not served under that name. If it should be, start it with "
                "--allow-host NAME.",
            )
        # What is posted is looked at more strictly, by the one view that takes it.
        if request.method != "POST" and not is_invited(request.headers):
            abort(403, "Another site asked for this. Open the page by its own address.")
        if door.is_private:
            return None
        return None if door.token is None else signed_in(door.token, attempts)

    @app.after_request
    def add_headers(response: Response) -> Response:
        for name, value in HEADERS.items():
            response.headers[name] = value
        return response


def signed_in(token: str, attempts: Attempts) -> Response | None:
    """Return None if the request has *token* as its password, else what asks for it."""
    given = request.authorization
    if given is None or given.type != "basic" or given.password is None:
        return ask_for_token()
    checked = attempts.check(request.remote_addr or "", given.password, token)
    if checked is True:
        return None
    if checked is not False:
        return too_early(checked)
    logger.warning("Refused to show the page to %s: wrong token", request.remote_addr)
    return ask_for_token()


def ask_for_token() -> Response:
    """Return what has a browser ask for user and password."""
    why = "The password is the token of redlock_web_token; the user does not matter."
    response = make_response(render_template("error.html", title="Who are you?", why=why), 401)
    response.headers["WWW-Authenticate"] = 'Basic realm="celery-redlock", charset="UTF-8"'
    return response


def too_early(wait: float) -> Response:
    """Return what tells somebody who sent too many wrong tokens to wait so long [s]."""
    left = math.ceil(wait)
    why = f"Too many wrong tokens from your address. Try again in {left} s."
    response = make_response(render_template("error.html", title="Not so fast", why=why), 429)
    response.headers["Retry-After"] = str(left)
    return response


def is_invited(headers: Iterable[tuple[str, str]]) -> bool:
    """
    Return whether a browser may be shown what it asks for: its user or our own page did.

    A page of another site may link to ours, but not have it read in the background: that would
    make the nodes work for anybody.
    """
    told = {name.lower(): value for name, value in headers}
    if told.get("sec-fetch-site") in (None, "same-origin", "none"):
        return True
    return (told.get("sec-fetch-mode"), told.get("sec-fetch-dest")) == ("navigate", "document")


def is_from_our_page(headers: Iterable[tuple[str, str]]) -> bool:
    """Return whether no header says that a request was made by another site's page."""
    told = {name.lower(): value for name, value in headers}
    site, origin = told.get("sec-fetch-site"), told.get("origin")
    if site is not None and site != "same-origin":
        return False
    if origin is None:
        return True
    try:
        # Without the scheme: what stands between us and the browser may speak TLS.
        return urlsplit(origin).netloc.lower() == told.get("host", "").lower() != ""
    except ValueError:
        return False


def name_in(header: str | None) -> str | None:
    """Return the host in a ``Host`` header without its port; None if there is none."""
    match = HOST.fullmatch(header or "")
    return plain(match[1]) if match else None


def plain(host: str) -> str:
    """Return *host* as it is compared: lower case, no brackets, no dot at its end."""
    return host.strip("[]").rstrip(".").lower()


def is_address(host: str) -> bool:
    """Return whether *host* is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether *host* is this machine and cannot be reached from others."""
    name = plain(host)
    return name == "localhost" or (is_address(name) and ipaddress.ip_address(name).is_loopback)
