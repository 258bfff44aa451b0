"""The algorithm step by step: what it asks, what it makes of the answers, what it leaves behind."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest

from celery_redlock.errors import LockTaken, QuorumUnavailable
from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.acquiring import LONGEST_PAUSE, SHORTEST_SPLIT_PAUSE, SPLIT_TRIES
from celery_redlock.lock.algorithm.attempt import CONFIRM_ROUNDS
from celery_redlock.lock.algorithm.effects import Send, Sleep
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.algorithm.request import MarkerStands
from celery_redlock.lock.lease import fence_proposal
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.scripts import ACQUIRE, RELEASE, RENEW
from support.fakes import (
    SILENT,
    Drive,
    granted,
    marked,
    quarantined,
    refused,
    repaired,
    token_of,
    unreachable,
)

NOW = fence_proposal(1_700_000_000_000, 0)


def is_release(step, token):
    return (
        isinstance(step, Send)
        and step.request.script is RELEASE
        and step.request.arguments[:2] == (token.encode(), b"0")
    )


# -- granted -------------------------------------------------------------------------


def test_a_quorum_grants_in_one_round():
    drive = Drive().vote(granted(), granted())
    assert (drive.lease.name, drive.lease.fence, drive.told) == ("k", 1, [])
    assert drive.lease.token == token_of("t1-")


def test_a_lease_counts_from_before_the_question():
    begun = Drive().clock()
    for after in (0.0, 0.05, 5.0):
        drive = Drive().vote(granted(), granted(), after=after)
        assert drive.lease.valid_until == pytest.approx(begun + 30 * 0.95 - 0.002)


def test_the_question_carries_what_a_node_must_know():
    drive = Drive(info={"task": "shop.bill"})
    token, info, ttl, fence, *_ = drive.step.request.arguments
    assert drive.step.request.script is ACQUIRE
    assert (token.decode(), ttl, int(fence)) == (token_of("t1-"), b"30000", NOW)
    who = {"host": socket.gethostname(), "pid": os.getpid(), "since": 1.7e9}
    assert json.loads(info) == {"task": "shop.bill", **who}


def test_without_a_fence_none_is_asked_for():
    drive = Drive(fence=False)
    assert drive.step.request.arguments[3] == b"0"
    assert drive.vote(granted(0), granted(0)).lease.fence is None


@pytest.mark.parametrize(("after", "is_granted"), [(18.4, True), (18.6, False)])
def test_a_fresh_lease_must_be_of_use(after, is_granted):
    drive = Drive().vote(granted(), granted(), after=after)
    assert (drive.lease is not None) is is_granted
    if not is_granted:
        assert is_release(drive.step, token_of("t1-"))
        assert drive.step.skip == frozenset()
        assert isinstance(drive.go_on().error, QuorumUnavailable)
        assert drive.error.votes["node-0"] == "granted, but too late"


def test_a_grant_that_came_too_late_is_tried_again():
    drive = Drive(wait=60.0).vote(granted(), granted(), after=25.0)
    assert is_release(drive.step, token_of("t1-"))
    drive.go_on_to_ask()
    assert drive.token == token_of("t2-")
    assert drive.vote(granted(), granted()).lease is not None


# -- not granted ----------------------------------------------------------------------


def test_taken_tells_who_has_it():
    drive = Drive().vote(refused("y", ttl=4.0), refused("y", ttl=5.0)).go_on()
    assert isinstance(drive.error, LockTaken)
    assert drive.error.holder == {"token": token_of("y")[:8], "pid": 7, "ttl": 5.0}
    assert drive.error.votes["node-2"] == "not waited for"
    assert drive.tokens == 1


@pytest.mark.parametrize(
    ("ballot", "retry_after"),
    [
        ((unreachable(),) * 3, None),
        ((SILENT,) * 3, None),
        ((granted(), unreachable()), None),
        ((refused(), unreachable()), None),
        ((quarantined(4.0), quarantined(5.0), granted()), 4.0),
        ((quarantined(4.0), quarantined(5.0), refused()), 4.0),
    ],
)
def test_no_quorum_is_unavailable_and_never_taken(ballot, retry_after):
    """Too few answers decide nothing; if quarantines are the cause, it is known when to return."""
    drive = Drive().vote(*ballot).go_on()
    assert isinstance(drive.error, QuorumUnavailable)
    assert drive.error.retry_after == retry_after
    assert len(drive.error.votes) == 3


@pytest.mark.parametrize(
    ("ballot", "spared"),
    [
        ((refused(), refused()), {0, 1}),
        ((granted(), unreachable()), set()),
        ((unreachable(),) * 3, set()),
        ((granted(), quarantined(), quarantined()), {1, 2}),
        ((refused(), unreachable(), quarantined()), {0, 2}),
        ((marked(), granted()), {0}),
    ],
)
def test_a_failed_attempt_is_released_wherever_it_may_have_arrived(ballot, spared):
    """Only nodes that certainly stored nothing are spared; a silent one may yet execute it."""
    drive = Drive().vote(*ballot)
    assert is_release(drive.step, token_of("t1-"))
    assert drive.step.skip == spared


def test_every_attempt_is_released_under_its_own_token():
    drive = Drive(wait=2.0)
    attempts = 0
    while drive.is_asking:
        attempts += 1
        assert drive.token == token_of(f"t{attempts}-")
        drive.vote(refused(), refused(), granted())
        assert is_release(drive.step, token_of(f"t{attempts}-"))
        drive.go_on_to_ask()
    assert attempts > 5
    assert len(drive.told) == drive.tokens == attempts


def test_tokens_are_random_and_long():
    client = Participant(Rules(), ("a",))
    tokens = {client.new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) == 40 and int(token, 16) for token in tokens)
    assert (client.now, client.wall) == (clock.now, time.time)


# -- waiting --------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [0.0, 0.001, 0.3, 5.0])
def test_the_wait_is_honoured(wait):
    drive = Drive(wait=wait)
    begun, last = drive.clock(), drive.clock()
    while drive.is_asking:
        last = drive.clock()
        drive.vote(refused(), refused(), SILENT, after=0.0)
        drive.go_on_to_ask()
    assert isinstance(drive.error, LockTaken)
    assert last == pytest.approx(begun + wait)


def test_the_last_attempt_can_win():
    drive = Drive(wait=1.0)
    begun = drive.clock()
    while drive.clock() < begun + 1.0:
        drive.vote(refused(), refused(), SILENT, after=0.0).go_on_to_ask()
    assert drive.vote(granted(), granted()).lease is not None


def test_pauses_grow_to_their_longest():
    drive = Drive(wait=10.0)
    pauses = []
    while drive.is_asking:
        drive.vote(refused(), refused()).go_on()
        pauses.append(getattr(drive.step, "seconds", 0.0))
        drive.go_on_to_ask()
    assert pauses[:6] == [0.01, 0.02, 0.04, 0.08, 0.16, LONGEST_PAUSE]
    assert max(pauses) == LONGEST_PAUSE


def test_a_hint_cuts_a_pause_short():
    drive = Drive(wait=60.0)
    for _ in range(10):
        drive.vote(refused(), refused()).go_on_to_ask()
    drive.vote(refused(ttl=0.02), refused(ttl=0.03)).go_on()
    assert drive.step == Sleep(pytest.approx(0.04))


def test_a_wait_may_last_for_hours():
    """No number of attempts is too large for the pause to be computed."""
    drive = Drive(wait=24 * 3600.0)
    for _ in range(3000):
        drive.vote(refused(), refused()).go_on_to_ask()
    assert drive.is_asking


def test_unavailable_is_waited_out_too():
    drive = Drive(wait=1.0).vote(unreachable(), unreachable(), granted()).go_on_to_ask()
    assert drive.vote(granted(), granted()).lease.token == token_of("t2-")


# -- splits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ballot", "error"),
    [
        ((granted(), refused("x"), refused("y")), LockTaken),
        ((refused("x"), refused("y"), refused("z")), LockTaken),
        ((granted(), refused("x"), unreachable()), QuorumUnavailable),
    ],
)
def test_a_split_is_tried_again_even_without_a_wait(ballot, error):
    drive = Drive(wait=0.0)
    pauses = []
    while drive.is_asking:
        drive.vote(*ballot).go_on()
        if isinstance(drive.step, Sleep):
            pauses.append(drive.step.seconds)
        drive.go_on_to_ask()
    assert drive.tokens == len(drive.told) == SPLIT_TRIES + 1
    assert len(pauses) == SPLIT_TRIES
    assert pauses[:3] == [SHORTEST_SPLIT_PAUSE, 2 * SHORTEST_SPLIT_PAUSE, 4 * SHORTEST_SPLIT_PAUSE]
    assert max(pauses) <= LONGEST_PAUSE
    assert type(drive.error) is error


@pytest.mark.parametrize(
    ("ballot", "error"),
    [
        ((granted(), refused("x"), refused("y")), LockTaken),
        ((granted(), refused("x"), unreachable()), QuorumUnavailable),
    ],
)
def test_a_split_is_tried_again_until_the_time_is_up(ballot, error):
    """Who must not be kept for longer gives up, and leaves nothing behind."""
    begun = Drive().clock()
    drive = Drive(wait=0.0, ends=begun + 0.05)
    while drive.is_asking:
        drive.vote(*ballot).go_on_to_ask()
    assert 1 < drive.tokens == len(drive.told) < SPLIT_TRIES
    assert drive.clock() < begun + 0.05
    assert type(drive.error) is error


@pytest.mark.parametrize(
    ("took", "pause"),
    [(0.02, 0.02), (1.0, Rules().node_timeout)],
    ids=["a slow round", "a wait to connect"],
)
def test_the_pause_after_a_split_is_as_long_as_a_slow_round(took, pause):
    """
    Where requests take 20 ms, contenders that all come back within 2 ms meet again.

    What a round may take at most is what a pause may begin with: a wait to connect is longer.
    """
    drive = Drive().vote(granted(), refused("x"), refused("y"), after=took)
    while not isinstance(drive.step, Sleep):
        drive.go_on()
    assert drive.step.seconds == pytest.approx(pause)


def test_a_split_that_resolves_is_granted():
    drive = Drive().vote(granted(), refused("x"), refused("y")).go_on_to_ask()
    assert drive.vote(granted(), granted()).lease.token == token_of("t2-")


def test_a_lasting_split_is_waited_out_like_any_conflict():
    drive = Drive(wait=5.0)
    begun = drive.clock()
    while drive.is_asking:
        drive.vote(granted(), refused("x"), refused("y")).go_on_to_ask()
    assert drive.clock() >= begun + 5.0
    assert SPLIT_TRIES < drive.tokens < 60


# -- markers --------------------------------------------------------------------------


@pytest.mark.parametrize("other", [granted(), refused(), unreachable(), SILENT])
def test_a_marker_of_a_majority_ends_it_whatever_the_others_say(other):
    drive = Drive(wait=60.0, marker="m").vote(marked("done"), other, marked("done"))
    assert is_release(drive.step, token_of("t1-"))
    assert isinstance(drive.go_on().error, MarkerStands)
    assert drive.error.state == "done"


def test_a_marker_of_one_node_of_three_ends_nothing():
    """Whoever can write to one node would else keep a task from running."""
    drive = Drive(marker="m").vote(marked("done"), granted(), granted())
    assert drive.lease.token == token_of("t1-")


def test_a_marker_of_one_node_of_three_is_no_reason_to_wait():
    """If a majority refuses, a majority does not have it: the lock is taken."""
    drive = Drive(marker="m").vote(marked("done"), refused("x"), refused("x")).go_on()
    assert isinstance(drive.error, LockTaken)


@pytest.mark.parametrize(
    "ballot",
    [
        (marked("done"), SILENT, SILENT),
        (marked("done"), unreachable(), granted()),
        (marked("done"), quarantined(), refused("x")),
        (marked("done"), marked("finishing")),
        (marked("finishing"), marked("done")),
    ],
    ids=["silence", "no connection", "a quarantine", "another word", "another word first"],
)
def test_a_marker_that_too_few_tell_of_alike_is_in_doubt(ballot):
    """What may have finished is not called unavailable: by policy that might run it, or fail it."""
    drive = Drive(marker="m").vote(*ballot).go_on()
    assert isinstance(drive.error, MarkerStands)
    assert drive.error.state == ""


def test_a_doubt_is_cleared_up_within_the_wait():
    drive = Drive(wait=5.0, marker="m").vote(marked("done"), SILENT, unreachable()).go_on_to_ask()
    drive.vote(marked("done"), marked("done"), unreachable()).go_on()
    assert drive.error.state == "done"


def test_a_split_vote_with_a_marker_ends_in_doubt():
    """The one that refuses may be about to have the marker: the release comes with it."""
    drive = Drive(marker="m")
    while drive.is_asking:
        drive.vote(marked("done"), refused("x"), granted()).go_on_to_ask()
    assert isinstance(drive.error, MarkerStands)
    assert drive.error.state == ""


def test_a_marker_that_was_not_asked_for_counts_for_nothing():
    drive = Drive().vote(marked("done"), SILENT, SILENT).go_on()
    assert isinstance(drive.error, QuorumUnavailable)


def test_the_marker_is_part_of_the_question():
    """A node looks for it in the same step, so nothing comes between."""
    assert b"redlock:marker:m" in Drive(marker="m").step.request.keys
    assert not any(b"marker" in key for key in Drive().step.request.keys)


# -- interruptions ---------------------------------------------------------------------


class Stop(BaseException):
    """What a soft time limit, Ctrl-C or a killed greenlet look like."""


def asking():
    return Drive(wait=5.0)


def asking_again():
    return Drive(wait=5.0).vote(granted(), unreachable()).go_on_to_ask()


def confirming():
    return Drive(wait=5.0).vote(granted(5), granted(9))


def telling():
    return Drive(wait=5.0).vote(granted(), unreachable())


@pytest.mark.parametrize("somewhere", [asking, asking_again, confirming, telling])
@pytest.mark.parametrize("error", [Stop(), KeyboardInterrupt(), ValueError(), SystemExit(1)])
def test_an_interrupted_attempt_is_released_everywhere(somewhere, error):
    drive = somewhere()
    token = drive.token
    drive.interrupt(error)
    assert is_release(drive.step, token)
    assert drive.step.skip == frozenset()
    assert drive.go_on().error is error


def test_an_interrupted_pause_leaves_nothing_to_release():
    """The attempt before it was released already."""
    drive, error = telling().go_on(), Stop()
    assert isinstance(drive.step, Sleep)
    assert drive.interrupt(error).error is error
    assert len(drive.told) == 1


def test_a_third_interruption_ends_it():
    """The second has the release sent once more; if not even that can be, the error comes out."""
    drive, error = asking().interrupt(Stop()).interrupt(Stop()), Stop()
    assert isinstance(drive.step, Send)
    assert drive.interrupt(error).error is error


@pytest.mark.parametrize("somewhere", [asking, confirming, telling])
def test_an_acquire_that_is_dropped_ends_quietly(somewhere):
    """Without a driver nothing can be sent any more, and nothing is pretended."""
    somewhere().steps.close()


# -- fences ---------------------------------------------------------------------------


def test_nodes_that_agree_need_no_confirmation():
    assert Drive().vote(granted(8), granted(8)).lease.fence == 8
    assert Drive(nodes=5).vote(*[granted(8)] * 3).lease.fence == 8


def test_the_largest_fence_is_written_back():
    drive = Drive().vote(granted(5), granted(9))
    token, _, ttl, fence, _, _, repair, _ = drive.step.request.arguments
    assert drive.step.request.script is RENEW
    assert (token.decode(), ttl, fence, repair) == (token_of("t1-"), b"30000", b"9", b"0")
    assert drive.vote(granted(9), granted(9)).lease.fence == 9


FAR = 2**53


def test_a_fence_that_no_majority_can_store_is_no_vote():
    """One node says any number: the other two decide, and theirs is the one written back."""
    assert not Drive().is_decided(granted(FAR), granted(5))  # the third one may still agree
    assert Drive().vote(granted(FAR), granted(5), granted(5)).lease.fence == 5
    drive = Drive().vote(granted(FAR), granted(5), granted(9))
    assert drive.step.request.arguments[3] == b"9"
    assert drive.vote(granted(FAR), granted(9), granted(9)).lease.fence == 9


@pytest.mark.parametrize("rest", [(), (unreachable(),), (refused(),)])
def test_without_such_a_vote_there_may_be_no_quorum(rest):
    drive = Drive().vote(granted(FAR), granted(5), *rest)
    assert is_release(drive.step, token_of("t1-"))
    assert drive.lease is None


def test_a_fence_that_a_majority_can_store_counts():
    """However far ahead of the others it is: two of three nodes' clocks are the measure."""
    near = (int(Rules().longest_skew * 1000) << 12) - 1
    drive = Drive().vote(granted(near), granted(5))
    assert drive.step.request.arguments[3] == b"%d" % near
    ahead = [
        granted(FAR)._replace(node_now=FAR / 4096e3),
        granted(5)._replace(node_now=FAR / 4096e3),
    ]
    assert Drive().vote(*ahead).step.request.arguments[3] == b"%d" % FAR


