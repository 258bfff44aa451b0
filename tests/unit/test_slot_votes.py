"""What votes on a slot mean, over all ballots, and a small world of leaders who publish slots."""

from __future__ import annotations

import random
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.beat.slot_records import BATCH, Claim, Slots, slot_key, stamp
from celery_redlock.beat.slot_scripts import CLAIM, SETTLE, WITHDRAW, SlotVote
from celery_redlock.beat.slot_votes import (
    LastSlot,
    SlotState,
    claim_is_decided,
    holder_in,
    last_of,
    lock_is_decided,
    state_of,
)
from celery_redlock.errors import QuorumUnavailable
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.scripting import NO_VOTE
from celery_redlock.lock.scripts.votes import Vote, VoteKind, count
from support.fakes import SILENT, granted, quarantined, refused, token_of, unreachable
from support.lua import ScriptNode, rewritten

#: A ballot as a word, one letter per node.
LETTERS = {
    "G": granted(0),
    "u": Vote(SlotVote.UNCERTAIN),
    "p": Vote(SlotVote.PUBLISHED),
    "d": Vote(SlotVote.DEPOSED),
    "r": refused("y"),
    "A": unreachable(NO_VOTE[-5]),
    "Q": quarantined(),
    "U": unreachable(),
    "-": SILENT,
}


def ballot_of(word):
    return [LETTERS[letter] for letter in word]


def words(nodes):
    """Return all ballots of so many nodes; of five or more, without regard to their order."""
    spell = product if nodes < 5 else combinations_with_replacement
    repeat = {"repeat": nodes} if nodes < 5 else {"r": nodes}
    return ["".join(word) for word in spell(LETTERS, **repeat)]


EVERY = [word for nodes in (1, 3, 5) for word in words(nodes)]
C, U, P, T, D, A = (
    SlotState.CLAIMED,
    SlotState.UNCERTAIN,
    SlotState.PUBLISHED,
    SlotState.TAKEN,
    SlotState.DEPOSED,
    SlotState.AHEAD,
)
OURS = (C, U)

TABLE = [
    # one node
    ("G", C), ("u", U), ("p", P), ("d", D), ("r", T), ("A", A), ("Q", None), ("U", None),
    ("-", None),
    # three: a quorum is two of the three, whoever is up
    ("GGG", C), ("GG-", C), ("GGU", C), ("GGQ", C), ("GGr", C), ("GGA", C), ("G--", None),
    ("GUU", None), ("GQQ", None), ("Gr-", None), ("GrU", None),
    # an earlier claim that may have reached two is a doubt, one that cannot have is none
    ("uuu", U), ("uu-", U), ("uuG", U), ("uGG", C), ("uG-", U), ("uGU", U), ("uGr", U), ("uGQ", U),
    ("u--", None), ("uUU", None),
    ("rrr", T), ("rr-", T), ("rrG", T), ("rru", T), ("r--", None), ("rUU", None),
    ("AA-", A), ("AAA", A), ("AAG", A), ("A--", None), ("AGG", C), ("AG-", None),
    # one node suffices
    ("p--", P), ("pGG", P), ("puu", P), ("prr", P), ("pAA", P), ("d--", D), ("dGG", D), ("dpp", D),
    ("duu", D), ("drr", D),
    ("QQQ", None), ("UUU", None), ("---", None),
    # five
    ("GGG--", C), ("GGGuu", C), ("GGGUU", C), ("GGuuu", U), ("GGu--", U), ("GGu-U", U),
    ("GGGu-", C), ("Guu--", U), ("GGGGu", C), ("GG---", None), ("Gu---", None), ("rrr--", T),
    ("rrrGG", T), ("rrGG-", None), ("AAAGG", A), ("AA---", None), ("GGrr-", None),
]  # fmt: skip


@pytest.mark.parametrize(("word", "state"), TABLE, ids=[word for word, _ in TABLE])
def test_a_ballot_has_one_meaning(word, state):
    assert state_of(ballot_of(word)) is state
    assert state_of(ballot_of(word[::-1])) is state


def test_every_ballot_has_a_meaning():
    for word in EVERY:
        ballot = ballot_of(word)
        assert state_of(ballot) is None or state_of(ballot) in SlotState
        assert claim_is_decided(ballot) in (True, False)
        assert lock_is_decided(ballot) in (True, False)
        assert isinstance(holder_in(ballot), dict)
        assert last_of(ballot) is None or isinstance(last_of(ballot), LastSlot)


