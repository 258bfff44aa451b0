"""
User and password for all nodes, from settings of their own.

Celery masks settings with "password" in their names where it shows them (``celery report``,
``celery inspect conf``), and nothing within a list such as ``redlock_nodes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, parse_qs, quote, urlsplit, urlunsplit

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.nodes.address import addresses_of
from celery_redlock.lock.nodes.urls import takes_login
from celery_redlock.lock.records import is_text

__all__ = ["shows_password", "with_credentials"]

#: Options of redis-py by which a node has its own, and what libpq has beside them in a URL.
OWN = ("username", "password", "credential_provider")
OF_LIBPQ = ("user", "passfile", "service")


def check_credentials(username: object, password: object) -> None:
    """Raise ConfigurationError, which repeats neither, unless both may be sent to a server."""
    for name, value in (("redlock_username", username), ("redlock_password", password)):
        if value is not None and not (isinstance(value, str) and value and is_text(value)):
            msg = f"{name} must be a string that is not empty, or None"
            raise ConfigurationError(msg)
    if username is not None and password is None:
        msg = "redlock_username needs redlock_password: a server asks for both"
        raise ConfigurationError(msg)


def with_credentials(
    nodes: Sequence[Any], username: str | None, password: str | None
) -> Sequence[Any]:
    """
    Return *nodes* with this user and password; one that has any of its own keeps those.

    The Sentinels of a node are other servers, and are asked as before. None as *username* means
    the default user, None as *password* changes nothing.
    """
    addresses_of(nodes)
    check_credentials(username, password)
    return nodes if password is None else [with_login(each, username, password) for each in nodes]


def with_login(node: Any, username: str | None, password: str) -> Any:
    if isinstance(node, Mapping):
        user = {} if username is None else {"username": username}
        has_own = any(option in node for option in OWN)
        return node if has_own else {**node, **user, "password": password}
    url = split(node) if takes_login(node) else None
    if url is None or "@" in url.netloc or not {*OWN, *OF_LIBPQ}.isdisjoint(parse_qs(url.query)):
        return node
    login = f"{quote(username or '', safe='')}:{quote(password, safe='')}"
    return urlunsplit(url._replace(netloc=f"{login}@{url.netloc}"))


def shows_password(node: Any) -> bool:
    if isinstance(node, Mapping):
        sentinels = node.get("sentinels")
        inner = sentinels if isinstance(sentinels, (list, tuple)) else ()
        return bool(node.get("password")) or any(shows_password(each) for each in inner)
    url = split(node if "//" in str(node) else f"//{node}")
    return url is not None and bool(url.password or parse_qs(url.query).get("password"))


def split(url: object) -> SplitResult | None:
    """Return the parts of *url*; None if it is none, which is said elsewhere."""
    try:
        return urlsplit(url) if isinstance(url, str) and "//" in url else None
    except ValueError:
        return None
