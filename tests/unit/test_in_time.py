"""Which slots are still published after an outage, and for how long their record is kept."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedule
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.beat import due as due_module
from celery_redlock.beat.due import due_between, last_due
from celery_redlock.beat.missed import SHORTEST_CATCH_UP, TAKEOVER, TAKEOVERS, Missed, in_time
from celery_redlock.beat.slot_votes import LastSlot
from celery_redlock.beat.slots import LONGEST_KEEP, SHORTEST_KEEP, keep_for, settled

NOW = datetime(2026, 3, 1, 12, 0, 30, tzinfo=timezone.utc)
DAY = 86_400.0
TTL = 20.0
APP = Celery("shop", set_as_current=False)


def ago(seconds):
    return NOW - timedelta(seconds=seconds)


def every(seconds):
    return schedule(seconds, app=APP)


class Listed(BaseSchedule):
    def __init__(self, *moments):
        super().__init__(app=APP)
        self.moments = moments
        self.asked = []

    def remaining_estimate(self, last_run_at):
        self.asked.append(last_run_at)
        later = [moment for moment in self.moments if moment > last_run_at]
        return min(later) - self.now() if later else None


# -- nobody knows of a last slot -------------------------------------------------------


@pytest.mark.parametrize("deadline", [None, 30.0, 3600.0])
def test_a_new_entry_begins_with_its_newest_slot(deadline):
    assert in_time(every(60), None, NOW, deadline, TTL) == Missed([ago(30)], None)


def test_a_new_entry_has_a_deadline_too():
    assert in_time(every(60), None, NOW, 29.999, TTL) == Missed([], ago(30))
    assert in_time(every(60), None, NOW, 30.0, TTL) == Missed([ago(30)], None)


def test_without_a_deadline_a_slot_of_any_age_is_published():
    """As Celery has it: the yearly one, too."""
    yearly = crontab(minute=0, hour=0, day_of_month=1, month_of_year=4, app=APP)
    april = datetime(2025, 4, 1, tzinfo=timezone.utc)
    assert in_time(yearly, None, NOW, None, TTL) == Missed([april], None)
    assert in_time(yearly, april - timedelta(days=365), NOW, None, TTL) == Missed([april], None)


@pytest.mark.parametrize("deadline", [None, 60.0])
@pytest.mark.parametrize("last", [None, ago(10)])
def test_what_was_never_due_is_not_missed(deadline, last):
    assert in_time(Listed(ago(-60)), last, NOW, deadline, TTL) == Missed([], None)


# -- the last slot is known ------------------------------------------------------------


@pytest.mark.parametrize("deadline", [None, 10.0, 3600.0])
def test_nothing_is_due_after_the_newest_slot(deadline):
    for last in (ago(30), ago(29), NOW, ago(-30)):
        assert in_time(every(60), last, NOW, deadline, TTL) == Missed([], None)


@pytest.mark.parametrize("deadline", [None, 30.0])
def test_all_slots_since_the_last_one_are_due(deadline):
    missed = in_time(every(5), ago(30), NOW, deadline, TTL)
    assert missed == Missed([ago(25), ago(20), ago(15), ago(10), ago(5), NOW], None)


def test_a_slot_is_due_in_the_very_moment():
    almost = NOW - timedelta(milliseconds=1)
    assert in_time(every(30), ago(30), NOW, 60.0, TTL) == Missed([NOW], None)
    assert in_time(every(30), ago(30), almost, 60.0, TTL) == Missed([], None)


@pytest.mark.parametrize(
    ("deadline", "slots"),
    [(0.0, 1), (9.999, 1), (10.0, 2), (10.001, 2), (19.999, 2), (20.0, 3), (59.999, 6), (60.0, 6)],
)
def test_a_deadline_drops_what_is_older(deadline, slots):
    missed = in_time(every(10), ago(60), NOW, deadline, TTL)
    assert missed.due == [ago(10 * i) for i in reversed(range(slots))]
    assert missed.dropped == (None if slots == 6 else ago(10 * slots))


def test_all_may_be_too_old():
    assert in_time(every(3600), ago(7230), NOW, 29.0, TTL) == Missed([], ago(30))


def test_a_record_is_never_published_again_for_a_deadline():
    missed = in_time(every(10), ago(20), NOW, DAY, TTL)
    assert missed == Missed([ago(10), NOW], None)


@pytest.mark.parametrize("ttl", [0.5, 20.0, 28.0, 28.001, 60.0, 3600.0])
def test_without_a_deadline_a_takeover_loses_nothing(ttl):
    allowed = max(SHORTEST_CATCH_UP, TAKEOVERS * (ttl + TAKEOVER))
    missed = in_time(every(1), ago(2 * allowed), NOW, None, ttl)
    assert len(missed.due) == int(allowed) + 1
    assert missed.dropped == ago(int(allowed) + 1)


def test_without_a_deadline_one_slot_is_made_up_for_after_a_long_outage():
    missed = in_time(
        every(3600), ago(DAY), datetime(2026, 3, 1, 12, 59, tzinfo=timezone.utc), None, TTL
    )
    assert missed == Missed([ago(30)], ago(3630))


def test_the_first_slot_that_is_made_up_for_drops_nothing():
    missed = in_time(every(DAY), ago(DAY + 12 * 3600 + 30), NOW, None, TTL)
    assert missed == Missed([ago(12 * 3600 + 30)], None)


crontabs = [({"minute": "*/5"}, 300), ({"minute": 0}, 3600), ({"hour": 3, "minute": 30}, DAY)]
#: Schedules, and how long it takes from slot to slot [s].
plans = st.sampled_from(
    [(every(step), step) for step in (0.25, 1, 7, 60, 3600, DAY)]
    + [(crontab(**when, app=APP), step) for when, step in crontabs]
)
deadlines = st.none() | st.floats(0, 900)


@given(timed=plans, behind=st.floats(0, 80), deadline=deadlines)
def test_each_slot_is_due_or_dropped(timed, behind, deadline):
    plan, step = timed
    last = last_due(plan, ago(behind * step))
    missed = in_time(plan, last, NOW, deadline, TTL)
    since = due_between(plan, last, NOW)
    first = len(since) - len(missed.due)
    older = since[:first]
    assert missed == Missed(since[first:], older[-1] if older else None)
    if deadline is None:
        assert missed.due or not since
    else:
        oldest = NOW - timedelta(seconds=deadline)
        assert all(moment >= oldest - timedelta(milliseconds=1) for moment in missed.due)
        assert all(moment < oldest for moment in older)


@given(timed=plans, behind=st.floats(0, 80), later=st.floats(0, 60), deadline=deadlines)
def test_two_leaders_agree_on_what_is_due(timed, behind, later, deadline):
    """A second look at the same record later finds the same slots, or fewer as they age."""
    plan, step = timed
    last = last_due(plan, ago(behind * step))
    first = in_time(plan, last, NOW, deadline, TTL).due
    second = [due for due in in_time(plan, last, ago(-later), deadline, TTL).due if due <= NOW]
    assert second == first[len(first) - len(second) :]


# -- after a long outage ---------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch):
    looks, look = [], due_module.last_on_grid

    def counted(*arguments):
        looks.append(arguments)
        return look(*arguments)

    monkeypatch.setattr(due_module, "last_on_grid", counted)
    return looks


@pytest.mark.parametrize("years", [0, 1, 30])
@pytest.mark.parametrize(("deadline", "slots"), [(None, 61), (5.0, 6), (600.0, 601)])
def test_years_of_an_interval_are_not_counted(looks, years, deadline, slots):
    """However long nothing was published, only what is in time is looked at."""
    missed = in_time(every(1), ago(3600 + years * 366 * DAY), NOW, deadline, TTL)
    assert len(missed.due) == slots
    assert len(looks) <= slots + 5


@pytest.mark.parametrize("deadline", [None, 60.0])
@pytest.mark.parametrize("years", [0, 1, 30])
def test_years_of_another_schedule_are_not_counted(years, deadline):
    """It is asked for what is in time and a little before, not for each slot since the last."""
    moments = [ago(60 * minutes + 30) for minutes in range(200)]
    plan = Listed(*moments, ago(20 * DAY))
    missed = in_time(plan, ago(3600 + years * 366 * DAY), NOW, deadline, TTL)
    assert (missed.due, missed.dropped) == ([ago(30)], ago(90))
    assert len(plan.asked) < 10


# -- settled and keep ------------------------------------------------------------------


def test_a_slot_that_is_only_claimed_is_still_to_be_published():
    """The record of a leader that died over a slot leaves that slot to the next one."""
    last = ago(0.5)
    assert settled(None) is None
    assert settled(LastSlot(last.timestamp(), is_settled=True)) == last
    before = settled(LastSlot(last.timestamp(), is_settled=False))
    assert in_time(every(0.5), before, NOW, None, TTL).due == [last, NOW]


@pytest.mark.parametrize("milliseconds", [1, 333, 999, 1001])
@pytest.mark.parametrize("is_settled", [True, False])
def test_a_slot_survives_its_record(milliseconds, is_settled):
    plan = every(0.001)
    slot = NOW - timedelta(milliseconds=milliseconds)
    last = settled(LastSlot(round(slot.timestamp() * 1000) / 1000.0, is_settled))
    due = due_between(plan, last, slot + timedelta(milliseconds=1))
    assert due == ([] if is_settled else [slot]) + [slot + timedelta(milliseconds=1)]


@pytest.mark.parametrize(
    ("seconds", "deadline", "kept"),
    [
        (1, None, DAY), (DAY / 2, None, DAY), (DAY, None, 2 * DAY), (7 * DAY, None, 14 * DAY),
        (1, 60.0, DAY + 120), (1, DAY, 3 * DAY), (7 * DAY, DAY, 14 * DAY),
        (399 * DAY, None, 798 * DAY), (500 * DAY, None, 800 * DAY), (1, 900 * DAY, 800 * DAY),
    ],
)  # fmt: skip
def test_a_record_outlives_the_next_slot(seconds, deadline, kept):
    due = last_due(every(seconds), NOW)
    assert keep_for(every(seconds), due, deadline) == kept


def test_the_bounds_of_a_records_life():
    assert keep_for(Listed(), NOW, None) == SHORTEST_KEEP.total_seconds()
    assert keep_for(Listed(ago(-3000 * DAY)), NOW, None) == LONGEST_KEEP.total_seconds()
    leap = crontab(minute=0, hour=0, day_of_month=29, month_of_year=2, app=APP)
    slot = datetime(2028, 2, 29, tzinfo=timezone.utc)
    assert keep_for(leap, slot, None) == LONGEST_KEEP.total_seconds()


@given(timed=plans, deadline=st.none() | st.floats(0, 100 * DAY))
def test_a_record_is_kept_until_its_slot_is_too_old(timed, deadline):
    """While a slot may still be published, and until the next one, its record is there."""
    plan, _ = timed
    due = last_due(plan, NOW)
    kept = keep_for(plan, due, deadline)
    assert kept > (deadline or 0.0)
    assert last_due(plan, due + timedelta(seconds=kept / 2)) > due
