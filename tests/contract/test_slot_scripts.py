"""What the slot records do inside a node, rule by rule, on every server there is."""

from __future__ import annotations

from itertools import product

import pytest

from celery_redlock.beat.slot_records import (
    Claim,
    claim_request,
    look_request,
    settle_request,
    slot_key,
    withdraw_request,
)
from celery_redlock.beat.slot_scripts import SlotVote
from celery_redlock.lock.nodes.guard import boot_marker
from celery_redlock.lock.records import Keys
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.scripting import BOOT_RETENTION, NO_VOTE
from celery_redlock.lock.scripts.votes import VoteKind
from support.script_bench import ScriptBench
from support.waiting import eventually

RULES = Rules(ttl=200, max_ttl=300)
ENTRY = "celery beat/report"
LOCK = "report:7"
A, B, C = ("a" * 40, "b" * 40, "c" * 40)
HOLDER = "1" * 40
#: A slot of long ago, and the number of the term in which it was claimed.
DUE, FENCE = 1_700_000_000.0, 7_205_759_403_792_793
DAY = 86_400.0


def claim_of(token=A, fence=FENCE, due=DUE, **more):
    return Claim(ENTRY, due, token, fence, more.pop("keep", DAY), **more)


class Bench(ScriptBench):
    def __init__(self, server, rules=RULES):
        super().__init__(server, rules)

    def claim(self, *arguments, boot=None, rules=None, **more):
        request = claim_request(rules or self.rules, claim_of(*arguments, **more))
        return self.ask(request, boot=boot)

    def settle(self, *arguments, **more):
        return self.ask(settle_request(self.rules, claim_of(*arguments, **more)))

    def withdraw(self, *arguments, **more):
        return self.ask(withdraw_request(self.rules, claim_of(*arguments, **more)))

    def look(self):
        vote = self.ask(look_request(self.rules, ENTRY))
        assert vote.kind is VoteKind.GRANTED
        return vote.fence, vote.value.decode()

    def age(self, seconds=RULES.ttl + 1):
        """Have the record been claimed so much earlier."""
        self.client.hincrby(slot_key(self.rules, ENTRY), "at", -int(seconds * 1000))

    def hold(self, value=HOLDER + '{"pid":7}', seconds=200.0):
        self.client.set(Keys.of(self.rules.prefix, LOCK).lock, value, px=int(seconds * 1000))

    @property
    def record(self):
        found = self.client.hgetall(slot_key(self.rules, ENTRY))
        return tuple(
            found.get(name, b"").decode() for name in (b"slot", b"token", b"fence", b"state")
        )

    def pttl(self, key=None):
        return self.client.pttl(key or slot_key(self.rules, ENTRY))

    def now(self):
        return self.now_ms() / 1000


def stamped(due=DUE):
    return f"{round(due * 1000)}"


# -- claim -----------------------------------------------------------------------------


def test_the_first_claim_is_granted_and_stored(bench):
    vote = bench.claim(keep=3600.0)
    assert (vote.kind, vote.value, vote.ttl) == (VoteKind.GRANTED, b"", 0.0)
    assert bench.is_of_now(vote.node_now)
    assert bench.record == (stamped(), A, str(FENCE), "claimed")
    assert bench.near(bench.pttl(), 3600)


