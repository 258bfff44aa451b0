"""
When the slots of a schedule are due: the same answer on every machine, whatever it ran before.

A plain interval is anchored: one of 30 s is due at every half minute of Unix time, one of a day
at midnight UTC. A relative one is anchored in the app's time zone. For crontab, solar and any
other schedule Celery's own arithmetic is asked, from points that depend on nothing but the time.

Source:
    FACTS 9; `celery.schedules`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from celery.schedules import schedule, solar

__all__ = ["due_between", "interval_of", "last_due", "next_due"]

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
DAY = timedelta(days=1)
MILLISECOND = timedelta(milliseconds=1)
#: How far back the newest slot of a schedule is looked for, step by step.
WINDOWS = [timedelta(minutes=2), timedelta(hours=2), DAY * 2, DAY * 32, DAY * 367, DAY * 366 * 9]
#: More slots than this are not told one by one; a schedule that never moves on ends there, too.
MOST = 100_000


def interval_of(plan: Any) -> timedelta | None:
    """Return the interval of a plain interval schedule, None for any other."""
    if type(plan) is not schedule:
        return None
    return max(timedelta(milliseconds=round(plan.seconds * 1000)), MILLISECOND)


def due_between(plan: Any, after: datetime, until: datetime) -> list[datetime]:
    """
    Return the slots of *plan* that are due after *after* and not after *until*, in order.

    Args:
        plan: A schedule of Celery's, or of somebody else.
        after: An aware date.
        until: Likewise.

    Returns:
        Dates in UTC, in whole milliseconds; the newest `MOST` of them.
    """
    every = interval_of(plan)
    if every is not None:
        found: list[datetime] = []
        due = last_on_grid(plan, every, until)
        while due > after and len(found) < MOST:
            found.append(due)
            due = last_on_grid(plan, every, due - MILLISECOND)
        return found[::-1]
    return [due for due in asked(plan, after, until) if after < due <= until][-MOST:]


def last_due(plan: Any, until: datetime) -> datetime | None:
    """Return the newest slot of *plan* that is due by *until*; None if there is none for years."""
    every = interval_of(plan)
    if every is not None:
        return last_on_grid(plan, every, until)
    for window in WINDOWS:
        found = due_between(plan, until - window, until)
        if found:
            return found[-1]
    return None


def last_on_grid(plan: Any, every: timedelta, until: datetime) -> datetime:
    """Return the newest point of the grid of an interval that is not after *until*."""
    if not plan.relative:
        return EPOCH + (until - EPOCH) // every * every
    zone = plan.tz
    local = until.astimezone(zone)
    wall = local.replace(tzinfo=None, fold=0)
    over = (wall - EPOCH.replace(tzinfo=None)) % every
    if every < DAY:  # real time: an hour that the clocks repeat has slots of its own
        return (until - over).astimezone(timezone.utc)
    return (wall - over).replace(tzinfo=zone).astimezone(timezone.utc)


def asked(plan: Any, after: datetime, until: datetime) -> Iterator[datetime]:
    """Yield what *plan* itself says is due between two dates, and perhaps a little outside."""
    if isinstance(plan, solar):  # its search ends elsewhere by milliseconds if it begins elsewhere
        day = after.astimezone(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
        while day <= until:
            due = next_due(plan, day)
            if due is not None and due < day + DAY:
                yield due
            day += DAY
        return
    due = next_due(plan, after)
    while due is not None and after < due <= until:
        yield due
        after, due = due, next_due(plan, due)


def next_due(plan: Any, after: datetime) -> datetime | None:
    """
    Return the first slot after *after*, in UTC and whole milliseconds; None for none.

    That of an interval as if *after* were one.
    """
    still = copy.copy(plan)  # one whose clock stands, so that what is left of now is exact
    still.nowfun = lambda: after
    left = still.remaining_estimate(after)
    if left is None:
        return None
    due: datetime = (after + left).astimezone(timezone.utc)
    return due.replace(microsecond=due.microsecond // 1000 * 1000)
