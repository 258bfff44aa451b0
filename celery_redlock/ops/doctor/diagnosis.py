"""All of the doctor: gather the facts of an app, and make findings of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from celery_redlock.errors import ConfigurationError
from celery_redlock.ops.doctor.app import app_facts, records_of, shown_passwords, tasks_of
from celery_redlock.ops.doctor.check_cluster import check_cluster
from celery_redlock.ops.doctor.check_migration import check_migration
from celery_redlock.ops.doctor.check_nodes import check_nodes
from celery_redlock.ops.doctor.check_tasks import check_tasks
from celery_redlock.ops.doctor.facts import Facts
from celery_redlock.ops.doctor.finding import LEVELS, Finding
from celery_redlock.ops.doctor.nodes import gather_nodes
from celery_redlock.ops.doctor.peer_facts import load_the_rest, peer_settings, peer_tasks
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
        load_the_rest(app)
    try:
        _ = plugin_for(app).observers
    except ConfigurationError as error:
        problems["observers"] = str(error)
    return Facts(
        settings=settings,
        nodes=gather_nodes(settings.nodes, settings.rules, tell),
        tasks=tasks_of(app),
        peer_tasks=peer_tasks(app),
        peer_settings=peer_settings(app),
        records=records_of(settings),
        problems=problems,
        shown_passwords=shown_passwords(app),
        now=time.time(),
        **app_facts(app),
    )


def findings(facts: Facts) -> list[Finding]:
    """Return what is amiss, the worst first."""
    checks = (check_cluster, check_nodes, check_tasks, check_migration)
    found = [finding for check in checks for finding in check(facts)]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))
