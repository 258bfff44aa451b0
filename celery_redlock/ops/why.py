"""Why a call does not run: what the nodes, the task's options and the journal say of one lock."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery_redlock.errors import ConfigurationError, LockKeyError
from celery_redlock.lock.foreign import is_text
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.scripts import shorten
from celery_redlock.lock.votes import Verdict
from celery_redlock.ops.listing import scalar
from celery_redlock.ops.outlook import at_publish, at_run
from celery_redlock.reading.journal import KEPT, JournalReader
from celery_redlock.reading.one_lock import (
    HolderSeen,
    NodeLook,
    ReservationSeen,
    holders,
    look,
    marker,
    what_would_be,
)
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
        name: Lock name.
        task: Name of the task whose options count; "" if unknown.
        looks: What each node has of it.
        holders: Who holds it on any node, the one on most nodes first.
        verdict: What the nodes would say to another call.
        run: What a worker would do with it then; "" where the task is unknown.
        publish: What ``apply_async`` would do with it; None where it just publishes.
        queued: Who is queued or runs, of tasks with ``unique_until``.
        following: Who waits for that one to end.
        recent: The newest refusals in the journal, oldest first.
    """

    name: str
    task: str
    looks: Sequence[NodeLook]
    holders: Sequence[HolderSeen]
    verdict: Verdict
    run: str
    publish: str | None
    queued: ReservationSeen | None
    following: ReservationSeen | None
    recent: Sequence[dict[str, Any]]

    @property
    def holder(self) -> HolderSeen | None:
        """Who has a majority of the nodes; None for nobody."""
        most = self.holders[0] if self.holders else None
        return most if most and len(most.votes) >= quorum(len(self.looks)) else None

    @property
    def state(self) -> str:
        """``"held"``, ``"free"``, or ``"unavailable"`` if no quorum could say."""
        if self.holder is not None or self.verdict is Verdict.TAKEN:
            return "held"
        return "free" if self.verdict is Verdict.GRANTED else "unavailable"


def explain(app: Any, settings: Settings, name: str, task: Any = None) -> Explanation:
    """
    Ask the nodes and the journal for the lock *name*.

    Args:
        app: The app.
        settings: Of it.
        name: Lock name.
        task: Whose lock it is; None: that of the holder, if the app knows it.
    """
    looks = look(settings.nodes, settings.rules, name)
    found, verdict = holders(looks), what_would_be(looks)
    if task is None and found:
        task = app.tasks.get(str(scalar(found[0].info.get("task"))))
    options = lock_of(task).options if takes_lock(task) else None
    queued, following = marker([one.queued for one in looks]), marker([one.next for one in looks])
    return Explanation(
        name=name,
        task="" if task is None else task.name,
        looks=looks,
        holders=found,
        verdict=verdict,
        run="" if options is None else at_run(task, options, verdict),
        publish=None
        if options is None
        else at_publish(options, queued, following, is_quorate=is_quorate(looks)),
        queued=queued,
        following=following,
        recent=refusals_of(settings, name),
    )


def is_quorate(looks: Sequence[NodeLook]) -> bool:
    """Return whether a majority of the nodes votes, as *looks* tell."""
    voting = sum(1 for one in looks if one.status.state == "up" and not one.problem)
    return voting >= quorum(len(looks))


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