G, R, P, D, U = (
    VoteKind.GRANTED,
    VoteKind.REFUSED,
    SlotVote.PUBLISHED,
    SlotVote.DEPOSED,
    SlotVote.UNCERTAIN,
)
#: What became of the slot that is stored: claimed just now, longer ago than a lease lasts, settled.
STORED = ["fresh", "old", "settled"]
#: Whose claim comes, how its fence and its slot compare to those stored, and the answer to each.
ANSWERS = [
    # a later slot is free, unless a newer leader has been here
    (A, 0, 60, G, G, G), (A, 1, 60, G, G, G), (A, -1, 60, D, D, D),
    (B, 0, 60, G, G, G), (B, 1, 60, G, G, G), (B, -1, 60, D, D, D),
    # the same slot
    (A, 0, 0, G, G, P), (A, 1, 0, G, G, P), (A, -1, 0, D, D, D),
    (B, 0, 0, R, R, P), (B, 1, 0, R, U, P), (B, -1, 0, D, D, D),
    # an earlier slot was published before, or is never to be
    (A, 0, -60, P, P, P), (A, 1, -60, P, P, P), (A, -1, -60, D, D, D),
    (B, 0, -60, P, P, P), (B, 1, -60, P, P, P), (B, -1, -60, D, D, D),
    # a millisecond is a difference
    (B, 0, 0.001, G, G, G), (B, 0, -0.001, P, P, P),
]  # fmt: skip


@pytest.mark.parametrize(("token", "newer", "later", "answers"), [(*a[:3], a[3:]) for a in ANSWERS])
@pytest.mark.parametrize("stored", STORED)
def test_a_claim_on_a_record_has_one_answer(bench, stored, token, newer, later, answers):
    """The table: what is granted is stored for its own time, what is not changes nothing."""
    bench.claim(keep=3600.0)
    if stored == "settled":
        bench.settle(keep=3600.0)
    if stored == "old":
        bench.age()
    before = bench.everything()
    vote = bench.claim(token, FENCE + newer, DUE + later)
    assert vote.kind is answers[STORED.index(stored)]
    if vote.kind in (G, U):
        assert bench.record == (stamped(DUE + later), token, str(FENCE + newer), "claimed")
        assert bench.near(bench.pttl(), DAY)
    else:
        assert bench.everything() == before
        assert bench.near(bench.pttl(), 3600)


def test_a_refusal_tells_who_is_at_it(bench):
    bench.claim(A)
    for newer in (0, 1):
        vote = bench.claim(B, FENCE + newer)
        assert (vote.kind, vote.value) == (VoteKind.REFUSED, A.encode())
        assert bench.near(vote.ttl * 1000, RULES.ttl)
    bench.age(5.0)
    assert bench.near(bench.claim(B, FENCE + 1).ttl * 1000, RULES.ttl - 5)
    bench.age()
    assert bench.claim(B, FENCE).ttl == 0.0


def test_a_claim_that_is_made_again_is_a_fresh_one(bench):
    """Who claims anew may publish for a lease from then on, and is waited for so long."""
    bench.claim(A)
    bench.age()
    bench.claim(A)
    assert bench.claim(B, FENCE + 1).kind is VoteKind.REFUSED
    bench.age()
    assert bench.claim(B, FENCE + 1).kind is SlotVote.UNCERTAIN
    assert bench.claim(C, FENCE + 2).kind is VoteKind.REFUSED


def test_a_claim_is_granted_as_often_as_it_is_made(bench):
    """A publish that failed is tried again under the same claim: no doubt comes up by that."""
    for _ in range(3):
        assert bench.claim().kind is VoteKind.GRANTED
    assert bench.record == (stamped(), A, str(FENCE), "claimed")


def test_a_doubt_stays_until_the_slot_is_settled(bench):
    bench.claim(A, FENCE)
    bench.age()
    assert [bench.claim(B, FENCE + 1).kind for _ in range(3)] == [SlotVote.UNCERTAIN] * 3
    bench.age()
    assert [bench.claim(C, FENCE + 2).kind for _ in range(2)] == [SlotVote.UNCERTAIN] * 2
    assert bench.claim(C, FENCE + 2, DUE + 60).kind is VoteKind.GRANTED
    assert bench.claim(C, FENCE + 2, DUE + 60).kind is VoteKind.GRANTED


def test_a_doubt_is_about_one_slot(bench):
    bench.claim(A, FENCE)
    bench.age()
    bench.claim(B, FENCE + 1)
    bench.settle(B, FENCE + 1)
    assert bench.claim(B, FENCE + 1, DUE + 60).kind is VoteKind.GRANTED
    assert bench.withdraw(B, FENCE + 1, DUE + 60).kind is VoteKind.GRANTED
    assert bench.look() == (int(stamped()), "settled")


