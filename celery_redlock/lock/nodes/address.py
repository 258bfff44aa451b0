"""Addresses of nodes: URLs, Sentinel services and clusters, turned into redis-py connections."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable
from urllib.parse import urlsplit

import redis
from redis.sentinel import Sentinel

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.nodes.bounded import bounded
from celery_redlock.lock.nodes.cluster import ClusterAddress, is_cluster
from celery_redlock.lock.nodes.urls import (
    FIXED,
    OF_TCP,
    OPTIONS,
    hide_password,
    is_database,
    other_scheme,
    pool_of,
    why_refused,
)
from celery_redlock.lock.records import is_text

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["Address", "WithTables", "addresses_of", "shown"]


#: Who knows databases: imported where one is named, as its packages are extras.
DATABASE = "celery_redlock.lock.database.address"


class Address(Protocol):
    """Where one node is: by URL, or by name."""

    label: str  # its name in errors and logs: host, port and database, no password

    def connection(self) -> AbstractConnection:
        """Return a connection, perhaps not connected yet, that never retries by itself."""

    def places(self) -> list[str]:
        """Return the network addresses of its host, one if it has no name; OSError if unknown."""

    def is_current(self, connection: AbstractConnection) -> bool:
        """Return whether *connection* is to the server that the node was when last connected."""


@runtime_checkable
class WithTables(Protocol):
    """An address whose node keeps our keys in tables."""

    label: str

    def tables(self) -> list[str]:
        """Return the statements that make them; they do no harm where these are."""

    def make_tables(self) -> bool:
        """Return whether they were missing, and are made; ConnectionError if they cannot be."""


class UrlAddress:
    """A node by URL: ``redis://``, ``rediss://`` or ``unix://``, all that redis-py understands."""

    def __init__(self, url: str) -> None:
        try:
            self._pool = pool_of(url)
        except (ValueError, TypeError) as error:
            why = other_scheme(url) or why_refused(url, error)
            msg = f"redlock_nodes: {hide_password(url)!r} is not a URL of a Redis server{why}"
            raise ConfigurationError(msg) from None
        self.label = label_of(self._pool.connection_kwargs)

    def connection(self) -> AbstractConnection:
        # Not from the pool, which counts: redis-py 8 makes a hundred and then no more.
        connection = bounded(self._pool.connection_class)(**self._pool.connection_kwargs)
        return cast("AbstractConnection", connection)

    def places(self) -> list[str]:
        where = self._pool.connection_kwargs
        return [""] if "path" in where else places_of(where.get("host"), where.get("port"))

    def is_current(self, connection: AbstractConnection) -> bool:  # noqa: ARG002  there is one server
        return True


class SentinelAddress:
    """
    A node by name: ``{"sentinels": ["redis://host:26379", ...], "service": "lock-1"}``.

    All other entries are connection options of redis-py for the master, ``"ssl": True`` among
    them. What the Sentinels want is in their own URLs: ``rediss://``, a password, ``?ssl_...``.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        options = dict(settings)
        sentinels, service = options.pop("sentinels", None), options.pop("service", None)
        is_list = isinstance(sentinels, Sequence) and not isinstance(sentinels, (str, bytes))
        if not (sentinels and is_list) or not isinstance(service, str):
            msg = (
                'redlock_nodes: a Sentinel node is {"sentinels": ["redis://host:26379", ...], '
                '"service": "name"} with further connection options of redis-py if need be'
            )
            raise ConfigurationError(msg)
        self.label = f"{service}@sentinel/{options.get('db', 0)}"
        is_tls = options.pop("ssl", False)
        self._kind = bounded(redis.SSLConnection if is_tls else redis.Connection)
        self._options = {**OPTIONS, **OF_TCP, **options}
        self._service = service
        self._master: tuple[str, int] | None = None
        self._sentinels: list[redis.Redis] = [SentinelClient(s) for s in sentinels]
        try:
            self._connection("", 0)
        except (ValueError, TypeError, redis.RedisError) as error:  # its text has names, no values
            msg = f"redlock_nodes: {self.label} has options that redis-py does not take: {error}"
            raise ConfigurationError(msg) from None

    def connection(self) -> AbstractConnection:
        asked = Sentinel([])
        asked.sentinels = list(self._sentinels)  # it moves the one that knew to the front
        try:
            host, port = asked.discover_master(self._service)
        finally:
            self._sentinels = asked.sentinels
            for sentinel in self._sentinels:
                sentinel.close()
        self._master = (host, port)
        return self._connection(host, port)

    def places(self) -> list[str]:
        return [""]  # the master is one server, as the Sentinels say

    def is_current(self, connection: AbstractConnection) -> bool:
        where = cast("Any", connection)
        return self._master in (None, (where.host, where.port))

    def _connection(self, host: str, port: int) -> AbstractConnection:
        where = {"host": host, "port": port}
        return cast("AbstractConnection", self._kind(**{**self._options, **where, **FIXED}))


class NoAnswer(redis.ConnectionError):
    """A Sentinel did not answer; redis-py asks the next one, and shows why by `repr`."""

    __repr__ = redis.ConnectionError.__str__


class SentinelClient(redis.Redis):
    """A Sentinel; its text, which stands in redis-py's errors, has no password."""

    def __init__(self, sentinel: object) -> None:
        host, port = host_and_port(sentinel)
        self._label = f"{host}:{port}"
        url = str(sentinel) if isinstance(sentinel, str) and "//" in sentinel else "redis://"
        try:
            pool = pool_of(url)
        except (ValueError, TypeError):
            raise not_a_sentinel(sentinel) from None
        pool.connection_kwargs.update(host=host, port=port, db=0)
        # All that it is asked on a connection is one exchange, as it is asked once.
        pool.connection_class = bounded(pool.connection_class)
        super().__init__(connection_pool=pool)

    def __repr__(self) -> str:
        return self._label

    def sentinel_masters(self, *args: Any, **kwargs: Any) -> Any:
        try:
            masters: Any = super().sentinel_masters(*args, **kwargs)
            for state in masters.values():
                check_master(state)
        except redis.RedisError as error:
            raise NoAnswer(str(error)) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            msg = "answers, but not as a Sentinel does"
            raise NoAnswer(msg) from None
        return masters

    def close(self) -> None:
        self.connection_pool.disconnect()


