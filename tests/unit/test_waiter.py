"""One who waits for a lock: what the nodes are told of it, how long it sleeps, what it leaves."""

from __future__ import annotations

import json

import pytest

from celery_redlock.lock.algorithm.acquiring import LONGEST_PAUSE
from celery_redlock.lock.algorithm.effects import Send, Sleep
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.algorithm.waiter import COMES_EVERY, NOTED_EVERY, Waiter
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.scripts import RELEASE
from celery_redlock.lock.waiting.waiting import LEAVE, WAIT
from support.fakes import Drive, Ears, FakeClock, granted, refused, token_of, unreachable

TAKEN = [refused()] * 3
LINE, WAITERS = b"redlock:line:k", b"redlock:waiters:k"
NOW = 1.7e9


class One:
    def __init__(self, ears, **wanted):
        self.clock, self.wall = FakeClock(), FakeClock(NOW)
        client = Participant(Rules(), ("one",), listener=ears, now=self.clock, wall=self.wall)
        self.waiter = Waiter(client, LockRequest(**{"name": "k", "ttl": 30.0, **wanted}))

    def join(self):
        told = [step.request for step in self.waiter.join()]
        return told[0] if told else None

    def leave(self):
        return [step.request for step in self.waiter.leave()]

    def sleep(self, seconds, comes_in, woken_after=None, looks=()):
        """
        Pause for so long at most; return how long that took [s].

        It comes by itself in *comes_in*, or a hint does after *woken_after*; each sleep between
        two looks is noted in *looks*.
        """
        began, steps = self.clock(), self.waiter.pause(seconds, comes_in)
        try:
            step = next(steps)
            while True:
                assert isinstance(step, Sleep)
                assert step.seconds >= 0
                looks and looks.append(step.seconds)
                ends = self.clock() + step.seconds
                is_woken = woken_after is not None and began + woken_after <= ends
                self.clock.time = began + woken_after if is_woken else ends
                step = steps.send(is_woken)
        except StopIteration:
            return self.clock() - began


def since(request):
    """Return since when a request says that somebody waits [ms]."""
    return int(request.arguments[3])


@pytest.fixture
def ears():
    return Ears()


def seat(ears, line, since):
    waiting = ears.enter_thread(line, since)
    waiting.ran_at = float("inf")  # it runs whatever the clock says
    return waiting


# -- joining ----------------------------------------------------------------------------


def test_the_nodes_know_who_waits_and_how_it_is_woken(ears):
    one = One(ears, info={"task": "shop.bill"}, limit=3)
    request = one.join()
    who, channel, limit, _, _, _, info, *_ = request.arguments
    assert request.script is WAIT
    assert request.keys[:2] == (LINE, WAITERS)
    assert len(request.keys) == 4  # nothing is asked: it tries by itself soon enough
    assert (channel, limit, since(request)) == (b"c" * 16, b"0003", NOW * 1000)
    assert len(who) == 32
    assert int(who, 16)
    assert json.loads(info)["task"] == "shop.bill"
    (waiting,) = ears.waiting
    assert (waiting.line, waiting.since) == (LINE, NOW)


def test_it_is_one_and_the_same_however_often_it_joins(ears):
    """With each attempt: a node that woke it took it out of the line, and one may have lost it."""
    one = One(ears)
    first = one.join()
    one.wall.advance(5.0)
    again = one.join()
    assert again == first
    one.leave()
    back = one.join()
    assert back.arguments[0] == first.arguments[0]
    assert len(ears.waiting) == 1


def test_who_joins_again_is_heard_for_again(ears, monkeypatch):
    """Somebody may have closed the locks meanwhile, and with them what listens."""
    one, listened = One(ears), []
    monkeypatch.setattr(ears, "listen", lambda: listened.append(True))
    one.join()
    one.join()
    assert listened == [True]


def test_two_that_wait_are_two(ears):
    names_of_them = {One(ears).join().arguments[0] for _ in range(10)}
    assert len(names_of_them) == len(ears.waiting) == 10


def test_a_task_is_known_by_its_owner(ears):
    """So that the parent can have the nodes forget a child that died while it waited."""
    assert One(ears, owner="0" * 31 + "1").join().arguments[0] == b"0" * 31 + b"1"


@pytest.mark.parametrize("moment", [0.0, NOW - 60])
def test_who_waited_before_waits_since_then(ears, moment):
    """As a message, in another process: it does not go to the end of the line."""
    assert since(One(ears, queued_since=moment).join()) == moment * 1000
    assert ears.waiting[0].since == NOW  # here it is no message: nobody is passed by what one says


