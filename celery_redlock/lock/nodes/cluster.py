"""
A Redis Cluster as one node: the hash tag of our keys, and the server that has them.

All our keys on a cluster share a hash tag, so that they are in one slot, on one master. Any
server of the cluster tells which one that is: it sends who asks there (MOVED). So nothing of
the cluster is known here but where to ask first, and no command is needed that locks do not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import urlsplit, urlunsplit

import redis
from redis.exceptions import AskError, MovedError

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.nodes.bounded import bounded
from celery_redlock.lock.nodes.urls import BadUrl, hide_password, pool_of, why_refused
from celery_redlock.lock.records import Keys
from celery_redlock.lock.rules import Rules
from celery_redlock.process.log import cut

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["ClusterAddress", "hash_tag", "is_cluster", "with_hash_tag"]

#: Scheme of a cluster -> that of each of its servers.
SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
#: How often a server may send us on to another, until one has our keys.
MOST_MOVES = 5
LONGEST_HOST = 253
LARGEST_PORT = 65535
#: How much is shown of why a server does not answer [bytes].
SHOWN = 200


class Place(NamedTuple):
    host: str
    port: int


class ClusterAddress:
    """
    A node by some servers of its cluster: ``redis+cluster://host:port,host:port/``.

    Login and options are those of one server's URL, for all of them. The first host is the name
    of the node. *prefix* is that of our keys, with a hash tag.
    """

    def __init__(self, url: str, prefix: str) -> None:
        try:
            self._pool, self._seeds = pool_and_seeds(url)
        except (ValueError, TypeError) as error:
            why = why_refused(url, error)
            msg = f"redlock_nodes: {hide_password(url)!r} is not a URL of a Redis Cluster{why}"
            raise ConfigurationError(msg) from None
        host, port = self._seeds[0]
        self.label = f"{'127.0.0.1' if host == 'localhost' else host}:{port}@cluster"
        self._key = Keys.of(prefix, "").boot
        self._found: Place | None = None

    def connection(self) -> AbstractConnection:
        """Return a connection to the master that has our keys; whoever had them is asked first."""
        problems = []
        for place in dict.fromkeys((self._found or self._seeds[0], *self._seeds)):
            try:
                return self._follow(place)
            except (redis.RedisError, OSError) as error:
                problems.append(f"{place.host}:{place.port} - {cut(str(error), SHOWN)}")
        msg = f"no server of the cluster has our keys, or tells who does: {', '.join(problems)}"
        raise redis.ConnectionError(msg)

    def places(self) -> list[str]:
        return [""]  # one server has our keys, as the cluster says

    def is_current(self, connection: AbstractConnection) -> bool:
        where = cast("Any", connection)
        return self._found in (None, Place(where.host, where.port))

    def _follow(self, place: Place) -> AbstractConnection:
        """Return a connection to the master, to which the server at *place* may send us."""
        for _ in range(MOST_MOVES):
            connection = self._connection(place)
            try:
                connection.connect()
                moved = self._moved(connection, place)
            except BaseException:
                connection.disconnect()
                raise
            if moved is None:
                self._found = place
                return connection
            connection.disconnect()
            place = moved
        msg = "each server sends us to another"
        raise redis.ConnectionError(msg)

    def _moved(self, connection: AbstractConnection, asked: Place) -> Place | None:
        """Return where the server that was *asked* sends us; None if it has our keys itself."""
        try:
            connection.send_command("EXISTS", self._key)
            answer = connection.read_response(disable_decoding=True)
            if answer not in (0, 1):
                msg = "answers, but not as a server of a cluster does"
                raise redis.ConnectionError(msg)
        except MovedError as error:
            return place_in(str(error), asked)
        except AskError:  # it is about to give them away, key by key, and has them until then
            pass
        return None

    def _connection(self, place: Place) -> AbstractConnection:
        options = {**self._pool.connection_kwargs, "host": place.host, "port": place.port}
        connection = bounded(self._pool.connection_class)(**options)
        connection.in_cluster = True
        return cast("AbstractConnection", connection)


def pool_and_seeds(url: str) -> tuple[redis.ConnectionPool, list[Place]]:
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    if "," in login.partition("@")[2]:
        raise BadUrl("the login is for all servers, and stands before the first alone")
    places = [login + at + host.strip() for host in hosts.split(",")]
    pools = [
        pool_of(urlunsplit(parts._replace(scheme=SCHEMES[parts.scheme], netloc=place)))
        for place in places
    ]
    if pools[0].connection_kwargs.get("db"):
        raise BadUrl("our keys on a cluster are in its database 0")
    kwargs = [pool.connection_kwargs for pool in pools]
    return pools[0], [Place(it.get("host", "localhost"), it.get("port", 6379)) for it in kwargs]


def place_in(moved: str, asked: Place) -> Place:
    """Return the server that MOVED names; without a host, it is on that of who was *asked*."""
    host, colon, port = moved.rpartition(" ")[2].rpartition(":")
    is_host = len(host) <= LONGEST_HOST and host.isascii() and host.isprintable() and host != "?"
    if not (colon and is_host and port.isdecimal() and len(port) <= len(str(LARGEST_PORT))):
        msg = "sends us to a server, but does not say which"
        raise redis.ConnectionError(msg)
    return Place(host or asked.host, min(int(port), LARGEST_PORT))


# --- keys ----------------------------------------------------------------------------------


def is_cluster(node: object) -> bool:
    return isinstance(node, str) and node.partition("://")[0].lower() in SCHEMES


def with_hash_tag(rules: Rules, nodes: Sequence[object]) -> Rules:
    """Return *rules* by which all keys on *nodes* are in one slot, should these be clusters."""
    if not any(is_cluster(node) for node in nodes) or hash_tag(rules.prefix):
        return rules
    prefix = f"{{{rules.prefix}}}"
    if not hash_tag(prefix):
        msg = f"redlock_prefix must not begin with '}}' on a cluster, got {rules.prefix!r}"
        raise ConfigurationError(msg)
    return replace(rules, prefix=prefix)


def hash_tag(key: str) -> str:
    """Return the part of *key* that says in which slot it is; empty if all of it does."""
    begin = key.find("{")
    end = key.find("}", begin + 1)
    return key[begin + 1 : end] if 0 <= begin < end else ""
