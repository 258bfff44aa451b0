"""Checks of the attributes that a task declares: fit for each other, and spelt as options are."""

from __future__ import annotations

import difflib
import functools
import math
from typing import Any

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.rules import in_seconds
from celery_redlock.settings import PREFIX
from celery_redlock.task.options import CHECKS, OPTIONS, UNIQUE_UNTIL

__all__ = [
    "METHODS",
    "check_declared",
    "check_expires",
    "classes_before",
    "declared",
    "nearest_option",
]

#: What `RedlockTask` has besides its options and what Celery has. It has no other names.
METHODS = ("lock", "lock_name", "check_lock")
#: What is less like an option than many a name of others, and meant as one.
MISSPELT = {"debounce_min": "debounce_max", "max_delivery": "max_deliveries"}


def check_declared(task: Any, base: type) -> None:
    """Check the options that *task* declares, before any setting is known."""
    for option, check in CHECKS.items():
        value = getattr(task, option)
        if value is not None or (option == "lock_limit" and task.lock_rate is None):
            check(f"{task.name}: {option}", value)
    check_several(task)
    check_unique(task)
    check_debounce(task)
    for attribute, value in declared(task, base).items():
        check_spelling(task.name, attribute, value)


def check_several(task: Any) -> None:
    key = task.lock_key
    if callable(key):  # each call says how many
        return
    names = len(key) if isinstance(key, (tuple, list)) else 1
    for option in ("lock_limit", "lock_rate"):
        value = getattr(task, option)
        values = len(value) if isinstance(value, (tuple, list)) else 1
        if values not in {1, names}:
            raise ConfigurationError(
                f"{task.name}: {option}={value!r} has {values} values and lock_key={key!r} makes "
                f"{names} names; give one value for each name, or one for all"
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


def check_debounce(task: Any) -> None:
    shortest, longest = task.debounce, task.debounce_max
    if shortest is None:
        if longest is not None:
            raise ConfigurationError(
                f"{task.name}: debounce_max={longest!r} has no effect without debounce; set that, "
                "the seconds without a call after which the task runs"
            )
        return
    if longest is not None and in_seconds("", longest) < in_seconds("", shortest):
        raise ConfigurationError(
            f"{task.name}: debounce_max must be at least debounce ({shortest!r}), got {longest!r}"
        )
    check_expires(task.name, getattr(task, "expires", None), shortest)
    if task.unique_until is not None:
        raise ConfigurationError(
            f"{task.name}: unique_until={task.unique_until!r} publishes the first call and keeps "
            "out the next ones, and debounce publishes all and runs the last; drop one of them"
        )


def check_expires(task: str, expires: Any, debounce: Any) -> None:
    """Raise ConfigurationError if a call that *expires* so soon [s] is over before it is to run."""
    if isinstance(expires, (int, float)) and expires <= math.ceil(in_seconds("", debounce)):
        raise ConfigurationError(
            f"{task}: expires={expires!r} ends each call before debounce={debounce!r} lets it "
            "run; let it expire later, or drop one of them"
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
    near = MISSPELT.get(attribute) or nearest_option(attribute, 0.85)
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
