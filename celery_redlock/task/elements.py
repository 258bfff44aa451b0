"""
Elements of ``map``, ``starmap`` and ``chunks``: executions, although Celery calls them directly.

Celery's own task ``celery.map`` calls the protected one for each element, as a body might call
another task. That would take no lock, so each element is run as by ``apply()``: under its lock,
and with nothing that could come later.
"""

from __future__ import annotations

from typing import Any

from celery.exceptions import Ignore, Reject

from celery_redlock.task.refused import Skipped

__all__ = ["is_element", "run_element"]

#: Celery's tasks that call another one for each element; chunks are made of the second.
MAPS = ("celery.map", "celery.starmap")


def is_element(task: Any) -> bool:
    """Return whether a call of *task* comes from a task of Celery's that maps it."""
    caller = task.app.current_task
    return caller is not None and caller.name in MAPS and task.name not in MAPS


def run_element(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run *task* for one element under its lock; return or raise what it does."""
    done = task.apply(args, kwargs, throw=True)
    if isinstance(done.result, (Ignore, Reject)):  # of the body; meant for the whole
        raise done.result
    result = done.get(disable_sync_subtasks=False)
    return dict(result) if isinstance(result, Skipped) else result
