"""Who waits for locks in a process: whose hint counts, when, and whom it wakes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import time

import pytest

from celery_redlock.lock.algorithm.waiter import COMES_EVERY
from celery_redlock.lock.waiting.room import (
    BELATED,
    CANNOT_RUN,
    GONE,
    MOST_HINTS,
    Room,
    ThreadWaiting,
    Waiting,
)
from support.fakes import FakeClock

LINE, OTHER = b"redlock:line:a", b"redlock:line:b"
#: Of the first node, and of each of the others; exact in binary, as the clock's beginning.
ROUND_TRIP, OF_OTHERS = 2**-6, 2**-4


class Sleeper(Waiting):
    def __init__(self, since=0.0, line=LINE, who=""):
        super().__init__(line, since, who)
        self.wakes, self.registered = [], []

    def wake(self, after):
        self.wakes.append(after)

    def register_again(self):
        self.registered.append(self)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def room(clock):
    return Room(3, lambda position: OF_OTHERS if position else ROUND_TRIP, clock)


def seat(room, *since, line=LINE):
    sleepers = [Sleeper(moment, line) for moment in since]
    for one in sleepers:
        room.enter(one)
    return sleepers


def released(room, *positions, line=LINE, release=None, taken="-" * 32):
    """
    Have these nodes say that the lock was released: as before, or anew where one said so.

    And whom they have taken out of their line, who has left here if it is not said.
    """
    for position in positions:
        known = room.__dict__.setdefault("said", [0, set()])
        if position in known[1]:
            known[:] = [known[0] + 1, set()]
        known[1].add(position)
        room.hear(position, (release or b"%08d" % known[0]) + taken.encode() + line)


# -- when a hint counts -----------------------------------------------------------------


def test_one_node_is_believed_a_round_trip_later_and_a_majority_at_once(room, clock):
    """Whoever came before the others have heard of the release would be refused by them."""
    (one,) = seat(room, 0.0)
    released(room, 0)
    assert one.wakes == [ROUND_TRIP]
    clock.advance(ROUND_TRIP / 4)
    released(room, 1)
    assert one.wakes == [ROUND_TRIP]
    released(room, 2)
    assert one.wakes == [ROUND_TRIP, 0.0]


@pytest.mark.parametrize(("position", "after"), [(0, ROUND_TRIP), (3, OF_OTHERS)])
def test_it_is_the_round_trip_of_that_node(room, position, after):
    """The others may be as much further away as it is."""
    (one,) = seat(room, 0.0)
    released(room, position)
    assert one.wakes == [after]


def test_a_majority_that_is_slower_than_that_wakes_the_same_one_again(room, clock):
    """The first time it may have come too early; once, and nobody else for it."""
    one, other = seat(room, 0.0, 1.0)
    released(room, 0)
    clock.advance(BELATED * 0.9)
    released(room, 1)
    assert one.wakes == [ROUND_TRIP]
    for position in (2, 3, 4):
        released(room, position)
        assert (one.wakes, one.is_woken, other.wakes) == ([ROUND_TRIP, 0.0], True, [])


def test_so_it_does_where_the_round_trip_took_no_time():
    """As on one machine, by a clock that shows whole milliseconds."""
    room, (one, other) = Room(2, lambda _: 0.0, FakeClock()), (Sleeper(0.0), Sleeper(1.0))
    room.enter(one)
    room.enter(other)
    for position in range(3):
        released(room, position)
    assert (one.wakes, other.wakes) == ([0.0, 0.0], [])


def test_one_release_wakes_one_however_many_nodes_tell(room):
    one, other = seat(room, 0.0, 1.0)
    released(room, 0, 1, 2, 3, 4)
    assert (one.wakes, other.wakes) == ([ROUND_TRIP, 0.0], [])


def test_what_comes_much_later_is_another_release(room, clock):
    """Also if the node that tells of it had missed the one before."""
    one, other = seat(room, 0.0, 1.0)
    released(room, 0)
    clock.advance(BELATED + 0.001)
    released(room, 1)
    assert (one.wakes, other.wakes) == ([ROUND_TRIP], [OF_OTHERS])


def test_hints_of_two_releases_are_told_apart(room):
    """Nodes may tell of them in another order, and one of them another process of one of them."""
    one, other = seat(room, 0.0, 1.0)
    released(room, 0, release=b"11111111")
    released(room, 1, release=b"22222222")
    assert (one.wakes, other.wakes) == ([ROUND_TRIP], [OF_OTHERS])
    released(room, 0, 2, release=b"22222222")
    assert (one.wakes[-1], other.wakes[-1]) == (ROUND_TRIP, 0.0)
    released(room, 1, 2, release=b"11111111")
    assert (one.wakes[-1], other.wakes[-1]) == (0.0, 0.0)


def test_the_same_node_again_is_no_majority(room):
    (one,) = seat(room, 0.0)
    released(room, 0, 0, 0, 1, 1)
    assert 0.0 not in one.wakes


def test_a_node_that_tells_without_end_costs_little(room):
    seat(room, 0.0)
    for _ in range(5 * MOST_HINTS):
        released(room, 0)
    assert len(room._hints) <= MOST_HINTS + 1


# -- whom the node has taken out of its line ----------------------------------------------

X, Y = "0" * 31 + "1", "0" * 31 + "2"


@pytest.fixture
def pair(room, clock):
    """Two who wait, the older one first."""
    both = Sleeper(0.0, who=X), Sleeper(1.0, who=Y)
    for one in both:
        one.ran_at = clock()
        room.enter(one)
    return both


def test_that_one_is_woken_though_another_is_older_here(room, pair):
    """Or it would be in no line, and nobody would tell it of the next release."""
    one, other = pair
    released(room, 0, taken=Y)
    assert (one.wakes, other.wakes) == ([], [ROUND_TRIP])
    assert (one.registered, other.registered) == ([], [])


def test_whoever_another_node_has_taken_out_registers_again(room, pair):
    one, other = pair
    released(room, 0, taken=Y)
    released(room, 1, taken=X)
    assert (one.wakes, one.registered) == ([], [one])
    assert other.registered == []


def test_who_is_woken_already_registers_again_and_the_next_is_woken(room, pair):
    """It may have asked for the lock before this release."""
    one, other = pair
    released(room, 0, taken=X)
    released(room, 0, taken=X)
    assert (one.wakes, one.registered) == ([ROUND_TRIP], [one])
    assert (other.wakes, other.registered) == ([ROUND_TRIP], [])


def test_who_has_tried_in_vain_by_then_registers_again(room, pair):
    """A node that is slow takes it out after it has registered with its refusal."""
    one, _ = pair
    released(room, 0, 1, 2, taken=X)
    one.is_woken = False
    assert one.registered == []
    released(room, 3, taken=X)
    assert (len(one.wakes), one.registered) == (2, [one])


def test_who_cannot_run_registers_again_and_another_is_woken(room, pair, clock):
    one, other = pair
    clock.advance(CANNOT_RUN + 1)
    other.ran_at = clock()
    released(room, 0, taken=X)
    assert (one.wakes, one.registered) == ([], [one])
    assert other.wakes == [ROUND_TRIP]


def test_whoever_has_left_is_nobody(room, pair):
    """Also where one with the same name is there: two deliveries of one message."""
    one, other = pair
    again = Sleeper(2.0, who=X)
    room.enter(again)
    room.leave(one)
    released(room, 0, taken=X)
    assert (one.wakes, other.wakes, again.wakes) == ([], [], [ROUND_TRIP])
    room.leave(again)
    released(room, 0, taken=X)
    assert other.wakes == [ROUND_TRIP]
    assert (one.registered, again.registered) == ([], [])


# -- whom it wakes ----------------------------------------------------------------------


def test_the_longest_waiting_one_is_woken(room):
    """Whoever came first into the room: a message may have waited elsewhere before."""
    late, first, middle = seat(room, 9.0, 1.0, 5.0)
    released(room, 0, 1, 2)
    assert (first.wakes[-1], middle.wakes, late.wakes) == (0.0, [], [])
    assert [one.is_woken for one in (first, middle, late)] == [True, False, False]


def test_the_next_release_wakes_the_next_one(room):
    one, other = seat(room, 0.0, 1.0)
    released(room, 0, 1, 2)
    released(room, 0, 1, 2)
    assert (one.wakes[-1], other.wakes[-1]) == (0.0, 0.0)
    one.wakes.clear()
    other.wakes.clear()
    one.is_woken = other.is_woken = False
    released(room, 0, 1, 2)
    assert (one.wakes[-1], other.wakes) == (0.0, [])


def test_where_all_are_woken_the_oldest_tries_again(room):
    """The lock came free as it was refused: else nobody would come for a second."""
    one, other = seat(room, 0.0, 1.0)
    for _ in range(3):
        released(room, 0, 1, 2)
    assert (one.wakes.count(0.0), other.wakes.count(0.0)) == (2, 1)


def test_one_that_gave_up_before_the_hint_counts_passes_it_on(room, clock):
    """To the next, at the same moment; by a majority, at once."""
    one, other, third = seat(room, 0.0, 1.0, 2.0)
    released(room, 0)
    room.leave(one)
    clock.advance(ROUND_TRIP / 4)
    released(room, 1)
    assert other.wakes == [ROUND_TRIP * 3 / 4]
    room.leave(other)
    released(room, 2)
    assert third.wakes == [0.0]


@pytest.mark.parametrize("more", [(1,), (1, 2, 3)])
def test_one_that_left_when_it_counted_does_not(room, clock, more):
    """It has tried, and most likely has the lock: the next one would try in vain."""
    one, other = seat(room, 0.0, 1.0)
    released(room, 0)
    clock.advance(ROUND_TRIP)
    room.leave(one)
    released(room, *more)
    assert other.wakes == []


def test_who_left_is_woken_no_more(room):
    """Leaving twice is harmless: whoever is interrupted leaves once more."""
    one, other = seat(room, 0.0, 1.0)
    room.leave(one)
    room.leave(one)
    released(room, 0, 1, 2)
    assert (one.wakes, other.wakes[-1]) == ([], 0.0)


def test_what_was_heard_before_counts_for_nobody_who_comes_later(room, clock):
    """The lock may have been taken meanwhile, by whom it woke."""
    (one,) = seat(room, 0.0)
    released(room, 0, 1)
    clock.advance(ROUND_TRIP)
    room.leave(one)
    (later,) = seat(room, 1.0)
    released(room, 2)
    assert later.wakes == []


def test_each_lock_has_a_line_of_its_own(room):
    (one,) = seat(room, 0.0)
    (other,) = seat(room, 1.0, line=b"redlock:line:b")
    for message in (b"", b"r" + LINE, LINE[:-1], b"redlock:line:c", b"\xff" * 9):
        for position in range(5):
            room.hear(position, message)
    assert (one.wakes, other.wakes) == ([], [])
    released(room, 0, 1, 2, line=b"redlock:line:b")
    assert (one.wakes, other.wakes[-1]) == ([], 0.0)


def test_as_many_are_woken_as_places_are_free(room):
    first, second, third = seat(room, 0.0, 1.0, 2.0)
    room.free(LINE, 0)
    assert first.wakes == []
    room.free(LINE, 2)
    assert (first.wakes, second.wakes, third.wakes) == ([0.0], [0.0], [])
    assert [one.is_woken for one in (first, second, third)] == [True, True, False]


def test_whoever_is_woken_already_has_a_free_place(room):
    first, second = seat(room, 0.0, 1.0)
    released(room, 0, 1, 2)
    before = list(first.wakes)
    room.free(LINE, 1)
    room.free(b"redlock:line:b", 2)
    assert (first.wakes, second.wakes) == (before, [])
    room.free(LINE, 1000)
    assert (first.wakes, second.wakes) == (before, [0.0])


def test_who_waits_for_a_release_is_told_of_no_free_place(room):
    first, second = seat(room, 0.0, 1.0)
    first.takes_free = False
    assert room.is_oldest(second)
    assert not room.is_oldest(first)
    room.free(LINE, 1)
    assert (first.wakes, second.wakes) == ([], [0.0])
    released(room, 0, 1, 2)
    assert first.wakes[-1] == 0.0


def test_who_has_waited_longer_than_it_seemed_is_before_the_others(room):
    """By what the nodes know of it; twin: and behind them, if it has not waited for so long."""
    one, other, last = seat(room, 1.0, 2.0, 3.0)
    room.has_waited_since(last, 0.0)
    assert room.is_oldest(last)
    room.has_waited_since(last, 1.5)
    assert room.is_oldest(one)
    released(room, 0, 0)
    assert [bool(it.wakes) for it in (one, last, other)] == [True, True, False]
    room.has_waited_since(one, 9.0)
    room.leave(last)
    assert room.is_oldest(other)


def test_who_left_stays_away_however_long_it_has_waited(room):
    """The nodes' answer may come after it left."""
    one, other = seat(room, 1.0, 2.0)
    room.leave(one)
    room.has_waited_since(one, 0.0)
    assert room.is_oldest(other)
    room.leave(other)
    room.has_waited_since(other, 0.0)
    assert room.is_empty


