"""
Protection of the tasks that ``redlock_protect`` names, whatever their base.

    task --> its name --> rule --> a class made of the task's own, `RedlockTask` and the options
         --> bound as any `RedlockTask`

The task stays the object that others have imported; only its class is another one. What the task
or its classes declare wins over the setting.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from typing import Any

from celery import signals

from celery_redlock.configuration import redlock_conf
from celery_redlock.errors import ConfigurationError
from celery_redlock.process.log import get_logger
from celery_redlock.protect import WatchedTasks, watch_with
from celery_redlock.settings import known
from celery_redlock.task.base import RedlockTask, install
from celery_redlock.task.declared import declared
from celery_redlock.task.naming.patterns import Patterns, Rule
from celery_redlock.task.naming.task_lock import lock_of
from celery_redlock.task.overrides import check_request

__all__ = ["check_at_start", "protect_tasks"]

logger = get_logger(__name__)

#: How many patterns that match nothing are reported; each is compared to the names of all tasks.
MOST_WARNINGS = 10


class ProtectedTasks(WatchedTasks):
    """The tasks of an app, protected as they are registered if its *patterns* name them."""

    patterns: Patterns

    def __setitem__(self, name: str, task: Any) -> None:
        rule = self.patterns.rule_for(name)
        if rule is None or lock_of(task).is_named:
            super(WatchedTasks, self).__setitem__(name, task)
            return
        try:
            give_class(task, rule)
            # With its class, as other threads look for it here.
            super(WatchedTasks, self).__setitem__(name, task)
            bind(task, self.app)
        except ConfigurationError as error:
            self.pop(name, None)  # so that its next use says so again
            lock_of(task).is_named = False
            raise ConfigurationError(
                f"{rule.where} cannot protect {name}: {error} (to leave it as it is, put "
                f"{name!r}: None first)"
            ) from error


def protect_tasks(app: Any) -> None:
    patterns = Patterns(app.conf["redlock_protect"])
    install(app)
    registry = watch_with(ProtectedTasks, app, patterns=patterns)
    refused = []
    for name, task in list(registry.items()):
        try:
            registry[name] = task
        except ConfigurationError as error:  # the others are protected all the same
            refused.append(error)
    if refused:
        raise refused[0]


def check_at_start(app: Any) -> None:
    try:
        check_setting(app)
    except ConfigurationError as error:
        logger.critical("celery-redlock: %s", error)
        raise


def check_setting(app: Any) -> None:
    """Raise ConfigurationError if a setting of ours is misspelt, or was set too late to count."""
    conf = redlock_conf(app)
    for setting in conf:
        known(setting)
    patterns = getattr(app._tasks, "patterns", None)  # noqa: SLF001
    if conf.get("redlock_protect") != getattr(patterns, "setting", None):
        raise ConfigurationError(
            "redlock_protect was set after the tasks of the app had been made, and counts for none "
            "of them; set it with the rest of the configuration, before a worker starts"
        )


def give_class(task: Any, rule: Rule) -> None:
    """Base *task* on `RedlockTask`, too, with the options of *rule* that it does not declare."""
    theirs = type(task)
    is_ours = issubclass(theirs, RedlockTask)
    if is_ours:
        own = {**declared(task, RedlockTask), **vars(task)}
    else:
        found = {option: getattr(task, option, None) for option in rule.options}
        own = {option: value for option, value in found.items() if value is not None}
    body = {name: getattr(theirs, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {name: value for name, value in rule.options.items() if not is_said(own, name)}
    bases = (theirs,) if is_ours else (theirs, RedlockTask)
    try:
        task.__class__ = types.new_class(theirs.__name__, bases, exec_body=lambda n: n.update(body))
    except Exception as error:  # a metaclass or __init_subclass__ is anybody's code
        raise ConfigurationError(
            f"{theirs.__qualname__} cannot be combined with RedlockTask: {error}"
        ) from error
    lock_of(task).is_named = True


def is_said(own: Mapping[str, Any], option: str) -> bool:
    """Return whether *own* attributes say it: None is a value of ``lock_limit`` alone."""
    return option in own and (own[option] is not None or option == "lock_limit")


def bind(task: Any, app: Any) -> None:
    """Bind *task* to *app* as Celery does, and make sure that this led to us."""
    task.bind(app)
    if lock_of(task).own is None:
        raise ConfigurationError("a class of it overrides bind() and does not call super().bind()")
    check_request(task, RedlockTask)


@signals.worker_ready.connect(weak=False)
def _warn_of_unused(sender: Any = None, **_: Any) -> None:
    """Report patterns that match no task of a worker: a misspelt one protects nothing."""
    registry = getattr(sender, "app", None) and sender.app._tasks  # noqa: SLF001
    if not isinstance(registry, ProtectedTasks):
        return
    found = registry.patterns.without_effect(registry)
    for pattern, taken_by in found[:MOST_WARNINGS]:
        if taken_by is not None:
            words = "redlock_protect: put %r before %r, which matches it, too, or it has no effect"
            logger.warning(words, pattern, taken_by)
            continue
        near = difflib.get_close_matches(str(pattern), registry, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        logger.warning("redlock_protect: %r matches no task of this worker%s", pattern, hint)
    if len(found) > MOST_WARNINGS:
        more = len(found) - MOST_WARNINGS
        logger.warning("redlock_protect: %d more patterns match no task of this worker", more)
