"""
The algorithm in a world that misbehaves: exclusion, fences in order, progress.

With all guards on the laws hold over many seeds. With a guard switched off the same world
must show a fault, or it would be blind: each mutant below is found by the layer it names.
Random search misses narrow races, and guards cover for one another; those have a schedule
of their own, and are switched off in pairs.

``REDLOCK_SIM_SEEDS`` sets how many seeds each profile is run with.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from celery_redlock.lock import renewal, rounds
from celery_redlock.lock.call import Call
from celery_redlock.lock.lease import Lease, quorum, valid_until
from celery_redlock.lock.rounds import Ask, Pause
from celery_redlock.lock.scripts import ACQUIRE, RELEASE, RENEW, Keys
from celery_redlock.lock.votes import VoteKind, acquire_is_decided, count, judge
from support.simulation import (
    BEGIN,
    CALM,
    HARSH,
    NAME,
    RULES,
    Chaos,
    Crew,
    Hold,
    Host,
    SimulatedNode,
    World,
    disorder,
    overlaps,
)

SEEDS = int(os.environ.get("REDLOCK_SIM_SEEDS", "20"))
#: Seeds until which a mutant must have been found.
SEARCH = 200

LONG = replace(RULES, ttl=1.0, max_ttl=1.0)
#: Short holds by many clients whose wall clocks disagree: fences differ from node to node.
BUSY = {"chaos": Chaos(slow=0.02, cut=0.5, skew=0.15), "crew": 5}

PROFILES = {
    "one node": {"size": 1, "chaos": HARSH},
    "three nodes": {"size": 3, "chaos": HARSH},
    "five nodes": {"size": 5, "chaos": HARSH, "crew": 4},
    "messages overtake": {"size": 3, "chaos": HARSH, "is_fifo": False},
    "busy": {"size": 3, **BUSY},
    "busy, five nodes": {"size": 5, **BUSY},
    "clocks as wrong as they may be": {"rules": LONG, "chaos": Chaos(rate=0.024)},
}


def live(seed, profile, **crew):
    """Return a world of this profile after some seconds of its life."""
    if profile.get("crew") == BUSY["crew"]:
        return World(seed=seed, **profile).live(2.5, hold=0.02, **crew)
    return World(seed=seed, **profile).live(6.0, **crew)


# -- all guards on ---------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_the_laws_hold(profile):
    """Nobody holds while another does, fences are in order, and all get on when all is well."""
    for seed in range(SEEDS):
        world = live(seed, profile)
        assert world.overlaps() == [], f"seed {seed}"
        assert world.disorder() == [], f"seed {seed}"
        assert world.progressed == set(range(world.crew)), f"seed {seed}"
        if world.is_fifo:  # or a release may overtake what it undoes: one vote, for one TTL
            assert world.leftovers() == [], f"seed {seed}"


def test_the_world_is_as_bad_as_it_should_be():
    """Every answer that the scripts can give does come up, or the laws were not tried."""
    met, kinds = set(), VoteKind
    for seed in range(20):
        met |= live(seed, PROFILES["three nodes"]).met
    assert met >= {(ACQUIRE, kinds.GRANTED), (ACQUIRE, kinds.REFUSED), (ACQUIRE, kinds.QUARANTINED)}
    assert met >= {(RENEW, k) for k in (kinds.GRANTED, kinds.REPAIRED, kinds.REFUSED)}
    assert met >= {(RENEW, kinds.QUARANTINED), (RELEASE, kinds.GRANTED), (RELEASE, kinds.REFUSED)}


def test_a_seed_tells_the_same_story_twice():
    """A seed that shows a fault can be looked at again."""
    first, second = (live(7, PROFILES["three nodes"]) for _ in range(2))
    assert first.holds == second.holds
    assert first.now == second.now


@pytest.mark.parametrize("crew", [1, 5, 20])
def test_contenders_get_on(crew):
    """However many want the lock, it changes hands many times a second."""
    world = World(chaos=CALM, crew=crew).live(4.0, hold=0.02)
    assert len(world.holds) > 4 * 10


# -- the checkers see ---------------------------------------------------------------------


def hold(granted, until, fence=1, asked=None, ended=float("inf")):
    """Return a hold of somebody."""
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
    assert len(overlaps(holds)) == pairs


@pytest.mark.parametrize(
    ("holds", "pairs"),
    [
        ([hold(0, 1, fence=1), hold(2, 3, fence=2)], 0),
        ([hold(0, 1, fence=2), hold(2, 3, fence=1)], 1),
        ([hold(0, 1, fence=2), hold(2, 3, fence=2)], 1),
        ([hold(1, 2, fence=2, asked=0), hold(3, 4, fence=1, asked=0.5)], 0),
        ([hold(1, 2, fence=1, asked=0), hold(3, 4, fence=1, asked=0.5)], 1),
    ],
)
def test_disorder_is_seen(holds, pairs):
    """One fence twice is told, and a smaller one if it was asked for after the larger's grant."""
    assert len(disorder(holds)) == pairs