@given(word=st.text(st.sampled_from(list(LETTERS)), min_size=5, max_size=5), data=st.data())
def test_the_order_of_the_nodes_does_not_matter(word, data):
    mixed = data.draw(st.permutations(word))
    assert state_of(ballot_of(word)) is state_of(ballot_of(mixed))
    assert claim_is_decided(ballot_of(word)) is claim_is_decided(ballot_of(mixed))


def test_one_node_suffices_to_know_better():
    for word in EVERY:
        state = state_of(ballot_of(word))
        assert (state is D) is ("d" in word)
        assert (state is P) is ("p" in word and "d" not in word)
        if "d" in word or "p" in word:
            assert claim_is_decided(ballot_of(word))


def test_a_claim_takes_a_quorum_of_the_configured_nodes():
    for word in EVERY:
        if state_of(ballot_of(word)) in OURS:
            assert 2 * (word.count("G") + word.count("u")) > len(word)


def test_a_doubt_needs_a_claim_that_may_have_reached_a_majority():
    """Whoever has not told may have it; without a single node that has it there is none."""
    for word in EVERY:
        state, ballot = state_of(ballot_of(word)), ballot_of(word)
        others = len(word) - word.count("G")
        if state is U:
            assert "u" in word
            assert others >= quorum(len(word))
        if state is C and "u" in word:
            assert others < quorum(len(word))
        assert count(ballot, SlotVote.UNCERTAIN) == word.count("u")


def test_taken_and_ahead_mean_that_no_claim_is_possible():
    for word in EVERY:
        state = state_of(ballot_of(word))
        if state is T:
            assert word.count("r") > len(word) - quorum(len(word))
        if state is A:
            assert word.count("A") >= quorum(len(word))


def completions(word):
    fills = product(LETTERS, repeat=word.count("-"))
    for fill in fills:
        letters = iter(fill)
        yield "".join(next(letters) if letter == "-" else letter for letter in word)


@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_what_is_decided_stays_decided(nodes):
    """Answers that come after the decision tell at most of a publish, or of a newer leader."""
    for word in words(nodes):
        if not claim_is_decided(ballot_of(word)):
            continue
        state = state_of(ballot_of(word))
        for full in completions(word):
            assert claim_is_decided(ballot_of(full)) or "u" in full
            more = full.count("d") > word.count("d") or full.count("p") > word.count("p")
            assert state_of(ballot_of(full)) is state or more


def test_a_decision_comes_at_last_or_the_time_is_over():
    for word in EVERY:
        ballot = ballot_of(word)
        if claim_is_decided(ballot):
            assert state_of(ballot) is not None
        if "u" in word and not ("p" in word or "d" in word):
            assert not claim_is_decided(ballot)
    assert claim_is_decided(ballot_of("GG-"))
    assert not claim_is_decided(ballot_of("G--"))


# -- what a real set of nodes can answer -----------------------------------------------

#: What one node may do to two claims of one slot under one fence: who came first is granted, the
#: other is refused; any answer may be lost on its way.
RACES = ["Gr", "rG", "-r", "r-", "G-", "-G", "--"]


@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_two_claims_with_one_fence_are_never_both_granted(nodes):
    """A node keeps one token, so of two claimants at most one has a majority."""
    for race in product(RACES, repeat=nodes):
        states = [state_of(ballot_of([node[i] for node in race])) for i in (0, 1)]
        assert not (states[0] in OURS and states[1] in OURS)


#: What one node answers to a second claim with a larger fence, by whether it stores the first.
STORED, NOT_STORED = ["u", "-", "U"], ["G", "-", "U"]


@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_a_slot_that_may_have_been_published_is_never_free_of_doubt(nodes):
    """If the first claim reached a majority, the second is not simply granted."""
    for stored in range(nodes + 1):
        lists = [STORED] * stored + [NOT_STORED] * (nodes - stored)
        for word in product(*lists):
            state = state_of(ballot_of(word))
            if stored >= quorum(nodes):
                assert state in (U, None)
            elif not set(word) - {"u", "G"}:
                assert state is C


# -- who holds the lock ----------------------------------------------------------------


def held(letter, kind=VoteKind.GRANTED, ttl=5.0):
    value = b"" if letter == "." else token_of(letter).encode() + b'{"pid":7}'
    return Vote(kind, ttl=ttl if value else 0.0, value=value)


