"""
Forms that only our own page can send (CSRF), and only for what they were made for.

A form carries a seal: the time it was made and an HMAC of that time, of the browser's cookie and
of what the form is about. Nothing is remembered here. The key is of this process, so a restart
makes all forms void.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable

__all__ = ["COOKIE", "LIFETIME", "Seals"]

COOKIE = "redlock-web"
#: For how long a form may be sent after it was shown [s]: what it says gets old.
LIFETIME = 600
BROWSER = re.compile(r"[A-Za-z0-9_-]{43}")
SEAL = re.compile(r"[0-9]{1,12}\.[0-9a-f]{64}")


class Seals:
    """
    Makes seals and checks them.

    Args:
        now: The clock [s].
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._key = secrets.token_bytes(32)

    def browser(self, cookie: str | None) -> str:
        """Return the browser's *cookie*, or a new one if it has none of ours."""
        return cookie if cookie and BROWSER.fullmatch(cookie) else secrets.token_urlsafe(32)

    def make(self, browser: str, *about: str) -> str:
        """Return the seal of a form *about* something, for *browser*."""
        return self._seal(int(self._now()), browser, about)

    def holds(self, seal: str, browser: str | None, *about: str) -> bool:
        """Return whether *seal* was made for *browser* and *about* the same, and not long ago."""
        if not (browser and BROWSER.fullmatch(browser) and SEAL.fullmatch(seal)):
            return False
        made = int(seal.partition(".")[0])
        right = self._seal(made, browser, about)
        return hmac.compare_digest(seal, right) and 0 <= self._now() - made <= LIFETIME

    def _seal(self, made: int, browser: str, about: tuple[str, ...]) -> str:
        # Each with its length, so that no two lists of texts are one message.
        parts = [part.encode("utf-8", "surrogatepass") for part in (str(made), browser, *about)]
        message = b"".join(b"%d:%s" % (len(part), part) for part in parts)
        return f"{made}.{hmac.new(self._key, message, hashlib.sha256).hexdigest()}"
