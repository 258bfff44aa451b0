"""The clients of the models decide as the library does, and what is left out changes nothing."""

from __future__ import annotations

from functools import partial
from itertools import combinations_with_replacement, permutations, product

import pytest

from celery_redlock.lock.algorithm import attempt
from exploration import decisions
from exploration.decisions import (
    CONFIRM_ROUNDS,
    acquired,
    confirmed,
    renewed,
    settled,
    withdrawn,
)
from exploration.nodes import (
    DEAD,
    LOST,
    NOTHING,
    QUARANTINED,
    REFUSED,
    WAITING,
    granted,
    repaired,
)

ANSWERS = [
    *(WAITING, QUARANTINED, DEAD, REFUSED, LOST),
    *(granted(fence) for fence in (1, 2, 3)),
    *(repaired(fence) for fence in (1, 2)),
]
BALLOTS = list(product(ANSWERS, repeat=3))


def decisions_of_all():
    """Return what clients decide: asking, confirming, renewing, in time and late."""
    yield acquired
    yield partial(acquired, timed_out=True)
    for fence, number, timed_out in product((1, 2), (1, CONFIRM_ROUNDS), (False, True)):
        yield partial(confirmed, fence=fence, number=number, timed_out=timed_out)
    for timed_out, elapsed, left in product((False, True), (0, 1), (0, 1)):
        yield partial(renewed, timed_out=timed_out, elapsed=elapsed, left=left, ttl=2)


def may_come_up(decide, answers):
    """Return whether the round is still open before the last of these answers comes."""
    is_open = decide.keywords | {"timed_out": False} if isinstance(decide, partial) else {}
    ask = decide.func if isinstance(decide, partial) else decide
    return all(
        ask((*answers[:at], WAITING, *answers[at + 1 :]), **is_open).kind == "wait"
        for at in range(3)
        if answers[at] not in {WAITING, LOST}
    )


def test_nodes_are_alike():
    """Which node gave which answer does not matter, so states may be told by sorted nodes."""
    for decide, answers in product(decisions_of_all(), combinations_with_replacement(ANSWERS, 3)):
        if may_come_up(decide, answers):
            assert {decide(other) for other in permutations(answers)} == {decide(answers)}


@pytest.mark.parametrize("silence", [REFUSED, QUARANTINED, DEAD])
def test_what_is_no_yes_gets_nobody_a_lock(silence):
    """A no gains no more than silence, so a model may leave it out."""
    for decide, answers in product(decisions_of_all(), BALLOTS):
        if silence in answers and decide(answers).kind == "hold":
            without = tuple(WAITING if answer == silence else answer for answer in answers)
            assert decide(without) == decide(answers)


def test_settling_is_told_again_as_it_is():
    """What a mutant is made from does as the library, so a mutant differs in its guard only."""
    for answers in BALLOTS:
        real = acquired(answers)
        if real.kind in {"hold", "confirm"} and may_come_up(acquired, answers):
            assert settled(answers, None, 0, NOTHING)[:2] == real[:2]
        for fence, number in product((1, 2, 3), range(1, CONFIRM_ROUNDS + 1)):
            decide = partial(confirmed, fence=fence, number=number, timed_out=True)
            if may_come_up(decide, answers):
                assert settled(answers, fence, number, NOTHING)[:2] == decide(answers)[:2]


def test_a_lease_goes_on_by_the_librarys_word():
    """Two that extended it before the end, and nothing after it; a repair gains nothing yet."""
    yes, mended = granted(0), repaired(0)
    assert renewed((yes, yes, WAITING), False, 1, 1, 3) == ("hold", 1, 2)
    assert renewed((yes, mended, WAITING), False, 1, 1, 3).kind == "wait"
    assert renewed((yes, mended, REFUSED), False, 1, 1, 3).kind == "again"
    assert renewed((mended, mended, WAITING), False, 1, 1, 3).kind == "over"
    assert renewed((yes, yes, WAITING), False, 1, 0, 3).kind == "over"
    assert renewed((yes, QUARANTINED, WAITING), True, 1, 1, 3).kind == "again"
    assert [withdrawn(a) for a in (yes, mended, REFUSED, WAITING)] == [DEAD, DEAD, REFUSED, WAITING]


def test_patching_the_library_patches_the_models(monkeypatch):
    """The models ask the real code: without the exact fence, they grant what it would."""
    answers = (granted(1), granted(2), WAITING)
    assert acquired(answers).kind == "confirm"
    monkeypatch.setattr(attempt, "agreeing", lambda ballot, fence: 3)
    decisions.forget()
    try:
        assert acquired(answers).kind == "hold"
    finally:
        monkeypatch.undo()
        decisions.forget()
