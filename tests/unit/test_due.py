"""When slots are due: on a grid of time alone, so that all machines find the same ones."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone, tzinfo
from itertools import pairwise
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedule, solar
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.beat.due import (
    EPOCH,
    MOST,
    due_between,
    interval_of,
    last_due,
    last_on_grid,
    next_due,
)

UTC = timezone.utc
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
MILLISECOND = timedelta(milliseconds=1)
BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
ZONES = ["UTC", BERLIN, "Asia/Kolkata", "Pacific/Apia"]


def app_in(zone):
    app = Celery("shop", set_as_current=False)
    app.conf.timezone = zone
    return app


APPS = {zone: app_in(zone) for zone in [*ZONES, NEW_YORK, "Australia/Lord_Howe"]}


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def cron(zone="UTC", **when):
    return crontab(**when, app=APPS[zone])


def every(seconds, zone="UTC", *, relative=False):
    return schedule(seconds, relative=relative, app=APPS[zone])


def matches(plan, moment, zone):
    wall = moment.astimezone(ZoneInfo(zone))
    return (
        wall.minute in plan.minute
        and wall.hour in plan.hour
        and wall.isoweekday() % 7 in plan.day_of_week
        and wall.day in plan.day_of_month
        and wall.month in plan.month_of_year
    )


def minute_by_minute(plan, after, until, zone):
    """Return the slots of a crontab by trying every minute; *after* is a full one."""
    minutes = range(1, int((until - after) / MINUTE) + 1)
    return [due for due in (after + MINUTE * i for i in minutes) if matches(plan, due, zone)]


def assert_additive(plan, after, until, middles):
    """Have a stretch of time the same slots, wherever it is cut; `last_due` is the last of them."""
    whole = due_between(plan, after, until)
    assert whole == sorted(set(whole))
    assert all(after < due <= until and due.tzinfo is UTC for due in whole)
    for middle in middles:
        first, second = due_between(plan, after, middle), due_between(plan, middle, until)
        assert (middle, first + second) == (middle, whole)
        if first:
            assert (middle, last_due(plan, middle)) == (middle, first[-1])


def cuts(after, until, number):
    return [after + (until - after) * i / number for i in range(number + 1)]


# -- crontab ---------------------------------------------------------------------------

CRONTABS = [
    {"minute": "*/5"}, {"minute": "*/7"}, {"minute": 0}, {"minute": "59"}, {"minute": "15,45"},
    {"minute": "1-59/2", "hour": "22,23,0"}, {"minute": 0, "hour": "*/6"}, {"minute": 0, "hour": 0},
    {"minute": 59, "hour": 23}, {"hour": 12}, {"minute": 30, "hour": 5, "day_of_week": "mon-fri"},
    {"minute": 0, "hour": 0, "day_of_week": "sun"}, {"minute": "*/20", "day_of_week": "6,0"},
    {"minute": 0, "hour": 12, "day_of_month": "1,12,31"},
    {"minute": "*/30", "hour": "9-17", "day_of_month": "12-14", "month_of_year": "1"},
    {"minute": 0, "day_of_month": "13", "day_of_week": "2"}, {"month_of_year": "2", "minute": 0},
]  # fmt: skip
IDS = [" ".join(f"{key}={value}" for key, value in when.items()) for when in CRONTABS]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("when", CRONTABS, ids=IDS)
def test_a_crontab_is_due_whenever_the_wall_clock_has_it(when, zone):
    after, until = at("2026-01-10T23:17"), at("2026-01-14T23:17")
    plan = cron(zone, **when)
    expected = minute_by_minute(plan, after, until, zone)
    assert due_between(plan, after, until) == expected
    if expected:
        assert last_due(plan, until) == expected[-1]


def test_every_minute_has_a_slot():
    after = at("2026-01-10T00:00")
    assert due_between(cron(), after, after + DAY) == [after + MINUTE * i for i in range(1, 1441)]


@pytest.mark.parametrize("when", CRONTABS, ids=IDS)
def test_a_crontab_has_the_same_slots_from_any_start(when):
    """Whoever begins to ask when, in the middle of a minute, too, finds the same."""
    after = at("2026-01-09T23:17")
    odd = [after + timedelta(seconds=s) for s in (0.001, 29.5, 59.999, 60, 60.001, 2599.3)]
    plan = cron(BERLIN, **when)
    assert_additive(plan, after, after + DAY, [*cuts(after, after + DAY, 4), *odd])


#: When clocks change: where, the local night, and in UTC the hour that is repeated or left out.
SPRING = [(BERLIN, at("2026-03-29T01:00")), (NEW_YORK, at("2026-03-08T07:00"))]
AUTUMN = [(BERLIN, at("2026-10-25T01:00")), (NEW_YORK, at("2026-11-01T06:00"))]
NIGHT = [
    {"minute": "*/10"}, {"minute": 0}, {"minute": 30, "hour": 1}, {"minute": 30, "hour": 2},
    {"minute": "15,45", "hour": "1-3"}, {"minute": 0, "hour": 3}, {"minute": 0, "hour": "*/2"},
    {"minute": 0, "hour": 0, "day_of_week": "sun,mon"},
    {"minute": 30, "hour": 2, "day_of_month": "*/2"},
    {"minute": "*/20", "hour": "0-4", "month_of_year": "3,10,11"},
]  # fmt: skip
NIGHTS = [" ".join(f"{key}={value}" for key, value in when.items()) for when in NIGHT]


@pytest.mark.parametrize(("zone", "change"), SPRING + AUTUMN)
@pytest.mark.parametrize("when", NIGHT, ids=NIGHTS)
def test_a_crontab_keeps_its_hours_when_clocks_change(when, zone, change):
    """In a week in which they do all slots outside of the hours concerned are those of the wall."""
    plan = cron(zone, **when)
    after, until = change - 3 * DAY, change + 3 * DAY
    hours = (change - HOUR, change + HOUR)
    found, expected = due_between(plan, after, until), minute_by_minute(plan, after, until, zone)
    assert [due for due in found if not hours[0] <= due < hours[1]] == [
        due for due in expected if not hours[0] <= due < hours[1]
    ]


@pytest.mark.parametrize(("zone", "change"), SPRING + AUTUMN)
@pytest.mark.parametrize("when", NIGHT, ids=NIGHTS)
def test_all_agree_on_a_crontab_when_clocks_change(when, zone, change):
    """Also who begins to ask within the hour that is repeated, or follows the one left out."""
    after, until = change - 3 * HOUR, change + 4 * HOUR
    middles = [after + timedelta(minutes=15 * i) for i in range(29)]
    assert_additive(cron(zone, **when), after, until, [*middles, change - MILLISECOND])


@pytest.mark.parametrize(("zone", "change"), SPRING)
def test_a_slot_in_the_hour_left_out_is_made_up_for(zone, change):
    found = due_between(cron(zone, minute=30, hour=2), change - 12 * HOUR, change + 12 * HOUR)
    assert len(found) == 1
    assert change <= found[0] <= change + HOUR


@pytest.mark.parametrize(("zone", "change"), AUTUMN)
def test_a_nightly_slot_is_not_repeated_with_its_hour(zone, change):
    hour = (change - HOUR).astimezone(ZoneInfo(zone)).hour
    found = due_between(cron(zone, minute=30, hour=hour), change - 12 * HOUR, change + 12 * HOUR)
    assert found == [change - HOUR / 2]


@pytest.mark.parametrize(("zone", "change"), AUTUMN)
def test_a_crontab_goes_on_after_the_repeated_hour(zone, change):
    plan = cron(zone)
    for minutes in (0, 1, 30, 59):
        found = due_between(plan, change + minutes * MINUTE, change + HOUR + 5 * MINUTE)
        assert [due for due in found if due >= change + HOUR] == [
            change + HOUR + i * MINUTE for i in range(6)
        ]


@pytest.mark.parametrize(
    ("until", "expected"),
    [("2027-11-01", "2024-02-29"), ("2024-02-29", "2024-02-29"), ("2024-02-28T23:59", "2020-02-29"),
     ("2104-02-28", "2096-02-29"), ("2104-03-01", "2104-02-29")],
)  # fmt: skip
def test_a_leap_day_is_found_again(until, expected):
    plan = cron(minute=0, hour=0, day_of_month=29, month_of_year=2)
    assert last_due(plan, at(until)) == at(expected)
    found = due_between(plan, at("2019-01-01"), at("2029-01-01"))
    assert found == [at(f"{year}-02-29") for year in (2020, 2024, 2028)]


@pytest.mark.parametrize(
    ("when", "expected"),
    [({"day_of_month": 31}, "2026-05-31"), ({"month_of_year": 12}, "2025-12-31"),
     ({"day_of_month": 13, "day_of_week": "fri"}, "2026-03-13"),
     ({"day_of_month": 29, "month_of_year": 2, "day_of_week": "thu"}, "2024-02-29")],
)  # fmt: skip
def test_a_rare_slot_is_found_however_long_ago(when, expected):
    assert last_due(cron(minute=0, hour=0, **when), at("2026-06-30T12:00")) == at(expected)


# -- plain intervals -------------------------------------------------------------------

ODD = [0.001, 0.25, 0.3333, 1, 1.5, 7, 60, 61.007, 3600, 5400, 86_400, 100_000, 604_800]


@pytest.mark.parametrize("seconds", ODD)
@pytest.mark.parametrize("zone", [BERLIN, "Asia/Kolkata"])
def test_an_interval_lies_on_a_grid_of_unix_time(seconds, zone):
    step = timedelta(milliseconds=round(seconds * 1000))
    until = at("2026-10-25T00:50:00.123456")
    found = due_between(every(seconds, zone), until - 20 * step, until)
    assert len(found) in (20, 21)
    assert all((due - EPOCH) % step == timedelta() for due in found)
    assert {later - earlier for earlier, later in pairwise(found)} == {step}
    assert found[-1] <= until < found[-1] + step


@pytest.mark.parametrize(
    ("seconds", "until", "expected"),
    [(30, "2026-01-01T12:00:29.999", "2026-01-01T12:00"),
     (30, "2026-01-01T12:00:30", "2026-01-01T12:00:30"),
     (86_400, "2026-01-01T23:59:59.999999", "2026-01-01"), (604_800, "2026-01-07", "2026-01-01"),
     (3600, "1969-12-31T23:30", "1969-12-31T23:00")],
)  # fmt: skip
def test_where_the_grid_is(seconds, until, expected):
    assert last_due(every(seconds), at(until)) == at(expected)


@pytest.mark.parametrize("seconds", [0, -5, 0.0001, 1e-9, 0.001])
def test_an_interval_of_nothing_is_one_of_a_millisecond(seconds):
    """A schedule that never moves on does not hang whoever asks."""
    assert interval_of(every(seconds)) == MILLISECOND
    after = at("2026-01-01T00:00:00.010")
    assert due_between(every(seconds), after, after + 3 * MILLISECOND) == [
        after + MILLISECOND * i for i in (1, 2, 3)
    ]


def test_no_more_than_the_newest_are_told():
    until = at("2026-01-01")
    found = due_between(every(0.001), until - DAY, until)
    assert (len(found), found[-1], found[0]) == (MOST, until, until - (MOST - 1) * MILLISECOND)


#: Moments from 2000 to 2100.
dates = st.floats(946_684_800, 4_102_444_800).map(lambda when: EPOCH + timedelta(seconds=when))


@given(seconds=st.sampled_from(ODD), until=dates, lengths=st.tuples(*[st.floats(0, 40)] * 2))
def test_stretches_of_an_interval_add_up(seconds, until, lengths):
    step = timedelta(seconds=max(seconds, 0.001))
    middle = until - lengths[0] * step
    assert_additive(every(seconds), middle - lengths[1] * step, until, [middle])


@given(seconds=st.floats(0.0005, 1e6), until=dates)
def test_the_last_slot_of_an_interval_is_less_than_one_old(seconds, until):
    """It is due by then, the next one is not, and asking at the slot itself finds it again."""
    plan = every(seconds)
    due = last_due(plan, until)
    assert due <= until < due + interval_of(plan)
    assert last_due(plan, due) == due
    assert last_due(plan, due - MILLISECOND) == due - interval_of(plan)


# -- relative intervals ----------------------------------------------------------------


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("seconds", [0.25, 30, 60, 1800, 3600, 5 * 3600, 86_400])
def test_a_relative_interval_lies_on_the_grid_of_the_wall(seconds, zone):
    until = at("2026-01-15T10:20:30")
    found = due_between(
        every(seconds, zone, relative=True), until - timedelta(seconds=9 * seconds), until
    )
    assert len(found) == 9
    for due in found:
        wall = due.astimezone(ZoneInfo(zone)).replace(tzinfo=UTC)
        assert (wall - EPOCH) % timedelta(seconds=seconds) == timedelta()


class CountingZone(tzinfo):
    def __init__(self, name):
        self.zone = ZoneInfo(name)
        self.asked = 0

    def utcoffset(self, moment):
        self.asked += 1
        return self.zone.utcoffset(moment)

    def dst(self, moment):
        return self.zone.dst(moment)

    def fromutc(self, moment):
        return self.zone.fromutc(moment.replace(tzinfo=self.zone)).replace(tzinfo=self)


def walked(zone, step, until):
    """Return the newest slot of a relative interval by a walk along all that the wall shows."""
    wall = until.astimezone(zone).replace(tzinfo=None, fold=0)
    point = wall - (wall - EPOCH.replace(tzinfo=None)) % step
    found, first = [], point
    has_changed = (until - 3 * HOUR).astimezone(zone).utcoffset() != until.astimezone(
        zone
    ).utcoffset()
    while point <= (wall + HOUR if has_changed else first):
        folds = (0, 1) if step <= HOUR else (0,)
        found += [point.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in folds]
        point += step
    before = (first - step).replace(tzinfo=zone).astimezone(UTC)
    return max((due for due in found if due <= until), default=before)


@given(
    change=st.sampled_from(["2024-03-31T01:00", "2024-10-27T01:00", "2024-04-06T15:00",
                            "2024-10-05T15:30", "2024-06-01T00:00"]),
    zone=st.sampled_from([BERLIN, "Australia/Lord_Howe", "UTC"]),
    step=st.sampled_from([20, 59, 60, 420, 1800, 2700, 3600, 5400, 7200, 43_200, 86_400]),
    after=st.integers(-4 * 3600 * 1000, 6 * 3600 * 1000),
)  # fmt: skip
def test_the_newest_slot_is_found_without_a_walk(change, zone, step, after):
    until, plan = at(change) + after * MILLISECOND, every(step, zone, relative=True)
    assert last_due(plan, until) == walked(ZoneInfo(zone), timedelta(seconds=step), until)


def test_a_short_interval_costs_no_more_when_clocks_change():
    """Points of a tenth of a second are not tried one by one for an hour."""
    zone = CountingZone(BERLIN)
    plan = SimpleNamespace(relative=True, tz=zone)
    last_on_grid(plan, timedelta(milliseconds=100), at("2024-10-27T01:10"))
    assert zone.asked < 100


@pytest.mark.parametrize(("zone", "change"), SPRING + AUTUMN)
def test_a_relative_day_begins_at_midnight_when_clocks_change(zone, change):
    plan = every(86_400, zone, relative=True)
    found = due_between(plan, change - 3 * DAY, change + 3 * DAY)
    assert [due.astimezone(ZoneInfo(zone)).hour for due in found] == [0] * 6
    assert sum((later - earlier != DAY) for earlier, later in pairwise(found)) == 1


@pytest.mark.parametrize(("zone", "change"), SPRING + AUTUMN)
@pytest.mark.parametrize(
    "seconds", [7, 30, 600, 1800, 2700, 3600, 5400, 7200, 5 * 3600, 8 * 3600, 86_400, 3 * 86_400]
)
def test_all_agree_on_a_relative_interval_when_clocks_change(seconds, zone, change):
    step = timedelta(seconds=seconds)
    after, until = change - max(HOUR / 4, 2 * step), change + max(HOUR / 4, 2 * step)
    plan = every(seconds, zone, relative=True)
    middles = [change + HOUR * i / 4 for i in range(-24, 25)]
    assert_additive(plan, after, until, [m for m in middles if after <= m <= until])


@pytest.mark.parametrize("zone", ["Australia/Lord_Howe", "Asia/Kolkata"])
@pytest.mark.parametrize("seconds", [1800, 3600, 86_400])
def test_all_agree_on_a_relative_interval_in_odd_zones(seconds, zone):
    change = at("2026-04-04T15:00")  # of Lord Howe
    after, until = change - DAY, change + DAY
    assert_additive(every(seconds, zone, relative=True), after, until, cuts(after, until, 48))


# -- the sun ---------------------------------------------------------------------------


def sun(event, latitude, longitude):
    return solar(event, latitude, longitude, app=APPS["UTC"])


@pytest.mark.parametrize(
    "place",
    [("sunrise", 52.5, 13.4), ("sunset", -33.9, 151.2), ("solar_noon", 0, 179.9),
     ("solar_noon", 51.5, 0.0), ("dusk_civil", 40.7, -74.0), ("dawn_nautical", 35.7, 139.7)],
)  # fmt: skip
def test_all_agree_on_the_sun(place):
    """Its search ends elsewhere by milliseconds if it begins elsewhere: the slots do not."""
    plan = sun(*place)
    after, until = at("2026-04-01T05:07"), at("2026-04-21T05:07")
    slots = due_between(plan, after, until)
    around = [due + MILLISECOND * i for due in slots[:5] for i in (-2, -1, 0, 1, 2)]
    assert_additive(plan, after, until, [*cuts(after, until, 30), *around])
    assert all(due.microsecond % 1000 == 0 for due in slots)


@pytest.mark.parametrize(
    "place",
    [("sunset", 40.7, -74.0), ("sunrise", 35.7, 139.7), ("sunset", 39.7, -105.0),
     ("solar_noon", 0, 179.9), ("solar_noon", 0, -179.9), ("sunset", 52.5, 13.4)],
)  # fmt: skip
def test_the_sun_leaves_out_no_day(place):
    """Over a year there is an event a day, also where it wanders over midnight of UTC."""
    found = due_between(sun(*place), at("2026-01-01"), at("2027-01-01"))
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert [str(due) for due, gap in zip(found, gaps, strict=False) if gap > 25 * HOUR] == []
    assert min(gaps) > 23 * HOUR


where_the_sun_may_be_away = pytest.mark.skipif(
    not hasattr(solar, "_next_event"), reason="before 5.6 Celery itself fails there"
)


@where_the_sun_may_be_away
def test_where_the_sun_does_not_rise_there_is_no_slot():
    plan = sun("sunrise", 71.0, 25.8)
    assert due_between(plan, at("2026-12-05"), at("2026-12-08")) == []
    assert due_between(plan, at("2026-03-01"), at("2026-03-03")) != []


@where_the_sun_may_be_away
def test_the_last_sunrise_before_a_polar_night_is_found_in_a_few_looks():
    """Who begins to lead in the dark of February does not search the sky for seconds."""
    plan = sun("sunrise", 78.2, 15.6)
    looks = []

    class Counting(type(plan.cal)):
        def next_rising(self, *arguments, **more):
            looks.append(arguments)
            assert len(looks) < 2000
            return super().next_rising(*arguments, **more)

    counting = Counting()
    for name in ("lat", "lon", "elev", "horizon", "pressure"):
        setattr(counting, name, getattr(plan.cal, name))
    plan.cal = counting
    last = last_due(plan, at("2026-02-10"))
    assert at("2025-10-20") < last < at("2025-10-31")


# -- schedules of somebody else's ------------------------------------------------------


class Once(BaseSchedule):
    """Due at one moment, as `clocked` of django-celery-beat."""

    def __init__(self, moment, **more):
        super().__init__(**more)
        self.clocked_time = moment

    def remaining_estimate(self, last_run_at):
        return self.clocked_time - self.now()


class OnGrid(BaseSchedule):
    def __init__(self, step, **more):
        super().__init__(**more)
        self.step = step

    def remaining_estimate(self, last_run_at):
        return EPOCH + ((last_run_at - EPOCH) // self.step + 1) * self.step - self.now()


class Stuck(BaseSchedule):
    """Never moves on."""

    def remaining_estimate(self, last_run_at):
        return timedelta()


class Never(BaseSchedule):
    def remaining_estimate(self, last_run_at):
        """Return that there is no next time."""


class FromTheLast(schedule):
    def remaining_estimate(self, last_run_at):
        return super().remaining_estimate(last_run_at)


class Named(schedule):
    """Celery's interval under another name."""