def test_the_oldest_of_each_lock_comes_by_itself(room):
    late, first = seat(room, 5.0, 1.0)
    (other,) = seat(room, 9.0, line=b"redlock:line:b")
    assert [room.is_oldest(one) for one in (late, first, other)] == [False, True, True]
    room.leave(first)
    assert room.is_oldest(late)
    room.leave(late)
    assert room.is_oldest(late)  # as of a thread whose process was forked


def seat_threads(room, clock, *since):
    threads = [ThreadWaiting(LINE, moment, clock) for moment in since]
    for one in threads:
        room.enter(one)
    return threads


def test_who_has_not_run_for_long_keeps_nobody_waiting(room, clock):
    """Its loop is blocked, stopped or closed; what is free is the next one's, until it runs."""
    blocked, other = seat_threads(room, clock, 0.0, 1.0)
    clock.advance(CANNOT_RUN)
    assert not room.is_oldest(other)
    clock.advance(CANNOT_RUN / 64)
    assert room.is_oldest(other)
    released(room, 0, 1, 2)
    assert (blocked.was_woken(), other.was_woken()) == (False, True)
    other.is_woken = False
    room.free(LINE, 1)
    assert (blocked.was_woken(), other.was_woken()) == (False, True)
    assert room.is_oldest(blocked)
    assert not room.is_oldest(other)