def check_master(state: Mapping[str, Any]) -> None:
    kinds = {"ip": str, "port": int, "num-other-sentinels": int}
    if not all(isinstance(state[field], kind) for field, kind in kinds.items()):
        raise TypeError


def addresses_of(nodes: object, prefix: str = "") -> tuple[Address, ...]:
    """Return where *nodes* are; whoever connects to them says what our keys there begin with."""
    if isinstance(nodes, (str, Mapping)) or not isinstance(nodes, Sequence) or not nodes:
        got = "an empty one" if isinstance(nodes, (list, tuple)) else type(nodes).__name__
        msg = f"redlock_nodes must be a list of URLs of Redis servers, got {got}"
        raise ConfigurationError(msg)
    if len({is_cluster(node) for node in nodes}) > 1:
        msg = (
            "redlock_nodes has clusters and other servers: keys on a cluster have names of their "
            "own, so name one cluster, or servers that are none"
        )
        raise ConfigurationError(msg)
    if len(nodes) > 1 and any(map(is_database, nodes)):
        msg = (
            "redlock_nodes has a database beside other nodes: a database is the only node, as its "
            "locks outlive a restart and those of others do not; name one, and nothing else"
        )
        raise ConfigurationError(msg)
    addresses = tuple(address_of(node, prefix) for node in nodes)
    labels = [address.label for address in addresses]
    for label in labels:
        if not is_text(label):
            msg = f"redlock_nodes: {label!r} has characters that are no text"
            raise ConfigurationError(msg)
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        msg = (
            f"redlock_nodes names {', '.join(twice)} more than once; "
            "every node must be a server of its own"
        )
        raise ConfigurationError(msg)
    if len(addresses) % 2 == 0:
        msg = (
            f"redlock_nodes must be an odd number of servers, got {len(addresses)}: an even one "
            f"survives no more failures than {len(addresses) - 1}; add one or take one away"
        )
        raise ConfigurationError(msg)
    return addresses


def places_of(host: str | None, port: int | None) -> list[str]:
    found = socket.getaddrinfo(host or "localhost", port or 6379, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


def address_of(node: object, prefix: str = "") -> Address:
    if is_database(node):
        found: Address = import_module(DATABASE).DatabaseAddress(node)
        return found
    if isinstance(node, str):
        return ClusterAddress(node, prefix) if is_cluster(node) else UrlAddress(node)
    if isinstance(node, Mapping):
        return SentinelAddress(node)
    msg = f"redlock_nodes: a node is a URL or a Sentinel service, got {type(node).__name__}"
    raise ConfigurationError(msg)


def label_of(kwargs: Mapping[str, Any]) -> str:
    database = kwargs.get("db") or 0
    if "path" in kwargs:
        return f"unix:{kwargs['path']}/{database}"
    host = kwargs.get("host", "localhost")
    host = "127.0.0.1" if host == "localhost" else host
    return f"{host}:{kwargs.get('port', 6379)}/{database}"


def host_and_port(sentinel: object) -> tuple[str, int]:
    try:
        if isinstance(sentinel, (tuple, list)):
            host, port = sentinel
            return str(host), int(port)
        where = urlsplit(str(sentinel) if "//" in str(sentinel) else f"//{sentinel}")
        if where.hostname:
            return where.hostname, where.port or 26379
    except (ArithmeticError, ValueError, TypeError):  # its text may quote a piece of a password
        pass
    raise not_a_sentinel(sentinel)


def not_a_sentinel(sentinel: object) -> ConfigurationError:
    text = hide_password(str(sentinel))
    return ConfigurationError(f"redlock_nodes: {text!r} is not a Sentinel, like 'host:26379'")


def shown(node: object) -> str:
    """Return a node of ``redlock_nodes`` as it was written there, without possible secrets."""
    return hide_password(node) if isinstance(node, str) else address_of(node).label
