"""The queued marker step by step, what a majority says of it, and a small world of triggers."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.errors import LockTaken, QuorumUnavailable
from celery_redlock.events import LockUnavailable
from celery_redlock.lock.algorithm.effects import Ask, Send, Sleep
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.driver import Driver
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import fence_proposal, quorum
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.records import OWNER_LENGTH, TOKEN_LENGTH, Keys
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.votes import Vote, VoteKind, agreed
from celery_redlock.task.messages.reservation import NotItsTurn, Reservation
from celery_redlock.unique.requests import AS_IT_IS, OVER, RETENTION, Start, Trigger
from celery_redlock.unique.reservations import Reservations
from celery_redlock.unique.reserving import (
    SPLIT_TRIES,
    VERSION_TRIES,
    Duplicate,
    NotStarted,
    Reserved,
    Started,
    answer_of,
    has_met_others,
    holds,
    is_decided,
    outcome,
    reserve,
    without_ours,
)
from celery_redlock.unique.scripts import END, RESERVE, START, ReservationVote
from support.fakes import (
    SILENT,
    Drive,
    granted,
    lease_of,
    quarantined,
    refused,
    repaired,
    token_of,
    unreachable,
)
from support.lua import ScriptNode, rewritten
from support.options import OPTIONS

NOW = fence_proposal(1_700_000_000_000, 0)


def who(holder):
    return token_of(holder).encode() + b'{"task_id":"id-%b"}' % holder.encode()


def free():
    return Vote(VoteKind.GRANTED)


def follows(holder="y", ttl=5.0):
    return Vote(ReservationVote.NEXT, 0, ttl, who(holder))


def merged(holder="y", version=NOW, merged=1, ttl=5.0):
    return Vote(ReservationVote.MERGED, version, ttl, who(holder), amount=merged)


def passed():
    """Return the answer to a start where the marker is not, or somebody else's."""
    return Vote(ReservationVote.PASSED)


#: Where the arguments of `RESERVE` have the version.
VERSION = 6


class Triggering(Drive):
    """One reserve, taken a step at a time; `placed` is what it ended with."""

    def __init__(self, nodes=3, arguments=b"[[1],{}]", info=None, lasts=None, **trigger):
        super().__init__(nodes)
        self.steps.close()  # of the acquire that a Drive begins
        self.tokens, self.told = 0, []
        self.client.new_token = self._counted
        wanted = Trigger("k", 60.0, info or {"task_id": "id-x"}, arguments=arguments, **trigger)
        ends = None if lasts is None else self.clock() + lasts
        self.steps = reserve(self.client, wanted, ends)
        self._advance(lambda: next(self.steps))

    def _counted(self):
        self.tokens += 1
        return f"{self.tokens:040d}"

    @property
    def placed(self):
        return self.lease


def proposed(drive):
    return int(drive.step.request.arguments[VERSION])


def is_end(step, token):
    return (
        isinstance(step, Send)
        and step.request.script is END
        and step.request.arguments[:2] == (token.encode(), b"over")
    )


# -- the question ----------------------------------------------------------------------


def test_the_question_carries_what_a_node_must_know():
    drive = Triggering(info={"task": "shop.bill"}, window=90.0)
    asked = drive.step.request.arguments
    token, info, life, window, started, arguments, version, keep, quarantine = asked
    assert drive.step.request.script is RESERVE
    assert (len(token), life, window, started) == (40, b"60000", b"90000", b"")
    assert (arguments, int(version)) == (b"[[1],{}]", NOW)
    assert int(keep) == RETENTION * 1000
    assert int(quarantine) > 0
    ours = {"host": socket.gethostname(), "pid": os.getpid(), "since": 1.7e9}
    assert json.loads(info) == {"task": "shop.bill", **ours}


def test_the_question_says_that_a_message_may_expire():
    """Then nothing is ever merged into its marker, as if it had been started."""
    assert Triggering(expires=True).step.request.arguments[4] == b"-"


def test_who_triggers_again_is_another_owner():
    assert Triggering().token[:OWNER_LENGTH] != Triggering().token[:OWNER_LENGTH]


# -- decided in one round --------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_a_majority_that_grants_places_the_marker(nodes):
    drive = Triggering(nodes)
    token = drive.token
    assert drive.vote(*[free()] * quorum(nodes)).placed == Reserved(token)
    assert drive.told == []


def test_a_majority_behind_one_that_runs_makes_it_next():
    drive = Triggering()
    token = drive.token
    drive.vote(follows("y", 4.0), follows("y", 5.0))
    assert drive.placed == Reserved(
        token, {"task_id": "id-y", "token": token_of("y")[:8], "ttl": 5}
    )
    assert drive.told == []


def test_a_majority_that_merged_is_a_duplicate():
    drive = Triggering().vote(merged("y", NOW, 2), merged("y", NOW, 3)).go_on()
    assert drive.placed == Duplicate(
        {"task_id": "id-y", "token": token_of("y")[:8], "ttl": 5.0},
        merged=3,
        votes={"node-0": "merged", "node-1": "merged", "node-2": "not waited for"},
    )


def test_a_majority_that_refuses_is_a_duplicate():
    """Where nothing is merged the count is 0, and the holder stands for the longest told."""
    drive = Triggering(arguments=b"").vote(refused("y", 4.0), refused("y", 6.0)).go_on()
    assert drive.placed == Duplicate(
        {"pid": 7, "token": token_of("y")[:8], "ttl": 6.0},
        votes={
            "node-0": "refused (4.0 s left)",
            "node-1": "refused (6.0 s left)",
            "node-2": "not waited for",
        },
    )


