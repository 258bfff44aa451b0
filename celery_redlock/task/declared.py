"""Checks of the attributes that a task declares: fit for each other, and spelt as options are."""

from __future__ import annotations

import difflib
import functools
from typing import Any

from celery_redlock.errors import ConfigurationError
from celery_redlock.settings import PREFIX
from celery_redlock.task.options import CHECKS, OPTIONS, UNIQUE_UNTIL

__all__ = ["METHODS", "check_declared", "classes_before", "declared", "nearest_option"]

#: What `RedlockTask` has besides its options and what Celery has. It has no other names.
METHODS = ("lock", "lock_name", "check_lock")


def check_declared(task: Any, base: type) -> None:
    """Check the options that *task* declares, before any setting is known."""
    for option, check in CHECKS.items():
        value = getattr(task, option)
        if value is not None:
            check(f"{task.name}: {option}", value)
    check_several(task)
    check_unique(task)
    for attribute, value in declared(task, base).items():
        check_spelling(task.name, attribute, value)


def check_several(task: Any) -> None:
    key, limit = task.lock_key, task.lock_limit
    if callable(key):  # each call says how many
        return
    names = len(key) if isinstance(key, (tuple, list)) else 1
    limits = len(limit) if isinstance(limit, (tuple, list)) else 1
    if limits not in {1, names}:
        raise ConfigurationError(
            f"{task.name}: lock_limit={limit!r} has {limits} numbers and lock_key={key!r} makes "
            f"{names} names; give one number for each name, or one for all"
        )
    if names > 1 and task.unique_until is not None:
        raise ConfigurationError(
            f"{task.name}: unique_until={task.unique_until!r} reserves one name, and "
            f"lock_key={key!r} makes {names}; drop unique_until, or give one template"
        )


def check_unique(task: Any) -> None:
    if task.unique_until == "expired" and task.unique_for is None:
        raise ConfigurationError(
            f"{task.name}: unique_until='expired' needs unique_for, the window in seconds in which "
            "the task is published at most once, e.g. unique_for=60"
        )
    if task.unique_until is not None:
        if task.lock_limit != 1:
            raise ConfigurationError(
                f"{task.name}: lock_limit={task.lock_limit!r} lets several run at once, and "
                f"unique_until={task.unique_until!r} lets one be queued or run; drop one of them"
            )
        return
    for option, unset in (("unique_for", None), ("on_duplicate", "join")):
        value = getattr(task, option)
        if value != unset:
            raise ConfigurationError(
                f"{task.name}: {option}={value!r} has no effect without unique_until; set that to "
                f"one of {', '.join(map(repr, UNIQUE_UNTIL))}"
            )


def declared(task: Any, base: type) -> dict[str, Any]:
    """Return the attributes that the author of *task* wrote down, in all classes before ours."""
    classes = reversed(classes_before(task, base))
    return {name: value for cls in classes for name, value in vars(cls).items()}


def classes_before(task: Any, base: type) -> list[type]:
    bases = type(task).__mro__
    # Among them may be one that Celery made of ours for an app.
    return [c for c in bases[: bases.index(base)] if not c.__module__.startswith("celery_redlock.")]


def check_spelling(task: str, attribute: str, value: object) -> None:
    if attribute in OPTIONS or attribute in METHODS or attribute.startswith("_"):
        return
    near = nearest_option(attribute, 0.85)
    if near is not None:
        raise ConfigurationError(f"{task}: unknown option {attribute}; did you mean {near}?")
    if attribute.startswith(("lock_", PREFIX)) and not callable(value):
        raise ConfigurationError(
            f"{task}: unknown option {attribute}; known are {', '.join(OPTIONS)}"
        )


@functools.lru_cache(maxsize=1024)  # a thousand tasks have the same thirty attributes
def nearest_option(word: str, likeness: float) -> str | None:
    """Return the option that *word* looks like, as an option or its setting [0 to 1]; or None."""
    meant = {f"{PREFIX}{setting}": option for option, setting in OPTIONS.items() if setting}
    near = difflib.get_close_matches(word, [*OPTIONS, *meant], 1, likeness)
    return meant.get(near[0], near[0]) if near else None
