"""Several locks at once: all or none, and nobody waits for one while holding another."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest

from celery_redlock import LockTaken, QuorumUnavailable
from celery_redlock.lock.algorithm.acquiring import LONGEST_PAUSE, SHORTEST_PAUSE
from celery_redlock.lock.algorithm.effects import Sleep
from celery_redlock.lock.algorithm.request import LockRequest, MarkerStands
from celery_redlock.lock.algorithm.several import acquire_all
from celery_redlock.lock.algorithm.waiter import COMES_EVERY, NOTED_EVERY
from celery_redlock.lock.scripts.requests import Marker
from celery_redlock.lock.scripts.scripts import RELEASE
from celery_redlock.lock.waiting.waiting import LEAVE, WAIT
from celery_redlock.testing import memory_quorum
from support.fakes import Drive, Ears, granted, refused, unreachable

TAKEN = [refused()] * 3
FREE = [granted()] * 3
NAMES = {WAIT: "wait", LEAVE: "leave", RELEASE: "release"}


@pytest.fixture
def nodes():
    with memory_quorum() as nodes:
        yield nodes


def both(wait=0.0, **options):
    return [LockRequest(name, 10.0, wait, **options) for name in ("z", "a")]


@contextmanager
def in_each_pause(nodes, do):
    driver = nodes.locks.driver
    sleep = driver._sleep

    def pause(seconds):
        do()
        sleep(seconds)

    driver._sleep = pause
    yield
    driver._sleep = sleep


def test_a_start_alone_is_reported_as_its_grant(nodes):
    """Else nothing would count what only has a rate; with a lock, the lock is reported alone."""
    granted = []
    nodes.locks.notify = lambda event: granted.append(event.name)
    start = LockRequest("a#rate", 10.0, 0.0, limit=3, stands=True)
    nodes.locks.take_all([start])
    assert granted == ["a#rate"]
    nodes.locks.take_all([LockRequest("a", 10.0), start])
    assert granted == ["a#rate", "a"]


def test_all_are_held_or_none(nodes):
    held = nodes.locks.take_all(both())
    assert list(held) == ["a", "z"]
    for lock in held.values():
        nodes.locks.give_back(lock)
    with nodes.hold("z"):
        with pytest.raises(LockTaken, match="'z'"):
            nodes.locks.take_all(both())
        assert nodes.holder("a") is None
    assert nodes.locks.held == []


@pytest.mark.parametrize("name", ["a", "z"])
def test_who_waits_for_one_holds_no_other(nodes, name):
    other, seen = "za"[name == "z"], []
    blocker = nodes.hold(name)

    def look():
        seen.append(nodes.holder(other))
        with nodes.hold(other):
            pass
        if len(seen) == 5:
            blocker.release()

    with in_each_pause(nodes, look):
        held = nodes.locks.take_all(both(wait=60.0))
    assert seen == [None] * 5
    assert {lock.name for lock in held.values()} == {"a", "z"}


def test_time_that_is_over_is_over(nodes):
    began = nodes.clock.now()
    with nodes.hold("z"), pytest.raises(LockTaken, match="'z'"):
        nodes.locks.take_all(both(wait=5.0))
    assert nodes.clock.now() - began == pytest.approx(5.25, abs=0.25 + 1e-6)
    assert nodes.holder("a") is None


def test_a_quorum_that_comes_back_in_time_is_waited_for(nodes):
    for node in nodes.nodes[:3]:
        node.down()

    def mend():
        for node in nodes.nodes[:3]:
            node.up()

    with pytest.raises(QuorumUnavailable):
        nodes.locks.take_all(both())
    with in_each_pause(nodes, mend):
        assert len(nodes.locks.take_all(both(wait=60.0))) == 2


def test_a_lease_that_lapses_is_waited_for(nodes):
    """Nobody releases for a holder that is dead."""
    nodes.hold("z").die()
    assert len(nodes.locks.take_all(both(wait=60.0))) == 2


def test_a_marker_that_stands_leaves_nothing(nodes):
    nodes.locks.mark(Marker("m", "done", 60.0))
    with pytest.raises(MarkerStands):
        nodes.locks.take_all(both(wait=60.0, marker="m"))
    assert nodes.holder("a") is None


# -- step by step ------------------------------------------------------------------------


class DriveBoth(Drive):
    def __init__(self, **wanted):
        super().__init__(ears=Ears(), **wanted)

    def _steps(self, wanted):
        return acquire_all(self.client, [replace(wanted, name=name) for name in ("z", "a")])

    def expect(self, name, ballot):
        self.go_on_to_ask()
        assert self.step.request.keys[0].decode() == f"redlock:lock:{name}"
        self.vote(*ballot)
        return self

    def words(self):
        said = []
        for tell in self.told:
            name = tell.request.keys[0].decode().rpartition(":")[2]
            said.append(f"{NAMES[tell.request.script]} {name}")
        self.told.clear()
        return said

    @property
    def lines(self):
        return [waiting.line.decode() for waiting in self.client.listener.waiting]


def waiting_for_the_second():
    return DriveBoth(wait=10.0).expect("a", FREE).expect("z", TAKEN).go_on_to(Sleep)


def test_the_first_is_released_before_the_second_is_waited_for():
    """That release wakes who waits for it."""
    drive = waiting_for_the_second()
    wakes = [tell.request.keys[2] for tell in drive.told[:2]]
    assert wakes == [b"redlock:lock:z", b"redlock:line:a"]  # nobody is told of what it had not
    assert drive.words() == ["release z", "release a", "wait z"]
    assert drive.lines == ["redlock:line:z"]
    assert drive.step.waiting in drive.client.listener.waiting


def test_who_is_woken_asks_from_the_beginning():
    """It has no claim to what it was woken for, and needs the other, too."""
    drive = waiting_for_the_second()
    drive.words()
    drive.wake().expect("a", FREE).expect("z", FREE)
    while drive.step is not None:
        drive.go_on()
    assert [lease.name for lease in drive.lease.values()] == ["a", "z"]
    assert drive.words() == ["leave z"]
    assert drive.lines == []


def test_who_is_refused_another_one_then_waits_for_that():
    """Since when it was refused first, and in one line only."""
    drive = waiting_for_the_second()
    since = drive.told[-1].request.arguments[3]
    assert since == b"1700000000000"
    drive.words()
    drive.clock.advance(3.0)
    drive.wall.advance(3.0)
    drive.wake().expect("a", TAKEN).go_on_to(Sleep)
    assert drive.told[-1].request.arguments[3] == since
    assert drive.words() == ["release a", "leave z", "wait a"]
    assert drive.lines == ["redlock:line:a"]


def test_who_waited_as_a_message_waits_since_then():
    drive = DriveBoth(wait=10.0, queued_since=1.6e9).expect("a", FREE).expect("z", TAKEN)
    drive.go_on_to(Sleep)
    drive.wake().expect("a", TAKEN).go_on_to(Sleep)
    waits = [tell for tell in drive.told if tell.request.script is WAIT]
    assert [tell.request.arguments[3] for tell in waits] == [b"1600000000000"] * 2


def test_who_is_refused_the_same_one_again_stays_in_its_line():
    """The nodes that woke it took it out of theirs, and are told each time."""
    drive = waiting_for_the_second()
    drive.words()
    for _ in range(3):
        drive.wake().expect("a", FREE).expect("z", TAKEN).go_on_to(Sleep)
        assert drive.words() == ["release z", "release a", "wait z"]
        assert drive.lines == ["redlock:line:z"]


def test_without_a_quorum_it_asks_again_soon_and_nobody_wakes_it():
    """Nodes that cannot answer tell nobody, either."""
    drive = DriveBoth(wait=10.0)
    for _ in range(12):
        drive.expect("a", FREE).expect("z", [unreachable()] * 3).go_on_to(Sleep)
        assert (drive.step.waiting, drive.lines) == (None, [])
    assert drive.step.seconds == LONGEST_PAUSE
    assert "wait z" not in drive.words()


def test_who_waits_for_one_comes_as_who_waits_for_a_lock_alone():
    drive, pauses = DriveBoth(wait=600.0), []
    for ttl in [60.0] * 9 + [0.25]:
        drive.expect("a", FREE).expect("z", [refused(ttl=ttl)] * 3).go_on_to(Sleep)
        pauses.append(drive.step.seconds)
        drive.go_on()
    assert pauses[:3] == pytest.approx([0.01, 0.02, 0.04])
    assert pauses[7:9] == [COMES_EVERY] * 2
    assert pauses[9] == pytest.approx(0.26)
    older = drive.client.listener.enter_thread(b"redlock:line:z", 1.6e9)
    older.ran_at = float("inf")  # it runs whatever the clock says
    drive.expect("a", FREE).expect("z", TAKEN).go_on_to(Sleep)
    began = drive.clock()
    drive.go_on_to_ask()
    assert drive.clock() - began == pytest.approx(NOTED_EVERY)


class DriveStart(DriveBoth):
    """The request for a lock, and for a start that counts."""

    def _steps(self, wanted):
        start = replace(wanted, name="a", stands=self.stands, fence=False)
        return acquire_all(self.client, [start, replace(wanted, name="z")])

    def __init__(self, *, stands=True, **wanted):
        self.stands = stands
        super().__init__(**wanted)


def test_a_start_is_asked_for_last():
    """So that a refused lock costs none; twin: two locks go by their names."""
    DriveStart(wait=10.0).expect("z", FREE).expect("a", TAKEN)
    DriveStart(wait=10.0, stands=False).expect("a", FREE).expect("z", TAKEN)


@pytest.mark.parametrize("stands", [True, False])
def test_who_starts_has_the_next_one_look_when_a_place_lapses(stands):
    """Nobody releases it. Who gets a lock need not: its release wakes the next one."""
    drive, (first, last) = DriveStart(stands=stands, wait=10.0), "za" if stands else "az"
    drive.expect(first, FREE).expect(last, TAKEN).go_on_to(Sleep)
    line = f"redlock:line:{last}".encode()
    others = [drive.client.listener.enter_thread(line, 1.8e9 + late) for late in range(2)]
    drive.wake().expect(first, FREE).expect(last, FREE)
    while drive.step is not None:
        drive.go_on()
    assert drive.lease
    assert [one.is_woken for one in others] == [stands, False]


def test_a_start_that_lapses_is_waited_for():
    drive = DriveStart(wait=10.0)
    lapses = [refused(ttl=0.04)] * 3
    for _ in range(4):
        drive.expect("z", FREE).expect("a", lapses).go_on_to(Sleep)
        assert drive.step.seconds <= 0.04 + SHORTEST_PAUSE
        assert "release z" in drive.words()  # others may have it meanwhile
        drive.go_on()


@pytest.mark.parametrize("is_woken", [True, False])
def test_who_is_out_of_time_leaves(is_woken):
    """After a last attempt, which may be the one that it was woken for."""
    drive = waiting_for_the_second()
    drive.words()
    drive.clock.advance(10.0)
    (drive.wake() if is_woken else drive.go_on()).expect("a", FREE).expect("z", TAKEN)
    while drive.step is not None:
        drive.go_on()
    assert isinstance(drive.error, LockTaken)
    assert drive.words() == ["release z", "release a", "leave z"]
    assert drive.lines == []


def test_a_first_that_has_grown_old_by_then_is_none():
    """Contenders for the second may split the vote for seconds; twin: in time they are two."""
    split = [granted(), refused("x"), refused("y")]
    drive = DriveBoth().expect("a", FREE).expect("z", split).go_on_to(Sleep)
    drive.clock.advance(25.0)
    drive.words()
    drive.expect("z", FREE)
    while drive.step is not None:
        drive.go_on()
    assert isinstance(drive.error, QuorumUnavailable)
    assert drive.error.name == "a"
    assert drive.words() == ["release a", "release z"]
    assert len(DriveBoth().expect("a", FREE).expect("z", FREE).lease) == 2


@pytest.mark.parametrize("where", ["pause", "first", "second", "leaving"])
def test_who_is_interrupted_leaves_nothing(where):
    drive = waiting_for_the_second()
    drive.words()
    left = {
        "pause": ["leave z"],
        "first": ["release a", "leave z"],
        "second": ["release z", "release a", "leave z"],
        "leaving": ["leave z", "release a", "release z", "leave z"],
    }
    if where != "pause":
        drive.wake()
    if where in ("second", "leaving"):
        drive.expect("a", FREE)
    if where == "leaving":
        drive.expect("z", FREE)
    drive.interrupt(KeyboardInterrupt())
    while drive.step is not None:
        drive.go_on()
    assert isinstance(drive.error, KeyboardInterrupt)
    assert drive.words() == left[where]
    assert drive.lines == []


def go_one_step(drive, ballots):
    if drive.is_asking:
        drive.vote(*ballots.pop(0))
    else:
        drive.go_on()


def test_who_is_interrupted_anywhere_gives_back_every_start_it_asked_for():
    """Wherever that strikes: of what it was granted nothing has started."""
    for steps in range(30):
        ballots = [FREE, TAKEN, FREE, [granted(), refused("x"), refused("y")], FREE]
        drive, asked = DriveStart(wait=10.0), set()
        for _ in range(steps):
            if drive.step is None:
                break
            if drive.is_asking:
                asked.add(drive.token)
            go_one_step(drive, ballots)
        if drive.step is None:
            assert drive.lease
            assert len(asked) == 5
            return
        if drive.is_asking:
            asked.add(drive.token)
        drive.interrupt(KeyboardInterrupt())
        while drive.step is not None:
            drive.go_on()
        assert isinstance(drive.error, KeyboardInterrupt)
        released = {one.request.arguments[0].decode()
                    for one in drive.told if one.request.script is RELEASE}  # fmt: skip
        assert asked <= released, steps
        assert drive.lines == []
    pytest.fail("it never ends")