def clocked():
    """Return the class of django-celery-beat if it can be had without settings, or a stand-in."""
    try:
        from django_celery_beat.clockedschedule import clocked
    except Exception:  # noqa: BLE001  not installed, or it wants a configured Django
        return Once
    return clocked


@pytest.mark.parametrize("kind", [Once, clocked()])
def test_what_is_due_once_is_due_once(kind):
    moment = at("2026-01-01T12:00:00.250")
    plan = kind(moment, app=APPS["UTC"])
    for until in (moment, moment + MILLISECOND, moment + HOUR, moment + 3000 * DAY):
        assert last_due(plan, until) == moment
        assert due_between(plan, moment - HOUR, until) == [moment]
        assert due_between(plan, moment, until) == []
    assert last_due(plan, moment - MILLISECOND) is None
    assert_additive(plan, moment - HOUR, moment + HOUR, cuts(moment - HOUR, moment + HOUR, 8))


@pytest.mark.parametrize(
    "step", [timedelta(milliseconds=333), timedelta(seconds=7), HOUR, 40 * DAY]
)
def test_a_schedule_of_any_class_is_asked(step):
    plan = OnGrid(step, app=APPS["UTC"])
    until = at("2026-03-29T01:00:00.050")
    expected = due_between(schedule(step, app=APPS["UTC"]), until - 30 * step, until)
    assert due_between(plan, until - 30 * step, until) == expected
    assert last_due(plan, until) == expected[-1]
    assert_additive(plan, until - 3 * step, until, cuts(until - 3 * step, until, 7))


