"""Why a call does not run: what the nodes, the task's options and the journal say of one lock."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from celery_redlock.errors import ConfigurationError, LockKeyError
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import is_text, shorten
from celery_redlock.lock.votes import Verdict
from celery_redlock.ops.listing import scalar
from celery_redlock.ops.outlook import at_publish, at_run
from celery_redlock.reading.journal import KEPT, JournalReader
from celery_redlock.reading.one_lock import OneLock, read_lock
from celery_redlock.reading.stored import LockView
from celery_redlock.settings import Settings
from celery_redlock.task.base import takes_lock
from celery_redlock.task.task_lock import lock_of

__all__ = ["CallError", "Explanation", "explain", "find_task", "name_of_call"]

#: Events of the journal that say why something did not run, or not to its end.
REFUSALS = (
    *("TaskSkipped", "TaskRefused", "TaskRetried", "TaskRescheduled"),
    *("DuplicatePublished", "LeaseLost"),
)
#: How many of them are told.
RECENT = 10


class CallError(ConfigurationError):
    """There is no such task, or it takes no such arguments."""


@dataclass(frozen=True)
class Explanation:
    """
    All that is known of one lock.

    Attributes:
        lock: What the nodes have of it.
        task: Name of the task whose options count; "" if unknown.
        run: What a worker would do with another call; "" where the task is unknown.
        publish: What ``apply_async`` would do with it; None where it just publishes.
        recent: The newest refusals in the journal, oldest first.
    """

    lock: OneLock
    task: str = ""
    run: str = ""
    publish: str | None = None
    recent: Sequence[dict[str, Any]] = ()

    @property
    def holder(self) -> LockView | None:
        """Who has a majority of the nodes; None for nobody."""
        most = next(iter(self.lock.views), None)
        return most if most and most.is_held(len(self.lock.nodes)) else None

    @property
    def state(self) -> str:
        """``"held"``, ``"free"``, or ``"unavailable"`` if no quorum could say."""
        verdict = self.lock.verdict
        if self.holder is not None or verdict is Verdict.TAKEN:
            return "held"
        return "free" if verdict is Verdict.GRANTED else "unavailable"


def explain(app: Any, settings: Settings, name: str, task: Any = None) -> Explanation:
    """
    Ask the nodes and the journal for the lock *name*.

    Args:
        app: The app.
        settings: Of it.
        name: Lock name.
        task: Whose lock it is; None: that of the holder, if the app knows it.
    """
    lock = read_lock(settings.nodes, settings.rules, name)
    if task is None and lock.views:
        task = app.tasks.get(str(scalar(lock.views[0].holder.get("task"))))
    options = lock_of(task).options if takes_lock(task) else None
    found = Explanation(lock, "" if task is None else task.name, recent=refusals_of(settings, name))
    if options is None:
        return found
    is_quorate = lock.voting >= quorum(len(lock.nodes))
    return replace(
        found,
        run=at_run(task, options, lock.verdict),
        publish=at_publish(options, lock.queued, lock.next, is_quorate=is_quorate),
    )


def refusals_of(settings: Settings, name: str) -> list[dict[str, Any]]:
    """Return the newest refusals of the lock *name* in the journal, oldest first."""
    reader = JournalReader(settings.nodes, settings.rules)
    try:
        records = reader.recent(KEPT)
    finally:
        reader.close()
    return [record for record in records if is_refusal_of(record, name)][-RECENT:]


def is_refusal_of(record: dict[str, Any], name: str) -> bool:
    """Return whether *record* tells that somebody was refused the lock *name*."""
    told = record.get("name")
    is_named = isinstance(told, str) and is_text(told) and shorten(told) == shorten(name)
    return is_named and record.get("event") in REFUSALS


# --- the call that is asked about --------------------------------------------------------


def find_task(app: Any, name: str) -> Any:
    """
    Return the task *name* of *app*.

    Raises:
        CallError: There is none, or it takes no lock; names the nearest ones.
    """
    task = app.tasks.get(name)
    if task is None:
        ours = sorted(n for n in app.tasks if not n.startswith("celery."))
        near = difflib.get_close_matches(name, ours, 3) or ours[:3]
        hint = f"; did you mean {' or '.join(near)}?" if near else "; the app has no tasks"
        raise CallError(f"There is no task {name!r}{hint}")
    if not takes_lock(task):
        raise CallError(f"{name} takes no lock: it is no RedlockTask")
    return task


def name_of_call(task: Any, args: str, kwargs: str) -> str:
    """
    Return the lock name of a call of *task*.

    Args:
        task: A `RedlockTask`.
        args: Positional arguments, as a JSON list.
        kwargs: Keyword arguments, as a JSON object.

    Raises:
        CallError: They are no JSON, or do not fit the task. Repeats no value of theirs.
    """
    called = json_of("ARGS", args, list), json_of("KWARGS", kwargs, dict)
    try:
        name = task.lock_name(*called)
    except LockKeyError as error:
        raise CallError(str(error)) from None
    except Exception as error:  # a lock_name() of the user's
        msg = f"{task.name}: its lock_name() raised {type(error).__name__}"
        raise CallError(msg) from error
    if not (isinstance(name, str) and name):
        raise CallError(f"{task.name}: its lock_name() returned no name")
    return name


def json_of(what: str, text: str, kind: type) -> Any:
    """Return what *text* says, if it is JSON of this *kind*; raises CallError otherwise."""
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
