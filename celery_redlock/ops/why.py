"""Explanation of why a call does not run, by nodes, the task's options and the journal."""

from __future__ import annotations

import contextlib
import difflib
import json
import threading
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from celery.states import READY_STATES

from celery_redlock.errors import ConfigurationError, LockKeyError
from celery_redlock.lock.lease import quorum
from celery_redlock.ops.forecast import at_publish, at_run
from celery_redlock.ops.text import scalar
from celery_redlock.reading.journal import KEPT
from celery_redlock.reading.journal_view import is_refusal_of
from celery_redlock.reading.one_lock import OneLock
from celery_redlock.reading.places import Places, read_places
from celery_redlock.reading.quorum import Mark
from celery_redlock.reading.stored import LockView
from celery_redlock.settings import Settings
from celery_redlock.task.base import takes_lock
from celery_redlock.task.naming.task_lock import NO_HEADERS, lock_of, names_of

__all__ = [
    "CallError",
    "Explanation",
    "explain",
    "explained",
    "find_task",
    "limits_in_call",
    "most_places",
]

Value = TypeVar("Value")
#: How many refusals are shown.
RECENT = 10
#: How long workers have to answer, and they and the result backend in all [s].
ANSWERS, PATIENCE = 1.0, 3.0


class CallError(ConfigurationError):
    """There is no such task, or it takes no such arguments."""


@dataclass(frozen=True)
class Explanation:
    """All that is known of the locks of one call."""

    places: Places
    task: str = ""  # whose options count; "" if unknown
    run: str = ""  # what a worker would do with another call; "" where the task is unknown
    publish: str | None = None  # what apply_async would do with it; None where it just publishes
    recent: Sequence[Mapping[str, Any]] = ()  # the newest refusals in the journal, oldest first
    #: Id of an ended task that has the name reserved -> the state of its result
    results: Mapping[str, str] = field(default_factory=dict)
    #: Worker -> whether it says that it has the lock; empty if none was asked or answers
    workers: Mapping[str, bool] = field(default_factory=dict)

    @property
    def lock(self) -> OneLock:
        return self.places.all[0]

    @property
    def holder(self) -> LockView | None:
        return self.places.all[0].holder

    @property
    def state(self) -> str:
        return self.places.state

    @property
    def headline(self) -> tuple[str, Mark]:
        if len(self.places.all) > 1 and self.state != "unavailable":
            of = "locks" if len(self.places.names) > 1 else "places"
            held = sum(place.state == "held" for place in self.places.all)
            words = f"{held} of {len(self.places.all)} {of} {'is' if held == 1 else 'are'} held."
            return words, "warn" if self.state == "held" else "good"
        if self.holder is not None:
            return "held.", "warn"
        if self.state == "held":
            return "held by several that keep each other from a majority.", "warn"
        if self.state == "free":
            return "free.", "good"
        voting, nodes = self.lock.voting, len(self.lock.nodes)
        count = f"{voting} of {nodes} nodes vote, {quorum(nodes)} needed"
        words = f"no quorum could say: {count if nodes > 1 else 'the one node does not vote'}."
        return words, "bad"


def explain(
    app: Any, settings: Settings, limits: Mapping[str, int], task: Any = None
) -> Explanation:
    """
    Return what the nodes, the journal, workers and the result backend say of all places of locks.

    *limits* has the places of each name, `most_places` where that is not known. The *task* is that
    of a holder if none is given.
    """
    places = read_places(settings.nodes, settings.rules, limits, KEPT)
    found = explained(app, places, places.records, task)
    reserved = [scalar(it.reservation.info.get("task_id")) for it in found.lock.reservations]
    return replace(
        found,
        results=ended_results(app, [it for it in reserved if it]),
        workers={} if found.holder is None else claims(app, found.holder.holder),
    )


def ended_results(app: Any, task_ids: Sequence[Any]) -> dict[str, str]:
    """Return the states of ended tasks that the result backend gives in time."""

    def ask(found: dict[str, str]) -> None:
        for task_id in task_ids:
            # Of any kind: there may be no backend, or none that answers.
            with contextlib.suppress(Exception):
                state = app.backend.get_task_meta(str(task_id))["status"]
                if state in READY_STATES:
                    found[str(task_id)] = state

    return asked_in_time(ask) if task_ids and app is not None else {}


def claims(app: Any, holder: Mapping[str, Any]) -> dict[str, bool]:
    """Return which workers answer in time, and whether *holder* is their own."""

    def ask(found: dict[str, bool]) -> None:
        with contextlib.suppress(Exception):  # of any kind: there may be no broker
            replies = app.control.broadcast("redlock_locks", reply=True, timeout=ANSWERS)
            for worker, answer in ChainMap(*replies or ()).items():
                locks = answer.get("locks", ()) if isinstance(answer, Mapping) else ()
                found[worker] = any(is_claimed(holder, lock) for lock in locks)

    has_task = app is not None and scalar(holder.get("task_id")) is not None
    return asked_in_time(ask) if has_task else {}


def is_claimed(holder: Mapping[str, Any], lock: Any) -> bool:
    known = ("task_id", "pid")
    return isinstance(lock, Mapping) and all(lock.get(key) == holder.get(key) for key in known)


def asked_in_time(ask: Callable[[dict[str, Value]], None]) -> dict[str, Value]:
    """Return what *ask* finds in a thread: a broker that is down is retried for long."""
    found: dict[str, Value] = {}
    asking = threading.Thread(target=ask, args=(found,), name="redlock-ask", daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return dict(found)


def explained(
    app: Any, places: Places, records: Iterable[Mapping[str, Any]], task: Any = None
) -> Explanation:
    """Return what is known of *places*, with the *records* of the journal, oldest first."""
    if task is None:
        task = task_of(app, places)
        places = places.up_to(max(lock_of(task).options.limit) - 1 if takes_lock(task) else 0)
    recent = [it for it in records if any(is_refusal_of(it, name) for name in places.names)]
    name = "" if task is None else task.name
    found = Explanation(places, name, recent=recent[-RECENT:])
    if not takes_lock(task):
        return found
    options, lock = lock_of(task).options, found.lock
    is_quorate = lock.voting >= quorum(len(lock.nodes))
    return replace(
        found,
        run=at_run(task, options, places.verdict),
        publish=at_publish(options, lock.queued, lock.next, is_quorate=is_quorate),
    )


def task_of(app: Any, places: Places) -> Any:
    holders = (view.holder for place in places.all for view in place.views)
    named = next((scalar(holder.get("task")) for holder in holders), None)
    return None if app is None else app.tasks.get(str(named))


def most_places(app: Any) -> int:
    """Return how many places the lock of any task of *app* has at most [>= 1]."""
    most = 1
    for task in () if app is None else app.tasks.values():
        if takes_lock(task):
            with contextlib.suppress(ConfigurationError):  # no worker has such a task
                most = max(most, *lock_of(task).options.limit)
    return most


# --- the call that is asked about --------------------------------------------------------


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
    names = names_in_call(task, args, kwargs, headers)
    try:
        return lock_of(task).options.limits(names)
    except LockKeyError as error:
        raise CallError(str(error)) from None


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
