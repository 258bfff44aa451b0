"""Configuration of an app: its ``redlock_*`` settings, and what else may keep its locks."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.nodes.address import UrlAddress
from celery_redlock.settings import KNOWN, PREFIX

__all__ = [
    "cache_databases",
    "cache_urls",
    "first_url",
    "node_of",
    "redis_of",
    "redlock_conf",
    "spelling",
]

#: How Celery writes the URL of a database: as SQLAlchemy does, behind a prefix.
DATABASE = re.compile(r"db\+(postgresql|postgres|sqlite)(?:\+\w+)?://(.*)", re.IGNORECASE)


def redlock_conf(app: Any) -> dict[str, Any]:
    namespace = f"{app.namespace}_" if getattr(app, "namespace", None) else ""
    conf: dict[str, Any] = {}
    for key in list(app.conf):
        name = str(key).lower().removeprefix(namespace.lower())
        if not name.startswith(PREFIX):
            continue
        try:
            conf[name] = app.conf[name]
        except KeyError:
            if name.removeprefix(PREFIX) not in KNOWN:
                continue  # another package's setting in a shared file
            raise ConfigurationError(
                f"{key} is not read by Celery under this name; write {spelling(app, name)}"
            ) from None
    return conf


def spelling(app: Any, setting: str) -> str:
    namespace = getattr(app, "namespace", None)
    return f"{namespace}_{setting.upper()}" if namespace else setting


def node_of(conf: Any) -> str | None:
    """Return what keeps the locks where no setting says it: a server that the app has anyway."""
    redis = redis_of(conf.result_backend, conf.broker_read_url)
    return redis or database_of(conf.result_backend)


def database_of(url: Any) -> str | None:
    """Return a database, as Celery has it for a result backend, as one of our nodes is written."""
    found = DATABASE.fullmatch(first_of(url))
    if found is None:
        return None
    kind, rest = found[1].lower(), found[2]
    if kind == "sqlite":
        path = rest.partition("?")[0]
        # A relative one is another file for whoever works elsewhere.
        return f"sqlite://{quote(path)}" if path.startswith("//") else None
    return f"postgresql://{rest}"


def redis_of(*urls: Any) -> str | None:
    """Return the first of *urls*, as Celery has those of a backend or broker, that is a Redis."""
    for url in urls:
        first = first_url(url)
        if first.startswith(("redis://", "rediss://")):  # redis-py has its own words for Celery's
            return re.sub(r"(?<=ssl_cert_reqs=)(?:CERT_)?(\w+)", lambda m: m[1].lower(), first)
        if first.startswith("redis+socket://"):
            return first.replace("redis+socket://", "unix://", 1).replace("virtual_host=", "db=")
    return None


def cache_urls() -> Iterator[tuple[str, str]]:
    """Yield the caches of Django that are in Redis, if this process has Django: alias and URL."""
    django = sys.modules.get("django.conf")
    if django is None or not django.settings.configured:
        return
    for alias, cache in django.settings.CACHES.items():
        where = cache.get("LOCATION") or ()
        for url in re.split("[;,]", where) if isinstance(where, str) else where:
            found = redis_of(url)
            if found is not None:
                yield f"Django's cache {alias!r}", found


def cache_databases() -> dict[str, str]:
    """Return the databases that ``cache.clear()`` flushes: label -> whose cache it is."""
    found = {}
    for cache, url in cache_urls():
        with contextlib.suppress(ConfigurationError):
            found[UrlAddress(url).label] = cache
    return found


def first_url(url: Any) -> str:
    """The first where there are several to fail over to; "" for None."""
    return first_of(url).split(";")[0]


def first_of(url: Any) -> str:
    """Likewise, but of a database: there a ``;`` is one of a password."""
    first = url[0] if isinstance(url, (list, tuple)) and url else url
    return str(first or "")