LOCKS = {
    "x": held("x"), "X": held("x", SlotVote.UNCERTAIN), "y": held("y"), ".": held("."),
    "r": refused("x"), "U": unreachable(), "-": SILENT,
}  # fmt: skip


def locks_of(word):
    return [LOCKS[letter] for letter in word]


@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_a_holder_is_named_by_half_of_those_that_granted(nodes):
    """Whom fewer name does not hold the lock; what a refusal tells is another thing."""
    for word in product(LOCKS, repeat=nodes):
        found = holder_in(locks_of(word))
        named = {"x": word.count("x") + word.count("X"), "y": word.count("y")}
        told = named["x"] + named["y"] + word.count(".")
        most = [letter for letter, votes in named.items() if votes and 2 * votes >= told]
        assert bool(found) is bool(most)
        if found:
            assert found["token"][0] in most


@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_a_holder_that_is_decided_stays_decided(nodes):
    spell = combinations_with_replacement(LOCKS, nodes)
    for word in spell:
        if not lock_is_decided(locks_of(word)):
            continue
        found = holder_in(locks_of(word))
        for fill in product("xXy.rU", repeat=word.count("-")):
            letters = iter(fill)
            full = [next(letters) if letter == "-" else letter for letter in word]
            assert holder_in(locks_of(full)) == found


@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_a_holder_with_a_majority_is_named_if_all_tell(nodes):
    for word in product("xy.", repeat=nodes):
        most = [letter for letter in "xy" if word.count(letter) >= quorum(nodes)]
        assert [holder_in(locks_of(word)).get("token", "")[:1]] == (most or [""])


def test_a_claim_waits_for_word_of_the_holder():
    assert not claim_is_decided(locks_of("x.-"))
    assert claim_is_decided(locks_of("xx-"))
    assert claim_is_decided(locks_of("..-"))
    assert claim_is_decided(locks_of("x.."))


def test_a_holder_is_told_with_its_longest_lease():
    ballot = [held("x", ttl=2.0), held("x", ttl=4.0), held("y", ttl=9.0)]
    assert holder_in(ballot) == {"pid": 7, "token": token_of("x")[:8], "ttl": 4.0}


@pytest.mark.parametrize("ballot", [[], [SILENT], [unreachable()] * 3, [refused("x")] * 3])
def test_nobody_is_named_by_nobody(ballot):
    assert holder_in(ballot) == {}


# -- the last slot ---------------------------------------------------------------------


def seen(slot, state=b"settled"):
    return Vote(VoteKind.GRANTED, slot, value=state)


LAST = {
    "c": seen(5000, b"claimed"), "s": seen(5000), "C": seen(7000, b"claimed"), "S": seen(7000),
    ".": seen(0, b""), "U": unreachable(), "-": SILENT,
}  # fmt: skip


@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_the_last_slot_is_the_newest_that_any_node_knows(nodes):
    for word in product(LAST, repeat=nodes):
        newest = "CS" if set(word) & set("CS") else "cs"
        expected = None
        if set(word) & set(newest):
            expected = LastSlot(7.0 if newest == "CS" else 5.0, newest[1] in word)
        assert last_of([LAST[letter] for letter in word]) == expected


@given(milliseconds=st.integers(1, 4_102_444_800_000))
def test_a_slot_survives_its_stamp(milliseconds):
    due = milliseconds / 1000.0
    assert stamp(due) == b"%d" % milliseconds
    assert last_of([seen(milliseconds)]).due == due


# -- a small world of leaders ----------------------------------------------------------

#: The clock of the nodes stands so at the beginning, and goes on by a second with each step.
BEGIN = 1_700_000_000.0
ENTRY = "e"
#: A fresh claim of an earlier term is waited for six steps; no quarantine lapses by itself.
RULES = Rules(ttl=6, max_ttl=600)
KEPT = 86_400.0


class SlotNode(ScriptNode):
    def __init__(self, world):
        super().__init__(RULES, lambda: BEGIN + world.now)

    @property
    def is_held_back(self):
        return bool(self.ask(b"EXISTS", self.keys.quarantine))

    def let_vote(self):
        self.ask(b"DEL", self.keys.quarantine)

    def knows(self):
        told = self.ask(b"HMGET", slot_key(RULES, ENTRY), b"slot", b"fence")
        return [int(value or 0) for value in told]


