"""Slots of a schedule that are due and were not published: those to publish, those too old."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from celery.schedules import BaseSchedule

from celery_redlock.beat.due import MILLISECOND, due_between, last_due, next_due

__all__ = ["SHORTEST_CATCH_UP", "Missed", "in_time"]

#: How old slots are published without a deadline, at least [s]; or so many takeovers.
SHORTEST_CATCH_UP, TAKEOVERS = 60.0, 2
#: How long a takeover may take beyond the lease [s].
TAKEOVER = 2.0


@dataclass(frozen=True)
class Missed:
    """Slots to publish, in order, and the newest of those that are too old."""

    due: list[datetime]
    dropped: datetime | None


def in_time(
    plan: BaseSchedule, last: datetime | None, now: datetime, deadline: float | None, ttl: float
) -> Missed:
    """
    Return the slots of a schedule that are to be published after *last*, the last one that was.

    *deadline* is how old a slot may be [s]; None for the newest of any age, as Celery has it, and
    for all those that fell due while another leader may have been elected.
    """
    allowed = deadline
    if allowed is None:
        allowed = max(SHORTEST_CATCH_UP, TAKEOVERS * (ttl + TAKEOVER))
    oldest = now - timedelta(seconds=allowed)
    if last is None:
        newest = last_due(plan, now)
        if newest is None or (deadline is not None and newest < oldest):
            return Missed([], newest)
        return Missed([newest], None)
    due = due_between(plan, max(last, oldest - MILLISECOND), now)
    if due and (last >= oldest - MILLISECOND or next_due(plan, last) == due[0]):
        return Missed(due, None)  # a look further back may be long
    if not due and deadline is None:
        due = newer_than(last, last_due(plan, now))
    dropped = newer_than(last, last_due(plan, due[0] - MILLISECOND if due else now))
    return Missed(due, dropped[0] if dropped else None)


def newer_than(last: datetime, due: datetime | None) -> list[datetime]:
    return [due] if due is not None and due > last else []
