"""
Objects that an app has once per process: settings, locks, observers; and Celery's signals.

Everything is built on first use, because an app may be configured long after its tasks are
declared; a worker builds it at its start, so that what is wrong is said there.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from celery import signals

from celery_redlock.configuration import cache_databases, node_of, redlock_conf
from celery_redlock.errors import ConfigurationError
from celery_redlock.events import Event, LockEvent, Observer, tell
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.observers.journal import JournalObserver
from celery_redlock.observers.names import observer_of
from celery_redlock.process.deferral import defer_signals, pause
from celery_redlock.process.ending import end
from celery_redlock.process.forks import around_fork
from celery_redlock.process.log import get_logger
from celery_redlock.process.mutex import new_mutex

# With redis, and not at the first lock: a fork meanwhile would leave the child half an import, and
# the lock of its module held without end.
from celery_redlock.reading import health
from celery_redlock.settings import Settings, check_key_headers, report_prefix
from celery_redlock.unique.reservations import Reservations

__all__ = ["Plugin", "Servers", "locking", "plugin_for"]

logger = get_logger(__name__)
_plugins: weakref.WeakKeyDictionary[Any, Plugin] = weakref.WeakKeyDictionary()
_building = new_mutex()


class Locking:
    """How many times locks are disabled now; see `celery_redlock.testing.locks_disabled`."""

    disabled = 0


locking = Locking()


class Servers(Protocol):
    """Servers that tests use in place of an app's lock nodes; *urls* as in ``redlock_nodes``."""

    urls: Sequence[str]

    def locks_on(
        self,
        nodes: Sequence[Any],
        rules: Rules,
        observers: Iterable[Observer],
        sleep: Callable[[float], None],
    ) -> Redlock:
        """Return locks on *nodes*; as `Redlock` itself."""


def plugin_for(app: Any) -> Plugin:
    plugin = _plugins.get(app)
    if plugin is None:
        with _building:
            plugin = _plugins.setdefault(app, Plugin(app))
    return plugin