#: What a mutant's script says no more, what it says instead, and the law that falls with it.
MUTANTS = {
    "it says yes and stores nothing": (
        "redis.call('HSET', KEYS[1], 'slot'",
        "local _ = true or redis.call('HSET', KEYS[1], 'slot'",
        "for certain",
    ),
    "it takes every claim for one of the same term": (
        "local ours = r[2] == ARGV[2]", "local ours = true", "for certain",
    ),
    "it goes on to serve an old leader": (
        "if fence < before then return {8, now} end", "", "claimed a slot after",
    ),
}  # fmt: skip


@dataclass
class Leader:
    """
    One term: publishes one slot after the other until it dies, or is told that it is over.

    Attributes:
        world: Where it leads.
        fence: Number of its term.
        sent: The slot that it may have published, whatever came of that.
    """

    world: World
    fence: int
    links: list = field(default_factory=list)
    sent: int = 0
    is_over: bool = False
    is_busy: bool = False

    labels = ("node-0", "node-1", "node-2")

    def __post_init__(self):
        self.token = f"{self.fence:040d}"
        self.links = [deque() for _ in self.labels]
        self.slots = Slots(Participant(RULES, self.labels), self)
        self.steps = self.work()

    # -- as a driver -----------------------------------------------------------------

    def tell(self, request):
        for link in self.links:
            link.append(request)

    def ask(self, step):
        return self.ask_all([step])[0]

    def ask_all(self, steps):
        return [self._ask(step) for step in steps]

    def _ask(self, step):
        ballot = [SILENT] * len(self.links)
        order = self.world.chance.sample(range(len(self.links)), len(self.links))
        for link in self.links:
            link.append(step.request)
        for position in order:
            if step.decided(ballot):
                break
            self.world.happen()
            ballot[position] = self.world.hear(self, position)
        return ballot

    # -- what it does ----------------------------------------------------------------

    def claim_of(self, slot):
        is_sent = self.world.remembers and slot == self.sent
        return Claim(ENTRY, slot / 1000.0, self.token, self.fence, KEPT, is_sent=is_sent)

    def work(self):
        while True:
            try:
                found = self.slots.look([ENTRY]).get(ENTRY)
                break
            except QuorumUnavailable:
                yield
        last = round(found.due * 1000) - (not found.is_settled) if found else 0
        while last < self.world.slots:
            yield
            if (yield from self.publish(last + 1)):
                last += 1

    def publish(self, slot):
        world, claim = self.world, self.claim_of(slot)
        began = world.count()
        try:
            state = self.slots.claim(claim).state
        except QuorumUnavailable:
            return False
        if state in OURS:
            world.claimed(self, began)
        yield
        if state is SlotState.DEPOSED:
            self.is_over = True
            yield
        if state is SlotState.TAKEN:
            return False
        if state is SlotState.PUBLISHED:
            return True
        if not world.is_calm and world.is_lucky(world.losing):  # the lease, before the publish
            self.slots.withdraw(claim)
            self.is_over = True
            yield
        if state is SlotState.UNCERTAIN and world.is_lucky(0.5):
            world.doubted.add(slot)  # the task knows no copies: it is skipped, and that is said
        elif world.is_lucky(world.failing):  # the broker's answer: it may have the message
            self.sent = slot
            if world.is_lucky(0.5):
                world.published.append((slot, self.fence, state))
            yield
            return False
        else:
            world.published.append((slot, self.fence, state))
        yield
        self.slots.settle(claim)
        return True


