"""A term of a real scheduler of Celery's: what it publishes, tries again, makes up for, skips."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from types import SimpleNamespace

import pytest
from celery import Celery, Task
from celery.beat import Scheduler
from celery.schedules import BaseSchedule

from celery_redlock import RedlockTask
from celery_redlock.beat import slots as slots_module
from celery_redlock.beat import wrapped_scheduler as wrapped_module
from celery_redlock.beat.entries import overlap_of, places_of_run
from celery_redlock.beat.slot_records import Slots
from celery_redlock.beat.slot_votes import Claimed, LastSlot, SlotState
from celery_redlock.beat.slots import SOON, SlotPublisher, TermOver, knows_copies
from celery_redlock.beat.term import Term
from celery_redlock.beat.wrapped_scheduler import BREATH, LOOK, WrappedScheduler
from celery_redlock.errors import DuplicateTask, QuorumUnavailable
from celery_redlock.events import SlotPublished, SlotSkipped
from celery_redlock.lock.algorithm.results import NodeView
from celery_redlock.lock.rules import Rules
from celery_redlock.task.messages.slot import Slot

START = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
CLAIMED = Claimed(SlotState.CLAIMED)
TASK = "shop.report"


@pytest.fixture(autouse=True)
def _slots(monkeypatch):
    """Have the locks that stand in for real ones take note of slots, too."""
    monkeypatch.setattr(Slots, "on", lambda locks: locks.slots)


class World:
    """The time on all clocks, as seconds since `START`."""

    def __init__(self):
        self.seconds = 0.5

    def clock(self):
        return 1000.0 + self.seconds

    def now(self, tz=timezone.utc):
        return (START + timedelta(seconds=self.seconds)).astimezone(tz)


class Records:
    """
    Slot records that do as a test says.

    Each claim takes the next of `answers`: an outcome, an error, or what is to be called for one;
    after these it is granted.
    """

    def __init__(self):
        self.known, self.answers, self.calls = {}, [], []
        self.error = None

    def look(self, records):
        if self.error is not None:
            raise self.error
        return {name: self.known[name] for name in records if name in self.known}

    def claim(self, claim):
        self.calls.append(("claim", claim))
        answer = self.answers.pop(0) if self.answers else CLAIMED
        if callable(answer):
            answer = answer()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def settle(self, claim):
        self.calls.append(("settle", claim))

    def withdraw(self, claim):
        self.calls.append(("withdraw", claim))

    @property
    def words(self):
        return [word for word, _ in self.calls]


class Listed(Scheduler):
    """Celery's scheduler in memory; `broker` takes each message, or raises."""

    max_interval = 0.25
    producer = None
    broker = None
    failure = None

    def send_task(self, name, args, kwargs, **options):
        return self.broker(name, args, options)

    def sync(self):
        if self.failure is not None:
            raise self.failure


class Shop:
    """
    A term of a scheduler with the given entries; publishing those that are `down` fails.

    Slots in `tried` and `sent` are seconds since `START`.
    """

    def __init__(self, world, cls=Listed, *, known=None, deadline=None, tasks=None, **plans):
        self.world = world
        self.app = Celery("shop", broker="memory://", set_as_current=False)
        self.app.now = world.now
        self.app.conf.result_expires = None
        self.app.conf.beat_schedule = {
            name: {"task": TASK, "schedule": plan} for name, plan in plans.items()
        }
        self.app.tasks.update(tasks or {})
        self.down, self.tried, self.sent, self.args, self.events = set(), [], [], [], []
        self.error = OSError("the broker is away")
        self.records = Records()
        for name, ago in (known or {}).items():
            self.records.known[f"beat/{name}"] = LastSlot((START.timestamp() - ago), True)
        self.held = SimpleNamespace(token="t" * 8, fence=7, lost_reason=None)
        settings = SimpleNamespace(beat_starting_deadline=deadline, rules=Rules())
        plugin = SimpleNamespace(
            app=self.app,
            settings=settings,
            locks=SimpleNamespace(slots=self.records),
            notify=self.events.append,
        )
        self.scheduler = cls(self.app)
        self.scheduler.broker = self.broker
        term = Term(self.held, world.clock())
        self.publisher = SlotPublisher(plugin, "beat", term)
        self.leader = WrappedScheduler(self.scheduler, self.publisher, term)

    def broker(self, name, args, options):
        entry, due, *_ = options["headers"]["redlock"]["slot"]
        slot = entry, (datetime.fromisoformat(due) - START).total_seconds()
        self.tried.append((self.world.seconds, *slot))
        if entry in self.down:
            raise self.error
        self.sent.append(slot)
        self.args.append(list(args))
        return SimpleNamespace(id=options["task_id"])

    def run(self, until):
        """Tick as a beat does, up to that time [s since `START`]."""
        for _ in range(5000):
            pause = self.leader.tick()
            if self.world.seconds + pause > until:
                self.world.seconds = until
                return
            self.world.seconds += max(pause, 0.001) if pause else 0.0
        pytest.fail("it spins")

    def slots(self, name="a"):
        """Return the slots of an entry that were published [s since `START`], in order."""
        return [due for entry, due in self.sent if entry == name]

    def change(self, name="a", plan=None, args=()):
        old = self.scheduler.schedule.get(name)
        fresh = self.scheduler.Entry(
            name=name,
            task=TASK,
            schedule=plan or old.schedule,
            args=args,
            last_run_at=old.last_run_at if old else None,
            app=self.app,
        )
        self.scheduler.schedule[name] = fresh

    @property
    def skipped(self):
        return [event.cause for event in self.events if isinstance(event, SlotSkipped)]

    @property
    def published(self):
        """The slots that observers were told were published [s since `START`]."""
        told = [event for event in self.events if isinstance(event, SlotPublished)]
        return [event.due - START.timestamp() for event in told]


