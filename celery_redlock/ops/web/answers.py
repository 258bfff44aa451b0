"""Short answers to a search: why did my task not run?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from celery_redlock.ops.listing import reservation_in_words
from celery_redlock.ops.web.format import moment, seconds, text
from celery_redlock.reading.journal_view import Entry
from celery_redlock.reading.search import Found
from celery_redlock.reading.sentences import sentence, wording
from celery_redlock.reading.stored import LockView, ReservationView
from celery_redlock.words import who

__all__ = ["answers"]

#: How many locks, and how many refusals, are in the short answer; the tables have them all.
ANSWERS = 3
UNCLEAR = (
    "Cannot tell whether such a lock is held: too few nodes answered. Nothing that was read "
    "matches."
)
NOTHING = (
    "Nothing matches: no live lock, and nothing in the journal. A task that is not here has run, "
    "waits in its queue, or was refused so long ago that the journal has forgotten."
)


def answers(
    found: Found,
    reserved: Sequence[ReservationView],
    rows: Sequence[Entry],
    nodes: int,
    *,
    is_known: bool,
) -> list[tuple[str, Mapping[str, Any]]]:
    """
    Return in sentences what a search has found, the present first; with the record of each.

    *rows* are newest first; *is_known* says whether enough nodes answered to exclude such a lock.
    """
    # The newest, whatever it says, and before it what somebody may have to act on.
    notable = [it for it in rows[1:] if wording(it.record).mark != "plain"]
    sentences: list[tuple[str, Mapping[str, Any]]] = [
        (of_lock(lock, nodes, len(found.silent)), {"task": None, **lock.holder, "name": lock.name})
        for lock in found.locks[:ANSWERS]
    ]
    sentences += [
        (of_reservation(it), {"task": None, **it.reservation.info, "name": it.name})
        for it in reserved[:ANSWERS]
    ]
    sentences += [(of_entry(it), it.record) for it in (*rows[:1], *notable)[:ANSWERS]]
    return sentences or [(NOTHING if is_known else UNCLEAR, {})]


def of_lock(lock: LockView, nodes: int, silent: int) -> str:
    name, holder = text(lock.name), text(who(lock.holder, time.time()), 400)
    on = f"{len(lock.stored_on)} of {nodes} nodes"
    if lock.ttl is None:
        return f"Lock {name} never expires, so nobody can take it until it is removed: {holder}."
    if lock.is_unclear(nodes, silent):
        few = "may vote" if lock.quarantined else "answered"
        return (
            f"Lock {name} is on at least {on}, for {holder}; too few {few} to say whether it is "
            "held."
        )
    if not lock.is_held(nodes):
        return (
            f"Lock {name} is on only {on}: an attempt under way, or what is left of one, by "
            f"{holder}."
        )
    return f"Lock {name} is held by {holder}; {seconds(lock.ttl) or 'long'} of its lease are left."


def of_reservation(view: ReservationView) -> str:
    is_by = "debounced:" if view.reservation.is_burst else "reserved by"
    return f"Name {text(view.name)} is {is_by} {text(reservation_in_words(view.reservation))}."


def of_entry(entry: Entry) -> str:
    at = moment(entry.record.get("at"))
    return f"{f'{at.ago} ago: ' if at else ''}{text(sentence(entry.record), 600)}."
