"""Gathers the facts of an app: its tasks, its broker, and what the journal says of its locks."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from redis.exceptions import RedisError

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.address import UrlAddress, addresses_of
from celery_redlock.lock.credentials import shows_password
from celery_redlock.lock.guard import exchange, read_info
from celery_redlock.log import get_logger
from celery_redlock.ops.doctor.facts import OtherServer, TaskFacts, place_of
from celery_redlock.plugin import redis_of, redlock_conf
from celery_redlock.reading.journal import KEPT, JournalReader
from celery_redlock.reading.nodes import connected
from celery_redlock.settings import Settings
from celery_redlock.task.base import takes_lock
from celery_redlock.task.redelivery import visibility_timeout
from celery_redlock.task.task_lock import lock_of

__all__ = ["app_facts", "records_of", "shown_passwords", "tasks_of"]


def app_facts(app: Any) -> dict[str, Any]:
    """Return the fields of `Facts` that the settings of Celery make."""
    return {
        "others": [server for role in ("broker", "result backend") for server in other(app, role)],
        "visibility_timeout": visibility_timeout(app),
        "is_eager": bool(app.conf.task_always_eager),
        "pool": str(app.conf.worker_pool or "prefork"),
        "beat_scheduler": app.conf.beat_scheduler,
        "has_hiredis": importlib.util.find_spec("hiredis") is not None,
    }


def shown_passwords(app: Any) -> list[str]:
    """Return which nodes have a password in the app's ``redlock_nodes``; it is fit for use."""
    nodes = redlock_conf(app).get("redlock_nodes") or ()
    shown = zip(nodes, addresses_of(nodes) if nodes else (), strict=True)
    return [address.label for node, address in shown if shows_password(node)]


def records_of(settings: Settings) -> list[dict[str, Any]]:
    """Return what the journal has, oldest first."""
    reader = JournalReader(settings.nodes, settings.rules)
    try:
        return reader.recent(KEPT)
    finally:
        reader.close()


# --- tasks --------------------------------------------------------------------------------


def tasks_of(app: Any) -> list[TaskFacts]:
    """Return the facts of all tasks that take locks, by their names."""
    facts = []
    with quiet():
        for name, task in sorted(app.tasks.items()):
            if takes_lock(task):
                facts.append(task_facts(app, name, task))
    return facts


def task_facts(app: Any, name: str, task: Any) -> TaskFacts:
    """Return the facts of one task."""
    try:
        task.check_lock()
        options, problem = lock_of(task).options, ""
    except ConfigurationError as error:
        options, problem = None, str(error)
    conf = app.conf
    limits = (
        getattr(task, "time_limit", None) or conf.task_time_limit,
        getattr(task, "soft_time_limit", None) or conf.task_soft_time_limit,
    )
    return TaskFacts(
        name=name,
        problem=problem,
        options=options,
        max_retries=task.max_retries,
        acks_late=bool(task.acks_late),
        time_limit=min((float(limit) for limit in limits if limit), default=None),
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Have nothing logged of what findings will tell, for the body of a ``with``."""
    logger = get_logger("celery_redlock")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


# --- other servers ------------------------------------------------------------------------


def other(app: Any, role: str) -> Iterator[OtherServer]:
    """Yield the Redis that the app has in this role, if it is one."""
    conf = app.conf
    url = conf.broker_read_url if role == "broker" else conf.result_backend
    found = redis_of(SimpleNamespace(result_backend=url, broker_read_url=""))
    if found is None:
        return
    try:
        address = UrlAddress(found)
    except ConfigurationError:  # Celery's own words in a URL, which it understands and we do not
        return
    yield OtherServer(role=role, place=place_of(address.label), run_id=run_id_of(address))


def run_id_of(address: UrlAddress) -> str:
    """Return which process it is; "" if it does not tell."""
    try:
        with connected(address) as connection:
            (told,) = exchange(connection, (b"INFO", b"server"))
    except (RedisError, OSError):  # then its address has to do
        return ""
    return read_info(told).get("run_id", "")
