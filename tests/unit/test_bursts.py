"""The debounce by what several nodes say: whatever fails, the newest call runs."""

from __future__ import annotations

import random
from collections import deque

import pytest

from celery_redlock.errors import QuorumUnavailable
from celery_redlock.events import LockUnavailable
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.votes import Vote, VoteKind
from celery_redlock.task.messages.envelope import fresh_publish_id
from celery_redlock.unique.burst_scripts import CALL, CLAIM, BurstVote
from celery_redlock.unique.bursts import SPREAD, Bursts, Call
from support.lua import ScriptNode, rewritten

RULES = Rules()
BEGIN = 1.7e9
NAME, EXECUTION = "report:7", "e" * 32
LABELS = ("node-0", "node-1", "node-2")
SILENT = Vote(VoteKind.UNREACHABLE, reason="cut off")
#: The options of the calls, in ticks of the world's clock, of which each is a second.
DEBOUNCE, LONGEST = 3, 12


# -- a ballot --------------------------------------------------------------------------------


class Votes:
    """A driver whose nodes answer as is said here."""

    labels = LABELS

    def __init__(self, *ballot):
        self.ballot, self.told = ballot, []

    def ask(self, step, ends=None):
        self.ends = ends
        return self.ballot

    def tell(self, request):
        self.told.append(request)


def bursts_of(*ballot, chance=0.0, wall=BEGIN):
    events, driver = [], Votes(*ballot)
    participant = Participant(RULES, LABELS, wall=lambda: wall, chance=lambda _low, _high: chance)
    return Bursts(participant, driver, events.append), driver, events


def seen(left=0.0, task=b"", number=0):
    return Vote(VoteKind.GRANTED, number, left, task)


def test_the_burst_is_over_when_the_first_of_a_quorum_says_so():
    looked, _, _ = bursts_of(seen(9.0, b"id-1", 5), seen(7.0, b"id-2", 6), None)
    assert looked.look(NAME)[:2] == (7.0, "id-2")


def test_a_node_that_knows_of_no_burst_does_not_end_it():
    looked, _, _ = bursts_of(seen(9.0, b"id-1", 5), seen(), seen())
    assert looked.look(NAME)[:2] == (9.0, "id-1")


def test_a_number_is_larger_than_all_that_a_quorum_knows():
    ahead = (int(BEGIN * 1000) << 12) + 10**6
    looked, _, _ = bursts_of(seen(number=ahead), seen(number=7), None)
    assert looked.look(NAME).next_number == ahead + 1
    looked, _, _ = bursts_of(seen(number=7), seen(), None)
    assert looked.look(NAME).next_number == int(BEGIN * 1000) << 12


@pytest.mark.parametrize("said", [2**53, 2**53 - 1])
def test_a_number_is_one_that_nodes_can_tell_whatever_one_of_them_has_told(said):
    """A larger one would have their replies taken for malformed, and their connections ended."""
    looked, _, _ = bursts_of(seen(number=said), seen(number=7), None)
    assert looked.look(NAME).next_number == 2**53


def test_calls_of_one_moment_choose_numbers_by_chance():
    """Two that look before either is noted would have one number, and both would run."""
    looked, _, _ = bursts_of(seen(number=7), seen(), None, chance=SPREAD, wall=0.0)
    assert looked.look(NAME).next_number == 8 + SPREAD


@pytest.mark.parametrize("ballot", [(seen(), SILENT, None), (SILENT, SILENT, SILENT)])
def test_without_a_quorum_nobody_knows(ballot):
    looked, _, events = bursts_of(*ballot)
    with pytest.raises(QuorumUnavailable):
        looked.look(NAME)
    assert [type(event) for event in events] == [LockUnavailable]


NEWER = Vote(BurstVote.SUPERSEDED, value=b"id-2")
RUNS = Vote(VoteKind.GRANTED)


@pytest.mark.parametrize(
    ("ballot", "newest"),
    [
        ((NEWER, NEWER, RUNS), "id-2"),
        ((NEWER, NEWER, None), "id-2"),
        ((NEWER, Vote(BurstVote.SUPERSEDED), Vote(BurstVote.SUPERSEDED)), "id-2"),
        ((Vote(BurstVote.SUPERSEDED), Vote(BurstVote.SUPERSEDED), RUNS), ""),
        ((NEWER, RUNS, RUNS), None),
        ((NEWER, RUNS, SILENT), None),
        ((NEWER, SILENT, SILENT), None),
        ((SILENT, SILENT, SILENT), None),
    ],
)
def test_a_majority_supersedes_and_in_doubt_a_call_runs(ballot, newest):
    bursts, _, _ = bursts_of(*ballot)
    assert bursts.superseded_by(NAME, Call("a" * 32, 1), EXECUTION) == newest


@pytest.mark.parametrize("task_id", ["id", "x" * 1_000_000, "\ud800", "é" * 1000])
def test_a_call_is_noted_whatever_its_id(task_id):
    """Its message is published by then: an error would have it published again."""
    bursts, driver, _ = bursts_of()
    bursts.call(NAME, Call("a" * 32, 1), task_id, 60.0, begins=True)
    [request] = driver.told
    assert all(len(word) <= 1000 for word in request.arguments)


# -- a world ---------------------------------------------------------------------------------


