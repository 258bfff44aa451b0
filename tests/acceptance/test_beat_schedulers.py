"""Singleton beat around each scheduler there is: Celery's own, django-celery-beat and RedBeat."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
import redis

from celery_redlock import RedlockTask
from support.beats import Beat, published, stage_beat, stopped_between_slots
from support.events import read, record
from support.stage import stage
from support.waiting import eventually

pytestmark = pytest.mark.long

SCHEDULERS = {
    "persistent": "celery.beat:PersistentScheduler",
    "django": "django_celery_beat.schedulers:DatabaseScheduler",
    "redbeat": "redbeat.schedulers:RedBeatScheduler",
}
every_scheduler = pytest.mark.parametrize("kind", list(SCHEDULERS))

#: How long a lease lasts where a leader is killed, longer than a stall; and where it is not, longer
#: than any test waits for the next one [s].
TTL, LONG_TTL = 6.0, 600.0

EVERY_SECOND = {"tick": {"task": "tick", "schedule": 1.0}}


def declare(app):
    app.task(name="tick", base=RedlockTask, bind=True, shared=False)(tick)
    app.task(name="plain", bind=True, shared=False)(tick)


def tick(self):
    record(os.environ["EVENTS"], "run", slot=self.request.headers["redlock"]["slot"][:2])


class Beats:
    """Some beats that stand in for each other around a scheduler."""

    def __init__(self, it, kind, folder, database):
        self.it = it
        self.all = []
        self.env = {}
        self._ended = []
        if kind != "persistent":  # which is the default
            it.conf["redlock_beat_scheduler"] = SCHEDULERS[kind]
        if kind == "redbeat":
            it.conf["redbeat_redis_url"] = self.redbeat_url
        if kind == "django":
            own = folder / "beat.sqlite3"
            shutil.copy(database, own)
            self.env = django_env(own)
        else:
            it.conf["beat_schedule"] = EVERY_SECOND

    @property
    def redbeat_url(self):
        """Where RedBeat keeps its schedule: another database of the broker's server."""
        return self.it.broker.url.rpartition("/")[0] + "/1"

    def start(self, times=1, **options):
        names = [f"beat{len(self.all) + number}" for number in range(1, times + 1)]
        with ThreadPoolExecutor() as starters:
            started = list(
                starters.map(lambda name: stage_beat(self.it, name, env=self.env, **options), names)
            )
        self.all += started
        return started

    @property
    def alive(self):
        """Those that the test did not end."""
        return [beat for beat in self.all if beat not in self._ended]

    def leader(self, timeout=100):
        """Wait until one of those that are alive leads, and return it."""
        return eventually(lambda: next(filter(leads, self.alive), None), "leader", timeout=timeout)

    def end(self, beat):
        self._wait_for_pause()
        self._ended.append(beat)
        beat.terminate()
        assert beat.process.wait() == 0

    def kill_leader(self):
        """``kill -9`` who leads when there is no doubt about what it published; return when [s]."""

        def stopped():
            beat = self.leader()
            entries = {one.entry for one in published(self.it.broker.url)}
            # No other one leads for so long: there will be slots that nobody can publish.
            return beat if stopped_between_slots(self.it, beat, [*entries], lease=2.5) else None

        beat = eventually(stopped, "leader between two slots", timeout=100, every=0.2)
        died = time.time()
        self._ended.append(beat)
        beat.kill()
        return died

    def _wait_for_pause(self):
        """Wait until a quarter of a second has passed since the last publish."""
        seen = [0, 0.0]

        def is_quiet():
            count = len(published(self.it.broker.url))
            if count > seen[0]:
                seen[:] = count, time.monotonic()
            return time.monotonic() > seen[1] + 0.25

        eventually(is_quiet, "pause between two slots")

    def slots(self, entry="tick"):
        return [one.due for one in published(self.it.broker.url) if one.entry == entry]

    def wait_for_slot(self, due, entry="tick", timeout=100):
        eventually(
            lambda: max(self.slots(entry), default=0.0) >= due,
            f"slot of {entry!r} at {due:.1f}",
            timeout=timeout,
        )

    def wait_for_slots(self, times, entry="tick", timeout=100):
        before = len(self.slots(entry))
        eventually(
            lambda: len(self.slots(entry)) >= before + times,
            f"{times} more slots of {entry!r}",
            timeout=timeout,
        )

    def run(self, source):
        """Run a script in a process of its own, as somebody who changes the schedule does."""
        return run(source, stage_env(self.it) | self.env)

    def stored(self, kind):
        """Return when "tick" ran last and how often, as it is stored for all; None if it is not."""
        return self.run(STORED[kind]) if kind in STORED else None

    def check(self):
        for beat in self.alive:
            assert beat.alive, beat.log()
        for beat in self.all:
            assert not re.search(r"Traceback|Signal handler .* raised", beat.log()), beat.log()


