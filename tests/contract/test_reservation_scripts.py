"""What the queued markers do inside a node, rule by rule, on every server there is."""

from __future__ import annotations

import json
import random

import pytest

from celery_redlock.lock.nodes.guard import boot_marker
from celery_redlock.lock.records import Keys, marker_key
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.scripting import BOOT_RETENTION, NO_VOTE
from celery_redlock.lock.scripts.votes import VoteKind
from celery_redlock.unique.requests import (
    AS_IT_IS,
    OVER,
    RETENTION,
    Start,
    Trigger,
    end_request,
    reservation_keys,
    reserve_request,
    start_request,
)
from celery_redlock.unique.scripts import ReservationVote
from support.script_bench import ScriptBench
from support.waiting import eventually

RULES = Rules(ttl=200, max_ttl=300)
NAME = "report:7"
A, B, C, D = ("a" * 40, "b" * 40, "c" * 40, "d" * 40)
LOCK, OTHER_LOCK = "1" * 40, "2" * 40
WEEK = RETENTION * 1000
#: What can become of a marker.
WORDS = [OVER, "idle", "unstarted", "wait", "hand", "window", "ran"]


def args_of(token):
    return b'[["%b"],{}]' % token[:1].encode()


class Bench(ScriptBench):
    def __init__(self, server, rules=RULES):
        super().__init__(server, rules)

    def reserve(self, token=A, arguments=None, *, version=1, name=NAME, ask=(), **trigger):
        """Ask for the marker; *arguments* as of a trigger that is merged, None for one's own."""
        arguments = args_of(token) if arguments is None else arguments
        life = trigger.pop("life", 200.0)
        known = {"window": life, "arguments": arguments, **trigger}
        wanted = Trigger(name, life, {"task_id": f"id-{token[0]}"}, **known)
        return self.ask(reserve_request(self.rules, wanted, token, version), **dict(ask))

    def alone(self, token=A, **how):
        return self.reserve(token, b"", **how)

    def start(self, token=A, alone=0.0, *, lock=LOCK, execution="first", life=200.0, name=NAME):
        info = {"task_id": f"id-{token[0]}", "again": True}
        begun = Start(info, lock, execution, alone, life)
        return self.ask(start_request(self.rules, name, token, begun))

    def end(self, token=A, how=OVER, life=0.0, *, name=NAME):
        return self.ask(end_request(self.rules, name, token, how, life))

    def hold(self, lock=LOCK, seconds=200.0):
        key = Keys.of(self.rules.prefix, NAME).lock
        self.client.set(key, f'{lock}{{"pid":7}}', px=int(seconds * 1000))

    def unhold(self):
        self.client.delete(Keys.of(self.rules.prefix, NAME).lock)

    def run(self, token=A, alone=0.0, **publish):
        assert self.reserve(token, **publish).kind is VoteKind.GRANTED
        self.hold()
        assert self.start(token, alone).kind is VoteKind.GRANTED

    @property
    def queued(self):
        """The marker of who is queued or runs, by field; empty if there is none."""
        return self._fields(0)

    @property
    def next(self):
        return self._fields(1)

    def _fields(self, which):
        found = self.client.hgetall(reservation_keys(self.rules, NAME)[which])
        return {name.decode(): value for name, value in found.items()}

    def pttl(self, which=0):
        """Return how long a marker is kept yet [ms]; 1 for the next one."""
        return self.client.pttl(reservation_keys(self.rules, NAME)[which])

    def left(self, which=0):
        """Return how long a marker stands by itself yet [ms]."""
        return int(self._fields(which)["until"]) - self.now_ms()

    def age(self, seconds=201.0, which=0):
        """Have a marker been made so much earlier: by default its whole life."""
        key = reservation_keys(self.rules, NAME)[which]
        for name in ("until", "window"):
            self.client.hincrby(key, name, -int(seconds * 1000))
        self.client.pexpire(key, self.client.pttl(key) - int(seconds * 1000))


# -- reserve: granted or refused -------------------------------------------------------


def test_a_free_marker_is_granted_and_stored_with_what_its_owner_tells(bench):
    vote = bench.reserve(A)
    assert (vote.kind, vote.fence, vote.value, vote.ttl) == (VoteKind.GRANTED, 0, b"", 0.0)
    assert bench.is_of_now(vote.node_now)
    stored = bench.queued
    assert stored["token"] == A.encode()
    assert json.loads(stored["info"]) == {"task_id": "id-a"}
    assert stored["started"] == b""
    assert stored["until"] == stored["window"]
    assert set(stored) == {"token", "info", "until", "window", "started"}
    assert bench.near(bench.left(), 200)
    assert bench.near(bench.pttl(), 200)
    assert bench.next == {}


@pytest.mark.parametrize(("life", "window"), [(50.0, 600.0), (600.0, 50.0)])
def test_a_life_and_a_window_are_two_things(bench, life, window):
    bench.reserve(A, life=life, window=window)
    assert bench.near(bench.left(), life)
    assert bench.near(bench.pttl(), life)
    assert bench.near(int(bench.queued["window"]) - bench.now_ms(), window)


def test_a_marker_that_waits_refuses_who_does_not_merge(bench):
    bench.reserve(A)
    with bench.unchanged():
        vote = bench.alone(B)
        assert vote.kind is VoteKind.REFUSED
        assert vote.value == A.encode() + b'{"task_id":"id-a"}'
        assert bench.near(vote.ttl * 1000, 200)


def test_a_marker_ends_with_its_life(bench):
    bench.alone(A)
    assert bench.alone(B).kind is VoteKind.REFUSED
    bench.age()
    assert bench.alone(B).kind is VoteKind.GRANTED
    assert bench.queued["token"] == B.encode()