def test_a_round_is_decided_by_a_majority_that_says_the_same():
    decided = Triggering().is_decided
    assert decided(free(), free(), SILENT)
    assert decided(refused("y"), SILENT, refused("y"))
    assert not decided(free(), SILENT, SILENT)
    assert not decided(free(), follows(), SILENT)
    assert not decided(refused("y"), refused("z"), SILENT)
    assert not decided(merged("y"), refused("y"), SILENT)
    assert not decided(quarantined(), quarantined(), quarantined())


def test_what_a_minority_stored_of_a_duplicate_is_ended():
    """A grant on one node, and what a node that did not answer may have stored, is taken away."""
    drive = Triggering(5)
    token = drive.token
    drive.vote(refused("y"), free(), refused("y"), refused("y"))
    assert is_end(drive.step, token)
    assert drive.step.skip == {0, 2, 3}
    assert isinstance(drive.go_on().placed, Duplicate)


def test_what_certainly_stored_nothing_is_told_nothing():
    for ballot in ([refused("y")] * 3, [merged("y")] * 3, [refused(), refused(), quarantined()]):
        drive = Triggering().vote(*ballot)
        assert isinstance(drive.placed, Duplicate)
        assert drive.told == []


def test_a_minority_that_says_otherwise_does_not_end_a_placing():
    """What the others store stays where it is: the message carries the token."""
    drive = Triggering(5).vote(free(), follows(), free(), merged("z"), free())
    assert isinstance(drive.placed, Reserved)
    assert drive.placed.before == {}
    assert drive.told == []


# -- versions --------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [1, 4096])
def test_versions_that_agree_on_what_was_not_proposed_are_none(ahead):
    """A node that answers with another number than the proposed one has stored nothing."""
    drive = Triggering().vote(*3 * [merged("y", NOW + ahead, 4)])
    assert drive.is_asking
    assert drive.tokens == 1
    assert proposed(drive) == NOW + ahead + 1
    version = proposed(drive)
    drive.vote(*3 * [merged("y", version, 5)])
    assert drive.placed.merged == 5
    assert drive.told == []


def test_a_majority_that_stores_the_proposed_version_suffices():
    """A node that lags behind, or is ahead, does not keep a trigger from being accepted."""
    for odd in (NOW + 1, NOW + 900):
        drive = Triggering().vote(merged("y", odd), merged("y", NOW), merged("y", NOW, 2))
        assert drive.placed.merged == 2
        assert drive.told == []


def test_versions_that_differ_are_agreed_upon():
    drive = Triggering()
    first = drive.step.request
    drive.vote(merged("y", 5), merged("y", 9))
    second = drive.step.request
    assert second.script is RESERVE
    assert proposed(drive) == 10
    assert second.arguments[:VERSION] == first.arguments[:VERSION]
    assert second.arguments[VERSION + 1 :] == first.arguments[VERSION + 1 :]
    assert second.keys == first.keys
    drive.vote(merged("y", 10, 2), merged("y", 10, 2))
    assert drive.go_on().placed.merged == 2


def test_a_version_that_others_overtook_is_raised_again():
    drive = Triggering().vote(merged("y", 5), merged("y", 9)).vote(merged("y", 10), merged("y", 14))
    assert proposed(drive) == 15
    assert drive.vote(merged("y", 15), merged("y", 15)).go_on().placed.merged == 1


def test_agreeing_on_a_version_ends():
    drive = Triggering()
    rounds = 0
    while drive.is_asking and drive.tokens == 1:
        drive.vote(merged("y", 10 * rounds + 1), merged("y", 10 * rounds + 2))
        rounds += 1
    assert rounds == VERSION_TRIES + 1


def test_a_merge_without_an_agreed_version_is_not_accepted():
    """Stored under several versions, it may lose to what came before: it is tried again."""
    drive = Triggering()
    for number in range(VERSION_TRIES + 1):
        drive.vote(merged("y", 10 * number + 1), merged("y", 10 * number + 2))
    drive.go_on_to_ask()
    assert drive.placed is None
    assert drive.tokens == 2


def test_a_marker_that_lapses_meanwhile_can_be_had():
    drive = Triggering()
    token = drive.token
    drive.vote(merged("y", 5), merged("y", 9)).vote(free(), free())
    assert drive.placed == Reserved(token)
    assert drive.told == []


@pytest.mark.parametrize("second", [free(), follows("y"), unreachable(), SILENT])
def test_what_a_round_for_the_version_may_have_stored_is_ended(second):
    drive = Triggering()
    token = drive.token
    drive.vote(merged("y", 5), merged("y", 9), merged("y", 5))
    drive.vote(second, merged("y", 10), merged("y", 10))
    assert is_end(drive.step, token)
    assert drive.step.skip == {1, 2}
    assert drive.go_on().placed.merged == 1


def test_versions_without_a_majority_are_no_acceptance():
    drive = Triggering().vote(merged("y", 5), merged("y", 9), merged("y", 9))
    drive.vote(merged("y", 10), unreachable(), unreachable())
    drive.go_on_to_ask()
    assert drive.placed is None
    assert drive.tokens == 2 or isinstance(drive.error, QuorumUnavailable)