def leads(beat):
    told = re.findall(r"Leads (no more )?as ", beat.log())
    return told[-1:] == [""]


def are_in_a_row(slots, every=1.0):
    return slots == [slots[0] + every * number for number in range(len(slots))]


def stage_env(it):
    return {"EVENTS": str(it.events), "STAGE": json.dumps([it._file, it.conf])}


def django_env(database):
    return {"DJANGO_SETTINGS_MODULE": "support.beat_django", "BEAT_DATABASE": str(database)}


def run(source, env):
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.getenv("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout else None


ORM = """
import json, time
from datetime import datetime, timedelta, timezone
import django
django.setup()
from django.db import transaction
from django_celery_beat.models import ClockedSchedule, IntervalSchedule, PeriodicTask

def interval(seconds):
    return IntervalSchedule.objects.get_or_create(every=seconds, period="seconds")[0]

def add(name, seconds=1):
    PeriodicTask.objects.create(name=name, task="tick", interval=interval(seconds))

def once(name, moment):
    clocked = ClockedSchedule.objects.create(clocked_time=moment)
    PeriodicTask.objects.create(name=name, task="tick", clocked=clocked, one_off=True)

def change(name, **fields):
    task = PeriodicTask.objects.get(name=name)
    for field, value in fields.items():
        setattr(task, field, value)
    task.save()

"""
REDBEAT = """
import json
from celery.schedules import schedule
from redbeat import RedBeatSchedulerEntry
from support.stage import app

"""
TOLD = "print(json.dumps([tick.last_run_at.timestamp(), tick.total_run_count]))"
STORED = {
    "django": f"{ORM}tick = PeriodicTask.objects.get(name='tick')\n{TOLD}",
    "redbeat": f"{REDBEAT}tick = RedBeatSchedulerEntry.from_key('redbeat:tick', app=app)\n{TOLD}",
}


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """A database of the Django project with an entry that is due every second; to be copied."""
    file = tmp_path_factory.mktemp("django") / "beat.sqlite3"
    migrate = "import django; django.setup(); from django.core.management import call_command\n"
    run(migrate + "call_command('migrate', verbosity=0)", django_env(file))
    run(ORM + "add('tick')", django_env(file))
    return file


@pytest.fixture
def beats(tmp_path, database):
    started = []
    with contextlib.ExitStack() as stack:

        def start(kind, ttl=TTL, **conf):
            rules = {"redlock_ttl": ttl, "redlock_max_ttl": ttl, "redlock_dedup_ttl": 60.0}
            # No entry of Celery's own, which would come in the night.
            settings = {**rules, "result_expires": None, **conf}
            it = stack.enter_context(stage(__file__, tmp_path, nodes=3, **settings))
            started.append(Beats(it, kind, tmp_path, database))
            return started[-1]

        yield start
        for beat in started:
            for one in beat.all:
                print(f"---- {one.log()}")  # noqa: T201  pytest shows it if the test failed


# -- takeovers, with each of them ----------------------------------------------------------------


@every_scheduler
def test_a_leader_that_is_shut_down_is_replaced_at_once(beats, kind, tmp_path):
    """
    The other one leads long before a lease ends; each slot is published once, none is missed.

    Where all of them share one schedule, it knows when each entry ran last, whoever leads; else
    each keeps the file it was told to.
    """
    beats = beats(kind, ttl=LONG_TTL)
    beats.start(2)
    beats.wait_for_slots(1)
    first = beats.leader()
    beats.end(first)
    second = beats.leader()
    assert second is not first
    stored = [beats.stored(kind)]
    beats.wait_for_slots(2)
    beats.check()
    beats.end(second)
    stored.append(beats.stored(kind))
    slots = beats.slots()
    assert are_in_a_row(slots), slots
    assert {one.entry for one in published(beats.it.broker.url)} == {"tick"}
    if stored[0]:
        (before, few), (after, more) = stored
        assert slots[0] <= before < slots[-1] <= after <= time.time()
        # A slot that the first published as it ended may be counted by the second as well.
        assert 0 < few < more <= len(slots) + 1
    else:
        assert len({file.stem for file in tmp_path.glob("beat*.schedule*")}) == 2
    beats.check()


@every_scheduler
def test_a_leader_that_is_killed_is_replaced_when_its_lease_has_ended(beats, kind):
    beats = beats(kind)
    # The same by its path.
    for beat in beats.start(2, args=["-S", "celery_redlock.beat:RedlockScheduler"]):
        beat.wait_for_log(rf"wraps -> {re.escape(SCHEDULERS[kind].replace(':', '.'))}\n")
        beat.wait_for_log(re.escape(f"(lease {TTL:g} s, 3 lock nodes)"))
    beats.wait_for_slots(1)
    died = beats.kill_leader()
    newest = beats.slots()[-1]
    assert newest < died
    beats.leader()
    led = time.time()
    beats.wait_for_slot(led)
    slots = beats.slots()
    assert are_in_a_row(slots), slots
    assert [due for due in slots if died < due < led], "none was late"
    assert {one.entry for one in published(beats.it.broker.url)} == {"tick"}
    beats.check()


# -- django-celery-beat --------------------------------------------------------------------------


def test_changes_in_the_database_reach_the_leader(beats):
    beats = beats("django", ttl=LONG_TTL)
    beats.run(ORM + "add('changed')")
    beats.start()
    beats.wait_for_slots(1, "changed")
    beats.run(
        ORM
        + """
while not 3.2 < time.time() % 4 < 3.7:  # when its newest slot is none of four seconds
    time.sleep(0.05)  # the moment itself is waited for; this only spares the processor
with transaction.atomic():
    change("tick", enabled=False)
    change("changed", interval=interval(4))
    add("added")
"""
    )
    beats.wait_for_slots(1, "added")
    beats.wait_for_slots(1, "changed")
    in_order = published(beats.it.broker.url)
    since = next(one for one in in_order if one.entry == "added").order
    later = in_order[since:]
    assert {one.entry for one in later} == {"added", "changed"}
    assert all(one.due % 4 == 0 for one in later if one.entry == "changed")
    assert are_in_a_row(beats.slots("added"))
    # None of four seconds that was due before the change.
    assert beats.slots("changed") == sorted(set(beats.slots("changed")))
    beats.check()


def test_an_entry_that_was_disabled_begins_anew(beats):
    """
    It is seen though beat has nothing else to do, within the time django-celery-beat takes.

    Nothing is published for the time in which it was disabled, as without us.
    """
    beats = beats("django", ttl=LONG_TTL)
    (beat,) = beats.start()
    beats.wait_for_slots(1)
    beats.run(ORM + "change('tick', enabled=False)")
    eventually(lambda: "Schedule changed" in beat.log(), "look at the database")
    before = beats.slots()
    beats.run(
        ORM
        + f"""
while time.time() < {before[-1] + 3.0}:  # three slots have to be missed while it is disabled
    time.sleep(0.05)
change("tick", enabled=True)
"""
    )
    beats.wait_for_slots(2)
    after = beats.slots()[len(before) :]
    assert are_in_a_row(after)
    assert after[0] > before[-1] + 1.5, "slots of the time in which it was disabled"
    beats.check()


def test_what_is_to_run_once_runs_once_across_a_takeover(beats):
    """
    A leader dies before it has stored that it did it, and before the next one was due.

    Its successor does the second, and the first no more; nor does the one after that.
    """
    beats = beats("django")
    beats.start(2)
    beats.wait_for_slots(1)
    # Each in time for the leader to know of it, and the second long after the first: it is added
    # before the leader dies, for django-celery-beat sees no change while a scheduler begins.
    first, second = beats.run(
        ORM
        + """
now = datetime.now(timezone.utc).replace(microsecond=0)
moments = [now + timedelta(seconds=10.2), now + timedelta(seconds=30.2)]
once("first", moments[0])
once("second", moments[1])
print(json.dumps([moment.timestamp() for moment in moments]))
"""
    )
    beats.wait_for_slot(first - 0.001, "first")
    beats.kill_leader()  # so late that both are done, on a very slow machine; that proves less
    beats.leader()
    beats.wait_for_slot(second - 0.001, "second")
    beats.wait_for_slot(second)
    beats.start()
    beats.end(beats.leader())
    beats.leader()
    beats.wait_for_slots(1)
    for name, moment in (("first", first), ("second", second)):
        assert beats.slots(name) == [pytest.approx(moment, abs=0.001)]
    left = "print(json.dumps([*PeriodicTask.objects.enabled().values_list('name', flat=True)]))"
    assert beats.run(ORM + left) == ["tick"]
    assert are_in_a_row(beats.slots())
    beats.check()


# -- RedBeat -------------------------------------------------------------------------------------


def test_redbeat_takes_no_lock_of_its_own_and_sees_new_entries(beats):
    beats = beats("redbeat", ttl=LONG_TTL)
    beats.start()
    beats.wait_for_slots(1)
    beats.run(REDBEAT + "RedBeatSchedulerEntry('added', 'tick', schedule(1.0), app=app).save()")
    beats.wait_for_slots(2, "added")
    assert are_in_a_row(beats.slots("added"))
    with redis.Redis.from_url(beats.redbeat_url) as client:
        keys = {key.decode() for key in client.keys("*")}
        assert {"redbeat:tick", "redbeat:added"} <= keys
        assert "redbeat::lock" not in keys
    beats.run(REDBEAT + "RedBeatSchedulerEntry.from_key('redbeat:added', app=app).delete()")
    beats.wait_for_slots(2)  # the first may be of the round in which it was read last
    before = len(beats.slots("added"))
    beats.wait_for_slots(1)
    assert len(beats.slots("added")) == before
    assert are_in_a_row(beats.slots())
    beats.check()


# -- wrong settings ------------------------------------------------------------------------------


def entry(**fields):
    return {"beat_schedule": {"tick": {**EVERY_SECOND["tick"], **fields}}}


WRONG = {
    "no such scheduler": (
        {"redlock_beat_scheduler": "nosuch:Thing"},
        ["redlock_beat_scheduler = 'nosuch:Thing'", "'package.module:Class'"],
    ),
    "negative deadline": (
        {"redlock_beat_starting_deadline": -1},
        ["redlock_beat_starting_deadline", ">", "-1"],
    ),
    "misspelt setting": (
        {"redlock_beat_schedular": "celery.beat:PersistentScheduler"},
        ["redlock_beat_schedular", "did you mean redlock_beat_scheduler?"],
    ),
    "misspelt overlap": (
        entry(options={"overlap": "skipp"}),
        ["beat_schedule['tick']: overlap", "'skipp'", "did you mean 'skip'?"],
    ),
    "overlap of a plain task": (
        entry(task="plain", options={"overlap": "skip"}),
        ["beat_schedule['tick']: overlap='skip'", "'plain'", "base=RedlockTask"],
    ),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")

    def log_of(what):
        conf, _ = WRONG[what]
        env = stage_env(it) | {"STAGE": json.dumps([__file__, {**it.conf, **conf}])}
        beat = Beat("support.stage", name=what, folder=folder, env=env)
        with contextlib.suppress(AssertionError):  # it may end before it says that it starts
            beat.start()
        try:
            beat.wait()
            assert beat.process.wait() != 0, what
            return beat.log()
        finally:
            beat.stop()

    rules = {"redlock_ttl": TTL, "redlock_max_ttl": TTL}
    with stage(__file__, folder, nodes=3, **rules, beat_schedule=EVERY_SECOND) as it:
        with ThreadPoolExecutor() as starters:
            logs = dict(zip(WRONG, starters.map(log_of, WRONG), strict=True))
        assert published(it.broker.url) == []
        yield logs


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_setting_ends_beat_at_its_start(refused, what):
    _, words = WRONG[what]
    told = re.findall(r"ConfigurationError: .*", refused[what])
    assert told, refused[what]
    for word in words:
        assert word in told[-1]


# -- beat within a worker ------------------------------------------------------------------------


def test_workers_may_have_a_beat_each(tmp_path):
    rules = {"redlock_ttl": LONG_TTL, "redlock_max_ttl": LONG_TTL}
    # A task without a lock: a run that a loaded machine makes long would have others skipped.
    schedule = {"tick": {**EVERY_SECOND["tick"], "task": "plain"}}
    with stage(__file__, tmp_path, nodes=3, **rules, beat_schedule=schedule) as it:

        def slots():
            return sorted(run["slot"][1] for run in read(it.events, "run"))

        def wait_for_runs(times):
            wanted = len(slots()) + times
            eventually(lambda: len(slots()) >= wanted, f"{wanted} runs", timeout=100)

        it.start_workers(
            {"name": name, "concurrency": 1, "args": ["-B", "--scheduler", "redlock", "-s", name]}
            for name in ("w1", "w2")
        )
        wait_for_runs(2)
        first = eventually(lambda: next(filter(leads, it.workers), None), "leader")
        (second,) = {*it.workers} - {first}
        assert not leads(second)
        first.terminate()
        eventually(lambda: leads(second), "takeover", timeout=100)
        wait_for_runs(3)

        def every_second():
            return are_in_a_row([datetime.fromisoformat(due).timestamp() for due in slots()])

        eventually(every_second, "run of each slot")  # a later one may have been quicker
        assert second.alive
        assert "Traceback" not in it.log()