class World:
    """
    Three nodes, and leaders that come with growing fences, some of them while others still lead.

    Every message to a node arrives when chance says so, in the order in which it was sent, or
    is lost with its connection; so are answers. One node at a time is down. One node loses its
    memory, when what has been claimed so far is known to all, and is held back for a while.

    Attributes:
        slots: How many fall due.
        failing: How often a publish fails, with or without a message in the queue.
        losing: How often a lease ends between claim and publish.
        remembers: Whether a leader knows what it may have published when it tries again.
        published: Slot, fence and state of each message.
        doubted: Slots that were skipped because nobody knew.
        faults: Laws that were broken, in words.
    """

    def __init__(self, seed, *, failing=0.0, losing=0.05, remembers=True):
        self.chance = random.Random(seed)
        self.slots, self.failing, self.losing = 6, failing, losing
        self.remembers = remembers
        self.now = self._count = self.newest = 0
        self.nodes = [SlotNode(self) for _ in range(3)]
        self.leaders, self.published, self.doubted, self.faults = [], [], set(), []
        self.newest_began = {}
        self.restarts, self.is_calm = 1, False

    def count(self):
        self._count += 1
        return self._count

    def is_lucky(self, share):
        return self.chance.random() < share

    def claimed(self, leader, began):
        for fence, when in self.newest_began.items():
            if fence > leader.fence and when < began:
                self.faults.append(f"{leader.fence} claimed a slot after {fence} had")
        self.newest_began.setdefault(leader.fence, self.count())

    def hear(self, leader, position):
        node = self.nodes[position]
        if not node.is_up or self.is_lucky(0.1):
            return unreachable() if self.is_lucky(0.5) else SILENT
        vote = self.deliver(leader.links[position], node)
        return SILENT if self.is_lucky(0.1) else vote

    def deliver(self, link, node, most=99):
        vote = SILENT
        while link and most:
            vote = node.vote(link.popleft())
            most -= 1
        return vote

    def happen(self):
        self.now += 1
        what = self.chance.random() * (0.83 if self.is_calm else 1.0)
        node = self.chance.choice(self.nodes)
        if what < 0.5:
            self.step(self.chance.choice(self.leaders)) if self.leaders else None
        elif what < 0.8 and self.leaders:
            link = self.chance.choice(self.leaders).links[self.nodes.index(node)]
            if node.is_up:
                self.deliver(link, node, most=1)
        elif what < 0.83 and self.leaders:
            self.chance.choice(self.leaders).links[self.nodes.index(node)].clear()
        elif what < 0.87:
            for other in self.nodes:
                other.is_up = True
            node.is_up = self.is_lucky(0.5)
        elif what < 0.89 and len(self.leaders) < 5:
            self.elect()
        elif what < 0.9 and self.leaders and self.is_lucky(0.5):
            self.chance.choice(self.leaders).is_over = True
        elif what > 0.98:
            self.restart(node)

    def restart(self, node):
        if any(leader.is_busy for leader in self.leaders):
            return
        for position, one in enumerate(self.nodes):
            for leader in self.leaders:
                self.deliver(leader.links[position], one)
        others = [other.knows() for other in self.nodes if other is not node]
        is_known = all(
            theirs >= (ours or 1)
            for other in others
            for theirs, ours in zip(other, node.knows(), strict=True)
        )
        if node.is_held_back:
            node.let_vote()
        elif self.restarts and is_known:
            self.restarts -= 1
            node.restart()

    def elect(self):
        self.newest += 1
        self.leaders.append(Leader(self, self.newest))
        return self.leaders[-1]

    def step(self, leader):
        if leader.is_over or leader.is_busy:
            return
        leader.is_busy = True
        try:
            next(leader.steps)
        except StopIteration:
            leader.is_over = True
        finally:
            leader.is_busy = False

    def live(self, length=300):
        """Let all go wrong for a while, then be well; the last leader ends the work."""
        for _ in range(length):
            self.happen()
        last = self.elect()
        for leader in self.leaders[:-1]:
            leader.is_over = True
        self.is_calm = True
        for node in self.nodes:
            node.is_up = True
            node.let_vote()
        for _ in range(100 * self.slots):
            self.now += 1
            self.step(last)
        return self.judge(is_done=last.is_over)

    def judge(self, *, is_done):
        if not is_done:
            self.faults.append("the last leader hangs")
        for slot in range(1, self.slots + 1):
            terms = {(fence, state) for number, fence, state in self.published if number == slot}
            sure = sorted(fence for fence, state in terms if state is SlotState.CLAIMED)
            if len(sure) > 1:
                self.faults.append(f"slot {slot} was published for certain by {sure}")
            if not terms and slot not in self.doubted:
                self.faults.append(f"slot {slot} was skipped silently")
        return self


SEEDS = range(250)


def faults(seeds=SEEDS, **how):
    found = {seed: World(seed, **how).live().faults for seed in seeds}
    return {seed: faults for seed, faults in found.items() if faults}


@pytest.mark.long
def test_no_slot_is_published_twice_nor_skipped_silently():
    """Unless the outcome was a doubt, a slot is published in one term, whatever goes wrong."""
    assert faults() == {}


@pytest.mark.long
def test_a_failed_publish_may_be_tried_again():
    """A broker that took the message and did not say so makes a doubt for the next term."""
    assert faults(failing=0.3) == {}


