"""The doctor from start to end: gather the facts of an app, and make findings of them."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from celery.local import maybe_evaluate
from redis.exceptions import RedisError

from celery_redlock.configuration import cache_urls, redis_of, redlock_conf
from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.nodes.address import UrlAddress, addresses_of
from celery_redlock.lock.nodes.credentials import shows_password
from celery_redlock.lock.nodes.guard import exchange, read_info
from celery_redlock.ops.advice import DAY
from celery_redlock.ops.doctor import LEVELS, Finding
from celery_redlock.ops.doctor.check_cluster import check_cluster
from celery_redlock.ops.doctor.check_database import check_databases
from celery_redlock.ops.doctor.check_nodes import check_nodes
from celery_redlock.ops.doctor.check_tasks import check_tasks
from celery_redlock.ops.doctor.facts import Facts, OtherServer, TaskFacts, database_of, place_of
from celery_redlock.ops.doctor.nodes import gather_nodes
from celery_redlock.ops.loading import AppError, load_tasks
from celery_redlock.plugin import plugin_for
from celery_redlock.process.log import get_logger
from celery_redlock.reading.journal import KEPT, JournalReader
from celery_redlock.reading.nodes import connected
from celery_redlock.reading.tally_reader import TallyReader
from celery_redlock.settings import Settings
from celery_redlock.task.base import takes_lock
from celery_redlock.task.messages.broker import delays_in_broker, visibility_timeout
from celery_redlock.task.naming.task_lock import lock_of
from celery_redlock.task.unlocked import unlocked_tasks

__all__ = ["findings", "gather"]


def findings(facts: Facts) -> list[Finding]:
    checks = (check_cluster, check_nodes, check_databases, check_tasks)
    found = [finding for check in checks for finding in check(facts)]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def gather(app: Any, settings: Settings, tell: Callable[[int], None]) -> Facts:
    """
    Return all that is known; raises AppError if the app cannot be loaded.

    *tell* is called from time to time with how many keys have been looked at.
    """
    problems: dict[str, str] = {}
    try:
        load_tasks(app)
    except AppError:
        raise
    except ConfigurationError as error:
        problems["task-declared"] = str(error)
        load_the_rest(app)
    try:
        _ = plugin_for(app).observers
    except ConfigurationError as error:
        problems["observers"] = str(error)
    with contextlib.closing(JournalReader(settings.nodes, settings.rules)) as journal:
        records = journal.recent(KEPT)
    now = time.time()
    tallies = TallyReader(settings.nodes, settings.rules).read(now - DAY, now)
    conf, named = app.conf, redlock_conf(app).get("redlock_nodes") or ()
    urls = {"broker": conf.broker_read_url, "result backend": conf.result_backend}
    return Facts(
        settings=settings,
        nodes=gather_nodes(settings.nodes, settings.rules, tell),
        tasks=tasks_of(app),
        unlocked=list(unlocked_tasks(app)),
        others=[server for role, url in urls.items() for server in other(role, url)],
        caches=[server for cache, url in cache_urls() for server in other(cache, url)],
        records=records,
        tally=tallies.tasks,
        problems=problems,
        shown_passwords=[addresses_of([it])[0].label for it in named if shows_password(it)],
        visibility_timeout=visibility_timeout(app),
        is_eager=bool(conf.task_always_eager),
        delays_in_broker=is_delayed_in_broker(app),
        eta_task_limit=conf.get("worker_eta_task_limit"),
        pool=str(conf.worker_pool or "prefork"),
        has_hiredis=importlib.util.find_spec("hiredis") is not None,
        now=now,
    )


# --- tasks --------------------------------------------------------------------------------


def load_the_rest(app: Any) -> None:
    """
    Have *app* register the tasks that come after one with invalid options.

    That one is reported; findings about the others must not wait until it is fixed.
    """
    while app._pending:  # noqa: SLF001  Celery has no other way to go on
        with contextlib.suppress(Exception):
            maybe_evaluate(app._pending.popleft())  # noqa: SLF001


def tasks_of(app: Any) -> list[TaskFacts]:
    logger = get_logger("celery_redlock")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)  # findings will tell it
    try:
        return [task_facts(app, *it) for it in sorted(app.tasks.items()) if takes_lock(it[1])]
    finally:
        logger.setLevel(before)


def task_facts(app: Any, name: str, task: Any) -> TaskFacts:
    try:
        task.check_lock()
        options, problem = lock_of(task).options, ""
    except ConfigurationError as error:
        options, problem = None, str(error)
    limits = (
        getattr(task, "time_limit", None) or app.conf.task_time_limit,
        getattr(task, "soft_time_limit", None) or app.conf.task_soft_time_limit,
    )
    return TaskFacts(
        name=name,
        problem=problem,
        options=options,
        max_retries=task.max_retries,
        acks_late=bool(task.acks_late),
        time_limit=min((float(limit) for limit in limits if limit), default=None),
    )


def is_delayed_in_broker(app: Any) -> bool:
    """Return whether the broker itself delays messages; False if that is not known."""
    try:
        return delays_in_broker(app)
    except Exception:  # noqa: BLE001  kombu knows no such broker; a worker would not start either
        return False


# --- other servers ------------------------------------------------------------------------


def other(role: str, url: Any) -> Iterator[OtherServer]:
    found, run_id = redis_of(url), ""
    if found is None:
        return
    try:
        address = UrlAddress(found)
    except ConfigurationError:  # Celery's own words in a URL, which it understands and we do not
        return
    with contextlib.suppress(RedisError, OSError), connected(address) as connection:
        run_id = read_info(exchange(connection, (b"INFO", b"server"))[0]).get("run_id", "")
    place, database = place_of(address.label), database_of(address.label)
    yield OtherServer(role=role, place=place, run_id=run_id, database=database)
