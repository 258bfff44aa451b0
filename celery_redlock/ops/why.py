"""Why a call does not run: what the nodes, the task's options and the journal say of one lock."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from celery_redlock.errors import ConfigurationError, LockKeyError
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.votes import Verdict
from celery_redlock.ops.listing import scalar
from celery_redlock.ops.outlook import at_publish, at_run
from celery_redlock.reading.journal import KEPT, JournalReader
from celery_redlock.reading.journal_view import is_refusal_of
from celery_redlock.reading.one_lock import OneLock, read_lock
from celery_redlock.reading.quorum import Mark
from celery_redlock.reading.stored import LockView
from celery_redlock.settings import Settings
from celery_redlock.task.base import takes_lock
from celery_redlock.task.task_lock import lock_of

__all__ = ["CallError", "Explanation", "explain", "explained", "find_task", "name_of_call"]

#: How many refusals are told.
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
    recent: Sequence[Mapping[str, Any]] = ()

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

    @property
    def headline(self) -> tuple[str, Mark]:
        """In a few words how it is, and how bad that is."""
        if self.holder is not None:
            return "held.", "warn"
        if self.state == "held":
            return "held by several that keep each other from a majority.", "warn"
        if self.state == "free":
            return "free.", "good"
        voting, nodes = self.lock.voting, len(self.lock.nodes)
        told = f"no quorum could say: {voting} of {nodes} nodes vote, {quorum(nodes)} needed."
        return told, "bad"


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
    with contextlib.closing(JournalReader(settings.nodes, settings.rules)) as reader:
        return explained(app, lock, reader.recent(KEPT), task)


def explained(
    app: Any, lock: OneLock, records: Iterable[Mapping[str, Any]], task: Any = None
) -> Explanation:
    """Return what is known of *lock*, with the *records* of the journal, oldest first."""
    if task is None and lock.views and app is not None:
        task = app.tasks.get(str(scalar(lock.views[0].holder.get("task"))))
    recent = [it for it in records if is_refusal_of(it, lock.name)][-RECENT:]
    found = Explanation(lock, "" if task is None else task.name, recent=recent)
    if not takes_lock(task):
        return found
    options = lock_of(task).options
    is_quorate = lock.voting >= quorum(len(lock.nodes))
    return replace(
        found,
        run=at_run(task, options, lock.verdict),
        publish=at_publish(options, lock.queued, lock.next, is_quorate=is_quorate),
    )


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
        raise CallError(
            f"{name} takes no lock: it is no RedlockTask, and redlock_protect does not name it"
        )
    return task


def name_of_call(task: Any, args: str = "[]", kwargs: str = "{}") -> str:
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