@pytest.mark.parametrize("microseconds", [333_333, 1_000_001, 7_000_500])
def test_a_grid_finer_than_a_millisecond_does_not_stand_still(microseconds):
    """A slot that is cut to whole milliseconds is not found again and again, nor the last one."""
    step = timedelta(microseconds=microseconds)
    after = at("2026-01-01")
    found = due_between(OnGrid(step, app=APPS["UTC"]), after, after + 30 * step)
    assert len(found) in (29, 30, 31)
    assert found == sorted(set(found))


@pytest.mark.parametrize("kind", [Stuck, Never])
def test_a_schedule_that_never_moves_on_ends(kind):
    plan = kind(app=APPS["UTC"])
    assert due_between(plan, at("2026-01-01"), at("2026-01-02")) == []
    assert last_due(plan, at("2026-01-02")) is None
    assert next_due(Never(app=APPS["UTC"]), at("2026-01-01")) is None


def test_a_kind_of_interval_follows_its_last_slot():
    """One that is not Celery's own is asked, and says what is an interval after the last."""
    plan = FromTheLast(10, app=APPS["UTC"])
    last = at("2026-01-01T00:00:03")
    assert interval_of(plan) is None
    assert due_between(plan, last, last + timedelta(seconds=25)) == [
        last + timedelta(seconds=10), last + timedelta(seconds=20)
    ]  # fmt: skip