def test_a_marker_can_stand_by_its_tasks_lock_alone(bench):
    bench.run(A)
    assert bench.left() <= 0
    vote = bench.alone(B)
    assert (vote.kind, vote.value[:40]) == (VoteKind.REFUSED, A.encode())
    assert bench.near(vote.ttl * 1000, 200)


@pytest.mark.parametrize("lock", [None, OTHER_LOCK, LOCK[:-1] + "9"])
def test_a_marker_that_stands_by_its_lock_ends_with_it(bench, lock):
    bench.run(A)
    bench.unhold()
    if lock is not None:
        bench.hold(lock)
    assert bench.alone(B).kind is VoteKind.GRANTED
    assert (bench.queued["token"], bench.queued["started"]) == (B.encode(), b"")
    assert "lock" not in bench.queued
    assert bench.near(bench.pttl(), 200)


def test_a_marker_that_waits_does_not_stand_by_a_lock(bench):
    bench.hold()
    assert bench.alone(A).kind is VoteKind.GRANTED


def test_a_refusal_tells_the_later_end_of_lock_and_marker(bench):
    bench.run(A, 600.0)
    assert bench.near(bench.alone(B).ttl * 1000, 600)
    bench.hold(seconds=900.0)
    assert bench.near(bench.alone(B).ttl * 1000, 900)


def test_the_own_token_is_granted_again(bench):
    bench.alone(A, life=50.0)
    with bench.unchanged():
        assert bench.alone(A, life=600.0).kind is VoteKind.GRANTED
    assert bench.near(bench.pttl(), 50)


def test_asking_again_late_changes_nothing_of_one_that_runs(bench):
    """What a slow connection delivers after the start neither ends the run nor forgets it."""
    bench.run(A, 600.0)
    with bench.unchanged():
        assert bench.reserve(A, version=9).kind is VoteKind.GRANTED
    assert bench.near(bench.pttl(), WEEK / 1000)


def test_only_the_whole_token_is_the_own_one(bench):
    bench.alone(A)
    sibling = A[:-1] + "b"
    assert bench.alone(sibling).kind is VoteKind.REFUSED
    assert bench.start(sibling, AS_IT_IS).kind is ReservationVote.PASSED
    assert bench.end(sibling).kind is VoteKind.REFUSED
    assert bench.queued["token"] == A.encode()


# -- reserve: merged -------------------------------------------------------------------


def test_a_trigger_is_merged_into_the_one_that_waits(bench):
    bench.reserve(A)
    before = bench.queued
    vote = bench.reserve(B, version=4096)
    assert (vote.kind, vote.fence, vote.amount) == (ReservationVote.MERGED, 4096, 1)
    assert vote.value == A.encode() + b'{"task_id":"id-a"}'
    assert bench.near(vote.ttl * 1000, 200)
    news = {"newest": args_of(B), "version": b"4096", "merged": b"1", "by": B[:32].encode()}
    assert bench.queued == {**before, **news}
    assert bench.next == {}


def test_the_newest_arguments_win(bench):
    bench.reserve(A)
    counts = [bench.reserve(token, version=i).amount for i, token in enumerate((B, C, D), 1)]
    assert counts == [1, 2, 3]
    assert bench.queued["newest"] == args_of(D)


@pytest.mark.parametrize(
    ("stored", "proposed", "given"),
    [
        (5, 6, 6),
        (5, 900, 900),
        (7205759403792793, 7205759403792794, 7205759403792794),
        (99_999_999_999_999, 999_999_999_999_999, 999_999_999_999_999),
    ],
)
def test_a_version_keeps_all_its_digits(bench, stored, proposed, given):
    bench.reserve(A)
    bench.reserve(B, version=stored)
    assert bench.reserve(C, version=proposed).fence == given
    assert bench.queued["version"] == b"%d" % given


@pytest.mark.parametrize("proposed", [1, 4, 5])
@pytest.mark.parametrize("stored", [5, 99_999_999_999_999, 7205759403792793])
def test_a_version_never_falls_nor_stays(bench, stored, proposed):
    bench.reserve(A)
    bench.reserve(B, version=stored)
    with bench.unchanged():
        vote = bench.reserve(C, version=proposed)
        assert (vote.kind, vote.fence, vote.amount) == (ReservationVote.MERGED, stored + 1, 1)
        assert vote.value == A.encode() + b'{"task_id":"id-a"}'
        assert bench.near(vote.ttl * 1000, 200)


def test_what_a_trigger_was_told_it_can_propose(bench):
    bench.reserve(A)
    bench.reserve(B, version=7205759403792793)
    told = bench.reserve(C, version=5).fence
    vote = bench.reserve(C, version=told)
    assert (vote.fence, vote.amount) == (told, 2)
    assert bench.queued["newest"] == args_of(C)


def test_versions_of_a_marker_only_grow(bench):
    chance = random.Random(7)
    bench.reserve(A)
    for number in range(200):
        stored = int(bench.queued.get("version", 0))
        proposed = chance.randrange(1, 10**6)
        assert bench.reserve(f"{number:040d}", version=proposed).fence == max(proposed, stored + 1)
        assert int(bench.queued["version"]) == max(proposed, stored)
    assert stored > 900_000


def test_an_older_trigger_that_comes_late_replaces_nothing(bench):
    """
    What a slow connection delivers after a newer trigger was stored leaves that one in place.

    The older one may long be accepted by the other nodes, under the version it proposed; here
    it would come back above the newer one, and win when the task starts.
    """
    bench.reserve(A)
    bench.reserve(B, version=9)
    assert bench.reserve(C, version=5).kind is ReservationVote.MERGED
    started = bench.start(A)
    assert (started.value, started.fence) == (args_of(B), 9)


