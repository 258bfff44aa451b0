"""
Protection of the page: who may ask for it, and what a browser may do with it.

Loopback alone is no protection: every page in the operator's browser can send requests there.
So the name of the host is checked (a foreign name that points at us, "DNS rebinding"), what
another site sends is refused, and nothing of ours may be framed, or load anything from elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from flask import Flask, Response, abort, request
from werkzeug.datastructures import Headers
from werkzeug.exceptions import TooManyRequests

from celery_redlock.errors import ConfigurationError
from celery_redlock.process.log import get_logger
from celery_redlock.settings import SHORTEST_WEB_TOKEN, Settings

__all__ = ["ENVIRONMENT", "Attempts", "Door", "configured_token", "guard", "is_from_our_page"]

logger = get_logger(__name__)
#: Where the token is looked for before the setting: it can be changed there without the app's
#: configuration, which all workers read.
ENVIRONMENT = "REDLOCK_WEB_TOKEN"
#: Wrong tokens that an address may send before it has to wait, and its longest wait [s].
FREE = 3
LONGEST = 60.0
#: For how long a wrong token is remembered [s], and of how many addresses.
REMEMBERED = 900.0
ADDRESSES = 1000
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


class Attempts:
    """
    Turns away whoever guesses: after some wrong tokens, an address has to wait longer each time.

    The right token always passes, or anybody at the operator's address (another user of the
    machine, all who come through one proxy) could lock the operator out by sending wrong ones.
    So a guess is compared however early it comes, at the speed of the network. Against 16 random
    characters that is harmless: even 64 bits take a million guesses a second half a million years.

    Nobody sleeps here, so guessing costs no thread; who comes too early is told to wait. The
    addresses remembered are bounded, and so is the wait.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._mutex = threading.Lock()
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def is_right(self, address: str, given: str, token: str) -> bool:
        """
        Return whether *given* is *token*; raises TooManyRequests for a wrong one too early.

        The right one forgives no wrong ones: they may be somebody else's. These are counted one
        at a time: many guesses at once count as many.
        """
        # Digests, as a comparison of the texts themselves would tell the length.
        if hmac.compare_digest(digest(given), digest(token)):
            return True
        network = network_of(address)
        with self._mutex:
            now = self._now()
            count, last = self._wrong.get(network, (0, 0.0))
            if now - last > REMEMBERED:
                count = 0
            wait = math.ceil(last + pause_after(count) - now)
            if count and wait > 0:
                why = f"Too many wrong tokens from your address. Try again in {wait} s."
                raise TooManyRequests(why, retry_after=wait)
            self._wrong[network] = (count + 1, now)
            self._wrong.move_to_end(network)
            if len(self._wrong) > ADDRESSES:
                self._wrong.popitem(last=False)
            return False


def digest(token: str) -> bytes:
    """Return a digest of *token*, which may have lone surrogates."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def pause_after(count: int) -> float:
    return 0.0 if count < FREE else float(min(LONGEST, 2 ** min(count - FREE, 10)))


def network_of(address: str) -> str:
    """Return *address*, or the network of an IPv6 address: one host has all of its addresses."""
    parsed = address_in(address.partition("%")[0])
    if not isinstance(parsed, ipaddress.IPv6Address):
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False))


@dataclass(frozen=True)
class Door:
    host: str = "127.0.0.1"  # where it listens
    names: tuple[str, ...] = ()  # other names under which it may be asked for
    token: str | None = None  # the operator's; None if there is none
    attempts: Attempts = field(default_factory=Attempts)

    @property
    def is_private(self) -> bool:
        """Whether only programs of this machine can reach it: another name says that others do."""
        return all(map(is_loopback, (self.host, *self.names)))

    def admits(self, header: str | None) -> bool:
        """Return whether a request may call us so: loopback, where we listen, or by a name."""
        if header is None or HOST.fullmatch(header) is None:
            return False
        called = plain(header)
        if is_loopback(called) or called in map(plain, (self.host, *self.names)):
            return True
        # An address cannot be made to point elsewhere, and "everywhere" has no name of its own.
        return address_in(called) is not None and plain(self.host) in {"0.0.0.0", "::"}  # noqa: S104


def guard(app: Flask, door: Door) -> None:
    @app.before_request
    def admit() -> None:
        if not door.admits(request.headers.get("Host")):
            abort(
                421,
                "This page is not served under that name. If it should be, start it with "
                "--allow-host NAME.",
            )
        # What is posted is looked at more strictly, by the one view that takes it.
        if request.method != "POST" and not is_invited(request.headers):
            abort(403, "Another site asked for this. Open the page by its own address.")
        if door.token is not None and not door.is_private:
            ask_for(door.token)

    def ask_for(token: str) -> None:
        given = request.authorization
        if given is not None and given.type == "basic" and given.password is not None:
            if door.attempts.is_right(request.remote_addr or "", given.password, token):
                return
            logger.warning("Refused to show the page to %s: wrong token", request.remote_addr)
        abort(401, "The password is the token of redlock_web_token; the user does not matter.")

    @app.after_request
    def add_headers(response: Response) -> Response:
        response.headers.update(HEADERS)
        if response.status_code == 401:  # noqa: PLR2004
            response.headers["WWW-Authenticate"] = 'Basic realm="celery-redlock", charset="UTF-8"'
        return response


def is_invited(headers: Headers) -> bool:
    """
    Return whether a browser may be shown what it asks for: its user or our own page did.

    A page of another site may link to ours, but not have it read in the background: that would
    make the nodes work for anybody.
    """
    if headers.get("Sec-Fetch-Site") in (None, "same-origin", "none"):
        return True
    how = headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")
    return how == ("navigate", "document")


def is_from_our_page(headers: Headers) -> bool:
    """Return whether no header says that a request was made by another site's page."""
    if headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
        return False
    origin = headers.get("Origin")
    if origin is None:
        return True
    try:
        # Without the scheme: what stands between us and the browser may speak TLS.
        return urlsplit(origin).netloc.lower() == headers.get("Host", "").lower() != ""
    except ValueError:
        return False


def plain(host: str) -> str:
    """Return *host* as it is compared: lower case, no port, no brackets, no dot at its end."""
    match = HOST.fullmatch(host)
    return (match[1] if match else host).strip("[]").rstrip(".").lower()


def address_in(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    name = plain(host)
    address = address_in(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def configured_token(settings: Settings, environ: Mapping[str, str]) -> str | None:
    """
    Return the token that is configured, None for none; raises ConfigurationError for a short one.

    None is made up here: a token that nobody chose would have to be printed.
    """
    given = environ.get(ENVIRONMENT) or None
    if given is not None and len(given) < SHORTEST_WEB_TOKEN:
        msg = (
            f"{ENVIRONMENT} must have at least {SHORTEST_WEB_TOKEN} characters; make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
        raise ConfigurationError(msg)
    return given or settings.web_token
