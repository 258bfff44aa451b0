"""
Where Celery calls a task: which calls are executions, and so run under the lock.

A task called directly, or within its own body, takes no lock. An element of ``celery.map``,
``starmap`` or ``chunks`` does, although Celery calls it directly: it is run as by ``apply()``,
under its lock, and with nothing that could come later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from celery import Task, states
from celery.exceptions import Ignore, Reject

from celery_redlock.plugin import locking
from celery_redlock.task.execution.execution import (
    Execution,
    delay_in,
    latest_execution,
    running_execution,
)
from celery_redlock.task.execution.outcome import outcome_of
from celery_redlock.task.execution.refused import Skipped
from celery_redlock.task.messages.delivery import Delivery
from celery_redlock.task.naming.task_lock import lock_of

__all__ = ["after", "call", "is_element", "run_element"]

#: States after which Celery is through with a delivery.
STORED = frozenset({states.SUCCESS, states.FAILURE, states.RETRY})
#: Celery's tasks that call another one for each element; chunks are made of the second.
MAPS = ("celery.map", "celery.starmap")


def call(
    task: Any, inherited: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a call of *task*, under its lock if it is an execution."""
    has_lock = not lock_of(task).is_built_in
    request, running = task.request, running_execution()
    is_by_body = request.called_directly or running is not None
    if has_lock and is_by_body and is_element(task) and not locking.disabled:
        return run_element(task, args, kwargs)
    body = body_of(task, request, inherited)
    if not (has_lock and is_execution(task, request, running)):
        return body(*args, **kwargs)
    return Execution(task, request, running).run(body, args, kwargs)


def is_execution(task: Any, request: Any, running: Execution | None) -> bool:
    """Return whether a call of a task that has a lock is an execution: not direct, not nested."""
    return not (
        request.called_directly
        or request.id is None
        or (running is not None and running.is_of(task, request))
    )


def body_of(task: Any, request: Any, inherited: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return what runs the body: the next ``__call__``, or ``run`` in place of Celery's own.

    Celery's own would push a second request, a copy (up to 5.4 an empty one), and lose what the
    body changes in it. Only ``celery worker`` avoids that; ``celery.contrib.testing`` and eager
    mode do not.
    """
    is_celerys = getattr(inherited, "__func__", None) is Task.__call__
    if not is_celerys or request.called_directly or request._protected:  # noqa: SLF001
        return inherited
    request._protected = 1  # noqa: SLF001  Celery's own mark, and its own way in a worker
    return task.run  # type: ignore[no-any-return]


def after(task: Any, state: str | None, returned: Any) -> None:
    """Complete the records of a run of *task*, now that Celery has finished it."""
    latest = latest_execution.get()
    # Not by its id, which an apply() in its body may share.
    if latest is not None and latest.request is task.request:
        # Celery tells the state that was to be stored, also where an error or the end of the
        # process came before: in the callbacks, the next task of a chain, or the result backend.
        is_stored = state in STORED and sys.exc_info()[1] is latest.handled
        latest.completed(is_stored=is_stored)
    elif isinstance(returned, Exception):  # in `before_start`, for which Celery calls no task
        execution = Execution(task, task.request, running_execution())
        execution.end(outcome_of(returned, task), delay_in(returned))


# --- elements of map, starmap and chunks ---------------------------------------------------


def is_element(task: Any) -> bool:
    caller = task.app.current_task
    return caller is not None and caller.name in MAPS and task.name not in MAPS


def run_element(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run *task* for one element under its lock; return or raise what it does."""
    # The headers of the message that they came with may be part of their names.
    headers = Delivery.of(task, vars(task.app.current_task.request), "").headers
    done = task.apply(args, kwargs, throw=True, headers=headers or None)
    if isinstance(done.result, (Ignore, Reject)):  # of the body; meant for the whole
        raise done.result
    result = done.get(disable_sync_subtasks=False)
    return dict(result) if isinstance(result, Skipped) else result