# -- one guard off, found by chance ----------------------------------------------------------


def answered(ballot):
    """Return the votes of nodes that answered."""
    return [v for v in ballot if v is not None and v.kind is not VoteKind.UNREACHABLE]


@pytest.fixture
def count_answered_only(monkeypatch):
    """A quorum of the nodes that answered, whatever is configured."""
    monkeypatch.setattr(rounds, "judge", lambda ballot: judge(answered(ballot)))
    decided = lambda ballot: acquire_is_decided(answered(ballot))  # noqa: E731
    monkeypatch.setattr(rounds, "acquire_is_decided", decided)


@pytest.fixture
def release_anybody(monkeypatch):
    """A release that deletes the key, whoever holds it."""
    monkeypatch.setattr(SimulatedNode, "is_owner", lambda *_: True)


@pytest.fixture
def reuse_token(monkeypatch):
    """One token for all attempts of a client."""
    monkeypatch.setattr(Host, "new_token", lambda host: f"{host.number:040d}")


@pytest.fixture
def write_nothing_back(monkeypatch):
    """A fence that is the largest of the first majority's, and told to nobody."""

    def settle(attempt, ballot):
        return attempt._if_of_use(attempt.lease(rounds._largest_granted(ballot)))
        yield  # a generator like the real one

    monkeypatch.setattr(rounds._Attempt, "settle", settle)


THREE = PROFILES["three nodes"]
MUTANTS = [
    ("count_answered_only", THREE, "overlaps"),
    ("release_anybody", THREE, "overlaps"),
    ("reuse_token", PROFILES["messages overtake"], "overlaps"),
    ("reuse_token", THREE, "overlaps"),  # a connection that breaks lets messages overtake
    ("write_nothing_back", PROFILES["busy, five nodes"], "disorder"),
    # no quarantine
    (None, {"rules": replace(RULES, restart_guard=False), "chaos": Chaos(crash=3.0)}, "overlaps"),
    # no allowance for drift, or one of 1 % for clocks that are 10 % wrong
    (None, {"rules": replace(LONG, drift_factor=0.0), "chaos": Chaos(rate=0.024)}, "overlaps"),
    (None, {"rules": replace(RULES, drift_factor=0.01), "chaos": Chaos(rate=0.1)}, "overlaps"),
]


@pytest.mark.parametrize(
    ("mutation", "profile", "fault"),
    MUTANTS,
    ids=["answered", "release", "reuse, pooled", "reuse, reset", "no write-back", "no quarantine",
         "no drift", "too little drift"],
)  # fmt: skip
def test_chance_finds_what_a_guard_prevents(mutation, profile, fault, request):
    """Without the guard, some seed breaks the law that holds with it."""
    if mutation:
        request.getfixturevalue(mutation)
    crew = {"fence": False} if mutation == "count_answered_only" else {}
    assert any(getattr(live(seed, profile, **crew), fault)() for seed in range(SEARCH))


# -- directed schedules: what chance does not find ------------------------------------------

A, B, C = 0, 1, 2


class Schedule(World):
    """Three nodes, clients x and y, right clocks; each message takes as long as it is told."""

    def __init__(self):
        super().__init__(crew=2, chaos=Chaos(rate=0.0, skew=0.0), delay=self.told_delay)
        self.people = Crew(self, until=0.0)
        self.x, self.y = self.hosts
        self.ways = {}

    def told_delay(self, link, request):
        """Return the next delay of a client's messages to a node; a millisecond is usual."""
        ways = self.ways.get((link.host, link.node.position)) if request else None
        return ways.pop(0) if ways else 0.001

    def take_and_release(self, host, at, length=0.0):
        """Yield what takes the lock at a time, holds it, and gives it back."""
        yield Pause(at)
        lease = yield from self.people.take(host, wait=0.0)
        if lease is not None:
            yield Pause(length)
            self.people.end(lease)
            yield self.people.release(host, lease)

    def take_and_renew(self, host, at):
        """Yield what takes the lock now and renews it at a time."""
        lease = yield from self.people.take(host, wait=0.0)
        yield Pause(at - self.now)
        yield from self.people.renew(host, lease)


