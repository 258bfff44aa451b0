"""
The laws in worlds that Hypothesis makes up, step by step, and shortens when it finds one broken.

Where `Faults` throws dice by the clock, here every step is chosen: who asks, what goes wrong, and
for how long nothing does. What breaks a law comes out as the shortest story that still does.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import wraps

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from celery_redlock.lock.held import HeldLock
from simulation.crew import Crew
from simulation.faults import Chaos
from simulation.guards import switched_off
from simulation.network import Link
from simulation.world import RULES, World

CREW = 3
TTL = RULES.ttl
#: How wrong clocks run [1]; what a lease keeps back allows for so much.
WRONG = 0.024
HOSTS, NODES = st.integers(0, CREW - 1), st.integers(0, 4)
#: Part of a lease for which something lasts [ttl].
LENGTHS = st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.9, 1.0, 1.1, 2.0])
#: And how long nothing happens after each step [ttl]; mostly as long as messages take.
AFTER = st.sampled_from([0.02, 0.02, 0.02, 0.02, 0.0, 0.3, 1.0])


def step(**drawn):
    """Return a rule after which some time passes, and somebody may ask for the lock."""

    def decorate(function):
        @rule(after=AFTER, asks=st.none() | HOSTS, **drawn)
        @wraps(function)
        def do(self, after, asks=None, **chosen):
            self.world.at(self.world.now, lambda: function(self, **chosen))
            self.lapse(after * self.ttl)
            if asks is not None:
                self.ask(asks, 0.0)

        return do

    return decorate


class Clients(RuleBasedStateMachine):
    """
    Clients that take the lock, renew it and give it back, over links that fail.

    Attributes:
        rules_of_all: What they agree on.
        sizes: How many nodes there may be.
    """

    rules_of_all = RULES
    sizes = (3, 1, 5)

    @initialize(size=st.integers(0, 2), seed=st.integers(0, 9), rate=st.sampled_from([0.0, WRONG]))
    def begin(self, size, seed, rate):
        self.late = {}
        self.ttl = self.rules_of_all.ttl
        calm = Chaos(rate=rate, skew=0.1)
        self.world = World(
            seed=seed,
            size=self.sizes[size],
            crew=CREW,
            rules=self.rules_of_all,
            chaos=calm,
            delay=self.delay,
        )
        self.crew = Crew(self.world, until=0.0)
        self.held = [None] * CREW
        self.is_busy = [False] * CREW
        self.meet()

    def meet(self):
        """Have the first client ask for the lock, so that no story begins with nothing."""
        self.ask(0, 0.0)

    def delay(self, link: Link, command):
        """Return how long a message is under way [s]; the next may have been told to be late."""
        late = self.late.get((link.host.number, link.position)) if command else None
        return late.pop() if late else self.world.chance.uniform(0.0002, 0.004)

    # -- clients --------------------------------------------------------------------

    def work(self, number, steps):
        """Have a client do something as soon as time passes, unless it is at something then."""
        self.world.at(self.world.now, self.begin_work, number, steps)

    def begin_work(self, number, steps):
        """Have a client do something, unless it is at something else."""
        if not self.is_busy[number]:
            self.world.hosts[number].run(self.busy(number, steps))

    def busy(self, number, steps):
        """Yield what *steps* do, and note that they are done."""
        self.is_busy[number] = True
        yield from steps
        self.is_busy[number] = False

    def ask(self, number, wait):
        """Let a client take the lock, unless it holds it; a lost one is forgotten."""
        self.work(number, self.take(number, wait))

    def take(self, number, wait):
        held = self.held[number]
        if held is None or held.is_lost:
            lease = yield from self.crew.take(self.world.hosts[number], wait)
            self.held[number] = lease and HeldLock(lease)

    @step(number=HOSTS, wait=LENGTHS)
    def wait(self, number, wait):
        self.ask(number, wait * self.ttl)

    @step(number=HOSTS)
    def renew(self, number):
        self.work(number, self.extend(number))

    def extend(self, number):
        held = self.held[number]
        if held is not None and not held.is_lost:
            yield from self.crew.renew(self.world.hosts[number], held)

    @step(number=HOSTS)
    def release(self, number):
        """Let a client give back what it holds, or held once."""
        self.work(number, self.give_back(number))

    def give_back(self, number):
        held, self.held[number] = self.held[number], None
        if held is not None:
            self.crew.end(held.lease)
            yield self.crew.release(self.world.hosts[number], held.lease)

    @step(number=HOSTS, length=LENGTHS)
    def stop(self, number, length):
        self.world.stop(self.world.hosts[number], length * self.ttl)

    # -- the network ------------------------------------------------------------------

    def link(self, number, position):
        links = self.world.hosts[number].links
        return links[position % len(links)]

    @step(number=HOSTS, positions=st.sets(NODES, min_size=1), length=LENGTHS)
    def cut(self, number, positions, length):
        """Keep a client and some nodes from hearing each other."""
        until = self.world.now + length * self.ttl
        for link in (self.link(number, position) for position in positions):
            link.up_cut_until = link.down_cut_until = until

    @step(number=HOSTS, position=NODES, length=LENGTHS)
    def deaf(self, number, position, length):
        """Keep a client from hearing a node."""
        self.link(number, position).down_cut_until = self.world.now + length * self.ttl

    @step(number=HOSTS, position=NODES, length=LENGTHS)
    def slow(self, number, position, length):
        """Have a client's next message to a node take long."""
        link = self.link(number, position)
        self.late.setdefault((number, link.position), []).append(length * self.ttl)

    @step(number=HOSTS, position=NODES)
    def reset(self, number, position):
        self.link(number, position).reset()

    # -- time -----------------------------------------------------------------------

    def lapse(self, seconds):
        until = self.world.now + seconds
        self.world.at(until, lambda: None)
        self.world.run(until)

    @invariant()
    def laws_hold(self):
        assert self.world.overlaps() == []
        assert self.world.disorder() == []


