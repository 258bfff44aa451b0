"""Whose clock has stepped is told by the clocks of all nodes; in doubt nobody is blamed."""

from __future__ import annotations

import pytest

from celery_redlock.lock.clock import ClockReading
from celery_redlock.lock.nodes.steps import Finding, NodeClock, whose

DRIFT = 0.05
NOBODY = Finding(None, ())


class Clocks:
    def __init__(self, nodes):
        self.now = 100.0
        self.ahead = [1000.0 + node for node in range(nodes)]
        self.clocks = [NodeClock(DRIFT) for _ in range(nodes)]
        self.read()

    def read(self, *positions, after=0.01):
        sent = self.now + after
        self.now = sent + 0.001
        for position in positions or range(len(self.clocks)):
            node_now = sent + 0.0005 + self.ahead[position]
            self.clocks[position].take(ClockReading.of(sent, self.now, node_now))

    def step(self, seconds, *positions):
        """Set these nodes' clocks forward; all of them if it is ours that loses time."""
        for position in positions or range(len(self.clocks)):
            self.ahead[position] += seconds

    @property
    def found(self):
        return whose(self.clocks)


@pytest.mark.parametrize("nodes", [3, 5, 7])
@pytest.mark.parametrize("lost", [0.2, 0.5, 30.0, -0.5])
def test_most_nodes_that_move_alike_tell_of_our_clock(nodes, lost):
    clocks = Clocks(nodes)
    clocks.step(lost)
    most = range(nodes // 2 + 1)
    clocks.read(*most)
    assert clocks.found.ours == pytest.approx(lost, abs=0.01)
    assert clocks.found.positions == tuple(most)


def test_a_client_that_is_slewed_blames_nobody():
    """At chrony's 8 % it falls behind by more than drift allows between two looks at the nodes."""
    clocks = Clocks(3)
    for _ in range(5):
        clocks.read(after=10.0)
        assert clocks.found == NOBODY
        clocks.step(0.8)
        clocks.read(after=10.0)
        assert clocks.found.ours == pytest.approx(0.8, abs=0.01)
        for clock in clocks.clocks:
            clock.forget()
        clocks.read()


def test_our_leases_end_sooner_by_no_less_than_what_was_lost():
    """The largest loss that the readings allow for is what is made up for."""
    clocks = Clocks(3)
    clocks.step(0.5)
    clocks.read()
    assert 0.5 <= clocks.found.ours < 0.51


def test_a_node_is_blamed_by_fresh_readings_of_others_alone():
    """What was asked of others before the step was seen proves nothing."""
    clocks = Clocks(3)
    clocks.step(0.5, 0)
    clocks.read()
    assert clocks.found == NOBODY
    clocks.read(1)
    assert clocks.found == Finding(None, (0,))


def test_a_slow_node_is_blamed_though_the_others_are_read_all_the_time():
    """They are compared with what they showed when the slow one was read last."""
    clocks = Clocks(5)
    for _ in range(1000):
        clocks.read(0, 1, 2)
    clocks.step(3.0, 4)
    clocks.read()
    clocks.read()
    assert clocks.found == Finding(None, (4,))


def test_a_node_not_heard_of_for_long_does_not_clear_our_clock():
    """What it may have drifted meanwhile is more than our clock has lost."""
    clocks = Clocks(3)
    for _ in range(100):
        clocks.read(0, after=0.5)
    clocks.step(0.5)
    for _ in range(3):
        clocks.read(0, 2)
        assert clocks.found == NOBODY


def test_a_node_that_is_new_does_not_clear_our_clock():
    """It was not there when ours lost time."""
    clocks = Clocks(3)
    clocks.step(0.5)
    clocks.clocks[2].forget()
    for _ in range(3):
        clocks.read(0, 2)
        assert clocks.found == NOBODY
    clocks.read()
    assert clocks.found.positions == (0, 1)


def test_two_of_three_that_step_together_are_doubted_and_not_blamed():
    """Most say that it was our clock, and one that it was not: then nothing is written."""
    clocks = Clocks(3)
    clocks.step(30.0, 0, 1)
    clocks.read()
    clocks.read()
    assert clocks.found == NOBODY
    assert [clock.doubt is not None for clock in clocks.clocks] == [True, True, False]


def test_two_of_five_that_step_are_blamed_each():
    clocks = Clocks(5)
    clocks.step(30.0, 0, 1)
    clocks.step(7.0, 1)
    clocks.read()
    clocks.read()
    assert clocks.found == Finding(None, (0, 1))


def test_one_node_alone_tells_nothing():
    """It is its word against ours."""
    clocks = Clocks(1)
    clocks.step(0.5)
    clocks.read()
    clocks.read()
    assert clocks.found == NOBODY


def test_a_clock_in_doubt_is_not_believed_until_that_is_settled():
    """However often it is read; then what it shows is taken as it is."""
    clocks = Clocks(3)
    clocks.step(0.5, 0)
    clock = clocks.clocks[0]
    for _ in range(5):
        clocks.read(0)
        assert clock.doubt is not None
    clock.forget()
    clocks.read(0)
    assert clock.doubt is None