def test_an_interval_of_another_name_has_the_grid():
    """What counts is that it is computed as Celery's is."""
    plan, until = Named(5, app=APPS["UTC"]), at("2026-01-01T00:00:13")
    assert last_due(plan, until) == last_due(every(5), until) == at("2026-01-01T00:00:10")


@pytest.mark.parametrize("plan", [cron(), sun("sunrise", 1, 1), Once(at("2026-01-01")), None, 5])
def test_only_a_plain_interval_is_one(plan):
    assert interval_of(plan) is None


# -- two machines ----------------------------------------------------------------------


def plans(zone, **more):
    app = APPS[zone]
    return [
        crontab(minute="*/15", **more, app=app),
        crontab(minute=30, hour=4, **more, app=app),
        schedule(90, **more, app=app),
        schedule(3600, relative=True, **more, app=app),
        schedule(86_400, relative=True, **more, app=app),
        solar("sunset", 52.5, 13.4, **more, app=app),
        OnGrid(timedelta(minutes=7), **more, app=app),
    ]


KINDS = ["crontab", "nightly", "interval", "relative", "daily", "sun", "custom"]
BEGIN, END = at("2026-05-01T10:11:12"), at("2026-05-03T10:11:12")


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_slots_do_not_depend_on_the_time_at_which_they_are_asked_for(kind):
    """Whatever clock a schedule was given, wrong or broken, it is not looked at, and kept."""

    def broken():
        raise AssertionError("was asked for the time")

    (expected, last) = due_between(plans(BERLIN)[kind], BEGIN, END), None
    for clock in (broken, lambda: EPOCH, lambda: datetime(2100, 1, 1, tzinfo=UTC)):
        plan = plans(BERLIN, nowfun=clock)[kind]
        assert due_between(plan, BEGIN, END) == expected
        last = last_due(plan, END)
        assert last == expected[-1]
        assert plan.nowfun is clock