def test_where_nothing_wakes_it_the_nodes_know_nothing():
    one = One(None)
    assert one.join() is None
    assert one.sleep(10.0, 0.25) == 0.25
    assert one.leave() == []


# -- sleeping ---------------------------------------------------------------------------


def test_the_oldest_comes_by_itself(ears):
    """When it is told to; a hint may be lost, or a lease have lapsed."""
    one = One(ears)
    one.join()
    assert one.sleep(60.0, COMES_EVERY) == COMES_EVERY
    assert one.sleep(60.0, 0.02) == pytest.approx(0.02)


def test_the_others_sleep_for_a_minute(ears):
    """However many wait in a process, one of them asks the nodes; they are noted in between."""
    for moment in (NOW - 2, NOW - 1):
        seat(ears, LINE, moment)
    one, looks = One(ears), [0.0]
    one.join()
    assert one.sleep(600.0, 0.02, looks=looks) == pytest.approx(NOTED_EVERY)
    assert max(looks) <= COMES_EVERY


def test_who_becomes_the_oldest_comes_at_once(ears):
    """Within a second: it may be what the one before it has left undone."""
    before = seat(ears, LINE, NOW - 1)
    one = One(ears)
    one.join()
    steps = one.waiter.pause(600.0, 0.02)
    assert next(steps).seconds <= COMES_EVERY
    one.clock.advance(COMES_EVERY)
    ears.leave(before)
    assert steps.send(False).seconds == 0.0
    with pytest.raises(StopIteration):
        steps.send(False)


def test_an_older_one_of_another_lock_does_not_count(ears):
    seat(ears, b"redlock:line:other", NOW - 1)
    one = One(ears)
    one.join()
    assert one.sleep(60.0, 0.5) == 0.5


@pytest.mark.parametrize("is_oldest", [True, False])
def test_a_hint_or_the_end_of_its_time_ends_the_sleep(ears, is_oldest):
    if not is_oldest:
        seat(ears, LINE, NOW - 1)
    one = One(ears)
    one.join()
    assert one.sleep(600.0, 5.0, woken_after=0.25) == pytest.approx(0.25)
    assert one.sleep(0.5, 1.0) == 0.5
    assert one.sleep(0.5, 0.5) == 0.5
    assert one.sleep(0.0, 1.0) == 0.0


def test_it_sleeps_as_what_the_room_wakes(ears):
    """So that a hint that came before the pause ends it."""
    one = One(ears)
    one.join()
    ears.hear("k")
    assert next(one.waiter.pause(600.0, 600.0)).waiting is ears.waiting[0]
    assert ears.waiting[0].wait(600.0)


@pytest.mark.parametrize("is_oldest", [True, False])
def test_who_is_to_register_again_does_and_sleeps_on_unless_it_is_the_oldest(ears, is_oldest):
    """That one tries: of what was released before it was heard, nobody was told."""
    if not is_oldest:
        seat(ears, LINE, NOW - 1)
    one = One(ears)
    first = one.join()
    steps = one.waiter.pause(600.0, 600.0)
    next(steps)
    ears.room.register_all()
    (own,) = (waiting for waiting in ears.waiting if waiting.since == NOW)
    assert not own.wait(600.0)
    if is_oldest:
        with pytest.raises(StopIteration):
            steps.send(False)
    else:
        assert steps.send(False).request == first
        assert next(steps).seconds == COMES_EVERY
    one.join()
    assert not own.is_to_register


def test_a_hint_has_it_try_although_it_is_to_register_again(ears):
    seat(ears, LINE, NOW - 1)
    one = One(ears)
    one.join()
    steps = one.waiter.pause(600.0, 600.0)
    next(steps)
    ears.room.register_all()
    with pytest.raises(StopIteration):
        steps.send(True)


# -- leaving ----------------------------------------------------------------------------


def test_who_leaves_is_forgotten(ears):
    one = One(ears)
    who = one.join().arguments[0]
    (request,) = one.leave()
    assert request.script is LEAVE
    assert (request.keys, request.arguments[0]) == ((LINE, WAITERS), who)
    assert ears.waiting == []
    assert one.leave() == []


def test_who_never_waited_has_nothing_to_leave(ears):
    assert One(ears).leave() == []


def test_who_is_interrupted_as_it_leaves_leaves_once_more(ears):
    """Perhaps before a byte was sent: it would count as waiting for minutes."""
    one = One(ears)
    one.join()
    steps = one.waiter.leave()
    next(steps)
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt())
    assert [request.script for request in one.leave()] == [LEAVE]


