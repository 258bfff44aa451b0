"""
End what would follow a task that does not run, so that nobody waits for it.

Those are the rest of its chain, what is linked to it, and the chords around it. Celery tells
them of a task that fails, but forgets some; of a task that was skipped it knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from celery import states
from celery.app.task import Context
from celery.exceptions import ChordError, TaskRevokedError

from celery_redlock.errors import LockNotAcquired, TooManyDeliveries

__all__ = ["fail_followers", "stop_chain"]


def stop_chain(task: Any, request: Any, reason: str) -> None:
    """Mark the rest of the chain as revoked, and call no links."""
    revoked = [] if request.is_eager else [*tasks_in(request.chain), *tasks_in(request.callbacks)]
    for context in revoked:
        context.reply_to = request.reply_to
        task.backend.mark_as_revoked(context.id, reason, request=context)
    fail_chords(task, request, chord_of(revoked), TaskRevokedError(reason))
    request.chain = request.callbacks = None  # last: if anything failed, they fail with the task


def fail_followers(task: Any, request: Any, error: LockNotAcquired | TooManyDeliveries) -> None:
    """
    Fail with *error* the successors that Celery would leave pending.

    Celery lets the single tasks of a chain fail along, but not those in its groups, not what
    is linked, and not a chord around the chord that fails: whoever waits for those would hang.
    """
    if request.is_eager:
        return
    count_by_ourselves(task, in_parallel(request.chain), error)
    for context in [*tasks_in(in_parallel(request.chain)), *tasks_in(request.callbacks)]:
        fail(task, request, context, error)
    around = request.chord or chord_of(tasks_in(request.chain))
    fail_chords(task, request, around, error)


def fail_chords(task: Any, request: Any, body: Any, error: Exception) -> None:
    """
    Fail what Celery forgets when the chord with *body* fails, and the chords around it.

    Celery stores the failure of the body, and of the single tasks that follow it; it does so
    when the last task of the header has ended, and calls the error callbacks before. So
    these are not stored here. But it tells no chord that the body is itself a part of.
    """
    while body:
        error = ChordError(f"Dependency of chord {body['options'].get('task_id')} raised {error!r}")
        after = body["options"].get("chain") or []
        forgotten = in_parallel(after)
        if body.get("subtask_type") != "group":
            forgotten += in_parallel([body])
        ids = {context.id for context in tasks_in(forgotten)}
        failed = [*tasks_in([body]), *tasks_in(after)]
        count_by_ourselves(task, forgotten, error)
        for context in failed:
            fail(task, request, context, error, store=context.id in ids)
        body = chord_of(failed)


def count_by_ourselves(task: Any, elements: Iterable[dict[str, Any]], error: Exception) -> None:
    """
    Store that the groups in *elements* have failed, so that Celery counts none of them.

    It tells a chord that a whole group at the end of a chain was one of its parts. Together with
    the group's tasks, of which we tell, that is one too many; and if the chord learns its size
    only then, as its last task is published, it never counts as complete.
    """
    for element in elements:
        options = element.get("options") or {}
        if element.get("subtask_type") == "group" and {"chord", "task_id"} <= options.keys():
            task.backend.store_result(options["task_id"], error, states.FAILURE)


def fail(
    task: Any, request: Any, context: Context, error: Exception, *, store: bool = True
) -> None:
    """Fail a task that will never run, for whoever waits for it and for its chord."""
    context.reply_to = request.reply_to
    task.backend.mark_as_failure(
        context.id, error, request=context, store_result=store, call_errbacks=False
    )


def chord_of(tasks: Iterable[Context]) -> Any:
    """Return the body of the chord that *tasks* are a part of; None if they are not."""
    return next((context.chord for context in tasks if context.chord), None)


def in_parallel(elements: Any) -> list[Any]:
    """Return the groups and chords among *elements* of a chain, those of inner chains too."""
    found = []
    for element in elements or ():
        kind = element.get("subtask_type")
        if kind == "chain":
            found += in_parallel(element["kwargs"]["tasks"])
        elif kind in ("chord", "group"):
            found.append(element)
    return found


def tasks_in(elements: Any) -> Iterator[Context]:
    """
    Yield the request that each task in *elements* would have had, for its result backend.

    Tasks without an id are left out: nobody can wait for them.
    """
    for element in [elements] if isinstance(elements, dict) else elements or ():
        kwargs = element.get("kwargs") or {}
        kind = element.get("subtask_type")
        if kind in ("chain", "group"):
            yield from tasks_in(kwargs.get("tasks"))
        elif kind == "chord":
            for context in tasks_in(kwargs.get("header")):
                context.chord = None  # of a chord that was never begun, and counts nothing
                yield context
            yield from tasks_in(kwargs.get("body"))
        else:
            options = element.get("options") or {}
            if options.get("task_id"):
                yield context_of(element, options)
            yield from tasks_in(options.get("link"))


def context_of(element: dict[str, Any], options: dict[str, Any]) -> Context:
    return Context(
        {
            "id": options["task_id"],
            "task": element.get("task"),
            "args": element.get("args"),
            "kwargs": element.get("kwargs"),
            "group": options.get("group_id"),
            "group_index": options.get("group_index"),
            "chord": options.get("chord"),
            "errbacks": None,
            "correlation_id": options["task_id"],
        }
    )