@pytest.mark.parametrize("place", ["first", "next", "next, and then first"])
def test_asking_again_keeps_what_was_merged(bench, place):
    """
    Who asks again under its own token, to agree on a version, drops nobody's arguments.

    Others may have been merged into its marker since, and told that they are accepted.
    """
    if place != "first":
        bench.run(D)
    bench.reserve(A)
    bench.reserve(B, version=5)
    if place == "next, and then first":
        bench.end(D)
    bench.reserve(A, version=6)
    bench.end(D)
    assert bench.next == {} or place == "next"
    started = bench.start(A)
    assert (started.value, started.fence, started.amount) == (args_of(B), 5, 1)
    assert bench.next == {}


def test_an_owner_is_counted_once_however_often_it_asks(bench):
    bench.reserve(A)
    assert bench.reserve(B, version=1).amount == 1
    assert bench.reserve(B, version=2).amount == 1
    assert bench.reserve(B[:32] + "c" * 8, version=3).amount == 1
    assert bench.reserve(B[:31] + "c" * 9, version=4).amount == 2


def test_a_new_marker_knows_nothing_of_what_was_merged_before(bench):
    bench.reserve(A)
    bench.reserve(B, version=9)
    bench.end(A)
    assert bench.reserve(C).kind is VoteKind.GRANTED
    assert {"newest", "by", "version", "merged"}.isdisjoint(bench.queued)
    started = bench.start(C)
    assert (started.value, started.fence, started.amount) == (b"", 0, 0)


def test_merging_does_not_prolong_a_marker(bench):
    """Triggers that keep coming do not keep alive a marker whose message may be lost."""
    bench.reserve(A, life=50.0)
    bench.reserve(B, life=600.0)
    assert bench.near(bench.left(), 50)
    assert bench.near(bench.alone(C).ttl * 1000, 50)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("life", [200.0, RETENTION + 1000.0])
def test_what_was_merged_is_kept_for_long(bench, which, life):
    if which:
        bench.run(D)
    bench.reserve(A, life=life)
    stands_for, kept = bench.left(which) / 1000, bench.pttl(which) / 1000
    bench.reserve(B)
    assert bench.near(bench.left(which), stands_for)
    assert bench.near(bench.pttl(which), max(kept, RETENTION))


@pytest.mark.parametrize("alone", [0.0, 600.0, AS_IT_IS, OVER])
@pytest.mark.parametrize("place", ["first", "next"])
def test_a_marker_that_lapses_while_its_message_waits_hands_over_what_was_merged(
    bench, place, alone
):
    """It stands for nobody any more, but whoever was merged into it had been told so."""
    if place == "next":
        bench.run(D)
    bench.reserve(A)
    bench.reserve(B, version=5)
    bench.end(D)
    bench.age(which=int(place == "next"))
    vote = bench.start(A, alone)
    assert (vote.kind, vote.value, vote.fence) == (VoteKind.GRANTED, args_of(B), 5)


def test_what_was_merged_into_one_that_lapsed_keeps_nobody_out(bench):
    """The key is there for its owner only: the next trigger is granted, and inherits nothing."""
    bench.reserve(A)
    bench.reserve(B, version=5)
    bench.age()
    assert bench.reserve(C).kind is VoteKind.GRANTED
    assert bench.near(bench.pttl(), 200)
    assert bench.start(A).kind is ReservationVote.PASSED
    assert bench.start(C).value == b""


# -- reserve: what may expire ----------------------------------------------------------


def test_nothing_is_merged_into_what_may_expire(bench):
    """Its message may end unrun: who comes is next behind it, with a run of its own."""
    bench.reserve(A, expires=True)
    before = bench.queued
    assert before["started"] == b"-"
    vote = bench.reserve(B)
    assert (vote.kind, vote.amount, vote.value[:40]) == (ReservationVote.NEXT, 0, A.encode())
    assert bench.queued == before
    assert bench.next["started"] == b""


@pytest.mark.parametrize("before", ["runs", "has ended"])
def test_who_is_next_and_may_expire_refuses_who_would_merge(bench, before):
    """There is no third place: the trigger is refused, by whom it is told, and changes nothing."""
    bench.run(A)
    bench.reserve(B, expires=True)
    if before == "has ended":
        bench.end(A)
    with bench.unchanged():
        vote = bench.reserve(C, version=9)
        assert (vote.kind, vote.amount, vote.value[:40]) == (VoteKind.REFUSED, 0, B.encode())
        assert bench.near(bench.left(1), vote.ttl)


def test_a_trigger_that_may_expire_is_merged_into_another(bench):
    """What counts is the message that waits, not the one that is not published."""
    bench.reserve(A)
    assert bench.reserve(B, expires=True).kind is ReservationVote.MERGED
    assert bench.queued["started"] == b""
    assert bench.reserve(C, version=2).amount == 2


def test_what_may_expire_starts_like_any_other(bench):
    bench.reserve(A, expires=True)
    bench.hold()
    vote = bench.start(A)
    assert (vote.kind, vote.value, vote.fence, vote.amount) == (VoteKind.GRANTED, b"", 0, 0)
    assert bench.queued["lock"] == LOCK.encode()
    assert bench.reserve(B).kind is ReservationVote.NEXT


def test_who_is_next_waits_for_what_may_expire(bench):
    bench.reserve(A, expires=True)
    bench.reserve(B)
    assert bench.start(B).kind is VoteKind.REFUSED
    bench.age()
    assert bench.start(B).kind is VoteKind.GRANTED


