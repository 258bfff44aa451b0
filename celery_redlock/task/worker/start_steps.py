"""Steps of a worker's start: check our part of the configuration, and look for deaths."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from celery import bootsteps
from kombu.utils.imports import symbol_by_name

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.nodes.address import shown
from celery_redlock.plugin import locking, plugin_for
from celery_redlock.process.log import get_logger
from celery_redlock.words import counted

__all__ = ["LOOK_FOR_DEATHS", "CheckLocks", "NoteDeaths", "start_line"]

logger = get_logger(__name__)

#: How often a worker looks for children that have died [s].
LOOK_FOR_DEATHS = 0.25
#: How many tasks are named at the start.
NAMED = 5
#: The pool whose tasks run in children; by its name, as only a worker needs it.
PREFORK = "celery.concurrency.prefork:TaskPool"


class CheckLocks(bootsteps.Step):
    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        load_inspect_commands()
        if locking.disabled:
            return
        plugin = plugin_for(worker.app)
        plugin.speaks_of_nodes = False
        plugin.has_children = issubclass(worker.pool_cls, symbol_by_name(PREFORK))
        plugin.sends_events = bool(getattr(worker, "task_events", False))
        worker.app.conf.worker_send_task_events = plugin.sends_events  # goes to its children
        try:
            locked = plugin.check()
        except ConfigurationError as error:
            logger.critical("celery-redlock: %s", error)
            raise
        logger.info("%s", start_line(locked, [shown(node) for node in plugin.settings.nodes]))


def start_line(tasks: Sequence[str], nodes: Sequence[str]) -> str:
    """Return which *tasks* take a lock, on which *nodes*, and how many of these may be away."""
    if not tasks:
        return "redlock: no task takes a lock"
    who = f"{counted(len(tasks), 'task')} {'takes' if len(tasks) == 1 else 'take'} a lock"
    how = f"{quorum(len(nodes))} of {len(nodes)} nodes suffice"
    if len(nodes) == 1:
        how = "one node: no lock while it is away"
    names = ", ".join(sorted(tasks)[:NAMED])
    more = f" and {len(tasks) - NAMED:,} more" if len(tasks) > NAMED else ""
    return f"redlock: {who}, on {', '.join(nodes)} ({how}): {names}{more}"


class NoteDeaths(bootsteps.StartStopStep):
    """
    Has a worker look for children that have died more often than Celery does.

    Celery learns of a death from a pipe that closes a moment before the process can be waited
    for. When it looks too early, it looks again with its timer, after up to five seconds.
    Until then the task is not lost, not put back, and its lock not released.
    """

    def register_with_event_loop(self, worker: Any, hub: Any) -> None:
        """Called by Celery with each new connection to the broker."""
        look = getattr(worker.pool, "maintain_pool", None)
        if plugin_for(worker.app).has_children and look is not None:
            hub.call_repeatedly(LOOK_FOR_DEATHS, look)


def load_inspect_commands() -> None:
    """
    Have this process know our commands of ``celery inspect``.

    They come with the plug-in of the ``celery`` command, which a worker has loaded that was
    started by that command, but not one that a program started.
    """
    for command in entry_points(group="celery.commands", name="redlock"):
        command.load()
