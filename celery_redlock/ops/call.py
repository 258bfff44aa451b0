"""The call that is asked about: its task, its lock names, and how many of each there may be."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from celery_redlock.errors import ConfigurationError, LockKeyError
from celery_redlock.task.base import takes_lock
from celery_redlock.task.naming.task_lock import NO_HEADERS, lock_of, names_of

__all__ = ["CallError", "find_task", "limits_in_call"]


class CallError(ConfigurationError):
    """There is no such task, or it takes no such arguments."""


def find_task(app: Any, name: str) -> Any:
    """Return the task *name* of *app*; raises CallError, which names the nearest ones."""
    task = app.tasks.get(name)
    if task is None:
        ours = sorted(n for n in app.tasks if not n.startswith("celery."))
        near = difflib.get_close_matches(name, ours, 3) or ours[:3]
        hint = f"; did you mean {' or '.join(near)}?" if near else "; the app has no tasks"
        raise CallError(f"There is no task {name!r}{hint}")
    if not takes_lock(task):
        raise CallError(
            f"{name} takes no lock: it is no RedlockTask, and redlock_protect does not name it"
        )
    return task


def names_in_call(
    task: Any, args: str = "[]", kwargs: str = "{}", headers: Mapping[str, Any] = NO_HEADERS
) -> tuple[str, ...]:
    """
    Return the lock names of a call of *task* with *args* and *kwargs* in JSON.

    Raises:
        CallError: They are no JSON, or do not fit the task. Repeats no value of theirs.
    """
    called = json_of("ARGS", args, list), json_of("KWARGS", kwargs, dict)
    try:
        return names_of(task, *called, headers)
    except LockKeyError as error:
        raise CallError(str(error)) from None
    except Exception as error:  # a lock_name() of the user's
        msg = f"{task.name}: its lock_name() raised {type(error).__name__}"
        raise CallError(msg) from error


def limits_in_call(
    task: Any, args: str = "[]", kwargs: str = "{}", headers: Mapping[str, Any] = NO_HEADERS
) -> dict[str, int]:
    names, called = (
        names_in_call(task, args, kwargs, headers),
        (json.loads(args), json.loads(kwargs)),
    )
    try:
        limits = lock_of(task).options.lines(names, *called)
    except LockKeyError as error:
        raise CallError(str(error)) from None
    if not limits:
        raise CallError(f"This call of {task.name} takes no lock, and has no lock_rate")
    return limits


def json_of(what: str, text: str, kind: type) -> Any:
    """Return what *text* says, if it is JSON of this *kind*; raises CallError."""
    example = "a JSON list, like '[42, \"eu\"]'"
    if kind is dict:
        example = "a JSON object, like '{\"dry_run\": true}'"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # its own text names places, never what is there
        where = f"at character {getattr(error, 'pos', 0) + 1}"
        raise CallError(f"{what} must be {example}; it is no JSON ({where})") from None
    if not isinstance(value, kind):
        raise CallError(f"{what} must be {example}; it is another kind of JSON")
    return value