class Plugin:
    """
    The settings, locks and observers of one app in one process.

    Attributes:
        has_children: Whether this is the parent process of a worker whose tasks run in children.
        node_watch: The `NodeWatch` of a worker; None elsewhere.
        sends_events: Whether this is a worker that was started to send Celery events (``-E``).
        speaks_of_nodes: Whether the log of this process reports nodes that go and come. A worker's
            main process does from its first look at them on (`NodeWatch`), its children do not.
        servers: In place of the app's lock nodes, for tests; see `on_servers`.
    """

    def __init__(self, app: Any) -> None:
        self._app = weakref.ref(app)
        self._conf: dict[str, Any] = {}
        self._settings: Settings | None = None
        self._locks: Redlock | None = None
        self._reports: Redlock | None = None
        self._observers: tuple[Observer, ...] | None = None
        self._check_tasks: Callable[[Any], Sequence[str]] | None = None
        self.has_children = self.sends_events = False
        self.node_watch: Any = None
        self.speaks_of_nodes = True
        self.servers: Servers | None = None

    @property
    def app(self) -> Any:
        return self._app()

    @property
    def settings(self) -> Settings:
        if self._settings is None:
            self._conf = self._read_conf()
            self._settings = Settings.from_conf(self._conf, fallback=node_of(self.app.conf))
        return self._settings

    @property
    def key_headers(self) -> tuple[str, ...]:
        """Which headers are part of every default lock name; asks no more of the settings."""
        if self._settings is not None:
            return self._settings.key_headers
        return check_key_headers(self.app.conf.get("redlock_key_headers") or ())

    def refresh(self) -> None:
        """Read the settings again if they have changed, as those of an app under test may."""
        if self._settings is not None and self._read_conf() != self._conf:
            self._start_over()

    def _read_conf(self) -> dict[str, Any]:
        conf = redlock_conf(self.app)
        if self.servers is None:
            return conf
        login = dict.fromkeys(("redlock_username", "redlock_password"))  # is for other servers
        return {**conf, **login, "redlock_nodes": self.servers.urls}

    def _start_over(self) -> None:
        with _building:
            closing: tuple[Any, ...] = (self._locks, *(self._observers or ()))
            self._locks = self._reports = self._settings = self._observers = None
        for one in closing:
            if hasattr(one, "close"):
                one.close()

    @property
    def observers(self) -> tuple[Observer, ...]:
        if self._observers is None:
            with _building:
                if self._observers is None:
                    self._observers = tuple(observer_of(it, self) for it in self.settings.observers)
        return self._observers

    def notify(self, event: Event) -> None:
        """
        Notify all observers, whatever any of them raises.

        A soft time limit that arrives meanwhile takes effect right after: raised in an observer,
        it would count as a failure of that one, and be lost.
        """
        observers = self._observers
        if observers is None and self.app is not None:  # else its settings are gone with it
            observers = self.observers
        if observers:
            with defer_signals():
                tell(observers, event)

    def flush(self) -> None:
        """Let observers send what they have gathered; never fails. For the end of a process."""
        try:
            if not (isinstance(self._locks, Redlock) and self._locks.fanout.is_connected):
                return
            # Report mode waits for a quorum alone: to the others nothing was sent as yet.
            self._locks.fanout.settle_all(self._locks.rules.node_timeout)
            for observer in self._observers or ():
                if isinstance(observer, JournalObserver):
                    observer.flush()
        except Exception:  # the end of a process must go on
            logger.exception("The last records of this process could not be written")

    @property
    def locks(self) -> Redlock:
        if self._locks is None:
            with _building:  # two would not know each other's leases
                if self._locks is None:
                    nodes, rules = self.settings.nodes, self.settings.rules
                    make = Redlock if self.servers is None else self.servers.locks_on
                    self._locks = make(nodes, rules, [self.notify], sleep=pause)
        return self._locks

    @property
    def reports(self) -> Redlock:
        """
        Locks of tasks in report mode, under names of their own: no enforced lock meets them.

        Over the connections of `locks`; events have ``report`` set. No node is kept from voting by
        its restart, as nobody relies on a vote.
        """
        if self._reports is None:
            with _building:
                if self._reports is None:
                    prefix = report_prefix(self.settings.rules.prefix)
                    rules = replace(self.settings.rules, prefix=prefix, restart_guard=False)
                    self._reports = self.locks.under(rules, [self._notify_of_report])
        return self._reports

    def _notify_of_report(self, event: Event) -> None:
        self.notify(replace(event, report=True) if isinstance(event, LockEvent) else event)

    def locks_for(self, *, report: bool) -> Redlock:
        return self.reports if report else self.locks

    def reservations_for(self, *, report: bool) -> Reservations:
        return Reservations.on(self.locks_for(report=report))

    @contextlib.contextmanager
    def on_servers(self, servers: Servers) -> Iterator[None]:
        """Have the app's locks on *servers*, whatever its settings; for tests."""
        before = self.servers
        self._move_to(servers)
        try:
            yield
        finally:
            self._move_to(before)

    def _move_to(self, servers: Servers | None) -> None:
        self.flush()
        try:
            self._start_over()
        finally:  # an observer of the user's may fail to close
            self.servers = servers

    def install(
        self,
        check_tasks: Callable[[Any], Sequence[str]],
        worker: Sequence[Any],
        consumer: Sequence[Any],
    ) -> None:
        """Let a worker of this app check everything at its start, and take more steps."""
        with _building:
            if self._check_tasks is None:
                self.app.steps["worker"].update(worker)
                self.app.steps["consumer"].update(consumer)
                self._check_tasks = check_tasks

    def check(self) -> Sequence[str]:
        """Check everything as a worker does at its start; return the tasks that take a lock."""
        settings, _ = self.settings, self.observers
        locked = self._check_tasks(self.app) if self._check_tasks is not None else ()
        if settings.mode == "report":
            logger.warning(
                "redlock_mode is 'report': every task runs whether or not its lock is held; what "
                "would have been refused is reported"
            )
        try:
            silent = health.check(self.locks)
        except ConfigurationError as error:
            if settings.mode != "report":
                raise
            silent = {}  # nothing rests on what they say, and production goes on
            logger.critical("celery-redlock: nothing is reported: %s", error)
        for node, problem in silent.items():
            logger.warning("Lock node %s does not answer: %s", node, problem)
        for risk in health.risks(self.locks, cache_databases()):
            logger.warning("%s", risk)
        self.locks.close()  # the processes that run tasks connect by themselves
        return locked


def _forget_parent() -> None:
    global _building  # noqa: PLW0603  a lock that nobody releases can only be replaced
    _building = new_mutex()


around_fork("plugin", _forget_parent)


@signals.worker_process_init.connect(weak=False)
def _in_child(**_: Any) -> None:
    """A child that was spawned, not forked, has nothing of its parent but the app's settings."""
    for plugin in list(_plugins.values()):
        plugin.speaks_of_nodes = False
        if plugin.app is not None:
            plugin.sends_events = bool(plugin.app.conf.worker_send_task_events)


@atexit.register
@signals.worker_shutdown.connect(weak=False)
@signals.worker_process_shutdown.connect(weak=False)
def _before_end(**_: Any) -> None:
    for plugin in list(_plugins.values()):
        plugin.flush()
    end()
