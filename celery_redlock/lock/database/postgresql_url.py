"""Connections to PostgreSQL by URL, as libpq has them, and the name of the database there."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from celery_redlock.lock.database.store import Broken

__all__ = ["dialled", "name_of"]

BAD_LOGIN = "in its user and password, write @ / ? % as %40 %2F %3F %25"
#: Of a connection, unless the URL says something else [s, and ms for the last].
OPTIONS = {
    "application_name": "celery-redlock",
    "connect_timeout": 3,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


def name_of(url: str) -> str:
    """Return the name of the database at *url*, without how to get there; ValueError if none."""
    where, _, options = url.partition("://")[2].partition("?")
    if where.count("@") > ("@" in where.partition("/")[0]):
        raise ValueError(BAD_LOGIN)
    try:
        words = conninfo_to_dict(plain(url))
    except psycopg.Error as error:
        raise ValueError(without_url(str(error), options)) from None
    name = words.get("dbname") or words.get("service") or words.get("user") or ""
    return f"postgresql/{name}" if name else "postgresql"


def plain(url: str) -> str:
    return f"postgresql://{url.partition('://')[2]}"


def without_url(text: str, options: str) -> str:
    """Return the first line of an error of libpq's, without what may be a piece of a password."""
    what, quote, piece = (text.splitlines() or [""])[0].partition('"')
    is_name = "URI query parameter" in what and "@" not in options
    return what + quote + piece if is_name else what.rstrip(" :")


def dialled(url: str) -> psycopg.Connection[Any]:
    own = conninfo_to_dict(plain(url))
    words: dict[str, Any] = {name: value for name, value in OPTIONS.items() if name not in own}
    try:
        where = make_conninfo(plain(url), client_encoding="UTF8", **words)
        return psycopg.connect(where, autocommit=True, prepare_threshold=None)
    except psycopg.Error as error:
        raise Broken(" ".join(str(error).split())) from None
