"""
A node by the URL of its database.

Its name is that of the database and of its table: whoever comes by another way, as through a
pooler, has the same node.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import redis

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.database.store import Broken, Busy
from celery_redlock.lock.nodes.bounded import bounded
from celery_redlock.lock.nodes.urls import FILES, FIXED, hide_password, scheme_of

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

    from celery_redlock.lock.database.store import Store

__all__ = ["DatabaseAddress"]

#: What is ours of a URL's options, and what each may be.
OURS = {
    "schema": re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}"),
    "table": re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,52}"),
    "wake": re.compile("poll|notify"),
    "commit": re.compile("durable|async"),
}
MEANT = {
    "schema": "a name of letters, digits, _ and -",
    "table": "a name of letters, digits and _",
    "wake": "'poll', or 'notify' for the default",
    "commit": "'async', or 'durable' for the default",
}
#: Each step of connecting, and an exchange, may take so long [s].
TIMEOUT = 5.0
TABLE = "celery_redlock"


class DatabaseAddress:
    """A node by URL: ``postgresql://`` or ``sqlite:///``."""

    def __init__(self, url: str) -> None:
        self._url, options = without_options(url)
        self._table = options.get("table", TABLE)
        self._schema = options.get("schema", "")
        self._is_polled = options.get("wake") == "poll"
        self._is_async = options.get("commit") == "async"
        self._dialect = dialect_of(url)
        connection: Any = import_module("celery_redlock.lock.database.connection")
        self._kind: Any = bounded(connection.DatabaseConnection)
        try:
            where = self._dialect.name_of(self._url)
        except ValueError as error:
            msg = f"redlock_nodes: {hide_password(url)!r} is no URL of a database: {error}"
            raise ConfigurationError(msg) from None
        table = f"{self._schema}.{self._table}" if self._schema else self._table
        self.label = f"{where}/{table}"

    def connection(self) -> AbstractConnection:
        connection = self._kind(self.store, socket_timeout=TIMEOUT, client_name=None, **FIXED)
        return cast("AbstractConnection", connection)

    def store(self) -> Store:
        """Connect to the database; raises `Broken`, or ConfigurationError without our tables."""
        return cast(
            "Store",
            self._dialect.connected(
                self._url,
                self._schema,
                self._table,
                is_polled=self._is_polled,
                is_async=self._is_async,
            ),
        )

    def tables(self) -> list[str]:
        """Return the statements that make our tables."""
        return cast("list[str]", self._dialect.tables(self._schema, self._table))

    def make_tables(self) -> bool:
        """Return whether our tables were missing, and are made; ConnectionError if they cannot."""
        try:
            return bool(self._dialect.make_tables(self._url, self._schema, self._table))
        except (Broken, Busy) as error:
            raise redis.ConnectionError(str(error)) from None

    def places(self) -> list[str]:
        return [""]  # one database, whichever way leads there

    def is_current(self, connection: AbstractConnection) -> bool:  # noqa: ARG002  as of any node
        return True


def dialect_of(url: str) -> Any:
    """Return the module for the database at *url*; raises ConfigurationError without its extra."""
    name = "sqlite" if url.lower().startswith("sqlite") else "postgresql"
    try:
        import_module("celery_redlock.keyspace.lua")
        return import_module(f"celery_redlock.lock.database.{name}")
    except ImportError as error:
        msg = (
            f"redlock_nodes: {hide_password(url)!r} needs a package that is missing "
            f"({error.name}): pip install 'celery-redlock[{name}]'"
        )
        raise ConfigurationError(msg) from None


def without_options(url: str) -> tuple[str, dict[str, str]]:
    """Return *url* without the options that are ours, and these; raises ConfigurationError."""
    where, _, query = url.partition("?")
    rest, ours = [], {}
    for option in query.split("&"):
        name, _, value = option.partition("=")
        if name not in OURS or (name == "schema" and scheme_of(url) in FILES):
            rest.append(option)  # as it is: what "+" and "%" are to libpq is not for us to say
        elif OURS[name].fullmatch(unquote(value)):
            ours[name] = unquote(value)
        else:
            shown = hide_password(url) if "@" in value else repr(unquote(value))
            msg = f"redlock_nodes: {name}= of a database must be {MEANT[name]}, got {shown}"
            raise ConfigurationError(msg)
    return where + (f"?{'&'.join(rest)}" if any(rest) else ""), ours
