"""
Times at which the slots of a schedule are due: the same answer on every machine.

A plain interval is anchored: one of 30 s is due at every half minute of Unix time, one of a day
at midnight UTC. A relative one is anchored in the app's time zone. For crontab, solar and any
other schedule Celery's own arithmetic is asked, from points that depend on nothing but the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from celery.schedules import crontab, schedule, solar

__all__ = ["due_between", "interval_of", "last_due", "left_on_grid", "next_due", "twin_of"]

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
DAY = timedelta(days=1)
MILLISECOND = timedelta(milliseconds=1)
HOUR, QUARTER = timedelta(hours=1), timedelta(minutes=15)
#: How long before a date a change of clocks can matter for what is due after it.
NIGHT = timedelta(hours=3)
#: How far back the newest slot of a schedule is looked for, step by step.
WINDOWS = [timedelta(minutes=2), timedelta(hours=2), DAY * 2, DAY * 32, DAY * 367, DAY * 366 * 9]
#: More slots than this are not listed one by one; a schedule that never moves on ends there, too.
MOST = 100_000


def interval_of(plan: Any) -> timedelta | None:
    """Return the interval of a plain interval schedule, None for any other."""
    kind = type(plan)
    if not issubclass(kind, schedule) or kind.remaining_estimate is not schedule.remaining_estimate:
        return None
    return max(timedelta(milliseconds=round(plan.seconds * 1000)), MILLISECOND)


def due_between(plan: Any, after: datetime, until: datetime) -> list[datetime]:
    """
    Return the slots of *plan* that are due after *after* and not after *until*, in order.

    All dates are aware; those of slots are in UTC, in whole milliseconds. The newest `MOST` of
    them.
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
    if not plan.relative:
        return EPOCH + (until - EPOCH) // every * every
    zone = plan.tz
    wall = until.astimezone(zone).replace(tzinfo=None, fold=0)
    point = on_grid(wall, every)
    points = [point]
    if changes_clocks(plan, until - NIGHT, until):
        # The wall may have shown later points before: the last one by the clocks of then, or, if
        # these had been changed by that time, the one before it.
        latest = on_grid(min(wall_before(plan, until), wall + HOUR), every)
        points += [later for later in (latest - every, latest) if later > point]
    # An hour that the clocks repeat has slots of its own, if there are such every hour.
    folds = (0, 1) if every <= HOUR else (0,)
    found = [
        point.replace(tzinfo=zone, fold=fold).astimezone(timezone.utc)
        for point in points
        for fold in folds
    ]
    on_time = [moment for moment in found if moment <= until]
    return max(on_time, default=(points[0] - every).replace(tzinfo=zone).astimezone(timezone.utc))


def left_on_grid(plan: Any, now: datetime) -> float | None:
    """Return the time to the next slot of a plain interval schedule [s]; None for any other."""
    every = interval_of(plan)
    if every is None:
        return None
    return (last_on_grid(plan, every, now) + every - now).total_seconds()


def on_grid(wall: datetime, every: timedelta) -> datetime:
    """The last point of the grid that a wall clock has shown at *wall*."""
    return wall - (wall - EPOCH.replace(tzinfo=None)) % every


def wall_before(plan: Any, moment: datetime) -> datetime:
    """The wall at *moment*, if its clock had not been changed that night."""
    wall = moment.astimezone(timezone.utc).replace(tzinfo=None)
    return wall + ((moment - NIGHT).astimezone(plan.tz).utcoffset() or timedelta())


def asked(plan: Any, after: datetime, until: datetime) -> Iterator[datetime]:
    """Yield what *plan* itself says is due between two dates, and perhaps a little outside."""
    if isinstance(plan, solar):
        yield from asked_of_the_sun(plan, after, until)
        return
    if isinstance(plan, crontab):
        yield from asked_of_the_clock(plan, after, until)
        return
    due = next_due(plan, after)
    while due is not None and after < due <= until:
        yield due
        after, due = due, next_due(plan, due)
        if due == after:  # it was cut to whole milliseconds
            due = next_due(plan, after + MILLISECOND)


def asked_of_the_clock(plan: crontab, after: datetime, until: datetime) -> Iterator[datetime]:
    """
    Yield the slots of a crontab, each as it is found from the quarter of an hour before it.

    In an hour that the clocks repeat Celery says what it was due in the first pass; how far
    that reaches depends on where one begins.
    """
    if changes_clocks(plan, after - NIGHT, until):
        after -= NIGHT  # what lies in an hour that is left out is found from before it only
    start, promised = quarter_of(after), None
    while start <= until:
        due = next_due(plan, start - MILLISECOND)
        if promised is not None and (due is None or due > promised):
            yield promised
        promised = None
        if due is None:
            return
        if due >= start + QUARTER:
            start, promised = quarter_of(due), due
            continue
        while due is not None and start <= due < start + QUARTER:
            yield due
            following = next_due(plan, due)
            due = None if following is None or following <= due else following
        start += QUARTER


def quarter_of(moment: datetime) -> datetime:
    return EPOCH + (moment - EPOCH) // QUARTER * QUARTER


def changes_clocks(plan: Any, after: datetime, until: datetime) -> bool:
    zone = plan.tz
    return after.astimezone(zone).utcoffset() != until.astimezone(zone).utcoffset()


def asked_of_the_sun(plan: solar, after: datetime, until: datetime) -> Iterator[datetime]:
    """
    Yield the events of a solar schedule, each as it is found from the beginning of its day.

    The search ends elsewhere by milliseconds if it begins elsewhere.
    """
    day = midnight(after)
    while day <= until:
        due = next_due(plan, day)
        if due is None or due <= day:
            return
        if due >= day + DAY:  # none on this day, nor on those between
            day = midnight(due)
            continue
        while due is not None and due < day + DAY:  # a day may have two of a kind
            yield due
            due = next_due(plan, due + HOUR)
        day += DAY


def midnight(moment: datetime) -> datetime:
    utc = moment.astimezone(timezone.utc)
    return utc.replace(hour=0, minute=0, second=0, microsecond=0)


def twin_of(thing: Any) -> Any:
    """A shallow copy; copy() would call constructors, which differ."""
    twin = object.__new__(type(thing))
    twin.__dict__.update(thing.__dict__)
    return twin


def next_due(plan: Any, after: datetime) -> datetime | None:
    """
    Return the first slot after *after*, in UTC and whole milliseconds; None for none.

    That of an interval as if *after* were one.
    """
    # A crontab wants dates in its own zone: before Celery 5.6 it does not see to that itself. For
    # any other, what is added would be time on the wall.
    is_crontab = isinstance(plan, crontab)
    after = after.astimezone(plan.tz if is_crontab else timezone.utc)
    still = twin_of(plan)  # one whose clock stands, so that what is left of now is exact
    still.nowfun = lambda: after
    if is_crontab:
        begin, step, _ = still.remaining_delta(after)
        due: datetime = (begin + step).astimezone(timezone.utc)
    else:
        left = still.remaining_estimate(after)
        if left is None:
            return None
        due = after + left
    return due.replace(microsecond=due.microsecond // 1000 * 1000)
