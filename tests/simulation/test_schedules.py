"""Each story ends well, and not without the guards that it is about."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from celery_redlock.task.rate import Rate
from simulation.guards import ALL_GUARDS, GUARDS, RATE_GUARDS, WAITING_GUARDS, switched_off
from simulation.line import LINE, LINE_BREAKS
from simulation.rates import RATE_BREAKS, RATES, forgotten
from simulation.schedules import BREAKS, SCHEDULES, Schedule, broken
from simulation.world import RULES

#: What no story can show: that the watchdog waits is a matter of threads.
ELSEWHERE = {"unwatch-waits"}
STORIES, ALL_BREAKS = SCHEDULES | LINE | RATES, BREAKS | LINE_BREAKS | RATE_BREAKS


@pytest.mark.parametrize("name", STORIES)
def test_a_story_ends_well(name):
    """With all guards on no law is broken."""
    assert STORIES[name]() == []


@pytest.mark.parametrize("name", ALL_BREAKS)
def test_a_story_goes_wrong_without_its_guards(name):
    """Off together, they let a law be broken."""
    with switched_off(ALL_BREAKS[name]):
        assert STORIES[name]()


@pytest.mark.parametrize(
    ("name", "off"),
    [
        (name, off)
        for name, guards in ALL_BREAKS.items()
        for count in range(1, len(guards))
        for off in combinations(guards, count)
    ],
)
def test_any_one_of_several_guards_is_enough(name, off):
    """Where several guards see to the same, each of them does so alone."""
    with switched_off(off):
        assert STORIES[name]() == []


@pytest.mark.parametrize("nodes", [1, 3])
def test_fences_of_before_clocks_were_set_back_are_waited_out(nodes):
    """A majority whose clocks are right grants; if all are set back, nobody does for that long."""
    world = Schedule()
    back = 10 * RULES.longest_skew
    world.x.run(world.take_and_release(world.x, at=0.0, length=0.01))

    def set_back():
        for clock in world.clocks[:nodes]:
            clock.step(-back)
        if nodes == len(world.clocks):
            for host in world.hosts:
                host.wall = replace(host.wall, offset=host.wall.offset - back)

    world.at(0.4, set_back)
    for tenth in range(5, 100):
        world.at(tenth / 10, lambda: world.y.run(world.take_and_release(world.y, at=0.0)))
    world.run()
    again = world.holds[1].granted  # whose predecessor's fence is of the time 0.0
    assert broken(world) == []
    assert len(world.holds) > 50
    assert again < 1.0 if nodes == 1 else back - RULES.longest_skew <= again < back


def test_starts_of_a_window_longer_than_a_quarantine_may_be_forgotten():
    """A node votes again before they would have lapsed."""
    assert forgotten(Rate(1, 2 * RULES.quarantine))


def test_every_guard_has_a_story():
    """A guard that no story needs would not be known to do anything."""
    for breaks, stories, guards in (
        (BREAKS, SCHEDULES, set(GUARDS) - ELSEWHERE),
        (LINE_BREAKS, LINE, set(WAITING_GUARDS)),
        (RATE_BREAKS, RATES, {*RATE_GUARDS, "restart-guard"}),
    ):
        assert {guard for off in breaks.values() for guard in off} == guards
        assert set(breaks) == set(stories)


def test_a_guard_that_is_not_there_cannot_be_switched_off():
    """A name that is misspelt would prove anything."""
    with pytest.raises(KeyError, match="drfit"), switched_off(["drfit"]):
        pass


@pytest.mark.parametrize("guard", ALL_GUARDS)
def test_a_guard_that_was_off_is_on_again(guard):
    """What switches a guard off leaves nothing behind."""
    before = [vars(owner)[name] for owner, name, _ in ALL_GUARDS[guard].patches]
    scripts = [(script.source, script.sha) for script, _, _ in ALL_GUARDS[guard].lua]
    with switched_off([guard]):
        pass
    assert [vars(owner)[name] for owner, name, _ in ALL_GUARDS[guard].patches] == before
    assert [(script.source, script.sha) for script, _, _ in ALL_GUARDS[guard].lua] == scripts
