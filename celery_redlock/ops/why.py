"""Explanation of why a call does not run, by nodes, the task's options and the journal."""

from __future__ import annotations

import contextlib
import threading
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from celery.states import READY_STATES

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import RATE, rate_name, without_rate
from celery_redlock.lock.scripts.votes import Verdict
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
from celery_redlock.task.naming.task_lock import lock_of
from celery_redlock.task.options import LockOptions
from celery_redlock.words import counted

__all__ = [
    "Explanation",
    "explain",
    "explained",
    "lines_of_name",
    "most_places",
]

Value = TypeVar("Value")
#: Where another call's limits are not known from a lock name.
ASK_WITH_CALL = "Its arguments say how many there may be; ask with them: 'redlock why {task} ARGS'."
#: How many refusals are shown.
RECENT = 10
#: How long workers have to answer, and they and the result backend in all [s].
ANSWERS, PATIENCE = 1.0, 3.0


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
    is_by_call: bool = False  # whether more places may be free: a call would say how many there are

    @property
    def lock(self) -> OneLock:
        return self.places.all[0]

    @property
    def holder(self) -> LockView | None:
        return self.places.all[0].holder

    @property
    def lock_holder(self) -> LockView | None:
        """The same, None where the first is a start: no worker holds that."""
        return self.holder if of_locks([self.lock]) else None

    @property
    def state(self) -> str:
        return self.places.state

    @property
    def names(self) -> list[str]:
        """The lock names of the call, also those that it takes no lock of, but starts by a rate."""
        return list(dict.fromkeys(map(without_rate, self.places.names)))

    @property
    def headline(self) -> tuple[str, Mark]:
        locks, starts = of_locks(self.places.all), of_starts(self.places.all)
        if (starts or len(locks) > 1) and self.state != "unavailable":
            of = "lock" if len({place.name for place in locks}) > 1 else "place"
            parts = (
                [self._used(locks, of, "held")] if len(locks) > 1 else [it.state for it in locks]
            )
            parts += [self._used(starts, "start", "used, by lock_rate")] if starts else []
            return f"{'; '.join(parts)}.", "warn" if self.state == "held" else "good"
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

    def _used(self, places: Sequence[OneLock], of: str, used: str) -> str:
        held = sum(place.state == "held" for place in places)
        count = counted(held, of) if self.is_by_call else f"{held} of {counted(len(places), of)}"
        is_one = 1 in {held, len(places)}
        return f"{count} {'is' if is_one else 'are'} {used}"


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
        workers={} if found.lock_holder is None else claims(app, found.lock_holder.holder),
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
    is_by_call = False
    if task is None:
        task = task_of(app, places)
        limits = limits_of_name(task, places.names[0])
        is_by_call = takes_lock(task) and lock_of(task).options.is_by_call
        places = places.up_to(dict.fromkeys(limits, 1) if is_by_call else limits)
    name = "" if task is None else task.name
    found = Explanation(places, name, is_by_call=is_by_call)
    names = {*found.names, *places.names}
    recent = [it for it in records if any(is_refusal_of(it, name) for name in names)]
    found = replace(found, recent=recent[-RECENT:])
    if not takes_lock(task):
        return found
    options, lock = lock_of(task).options, found.lock
    is_quorate = lock.voting >= quorum(len(lock.nodes))
    run = ASK_WITH_CALL.format(task=task.name)
    if not is_by_call:
        most = max((len(places.of(it.name)) for it in of_locks(places.all)), default=0)
        over = is_over_rate(places)
        run = at_run(task, options, places.verdict, most, is_over_rate=over)
    publish = at_publish(options, lock.queued, lock.next, is_quorate=is_quorate)
    return replace(found, run=run, publish=publish)


def is_over_rate(places: Places) -> bool:
    """Return whether a call would be granted its locks, and not its start."""
    locks = of_locks(places.all)
    is_free = not locks or Places(locks).verdict is Verdict.GRANTED
    return is_free and places.verdict is Verdict.TAKEN


def of_locks(places: Sequence[OneLock]) -> list[OneLock]:
    return [place for place in places if not place.name.endswith(RATE)]


def of_starts(places: Sequence[OneLock]) -> list[OneLock]:
    return [place for place in places if place.name.endswith(RATE)]


def lines_of_name(app: Any, name: str) -> dict[str, int]:
    """
    Return *name* and that of its starts, and how many places any task of *app* has at most.

    Where *name* is that of a start, as ``redlock ls`` shows it, the name whose start it is.
    """
    name = without_rate(name)
    starts = max((it.most_starts for it in options_in(app)), default=0)
    return {name: most_places(app), **({rate_name(name): starts} if starts else {})}


def limits_of_name(task: Any, name: str) -> dict[str, int]:
    """Return the same of one *task*, None if it is not known: then it has a place."""
    options = options_of(task)
    if options is None:
        return {name: 1}
    return {name: options.most_places if options.limit else 0, rate_name(name): options.most_starts}


def options_in(app: Any) -> list[LockOptions]:
    found = [] if app is None else [options_of(task) for task in app.tasks.values()]
    return [options for options in found if options is not None]


def options_of(task: Any) -> LockOptions | None:
    """Return those of a *task* that takes a lock; None where no worker has such a task."""
    if takes_lock(task):
        with contextlib.suppress(ConfigurationError):
            return lock_of(task).options
    return None


def task_of(app: Any, places: Places) -> Any:
    holders = (view.holder for place in places.all for view in place.views)
    named = next((scalar(holder.get("task")) for holder in holders), None)
    return None if app is None else app.tasks.get(str(named))


def most_places(app: Any) -> int:
    """Return how many places the lock of any task of *app* has at most [>= 1]."""
    return max((it.most_places for it in options_in(app)), default=1)