# -- splits ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ballot", "spared"),
    [
        ((free(), refused("y"), refused("z")), {1, 2}),
        ((free(), follows(), merged("y")), {2}),
        ((free(), refused("y"), SILENT), {1}),
        ((free(), merged("y"), unreachable()), {1}),
        ((merged("y"), merged("z"), quarantined()), None),
        ((follows(), merged("y"), quarantined()), {1, 2}),
        ((refused("x"), refused("y"), refused("z")), None),
    ],
)
def test_a_split_is_tried_again_with_a_fresh_token(ballot, spared):
    drive = Triggering()
    first = drive.token
    drive.vote(*ballot)
    if spared is not None:
        assert is_end(drive.step, first)
        assert drive.step.skip == spared
        drive.go_on()
    assert drive.step == Sleep(pytest.approx(0.002))
    drive.go_on()
    assert drive.is_asking
    assert drive.token != first
    assert drive.token[:OWNER_LENGTH] == first[:OWNER_LENGTH]
    assert drive.step.request.script is RESERVE
    assert len(drive.told) == (spared is not None)


def test_a_split_that_resolves_is_placed_under_its_last_token():
    drive = Triggering().vote(free(), refused("y"), refused("z")).go_on_to_ask()
    token = drive.token
    assert drive.vote(free(), free()).placed == Reserved(token)


def test_every_attempt_has_a_later_version():
    """The proposal is made anew, so that a trigger that waited is not the older one."""
    drive = Triggering()
    first = proposed(drive)
    drive.vote(merged("y"), merged("z"), free())
    drive.wall.advance(1.0)
    drive.go_on_to_ask()
    assert proposed(drive) == first + (1000 << 12)


def test_no_attempt_proposes_what_an_earlier_one_did():
    drive = Triggering()
    seen = [proposed(drive)]
    for tick in (0.0, -60.0, 0.0):
        drive.vote(merged("y"), merged("z"), free())
        drive.wall.advance(tick)
        drive.go_on_to_ask()
        seen.append(proposed(drive))
    assert seen == [NOW, NOW + 1, NOW + 2, NOW + 3]


def test_an_attempt_after_others_overtook_proposes_above_them():
    """What was told before counts on, so that the clock need not catch up first."""
    drive = Triggering()
    for _ in range(VERSION_TRIES + 1):
        drive.vote(merged("y", proposed(drive) + 10), merged("y", proposed(drive) + 20))
    drive.go_on_to_ask()
    assert drive.tokens == 2
    assert proposed(drive) == NOW + (VERSION_TRIES + 1) * 21 + 1


def test_a_split_is_tried_again_until_the_time_is_up():
    drive = Triggering(lasts=0.02)
    begun = drive.clock()
    while drive.is_asking:
        drive.vote(free(), refused("y"), refused("z")).go_on_to_ask()
    assert 1 < drive.tokens < SPLIT_TRIES
    assert drive.clock() < begun + 0.02
    assert isinstance(drive.error, QuorumUnavailable)


def test_a_lasting_split_is_unavailable_in_the_end():
    drive = Triggering()
    pauses, tokens = [], []
    while drive.is_asking:
        tokens.append(drive.token)
        drive.vote(free(), refused("y"), refused("z"))
        assert is_end(drive.step, tokens[-1])
        drive.go_on()
        assert isinstance(drive.step, Sleep)
        pauses.append(drive.step.seconds)
        drive.go_on()
    assert len(set(tokens)) == len(drive.told) == SPLIT_TRIES
    assert pauses == sorted(pauses)
    assert max(pauses) <= 0.06
    assert isinstance(drive.error, QuorumUnavailable)
    assert drive.error.votes["node-0"] == "granted"
    assert drive.error.votes["node-1"].startswith("refused")


# -- unavailable -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ballot", "spared", "retry_after"),
    [
        ((unreachable(),) * 3, set(), None),
        ((SILENT,) * 3, set(), None),
        ((free(), unreachable()), set(), None),
        ((refused(), unreachable()), {0}, None),
        ((quarantined(4.0), quarantined(5.0), free()), {0, 1}, 4.0),
        ((quarantined(4.0), quarantined(5.0), refused()), {0, 1, 2}, 4.0),
        ((quarantined(4.0), quarantined(5.0), merged()), {0, 1, 2}, 4.0),
        ((quarantined(4.0), quarantined(5.0), follows()), {0, 1}, 4.0),
        ((quarantined(4.0), quarantined(5.0), unreachable()), {0, 1}, 5.0),
    ],
)
def test_too_few_answers_are_unavailable(ballot, spared, retry_after):
    drive = Triggering()
    token = drive.token
    drive.vote(*ballot)
    if spared != {0, 1, 2}:
        assert is_end(drive.step, token)
        assert drive.step.skip == spared
        drive.go_on()
    assert isinstance(drive.error, QuorumUnavailable)
    assert set(drive.error.votes) == {"node-0", "node-1", "node-2"}
    assert drive.error.name == "k"
    assert drive.error.retry_after == retry_after
    assert drive.tokens == 1


# -- interruptions ---------------------------------------------------------------------


class Stop(BaseException):
    """What a soft time limit, Ctrl-C or a killed greenlet look like."""


def asking():
    return Triggering()


def asking_again():
    return Triggering().vote(free(), refused("y"), refused("z")).go_on_to_ask()


def agreeing():
    return Triggering().vote(merged("y", 5), merged("y", 9))


