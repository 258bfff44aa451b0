"""
Those who wait for a lock: nobody waits for one that is free, none starves, and all places are used.

Exclusion, places and fences in such worlds are held by `test_laws`, each guard by `test_schedules`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest

from celery_redlock.lock.algorithm import acquiring
from celery_redlock.task.worker import waiting_room
from simulation import crew, laws
from simulation.faults import CALM
from simulation.laws import Hold, Wait
from simulation.profiles import violations
from simulation.world import RULES, World

pytestmark = pytest.mark.long

#: Leases that last for longer than anybody may find a free lock taken.
LONG = replace(RULES, ttl=10.0, max_ttl=10.0)
#: Of clients whose clocks are right: who came first is told by these.
RIGHT = replace(CALM, rate=0.0, skew=0.0)
#: For how long a lock may be free while somebody waits for it who does not stand still [s]; a round
#: trip and a lost message on the way are in it.
BY_ITSELF = 1.5


def line(seed, *, unheard=0.0, seconds=6.0, clients=5, chaos=CALM, rules=LONG, **does):
    """Return a world in which all is well, but for hints, and in which nobody forgets a lock."""
    chaos = replace(chaos, unheard=max(unheard, chaos.unheard))
    world = World(seed, crew=clients, rules=rules, chaos=chaos, is_woken=True)
    does = {"hold": 0.005, "rest": 0.01, "wait": 100.0, "forgets": 0.0, **does}
    return world.live(seconds, **does)


@pytest.mark.parametrize("queue", [0.0, 0.5, 1.0])
def test_who_waits_is_woken_at_once(queue):
    """The lock is free only for as long as the word of it is under way."""
    world = line(1, queue=queue)
    assert violations(world) == ()
    assert laws.left_idle(world.holds, world.wanted) < 0.05


@pytest.mark.parametrize("queue", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("unheard", [0.3, 1.0])
def test_nobody_waits_for_a_lock_that_is_free(queue, unheard):
    """Whatever hints are lost: those who wait look by themselves."""
    for seed in range(2):
        world = line(seed, unheard=unheard, queue=queue)
        assert violations(world) == ()
        assert laws.left_idle(world.holds, world.wanted) < BY_ITSELF


@pytest.mark.parametrize("queue", [0.0, 0.5, 1.0])
def test_nobody_waits_for_those_who_stand_still(queue):
    """With a hint in hand, or in line; what they have begun to take lapses."""
    for seed in range(3):
        chaos = replace(CALM, stop=0.5, unheard=0.2)
        world = line(seed, rules=RULES, chaos=chaos, queue=queue, seconds=10.0)
        assert violations(world) == ()
        assert laws.left_idle(world.holds, world.wanted) < BY_ITSELF + RULES.ttl


@pytest.mark.parametrize("queue", [0.0, 0.5, 1.0])
def test_nobody_waits_for_a_node_that_is_away(queue):
    """One of three is down for a while, and then in quarantine: it has nobody in line."""
    for seed in range(2):
        world = World(seed, crew=6, rules=LONG, chaos=replace(CALM, unheard=0.2), is_woken=True)
        world.at(2.0, world.crash, world.nodes[seed], 4.0)
        world.live(12.0, hold=0.005, rest=0.01, wait=100.0, forgets=0.0, queue=queue)
        assert violations(world) == ()
        assert laws.left_idle(world.holds, world.wanted) < BY_ITSELF


def test_twin_who_only_listens_waits_for_a_free_lock():
    """Whoever looks by itself as rarely as leases end finds it free, long since."""
    with mock.patch.multiple(acquiring, COMES_EVERY=60.0, SHORTEST_PAUSE=60.0):
        world = line(0, unheard=1.0, seconds=20.0)
    assert laws.left_idle(world.holds, world.wanted) > BY_ITSELF


def waited_longest(*, is_woken):
    """Return for how long one of many waited at most, with so short holds and rests [s]."""
    world = World(2, crew=10, rules=LONG, chaos=RIGHT, is_woken=is_woken)
    world.live(10.0, hold=0.0008, rest=0.0008, wait=100.0, forgets=0.0)
    assert len(world.wanted) > 500
    return max(one.until - one.came for one in world.wanted)


def test_hints_make_nobody_wait_longer():
    """Newcomers pass who is told; but he is among the first to ask, which who only asks is not."""
    assert waited_longest(is_woken=True) < waited_longest(is_woken=False) / 2


@pytest.mark.parametrize("ahead", [2.5, -2.5])
def test_a_clock_that_is_wrong_starves_nobody(ahead):
    """Neither its owner, who would come last for so long, nor all others; as far as nodes allow."""
    assert abs(ahead) < LONG.longest_skew
    world = World(2, crew=5, rules=LONG, chaos=RIGHT, is_woken=True)
    one = world.hosts[0]
    one.wall = replace(one.wall, offset=one.wall.offset + ahead)
    world.live(10.0, hold=0.002, rest=0.002, wait=1000.0, forgets=0.0)
    granted = Counter(hold.token[:2] for hold in world.holds if hold.granted < world.peace)
    assert len(granted) == 5
    assert min(granted.values()) > 20


@pytest.mark.parametrize("limit", [2, 3])
def test_all_places_are_used_and_no_more(limit):
    """So many hold the lock at once, and never one more."""
    world = line(3, limit=limit, clients=2 * limit, queue=0.5)
    assert violations(world) == ()
    assert laws.crowd(world.holds, limit - 1)


def test_names_that_are_taken_together_hold_up_nobody_for_ever():
    """Some want both, some one of them, and all get on."""
    world = line(4, names=("k", "l"), together=0.4)
    assert violations(world) == ()
    assert len(world.holds) > 50


# -- the checkers see ---------------------------------------------------------------------


def hold(granted, until, name="k"):
    return Hold("t", 1, granted, granted, until, name=name)


@pytest.mark.parametrize(
    ("holds", "limit", "found"),
    [
        ([], 1, 0),
        ([hold(0, 2), hold(1, 3, "k#1")], 2, 0),
        ([hold(0, 2), hold(1, 3, "k#1")], 1, 1),
        ([hold(0, 2), hold(2, 3, "k#1")], 1, 0),
        ([hold(0, 2), hold(1, 3, "l")], 1, 0),
        ([hold(0, 9), hold(1, 9, "k#1"), hold(2, 9, "k#2"), hold(3, 9, "k#3")], 3, 1),
    ],
)
def test_one_too_many_is_seen(holds, limit, found):
    """Places of one lock are counted together, whatever they are called."""
    assert len(laws.crowd(holds, limit)) == found


@pytest.mark.parametrize(
    ("holds", "came", "until", "idle"),
    [
        ([hold(0, 2), hold(5, 6)], 1, 5, 3),
        ([hold(0, 2), hold(2, 4), hold(5, 6)], 1, 5, 1),
        ([hold(0, 2), hold(2, 4, "l")], 1, 5, 3),
        ([hold(0, 9)], 1, 5, 0),
        ([], 1, 5, 4),
    ],
)
def test_a_lock_that_is_left_idle_is_seen(holds, came, until, idle):
    """From the end of a hold, or from when one came, to the next grant."""
    assert laws.left_idle(holds, [Wait("k", came, until, is_granted=False)]) == pytest.approx(idle)


def test_who_is_overtaken_is_seen():
    """By those who came later and were granted the same lock before."""
    waits = [(0.0, 5.0), (1.0, 2.0), (1.5, 3.0), (4.0, 6.0)]
    assert laws.overtaken(Wait("k", *times, is_granted=True) for times in waits) == 2
    assert laws.overtaken(Wait("k", *times, is_granted=False) for times in waits) == 0


def test_a_worker_looks_as_often_here_as_in_life():
    """What queues as a message is noted again by its worker."""
    assert crew.LOOK_EVERY == waiting_room.LOOK_EVERY