def test_a_confirmed_lease_counts_from_the_confirmation():
    """It is the confirmation that wrote the keys that the majority stores."""
    drive = Drive()
    begun = drive.clock()
    drive.vote(granted(5), granted(9), after=2.0).vote(granted(9), granted(9), after=1.0)
    assert drive.lease.valid_until == pytest.approx(begun + 2.0 + 30 * 0.95 - 0.002)


@pytest.mark.parametrize(
    "ballot",
    [
        (granted(9), granted(10)),
        (granted(9), repaired(9), repaired(9)),
        (granted(9), quarantined(), quarantined()),
        (granted(9), refused(fence=9), refused(fence=9)),
        (granted(9),),
    ],
)
def test_a_fence_needs_a_majority_that_stores_exactly_it(ballot):
    drive = Drive().vote(granted(5), granted(9))
    assert not drive.is_decided(*ballot)
    assert drive.vote(*ballot).lease is None


def test_a_larger_fence_raises_the_question():
    drive = Drive().vote(granted(5), granted(9)).vote(granted(9), granted(12))
    assert drive.step.request.arguments[3] == b"12"
    assert drive.vote(granted(12), granted(12)).lease.fence == 12


def test_the_fence_of_a_node_that_others_hold_is_no_obstacle():
    """Contenders raise the numbers on nodes they were granted; those are not part of our quorum."""
    drive = Drive().vote(granted(5), granted(9))
    assert drive.vote(refused(fence=50), granted(9), granted(9)).lease.fence == 9
    assert drive.client.seen == 50