def test_a_newer_leader_deposes_for_all_slots(bench):
    bench.claim(B, FENCE + 1)
    for later in (-60, 0, 60):
        assert bench.claim(A, FENCE, DUE + later).kind is SlotVote.DEPOSED
    assert bench.record[1] == B


@pytest.mark.parametrize(
    ("fence", "more"),
    [(7_205_759_403_792_793, 1), (1_000_000_000_000_000, 1), (9_007_199_254_740_991, -1)],
)
def test_a_fence_keeps_all_its_digits(bench, fence, more):
    older, newer = sorted((fence, fence + more))
    bench.claim(A, newer)
    assert bench.record[2] == str(newer)
    assert bench.claim(B, older).kind is SlotVote.DEPOSED
    bench.client.delete(slot_key(RULES, ENTRY))
    bench.claim(A, older)
    bench.age()
    assert bench.claim(B, newer).kind is SlotVote.UNCERTAIN


@pytest.mark.parametrize("due", [0.001, 1.0, 1_700_000_000.001, 1_779_999_999.999])
def test_a_slot_keeps_all_its_digits(bench, due):
    bench.claim(due=due)
    assert bench.look() == (round(due * 1000), "claimed")
    bench.settle(due=due)
    assert bench.look() == (round(due * 1000), "settled")
    assert bench.claim(due=due).kind is SlotVote.PUBLISHED
    assert bench.claim(due=due + 0.001).kind is VoteKind.GRANTED


@pytest.mark.parametrize("token", [A, B])
def test_a_slot_too_far_ahead_is_not_claimed(bench, token):
    bench.claim(A, due=DUE)
    with bench.unchanged():
        vote = bench.claim(token, FENCE + 1, bench.now() + RULES.longest_skew + 600)
        assert (vote.kind, vote.reason) == (VoteKind.UNREACHABLE, NO_VOTE[-5])


def test_a_slot_a_little_ahead_is_claimed(bench):
    assert bench.claim(due=bench.now() + RULES.longest_skew - 2).kind is VoteKind.GRANTED


def test_records_of_entries_are_apart(bench):
    names = ["a", "b", "n" * 300 + "1", "n" * 300 + "2", "\N{SNOWMAN}" * 100]
    for name in names:
        claim = Claim(name, DUE, A, FENCE, DAY)
        assert bench.ask(claim_request(RULES, claim)).kind is VoteKind.GRANTED
        assert len(slot_key(RULES, name)) < 200
    assert len({slot_key(RULES, name) for name in names}) == len(names)


# -- the lock of the task --------------------------------------------------------------


def test_a_claim_tells_who_holds_the_lock(bench):
    bench.hold(seconds=150.0)
    vote = bench.claim(lock=LOCK)
    assert (vote.kind, vote.value) == (VoteKind.GRANTED, f'{HOLDER}{{"pid":7}}'.encode())
    assert bench.near(vote.ttl * 1000, 150)


def test_a_claim_in_doubt_tells_who_holds_the_lock(bench):
    bench.hold()
    bench.claim(A)
    bench.age()
    vote = bench.claim(B, FENCE + 1, lock=LOCK)
    assert (vote.kind, vote.value[:40]) == (SlotVote.UNCERTAIN, HOLDER.encode())


def test_a_claim_that_asks_for_no_lock_is_told_of_none(bench):
    bench.hold()
    vote = bench.claim()
    assert (vote.kind, vote.value, vote.ttl) == (VoteKind.GRANTED, b"", 0.0)


def test_nobody_holds_a_lock_that_is_free(bench):
    assert bench.claim(lock=LOCK)[2:4] == (0.0, b"")
    bench.hold(seconds=0.05)
    key = Keys.of(RULES.prefix, LOCK).lock
    eventually(lambda: not bench.client.exists(key), "expiry")
    assert bench.claim(lock=LOCK)[2:4] == (0.0, b"")