# -- reserve: next ---------------------------------------------------------------------


def test_a_trigger_becomes_next_behind_one_that_runs(bench):
    bench.run(A, 600.0)
    before = bench.queued
    vote = bench.reserve(B, life=300.0)
    assert (vote.kind, vote.fence, vote.amount) == (ReservationVote.NEXT, 0, 0)
    assert vote.value == A.encode() + b'{"task_id":"id-a"}'
    assert bench.near(vote.ttl * 1000, 600)
    assert bench.queued == before
    assert (bench.next["token"], bench.next["started"]) == (B.encode(), b"")


@pytest.mark.parametrize(("alone", "later"), [(0.0, 1.0), (600.0, 601.0)])
def test_who_is_next_has_its_life_from_the_end_of_the_one_before(bench, alone, later):
    """However long that one stands by itself, it has yet as long as any other to be read."""
    bench.run(A, alone)
    bench.reserve(B, life=300.0, window=400.0)
    assert bench.near(bench.left(1), 300 + later)
    assert bench.near(bench.pttl(1), 300 + later)
    assert bench.near(int(bench.next["window"]) - bench.now_ms(), 400 + later)


def test_who_runs_by_its_lock_alone_is_followed_too(bench):
    bench.run(A)
    assert bench.reserve(B).kind is ReservationVote.NEXT
    bench.end(B)
    bench.unhold()
    assert bench.reserve(B).kind is VoteKind.GRANTED


def test_nothing_is_merged_into_one_that_has_started(bench):
    """Its arguments were handed to the body: what came later would be lost."""
    bench.run(A)
    bench.reserve(B)
    bench.reserve(C)
    assert "newest" not in bench.queued


def test_later_triggers_are_merged_into_the_next_one(bench):
    bench.run(A)
    bench.reserve(B)
    for count, token in enumerate((C, D), 1):
        vote = bench.reserve(token, version=count)
        assert (vote.kind, vote.amount) == (ReservationVote.MERGED, count)
        assert vote.value[:40] == B.encode()
    assert bench.next["newest"] == args_of(D)
    assert bench.queued["token"] == A.encode()


def test_who_is_next_stands_for_the_name_when_the_one_before_has_ended(bench):
    bench.run(A)
    bench.reserve(B)
    bench.unhold()
    bench.end(A)
    assert bench.reserve(C).value[:40] == B.encode()
    vote = bench.alone(D)
    assert (vote.kind, vote.value[:40]) == (VoteKind.REFUSED, B.encode())
    assert bench.queued == {}


def test_who_is_next_ends_with_its_life_and_stands_by_no_lock(bench):
    bench.run(A)
    bench.reserve(B, life=0.1)
    eventually(lambda: bench.reserve(C).kind is ReservationVote.NEXT, "place")
    assert bench.next["token"] == C.encode()


def test_who_is_next_is_granted_again(bench):
    bench.run(A)
    assert bench.reserve(B, life=50.0).kind is ReservationVote.NEXT
    before, kept = bench.everything(), bench.pttl(1)
    assert bench.reserve(B, life=600.0).kind is ReservationVote.NEXT
    assert bench.everything() == before
    assert bench.pttl(1) <= kept


def test_who_does_not_merge_is_never_next(bench):
    bench.run(A)
    assert bench.alone(B).kind is VoteKind.REFUSED
    assert bench.next == {}


# -- start -----------------------------------------------------------------------------


@pytest.mark.parametrize("life", [0.0, 600.0, AS_IT_IS, OVER])
def test_a_start_hands_over_what_was_merged(bench, life):
    bench.reserve(A)
    bench.reserve(B, version=5)
    bench.reserve(C, version=9)
    vote = bench.start(A, life)
    assert (vote.kind, vote.value, vote.fence, vote.amount) == (
        VoteKind.GRANTED,
        args_of(C),
        9,
        2,
    )
    assert bench.is_of_now(vote.node_now)


def test_a_start_can_be_repeated(bench):
    bench.reserve(A)
    bench.reserve(B, version=5)
    first = bench.start(A)
    again = bench.start(A, lock=OTHER_LOCK)
    assert first.value == args_of(B)
    assert (again.kind, again.value, again.fence) == (first.kind, first.value, first.fence)
    assert bench.queued["lock"] == OTHER_LOCK.encode()


@pytest.mark.parametrize("place", ["first", "next"])
@pytest.mark.parametrize("alone", [0.0, 600.0, AS_IT_IS])
def test_what_was_merged_is_for_the_execution_that_started_first(bench, place, alone):
    """A retry has its own arguments; a late redelivery of the first one gets the newest again."""
    if place == "next":
        bench.run(D)
    bench.reserve(A)
    bench.reserve(B, version=5)
    bench.end(D)
    assert bench.start(A, alone).value == args_of(B)
    assert bench.queued["started"] == b"first"
    bench.end(A, "wait", 600.0)
    retry = bench.start(A, alone, execution="second", lock=OTHER_LOCK)
    assert (retry.kind, retry.value, retry.fence, retry.amount) == (VoteKind.GRANTED, b"", 5, 1)
    assert (bench.queued["started"], bench.queued["lock"]) == (b"first", OTHER_LOCK.encode())
    assert bench.start(A, alone).value == args_of(B)


@pytest.mark.parametrize("alone", [0.0, 600.0, AS_IT_IS, OVER])
def test_no_later_execution_gets_what_was_merged(bench, alone):
    bench.reserve(A)
    bench.reserve(B)
    bench.start(A)
    assert bench.start(A, alone, execution="second").value == b""
    assert (bench.queued == {}) == (alone == OVER)


