"""What ``celery beat`` runs: it stands by or leads, raises nothing, and gives back what it had."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.apps.beat import Beat as CeleryBeat
from celery.beat import Scheduler, Service

from celery_redlock.beat import RedlockScheduler
from celery_redlock.beat.slot_records import Slots
from celery_redlock.beat.slot_votes import Claimed, SlotState
from celery_redlock.beat.term import AFTER_FAILURE, StandBy
from celery_redlock.errors import ConfigurationError
from celery_redlock.events import LeaderDeposed, LeaderElected
from celery_redlock.lock.algorithm.results import NodeView
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.rules import Rules
from celery_redlock.plugin import Plugin, plugin_for
from support.fakes import FakeClock, lease_of


class Locks:
    """Locks that anybody gets; the nodes say who is the `leader`, and a bid raises `error`."""

    labels = ("node-0",)

    def __init__(self, clock):
        self.fanout = SimpleNamespace(
            nodes=[], settle_all=lambda longest: None, publish=lambda: None
        )
        self.clock, self.rules = clock, Rules()
        self.leader, self.error, self.bids = {}, None, 0
        self.held, self.given_back = [], []
        self.slots = SimpleNamespace(
            look=lambda names: {},
            claim=lambda claim: Claimed(SlotState.CLAIMED),
            settle=lambda claim: None,
            withdraw=lambda claim: None,
        )

    def close(self):
        """Have no connection."""

    def inspect(self, name):
        self.bids += 1
        if self.error is not None:
            raise self.error
        return [NodeView("node-0", self.leader, 5.0 if self.leader else 0.0, 0, "")]

    def take(self, wanted):
        self.held.append(HeldLock(lease_of(self.clock, wanted.name)))
        return self.held[-1]

    def give_back(self, held):
        self.given_back.append(held)


class Wrapped(Scheduler):
    """A scheduler in memory; the methods that are `failing` do."""

    failing: set[str]
    closed: list[Scheduler]

    def __init__(self, *args, **kwargs):
        self._fail("init")
        super().__init__(*args, **kwargs)

    def _fail(self, what):
        if what in self.failing:
            raise OSError(what)

    def tick(self, *args, **kwargs):
        self._fail("tick")
        return super().tick(*args, **kwargs)

    def close(self):
        self.closed.append(self)
        super().close()
        self._fail("close")


@pytest.fixture(autouse=True)
def _slots(monkeypatch):
    """Have the locks that stand in for real ones take note of slots, too."""
    monkeypatch.setattr(Slots, "on", lambda locks: locks.slots)


class Beat:
    def __init__(self, clock, **conf):
        self.clock, self.events = clock, []
        self.wrapped = type("Listed", (Wrapped,), {"failing": set(), "closed": []})
        self.app = Celery("shop", broker="memory://", set_as_current=False)
        self.app.conf.update(
            result_expires=None,
            redlock_nodes=["redis://127.0.0.1:1/0"],
            redlock_beat_scheduler=self.wrapped,
            beat_schedule={"a": {"task": "shop.report", "schedule": 3600.0}},
            **conf,
        )
        self.locks = Locks(clock)
        plugin = plugin_for(self.app)
        plugin._locks = self.locks
        plugin.notify = self.events.append
        self.scheduler = RedlockScheduler(self.app)

    @property
    def told(self):
        """Why each term ended, None for one that began."""
        return [getattr(event, "reason", None) for event in self.events]

    def is_leading(self):
        pause = self.scheduler.tick()
        assert pause >= 0.0
        return not isinstance(self.scheduler._state, StandBy)


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr("celery_redlock.lock.clock.now", clock)
    return clock


@pytest.fixture
def beat(clock):
    return Beat(clock)


def test_it_leads_and_has_the_schedule_of_the_wrapped_one(beat):
    assert beat.scheduler.schedule == {}
    assert beat.is_leading()
    assert list(beat.scheduler.schedule) == ["a"]
    assert [type(event) for event in beat.events] == [LeaderElected]


def test_it_stands_by_until_the_next_bid(beat):
    """While another leads nothing is built, and nobody is asked before it is time."""
    beat.locks.leader = {"token": "x" * 8}
    assert not beat.is_leading()
    pause = beat.scheduler.tick()
    assert pause > 0
    assert beat.locks.bids == 1
    beat.locks.leader = {}
    beat.clock.advance(pause)
    assert beat.is_leading()
    assert len(beat.locks.held) == 1


def test_a_bid_that_raises_is_tried_again(beat, caplog):
    beat.locks.error = OSError("no route")
    assert not beat.is_leading()
    pause = beat.scheduler.tick()
    assert AFTER_FAILURE[0] <= pause <= AFTER_FAILURE[1]
    assert beat.locks.bids == 1
    assert "The bid failed" in caplog.text
    beat.locks.error = None
    beat.clock.advance(pause)
    assert beat.is_leading()


@pytest.mark.parametrize("failing", [{"init"}, {"tick"}, {"tick", "close"}])
def test_a_wrapped_scheduler_that_fails_resigns(beat, caplog, failing):
    """Somebody else may do better: the lease is given back; later it is our turn again."""
    beat.wrapped.failing.update(failing)
    assert not beat.is_leading()
    assert beat.locks.given_back == beat.locks.held
    assert beat.told == [None, "failed"]
    assert len(beat.wrapped.closed) == (0 if "init" in failing else 1)
    assert "Listed failed" in caplog.text
    pause = beat.scheduler.tick()
    assert AFTER_FAILURE[0] <= pause <= AFTER_FAILURE[1]
    beat.wrapped.failing.clear()
    beat.clock.advance(pause)
    assert beat.is_leading()
    assert len(beat.locks.held) == 2


def test_each_term_has_a_scheduler_of_its_own(beat):
    """It reads its state afresh, for another one has led meanwhile."""
    assert beat.is_leading()
    before = beat.scheduler._active.scheduler
    beat.clock.advance(beat.locks.held[0].lease.valid_until - beat.clock() + 1.0)
    assert not beat.is_leading()
    assert beat.told == [None, "deadline"]
    assert beat.wrapped.closed == [before]
    beat.clock.advance(beat.scheduler.tick())
    assert beat.is_leading()
    assert beat.scheduler._active.scheduler is not before


@pytest.mark.parametrize("failing", [set(), {"close"}])
def test_closing_resigns_once(beat, failing):
    assert beat.is_leading()
    beat.wrapped.failing.update(failing)
    beat.scheduler.close()
    beat.scheduler.close()
    assert len(beat.wrapped.closed) == 1
    assert beat.locks.given_back == beat.locks.held
    assert beat.told == [None, "resigned"]
    assert isinstance(beat.events[-1], LeaderDeposed)
    beat.clock.advance(60.0)
    with pytest.raises(SystemExit):
        beat.scheduler.tick()
    assert len(beat.locks.held) == 1


class Finalized:
    """Is told to stop while it is finalized, where Python swallows what a handler raises."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_got_lost_in_a_finalizer_is_made_up_for(beat):
    """Celery's handler closes the scheduler and raises SystemExit, which nobody sees."""
    service = Service(beat.app, scheduler_cls=lambda **_: beat.scheduler)
    tick, left = beat.scheduler.tick, [3, 2, 1]

    def bounded():
        assert left.pop(), "it goes on after the stop"
        return tick() and 0.001

    def losing_a_stop(scheduler):
        Finalized()
        return 0.001

    beat.scheduler.tick = bounded
    beat.wrapped.tick = losing_a_stop
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        CeleryBeat(app=beat.app).install_sync_handler(service)
        service.start()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert beat.told == [None, "resigned"]


