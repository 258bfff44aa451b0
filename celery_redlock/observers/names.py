"""The observers that items of ``redlock_observers`` stand for."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, cast

from kombu.utils.imports import symbol_by_name

from celery_redlock.errors import ConfigurationError
from celery_redlock.events import Observer
from celery_redlock.observers.journal import JournalObserver
from celery_redlock.observers.logging import Log
from celery_redlock.observers.tally import Tally
from celery_redlock.process.log import get_logger
from celery_redlock.reading.journal import Record, write_record
from celery_redlock.reading.tally import Counts, tally_request

__all__ = ["READY", "observer_of"]

logger = get_logger(__name__)


def observer_of(named: Any, plugin: Any) -> Observer:
    """Return the observer of an item of ``redlock_observers``; raises ConfigurationError."""
    if callable(named):
        return cast("Observer", named)
    try:
        found = READY[named](plugin) if named in READY else symbol_by_name(named)
    except ConfigurationError:  # its own word for what it lacks
        raise
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"redlock_observers: {what_is_wrong(named, error)}") from None
    if not callable(found):
        msg = f"redlock_observers: {named!r} is not callable but a {type(found).__name__}"
        raise ConfigurationError(msg)
    return cast("Observer", found)


def what_is_wrong(named: str, error: Exception) -> str:
    if named in EXTRAS:
        missing = getattr(error, "name", None) or error
        return f"{named!r} needs {missing}; pip install 'celery-redlock[{EXTRAS[named]}]'"
    near = difflib.get_close_matches(named, READY, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"ready ones are {', '.join(READY)}"
    return f"there is no {named!r} ({error}); {hint}"


def journal(plugin: Any) -> Observer:
    def write(record: Record) -> None:
        write_record(plugin.locks, record)

    def send(hour: int, task: str, counts: Counts) -> None:
        locks = plugin.locks
        locks.driver.tell(tally_request(locks.rules, hour, task, counts))

    def reaches_all() -> bool:
        return all(node.is_settled for node in plugin.locks.fanout.nodes)

    return JournalObserver(write, Tally(send, reaches_all))


def celery_events(plugin: Any) -> Observer:
    from celery_redlock.observers.celery_events import CeleryEvents  # noqa: PLC0415  in workers alone

    return CeleryEvents(plugin)


def prometheus(plugin: Any) -> Observer:
    try:
        from celery_redlock.observers import prometheus as observer  # noqa: PLC0415  an extra
    except OSError as error:
        msg = f"{FILES}: no metrics can be kept in {error.filename!r} ({error.strerror})"
        raise ConfigurationError(msg) from None
    if plugin.has_children and not observer.COUNTS_IN_FILES:
        logger.warning(
            "Metrics of this worker's children are lost: each counts for itself. Set %s in the "
            "environment that the worker starts in; docs/how-to/metrics.md shows the rest",
            FILES,
        )
    return observer.count_event


def otel(_plugin: Any) -> Observer:
    from celery_redlock.observers.otel import OpenTelemetry  # noqa: PLC0415  an extra

    return OpenTelemetry()


#: Word in ``redlock_observers`` -> what makes the observer.
READY: dict[str, Callable[[Any], Observer]] = {
    "logging": lambda plugin: Log(plugin.settings.skip_log_level, lambda: plugin.speaks_of_nodes),
    "journal": journal,
    "celery": celery_events,
    "prometheus": prometheus,
    "otel": otel,
}
#: Where prometheus_client has the processes of a worker count, as it reads when it is imported.
FILES = "PROMETHEUS_MULTIPROC_DIR"
#: Word -> the extra that brings what it needs.
EXTRAS = {"prometheus": "prometheus", "otel": "otel"}
