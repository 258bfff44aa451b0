"""What the message of a task that waits for its lock says, and what the nodes know of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.lock.records import shorten
from celery_redlock.task.messages.waiting import (
    FIRST_BY_ITSELF,
    JITTER,
    LONGEST_BY_ITSELF,
    MOST_TIMES,
    Waiting,
    Wakes,
)


def test_a_task_waits_since_it_was_refused_first():
    """However often it comes in vain; for another of its names, too, but for how often."""
    first = Waiting.again(None, "a")
    second = Waiting.again(first, "a", Wakes.RELEASE)
    assert (first.times, second.times, second.since) == (1, 2, first.since)
    assert (first.wakes_it, second.wakes_it) == (Wakes.FREE, Wakes.RELEASE)
    third = Waiting.again(second, "b", Wakes.RELEASE)
    assert (third.name, third.times, third.since) == ("b", 1, first.since)
    assert third.wakes_it is Wakes.RELEASE
    most = Waiting("a", 1.0, MOST_TIMES)
    assert Waiting.again(most, "a") == most


@pytest.mark.parametrize(
    ("wakes", "said"),
    [(Wakes.FREE, {}), (Wakes.RELEASE, {"woken": "release"}), (Wakes.NOTHING, {"woken": False})],
)
def test_a_message_says_what_wakes_it(wakes, said):
    """In the way that workers of other versions read it: most often it says nothing."""
    waiting = Waiting("a", 1.7e9, 2, wakes)
    assert waiting.parts == {"name": "a", "since": 1.7e9, "times": 2, **said}
    assert Waiting.of(waiting.parts) == waiting
    assert Waiting.of(waiting.unwoken.parts).wakes_it is Wakes.NOTHING
    assert Waiting.again(waiting.unwoken, "a").wakes_it is Wakes.FREE


@pytest.mark.parametrize("odd", [0, 1, None, "", "Release", "free", ["release"]])
def test_what_wakes_a_message_in_no_known_way_is_not_read(odd):
    assert Waiting.of(Waiting("a", 1.7e9).parts | {"woken": odd}) is None


@pytest.mark.parametrize("limit", [1, 7, "x", None, 10**9])
def test_how_many_places_there_are_is_not_read_from_a_message(limit):
    """Older workers say so; anybody can. The task itself knows."""
    waiting = Waiting("a", 1.7e9, 2)
    assert Waiting.of(waiting.parts | {"limit": limit}) == waiting


@pytest.mark.parametrize("wakes", Wakes)
def test_only_a_task_that_waits_for_a_free_lock_asks_for_one(wakes):
    """Another one would be woken at once by the lock that it cannot have yet, and again."""
    one = Waiting("a", 1.7e9, 2, wakes).in_line("bill", "me", "e" * 32, "c" * 16, 3)
    assert one.asks is (wakes is Wakes.FREE)
    assert (one.name, one.who, one.since, one.limit) == ("a", "e" * 32, 1.7e9, 3)
    assert (one.channel, one.info) == ("c" * 16, {"task": "bill", "task_id": "me"})


def test_a_long_name_is_known_again():
    """A message carries what stands in the key."""
    name = "x" * 5000
    first = Waiting.again(None, name)
    assert first.name == shorten(name)
    assert Waiting.of(first.parts) == first
    assert Waiting.again(first, name).times == 2


@given(times=st.integers(1, MOST_TIMES), longest=st.floats(1, 1e6))
def test_a_task_comes_by_itself_within_bounds(times, longest):
    """In whole seconds >= 1, as quorum queues take nothing else, and as the broker can bear."""
    comes = Waiting("a", 1.0, times).comes_by_itself(longest)
    assert isinstance(comes, int)
    assert 1 <= comes <= min(longest, LONGEST_BY_ITSELF)


def test_a_task_comes_by_itself_less_and_less_often():
    for times, seconds in enumerate([60, 120, 240, 480, 600, 600], start=1):
        comes = {Waiting("a", 1.0, times).comes_by_itself(math.inf) for _ in range(50)}
        assert len(comes) > 1
        assert seconds * (1 - JITTER) - 1 <= min(comes) <= max(comes) <= seconds
    assert FIRST_BY_ITSELF == 60