def test_the_world_is_as_bad_as_it_says():
    """Doubts, rivals and repeated publishes do come up in it."""
    worlds = [World(seed, failing=0.2).live() for seed in range(100)]
    assert sum(len(world.leaders) > 2 for world in worlds) > 50
    assert sum(bool(world.doubted) for world in worlds) > 5
    assert sum(world.restarts == 0 for world in worlds) > 20
    states = [state for world in worlds for _, _, state in world.published]
    assert states.count(SlotState.UNCERTAIN) > 10
    assert states.count(SlotState.CLAIMED) > 400


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_its_part_the_law_falls(mutant):
    """Record, token and fence are each needed: without one of them the same worlds break a law."""
    text, without, law = MUTANTS[mutant]
    with rewritten(CLAIM, text, without):
        found = faults(seeds=range(100))
    assert any(law in fault for faults in found.values() for fault in faults)


@pytest.mark.long
def test_a_publish_that_is_forgotten_breaks_the_law():
    """A leader that takes back what it may have published leaves the next one without a doubt."""
    found = faults(failing=0.3, remembers=False)
    assert any("for certain" in fault for faults in found.values() for fault in faults)


# -- the driver ------------------------------------------------------------------------


class Recorder:
    labels = ("node-0", "node-1", "node-2")

    def __init__(self, word="GGG"):
        self.ballot = ballot_of(word)
        self.asked, self.told, self.rounds = [], [], 0

    def ask(self, step):
        return self.ask_all([step])[0]

    def ask_all(self, steps):
        self.rounds += 1
        self.asked += steps
        return [self.ballot for _ in steps]

    def tell(self, request):
        self.told.append(request)


CLAIMED = Claim(ENTRY, 1.7e9, "a" * 40, 7, 60.0)


def slots_of(driver):
    return Slots(Participant(RULES, driver.labels), driver)


@pytest.mark.parametrize("entries", [0, 1, BATCH, BATCH + 1, 3 * BATCH])
def test_many_records_are_looked_at_in_few_rounds(entries):
    driver = Recorder()
    assert slots_of(driver).look([f"e{i}" for i in range(entries)]) == {}
    assert driver.rounds == -(-entries // BATCH)
    assert len({step.request.keys for step in driver.asked}) == entries
    assert not any(step.decided(driver.ballot) for step in driver.asked)


@pytest.mark.parametrize("word", ["G--", "GUU", "---", "GQ-"])
def test_a_minority_cannot_tell_the_last_slot(word):
    driver = Recorder(word)
    with pytest.raises(QuorumUnavailable):
        slots_of(driver).look([ENTRY])


@pytest.mark.parametrize(("word", "state"), [(w, s) for w, s in TABLE if len(w) == 3])
def test_a_claim_ends_as_its_ballot_says(word, state):
    driver = Recorder(word)
    slots = slots_of(driver)
    if state is None:
        with pytest.raises(QuorumUnavailable) as undecided:
            slots.claim(CLAIMED)
        assert set(undecided.value.votes) == set(driver.labels)
    else:
        assert slots.claim(CLAIMED).state is state


def test_quarantines_tell_when_to_claim_again():
    driver = Recorder("GQQ")
    with pytest.raises(QuorumUnavailable) as undecided:
        slots_of(driver).claim(CLAIMED)
    assert undecided.value.retry_after == 5.0


def test_settling_tells_all_nodes_and_waits_for_none():
    driver = Recorder()
    slots_of(driver).settle(CLAIMED)
    (request,) = driver.told
    assert (request.script, request.arguments[0]) == (SETTLE, b"1700000000000")
    assert driver.asked == []


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("word", ["G--", "GU-", "rr-", "d--", "p--", "AA-"])
def test_a_claim_that_fails_is_taken_back(word, is_sent):
    """So that the next leader need not doubt it, unless its slot may have been published before."""
    driver = Recorder(word)
    with suppress(QuorumUnavailable):
        slots_of(driver).claim(replace(CLAIMED, is_sent=is_sent))
    assert [request.script for request in driver.told] == ([] if is_sent else [WITHDRAW])


@pytest.mark.parametrize("word", ["GGG", "GG-", "uu-", "uuu"])
def test_a_claim_that_is_ours_stays(word):
    driver = Recorder(word)
    slots_of(driver).claim(CLAIMED)
    assert driver.told == []
