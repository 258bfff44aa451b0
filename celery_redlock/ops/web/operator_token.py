"""
The operator's token: where it comes from, and who has it.

It is configured, never made up here: a token that nobody chose would have to be printed. The
environment wins over the setting, so that it can be changed without the app's configuration,
which all workers read.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from celery_redlock.errors import ConfigurationError
from celery_redlock.settings import SHORTEST_WEB_TOKEN, Settings

__all__ = ["ENVIRONMENT", "Attempts", "configured_token", "equal"]

ENVIRONMENT = "REDLOCK_WEB_TOKEN"
#: Wrong tokens that an address may send before it has to wait, and its longest wait [s].
FREE = 3
LONGEST = 60.0
#: For how long a wrong token is remembered [s], and of how many addresses.
REMEMBERED = 900.0
ADDRESSES = 1000


def configured_token(settings: Settings, environ: Mapping[str, str]) -> str | None:
    """
    Return the token that is configured, None for none; does not repeat it in errors.

    Raises:
        ConfigurationError: It is too short.
    """
    given = environ.get(ENVIRONMENT) or None
    if given is not None and len(given) < SHORTEST_WEB_TOKEN:
        msg = (
            f"{ENVIRONMENT} must have at least {SHORTEST_WEB_TOKEN} characters; make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
        raise ConfigurationError(msg)
    return given or settings.web_token


def equal(given: str, token: str) -> bool:
    """Return whether *given* is *token*, in a time that tells nothing of either."""
    # Digests, as a comparison of the texts themselves would tell the length.
    ours, theirs = (
        hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (token, given)
    )
    return hmac.compare_digest(ours, theirs)


class Attempts:
    """
    Turns away whoever guesses: after some wrong tokens, an address has to wait longer each time.

    The right token always passes, or anybody at the operator's address (another user of the
    machine, all who come through one proxy) could lock the operator out by sending wrong ones.
    So a guess is compared however early it comes, at the speed of the network. Against 16 random
    characters that is harmless: even 64 bits take a million guesses a second half a million years.

    Nobody sleeps here, so guessing costs no thread; who comes too early is told to wait. The
    addresses remembered are bounded, and so is the wait.

    Args:
        now: The clock [s].
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._mutex = threading.Lock()
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def check(self, address: str, given: str, token: str) -> bool | float:
        """
        Return whether *given* is *token*; for a wrong one too early, how long to wait [s, > 0].

        The right one forgives no wrong ones: they may be somebody else's. These are counted one
        at a time: many guesses at once count as many.
        """
        if equal(given, token):
            return True
        network = network_of(address)
        with self._mutex:
            now = self._now()
            count, last = self._wrong.get(network, (0, 0.0))
            if now - last > REMEMBERED:
                count = 0
            wait = last + pause_after(count) - now if count else 0.0
            if wait > 0:
                return wait
            self._wrong[network] = (count + 1, now)
            self._wrong.move_to_end(network)
            if len(self._wrong) > ADDRESSES:
                self._wrong.popitem(last=False)
            return False


def pause_after(count: int) -> float:
    """Return how long to wait after so many wrong tokens [s]."""
    return 0.0 if count < FREE else float(min(LONGEST, 2 ** min(count - FREE, 10)))


def network_of(address: str) -> str:
    """Return *address*, or the network of an IPv6 address: one host has all of its addresses."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:  # noqa: PLR2004
        return str(parsed)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