@pytest.fixture
def world(monkeypatch):
    world = World()

    class Date(datetime):
        @classmethod
        def now(cls, tz=None):
            return world.now(tz)

    monkeypatch.setattr("celery_redlock.lock.clock.now", world.clock)
    monkeypatch.setattr(wrapped_module, "datetime", Date)
    monkeypatch.setattr(slots_module, "datetime", Date)
    return world


@pytest.fixture
def shop(world):
    """A term at whose beginning a slot is due, the next one 4.5 s later."""
    return Shop(world, known={"a": 5.0}, a=5.0)


@pytest.fixture(autouse=True)
def _log_level(caplog):
    """A command that another test ran in this process may have left a level of its own."""
    caplog.set_level(logging.WARNING, "celery_redlock")


def warnings_of(caplog, words):
    """Return the levels of log lines with these words; none of them has a traceback."""
    found = [record for record in caplog.records if words in record.getMessage()]
    assert not any(record.exc_info for record in found)
    return [record.levelno for record in found]


# -- what is due -----------------------------------------------------------------------


def test_each_slot_is_published_once_and_settled(world):
    shop = Shop(world, a=5.0)
    shop.run(16.0)
    assert shop.slots() == [5.0, 10.0, 15.0]
    assert shop.published == [5.0, 10.0, 15.0]
    assert shop.records.words == ["claim", "settle"] * 3


def test_what_was_missed_between_two_terms_is_made_up_for(world):
    shop = Shop(world, known={"a": 10.0}, a=5.0)
    shop.run(1.0)
    assert shop.slots() == [-5.0, 0.0]


def test_an_entry_that_is_changed_is_not_made_up_for(world):
    """Its new schedule holds from the change on, not from the last slot of the old one."""
    shop = Shop(world, known={"a": 600.0}, a=600.0)
    shop.run(40.5)
    assert shop.slots() == [0.0]
    shop.change(plan=1.0)
    shop.run(43.5)
    assert shop.slots() == [0.0, 41.0, 42.0, 43.0]


def test_an_entry_that_is_added_is_not_made_up_for(world):
    shop = Shop(world, known={"new": 30.0}, a=600.0)
    shop.run(1.0)
    shop.change("new", plan=1.0)
    shop.run(3.5)
    assert shop.slots("new") == [2.0, 3.0]


def test_an_added_entry_misses_nothing_from_then_on(world):
    shop = Shop(world, a=600.0)
    shop.run(1.5)
    shop.change("new", plan=1.0)
    shop.leader.tick()
    world.seconds = 4.5
    shop.run(4.6)
    assert shop.slots("new") == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("seconds", [250, 100, 101])
