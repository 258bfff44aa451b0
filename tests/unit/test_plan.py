"""The plan for a task that was not granted its lock: every policy in every situation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_redlock import Fail, Queue, Reschedule, Retry, RunUnlocked, Skip
from celery_redlock.task.execution.outcome import Outcome
from celery_redlock.task.execution.plan import SetAside, Situation, plan
from support.options import OPTIONS

ANY = [Skip(), Fail(), Retry(7), Reschedule()]
ON_CONFLICT = [*ANY, Queue(), Queue(max_waiting=3, then="skip")]
ON_UNAVAILABLE = [*ANY, RunUnlocked()]
LATER = (Retry, Reschedule, Queue)


@pytest.mark.parametrize("policy", ON_CONFLICT)
def test_a_conflict_meets_its_policy(policy):
    options = replace(OPTIONS, on_conflict=policy, on_unavailable=RunUnlocked())
    assert plan(options, Situation.TAKEN) == policy


@pytest.mark.parametrize("policy", ON_CONFLICT)
def test_the_last_call_of_a_burst_is_not_skipped_for_a_conflict(policy):
    """The calls before it have ended for it; what is to happen otherwise happens."""
    options = replace(OPTIONS, on_conflict=policy, on_unavailable=policy)
    last = plan(options, Situation.TAKEN, is_last=True)
    assert isinstance(last, SetAside) if policy == Skip() else last == policy
    assert plan(options, Situation.UNAVAILABLE, is_last=True) == policy


@pytest.mark.parametrize("policy", ON_UNAVAILABLE)
def test_no_quorum_meets_its_policy(policy):
    """Likewise, and with merged duplicates too: nobody knows of a run before it."""
    options = replace(OPTIONS, on_unavailable=policy, on_conflict=Queue(), on_duplicate="rerun")
    assert plan(options, Situation.UNAVAILABLE) == policy


@pytest.mark.parametrize("on_duplicate", ["join", "rerun"])
@pytest.mark.parametrize("policy", ON_CONFLICT)
def test_eagerly_what_would_come_later_fails(policy, on_duplicate):
    options = replace(OPTIONS, on_conflict=policy, on_duplicate=on_duplicate)
    expected = Fail() if isinstance(policy, LATER) else policy
    assert plan(options, Situation.TAKEN, is_eager=True) == expected


@pytest.mark.parametrize("policy", ON_CONFLICT)
@pytest.mark.parametrize(
    ("situation", "outcome", "may_fail"),
    [
        (Situation.ELSEWHERE, Outcome.SET_ASIDE, False),
        (Situation.PREVIOUS, Outcome.SET_ASIDE, True),
        (Situation.NEXT, Outcome.REQUEUED, True),
    ],
)
def test_a_task_that_lost_to_itself_is_set_aside(policy, situation, outcome, may_fail):
    planned = plan(replace(OPTIONS, on_conflict=policy, on_unavailable=policy), situation)
    assert isinstance(planned, SetAside)
    assert (planned.outcome, planned.may_fail) == (outcome, may_fail)


@pytest.mark.parametrize("policy", ON_CONFLICT)
@pytest.mark.parametrize("is_eager", [False, True])
def test_who_has_begun_is_not_left_out_for_a_rate(policy, is_eager):
    """What it lost to may be its own start. Eagerly nothing comes later; to fail is no silence."""
    options = replace(OPTIONS, on_conflict=policy)
    over = {"is_eager": is_eager, "situation": Situation.OVER_RATE}
    planned, first = plan(options, has_begun=True, **over), plan(options, **over)
    is_left_out = policy == Skip() and not is_eager
    assert isinstance(planned, SetAside) if is_left_out else planned == first
    assert plan(options, Situation.TAKEN, has_begun=True) == policy


@pytest.mark.parametrize("policy", ON_CONFLICT)
def test_with_merged_duplicates_a_conflict_is_the_run_before(policy):
    """What comes next waits for its end."""
    options = replace(OPTIONS, on_conflict=policy, on_duplicate="rerun")
    assert plan(options, Situation.TAKEN) == plan(options, Situation.NEXT)


@pytest.mark.parametrize(
    ("most", "times", "fails"), [(None, 99, False), (2, 1, False), (2, 2, True)]
)
def test_it_is_rescheduled_as_often_as_it_may_be(most, times, fails):
    policy = Reschedule(max_reschedules=most)
    options = replace(OPTIONS, on_conflict=policy)
    assert plan(options, Situation.TAKEN, reschedules=times) == (Fail() if fails else policy)


@pytest.mark.parametrize(("then", "expected"), [("fail", Fail()), ("skip", Skip())])
def test_a_full_queue_has_a_policy_of_its_own(then, expected):
    full = replace(OPTIONS, on_conflict=Queue(max_waiting=1, then=then))
    assert plan(full, Situation.TAKEN, is_full=True) == expected
    assert plan(OPTIONS, Situation.TAKEN, is_full=True) == OPTIONS.on_conflict


@pytest.mark.parametrize("more", [{}, {"is_eager": True}, {"reschedules": 9}, {"is_full": True}])
@pytest.mark.parametrize(
    "policy", [Skip(), Fail(), Retry(), Reschedule(max_reschedules=3), Queue()]
)
@pytest.mark.parametrize("reruns", [False, True])
def test_over_its_rate_it_is_as_taken(policy, more, reruns):
    word = "rerun" if reruns else "join"
    options = replace(OPTIONS, on_conflict=policy, on_duplicate=word)
    assert plan(options, Situation.OVER_RATE, **more) == plan(options, Situation.TAKEN, **more)


@pytest.mark.parametrize("more", [{}, {"is_eager": True}, {"is_full": True}])
def test_what_was_started_too_often_fails_whatever_the_policies(more):
    """Another start may kill another worker."""
    options = replace(OPTIONS, on_conflict=Queue(), on_unavailable=RunUnlocked())
    for one in (options, replace(options, on_duplicate="rerun")):
        assert plan(one, Situation.TOO_OFTEN, **more) == Fail()
