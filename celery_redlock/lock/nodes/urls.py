"""URLs of servers: what of them redis-py is given, and what of them is shown."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from celery_redlock.lock.rules import Rules

__all__ = [
    "FIXED",
    "OF_TCP",
    "OPTIONS",
    "BadUrl",
    "hide_password",
    "is_database",
    "other_scheme",
    "pool_of",
    "rules_for",
    "takes_login",
    "why_refused",
]

#: Longest wait for each step of connecting to a node, in the background [s].
CONNECT_TIMEOUT = 1.0
OPTIONS: dict[str, Any] = {
    "socket_timeout": CONNECT_TIMEOUT,
    "socket_connect_timeout": CONNECT_TIMEOUT,
    "client_name": "celery-redlock",
    "health_check_interval": 0,
}
#: How a connection is kept from being dropped on its way while nobody uses it, and is found to be
#: dead where nobody uses it [s]; as far as the platform has it.
KEEPALIVE = {
    getattr(socket, name): value
    for name, value in {
        "TCP_KEEPIDLE": 30,
        "TCP_KEEPALIVE": 30,  # as macOS calls it
        "TCP_KEEPINTVL": 10,
        "TCP_KEEPCNT": 3,
    }.items()
    if hasattr(socket, name)
}
OF_TCP: dict[str, Any] = {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
#: What no URL changes, as it says in which form replies come.
FIXED: dict[str, Any] = {
    "protocol": 2,  # RESP3 would cost another round trip at connect and bring nothing here
    "decode_responses": False,
    "retry": Retry(NoBackoff(), 0),
}
#: Schemes of servers of Redis that redis-py knows; a cluster has its own.
SERVERS = ("redis", "rediss", "unix")
#: Schemes of databases; ``sqlite:///`` has no host.
DATABASES = ("postgresql", "postgres", "sqlite")
#: Those of them that are a file, which has no users.
FILES = ("sqlite",)
#: `Rules.node_timeout` where a node is a database, unless it is set: each answer is a commit [s].
DATABASE_TIMEOUT = 1.0


class BadUrl(ValueError):
    """Says what is wrong with a URL, without a piece of it."""


def pool_of(url: str) -> redis.ConnectionPool:
    """Return what makes connections to *url*; ValueError or TypeError if that is impossible."""
    check_database(url)
    where = parse_url(url)
    own = OPTIONS if "path" in where else OPTIONS | OF_TCP
    pool = redis.ConnectionPool(**{**own, **where, **FIXED})
    try:
        pool.connection_class(**pool.connection_kwargs)  # which may not know an option
    except redis.RedisError as error:
        raise ValueError(str(error)) from None
    return pool


def is_database(node: object) -> bool:
    """Return whether *node* is the URL of a database, and no server of Redis."""
    return isinstance(node, str) and scheme_of(node) in DATABASES


def takes_login(node: object) -> bool:
    """Return whether the URL *node* may have a user and a password."""
    return not (isinstance(node, str) and scheme_of(node) in FILES)


def scheme_of(url: str) -> str:
    """Return its scheme, without the driver by which SQLAlchemy has a database."""
    return url.partition("://")[0].partition("+")[0].lower()


def rules_for(nodes: object, **settings: Any) -> Rules:
    """Return rules with *settings*, and defaults that are right for *nodes*."""
    given = nodes if isinstance(nodes, Sequence) and not isinstance(nodes, str) else ()
    own = {"node_timeout": DATABASE_TIMEOUT} if any(map(is_database, given)) else {}
    return Rules.of(**{**own, **settings})


def check_database(url: str) -> None:
    """Raise ValueError if *url* names its database by no number, which redis-py takes for 0."""
    parts = urlsplit(url)
    name = parts.path.strip("/") if "db" not in parse_qs(parts.query) else ""
    if parts.scheme in ("redis", "rediss") and name and not (name.isascii() and name.isdigit()):
        raise BadUrl("what follows the host is the number of a database, like /0")


def other_scheme(url: str) -> str:
    """Return what is wrong with the scheme of *url*, to be added to a text; "" if nothing is."""
    scheme, slashes, _ = url.lower().partition("://")
    if scheme.startswith("db+") and is_database(url[len("db+") :]):
        return ": without db+ it is one of a database"
    if slashes and scheme not in SERVERS:
        known = ", ".join(f"{it}://" for it in (*SERVERS, "redis+cluster", *DATABASES))
        return f", nor of a database: those begin with one of {known}"
    return ""


def why_refused(url: str, error: Exception) -> str:
    """Return why *url* is refused, to be added to a text; "" where a password may be quoted."""
    # A TypeError is about an option. A login that an option is taken from has its "@" after it.
    quoted = url.partition("?")[2] if isinstance(error, TypeError) else url
    return "" if "@" in quoted and not isinstance(error, BadUrl) else f": {error}"


def hide_password(url: str) -> str:
    """Return *url* without its possible secrets: all before the ``@``, and the options."""
    scheme, slashes, rest = url.partition("://") if "://" in url else ("", "", url)
    where, _, options = rest.partition("?")
    if "@" in options:  # of a password, with which the login ends or an option begins
        return f"{scheme}{slashes}..."
    return f"{scheme}{slashes}{where.rpartition('@')[2]}"