def test_a_long_row_lets_others_in_between(world, seconds):
    """A hundred slots of an entry at once, then it is others' turn; all in order, and once."""
    shop = Shop(world, known={"a": seconds, "b": 5.0}, deadline=600.0, a=1.0, b=5.0)
    per_tick = []
    for _ in range(5):
        before = len(shop.slots())
        shop.leader.tick()
        per_tick.append(len(shop.slots()) - before)
    assert shop.slots() == [float(due) for due in range(1 - seconds, 1)]
    assert shop.slots("b") == [0.0]
    assert max(per_tick) == min(seconds, 100)
    if seconds > 200:
        assert shop.sent.index(("b", 0.0)) < len(shop.sent) - 1


def test_what_is_too_old_is_dropped_and_told(world):
    shop = Shop(world, known={"a": 20.0}, deadline=10.0, a=5.0)
    shop.run(1.0)
    assert shop.slots() == [-5.0, 0.0]
    assert shop.skipped == ["deadline"]
    assert shop.published == [-5.0, 0.0]


class Spent(BaseSchedule):
    """A schedule that always says that it is due, but has a slot every hour."""

    def is_due(self, last_run_at):
        return True, 0.0

    def remaining_estimate(self, last_run_at):
        hours = (last_run_at - START) // timedelta(hours=1)
        return START + timedelta(hours=hours + 1) - self.now()


def test_an_entry_that_stays_due_does_not_spin(world):
    """While nothing is published there is a breath between two ticks."""
    shop = Shop(world, known={"a": 0.0}, a=Spent())
    pauses = [shop.leader.tick() for _ in range(3)]
    assert pauses == [pytest.approx(BREATH)] * 3
    assert shop.sent == []


class Due(BaseSchedule):
    """A schedule that says nothing but whether it is due: five seconds after it ran."""

    def is_due(self, last_run_at):
        left = 5.0 - (self.now() - last_run_at).total_seconds()
        return left <= 0, max(0.1, left) if left > 0 else 5.0


def test_a_schedule_that_only_says_that_it_is_due_has_whole_seconds(world):
    """Its slot is when it was found due, also when it is tried again; the next one is another."""
    shop = Shop(world, a=Due())
    shop.down = {"a"}
    shop.run(8.0)
    assert len(shop.tried) > 1
    assert {due for _, _, due in shop.tried} == {5.0}
    shop.down = set()
    shop.run(16.0)
    assert len(shop.slots()) == 3
    assert shop.slots()[0] == 5.0
    assert all(due.is_integer() for due in shop.slots())
    assert len(set(shop.slots())) == 3


def test_a_quorum_that_cannot_tell_what_ran_last_is_asked_again(shop, caplog):
    shop.records.error = QuorumUnavailable("a", {})
    shop.run(2.2)
    assert shop.sent == []
    assert warnings_of(caplog, "Cannot read what was published last")
    shop.records.error = None
    shop.run(4.0)
    assert shop.slots() == [0.0]


def test_a_tick_looks_often_whether_we_still_lead(world):
    shop = Shop(world, a=3600.0)
    assert shop.leader.tick() <= LOOK


# -- failures --------------------------------------------------------------------------


def test_a_failed_sync_is_no_failed_publish(shop, caplog):
    shop.scheduler.sync_every_tasks = 1
    shop.scheduler.failure = OSError("disk full")
    shop.run(11.0)
    assert shop.slots() == [0.0, 5.0, 10.0]
    assert len(shop.tried) == 3
    assert shop.records.words == ["claim", "settle"] * 3
    assert "could not store its state" in caplog.text


def test_the_wrapped_scheduler_stores_its_state(world):
    shop, calls = Shop(world, known={"a": 5.0}, a=5.0), []
    shop.scheduler.sync_every_tasks = 1
    shop.scheduler.sync = lambda: calls.append(world.seconds)
    shop.run(6.0)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("deadline", "longest"), [(None, 7.5), (16.0, 2.0), (64.0, 8.0), (3600.0, 8.0)]
)
def test_a_failed_publish_is_tried_again_with_growing_pauses(world, caplog, deadline, longest):
    shop = Shop(world, known={"a": 3600.0}, deadline=deadline, a=3600.0)
    shop.down = {"a"}
    assert shop.publisher.longest_pause == longest
    shop.run(14.9)
    times = [when for when, *_ in shop.tried]
    pauses = [after - before for before, after in pairwise(times)]
    wanted = [1.0, 2.0, 4.0, shop.publisher.longest_pause] if longest > 2 else [1.0] + [2.0] * 6
    assert pauses == pytest.approx(wanted[: len(pauses)], abs=0.02)
    assert len(pauses) >= 3
    assert warnings_of(caplog, "failed again") == [logging.WARNING] * len(pauses)
    assert len([record for record in caplog.records if record.exc_info]) == 1
    shop.down = set()
    shop.run(15.0 + longest)
    assert shop.slots() == [0.0]
    assert shop.leader._owed == {}