def telling():
    return Triggering().vote(free(), refused("y"), refused("z"))


def telling_of_a_duplicate():
    return Triggering().vote(refused("y"), refused("y"), free())


@pytest.mark.parametrize(
    "somewhere", [asking, asking_again, agreeing, telling, telling_of_a_duplicate]
)
@pytest.mark.parametrize("error", [Stop(), KeyboardInterrupt(), ValueError(), SystemExit(1)])
def test_an_interrupted_attempt_is_ended_everywhere(somewhere, error):
    drive = somewhere()
    token = drive.token
    drive.interrupt(error)
    assert is_end(drive.step, token)
    assert drive.step.skip == frozenset()
    assert drive.go_on().error is error


def test_an_interrupted_pause_leaves_nothing_to_end():
    """The attempt before it was ended already."""
    drive, error = telling().go_on(), Stop()
    assert isinstance(drive.step, Sleep)
    assert drive.interrupt(error).error is error
    assert len(drive.told) == 1


def test_a_second_interruption_ends_it():
    drive, error = asking().interrupt(Stop()), Stop()
    assert drive.interrupt(error).error is error


@pytest.mark.parametrize("somewhere", [asking, agreeing, telling])
def test_an_enqueue_that_is_dropped_ends_quietly(somewhere):
    """Without a driver nothing can be sent any more, and nothing is pretended."""
    drive = somewhere()
    told = len(drive.told)
    drive.steps.close()  # raises RuntimeError if it were to say anything
    assert len(drive.told) == told


# -- what a majority says --------------------------------------------------------------

KINDS = [
    free(),
    follows("y"),
    follows("z"),
    *(merged(holder, version) for holder in "yz" for version in (1, 2)),
    *(refused(holder) for holder in "yz"),
    quarantined(),
    unreachable(),
    passed(),
    repaired(),
    SILENT,
]
ballots = st.sampled_from([1, 3, 5]).flatmap(
    lambda n: st.lists(st.sampled_from(KINDS), min_size=n, max_size=n)
)


@given(ballots)
def test_a_verdict_is_a_majority_that_says_the_same(ballot):
    votes = agreed(ballot, answer_of)
    if votes:
        assert len(votes) >= quorum(len(ballot))
        assert len({answer_of(vote) for vote in votes}) == 1
        assert answer_of(votes[0]) is not None
        assert len(votes) == [v and answer_of(v) for v in ballot].count(answer_of(votes[0]))
    else:
        answers = [answer_of(vote) for vote in ballot if vote is not None and answer_of(vote)]
        assert all(answers.count(answer) < quorum(len(ballot)) for answer in answers)
    assert is_decided(ballot) == bool(votes)


@given(ballots, st.data())
def test_a_verdict_does_not_depend_on_the_order_nor_on_what_comes_later(ballot, data):
    answer = {answer_of(vote) for vote in agreed(ballot, answer_of)}
    shuffled = data.draw(st.permutations(ballot))
    assert {answer_of(vote) for vote in agreed(shuffled, answer_of)} == answer
    fewer = [vote if data.draw(st.booleans()) else SILENT for vote in ballot]
    assert {answer_of(vote) for vote in agreed(fewer, answer_of)} in ({}.keys(), answer)


@given(ballots)
def test_whoever_is_placed_or_a_duplicate_is_so_by_a_majority(ballot):
    votes = agreed(ballot, answer_of)
    if not votes:
        return
    placed = outcome(votes, token_of("x"), ballot, [f"node-{i}" for i in range(len(ballot))])
    if votes[0].kind in (VoteKind.GRANTED, ReservationVote.NEXT):
        assert placed.token == token_of("x")
        assert bool(placed.before) == (votes[0].kind is ReservationVote.NEXT)
    else:
        assert placed.holder["token"] == votes[0].value[:8].decode()
        assert bool(placed.merged) == (votes[0].kind is ReservationVote.MERGED)


@given(ballots, st.integers(1, 2))
def test_a_merge_holds_where_a_majority_stores_the_version(ballot, version):
    votes = agreed(ballot, answer_of)
    stored = [v for v in votes if v.kind is ReservationVote.MERGED and v.fence == version]
    is_merged = bool(votes) and votes[0].kind is ReservationVote.MERGED
    assert holds(votes, version, ballot) == (not is_merged or len(stored) >= quorum(len(ballot)))


@given(ballots)
def test_only_nodes_that_answered_no_are_spared(ballot):
    spared = without_ours(ballot)
    certain = {VoteKind.REFUSED, ReservationVote.MERGED, VoteKind.QUARANTINED}
    assert spared == {i for i, vote in enumerate(ballot) if vote and vote.kind in certain}


@given(ballots)
def test_others_are_met_where_a_majority_answered(ballot):
    silent = [vote for vote in ballot if vote is None or answer_of(vote) is None]
    assert has_met_others(ballot) == (len(ballot) - len(silent) >= quorum(len(ballot)))


# -- the driver ------------------------------------------------------------------------


class ScriptedFanout:
    labels = ("node-0", "node-1", "node-2")

    def __init__(self, *answers):
        self.answers = deque(answers)
        self.asked, self.told = [], []
        self.trouble = deque()

    def ask(self, calls, ends):
        assert ends is None
        (call,) = calls
        self.asked.append(call.request)
        answer = self.answers.popleft()
        if isinstance(answer, BaseException):
            raise answer
        for position, vote in enumerate(answer):
            if vote is not SILENT:
                call.take(position, vote)
        self.waits = call.is_open

    def tell(self, call, skip):
        if self.trouble:
            raise self.trouble.popleft()
        self.told.append((call.request, skip))