def test_a_lock_is_only_looked_at(bench):
    bench.hold(seconds=100.0)
    key = Keys.of(RULES.prefix, LOCK).lock
    before = bench.client.get(key)
    bench.claim(lock=LOCK)
    bench.settle()
    assert bench.client.get(key) == before
    assert bench.near(bench.pttl(key), 100)


# -- the restart guard -----------------------------------------------------------------


def test_a_node_that_lost_its_memory_does_not_vote(fresh):
    vote = fresh.claim()
    assert vote.kind is VoteKind.QUARANTINED
    assert fresh.near(vote.ttl * 1000, RULES.quarantine)
    assert fresh.record == ("",) * 4
    assert fresh.claim().kind is VoteKind.QUARANTINED
    assert fresh.look() == (0, "")


def test_a_quarantined_node_changes_no_record(bench):
    bench.claim(A)
    bench.client.set(Keys.of(RULES.prefix, "").quarantine, "1", px=100_000)
    for token, newer, later in product((A, B), (-1, 0, 1), (-60, 0, 60)):
        vote = bench.claim(token, FENCE + newer, DUE + later)
        assert vote.kind is VoteKind.QUARANTINED
        assert bench.near(vote.ttl * 1000, 100)
    assert bench.record == (stamped(), A, str(FENCE), "claimed")


def test_another_configuration_has_no_vote(bench):
    vote = bench.claim(boot=boot_marker(bench.run_id, "e" * 16))
    assert (vote.kind, vote.reason) == (VoteKind.UNREACHABLE, NO_VOTE[-6])
    assert bench.record == ("",) * 4


def test_a_node_without_the_guard_votes_at_once(fresh):
    vote = fresh.claim(rules=Rules(ttl=200, max_ttl=300, restart_guard=False))
    assert vote.kind is VoteKind.GRANTED
    assert list(fresh.everything()) == [slot_key(RULES, ENTRY)]


def test_a_claim_keeps_the_node_enrolled(bench):
    boot = Keys.of(RULES.prefix, "").boot
    bench.client.pexpire(boot, 60_000)
    bench.claim()
    assert bench.near(bench.pttl(boot), BOOT_RETENTION / 1000)
    bench.client.pexpire(boot, 60_000)
    bench.claim(B)
    assert bench.near(bench.pttl(boot), 60)


# -- settle ----------------------------------------------------------------------------


@pytest.mark.parametrize(("token", "newer"), [(A, 0), (B, 0), (B, 1), (B, -1)])
def test_a_claimed_slot_is_settled_by_whoever_published_it(bench, token, newer):
    bench.claim(keep=3600.0)
    bench.settle(token, FENCE + newer)
    assert bench.record == (stamped(), A, str(FENCE), "settled")
    assert bench.near(bench.pttl(), DAY)


@pytest.mark.parametrize("is_settled", [False, True])
@pytest.mark.parametrize("newer", [-1, 0, 1])
def test_settling_an_older_slot_changes_nothing(bench, newer, is_settled):
    """What comes late says nothing of the slot that was claimed since."""
    bench.claim(keep=3600.0)
    if is_settled:
        bench.settle(keep=3600.0)
    with bench.unchanged():
        bench.settle(B, FENCE + newer, DUE - 60)
    assert bench.near(bench.pttl(), 3600)


@pytest.mark.parametrize("is_settled", [False, True])
def test_settling_a_later_slot_moves_the_record_forward(bench, is_settled):
    """Where the claim did not arrive, the settlement alone keeps the slot from being published."""
    bench.claim(A, keep=3600.0)
    if is_settled:
        bench.settle(A, keep=3600.0)
    bench.settle(B, FENCE + 1, DUE + 60)
    assert bench.record == (stamped(DUE + 60), B, str(FENCE + 1), "settled")
    assert bench.near(bench.pttl(), DAY)
    assert bench.claim(C, FENCE + 2, DUE + 60).kind is SlotVote.PUBLISHED


