"""Who waits for a lock: its tickets, step by step, and what its message says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.errors import LockTaken
from celery_redlock.lock.asks import Pause, Tell
from celery_redlock.lock.records import shorten
from celery_redlock.lock.rounds import LONGEST_PAUSE, LONGEST_SLEEP
from celery_redlock.lock.scripts import RELEASE
from celery_redlock.lock.waiting import LEAVE, WAIT
from celery_redlock.lock.wanted import Turn
from celery_redlock.task.waiting import (
    FIRST_BY_ITSELF,
    JITTER,
    LONGEST_BY_ITSELF,
    MOST_TIMES,
    Waiting,
)
from support.fakes import Drive, Ears, granted, marked, quarantined, refused, token_of

TAKEN = [refused()] * 3
NAMES = {WAIT: "wait", LEAVE: "leave", RELEASE: "release"}


def told(drive):
    """Return what was told the nodes: the script, and the token that it is about."""
    words = []
    for tell in drive.told:
        script, arguments = tell.request.script, tell.request.arguments
        hands_on = script is LEAVE and len(tell.request.keys) > 2
        name = "hand on" if hands_on else NAMES[script]
        words.append((name, arguments[script is not RELEASE][:40].decode()))
    drive.told.clear()
    return words


def wait_in_line(**wanted):
    """Return an acquire that was refused and waits with its ticket."""
    drive = Drive(ears=Ears(), **{"wait": 10.0, **wanted})
    return drive.vote(*TAKEN).go_on_to(Pause)


FIRST, TICKET = token_of("t1-"), token_of("t2-")


def test_who_was_refused_waits_with_a_ticket():
    """Its token is none of an attempt; the pause ends when its turn has come."""
    drive = wait_in_line()
    assert told(drive) == [("release", FIRST), ("wait", TICKET)]
    assert drive.step.token == TICKET
    assert list(drive.client.listener.expected) == [TICKET]


def test_who_is_not_to_wait_has_no_ticket():
    """One attempt, and no more to tell."""
    drive = Drive(ears=Ears()).vote(*TAKEN).go_on()
    assert isinstance(drive.error, LockTaken)
    assert told(drive) == [("release", FIRST)]
    assert drive.client.listener.expected == {}


def test_where_nobody_is_woken_there_are_no_tickets():
    """In memory, for one: who waits asks again, and more often."""
    drive = Drive(wait=10.0).vote(*TAKEN).go_on_to(Pause)
    assert told(drive) == [("release", FIRST)]
    assert (drive.step.token, drive.step.seconds <= LONGEST_PAUSE) == ("", True)


def test_a_ticket_is_made_once_and_told_again():
    """With each attempt: so the nodes go on to count it, and one that lost it has it again."""
    drive = wait_in_line()
    told(drive)
    for attempt in range(3, 12):
        drive.go_on_to_ask()
        assert drive.token == token_of(f"t{attempt}-")
        drive.vote(*TAKEN).go_on_to(Pause)
        assert told(drive) == [("release", token_of(f"t{attempt}-")), ("wait", TICKET)]
        assert drive.step.token == TICKET
    assert drive.step.seconds == LONGEST_SLEEP


def test_who_is_woken_asks_with_the_token_of_its_ticket():
    """The nodes keep the lock for that one; once granted, it hands on nothing."""
    drive = wait_in_line()
    told(drive)
    drive.wake()
    assert drive.token == TICKET
    assert drive.client.listener.forgotten == [TICKET]
    drive.vote(granted(), granted()).go_on()
    assert drive.lease.token == TICKET
    assert told(drive) == [("leave", TICKET)]


def test_who_is_woken_in_vain_waits_with_another_ticket():
    """A token is good for one attempt: a late release of it must not strike a later one."""
    drive = wait_in_line()
    told(drive)
    drive.wake().vote(*TAKEN).go_on_to(Pause)
    second = token_of("t3-")
    assert told(drive) == [("release", TICKET), ("hand on", TICKET), ("wait", second)]
    assert drive.step.token == second
    assert list(drive.client.listener.expected) == [second]
    drive.go_on_to_ask()
    assert drive.token == token_of("t4-")
    drive.vote(granted(), granted()).go_on()
    assert drive.lease.token == token_of("t4-")
    assert told(drive) == [("hand on", second)]


def test_a_woken_attempt_that_fails_hands_on():
    """What was kept for it goes to the next one; an attempt of any other has nothing to hand on."""
    drive = wait_in_line()
    (first, _) = drive.told
    assert first.request.keys[2] == first.request.keys[0]
    drive.told.clear()
    drive.wake().vote(granted(), refused(), refused()).go_on_to(Pause)
    assert drive.told[0].request.keys[2] == b"redlock:ready:k"


@pytest.mark.parametrize("vote", [refused(), quarantined(), marked()], ids=lambda it: it.kind.name)
def test_a_woken_attempt_hands_on_from_every_node(vote):
    """Whatever a node answered, it may keep the lock for it; of any other it has nothing then."""
    drive = wait_in_line(marker="m")
    assert drive.told[0].skip == {0, 1, 2}
    drive.told.clear()
    drive.wake().vote(*[vote] * 3).go_on_to(Pause)
    assert drive.told[0].request.script is RELEASE
    assert drive.told[0].skip == frozenset()


def test_who_comes_by_itself_gives_back_what_was_kept_for_it():
    """Its turn may have come on some nodes; they hand the lock on to the next."""
    drive = wait_in_line()
    told(drive)
    drive.go_on_to_ask().vote(granted(), granted())
    while drive.step is not None:
        drive.go_on()
    assert drive.lease.token == token_of("t3-")
    assert told(drive) == [("hand on", TICKET)]


def test_who_gives_up_leaves():
    """When its time is over; nothing of it stays on the nodes."""
    drive = wait_in_line(wait=0.005)
    drive.go_on_to_ask().vote(*TAKEN)
    while drive.step is not None:
        drive.go_on()
    assert isinstance(drive.error, LockTaken)
    assert told(drive)[-1:] == [("hand on", TICKET)]
    assert drive.client.listener.expected == {}


@pytest.mark.parametrize("where", ["pause", "woken"])
def test_who_is_interrupted_leaves(where):
    """While it sleeps, and while it asks with its ticket."""
    drive = wait_in_line()
    told(drive)
    if where == "woken":
        drive.wake()
    drive.interrupt(KeyboardInterrupt())
    while drive.step is not None:
        drive.go_on()
    assert isinstance(drive.error, KeyboardInterrupt)
    if where == "woken":
        assert told(drive) == [("release", TICKET), ("leave", TICKET)]
    else:
        assert told(drive) == [("hand on", TICKET)]
    assert drive.client.listener.expected == {}


def test_who_is_interrupted_as_it_leaves_leaves_once_more():
    """Perhaps before a byte was sent: it would count as waiting for minutes, and be woken."""
    drive = wait_in_line(wait=0.005)
    drive.go_on_to_ask().vote(*TAKEN)
    while not (isinstance(drive.step, Tell) and drive.step.request.script is LEAVE):
        drive.go_on()
    told(drive)
    drive.interrupt(KeyboardInterrupt())
    while drive.step is not None:
        drive.go_on()
    assert isinstance(drive.error, KeyboardInterrupt)
    assert told(drive) == [("hand on", TICKET)]


def test_a_task_that_was_woken_on_a_place_beyond_its_limit_hands_on():
    """Its message waited since before the limit was lowered: one more would run."""
    drive = Drive(turn=Turn("w" * 40, 1), wait=10.0).go_on_to_ask()
    assert told(drive) == [("release", "w" * 40)]
    # The place within its limit may be kept for it as well, where releases of both crossed.
    assert (drive.token, drive.step.request.keys[0]) == ("w" * 40, b"redlock:lock:k")


def test_a_ticket_s_token_begins_with_the_owner():
    """So that the parent can release for a child that died while it was woken."""
    owner = "f" * 32
    drive = wait_in_line(owner=owner)
    assert drive.step.token.startswith(owner)


def test_a_task_that_was_woken_asks_with_its_ticket_once():
    """The next attempt has a token of its own."""
    drive = Drive(turn=Turn("w" * 40, 0), wait=10.0)
    assert drive.token == "w" * 40
    drive.vote(*TAKEN).go_on_to_ask()
    assert drive.token == FIRST


def test_what_waits_is_told_without_an_answer():
    """Nobody waits for a node to note who waits."""
    assert all(isinstance(tell, Tell) for tell in wait_in_line().told)
    assert WAIT.one_way
    assert LEAVE.one_way


# -- in a message ------------------------------------------------------------------------


def test_a_task_waits_since_it_was_refused_first():
    """However often it comes in vain; for another of its names, too, but for how often."""
    first = Waiting.again(None, "a", 1)
    second = Waiting.again(first, "a", 3)
    assert (first.times, second.times, second.since) == (1, 2, first.since)
    third = Waiting.again(second, "b", 1)
    assert (third.name, third.times, third.since) == ("b", 1, first.since)
    assert (first.limit, second.limit) == (1, 3)
    most = Waiting("a", 1.0, MOST_TIMES)
    assert Waiting.again(most, "a", 1) == most


def test_a_message_says_that_it_is_not_woken():
    """Only then, and in the way that others are read; what is neither yes nor no is nothing."""
    woken = Waiting("a", 1.7e9, 2, 3)
    assert "woken" not in woken.parts
    assert Waiting.of(woken.unwoken.parts) == woken.unwoken != woken
    assert Waiting.of(woken.parts | {"woken": 0}) is None
    assert Waiting.again(woken.unwoken, "a", 3).is_woken


def test_a_long_name_is_known_again():
    """A message carries what stands in the key."""
    name = "x" * 5000
    first = Waiting.again(None, name, 7)
    assert first.name == shorten(name)
    assert Waiting.of(first.parts) == first
    assert Waiting.again(first, name, 7).times == 2


@given(times=st.integers(1, MOST_TIMES), longest=st.floats(1, 1e6))
def test_a_task_comes_by_itself_within_bounds(times, longest):
    """In whole seconds >= 1, as quorum queues take nothing else, and as the broker can bear."""
    comes = Waiting("a", 1.0, times).comes_by_itself(longest)
    assert isinstance(comes, int)
    assert 1 <= comes <= min(longest, LONGEST_BY_ITSELF)


def test_a_task_comes_by_itself_less_and_less_often():
    """Each time it was not woken; not all of them at once."""
    for times, seconds in enumerate([60, 120, 240, 480, 600, 600], start=1):
        comes = {Waiting("a", 1.0, times).comes_by_itself(math.inf) for _ in range(50)}
        assert len(comes) > 1
        assert seconds * (1 - JITTER) - 1 <= min(comes) <= max(comes) <= seconds
    assert FIRST_BY_ITSELF == 60