def test_a_retry_says_that_its_slot_may_have_been_sent(shop):
    """Nobody knows what became of a publish that failed: its claim is never taken back."""
    shop.down = {"a"}
    shop.run(2.0)
    claims = [claim for word, claim in shop.records.calls if word == "claim"]
    assert [claim.is_sent for claim in claims] == [False, True]
    assert {claim.due for claim in claims} == {START.timestamp()}
    shop.down = set()
    shop.run(6.0)
    assert not shop.records.calls[-1][1].is_sent
    assert shop.slots() == [0.0, 5.0]


def test_a_broker_that_is_back_gets_all_at_once(world):
    """When one that failed is published, the others do not wait for their time."""
    plans = dict.fromkeys("abc", 3600.0)
    shop = Shop(world, known=dict.fromkeys("abc", 3600.0), deadline=3600.0, **plans)
    shop.down = {"a", "b", "c"}
    shop.run(9.0)
    assert len(shop.leader._owed) == 3
    shop.down = set()
    for late in [owed for name, owed in shop.leader._owed.items() if name != "b"]:
        late.at += 100.0
    shop.run(18.0)
    assert sorted(shop.sent) == [("a", 0.0), ("b", 0.0), ("c", 0.0)]


def test_a_retry_uses_the_producer_of_now(shop):
    """That of the first try may be on a connection that is no more."""
    used = []
    shop.scheduler.producer = "old"
    shop.scheduler.send_task = lambda *args, producer, **options: used.append(producer) or 1 / 0
    shop.run(1.0)
    shop.scheduler.producer = "new"
    shop.run(2.0)
    assert used == ["old", "new"]


def test_what_is_owed_of_an_entry_that_is_gone_is_dropped(shop, caplog):
    """Somebody took it out of the schedule: it is not published any more, and that is said."""
    shop.down = {"a"}
    shop.run(1.0)
    del shop.scheduler.schedule["a"]
    shop.down = set()
    shop.run(12.0)
    assert shop.sent == []
    assert warnings_of(caplog, "'a' was removed from the schedule") == [logging.WARNING]


def test_what_is_owed_of_an_entry_that_was_changed_is_published_as_it_is_now(shop):
    """Nobody wants the old arguments any more."""
    shop.down = {"a"}
    shop.run(1.0)
    shop.change(args=("new",))
    shop.down = set()
    shop.run(4.0)
    assert shop.slots() == [0.0]
    assert shop.args == [["new"]]


class Slow(Listed):
    """Looks at its schedule every five minutes, as Celery's own does."""

    max_interval = 300.0


def test_what_is_owed_of_an_entry_whose_schedule_was_changed_is_not_made_up_for(world):
    """Also where it is tried again before the wrapped scheduler has looked at the change."""
    shop = Shop(world, Slow, known={"a": 600.0}, a=600.0)
    shop.down = {"a"}
    shop.run(40.4)
    shop.change(plan=1.0)
    shop.down = set()
    shop.run(50.5)
    assert shop.slots() == [float(due) for due in range(min(map(int, shop.slots())), 51)]
    assert min(shop.slots()) > 40.0


def test_no_quorum_for_a_claim_is_no_failure_of_the_broker(world, caplog):
    shop = Shop(world, known={"a": 3600.0}, a=3600.0)
    shop.records.answers = [QuorumUnavailable("a", {}), QuorumUnavailable("a", {})]
    shop.run(4.0)
    assert shop.slots() == [0.0]
    assert warnings_of(caplog, "'a' is due, but waits") == [logging.WARNING]
    assert not any(claim.is_sent for _, claim in shop.records.calls)


# -- whose slot it is ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "reason"), [(SlotState.DEPOSED, "deposed"), (SlotState.AHEAD, "clock")]
)
def test_some_claims_end_the_term(shop, state, reason):
    """A newer leader, or a wrong clock: nothing is published, and nobody asks again."""
    shop.records.answers = [Claimed(state)]
    for _ in range(2):
        with pytest.raises(TermOver) as over:
            shop.leader.tick()
        assert over.value.reason == reason
    assert shop.sent == []
    assert shop.records.words == ["claim"]


