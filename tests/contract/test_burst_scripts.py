"""What the bursts of debounced calls do inside a node, rule by rule, on every server there is."""

from __future__ import annotations

import pytest
import redis

from celery_redlock.lock.records import marker_key
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.votes import VoteKind
from celery_redlock.task.messages.envelope import fresh_publish_id
from celery_redlock.unique.burst_scripts import CALL, CLAIM, ID_LENGTH, LOOK, MOST_LAST, BurstVote
from celery_redlock.unique.bursts import (
    RETENTION,
    Call,
    burst_key,
    call_request,
    claim_request,
    look_request,
)
from support.lua import rewritten
from support.script_bench import ScriptBench

RULES = Rules(ttl=200, max_ttl=300)
NAME = "report:7"
EXECUTION = "e" * 32
#: How long a burst lasts at most: longer than any test [s].
LONGEST = 600.0
#: A number that Lua's own conversion to text would round.
BIG = 7_205_759_403_792_793
RUNS, SUPERSEDED = VoteKind.GRANTED, BurstVote.SUPERSEDED


def a_call(letter, number=0):
    return Call(letter * ID_LENGTH, BIG + number)


A, B, C, D = (a_call(letter, number) for number, letter in enumerate("abcd"))


class Bench(ScriptBench):
    def __init__(self, server, rules=RULES):
        super().__init__(server, rules)

    def look(self):
        """Return how long the burst may last yet [s], and the task and number of its newest."""
        vote = self.ask(look_request(self.rules, NAME))
        assert vote.kind is VoteKind.GRANTED
        assert self.is_of_now(vote.node_now)
        return vote.ttl, vote.value.decode(), vote.fence

    def call(self, call, *, begins=False, longest=LONGEST, kept=RETENTION):
        """Return whether the call is the newest now."""
        how = {"begins": begins, "kept": kept}
        vote = self.ask(call_request(self.rules, NAME, call, f"id-{call.id[0]}", longest, **how))
        return vote.kind is VoteKind.GRANTED

    def claim(self, call):
        vote = self.ask(claim_request(self.rules, NAME, call, EXECUTION))
        return (vote.kind, vote.value.decode()) if vote.kind is SUPERSEDED else vote.kind

    @property
    def key(self):
        return burst_key(self.rules, NAME)

    @property
    def stored(self):
        return {k.decode(): v.decode() for k, v in self.client.hgetall(self.key).items()}

    def pttl(self):
        return self.client.pttl(self.key)

    def age(self, seconds=LONGEST + 1):
        """Have the burst begun so much earlier."""
        self.client.hincrby(self.key, "deadline", -int(seconds * 1000))


# -- look ------------------------------------------------------------------------------------


def test_where_nobody_has_called_no_burst_is_open(bench):
    with bench.unchanged():
        assert bench.look() == (0.0, "", 0)


def test_an_open_burst_says_how_long_it_may_last_and_who_is_newest(bench):
    bench.call(A)
    with bench.unchanged():
        left, newest, number = bench.look()
    assert (newest, number) == ("id-a", A.number)
    assert bench.near(left * 1000, LONGEST)


def test_a_burst_that_has_lasted_long_enough_is_over(bench):
    """Its number is still told: whoever begins the next one has to be newer."""
    bench.call(A)
    bench.age()
    assert bench.look() == (0.0, "", A.number)


def test_a_burst_whose_newest_call_was_claimed_is_over(bench):
    bench.call(A)
    bench.claim(A)
    assert bench.look() == (0.0, "", A.number)


# -- call ------------------------------------------------------------------------------------


def test_a_first_call_begins_a_burst(bench):
    assert bench.call(A)
    stored = bench.stored
    assert bench.near(int(stored.pop("deadline")) - bench.now_ms(), LONGEST)
    assert stored == {"number": str(A.number), "newest": A.id, "task": "id-a", "last": ""}
    assert bench.near(bench.pttl(), RETENTION)


@pytest.mark.parametrize("begins", [False, True])
def test_a_newer_call_prolongs_no_burst(bench, begins):
    """Also one that has met none, because it looked when the first one had not been noted."""
    bench.call(A, begins=True)
    deadline = bench.stored["deadline"]
    assert bench.call(B, begins=begins)
    stored = bench.stored
    assert stored.pop("deadline") == deadline
    assert stored == {"number": str(B.number), "newest": B.id, "task": "id-b", "last": ""}


