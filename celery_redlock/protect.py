"""
The setting ``redlock_protect``, applied to every app of a process that imports this.

The ``celery`` command imports it, and so does `RedlockTask`. A process that publishes and imports
neither of them names this module in Django's ``INSTALLED_APPS``, or imports it beside its app.

    app made --> its tasks are watched (a fix-up, as Celery has one for Django)
    first task registered --> with the setting: protected; without: Celery's own registry again
    app finalized --> likewise, for an app whose setting came later
    worker starts --> refuses a setting that is misspelt, or came later still, and options of
                      ours on tasks that take no lock

Celery finalizes an app only where somebody looks at its tasks, which a publisher need not do.
"""

from __future__ import annotations

import functools
from typing import Any

from celery import Celery, _state, bootsteps
from celery.app.registry import TaskRegistry
from kombu.utils.imports import symbol_by_name

__all__ = ["CheckSetting", "WatchedTasks", "apply_setting", "watch_with"]

#: By their names, as an app without settings of ours does without them.
PROTECT = "celery_redlock.task.protection:protect_tasks"
CHECK = "celery_redlock.task.protection:check_at_start"
CHECK_UNLOCKED = "celery_redlock.task.unlocked:check_at_start"
#: How Celery calls `watch`, for each app that it makes.
FIXUP = f"{__name__}:watch"


class WatchedTasks(TaskRegistry):
    """The tasks of an app whose setting has not been looked at."""

    app: Any

    def __setitem__(self, name: str, task: Any) -> None:
        apply_setting(self.app)
        self[name] = task  # as what it is now


def apply_setting(app: Any) -> None:
    app.steps["worker"].add(CheckSetting)
    if app.conf.get("redlock_protect") is not None:
        app.fixups = {*app.fixups, FIXUP}  # for children that are spawned: they import nothing else
        symbol_by_name(PROTECT)(app)
    else:
        watch_with(None, app)


class CheckSetting(bootsteps.Step):
    """The step of a worker's start that refuses settings and options that protect nothing."""

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        if any("redlock_" in str(key).lower() for key in worker.app.conf):
            symbol_by_name(CHECK)(worker.app)
        symbol_by_name(CHECK_UNLOCKED)(worker.app)


def watch_with(kind: type[WatchedTasks] | None, app: Any, **attributes: Any) -> Any:
    """
    Have *app* keep its tasks in a registry of this *kind*; None for the kind that it had before.

    The registry stays the object that it was, with these *attributes*.
    """
    registry = app._tasks  # noqa: SLF001  app.tasks would finalize the app here
    now = type(registry)
    own = now.__bases__[1] if issubclass(now, WatchedTasks) else now
    vars(registry).update(attributes, app=app)  # before its class, as other threads may be here
    registry.__class__ = own if kind is None else combined(kind, own)
    return registry


@functools.cache
def combined(kind: type[WatchedTasks], own: type[TaskRegistry]) -> type[TaskRegistry]:
    return type(own.__name__, (kind, own), {})


def watch(app: Any) -> None:
    """Celery calls this for each app that is made from now on."""
    watch_with(WatchedTasks, app)


def watch_one_that_is_there(app: Any) -> None:
    """Do likewise with an *app* that was made before, and may be about to read its settings."""
    if app.configured:
        apply_setting(app)
    else:
        watch(app)
        app.on_after_configure.connect(_when_configured, weak=False)


def _when_configured(sender: Any, **_: Any) -> None:
    apply_setting(sender)


Celery.builtin_fixups.add(FIXUP)
_state.connect_on_app_finalize(apply_setting)
for _app in list(_state._get_active_apps()):  # type: ignore[attr-defined]  # noqa: SLF001
    watch_one_that_is_there(_app)