def test_a_start_without_a_life_leaves_the_marker_to_the_lock(bench):
    bench.reserve(A)
    window = bench.queued["window"]
    bench.start(A, 0.0)
    assert bench.left() <= 0
    assert bench.near(bench.pttl(), WEEK / 1000)
    stored = bench.queued
    assert (stored["started"], stored["lock"]) == (b"first", LOCK.encode())
    assert stored["window"] == window


@pytest.mark.parametrize("life", [600.0, RETENTION + 1000.0])
def test_a_start_with_a_life_lets_the_marker_outlive_the_lock(bench, life):
    bench.run(A)
    bench.start(A, life, life=life)
    bench.unhold()
    assert bench.near(bench.left(), life)
    assert bench.pttl() >= bench.left()
    assert bench.alone(B).kind is VoteKind.REFUSED


def test_a_life_from_the_start_ends_by_the_nodes_clock(bench):
    bench.run(A, 0.1)
    bench.unhold()
    eventually(lambda: bench.alone(B).kind is VoteKind.GRANTED, "grant")


def test_a_start_can_leave_a_marker_as_it_is(bench):
    bench.reserve(A)
    before, kept = bench.queued, bench.pttl()
    bench.start(A, AS_IT_IS)
    assert bench.queued == {**before, "started": b"first", "lock": LOCK.encode()}
    assert bench.near(bench.pttl(), kept / 1000)


def test_a_start_can_end_a_marker(bench):
    bench.reserve(A)
    assert bench.start(A, OVER).kind is VoteKind.GRANTED
    assert bench.queued == {}
    assert bench.reserve(B).kind is VoteKind.GRANTED


def test_ending_at_the_start_leaves_the_next_one(bench):
    bench.run(A)
    bench.reserve(B)
    bench.start(A, OVER)
    assert bench.queued == {}
    assert bench.next["token"] == B.encode()


@pytest.mark.parametrize("life", [0.0, 600.0, AS_IT_IS, OVER])
@pytest.mark.parametrize("before", ["waits", "runs by itself", "runs under its lock"])
def test_who_is_next_does_not_start_before_its_turn(bench, before, life):
    bench.run(A, 600.0 if before == "runs by itself" else 0.0)
    bench.reserve(B)
    if before == "waits":
        bench.end(A, "wait", 600.0)
    if before != "runs under its lock":
        bench.unhold()
    with bench.unchanged():
        vote = bench.start(B, life, lock=OTHER_LOCK)
        assert (vote.kind, vote.value[:40]) == (VoteKind.REFUSED, A.encode())
        assert bench.near(vote.ttl * 1000, 0 if before == "runs under its lock" else 600)


@pytest.mark.parametrize("how", ["ended", "lost its lock"])
def test_who_is_next_takes_the_place_of_one_that_does_not_stand(bench, how):
    bench.run(A)
    bench.reserve(B, life=300.0)
    bench.reserve(C, version=5)
    if how == "ended":
        bench.end(A)
    bench.hold(OTHER_LOCK)
    vote = bench.start(B, lock=OTHER_LOCK)
    assert (vote.kind, vote.value, vote.fence, vote.amount) == (VoteKind.GRANTED, args_of(C), 5, 1)
    stored = bench.queued
    assert (stored["token"], stored["started"]) == (B.encode(), b"first")
    assert stored["lock"] == OTHER_LOCK.encode()
    assert bench.next == {}
    assert bench.near(bench.pttl(), WEEK / 1000)
    assert bench.reserve(D).kind is ReservationVote.NEXT


@pytest.mark.parametrize("waited", [50.0, 900.0])
def test_who_is_next_can_be_promoted_as_it_is_or_for_its_end(bench, waited):
    """The promotion opens a new window, not the rest of its wait; 'over' leaves nothing of it."""
    bench.run(A)
    bench.reserve(B, life=waited)
    bench.end(A)
    bench.start(B, AS_IT_IS, life=300.0)
    assert bench.near(bench.left(), 300)
    assert bench.near(
        bench.pttl(), max(300, waited + 1)
    )  # never less: it may have been merged into
    assert bench.queued["window"] == bench.queued["until"]
    assert bench.next == {}
    bench.reserve(C)
    bench.end(B)
    assert bench.start(C, OVER).kind is VoteKind.GRANTED
    assert bench.queued == bench.next == {}


def test_a_window_is_opened_once(bench):
    """A redelivery of what was promoted moves its end no further."""
    bench.run(A)
    bench.reserve(B)
    bench.end(A)
    bench.start(B, AS_IT_IS, life=300.0)
    before, kept = bench.queued, bench.pttl()
    bench.start(B, AS_IT_IS, life=900.0)
    assert bench.queued == before
    assert bench.pttl() <= kept


def test_a_new_window_keeps_what_was_merged(bench):
    """A redelivery of what was promoted may come when its window has long been over."""
    bench.run(A)
    bench.reserve(B)
    bench.reserve(C)
    bench.end(A)
    assert bench.start(B, AS_IT_IS, life=0.1).value == args_of(C)
    assert bench.near(bench.pttl(), RETENTION)
    eventually(lambda: bench.now_ms() > int(bench.queued["until"]), "end of the window")
    assert bench.start(B, AS_IT_IS).value == args_of(C)


