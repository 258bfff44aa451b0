"""
Metrics over HTTP, from a worker's own process: the setting ``redlock_prometheus_listen``.

Children of a prefork pool count in files that this process adds up. Other pools count in this
process. Beats and programs that publish serve theirs as with any use of prometheus_client.
"""

from __future__ import annotations

import importlib
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from celery import bootsteps, signals

from celery_redlock.errors import ConfigurationError
from celery_redlock.log import get_logger
from celery_redlock.mutex import new_mutex
from celery_redlock.nodewatch import forks_held_off
from celery_redlock.observers import prometheus_files as files
from celery_redlock.plugin import Plugin, locking, plugin_for
from celery_redlock.settings import host_and_port
from celery_redlock.worker_start import CheckLocks

__all__ = ["ServeMetrics"]

logger = get_logger(__name__)

SETTING = "redlock_prometheus_listen"
#: Held while a thread of ours collects. Not `forks_held_off`: a scrape need not wait for a look.
collecting = new_mutex()


class ServeMetrics(bootsteps.StartStopStep):
    """Has a worker serve its metrics from when its pool has started until that has ended."""

    requires = ("celery.worker.components:Pool", CheckLocks)

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._server: Any = None
        self.enabled = False
        if locking.disabled:
            return
        plugin = plugin_for(worker.app)
        try:
            self.enabled = is_wanted(plugin)
        except ConfigurationError as error:
            logger.critical("celery-redlock: %s", error)
            raise
        if "prometheus" in plugin.settings.observers:
            mind_forks()

    def start(self, worker: Any) -> None:
        """Begin to serve; a worker that cannot works all the same."""
        listen = plugin_for(worker.app).settings.prometheus_listen
        try:
            self._server = serve(*host_and_port(listen))
        except OSError as error:
            logger.error(  # noqa: TRY400  where it came from is of no interest
                "No metrics: %s is %r: %s; each worker on a machine needs a port of its own",
                SETTING,
                listen,
                error.strerror or error,
            )
            return
        _servers.append(self._server)
        # Not by `stop`: the pool has yet to end its tasks then, which may take long.
        signals.worker_shutdown.connect(self._end, sender=worker)
        logger.info("Metrics at http://%s:%d/metrics", *self._server.server_address[:2])

    def _end(self, **_: Any) -> None:
        _servers.remove(self._server)
        self._server.shutdown()
        self._server.server_close()


def is_wanted(plugin: Plugin) -> bool:
    """
    Return whether metrics are to be served here.

    Raises:
        ConfigurationError: They are, but nothing counts, or children would count for themselves.
    """
    settings = plugin.settings
    if settings.prometheus_listen is None:
        return False
    if "prometheus" not in settings.observers:
        msg = (
            f"{SETTING} is set, but nothing counts: add 'prometheus' to redlock_observers, "
            f"e.g. {[*settings.observers, 'prometheus']!r}"
        )
        raise ConfigurationError(msg)
    if plugin.has_children and not counts_in_files():
        msg = (
            f"{SETTING}: the children of this worker would count each for itself, because "
            "something counts with prometheus_client already; set "
            f"{files.VARIABLE} to an empty directory in the environment that the worker starts in"
        )
        raise ConfigurationError(msg)
    return True


def counts_in_files() -> bool:
    """Return whether prometheus_client counts in files, as it decided when it was imported."""
    from prometheus_client import values  # noqa: PLC0415  an extra

    return bool(getattr(values.ValueClass, "_multiprocess", False))


def serve(host: str, port: int) -> Any:
    """Serve metrics in threads, and return the server; raises OSError."""
    from prometheus_client import REGISTRY, CollectorRegistry, start_http_server  # noqa: PLC0415

    registry, where = REGISTRY, files.directory()
    if counts_in_files() and where is not None:
        registry = CollectorRegistry()
        registry.register(AllProcesses(where))
    server, _thread = start_http_server(port, host, registry)
    return server


class AllProcesses:
    """What all processes have counted in the files of one directory."""

    def __init__(self, where: Path) -> None:
        self._where = where

    def collect(self) -> Iterable[Any]:
        """Return the metrics; not while this process forks, nor twice at once."""
        with collecting:
            files.tidy(self._where)
            try:
                return self._added_up()
            except (OSError, struct.error):  # a child was about to make a file
                return self._added_up()

    def _added_up(self) -> list[Any]:
        multiprocess = importlib.import_module("prometheus_client.multiprocess")
        return list(multiprocess.MultiProcessCollector(None, str(self._where)).collect())


_servers: list[Any] = []
_forks_minded = False


def mind_forks() -> None:
    """Have no child forked while a thread counts or collects, nor keep our port open."""
    global _forks_minded  # noqa: PLW0603  such a hook stays for the life of the process
    from celery_redlock.observers.prometheus import counting  # noqa: PLC0415  an extra

    if _forks_minded or not hasattr(os, "register_at_fork"):
        return
    _forks_minded = True
    # In the order in which `NodeWatch` takes them: it counts while it holds forks off.
    held = (forks_held_off, collecting, counting)

    def take() -> None:
        for lock in held:
            lock.acquire()

    def give_back() -> None:
        for lock in reversed(held):
            lock.release()

    def in_child() -> None:
        give_back()
        for server in _servers:  # the port would be taken until the last child has ended
            server.socket.close()
        _servers.clear()

    os.register_at_fork(before=take, after_in_parent=give_back, after_in_child=in_child)