@pytest.fixture
def queued():
    """A function that makes a `Reservations` whose nodes give *answers*, and what it uses."""

    def make(*answers):
        fanout = ScriptedFanout(*answers)
        pauses, events = [], []
        client = Participant(Rules(), fanout.labels, chance=lambda _, longest: longest)
        made = Reservations(client, Driver(fanout, pauses.append), events.append)
        made.fanout, made.pauses, made.events = fanout, pauses, events
        return made

    return make


TRIGGER = Trigger("k", 60.0, {"task_id": "id-x"}, arguments=b"[[1],{}]")


def test_a_driver_asks_tells_and_pauses(queued):
    made = queued([free(), refused("y"), refused("z")], [free()] * 3)
    placed = made.reserve(TRIGGER)
    first, second = (request.arguments[0].decode() for request in made.fanout.asked)
    assert placed == Reserved(second)
    ((end, skip),) = made.fanout.told
    assert end.arguments[0] == first.encode()
    assert skip == {1, 2}
    assert made.pauses == [pytest.approx(0.002)]
    assert made.events == []


@pytest.mark.parametrize("error", [Stop(), KeyboardInterrupt(), SystemExit(1)])
def test_an_interruption_is_the_algorithms_to_clean_up_after(queued, error):
    """It is raised where the algorithm stands, which ends its attempt everywhere."""
    made = queued(error)
    with pytest.raises(type(error)) as caught:
        made.reserve(TRIGGER)
    assert caught.value is error
    ((end, skip),) = made.fanout.told
    assert end.script is END
    assert end.arguments[0] == made.fanout.asked[0].arguments[0]
    assert skip == frozenset()


def test_an_interrupted_word_is_said_all_the_same(queued):
    made = queued([refused("y"), refused("z"), free()])
    made.fanout.trouble.append(Stop())
    with pytest.raises(Stop):
        made.reserve(TRIGGER)
    spared = [skip for request, skip in made.fanout.told if request.script is END]
    assert spared == [{0, 1}, frozenset()]