class Losses(Clients):
    """As `Clients`, while nodes forget what they knew, stand still, and clients die."""

    def node(self, position):
        return self.world.nodes[position % len(self.world.nodes)]

    @step(position=NODES, away=LENGTHS)
    def crash(self, position, away):
        self.world.crash(self.node(position), away * self.ttl)

    @step(position=NODES, away=LENGTHS, later=LENGTHS)
    def revive(self, position, away, later):
        """Have a node save its data now, and come back with them after it has died."""
        node = self.node(position)
        self.world.at(self.world.now + later * self.ttl, self.world.crash, node, away * self.ttl,
                      dict(node.store))  # fmt: skip

    @step(position=NODES)
    def flush(self, position):
        self.node(position).flush()

    @step(position=NODES, length=LENGTHS)
    def freeze(self, position, length):
        self.world.freeze(self.node(position), length * self.ttl)

    @step(position=NODES, is_full=st.booleans())
    def fill(self, position, is_full):
        """Have a node take no writes, or take them again."""
        self.node(position).is_full = is_full

    @step(number=HOSTS)
    def die(self, number):
        """Have a client die, and another process take its place."""
        self.world.kill(self.world.hosts[number])
        self.world.hosts[number].begin()
        self.held[number] = None
        self.is_busy[number] = False


class Steps(Clients):
    """
    As `Clients`, while the clock of one node at a time is set wrong and right again.

    The laws assume what PROTOCOL 3.5 does: that who asks a node has heard of its clock, so that it
    can see the jump. So nobody dies here, all have taken the lock once before anything goes wrong,
    and clocks are set by far more than they drift.
    """

    rules_of_all = replace(RULES, ttl=3.0, max_ttl=3.0)
    sizes = (1, 3, 1)

    def meet(self):
        """Let every client take the lock once, and so hear of every node's clock."""
        self.set_again = 0.0
        for number in range(CREW):
            self.ask(number, 0.0)
            self.lapse(0.02 * self.ttl)
            self.work(number, self.give_back(number))
        self.ask(0, self.ttl)
        self.lapse(0.1 * self.ttl)

    @step(position=NODES, by=st.sampled_from([2.0, 1.0, -1.0, -2.0]))
    def set_clock(self, position, by):
        """Set a clock, and right again when the first step has no effects any more."""
        rest = self.rules_of_all.quarantine + 2 * self.ttl
        if self.world.now >= self.set_again:
            clock = self.world.clocks[position % len(self.world.clocks)]
            clock.step(by * self.ttl)
            self.world.at(self.world.now + rest, clock.step, -by * self.ttl)
            self.set_again = self.world.now + 2 * rest


# -- what is tried --------------------------------------------------------------------------------

STORIES = int(os.environ.get("REDLOCK_SIM_STORIES", "60"))
#: How many are tried at most until a law must have been broken.
SEARCH = 2000
#: Without these guards a law is broken in a story of some of these worlds.
FOUND = {"owner-release": Clients, "restart-guard": Losses, "clock-jump": Steps}


def tell(machine, stories, length, **how):
    """Try so many stories of at most so many steps; raise what the shortest that fails does."""
    limits = settings(max_examples=stories, stateful_step_count=length, database=None, **how)
    run_state_machine_as_test(machine, settings=limits)


def test_a_node_whose_answers_were_always_late_is_seen_to_jump():
    """Found at random: of two that grant one had set its clock, and what it was nobody knew."""
    state = Steps()
    state.begin(size=1, seed=8, rate=0.0)
    state.deaf(after=0.02, asks=1, length=0.01, number=0, position=0)
    state.set_clock(after=0.02, asks=None, by=2.0, position=1)
    state.laws_hold()
    state.teardown()


@pytest.mark.parametrize("machine", [Clients, Losses, Steps])
def test_no_story_breaks_a_law(machine):
    """Whatever is done in whichever order, nobody holds while another does."""
    tell(machine, STORIES, 30)


@pytest.mark.long
@pytest.mark.parametrize("guard", FOUND)
def test_a_story_is_found_without_a_guard(guard):
    """Without the guard some story breaks a law; to shorten it takes longer than to find it."""
    with switched_off([guard]), pytest.raises(AssertionError):
        tell(FOUND[guard], SEARCH, 20, phases=[Phase.generate])
