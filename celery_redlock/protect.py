"""
Makes ``redlock_protect`` count, for every app of a process that imports this.

The ``celery`` command imports it, and so does `RedlockTask`. A process that publishes and imports
neither of them names this module in Django's ``INSTALLED_APPS``, or imports it beside its app.
"""

from __future__ import annotations

from typing import Any

from celery import _state
from kombu.utils.imports import symbol_by_name

__all__ = ["apply_setting"]

#: By its name, as an app without the setting does without it.
PROTECT = "celery_redlock.task.protection:protect_tasks"


def apply_setting(app: Any) -> None:
    """
    Protect the tasks of *app* that its setting names, also those that are registered later.

    Celery calls this when an app is finalized.

    Raises:
        ConfigurationError: The setting is impossible, or a task cannot be protected.
    """
    if app.conf.get("redlock_protect") is None:
        return
    try:
        symbol_by_name(PROTECT)(app)
    except Exception:
        app.finalized = False  # else the next use of a task would publish it without a lock
        raise


def _when_finalized(sender: Any, **_: Any) -> None:
    apply_setting(sender)


_state.connect_on_app_finalize(apply_setting)
for _app in list(_state._get_active_apps()):  # type: ignore[attr-defined]  # noqa: SLF001
    if _app.finalized and _app.configured:
        apply_setting(_app)
    elif _app.finalized:  # its configuration module is what imports this
        _app.on_after_finalize.connect(_when_finalized, weak=False)