@pytest.mark.parametrize("life", [0.0, 600.0])
@pytest.mark.parametrize("left", ["nothing", "one that does not stand"])
def test_a_marker_that_has_lapsed_is_taken_again(bench, life, left):
    if left != "nothing":
        bench.run(B)
    bench.hold(OTHER_LOCK)
    vote = bench.start(A, life, lock=OTHER_LOCK)
    assert (vote.kind, vote.value, vote.fence, vote.amount) == (VoteKind.GRANTED, b"", 0, 0)
    stored = bench.queued
    assert stored["token"] == A.encode()
    assert json.loads(stored["info"]) == {"task_id": "id-a", "again": True}
    assert (stored["started"], stored["lock"]) == (b"first", OTHER_LOCK.encode())
    assert bench.near(bench.left(), life)
    assert bench.near(bench.pttl(), WEEK / 1000)
    assert bench.end(A, "window").kind is VoteKind.GRANTED  # its window was over before
    assert bench.queued == {}


def stands_in_waiting(bench):
    bench.reserve(B)


def stands_in_running(bench):
    bench.run(B, 600.0)


def stands_in_under_its_lock(bench):
    bench.run(B)


def stands_in_next(bench):
    bench.run(C)
    bench.reserve(B)
    bench.end(C)


@pytest.mark.parametrize(
    "stands_in",
    [stands_in_waiting, stands_in_running, stands_in_under_its_lock, stands_in_next],
)
@pytest.mark.parametrize("life", [0.0, 600.0, AS_IT_IS, OVER])
def test_a_start_takes_nothing_that_somebody_else_stands_in_for(bench, stands_in, life):
    stands_in(bench)
    with bench.unchanged():
        assert bench.start(A, life, lock=OTHER_LOCK).kind is ReservationVote.PASSED


@pytest.mark.parametrize("life", [AS_IT_IS, OVER])
def test_a_marker_that_need_not_be_there_is_not_made_anew(bench, life):
    """One that would end now, or was to end by itself, is not brought back."""
    with bench.unchanged():
        assert bench.start(A, life).kind is ReservationVote.PASSED


# -- end -------------------------------------------------------------------------------


def test_an_owner_ends_its_marker(bench):
    bench.run(A)
    bench.reserve(B)
    assert bench.end(B).kind is VoteKind.GRANTED
    assert bench.next == {}
    assert bench.queued["token"] == A.encode()
    assert bench.end(A).kind is VoteKind.GRANTED
    assert bench.queued == {}
    assert bench.end(A).kind is VoteKind.REFUSED


@pytest.mark.parametrize("how", WORDS)
def test_a_late_finisher_never_ends_a_newer_marker(bench, how):
    bench.run(A)
    bench.unhold()
    bench.run(B)
    bench.reserve(C)
    before, kept = bench.everything(), (bench.pttl(0), bench.pttl(1))
    assert bench.end(A, how, 3000.0).kind is VoteKind.REFUSED
    assert bench.everything() == before
    assert bench.near(bench.pttl(0), kept[0] / 1000)
    assert bench.near(bench.pttl(1), kept[1] / 1000)


@pytest.mark.parametrize("token", [A[:32], A + "a", A[:39]])
def test_only_a_whole_token_ends_a_marker(bench, token):
    """No part of it will do, not even the owner's, which is enough for a lock."""
    bench.reserve(A)
    with bench.unchanged():
        assert bench.end(token).kind is VoteKind.REFUSED


def test_nothing_is_ended_where_nobody_stands(bench):
    with bench.unchanged():
        for how in WORDS:
            assert bench.end(A, how, 600.0).kind is VoteKind.REFUSED


def test_a_task_that_is_queued_again_is_waited_for(bench):
    bench.run(A)
    bench.unhold()
    assert bench.end(A, "wait", 600.0).kind is VoteKind.GRANTED
    assert bench.near(bench.left(), 600)
    assert bench.pttl() >= bench.left()
    assert bench.alone(B).kind is VoteKind.REFUSED
    assert bench.start(A).kind is VoteKind.GRANTED


@pytest.mark.parametrize(("life", "wait"), [(50.0, 600.0), (600.0, 50.0)])
def test_waiting_may_prolong_a_marker_and_never_shortens_it(bench, life, wait):
    bench.reserve(A, life=life)
    bench.end(A, "wait", wait)
    assert bench.near(bench.left(), 600)
    assert bench.near(bench.pttl(), 600)


def test_waiting_keeps_what_was_merged(bench):
    """A task that is put off before it has started can come later than its marker lapses."""
    bench.reserve(A)
    bench.reserve(B)
    bench.end(A, "wait", 600.0)
    assert bench.near(bench.left(), 600)
    assert bench.near(bench.pttl(), RETENTION)
    assert bench.start(A).value == args_of(B)


def test_who_is_next_can_wait_longer(bench):
    bench.run(A)
    bench.reserve(B, life=50.0)
    bench.end(B, "wait", 600.0)
    assert bench.near(bench.left(1), 600)
    assert bench.near(bench.pttl(1), 600)
    assert bench.reserve(C).value[:40] == B.encode()


def test_a_task_that_waits_again_takes_no_more_arguments(bench):
    """It has been handed its arguments: a trigger that comes between two tries is next."""
    bench.run(A)
    bench.unhold()
    bench.end(A, "wait", 600.0)
    assert bench.reserve(B).kind is ReservationVote.NEXT


def test_a_marker_can_be_left_to_its_first_window(bench):
    """After a failure it stands until the end of what it was published for, without the lock."""
    bench.run(A, 3000.0)
    assert bench.end(A, "window").kind is VoteKind.GRANTED
    assert bench.near(bench.left(), 200)
    assert bench.near(bench.pttl(), 200)
    assert bench.queued["lock"] == b""
    assert bench.near(bench.alone(B).ttl * 1000, 200)


