"""Each story ends well, and not without the guards that it is about."""

from __future__ import annotations

from itertools import combinations

import pytest

from simulation.guards import GUARDS, switched_off
from simulation.schedules import BREAKS, SCHEDULES

#: What no story can show: that the watchdog waits is a matter of threads.
ELSEWHERE = {"unwatch-waits"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_story_ends_well(name):
    """With all guards on no law is broken."""
    assert SCHEDULES[name]() == []


@pytest.mark.parametrize("name", BREAKS)
def test_a_story_goes_wrong_without_its_guards(name):
    """Off together, they let a law be broken."""
    with switched_off(BREAKS[name]):
        assert SCHEDULES[name]()


@pytest.mark.parametrize(
    ("name", "off"),
    [
        (name, off)
        for name, guards in BREAKS.items()
        for count in range(1, len(guards))
        for off in combinations(guards, count)
    ],
)
def test_any_one_of_several_guards_is_enough(name, off):
    """Where several guards see to the same, each of them does so alone."""
    with switched_off(off):
        assert SCHEDULES[name]() == []


def test_every_guard_has_a_story():
    """A guard that no story needs would not be known to do anything."""
    assert {guard for guards in BREAKS.values() for guard in guards} == set(GUARDS) - ELSEWHERE
    assert set(BREAKS) == set(SCHEDULES)


def test_a_guard_that_is_not_there_cannot_be_switched_off():
    """A name that is misspelt would prove anything."""
    with pytest.raises(KeyError, match="drfit"), switched_off(["drfit"]):
        pass


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_that_was_off_is_on_again(guard):
    """What switches a guard off leaves nothing behind."""
    before = [vars(owner)[name] for owner, name, _ in GUARDS[guard].patches]
    scripts = [(script.source, script.sha) for script, _, _ in GUARDS[guard].lua]
    with switched_off([guard]):
        pass
    assert [vars(owner)[name] for owner, name, _ in GUARDS[guard].patches] == before
    assert [(script.source, script.sha) for script, _, _ in GUARDS[guard].lua] == scripts