def test_a_lease_that_is_lost_after_the_claim_publishes_nothing(shop):
    """The claim is taken back, so that the next leader knows that nothing was sent."""

    def lost():
        shop.held.lost_reason = "deadline"
        return CLAIMED

    shop.records.answers = [lost]
    with pytest.raises(TermOver, match="deadline"):
        shop.leader.tick()
    assert shop.tried == []
    assert shop.records.words == ["claim", "withdraw"]
    assert shop.records.calls[0][1] == shop.records.calls[1][1]
    assert not shop.records.calls[1][1].is_sent


def test_without_a_lease_nothing_is_claimed(shop):
    shop.held.lost_reason = "stolen"
    with pytest.raises(TermOver, match="stolen"):
        shop.leader.tick()
    with pytest.raises(TermOver, match="stolen"):
        shop.publisher.publish_due(shop.scheduler.schedule["a"], pytest.fail)
    assert shop.records.calls == []


def test_a_slot_that_another_one_is_about_to_publish_is_looked_at_again(shop):
    """It may yet die over it: soon it is either published, or ours."""
    shop.records.answers = [Claimed(SlotState.TAKEN)] * 2
    shop.run(0.5 + 3 * SOON)
    assert shop.slots() == [0.0]
    assert shop.records.words == ["claim"] * 3 + ["settle"]


def test_a_slot_that_was_published_is_left_alone(shop):
    shop.records.answers = [Claimed(SlotState.PUBLISHED)]
    shop.run(6.0)
    assert shop.slots() == [5.0]
    assert shop.skipped == []
    assert shop.records.words == ["claim", "claim", "settle"]


class Report(RedlockTask):
    name = TASK
    lock_key = "report"

    def run(self):
        """Do nothing."""

    def apply_async(self, args, kwargs, **options):
        return self.broker(TASK, args, options)


def locked(dedup_ttl, **options):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = ["redis://one:1/0"]
    return app.register_task(type("Locked", (Report,), {"dedup_ttl": dedup_ttl, **options})())


def shop_of(world, task):
    shop = Shop(world, known={"a": 5.0}, a=5.0, tasks={TASK: task})
    task.broker = shop.broker
    return shop


@pytest.mark.parametrize(("dedup_ttl", "is_published"), [(None, False), (0.0, False), (9.0, True)])
def test_after_a_doubt_only_a_task_that_knows_copies_is_published(world, dedup_ttl, is_published):
    """A plain task could run twice; that of others is skipped, settled, and told."""
    shop = Shop(world, known={"a": 5.0}, a=5.0)
    if dedup_ttl is not None:
        shop = shop_of(world, locked(dedup_ttl))
    shop.records.answers = [Claimed(SlotState.UNCERTAIN)]
    shop.run(1.0)
    assert shop.slots() == ([0.0] if is_published else [])
    assert shop.skipped == ([] if is_published else ["uncertain"])
    assert shop.records.words == ["claim", "settle"]


def test_a_task_without_a_lock_has_neither_name_nor_copies_nor_overlap():
    """One of Celery's own under ``task_cls``, or a plain one that happens to have the attribute."""
    app = Celery("shop", broker="memory://", task_cls=RedlockTask, set_as_current=False)

    def nothing():
        pass

    plain = app.task(base=Task, name=TASK, overlap="never", shared=False)(nothing)
    entry = SimpleNamespace(name="a", task=TASK, args=(), kwargs={}, options={})
    for task in (app.tasks["celery.backend_cleanup"], plain, None):
        assert places_of_run(task, entry) == []
        assert not knows_copies(task)
    assert overlap_of(entry, app) == "skip"


def test_a_run_that_has_not_ended_skips_the_next_one(world):
    """If its lock is held for an earlier slot of the very entry; else that is none of ours."""
    shop = shop_of(world, locked(9.0))
    own, other = Slot("a", 1.7e9).info, Slot("b", 1.7e9).info
    shop.records.answers = [Claimed(SlotState.CLAIMED, own), Claimed(SlotState.CLAIMED, other)]
    shop.run(6.0)
    assert shop.records.calls[0][1].lock == "report"
    assert shop.skipped == ["overlap"]
    assert shop.slots() == [5.0]