# -- as part of an acquire --------------------------------------------------------------


def wait_in_line(**wanted):
    drive = Drive(ears=Ears(), **{"wait": 60.0, **wanted}).vote(*TAKEN).go_on_to(Sleep)
    assert len(drive.client.listener.waiting) == 1
    drive.told.clear()
    return drive


def scripts(drive):
    while isinstance(drive.step, (Send, Sleep)):
        drive.go_on()
    return [tell.request.script for tell in drive.told]


def test_who_can_be_woken_comes_less_and_less_often():
    """Down to once a second; where nobody is woken, a lock is asked for more often than that."""
    pauses = {}
    for ears in (Ears(), None):
        drive, seen = Drive(ears=ears, wait=60.0), pauses.setdefault(ears is None, [])
        for _ in range(12):
            drive.vote(*TAKEN).go_on_to(Sleep)
            seen.append(drive.step.seconds)
            drive.go_on_to_ask()
    assert pauses[False][:7] == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64])
    assert pauses[False][7:] == [COMES_EVERY] * 5
    assert pauses[True][5:] == [LONGEST_PAUSE] * 7


def test_whoever_waits_behind_another_comes_once_a_minute():
    """By itself, that is; in an acquire as well, whatever the pause of the oldest would be."""
    drive = wait_in_line(wait=600.0)
    seat(drive.client.listener, LINE, NOW - 1)
    began = drive.go_on_to_ask().vote(*TAKEN, after=0.0).go_on_to(Sleep).clock()
    drive.go_on_to_ask()
    assert drive.clock() - began == pytest.approx(NOTED_EVERY)


def test_a_lease_that_lapses_sooner_is_waited_for():
    drive = wait_in_line()
    for _ in range(8):
        drive.go_on_to_ask().vote(*TAKEN).go_on_to(Sleep)
    drive.go_on_to_ask().vote(*[refused(ttl=0.25)] * 3).go_on_to(Sleep)
    assert drive.step.seconds == pytest.approx(0.26)


def test_who_is_woken_asks_like_everybody():
    drive = wait_in_line()
    began = drive.clock()
    drive.wake()
    assert drive.clock() == began
    assert drive.token != token_of("t1-")
    drive.vote(*TAKEN).go_on_to(Sleep)
    release, wait = (tell.request for tell in drive.told)
    assert (release.script, release.keys[2]) == (RELEASE, b"redlock:lock:k")  # tells nobody
    assert wait.script is WAIT


def test_who_gets_the_lock_leaves_the_line_and_holds_it():
    """In this order: who is interrupted in between has neither."""
    drive = wait_in_line().wake()
    token = drive.token
    drive.vote(granted(), granted())
    assert scripts(drive) == [LEAVE]
    assert drive.lease.token == token
    assert drive.client.listener.waiting == []


def test_who_is_interrupted_after_the_grant_has_nothing():
    drive = wait_in_line().wake()
    token = drive.token
    drive.vote(granted(), granted()).told.clear()
    drive.interrupt(KeyboardInterrupt())
    assert scripts(drive) == [RELEASE, LEAVE]
    assert drive.told[0].request.arguments[0].decode() == token
    assert isinstance(drive.error, KeyboardInterrupt)
    assert drive.client.listener.waiting == []


@pytest.mark.parametrize("is_asking", [True, False])
def test_who_is_interrupted_leaves_nothing(is_asking):
    """While it sleeps there is no attempt under way that would have to be released."""
    drive = wait_in_line()
    if is_asking:
        drive.wake()
    drive.interrupt(KeyboardInterrupt())
    assert scripts(drive) == ([RELEASE, LEAVE] if is_asking else [LEAVE])
    assert drive.client.listener.waiting == []


def test_who_gives_up_leaves():
    drive = wait_in_line(wait=0.005).go_on_to_ask().vote(*TAKEN)
    assert scripts(drive) == [RELEASE, LEAVE]
    assert drive.client.listener.waiting == []


@pytest.mark.parametrize("ballot", [[unreachable()] * 3, [granted(), refused("x"), refused("y")]])
def test_only_who_was_refused_waits_to_be_woken(ballot):
    """Without a quorum, and after a split vote, it asks again soon: no release is waited for."""
    drive = Drive(ears=Ears(), wait=60.0).vote(*ballot).go_on_to(Sleep)
    assert (drive.step.waiting, drive.client.listener.waiting) == (None, [])