def late_confirmation(*, is_cut_off=False):
    """
    Let y ask C and B, sleep past its lease on C, and confirm on A and B.

    While it sleeps x is granted A and C, and is done. Numbers: B gives y 2 and C gives it
    1; A and C give x 2. When y is back, A has counted on to 3 for it, and B stores 2.
    Or, with *is_cut_off*, y's first question never reaches A, where nobody's key is then.
    """
    world, fence = Schedule(), Keys.of("redlock", NAME).fence
    base = int((BEGIN + 100) * 1000) << 12  # above all wall clocks, so that nodes count by one
    for node, stored in zip(world.nodes, (base + 1, base + 1, base), strict=True):
        node.put(fence, b"%d" % stored, b"3600000")
    world.ways = {(world.y, A): [0.309], (world.y, B): [0.045]}
    if is_cut_off:
        world.y.links[A].is_broken = True
        world.at(0.2, world.y.links[A].connect)
    world.y.run(world.take_and_release(world.y, at=0.0))
    world.at(0.0455, world.stop, world.y, 0.264)
    world.x.run(world.take_and_release(world.x, at=0.3015))
    world.run()
    return world, [hold.fence - base for hold in world.holds]


def confirm_any(attempt, ballot):
    """As `settle`, but every node that holds our token confirms, whatever it stores."""
    majority, fence = quorum(len(ballot)), rounds._largest_granted(ballot)
    if rounds._agreeing(ballot, fence) < majority:
        attempt.started = attempt.client.now()
        confirm = rounds.renew_request(attempt.client.rules, attempt.lease(fence), repair=False)
        ballot = yield Ask(confirm, lambda votes: count(votes, VoteKind.GRANTED) >= majority)
        if count(ballot, VoteKind.GRANTED) < majority:
            return None
    return attempt._if_of_use(attempt.lease(fence))


def test_a_confirmation_counts_only_for_the_very_fence(monkeypatch):
    """A node that has counted on makes it the number to agree on; else two have the same."""
    world, fences = late_confirmation()
    assert (fences, world.disorder()) == ([2, 3], [])
    monkeypatch.setattr(rounds._Attempt, "settle", confirm_any)
    world, fences = late_confirmation()
    assert (fences, len(world.disorder())) == ([2, 2], 1)


def test_a_confirmation_sets_no_key_again(monkeypatch):
    """Where our key has lapsed another may have been; a node that set it again must not count."""
    world, fences = late_confirmation(is_cut_off=True)
    assert (fences, world.disorder()) == ([2], [])
    renew, agreeing = rounds.renew_request, rounds._agreeing

    def agreeing_or_repaired(ballot, fence):
        repaired = (v for v in ballot if v is not None and v.kind is VoteKind.REPAIRED)
        return agreeing(ballot, fence) + sum(1 for vote in repaired if vote.fence == fence)

    monkeypatch.setattr(rounds, "renew_request", lambda *args, repair: renew(*args, repair=True))
    monkeypatch.setattr(rounds, "_agreeing", agreeing_or_repaired)
    world, fences = late_confirmation(is_cut_off=True)
    assert (fences, len(world.disorder())) == ([2, 2], 1)


def slow_quorum():
    """Let x stand still while its answers lie there, and y take the lock when x's keys lapse."""
    world = Schedule()
    world.x.run(world.take_and_release(world.x, at=0.0, length=1.0))
    world.at(0.0015, world.stop, world.x, 0.15)
    world.y.run(world.take_and_release(world.y, at=0.305, length=0.01))
    world.run()
    assert len(world.holds) == 2
    return world.overlaps()


@pytest.fixture
def count_from_the_end(monkeypatch):
    """A lease that counts from when the quorum had answered."""

    def lease(attempt, fence):
        rules, ttl = attempt.client.rules, attempt.wanted.ttl
        until = valid_until(attempt.client.now(), ttl, rules.drift_factor)
        return Lease(NAME, attempt.token, fence, ttl, until, 0.0, {})

    monkeypatch.setattr(rounds._Attempt, "lease", lease)


def test_a_lease_counts_from_before_the_question():
    """However late x reads its answers, its lease ends before its keys."""
    assert slow_quorum() == []


def test_a_lease_must_not_count_from_the_answers(count_from_the_end):
    """If it did, x would hold the lock on without a key on any node."""
    assert len(slow_quorum()) == 1


