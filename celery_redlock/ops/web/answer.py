"""Why did my task not run? What locks and refusals of a search say about it together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from celery_redlock.ops.web.format import moment, seconds, text
from celery_redlock.reading.journal_view import Entry
from celery_redlock.reading.sentences import sentence, wording
from celery_redlock.reading.stored import LockView
from celery_redlock.words import who

__all__ = ["Sentence", "answer"]

#: A sentence, and the record or holder that it tells of.
Sentence = tuple[str, Mapping[str, Any]]
#: How many locks and refusals are told of in sentences; the tables have them all.
TOLD = 3
UNCLEAR = (
    "It cannot be told whether such a lock is held: too few nodes answered. Nothing that the "
    "others told matches."
)
NOTHING = (
    "Nothing matches: no live lock, and nothing in the journal. A task that is not here has run, "
    "waits in its queue, or was refused so long ago that the journal has forgotten."
)


def answer(
    locks: Sequence[LockView],
    found: Sequence[Entry],
    nodes: int,
    silent: int = 0,
    *,
    is_known: bool = True,
) -> list[Sentence]:
    """
    Return in sentences what a search has found, what holds now first.

    Args:
        locks: Live locks that match.
        found: What happened that matches, newest first.
        nodes: How many there are.
        silent: How many of them did not answer.
        is_known: Whether enough answered to tell that there is no such lock.
    """
    notable = [it for it in found if wording(it.record).mark != "plain"]
    told: list[Sentence] = [
        (of_lock(lock, nodes, silent), {"task": None, **lock.holder, "name": lock.name})
        for lock in locks[:TOLD]
    ]
    told += [(of_entry(it), it.record) for it in notable[:TOLD]]
    return told or [(NOTHING if is_known else UNCLEAR, {})]


def of_lock(lock: LockView, nodes: int, silent: int) -> str:
    """Return who keeps others from *lock*, and for how long."""
    name, holder = text(lock.name), text(who(lock.holder, time.time()), 400)
    on = f"{len(lock.votes)} of {nodes} nodes"
    if lock.ttl is None:
        return f"Lock {name} never expires, so nobody can take it until it is removed: {holder}."
    if lock.is_unclear(nodes, silent):
        return (
            f"Lock {name} stands on {on}, as far as they answered, for {holder}; too few did to "
            "tell whether it is held."
        )
    if not lock.is_held(nodes):
        return (
            f"Lock {name} stands on only {on}: an attempt under way, or what is left of one, by "
            f"{holder}."
        )
    return f"Lock {name} is held by {holder}; {seconds(lock.ttl) or 'long'} of its lease are left."


def of_entry(entry: Entry) -> str:
    """Return what happened, when and why."""
    at = moment(entry.record.get("at"), time.time())
    return f"{f'{at.ago} ago: ' if at else ''}{text(sentence(entry.record), 600)}."
