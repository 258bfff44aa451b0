from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock import (
    ConfigurationError,
    Fail,
    Reschedule,
    Retry,
    RunUnlocked,
    Skip,
)
from celery_redlock.task.policies import no_later, policy_of

WORDS = {
    "skip": Skip,
    "fail": Fail,
    "retry": Retry,
    "reschedule": Reschedule,
    "run_unlocked": RunUnlocked,
}
bases = st.floats(0.001, 1000)
factors = st.floats(1, 1000)
longest = st.floats(1, 5000)
times = st.integers(0, 10**6)


@pytest.mark.parametrize("word", WORDS)
def test_a_word_stands_for_its_policy_with_defaults(word):
    policy = WORDS[word]
    assert policy_of("shop.bill: on_unavailable", word) == policy()
    assert policy_of("shop.bill: on_unavailable", policy) == policy()
    assert policy_of("shop.bill: on_unavailable", policy()) == policy()


def test_a_value_keeps_its_numbers():
    policy = Reschedule(base=2.0, cap=9.0, max_reschedules=4)
    assert policy_of("on_conflict", policy) is policy


@pytest.mark.parametrize(
    ("value", "nearest"),
    [("skipp", "'skip'"), ("Reschedule", "'reschedule'"), ("run-unlocked", "'run_unlocked'")],
)
def test_a_misspelt_word_is_refused_with_the_nearest(value, nearest):
    with pytest.raises(ConfigurationError) as refused:
        policy_of("shop.bill: on_unavailable", value)
    told = str(refused.value)
    assert "shop.bill: on_unavailable" in told
    assert repr(value) in told
    assert nearest in told


@pytest.mark.parametrize("value", [7, None, True, object, ["skip"], ("retry", 5), b"skip", int])
def test_what_is_no_policy_is_refused_with_all_words(value):
    with pytest.raises(ConfigurationError, match="on_conflict"):
        policy_of("on_conflict", value)


@pytest.mark.parametrize("value", ["run_unlocked", RunUnlocked, RunUnlocked()])
@pytest.mark.parametrize("option", ["shop.bill: on_conflict", "redlock_on_conflict"])
def test_nobody_runs_unlocked_beside_a_holder(option, value):
    """``run_unlocked`` is for on_unavailable; on a conflict it would break the exclusion."""
    with pytest.raises(ConfigurationError, match=r"on_conflict.*on_unavailable only"):
        policy_of(option, value)


@pytest.mark.parametrize("countdown", [-1, float("nan"), float("inf"), "5", True])
def test_a_retry_needs_a_delay_that_exists(countdown):
    with pytest.raises(ConfigurationError, match="countdown"):
        Retry(countdown=countdown)


@pytest.mark.parametrize(
    "numbers",
    [
        {"base": 0},
        {"base": -1},
        {"base": "1"},
        {"base": float("nan")},
        {"base": True},
        {"base": 5, "cap": 4},
        {"cap": "60"},
        {"cap": float("nan")},
        {"cap": float("inf")},
        {"max_reschedules": -1},
        {"max_reschedules": 1.5},
        {"max_reschedules": True},
        {"max_reschedules": "3"},
    ],
)
def test_a_reschedule_refuses_numbers_that_make_no_sense(numbers):
    with pytest.raises(ConfigurationError, match="Reschedule") as refused:
        Reschedule(**numbers)
    assert next(iter(numbers)) in str(refused.value)


@given(base=bases, factor=factors, times=times, longest=longest, share=st.floats(0, 1))
def test_a_delay_is_whole_seconds_within_every_bound(base, factor, times, longest, share):
    """Quorum queues take whole seconds >= 1; the cap and the broker bound it from above."""
    policy = Reschedule(base=base, cap=base * factor)
    drawn = policy.countdown(times, longest, lambda low, high: low + share * (high - low))
    for delay in (drawn, policy.countdown(times, longest)):
        assert isinstance(delay, int)
        assert 1 <= delay <= max(1, policy.cap)
        assert delay <= longest


@given(times=st.integers(0, 40), longest=longest)
def test_the_jitter_is_full_and_its_ceiling_doubles(times, longest):
    drawn = []
    Reschedule(base=1.5, cap=60.0).countdown(
        times, longest, lambda low, high: drawn.append((low, high)) or high
    )
    assert drawn == [(0.0, min(60.0, longest, 1.5 * 2**times))]


def test_contenders_spread_out():
    """A hundred tasks put off for the third time do not come back together."""
    policy = Reschedule(base=8.0)
    assert len({policy.countdown(2, 1000.0) for _ in range(100)}) > 10


@pytest.mark.parametrize(
    ("countdown", "ends", "expected"),
    [(60, None, 60), (60, 21.2, 22), (60, 0.0, 1), (3, 21.2, 3), (600, 21.8, 23)],
)
def test_nothing_waits_longer_than_a_quarantine(countdown, ends, expected):
    """What is left of it and half a second of jitter, in whole seconds; sooner where it may."""
    assert no_later(countdown, ends, lambda _low, high: high) == expected