def test_a_stop_within_closing_gives_the_lease_back(beat):
    """A second Ctrl-C goes its way, but nobody has to wait for our lease to end."""
    assert beat.is_leading()

    def stopped():
        raise KeyboardInterrupt

    beat.scheduler._active.scheduler.close = stopped
    with pytest.raises(KeyboardInterrupt):
        beat.scheduler.close()
    assert beat.locks.given_back == beat.locks.held


def test_closing_while_standing_by_does_nothing(beat):
    beat.scheduler.close()
    beat.scheduler.close()
    assert beat.locks.given_back == []
    assert beat.events == []


def test_state_is_stored_by_the_wrapped_scheduler_alone(beat):
    stored = []
    beat.scheduler.sync()
    assert beat.is_leading()
    beat.scheduler._active.scheduler.sync = lambda: stored.append(True)
    assert not beat.scheduler.should_sync()
    beat.scheduler.sync()
    assert stored == [True]


@pytest.mark.parametrize(("given", "conf", "wanted"), [(2.0, 3.0, 2.0), (None, 3.0, 3.0)])
def test_one_that_is_lazy_touches_no_lock(beat, monkeypatch, given, conf, wanted):
    """``celery beat`` builds one for its banner only: what it is can be told without any node."""

    def used(_):
        pytest.fail("a lazy one has no need of locks")

    monkeypatch.setattr(Plugin, "locks", property(used))
    beat.app.conf.beat_max_loop_interval = conf
    lazy = RedlockScheduler(beat.app, max_interval=given, lazy=True)
    assert lazy.max_interval == wanted
    assert "Listed" in lazy.info
    assert "'shop'" in lazy.info
    assert lazy.tick() == 0.0
    lazy.close()


def test_without_a_setting_the_longest_sleep_is_that_of_the_wrapped_one(beat):
    beat.wrapped.max_interval = 17.0
    assert RedlockScheduler(beat.app, lazy=True).max_interval == 17.0


@pytest.mark.parametrize("named", ["no.such:Thing", "celery.beat:Nobody", "json:dumps", dict])
def test_what_is_no_scheduler_is_refused(clock, named):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(redlock_nodes=["redis://127.0.0.1:1/0"], redlock_beat_scheduler=named)
    with pytest.raises(ConfigurationError, match="redlock_beat_scheduler"):
        RedlockScheduler(app, lazy=True)


def test_an_overlap_that_nobody_can_tell_is_refused(clock):
    entry = {"task": "shop.report", "schedule": 5.0, "options": {"overlap": "skip"}}
    beat = Beat(clock)
    beat.app.conf.beat_schedule = {"a": entry}
    with pytest.raises(ConfigurationError, match="'a'"):
        RedlockScheduler(beat.app)