def test_the_last_confirmation_counts():
    drive = Drive().vote(granted(1), granted(2))
    for fence in range(2, CONFIRM_ROUNDS + 1):
        drive.vote(granted(fence), granted(fence + 1))
    last = CONFIRM_ROUNDS + 1
    assert drive.vote(granted(last), granted(last)).lease.fence == last


def test_a_fence_that_cannot_be_agreed_on_is_given_up():
    drive = Drive().vote(granted(1), granted(2))
    confirmations = 0
    while drive.is_asking:
        confirmations += 1
        drive.vote(granted(100 + confirmations), granted(200 + confirmations))
    assert confirmations == CONFIRM_ROUNDS
    assert is_release(drive.step, token_of("t1-"))
    assert isinstance(drive.go_on().error, QuorumUnavailable)


def test_a_confirmation_that_came_too_late_is_no_grant():
    """The rule that a lease must be of use holds on the slow way too."""
    drive = Drive().vote(granted(5), granted(9)).vote(granted(9), granted(9), after=19.0)
    assert is_release(drive.step, token_of("t1-"))


def test_a_client_learns_from_every_answer():
    drive = Drive(wait=1.0).vote(refused(fence=NOW + 7), refused()).go_on_to_ask()
    assert int(drive.step.request.arguments[3]) == NOW + 8


def test_an_absurd_fence_is_learnt_and_not_proposed():
    """A number from a clock far ahead must not make nodes with right clocks refuse ours."""
    rules = Rules()
    drive = Drive(wait=1.0, rules=rules)
    absurd = NOW + (int(rules.longest_skew * 1000) << 12)
    drive.vote(refused(fence=absurd), refused()).go_on_to_ask()
    assert int(drive.step.request.arguments[3]) < NOW + (1000 << 12)
    assert drive.client.seen == absurd


def test_a_clock_that_was_set_back_proposes_what_it_has_seen():
    drive = Drive(wait=1.0).vote(refused(fence=NOW), refused())
    drive.wall.advance(-1.0)
    drive.go_on_to_ask()
    assert int(drive.step.request.arguments[3]) == NOW + 1