def test_a_marker_that_is_left_to_its_window_does_not_stand_by_a_lock(bench):
    """The lock may be another execution's by now; it tells nothing of the marker's end."""
    bench.run(A)
    bench.end(A, "window")
    bench.hold(seconds=900.0)
    assert bench.near(bench.alone(B).ttl * 1000, 200)


def test_a_window_that_is_over_is_over(bench):
    bench.reserve(A)
    bench.hold()
    bench.start(A, 600.0)
    bench.age()
    assert bench.end(A, "window").kind is VoteKind.GRANTED
    assert bench.queued == {}


def test_a_window_may_be_longer_than_the_life(bench):
    """A message that expires soon may have run and failed all the same: then its window counts."""
    bench.run(A, life=50.0, window=600.0)
    assert bench.end(A, "window").kind is VoteKind.GRANTED
    assert bench.near(bench.left(), 600)
    assert bench.near(bench.pttl(), 600)


@pytest.mark.parametrize("alone", [0.0, 600.0, AS_IT_IS])
def test_who_runs_is_not_idle(bench, alone):
    bench.run(A, alone)
    before, kept = bench.everything(), bench.pttl()
    assert bench.end(A, "idle").kind is VoteKind.REFUSED
    assert bench.everything() == before
    assert bench.near(bench.pttl(), kept / 1000)


@pytest.mark.parametrize("lock", [None, OTHER_LOCK])
@pytest.mark.parametrize("alone", [0.0, 600.0, AS_IT_IS])
def test_who_has_lost_its_lock_is_idle(bench, alone, lock):
    bench.run(A, alone)
    bench.unhold()
    if lock is not None:
        bench.hold(lock)
    assert bench.end(A, "idle").kind is VoteKind.GRANTED
    assert bench.queued == {}


@pytest.mark.parametrize("how", ["idle", "unstarted"])
@pytest.mark.parametrize("is_next", [False, True])
def test_who_waits_is_idle_and_unstarted(bench, how, is_next):
    if is_next:
        bench.run(B)
    bench.hold()
    bench.reserve(A)
    bench.reserve(C)
    before = bench.queued
    assert bench.end(A, how).kind is VoteKind.GRANTED
    assert (bench.queued, bench.next) == (before if is_next else {}, {})


@pytest.mark.parametrize("since", ["runs", "has lost its lock", "waits again", "has failed"])
def test_who_has_ever_started_is_not_unstarted(bench, since):
    """A copy of it that ends without having run leaves the marker of the other one as it is."""
    bench.run(A)
    if since == "has lost its lock":
        bench.unhold()
    elif since == "waits again":
        bench.end(A, "wait", 600.0)
    elif since == "has failed":
        bench.end(A, "window")
    with bench.unchanged():
        assert bench.end(A, "unstarted").kind is VoteKind.REFUSED


@pytest.mark.parametrize("has_started", [False, True])
def test_what_may_expire_is_unstarted_until_it_starts(bench, has_started):
    """That nothing can be merged into it does not mean that it has run."""
    bench.reserve(A, expires=True)
    if has_started:
        bench.start(A)
    bench.end(A, "unstarted")
    assert (bench.queued == {}) == (not has_started)


@pytest.mark.parametrize("which", [0, 1])
def test_in_hand_a_marker_can_stand_for_less_long(bench, which):
    """It is not to outlive by much a message that dies with its worker; it goes on waiting."""
    if which:
        bench.run(B)
    bench.reserve(A, life=600.0)
    before = (bench.queued, bench.next)[which]
    assert bench.end(A, "hand", 50.0).kind is VoteKind.GRANTED
    assert bench.near(bench.left(which), 50)
    after = (bench.queued, bench.next)[which]
    assert after == {**before, "until": after["until"]}
    assert bench.reserve(C).kind is ReservationVote.MERGED


@pytest.mark.parametrize("life", [50.0, 600.0])
def test_in_hand_a_marker_stands_for_as_long_as_was_said(bench, life):
    """Its key is kept for no less, or somebody else has the name while it is in hand."""
    bench.reserve(A, life=200.0)
    bench.end(A, "hand", life)
    assert bench.near(bench.left(), life)
    assert bench.pttl() >= bench.left()


def test_in_hand_a_marker_lapses_and_keeps_what_was_merged(bench):
    bench.reserve(A, life=600.0)
    bench.reserve(B)
    bench.end(A, "hand", 0.1)
    eventually(lambda: bench.left() <= 0, "end of its time in hand")
    assert bench.near(bench.pttl(), RETENTION)
    assert bench.start(A).value == args_of(B)
    bench.end(A, "hand", 0.1)
    eventually(lambda: bench.alone(C).kind is VoteKind.GRANTED, "grant")


@pytest.mark.parametrize("which", [0, 1])
def test_what_has_run_stands_as_it_does_without_merging(bench, which):
    """It has its window to the end, and who comes is next, not merged into what comes no more."""
    if which:
        bench.run(D)
    bench.reserve(A)
    bench.reserve(B)
    before, kept = (bench.queued, bench.next)[which], bench.pttl(which)
    assert bench.end(A, "ran", 900.0).kind is VoteKind.GRANTED
    assert (bench.queued, bench.next)[which] == {**before, "started": b"-"}
    assert bench.near(bench.pttl(which), kept / 1000)
    vote = bench.reserve(C, version=9)
    assert vote.kind is (VoteKind.REFUSED if which else ReservationVote.NEXT)
    assert vote.value[:40] == A.encode()


def test_having_run_does_not_forget_who_started(bench):
    bench.reserve(A)
    bench.reserve(B)
    bench.start(A, AS_IT_IS)
    with bench.unchanged():
        bench.end(A, "ran")
    assert bench.start(A, AS_IT_IS).value == args_of(B)