def test_who_is_awake_hears_what_its_neighbour_cannot(room, clock):
    """It tries in vain just now, and may have to once more."""
    blocked, other = seat_threads(room, clock, 0.0, 1.0)
    clock.advance(CANNOT_RUN + 1)
    assert room.is_oldest(other)
    for _ in range(2):
        released(room, 0, 1, 2)
        assert (blocked.was_woken(), other.was_woken()) == (False, True)


def test_a_waiter_sleeps_for_less_than_it_may_not_run():
    assert CANNOT_RUN == 2 * COMES_EVERY


def test_who_is_gone_for_good_is_not_listened_for(room, clock):
    seat_threads(room, clock, 0.0)
    clock.advance(GONE)
    assert not room.is_empty
    clock.advance(GONE / 64)
    assert room.is_empty


def test_a_room_is_empty_when_all_have_left(room):
    assert room.is_empty
    one, other = seat(room, 0.0, 1.0)
    room.leave(one)
    assert not room.is_empty
    room.leave(other)
    assert room.is_empty


def test_all_are_registered_again_the_oldest_at_last(room):
    """It tries, and if it is granted the lock may release it before the others are in line."""
    registered = []
    sleepers = [*seat(room, 2.0, 1.0), *seat(room, 3.0, line=OTHER)]
    gone, *others = sleepers
    for one in sleepers:
        one.registered = registered
    room.leave(gone)
    seat(room, 4.0)[0].registered = registered
    room.register_all()
    assert [one.since for one in registered if one.line == LINE] == [4.0, 1.0]
    assert set(others) < set(registered)
    assert [one.wakes for one in registered] == [[], [], []]