def test_settling_never_lowers_a_fence(bench):
    """An old leader that drops a slot does not bring those back that a newer one deposed."""
    bench.claim(B, FENCE + 1)
    bench.settle(A, FENCE, DUE + 60)
    assert bench.look() == (int(stamped(DUE + 60)), "settled")
    assert bench.claim(A, FENCE, DUE + 120).kind is SlotVote.DEPOSED


def test_settling_begins_a_record(bench):
    bench.settle(A, keep=3600.0)
    assert bench.record == (stamped(), A, str(FENCE), "settled")
    assert bench.near(bench.pttl(), 3600)


def test_settling_twice_is_settling_once(bench):
    bench.claim()
    bench.settle()
    with bench.unchanged():
        bench.settle()


# -- withdraw --------------------------------------------------------------------------


def test_the_first_claim_leaves_no_slot_when_it_is_withdrawn(bench):
    """Where no slot was known before, none is again; but an older term has had its time."""
    before = bench.look()
    bench.claim(fence=FENCE + 1)
    assert bench.withdraw().kind is VoteKind.GRANTED
    assert bench.look() == before
    assert bench.claim(fence=FENCE).kind is SlotVote.DEPOSED


def test_a_withdrawn_claim_leaves_the_slot_before_it(bench):
    bench.claim()
    bench.settle()
    bench.claim(due=DUE + 60)
    bench.withdraw(due=DUE + 60)
    assert bench.look() == (int(stamped()), "settled")
    assert bench.claim(B, FENCE + 1).kind is SlotVote.PUBLISHED
    assert bench.claim(B, FENCE + 1, DUE + 60).kind is VoteKind.GRANTED
    assert bench.record == (stamped(DUE + 60), B, str(FENCE + 1), "claimed")


@pytest.mark.parametrize(("token", "later"), [(B, 0), (A, 60), (A, -60), (A, 0.001)])
def test_only_the_own_claim_is_withdrawn(bench, token, later):
    bench.claim()
    with bench.unchanged():
        assert bench.withdraw(token, due=DUE + later).kind is VoteKind.REFUSED


def test_what_is_settled_is_not_withdrawn(bench):
    bench.claim()
    bench.settle()
    with bench.unchanged():
        assert bench.withdraw().kind is VoteKind.REFUSED


def test_what_an_earlier_term_may_have_published_is_not_withdrawn(bench):
    """The doubt is not the withdrawer's own: it stays for whoever comes next."""
    bench.claim(A)
    bench.age()
    bench.claim(B, FENCE + 1)
    assert bench.withdraw(B, FENCE + 1).kind is VoteKind.REFUSED
    bench.age()
    assert bench.claim(C, FENCE + 2).kind is SlotVote.UNCERTAIN


def test_withdrawing_from_an_empty_record_makes_none(bench):
    with bench.unchanged():
        assert bench.withdraw().kind is VoteKind.REFUSED


# -- look ------------------------------------------------------------------------------


def test_an_empty_record_knows_no_slot(bench):
    with bench.unchanged():
        vote = bench.ask(look_request(RULES, ENTRY))
        assert (vote.kind, vote.fence, vote.value) == (VoteKind.GRANTED, 0, b"")
        assert bench.is_of_now(vote.node_now)


def test_a_look_changes_nothing(bench):
    bench.claim(keep=3600.0)
    with bench.unchanged():
        assert bench.look() == (int(stamped()), "claimed")
    assert bench.near(bench.pttl(), 3600)


def test_a_record_that_has_expired_is_none(bench):
    bench.claim(keep=0.05)
    eventually(lambda: bench.look() == (0, ""), "expiry")
    assert bench.claim(B, FENCE - 1).kind is VoteKind.GRANTED
