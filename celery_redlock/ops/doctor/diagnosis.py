"""All of the doctor: gather the facts of an app, and make findings of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from celery_redlock.errors import ConfigurationError
from celery_redlock.ops.doctor.app import app_facts, records_of, tasks_of
from celery_redlock.ops.doctor.check_cluster import check_cluster
from celery_redlock.ops.doctor.check_nodes import check_nodes
from celery_redlock.ops.doctor.check_tasks import check_tasks
from celery_redlock.ops.doctor.facts import Facts
from celery_redlock.ops.doctor.finding import LEVELS, Finding
from celery_redlock.ops.doctor.nodes import gather_nodes
from celery_redlock.ops.loading import AppError, load_tasks
from celery_redlock.plugin import plugin_for
from celery_redlock.settings import Settings

__all__ = ["findings", "gather"]


def gather(app: Any, settings: Settings, tell: Callable[[int], None]) -> Facts:
    """
    Return all that is known; raises AppError if the app could not be loaded.

    Args:
        app: The app.
        settings: Of it.
        tell: Is told from time to time how many keys have been looked at.
    """
    problems: dict[str, str] = {}
    try:
        load_tasks(app)
    except AppError:
        raise
    except ConfigurationError as error:
        problems["task-declared"] = str(error)
    try:
        _ = plugin_for(app).observers
    except ConfigurationError as error:
        problems["observers"] = str(error)
    return Facts(
        settings=settings,
        nodes=gather_nodes(settings.nodes, settings.rules, tell),
        tasks=tasks_of(app),
        records=records_of(settings),
        problems=problems,
        now=time.time(),
        **app_facts(app),
    )


def findings(facts: Facts) -> list[Finding]:
    """Return what is amiss, the worst first."""
    found = [*check_cluster(facts), *check_nodes(facts), *check_tasks(facts)]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))