# -- threads ----------------------------------------------------------------------------


@pytest.fixture
def thread(clock):
    return ThreadWaiting(LINE, 0.0, clock)


def test_who_is_woken_as_it_sleeps_wakes_up():
    thread, heard = ThreadWaiting(LINE, 0.0), []
    sleeps = threading.Thread(target=lambda: heard.append(thread.wait(600.0)), daemon=True)
    sleeps.start()
    time.sleep(0.05)  # most likely it sleeps by now; if not, this is the test below
    thread.wake(0.0)
    sleeps.join(timeout=60)
    assert heard == [True]


def test_who_is_woken_before_it_sleeps_does_not_sleep(thread):
    """It was refused, or trying, perhaps too early; one waking ends one pause."""
    for _ in range(3):
        thread.wake(0.0)
        assert thread.wait(0.0)
        assert not thread.wait(0.0)
    thread.wake(0.0)
    assert thread.wait(600.0)
    assert not thread.wait(0.0)


def test_who_is_to_wake_up_in_a_while_sleeps_until_then():
    """A hint of one node counts a round trip later."""
    thread = ThreadWaiting(LINE, 0.0)
    thread.wake(0.05)
    began = time.monotonic()
    assert thread.wait(600.0)
    assert time.monotonic() - began >= 0.05


