"""
Entries of a schedule, whichever scheduler they come from.

Celery's own, those of django-celery-beat and those of RedBeat differ in how they are moved on
and in where they keep when they last ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from celery import beat

from celery_redlock.beat.due import interval_of, last_due, twin_of
from celery_redlock.errors import LockKeyError
from celery_redlock.lock.records import place_name
from celery_redlock.task.base import takes_lock
from celery_redlock.task.messages.envelope import Envelope
from celery_redlock.task.messages.slot import Slot
from celery_redlock.task.naming.task_lock import lock_of, names_of
from celery_redlock.task.options import overlap_word

__all__ = [
    "current",
    "for_slot",
    "overlap_of",
    "places_of_run",
    "ran_last",
    "recall",
    "reserve",
    "with_arguments",
]


def overlap_of(entry: Any, app: Any) -> str:
    """
    Return what to do with a slot of *entry* while the run of an earlier one has not ended.

    That of the entry's options, also where its scheduler does not keep them (django-celery-beat);
    else that of its task.
    """
    static = app.conf.beat_schedule.get(entry.name) or {}
    declared: Mapping[str, Any] = static.get("options") or {} if isinstance(static, Mapping) else {}
    where = f"beat_schedule[{entry.name!r}]: overlap"
    for options in (entry.options or {}, declared):
        if options.get("overlap") is not None:
            return overlap_word(where, options["overlap"])
    task: Any = app.tasks.get(entry.task)
    return task.overlap if takes_lock(task) else "skip"


def places_of_run(task: Any, entry: Any) -> list[str]:
    """
    Return the places of which a run of *entry* has one, as lock names.

    Of several lock names those of the first: a run has all names. Empty if *task* takes no lock
    that we know of, or is in report mode, whose overlaps are reported where they run.
    """
    if not takes_lock(task) or lock_of(task).options.only_reports:
        return []
    try:
        headers = (entry.options or {}).get("headers") or {}
        names = names_of(task, entry.args, entry.kwargs, headers)
        limits = lock_of(task).options.limits(names, entry.args, entry.kwargs)
    except (LockKeyError, TypeError):  # it will fail where it runs, and say why
        return []
    return [place_name(names[0], place) for place in range(limits.get(names[0], 0))]


def for_slot(entry: Any, slot: Slot, task_id: str) -> Any:
    published = twin_of(entry)
    options = {k: v for k, v in (entry.options or {}).items() if k != "overlap"}
    # The same publish whoever makes it: one that is repeated, as of a leader that died, ends unrun.
    envelope = Envelope(publish_id=task_id, slot=slot)
    headers = {**(options.get("headers") or {}), **envelope.header(task_id)}
    published.options = {**options, "task_id": task_id, "headers": headers}
    return published


def with_arguments(entry: Any) -> Any:
    """Return a copy of *entry* whose lazy arguments are evaluated, once for all who ask."""
    evaluated = twin_of(entry)
    evaluated.args = beat._evaluate_entry_args(entry.args)  # type: ignore[attr-defined]  # noqa: SLF001
    evaluated.kwargs = beat._evaluate_entry_kwargs(entry.kwargs)  # type: ignore[attr-defined]  # noqa: SLF001
    return evaluated


def current(scheduler: Any, entry: Any) -> Any:
    cls = type(entry)
    if hasattr(cls, "from_key"):  # RedBeat's schedule lists those that are due alone
        try:
            entry = cls.from_key(entry.key, app=scheduler.app)
        except KeyError:
            return None
        return entry if entry.enabled else None
    return scheduler.schedule.get(entry.name)


def ran_last(entry: Any) -> datetime | None:
    last = entry.last_run_at
    if last is None or last.tzinfo is not None:
        return last  # type: ignore[no-any-return]
    return last.replace(tzinfo=timezone.utc)  # type: ignore[no-any-return]


def recall(entry: Any, last: datetime | None) -> None:
    """Let *entry* know when it ran *last*, whoever published it; None if nobody knows."""
    last = last or ran_last(entry)
    if last is None:
        return
    if interval_of(entry.schedule) is not None:
        last = last_due(entry.schedule, last)
    if last is not None and last != ran_last(entry):
        set_last_run(entry, last)


def set_last_run(entry: Any, moment: datetime) -> None:
    moment = in_zone_of(entry, moment)
    entry.last_run_at = moment
    if hasattr(entry, "model"):  # of django-celery-beat, which makes its entries anew from it
        entry.model.last_run_at = moment


def in_zone_of(entry: Any, moment: datetime) -> datetime:
    """*moment* in the zone in which *entry* keeps when it ran; before 5.6 that matters."""
    last = entry.last_run_at
    if last is None:
        return moment
    if last.tzinfo is None:
        return moment.astimezone(timezone.utc).replace(tzinfo=None)
    return moment.astimezone(last.tzinfo)


def reserve(inherited: Callable[[Any], Any], entry: Any, now: datetime) -> Any:
    """Move *entry* on by *inherited*, as its scheduler does, but leave an interval on its grid."""
    if interval_of(entry.schedule) is None:
        return inherited(entry)
    due = last_due(entry.schedule, now)
    before = ran_last(entry)
    if due is None or (before is not None and due <= before):
        return inherited(entry)  # nothing was due on the grid: once more would be at once
    return inherited(_OnGrid(entry, due))


class _OnGrid:
    """An entry whose next instance ran last at a moment that we choose."""

    def __init__(self, entry: Any, moment: datetime) -> None:
        self._entry = entry
        self._moment = moment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __next__(self) -> Any:
        entry, cls = self._entry, type(self._entry)
        # RedBeat stores the next instance while it makes it; those of Celery take the date, too.
        if cls.__next__ is cls._next_instance:
            moment = in_zone_of(entry, self._moment)
            return entry._next_instance(last_run_at=moment)  # noqa: SLF001
        following = next(entry)
        set_last_run(following, self._moment)
        return following