@pytest.mark.parametrize("number", [0, -1])
def test_an_older_call_that_comes_late_changes_nothing(bench, number):
    bench.call(A)
    with bench.unchanged():
        assert not bench.call(a_call("b", number), kept=60.0)
    assert bench.near(bench.pttl(), RETENTION)


def test_an_older_call_opens_no_burst_again(bench):
    bench.call(B)
    bench.claim(B)
    with bench.unchanged():
        assert not bench.call(A)


def test_after_a_burst_that_is_over_the_next_call_begins_another(bench):
    """The last call of the one before runs, though it is the newest no more."""
    bench.call(A)
    bench.call(B)
    bench.age()
    assert bench.call(C, begins=True)
    stored = bench.stored
    assert (stored["newest"], stored["last"]) == (C.id, B.id)
    assert bench.near(int(stored["deadline"]) - bench.now_ms(), LONGEST)
    assert [bench.claim(one) for one in (A, B, C)] == [(SUPERSEDED, "id-c"), RUNS, RUNS]


def test_a_call_that_joined_a_burst_belongs_to_it_though_it_is_noted_late(bench):
    """It comes when the burst ends, and the call before it need not."""
    bench.call(A)
    bench.age()
    bench.call(B, begins=False)
    assert bench.stored["last"] == ""
    assert [bench.claim(one) for one in (A, B)] == [(SUPERSEDED, "id-b"), RUNS]


def test_after_a_claim_the_next_call_begins_a_burst_whatever_it_has_met(bench):
    bench.call(A)
    bench.age(LONGEST / 2)
    bench.claim(A)
    bench.call(B, begins=False)
    assert bench.near(bench.look()[0] * 1000, LONGEST)


def test_a_call_is_kept_for_as_long_as_it_says(bench):
    bench.call(A, kept=60.0)
    assert bench.near(bench.pttl(), 60)


# -- claim -----------------------------------------------------------------------------------


def test_the_newest_runs_and_keeps_running(bench):
    """A message that is delivered again, as its worker was killed, is not its own successor."""
    bench.call(A)
    assert bench.claim(A) is RUNS
    assert bench.stored["newest"] == ""
    with bench.unchanged():
        assert bench.claim(A) is RUNS


def test_one_that_was_claimed_runs_beside_a_newer_burst(bench):
    bench.call(A)
    bench.claim(A)
    bench.call(B)
    assert [bench.claim(A), bench.look()[1]] == [RUNS, "id-b"]
    bench.claim(B)
    assert bench.claim(A) is RUNS


def test_an_older_one_is_superseded_by_the_newest(bench):
    bench.call(A)
    bench.call(B)
    with bench.unchanged():
        assert bench.claim(A) == (SUPERSEDED, "id-b")


def test_an_older_one_is_superseded_though_the_newest_was_claimed(bench):
    """It may have waited in a worker that was busy; its arguments are older than what has run."""
    bench.call(A)
    bench.call(B)
    bench.claim(B)
    with bench.unchanged():
        assert bench.claim(A) == (SUPERSEDED, "id-b")


def test_a_superseded_one_ends_no_burst(bench):
    bench.call(A)
    bench.call(B)
    bench.claim(A)
    assert bench.look()[1] == "id-b"


def test_a_newer_one_that_the_node_was_not_told_of_runs(bench):
    """It knows of older ones alone; these are not superseded by it."""
    bench.call(A)
    with bench.unchanged():
        assert bench.claim(B) is RUNS


def test_where_all_is_forgotten_everything_runs(bench):
    with bench.unchanged():
        assert bench.claim(A) is RUNS


def test_a_copy_of_what_has_finished_is_not_superseded(bench):
    """It goes on to the lock, where the marker ends it: its result is stored, and stays."""
    bench.call(A)
    bench.call(B)
    bench.client.set(marker_key(RULES.prefix, EXECUTION), "done", px=100_000)
    assert bench.claim(A) is RUNS


def test_a_node_remembers_the_last_of_the_latest_bursts(bench):
    calls = [Call(fresh_publish_id(), BIG + number) for number in range(MOST_LAST + 2)]
    for call in calls:
        bench.call(call)
        bench.claim(call)
    superseded = SUPERSEDED, bench.stored["task"]
    assert len(bench.stored["last"]) == MOST_LAST * ID_LENGTH
    assert [bench.claim(one) for one in calls[:3]] == [superseded] * 2 + [RUNS]


@pytest.mark.parametrize("call", [Call("", 1), Call("f" * 36, 1), Call("a", 2**53)])
def test_a_forged_claim_changes_nothing(bench, call):
    bench.call(A)
    bench.call(B)
    with bench.unchanged():
        bench.claim(call)