# -- the restart guard -----------------------------------------------------------------


@pytest.mark.parametrize("arguments", [b"", b"null"])
def test_a_node_that_was_another_process_has_no_vote(bench, arguments):
    bench.reserve(A)
    before = bench.queued
    vote = bench.reserve(B, arguments, ask={"boot": boot_marker("1" * 40, "f" * 16)})
    assert vote.kind is VoteKind.QUARANTINED
    assert bench.near(vote.ttl * 1000, RULES.quarantine)
    assert bench.queued == before
    assert bench.next == {}


def test_a_flushed_node_has_no_vote(bench):
    bench.client.flushall()
    assert bench.reserve(A).kind is VoteKind.QUARANTINED
    assert bench.queued == {}


def test_a_quarantine_ends_by_itself(fresh):
    ask = {"quarantine": 300}
    assert fresh.reserve(A, ask=ask).kind is VoteKind.QUARANTINED
    eventually(lambda: fresh.reserve(A, ask=ask).kind is VoteKind.GRANTED, "vote")


def test_a_node_of_other_clients_has_no_vote(bench):
    with bench.unchanged():
        vote = bench.reserve(A, ask={"boot": boot_marker(bench.run_id, "e" * 16)})
        assert (vote.kind, vote.reason) == (VoteKind.UNREACHABLE, NO_VOTE[-6])


def test_who_runs_is_noted_on_a_node_in_quarantine_too(bench):
    """A start and an end take no vote from anybody: a node that lost its memory is told both."""
    bench.client.flushall()
    bench.reserve(B)
    assert bench.start(A).kind is VoteKind.GRANTED
    assert bench.queued["token"] == A.encode()
    assert bench.end(A).kind is VoteKind.GRANTED
    assert bench.reserve(B).kind is VoteKind.QUARANTINED


def test_without_the_guard_nothing_is_enrolled(contract_node):
    rules = Rules(ttl=200, max_ttl=300, restart_guard=False)
    bench = Bench(contract_node, rules)
    assert bench.reserve(A).kind is VoteKind.GRANTED
    assert bench.reserve(B).kind is ReservationVote.MERGED
    assert set(bench.everything()) == {reservation_keys(rules, NAME)[0]}
    bench.client.close()


@pytest.mark.parametrize("place", ["first", "next"])
def test_an_enrolment_is_refreshed_by_every_placing(bench, place):
    if place == "next":
        bench.run(B)
    boot = Keys.of("redlock", "").boot
    bench.client.pexpire(boot, 60_000)
    bench.reserve(A)
    assert bench.near(bench.client.pttl(boot), BOOT_RETENTION / 1000)


# -- names, arguments, expiry ----------------------------------------------------------


def test_arguments_of_any_size_and_kind_come_back_as_they_were(bench):
    bench.reserve(A)
    every_byte = bytes(range(256))
    for version, arguments in enumerate((b"x" * 5_000_000, every_byte * 100, b"0", b"null"), 1):
        assert bench.reserve(B, arguments, version=version).kind is ReservationVote.MERGED
        assert bench.start(A, AS_IT_IS).value == arguments
        bench.end(A)
        bench.reserve(A)


@pytest.mark.parametrize(
    "name",
    ["x" * 5000, "é" * 500, "\U0001f512" * 300, "x" + "é" * 120, "a:b\n\r\0c" * 40, "счёт:7"],
)
def test_names_of_any_length_and_script_do_not_mix(bench, name):
    for key in reservation_keys(Rules(prefix="p" * 40), name):
        assert len(key) < 200
        key.decode()
    assert bench.reserve(A, name=name + "1").kind is VoteKind.GRANTED
    assert bench.reserve(B, name=name + "2").kind is VoteKind.GRANTED
    assert bench.reserve(B, name=name + "1").value[:40] == A.encode()
    assert bench.start(A, name=name + "1").value == args_of(B)
    assert bench.end(A, name=name + "2").kind is VoteKind.REFUSED
    assert bench.end(A, name=name + "1").kind is VoteKind.GRANTED


def test_no_key_of_a_marker_is_a_key_of_anything_else():
    names = ["boot", "node:boot", "", ":", "lock:x", "x", "next:x", "queued:x"]
    rules = Rules(prefix="p")
    keys = [
        key
        for name in names
        for key in (*Keys.of("p", name)[:2], marker_key("p", name), *reservation_keys(rules, name))
    ]
    assert len(set(keys) | {*Keys.of("p", "")[2:]}) == 5 * len(names) + 2


def test_every_marker_carries_an_expiry(fresh):
    """Through any sequence of the three scripts no key stays for ever; `ask` looks each time."""
    chance, seen, ask = random.Random(5), set(), {"quarantine": 1}
    for number in range(600):
        token = chance.choice((A, B, C))
        life = chance.choice((0.0, 300.0, AS_IT_IS, OVER))
        step = chance.choice(
            [
                lambda t=token, n=number: fresh.reserve(t, version=n + 1, ask=ask),
                lambda t=token: fresh.reserve(t, expires=True, ask=ask),
                lambda t=token: fresh.alone(t, ask=ask),
                lambda t=token, f=life: fresh.start(t, f, execution=chance.choice("12")),
                lambda t=token: fresh.end(t, chance.choice(WORDS), 9.0),
                fresh.hold,
                fresh.unhold,
            ]
        )
        vote = step()
        seen |= {vote.kind} if vote else set()
    assert seen == {VoteKind.GRANTED, VoteKind.REFUSED, VoteKind.QUARANTINED, *ReservationVote}