def test_a_pause_may_be_over_before_that(thread, clock):
    thread.wake(5.0)
    assert not thread.wait(0.0)
    clock.advance(4.9)
    assert not thread.wait(0.0)
    clock.advance(0.1)
    assert thread.wait(600.0)


def test_the_earliest_of_several_counts(thread, clock):
    """A majority calls at once whom one node has called for later; the later one is used up."""
    for after in (5.0, 1.0, 3.0):
        thread.wake(after)
    clock.advance(1.0)
    assert thread.wait(600.0)
    clock.advance(5.0)
    assert not thread.wait(0.0)


def test_who_is_to_register_again_sleeps_no_longer(thread):
    """It was not woken, however: it is to try only if it is the oldest."""
    thread.register_again()
    assert not thread.wait(600.0)
    thread.wake(0.0)
    assert thread.wait(600.0)
    thread.is_to_register = False
    assert not thread.wait(0.0)


def test_who_is_to_register_again_as_it_sleeps_wakes_up():
    thread, heard = ThreadWaiting(LINE, 0.0), []
    sleeps = threading.Thread(target=lambda: heard.append(thread.wait(600.0)), daemon=True)
    sleeps.start()
    time.sleep(0.05)  # most likely it sleeps by now; if not, this is the test above
    thread.register_again()
    sleeps.join(timeout=60)
    assert heard == [False]


def test_a_thread_is_woken_until_it_waits_again(room, clock):
    one, other = (ThreadWaiting(LINE, since, clock) for since in (0.0, 1.0))
    room.enter(one)
    room.enter(other)
    released(room, 0, 1, 2)
    assert one.wait(600.0)
    released(room, 0, 1, 2)
    assert other.wait(600.0)
    assert not one.wait(0.0)
    released(room, 0, 1, 2)
    assert one.wait(600.0)
    assert not other.wait(0.0)
    released(room, 0, 1, 2)
    assert other.wait(600.0)


def test_one_that_is_about_to_wake_up_is_woken_already(room, clock):
    """Two releases within a round trip wake two; also if the first looked at its pause between."""
    one, other = (ThreadWaiting(LINE, since, clock) for since in (0.0, 1.0))
    room.enter(one)
    room.enter(other)
    released(room, 0)
    assert not one.wait(0.0)
    released(room, 0)
    clock.advance(ROUND_TRIP)
    assert other.wait(600.0)
    assert one.wait(600.0)


class Interrupted(BaseException):
    """Raised by a signal."""


def strike(moment):
    """Return a tracer that raises at the line number *moment* from now, and what it counts."""
    count = itertools.count()

    def trace(_frame, event, _argument):
        if event == "line" and next(count) == moment:
            raise Interrupted
        return trace

    return trace, count


def apart(call):
    """Call in a generator, which takes along what Python 3.11 leaves of a raising tracer."""
    yield call()


def test_a_signal_locks_nobody_out_wherever_it_strikes():
    """At any line of a wait, Python's own included: the threads that listen go on."""
    before = sys.gettrace()
    for moment in itertools.count():
        room, thread = Room(2, lambda _: 600.0), ThreadWaiting(LINE, 0.0)
        room.enter(thread)
        trace, count = strike(moment)
        gc.disable()  # what others have called at a collection is none of these lines
        with contextlib.suppress(Interrupted):
            sys.settrace(trace)
            try:
                next(apart(lambda it=thread: it.wait(0.05)))  # short: nobody wakes it
            finally:
                sys.settrace(before)
                gc.enable()
        assert sys.exc_info() == (None, None, None)
        hears = threading.Thread(target=lambda it=room: released(it, 0, 1), daemon=True)
        hears.start()
        hears.join(timeout=60)
        assert not hears.is_alive(), moment
        assert thread.wait(600.0)
        if next(count) <= moment:
            break
    assert moment > 3
