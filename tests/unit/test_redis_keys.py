"""The Redis keys of a lock name: short whatever the name is."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.lock.records import (
    LONGEST_NAME,
    Keys,
    line_key,
    own_name,
    place_name,
    shorten,
    waiters_key,
)
from celery_redlock.lock.rules import Rules


def test_long_names_are_not_kept():
    """A process that meets names of megabytes, as a forged message can have, keeps none of them."""
    Keys.of("redlock", "warm")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(20):
            Keys.of("redlock", f"{number}{'x' * 1_000_000}")
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1_000_000


def test_long_names_that_begin_alike_have_keys_of_their_own():
    one, other = (Keys.of("redlock", "x" * 10_000 + end) for end in "ab")
    assert one.lock != other.lock
    assert len(one.lock) < 200


#: What a name may end in to look like one that is derived, and what such an end is encoded as.
ENDS = st.text("#~%235207E1ab", max_size=12)
NAMES = st.builds(str.__add__, st.sampled_from(["a", "a" * (LONGEST_NAME - 40)]), ENDS)


@given(NAMES, NAMES)
def test_names_of_tasks_stay_apart(one, other):
    assert (own_name(one) == own_name(other)) == (one == other)


@given(NAMES, NAMES, st.integers(1, 999))
def test_no_task_can_name_a_place_of_another(mine, theirs, place):
    """Customer ``5#1`` is not the second place of customer ``5``."""
    assert Keys.of("redlock", own_name(mine)) != Keys.of("redlock", place_name(theirs, place))


@given(NAMES | NAMES.map(lambda name: name + "x" * 10_000), st.integers(0, 999))
def test_who_waits_for_a_lock_waits_for_every_place_of_it(name, place):
    """The release of any place finds the one line, whether it knows all of a long name or not."""
    line = line_key("redlock", name)
    assert line_key("redlock", place_name(name, place), place) == line
    assert line_key("redlock", shorten(name)) == line
    assert waiters_key(Rules().prefix, shorten(name)) == waiters_key(Rules().prefix, name) != line
    assert max(map(len, (line, waiters_key(Rules().prefix, name)))) < 200


def test_no_task_can_name_what_is_left_of_a_long_name():
    """The short form of a long name is another lock when somebody writes it."""
    for length in range(LONGEST_NAME - 4, LONGEST_NAME + 40):
        for letter in "x\xfc\u2028\U0001f512":
            long = letter * length
            if shorten(long) != long:
                assert Keys.of("redlock", own_name(shorten(long))) != Keys.of("redlock", long)


@pytest.mark.parametrize("name", ["a", "a#", "a#b", "#1x", "a#12345", "a~" + "0" * 32, "100%"])
def test_other_names_stay_as_they_are(name):
    assert own_name(name) == name