class World:
    """
    Publishers with clocks of their own, a worker, and three nodes that are cut off or wiped.

    What is told to a node arrives when chance says so, in order for each publisher. A publish may
    fail, and a publisher die, at any step.

    Attributes:
        published: Numbers of the calls whose messages were published.
        ran: Numbers of those that have run.
    """

    def __init__(self, seed, calls=15, *, is_late=False, fails=0.2):
        self.chance, self.now, self.is_late, self.fails = random.Random(seed), 0, is_late, fails
        self.nodes = [ScriptNode(RULES, lambda: BEGIN + self.now) for _ in LABELS]
        self.cut = set()
        self.publishers = [Publisher(self) for _ in range(4)]
        self.worker = Line(self)
        self.left, self.busy = calls, []
        self.messages, self.published, self.ran = [], set(), set()

    def happen(self):
        deed = self.chance.choice([self.fault, self.tick, *[self.step] * 4, *[self.arrive] * 4])
        deed()

    def fault(self):
        if self.chance.random() < 0.1:
            self.chance.choice(self.nodes).restart()
        self.cut = set(self.chance.sample(range(3), self.chance.choice([0, 0, 1, 1, 2])))

    def tick(self):
        self.now += 1
        due = [message for message in self.messages if message[0] <= self.now]
        for message in self.chance.sample(due, self.chance.randint(0, len(due))):
            self.messages.remove(message)
            self.deliver(message[1])

    def deliver(self, call):
        bursts = Bursts(Participant(RULES, LABELS), self.worker, lambda _event: None)
        if call.number == 0 or bursts.superseded_by(NAME, call, EXECUTION) is None:
            self.ran.add(call.number)

    def step(self):
        if self.left and self.chance.random() < 0.4:
            self.left -= 1
            self.busy.append(self.chance.choice(self.publishers).publish())
        elif self.busy:
            one = self.chance.choice(self.busy)
            if next(one, None) is None:
                self.busy.remove(one)

    def arrive(self):
        line = self.chance.choice([*self.publishers, self.worker])
        line.deliver(self.chance.randrange(3))

    def live(self):
        while self.left or self.busy:
            self.happen()
        self.cut = set()
        for line in [*self.publishers, self.worker]:
            for position in range(3):
                line.deliver(position)
        while self.messages:
            self.tick()
        return max(self.published, default=0) <= max(self.ran, default=0)


class Line:
    """A driver: the connections of one process."""

    labels = LABELS

    def __init__(self, world):
        self.world, self.waiting = world, [deque() for _ in LABELS]

    def deliver(self, position):
        while self.waiting[position] and position not in self.world.cut:
            self.world.nodes[position].vote(self.waiting[position].popleft())

    def ask(self, step, ends=None):
        ballot = [SILENT] * len(LABELS)
        for position in self.world.chance.sample(range(3), 3):
            self.deliver(position)
            if position not in self.world.cut:
                ballot[position] = self.world.nodes[position].vote(step.request)
            elif step.request.script.one_way:
                self.waiting[position].append(step.request)
        return ballot

    def tell(self, request):
        for queue in self.waiting:
            queue.append(request)


class Publisher(Line):
    def __init__(self, world):
        super().__init__(world)
        skew = world.chance.uniform(-5, 5)
        wall = lambda: BEGIN + world.now + skew  # noqa: E731
        participant = Participant(RULES, LABELS, wall=wall, chance=world.chance.uniform)
        self.bursts = Bursts(participant, self, lambda _event: None)

    def publish(self):
        world, call_id = self.world, fresh_publish_id()
        try:
            burst = self.bursts.look(NAME)
        except QuorumUnavailable:
            world.messages.append((world.now + DEBOUNCE, Call(call_id, 0)))
            return
        call = Call(call_id, burst.next_number)
        yield True
        if world.is_late:  # the mutant
            self.note(call, burst)
            yield True
        if world.chance.random() < world.fails:
            return
        countdown = min(DEBOUNCE, burst.left or LONGEST)
        world.messages.append((world.now + countdown, call))
        world.published.add(call.number)
        yield True
        if not world.is_late:
            self.note(call, burst)

    def note(self, call, burst):
        self.bursts.call(NAME, call, call.id, LONGEST, begins=not burst.left)


SEEDS = range(200)


def lost(**how):
    """Yield seeds of worlds whose newest call has not run."""
    return (seed for seed in SEEDS if not World(seed, **how).live())


def test_whatever_fails_the_newest_call_that_was_published_runs():
    assert list(lost()) == []


def test_the_world_is_as_bad_as_it_says():
    worlds = [World(seed) for seed in range(50)]
    for world in worlds:
        world.live()
    assert sum(len(world.ran - {0}) < len(world.published) for world in worlds) > 30
    assert sum(0 in world.ran for world in worlds) > 10


def test_a_call_that_is_noted_before_it_is_published_would_supersede_others_for_nothing():
    """So a publisher asks twice: a call that fails in between would cost those before it."""
    assert next(lost(is_late=True), None) is not None


@pytest.mark.parametrize(
    ("script", "text", "without"),
    [
        (CLAIM, "(tonumber(number) or 0) > tonumber(ARGV[2])", "newest"),
        (CALL, "'number', ARGV[3],", "'number', '9000000000000000',"),
    ],
)
def test_without_numbers_the_newest_is_lost(script, text, without):
    """A node that missed a call would take it for an older one than those that it knows of."""
    with rewritten(script, text, without):
        assert next(lost(), None) is not None