@pytest.mark.parametrize("number", [b"", b"x", b"1e400"])
def test_a_record_that_others_have_written_harms_nobody(bench, number):
    bench.client.hset(bench.key, mapping={"number": number, "deadline": b"x", "newest": b"x"})
    bench.client.pexpire(bench.key, 100_000)
    assert bench.claim(A) in (RUNS, (SUPERSEDED, ""))


# -- each rule is needed -------------------------------------------------------------------

#: Script, what it says no more, what it says instead, and the test that fails then.
MUTANTS = [
    (LOOK, "(newest or '') == '' or left <= 0", "left <= 0",
        test_a_burst_whose_newest_call_was_claimed_is_over),
    (LOOK, "(newest or '') == '' or left <= 0", "(newest or '') == ''",
        test_a_burst_that_has_lasted_long_enough_is_over),
    (LOOK, "number or '0'", "'0'", test_a_burst_that_has_lasted_long_enough_is_over),
    (LOOK, "- now\n", "\n", test_an_open_burst_says_how_long_it_may_last_and_who_is_newest),
    (CALL, "if tonumber(ARGV[3]) <= (tonumber(number) or 0) then return {0, 0} end", "",
        test_an_older_call_opens_no_burst_again),
    (CALL, "<= (tonumber(number)", "< (tonumber(number)",
        lambda bench: test_an_older_call_that_comes_late_changes_nothing(bench, 0)),
    (CALL, "ARGV[5] == '1' and now >= deadline", "ARGV[5] == '1'",
        lambda bench: test_a_newer_call_prolongs_no_burst(bench, begins=True)),
    (CALL, "ARGV[5] == '1' and now >= deadline", "now >= deadline",
        test_a_call_that_joined_a_burst_belongs_to_it_though_it_is_noted_late),
    (CALL, "ARGV[5] == '1' and now >= deadline", "false",
        test_after_a_burst_that_is_over_the_next_call_begins_another),
    (CALL, "if (newest or '') == '' then is_over = true\nelseif", "if",
        test_after_a_claim_the_next_call_begins_a_burst_whatever_it_has_met),
    (CALL, "then last = with(newest, last) end", "then last = last end",
        test_after_a_burst_that_is_over_the_next_call_begins_another),
    (CALL, "then deadline = now +", "then deadline =", test_a_first_call_begins_a_burst),
    (CALL, "'task', ARGV[2],", "", test_an_open_burst_says_how_long_it_may_last_and_who_is_newest),
    (CALL, "redis.call('PEXPIRE', KEYS[1], ARGV[6])", "", test_a_first_call_begins_a_burst),
    (CLAIM, "'newest', '', 'last'", "'last'", test_a_burst_whose_newest_call_was_claimed_is_over),
    (CLAIM, "'newest', '', 'last', with(newest, last)", "'newest', ''",
        test_one_that_was_claimed_runs_beside_a_newer_burst),
    (CLAIM, "with(newest, last)", "newest", test_a_node_remembers_the_last_of_the_latest_bursts),
    (CLAIM, "string.sub(id .. (last or ''), 1, 1024)", "(id .. (last or ''))",
        test_a_node_remembers_the_last_of_the_latest_bursts),
    (CLAIM, "(tonumber(number) or 0) > tonumber(ARGV[2])", "true",
        test_a_newer_one_that_the_node_was_not_told_of_runs),
    (CLAIM, "(tonumber(number) or 0) > tonumber(ARGV[2])", "false",
        test_an_older_one_is_superseded_by_the_newest),
    (CLAIM, "\n  and not string.find(last or '', ARGV[1], 1, true)", "",
        test_one_that_was_claimed_runs_beside_a_newer_burst),
    (CLAIM, "\n  and redis.call('EXISTS', KEYS[2]) == 0", "",
        test_a_copy_of_what_has_finished_is_not_superseded),
    (CLAIM, "if newest == ARGV[1] then", "if newest then",
        test_an_older_one_is_superseded_by_the_newest),
    (CLAIM, "return {2, now, task or ''}", "return {2, now, ''}",
        test_an_older_one_is_superseded_by_the_newest),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m[1][:30]!r} {m[2][:20]!r}" for m in MUTANTS])
def test_without_a_rule_its_test_fails(bench, mutant):
    script, text, without, test = mutant
    with rewritten(script, text, without):
        bench.client.script_load(script.source)
        with pytest.raises((AssertionError, redis.ResponseError)):
            test(bench)