@pytest.mark.parametrize(
    ("holders", "skipped"),
    [
        ([{}, {"token": "a", "slot": ["a", "2026"]}], ["overlap"]),
        ([{}, {"token": "a", "slot": ["b", "2026"]}], []),
        ([{}, {}], []),
    ],
)
def test_a_run_on_another_place_is_seen_too(world, holders, skipped):
    """With a limit a run may have any place; one round more asks for all but the first."""
    shop = shop_of(world, locked(9.0, lock_limit=3))
    asked = []
    shop.publisher._plugin.locks.inspect_all = lambda names: (
        asked.append(names) or [[NodeView("n", it, 1.0, 7, "")] for it in holders]
    )
    shop.run(1.0)
    assert shop.records.calls[0][1].lock == "report"
    assert asked == [["report#1", "report#2"]]
    assert shop.skipped == skipped


def test_without_a_limit_one_round_is_enough(world):
    """The twin: nobody is asked for places that there are not."""
    shop = shop_of(world, locked(9.0))
    shop.publisher._plugin.locks.inspect_all = lambda names: pytest.fail(str(names))
    shop.run(1.0)
    assert shop.slots() == [0.0]


class Monitored(Listed):
    """A scheduler around whose publish a monitor begins a check-in, as Sentry's does."""

    def apply_entry(self, entry, producer=None):
        self.begun = [*getattr(self, "begun", ()), entry.options["task_id"]]
        entry.options["headers"]["check-in"] = len(self.begun)
        super().apply_entry(entry, producer=producer)


def test_what_is_skipped_begins_no_check_in(world):
    """The scheduler's own ``apply_entry`` sees those slots alone that are published, one by one."""
    shop = shop_of(world, locked(9.0))
    shop = Shop(world, Monitored, known={"a": 15.0}, deadline=60.0, a=5.0, tasks=shop.app.tasks)
    carried = []

    def broker(name, args, options):
        carried.append(options["headers"]["check-in"])
        return shop.broker(name, args, options)

    shop.app.tasks[TASK].broker = broker
    own = Slot("a", 1.7e9).info
    shop.records.answers = [Claimed(SlotState.CLAIMED, own), CLAIMED, CLAIMED]
    shop.run(1.0)
    assert shop.skipped == ["overlap"]
    assert shop.slots() == [-5.0, 0.0]
    assert len(set(shop.scheduler.begun)) == len(shop.sent) == 2
    assert carried == [1, 2]


@pytest.mark.parametrize("cls", [Listed, Monitored])
def test_what_fails_within_the_schedulers_own_is_tried_again(world, cls, caplog):
    """Celery's `apply_entry` tells nobody of it; we hear of it all the same."""
    shop = Shop(world, cls, known={"a": 5.0}, a=5.0)
    shop.down = {"a"}
    shop.run(1.0)
    assert shop.slots() == []
    assert len(shop.tried) == 1
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "Publishing 'a' failed" in record.getMessage()
    shop.down = set()
    shop.run(4.0)
    assert shop.slots() == [0.0]


class Silent(Listed):
    def apply_async(self, *args, **kwargs):
        super().apply_async(*args, **kwargs)


def test_a_scheduler_that_returns_nothing_has_published(world):
    shop = Shop(world, Silent, known={"a": 5.0}, a=5.0)
    shop.run(1.0)
    assert shop.published == shop.slots() == [0.0]
    assert shop.skipped == []


def test_a_duplicate_is_skipped_and_not_tried_again(shop, caplog):
    """Its task is queued already and says so by an error, which Celery wraps."""
    shop.down, shop.error = {"a"}, DuplicateTask("1", "report")
    shop.run(4.0)
    assert shop.skipped == ["duplicate"]
    assert len(shop.tried) == 1
    assert shop.records.words == ["claim", "settle"]
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_result_may_be_that_of_another_task(shop, is_ours):
    """Who joins another task published nothing; who finds its own copy did."""

    def joined(*args, task_id, **options):
        return SimpleNamespace(id=task_id if is_ours else "other", duplicate=True)

    shop.scheduler.send_task = joined
    shop.run(1.0)
    assert shop.skipped == ([] if is_ours else ["duplicate"])
    assert shop.published == ([0.0] if is_ours else [])
