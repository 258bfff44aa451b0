"""
The laws in worlds that misbehave: exclusion, fences in order, progress, nothing left behind.

A share of what ``make proof`` does for hours. With all guards on the laws hold; that they would
not without is shown here by chance, for the guards whose lack chance finds, and in
`test_schedules` one by one.

``REDLOCK_SIM_SEEDS`` sets how many seeds each profile is run with.
"""

from __future__ import annotations

import os

import pytest

from celery_redlock.lock import clock
from simulation import laws
from simulation.crew import Crew
from simulation.faults import CALM, Chaos
from simulation.guards import switched_off
from simulation.laws import Hold
from simulation.profiles import PROFILES, Profile, run, violations
from simulation.world import World

pytestmark = pytest.mark.long

SEEDS = int(os.environ.get("REDLOCK_SIM_SEEDS", "8"))
#: For how long things go wrong [s of a world's own time, at pace 1].
LENGTH = 8.0
#: Seeds until which a mutant must have been found.
SEARCH = 200


# -- all guards on ---------------------------------------------------------------------


@pytest.mark.parametrize("name", PROFILES)
def test_the_laws_hold(name):
    """Nobody holds while another does, fences are in order, and all get on when all is well."""
    for seed in range(SEEDS):
        outcome = run(name, seed, LENGTH * PROFILES[name].pace)
        assert outcome.violations == (), f"seed {seed}"


def test_the_world_is_as_bad_as_it_should_be():
    """Every fault happens, and every answer that nodes can give comes up, or nothing was tried."""
    met = {}
    for name in PROFILES:
        met |= run(name, 1, 3 * LENGTH * PROFILES[name].pace).met
    harmless = {"slow", "unheard", "rate", "skew", "per"}
    assert {name for name in vars(Chaos) if not name.startswith("_")} - harmless <= set(met)
    answers = {answer for command, answer in (key for key in met if not isinstance(key, str))}
    assert answers >= {1, 0, 2, -2, "NoScriptError", "OutOfMemoryError"}


def test_a_seed_tells_the_same_story_twice():
    """A seed that shows a fault can be looked at again."""
    first, second = (PROFILES["three nodes"].build(7).live(6.0) for _ in range(2))
    assert first.holds == second.holds
    assert first.now == second.now


def test_a_world_gives_the_clock_back():
    """What is tested after it, on real servers, has a clock that goes."""
    before = clock.now
    World(crew=2).live(0.5)
    assert clock.now is before


@pytest.mark.parametrize("crew", [1, 5, 20])
def test_contenders_get_on(crew):
    """However many want the lock, it changes hands many times a second."""
    world = World(chaos=CALM, crew=crew).live(4.0, hold=0.02)
    assert len(world.holds) > 4 * 10


# -- without a guard ---------------------------------------------------------------------------

#: Guard -> a world in which chance finds that it is off.
FOUND = {
    "configured-quorum": Profile({"size": 3}, {"fence": False}),
    "owner-release": PROFILES["three nodes"],
    "restart-guard": PROFILES["nodes that forget"],
    "write-back": PROFILES["busy, five nodes"],
    "drift": PROFILES["clocks as wrong as they may be"],
    "own-clock": PROFILES["three nodes"],
    "from-the-question": PROFILES["three nodes"],
    "clock-jump": PROFILES["clocks that are set"],
    "expiry": PROFILES["three nodes"],
    "start-stands": PROFILES["starts"],
}


@pytest.mark.parametrize("guard", FOUND)
def test_chance_finds_what_a_guard_prevents(guard):
    """Without the guard, some seed breaks a law that holds with it."""
    profile = FOUND[guard]
    with switched_off([guard]):
        assert any(
            violations(profile.build(seed).live(LENGTH * profile.pace, **profile.crew))
            for seed in range(SEARCH)
        )


def test_too_little_drift_is_found():
    """Clocks that are more wrong than the rules allow for break exclusion."""
    profile = Profile({"chaos": Chaos(rate=0.1)}, pace=3.0)
    assert any(profile.build(seed).live(24.0).overlaps() for seed in range(SEARCH))


# -- the checkers see ---------------------------------------------------------------------


def hold(granted, until, fence=1, asked=None, ended=float("inf")):
    return Hold("t", fence, granted if asked is None else asked, granted, until, ended)


@pytest.mark.parametrize(
    ("holds", "pairs"),
    [
        ([], 0),
        ([hold(0, 1), hold(1, 2)], 0),
        ([hold(0, 1), hold(0.9, 2)], 1),
        ([hold(0, 1, ended=0.5), hold(0.6, 2)], 0),
        ([hold(0, 9), hold(1, 2), hold(3, 4)], 2),
        ([hold(3, 4), hold(0, 9, ended=2.5), hold(1, 2)], 1),
    ],
)
def test_overlaps_are_seen(holds, pairs):
    """Each hold that begins within another's is told, and none that follows it."""
    assert len(laws.overlaps(holds)) == pairs


@pytest.mark.parametrize(
    ("holds", "pairs"),
    [
        ([hold(0, 1, fence=1), hold(2, 3, fence=2)], 0),
        ([hold(0, 1, fence=2), hold(2, 3, fence=1)], 1),
        ([hold(0, 1, fence=2), hold(2, 3, fence=2)], 1),
        ([hold(1, 2, fence=2, asked=0), hold(3, 4, fence=1, asked=0.5)], 1),
        ([hold(1, 2, fence=1, asked=0), hold(3, 4, fence=1, asked=0.5)], 1),
        ([hold(0, 1, fence=5), hold(2, 3, fence=6), hold(4, 5, fence=4)], 1),
    ],
)
def test_disorder_is_seen(holds, pairs):
    """One fence twice is told, and a smaller one that was granted after a larger."""
    assert len(laws.disorder(holds)) == pairs


@pytest.mark.parametrize(
    ("starts", "pairs"),
    [
        ([], []),
        ([0.0, 0.5], []),
        ([0.0, 0.5, 1.0], []),
        ([0.9, 0.0, 0.5], [(0.0, 0.9)]),
        ([0.0, 0.1, 0.2, 0.3], [(0.0, 0.2), (0.1, 0.3)]),
    ],
)
def test_a_rush_is_seen(starts, pairs):
    """Two in a window of a second are none, three are."""
    assert laws.rush(starts, 2, 1.0) == pairs


def test_what_is_left_is_seen():
    """A lock that stays, a key without an end, and a client that waits for ever are told."""
    world = World(crew=2)
    world.nodes[0].store[b"redlock:lock:k"] = (b"somebody's", float("inf"))
    world.progressed.add(0)
    progress, left, endless = violations(world)
    assert "[1] never got the lock" in progress
    assert "somebody's" in left
    assert "redlock:lock:k" in endless


def test_a_lock_that_is_never_given_is_seen():
    """Progress is no empty word: nobody gets past a key that stands on a majority."""
    world = World(crew=1)
    for node in world.nodes[:2]:
        node.store[b"redlock:lock:k"] = (b"set by hand", float("inf"))
    world.hosts[0].run(Crew(world, until=1.0).work(world.hosts[0]))
    world.run()
    assert "never got the lock" in violations(world)[0]