def test_a_driver_that_is_hit_twice_gives_up(queued):
    made = queued(Stop())
    made.fanout.trouble.extend([KeyboardInterrupt(), KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        made.reserve(TRIGGER)
    assert made.fanout.told == []


def test_an_error_of_the_algorithm_comes_out_and_is_told_to_observers(queued):
    made = queued([unreachable()] * 3)
    with pytest.raises(QuorumUnavailable) as unavailable:
        made.reserve(TRIGGER)
    (event,) = made.events
    assert isinstance(event, LockUnavailable)
    assert (event.name, event.votes) == ("k", unavailable.value.votes)


# -- start and end ---------------------------------------------------------------------


def handed(version=0, arguments=b"", merged=0):
    return Vote(VoteKind.GRANTED, version, value=arguments, amount=merged)


def before(holder="y", ttl=5.0):
    return {"pid": 7, "token": token_of(holder)[:8], "ttl": ttl}


def start(made, alone=0.0, *, life=30.0, wait=True):
    begun = Start({"task_id": "id-x"}, token_of("l"), "x/0/0", alone, life)
    return made.start("k", token_of("x"), begun, wait=wait)


@pytest.mark.parametrize(
    ("ballot", "started"),
    [
        ((handed(), handed(), handed()), Started()),
        ((handed(5, b"old", 1), handed(9, b"new", 2), handed(5, b"old", 1)), Started(b"new", 2)),
        ((handed(5, b"old", 3), handed(9, b"new", 1), unreachable()), Started(b"new", 3)),
        ((handed(), handed(9, b"new", 1), refused("y")), Started(b"new", 1)),
        ((handed(), handed(9, b"new", 1), passed()), Started(b"new", 1)),
        ((handed(), passed(), unreachable()), Started()),
        ((passed(), passed(), refused("y")), Started()),
        ((passed(), passed(), passed()), Started()),
        ((refused("y", 3.0), refused("y", 4.0), unreachable()), before("y", 4.0)),
        ((refused("y", 3.0), refused("y", 4.0), handed(9, b"new")), before("y", 4.0)),
        ((refused("y", 3.0), handed(), unreachable()), before("y", 3.0)),
        ((refused("y", 0.0), refused("y", 0.0), refused("y", 0.0)), before("y", 0.0)),
        ((refused("y"), passed(), unreachable()), before("y")),
        ((refused("y"), unreachable(), unreachable()), None),
        ((passed(), unreachable(), unreachable()), None),
        ((refused("y"), passed(), handed(9, b"new", 1)), Started(b"new", 1)),
        ((handed(9, b"", 1), handed(9, b"", 1), handed(9, b"", 1)), Started(b"", 1)),
        ((handed(9, b"new"), unreachable(), unreachable()), None),
        ((unreachable(), unreachable(), unreachable()), None),
        ((quarantined(), quarantined(), handed()), None),
    ],
)
def test_what_a_start_is_told(queued, ballot, started):
    told = start(queued(ballot))
    if isinstance(started, Started):
        assert told == started
    else:
        assert (type(told), told.holder) == (NotStarted, started or {})
        assert len(told.votes) == len(ballot)


@pytest.mark.parametrize(
    ("ballot", "error", "votes"),
    [
        ((refused("y", 3.0),) * 3, LockTaken, ["refused (3.0 s left)"] * 3),
        (
            (passed(), *[unreachable()] * 2),
            QuorumUnavailable,
            ["passed over", *[unreachable().in_words()] * 2],
        ),
    ],
)
def test_a_task_whose_turn_it_is_not_is_told_why(queued, ballot, error, votes):
    """It fails with that where no copy of it can be published; nobody is named whom none named."""
    made, task = queued(ballot), Reservation("k", token_of("x"), "started")
    held, info = HeldLock(lease_of(time.monotonic, "k")), {"execution": "x/0/0"}
    options = replace(OPTIONS, on_duplicate="rerun")
    with pytest.raises(NotItsTurn) as raised:
        task.start(made, options, held, info, comes_back=False)
    why = raised.value.why
    assert (type(why), why.name) == (error, "k")
    assert list(why.votes.values()) == votes


@pytest.mark.parametrize("life", [0.0, 60.0, AS_IT_IS, OVER])
def test_a_start_never_drops_what_a_node_handed_over(queued, life):
    """
    What was accepted by a majority may be left on one node of those that are up.

    Two of three store a trigger, one of them fails, and the third was not there when the
    marker was placed: it has never heard of it, and passes. The node that said yes to 'over'
    has given its copy away, so nobody could ever tell again.
    """
    made = queued([handed(9, b"new", 1), passed(), unreachable()])
    assert start(made, life) == Started(b"new", 1)


@pytest.mark.parametrize("missed", [0, 1, 2])
def test_a_later_execution_is_not_given_what_one_node_takes_it_for(queued, missed):
    """
    A node that missed the first start takes a retry for it; the others know better.

    What it hands over may even be newer: stored there alone, for a trigger that was placed.
    """
    for version in (9, 12):
        ballot = [handed(9, b"", 1)] * 3
        ballot[missed] = handed(version, b"new", 1)
        assert start(queued(ballot)) == Started(b"", 1)


def test_a_start_waits_for_every_answer(queued):
    """After a restart one node of the majority that knows may know nothing."""
    made = queued([handed(), handed(), handed(9, b"new", 1)])
    assert start(made) == Started(b"new", 1)
    (request,) = made.fanout.asked
    assert request.script is START


def test_a_start_that_merges_nothing_waits_for_nothing(queued):
    """Without arguments to fetch the nodes are only told."""
    made = queued()
    assert start(made, wait=False) == Started()
    ((request, skip),) = made.fanout.told
    assert request.script is START
    assert skip == frozenset()
    assert made.fanout.asked == []


@pytest.mark.parametrize(
    ("alone", "said"),
    [(0.0, b"0"), (1.5, b"1500"), (1e6, b"1000000000"), (AS_IT_IS, b"as it is"), (OVER, b"over")],
)
@pytest.mark.parametrize(("life", "kept"), [(30.0, RETENTION), (1e6, 1e6)])
def test_a_start_says_how_long_the_marker_is_to_stand(queued, alone, said, life, kept):
    """Nothing is '0' and not a millisecond, and a marker is kept as long as any of its task."""
    made = queued()
    start(made, alone, life=life, wait=False)
    token, info, lock, execution, *times = made.fanout.told[0][0].arguments
    assert (token, lock) == (token_of("x").encode(), token_of("l").encode())
    assert (json.loads(info), execution) == ({"task_id": "id-x"}, b"x/0/0")
    assert times == [said, b"%d" % (life * 1000), b"%d" % (kept * 1000)]


@pytest.mark.parametrize("how", ["over", "idle", "unstarted", "wait", "hand", "window", "ran"])
def test_an_end_is_told_to_all_nodes(queued, how):
    made = queued()
    made.end("k", token_of("x"), how, life=2.0)
    ((request, skip),) = made.fanout.told
    assert request.script is END
    assert request.arguments == (token_of("x").encode(), how.encode(), b"2000")
    assert request.keys == (b"redlock:queued:k", b"redlock:next:k", b"redlock:lock:k")
    assert skip == frozenset()


@pytest.mark.parametrize(
    ("ballot", "waits"),
    [
        ((granted(), granted(), SILENT), False),
        ((granted(), refused(), SILENT), False),
        ((refused(), SILENT, refused()), False),
        ((granted(), unreachable(), SILENT), True),
        ((granted(), SILENT, SILENT), True),
    ],
)
def test_an_end_can_wait_for_a_majority(queued, ballot, waits):
    """Those that ended it and those that had nothing to end have both been told."""
    made = queued(ballot)
    made.end("k", token_of("x"), OVER, wait=True)
    (request,) = made.fanout.asked
    assert request.script is END
    assert made.fanout.waits is waits
    assert made.fanout.told == []


# -- a small world of triggers ---------------------------------------------------------

#: How many can wait for a name: the one that is first, if it may expire, and the next one.
PLACES = 2
#: How much happens within one tick of the publishers' clocks.
AT_ONCE = 20


#: The rules of all, and what their clocks show at the beginning. Those of the nodes stand still.
RULES, BEGIN = Rules(), 1.7e9
LOCK = Keys.of(RULES.prefix, "k").lock

#: Mutants: the script, what it says no more, and what it says instead.
FORGETFUL = [(RESERVE, "if version <= m.version then", "if false then")]
GENEROUS = [
    (START, "if mine.started == '' or mine.started == ARGV[4] then", "if mine.started then")
]
TRUSTING = [
    (RESERVE, "if m.started ~= '' then", "if m.started ~= '' and m.started ~= '-' then"),
    (RESERVE, "if current.started == '' then", "if #current.started < 2 then"),
]


@contextmanager
def changed(mutant):
    with ExitStack() as stack:
        for change in mutant:
            stack.enter_context(rewritten(*change))
        yield


@dataclass
class Told:
    """
    One trigger, and what it was told.

    Attributes:
        arguments: Which tell it from the others.
        steps: What it is doing.
        began: When it was made, in steps of its world.
        expires: Whether its message may end unrun.
        ended: When it was told; None while it was not, or if it never learnt what became of it.
        into: Token of the marker that it was merged into.
    """

    arguments: bytes
    steps: object
    began: int
    expires: bool = False
    ended: int | None = None
    into: bytes = b""
    call: object = None
    links: list = field(default_factory=list)


class TriggerWorld:
    """
    Publishers, a worker and three nodes, of which one at a time may be cut off.

    Every message to a node is delivered when chance says so, in the order in which it was
    sent; what is sent to a node that is cut off arrives later. Whoever asks waits for the
    nodes that are up. Markers do not lapse and nodes forget nothing.

    Attributes:
        made: All triggers, by their arguments.
        accepted: Those that were told that they are merged.
        refused: How many were told that nothing is merged, and have to see to themselves.
        retries: How many executions came after the first of their message.
        messages: Placed messages that no worker has taken up yet.
        faults: Laws that were broken, in words.
    """

    SIZE = 3

    def __init__(self, seed, alone=0.0, triggers=12, expiring=0.0):
        self.chance = random.Random(seed)
        self.nodes = [ScriptNode(RULES, lambda: BEGIN) for _ in range(self.SIZE)]
        self.alone, self.expiring = alone, expiring
        self.now = 0
        self.left = triggers
        self.busy, self.accepted, self.faults = [], [], []
        self.made = {}
        self.links = []
        self.messages = deque()
        self.untouched = set()
        self.locks = self.starts = self.retries = self.refused = 0
        self.lossy, self.told_all = set(), False
        self.tokens = (f"{number:040d}" for number in count(1))
        self.worker = self.new_links()
        self.queued = Reservations(self.client(), self, lambda _: None)

    # -- as a driver, for the worker -------------------------------------------------

    labels = ("node-0", "node-1", "node-2")

    def tell(self, request):
        self.send(self.worker, Round(request, self.SIZE, None))

    def ask(self, step):
        call = Round(step.request, self.SIZE, step.decided)
        self.send(self.worker, call)
        while not self.is_over(call):
            self.happen()
        self.told_all = all(vote.kind is VoteKind.GRANTED for vote in call.ballot)
        return call.ballot

    # -- what happens ----------------------------------------------------------------

    def client(self):
        """Return what a client knows: its clock is right, and often the same as another's."""
        return Participant(
            RULES,
            self.labels,
            wall=lambda: BEGIN + self.now // AT_ONCE * 0.001,
            chance=lambda _, longest: longest,
            new_token=lambda: next(self.tokens),
        )

    def new_links(self):
        """Return a client's way to each node: what is sent and has not arrived."""
        links = [deque() for _ in self.nodes]
        self.links.append(links)
        return links

    def send(self, links, call, skip=frozenset()):
        for position, link in enumerate(links):
            if position not in skip:
                link.append(call)

    def is_over(self, call):
        """Return whether who asked goes on: it is decided, or nobody is left to wait for."""
        if all(v is not None or not n.is_up for v, n in zip(call.ballot, self.nodes, strict=True)):
            for position in range(self.SIZE):
                call.take(position, unreachable())
        return not call.is_open

    def happen(self):
        self.now += 1
        roll = self.chance.random()
        if roll < 0.1 and self.left:
            self.trigger()
        elif roll < 0.15:
            self.cut_or_mend()
        else:
            self.deliver()
        for told in list(self.busy):
            if told.call is not None and self.is_over(told.call):
                self.go_on(told, told.call.ballot)

    def cut_or_mend(self):
        down = [node for node in self.nodes if not node.is_up]
        node = down[0] if down else self.chance.choice(self.nodes)
        node.is_up = not node.is_up

    def deliver(self):
        ways = [
            (links[position], position)
            for links in self.links
            for position, node in enumerate(self.nodes)
            if node.is_up and links[position]
        ]
        if ways:
            link, position = self.chance.choice(ways)
            call = link.popleft()
            call.take(position, self.nodes[position].vote(call.request))

    def trigger(self):
        self.left -= 1
        arguments = b"%d" % self.now
        expires = self.chance.random() < self.expiring
        trigger = Trigger("k", 60.0, {}, expires=expires, arguments=arguments)
        steps = reserve(self.client(), trigger)
        told = Told(arguments, steps, self.now, expires, links=self.new_links())
        self.made[arguments] = told
        self.busy.append(told)
        self.go_on(told, None)

    def go_on(self, told, answer):
        ballot, told.call = answer, None
        try:
            step = told.steps.send(answer)
            while not isinstance(step, Ask):
                if isinstance(step, Send):
                    self.send(told.links, Round(step.request, self.SIZE, None), step.skip)
                step = told.steps.send(None)
        except QuorumUnavailable:
            self.busy.remove(told)
        except StopIteration as end:
            self.busy.remove(told)
            told.ended = self.now
            self.note(told, end.value, ballot)
        else:
            told.call = Round(step.request, self.SIZE, step.decided)
            self.send(told.links, told.call)

    def note(self, told, placed, ballot):
        if isinstance(placed, Reserved):
            self.messages.append((placed.token, told))
            if told.expires:
                self.lossy.add(placed.token.encode())
            self.untouched.add(placed.token)
            if len(self.untouched - {token.decode() for token in self.lossy}) > 1:
                self.faults.append("two wait in one place")
            if len(self.untouched) > PLACES:
                self.faults.append("more wait than there are places")
        elif placed.merged:
            told.into = agreed(ballot, answer_of)[0].value[:TOKEN_LENGTH]
            self.accepted.append(told)
            if told.into in self.lossy:
                self.faults.append("merged into what may expire")
        else:
            self.refused += 1

    # -- what the worker does --------------------------------------------------------

    def live(self):
        """Let triggers come and be run until there are no more; return the faults."""
        while self.left or self.busy or self.messages:
            self.happen()
            if self.messages and self.chance.random() < 0.1:
                self.work()
        return self.faults

    def work(self):
        token, _ = self.messages[0]
        self.starts += 1
        lock = self.take_lock()
        before = [told for told in self.accepted if told.into == token.encode()]
        self.untouched.discard(token)
        started = self.start(token, "first", lock)
        if isinstance(started, Started):
            self.messages.popleft()
            is_known, is_retried = self.told_all, self.chance.random() < 0.2
            self.check(before, started)
            self.be_busy()
            if is_retried:
                self.retry(token, is_known=is_known)
            self.lock("")
            self.queued.end("k", token, OVER)
        else:
            self.lock("")
            self.queued.end("k", token, "wait", life=60.0)

    def start(self, token, execution, lock):
        begun = Start({}, lock, execution, self.alone, 60.0)
        return self.queued.start("k", token, begun, wait=True)

    def retry(self, token, *, is_known):
        """Have the task of a message run once more; *is_known*: all nodes know that it has run."""
        self.retries += 1
        self.lock("")
        self.queued.end("k", token, "wait", life=60.0)
        self.be_busy()
        again = self.start(token, "second", self.take_lock())
        if is_known and isinstance(again, Started) and again.arguments:
            self.faults.append("a retry was given what was not for it")
        self.be_busy()

    def be_busy(self):
        for _ in range(self.chance.randrange(30)):
            self.happen()

    def take_lock(self):
        self.locks += 1
        lock = f"{self.locks:040d}"
        self.lock(lock)
        return lock

    def lock(self, token):
        for node in self.nodes:
            node.ask(b"SET", LOCK, token.encode()) if token else node.ask(b"DEL", LOCK)

    def check(self, before, started):
        if before and not started.arguments:
            self.faults.append("an accepted trigger was lost")
        seen = self.made.get(started.arguments)
        if seen is None or seen.ended is None:
            return  # none, or one that never learnt what became of it: it may count as the newest
        if any(seen.ended < told.began for told in before):
            self.faults.append("an older trigger won over a newer one")


SEEDS = range(150)
#: Seeds until which a mutant must have been found.
SEARCH = range(400)
WORLDS = {
    "the marker lives on": {"alone": 0.0},
    "it outlives the lock": {"alone": 60.0},
    "it is left as it is": {"alone": AS_IT_IS},
    "it ends at the start": {"alone": OVER},
}


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
def test_of_triggers_at_once_one_waits_and_the_newest_is_run(world):
    """
    However messages interleave: one in each place, no merge is lost, nothing older wins.

    Every start here reads all nodes that are up, a majority.
    """
    broken, accepted, starts, retries = {}, 0, 0, 0
    for seed in SEEDS:
        lived = TriggerWorld(seed, **WORLDS[world])
        if lived.live():
            broken[seed] = lived.faults
        accepted += len(lived.accepted)
        starts += lived.starts
        retries += lived.retries
        assert lived.refused == 0
    assert broken == {}
    assert accepted > 300
    assert starts > 300
    assert retries > 50


@pytest.mark.long
@pytest.mark.parametrize("world", [name for name in WORLDS if name != "it ends at the start"])
def test_of_triggers_that_may_expire_none_has_another_to_lose(world):
    """However messages interleave: nobody relies on them, and who is refused is told so."""
    broken, accepted, refused_ones = {}, 0, 0
    for seed in SEEDS:
        lived = TriggerWorld(seed, expiring=0.5, **WORLDS[world])
        if lived.live():
            broken[seed] = lived.faults
        accepted += len(lived.accepted)
        refused_ones += lived.refused
    assert broken == {}
    assert accepted > 100
    assert refused_ones > 100


@pytest.mark.parametrize(
    ("mutant", "expiring", "wrong"),
    [
        (FORGETFUL, 0.0, "an older trigger won over a newer one"),
        (GENEROUS, 0.0, "a retry was given what was not for it"),
        (TRUSTING, 0.5, "merged into what may expire"),
    ],
    ids=["any version is stored", "every execution is handed it", "what may expire is merged into"],
)
def test_the_world_sees_what_nodes_do_without_a_rule(mutant, expiring, wrong):
    with changed(mutant):
        assert any(wrong in TriggerWorld(seed, expiring=expiring).live() for seed in SEARCH)
