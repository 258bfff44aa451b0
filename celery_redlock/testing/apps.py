"""The apps under test: their settings, and where they lock instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from celery_redlock.configuration import redlock_conf
from celery_redlock.lock.rules import Rules
from celery_redlock.plugin import Servers, locking, plugin_for
from celery_redlock.settings import Settings

__all__ = ["app_on", "rules_of"]


@contextlib.contextmanager
def app_on(app: Any, servers: Servers) -> Iterator[None]:
    """Lock the tasks of *app* on *servers*, even if locks are disabled elsewhere."""
    before, locking.disabled = locking.disabled, 0
    try:
        with plugin_for(app).on_servers(servers):
            yield
    finally:
        locking.disabled = before


def rules_of(app: Any) -> Rules:
    """
    Return the rules in the settings of *app*, whatever nodes it names, if any.

    Raises:
        ConfigurationError: A setting is impossible.
    """
    return Settings.from_conf({**redlock_conf(app), "redlock_nodes": ["redis://memory/0"]}).rules