def repair_in_quarantine(*, y_learns):
    """
    Let x hold A and B; y is granted C, which then loses its memory; x renews on A and C.

    B's copy of x's key lapses, y's message arrives there, and y has B and what C said
    before its crash. (PROTOCOL 3.4, option 5)
    """
    world = Schedule()
    world.x.links[C].is_broken = True
    world.x.run(world.take_and_renew(world.x, at=0.279))
    world.ways = {(world.y, B): [0.033]}
    world.y.run(world.take_and_release(world.y, at=0.269, length=0.1))
    world.at(0.272, world.nodes[C].crash)
    world.at(0.273, setattr, world.nodes[C], "is_up", True)
    world.at(0.274, world.x.links[C].connect)
    world.at(0.278, setattr, world.x.links[B], "is_broken", True)
    if y_learns:
        world.at(0.290, world.y.links[C].break_off)
    world.run()
    return world


@pytest.fixture
def quarantined_repairs_count(monkeypatch):
    """A node in quarantine whose renewals count."""
    monkeypatch.setattr(
        SimulatedNode, "renewal_vote", lambda node, kind, code, told, left: [kind, *told]
    )


@pytest.fixture
def dead_connections_count(monkeypatch):
    """A yes that counts although the connection that it came through has died."""
    monkeypatch.setattr(Call, "withdraw", lambda *_: None)


def test_a_node_in_quarantine_counts_for_nobody():
    """Holder x loses the lock, as C cannot know whom it has forgotten; y has it alone."""
    world = repair_in_quarantine(y_learns=False)
    assert [hold.token[:2] for hold in world.holds] == ["00", "01"]
    assert world.overlaps() == []


def test_a_repair_in_quarantine_must_not_count(quarantined_repairs_count):
    """If it did, both would have a majority, one of them through what C has forgotten."""
    assert len(repair_in_quarantine(y_learns=False).overlaps()) == 1


def test_a_yes_from_the_dead_does_not_count(quarantined_repairs_count):
    """Where y learns of the crash in time, that alone prevents the same overlap."""
    assert repair_in_quarantine(y_learns=True).overlaps() == []


def test_a_yes_from_the_dead_must_not_count(quarantined_repairs_count, dead_connections_count):
    """With both guards off there is the overlap again."""
    assert len(repair_in_quarantine(y_learns=True).overlaps()) == 1


def late_renewal():
    """Let x renew in time, while the nodes hear of it after y took the lock and gave it back."""
    world = Schedule()
    world.ways = {(world.x, node): [0.001, 0.042] for node in (A, B, C)}
    world.x.run(world.take_and_renew(world.x, at=0.280))
    world.y.run(world.take_and_release(world.y, at=0.3055, length=0.003))
    world.run()
    assert len(world.holds) == 2
    return world.overlaps()


@pytest.fixture
def late_renewals_are_accepted(monkeypatch):
    """A renewal that counts whenever its answers come."""

    def outcome(self, ballot):
        rules = self.client.rules
        until = valid_until(self.started, self.lease.ttl, rules.drift_factor)
        return replace(self.lease, valid_until=until) if renewal._kept(ballot) > 1 else None

    monkeypatch.setattr(renewal.Renewal, "outcome", outcome)


@pytest.fixture
def holders_ignore_the_clock(monkeypatch):
    """A holder that does not look at the clock itself."""
    monkeypatch.setattr(Crew, "deadline", lambda crew, lease: float("inf"))


@pytest.fixture
def nodes_ignore_fences(monkeypatch):
    """A node that sets a missing key again although another had the lock since."""
    monkeypatch.setattr(SimulatedNode, "heeds_fences", False)


def test_a_lease_that_has_ended_is_not_revived():
    """The nodes would have it so, and y was there in between."""
    assert late_renewal() == []


def test_the_holders_own_clock_is_enough(late_renewals_are_accepted, nodes_ignore_fences):
    """It does not take over a lease that comes after the end of the old one."""
    assert late_renewal() == []


def test_the_deadline_of_a_renewal_is_enough(holders_ignore_the_clock, nodes_ignore_fences):
    """Whoever asks the nodes does not return a lease after the end of the old one."""
    assert late_renewal() == []


def test_a_larger_fence_is_enough(late_renewals_are_accepted, holders_ignore_the_clock):
    """A node that gave a larger number to another since does not set our key again."""
    assert late_renewal() == []


def test_somebody_must_see_that_the_lease_has_ended(
    late_renewals_are_accepted, holders_ignore_the_clock, nodes_ignore_fences
):
    """With all three guards off x holds the lock throughout, and y within."""
    assert len(late_renewal()) == 1