@pytest.mark.parametrize("zone", [BERLIN, NEW_YORK, "Asia/Kolkata"])
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
@pytest.mark.parametrize("begin", [BEGIN, at("2026-10-24T10:11:12"), at("2026-03-28T10:11:12")])
def test_a_date_is_a_moment_in_whatever_zone(kind, zone, begin):
    plan, end = plans(BERLIN)[kind], begin + 2 * DAY
    expected = due_between(plan, begin, end)
    local = [moment.astimezone(ZoneInfo(zone)) for moment in (begin, end)]
    found = due_between(plan, *local)
    assert found == expected
    assert last_due(plan, local[1]) == expected[-1]
    assert all(due.tzinfo is UTC for due in found)


@pytest.mark.parametrize(("zone", "change"), SPRING + AUTUMN)
def test_the_first_slot_after_a_date_is_the_same_in_whatever_zone(zone, change):
    for plan in (cron(zone, minute=0, hour=5), cron(zone, minute=0)):
        after = change - 2 * HOUR - MINUTE
        assert next_due(plan, after.astimezone(ZoneInfo(zone))) == next_due(plan, after)


def test_slots_do_not_depend_on_the_zone_of_the_machine(monkeypatch):
    expected = [[due.isoformat() for due in due_between(p, BEGIN, END)] for p in plans(BERLIN)]
    for zone in ("Asia/Tokyo", "America/New_York"):
        with monkeypatch.context() as patch:
            patch.setenv("TZ", zone)
            time.tzset()
            try:
                found = [[d.isoformat() for d in due_between(p, BEGIN, END)] for p in plans(BERLIN)]
            finally:
                patch.undo()
                time.tzset()
        assert found == expected
