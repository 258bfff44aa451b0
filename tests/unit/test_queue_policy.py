"""The policy ``"queue"``: what it may be, how many may wait, and what a ticket is good for."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from celery_redlock import ConfigurationError, Fail, LockTaken, Queue, Skip
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.waiting import LEAVE
from celery_redlock.lock.wanted import NO_TURN, Turn
from celery_redlock.task import begin, queueing
from celery_redlock.task.delivery import Delivery
from celery_redlock.task.envelope import Envelope
from celery_redlock.task.outcome import DeliveryOver, Outcome
from celery_redlock.task.policies import policy_of
from celery_redlock.task.waiting import Waiting
from support.fakes import granted, refused, token_of, unreachable


@pytest.mark.parametrize("value", ["queue", Queue, Queue()])
def test_a_task_may_queue_behind_a_holder(value):
    """By its word, its class or a value; any number may wait, unless told."""
    assert policy_of("shop.bill: on_conflict", value) == Queue(max_waiting=None, then="fail")


@pytest.mark.parametrize("value", ["queue", Queue, Queue(max_waiting=3)])
@pytest.mark.parametrize("option", ["shop.bill: on_unavailable", "redlock_on_unavailable"])
def test_nobody_queues_where_there_is_nobody_to_wait_for(option, value):
    """A release wakes those who wait, and no quorum could decide; the error says what to use."""
    with pytest.raises(ConfigurationError, match=r"on_conflict only, use 'reschedule'"):
        policy_of(option, value)


@pytest.mark.parametrize("most", [0, -1, 1.0, True, "3", float("inf")])
def test_so_many_cannot_wait(most):
    """A whole number >= 1, or None."""
    with pytest.raises(ConfigurationError, match="max_waiting"):
        Queue(max_waiting=most)


@pytest.mark.parametrize("then", ["retry", "Skip", None, Skip(), "queue"])
def test_too_many_end_at_once(then):
    """What comes when enough wait either fails or is skipped."""
    with pytest.raises(ConfigurationError, match="then"):
        Queue(then=then)


def test_too_many_end_as_the_policy_says():
    """As by the policy of that word."""
    assert Queue(max_waiting=1).overflow == Fail()
    assert Queue(max_waiting=1, then="skip").overflow == Skip()


# -- how many may wait ------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Those of a task, as far as they matter here."""

    on_conflict: object

    @staticmethod
    def limits(names):
        """Return how many places each lock has."""
        return dict.fromkeys(names, 1)


@pytest.fixture
def queue_up(monkeypatch):
    """Return a function that has a task queue, given how the nodes vote on it."""

    def requeue(_task, _request, copy, countdown, **_):
        queue_up.copies.append((copy, countdown))
        return DeliveryOver("waits", Outcome.REQUEUED, float(countdown))

    monkeypatch.setattr(queueing, "requeue", requeue)
    monkeypatch.setattr(queueing, "longest_countdown", lambda _app: 600.0)
    monkeypatch.setattr(queueing, "delays_in_broker", lambda _app: False)

    def queue_up(*ballot, before=None, most=2, publish_id="0" * 32, copy_id=""):
        asked, told = [], []
        driver = SimpleNamespace(
            ask=lambda ask: asked.append(ask) or list(ballot), tell=told.append
        )
        locks = SimpleNamespace(driver=driver, rules=Rules(), listener=object())
        execution = SimpleNamespace(
            name="a",
            names=("a",),
            task=SimpleNamespace(name="bill", app=None),
            request=SimpleNamespace(id="me"),
            delivery=Delivery(
                "me",
                Envelope(publish_id, waiting=before),
                "e" * 32,
                may_be_repeated=False,
                copy_id=copy_id,
            ),
            plugin=SimpleNamespace(locks=locks, notify=queue_up.events.append),
            options=Options(Queue(max_waiting=most)),
        )
        queue_up.asked, queue_up.told = asked, told
        policy = execution.options.on_conflict
        return queueing.join_queue(execution, LockTaken("a", {}, {}), policy)

    queue_up.copies, queue_up.events = [], []
    return queue_up


@pytest.mark.parametrize(
    "ballot",
    [
        [granted()] * 3,
        [granted(), granted(), refused()],
        [granted(), refused(), unreachable()],
        [unreachable()] * 3,
    ],
)
def test_a_task_waits_unless_a_majority_says_that_enough_do(queue_up, ballot):
    """A node that does not answer turns nobody away."""
    with pytest.raises(DeliveryOver):
        queue_up(*ballot)
    ((copy, countdown),) = queue_up.copies
    assert (copy.publish_id, copy.waiting.name, copy.waiting.times) == ("0" * 32, "a", 1)
    assert 54 <= countdown <= 60
    (event,) = queue_up.events
    assert (event.countdown, event.times, event.since) == (countdown, 1, copy.waiting.since)


def test_one_too_many_leaves_nothing_behind(queue_up):
    """Not on the node that had a place for it, either: it would keep that from others."""
    assert queue_up(granted(), refused(), refused()) == Options(Fail())
    assert queue_up.copies == queue_up.events == []
    (left,) = queue_up.told
    assert left.script is LEAVE
    (asked,) = queue_up.asked
    assert left.arguments[0] == asked.request.arguments[0]


def test_a_copy_that_is_another_execution_counts_for_itself(queue_up):
    """As of a second publish under one task id, as other languages send it."""
    for publish_id, copy_id, left in ((None, "", 0), (None, "f" * 32, 1), ("0" * 32, "", 0)):
        with pytest.raises(DeliveryOver):
            queue_up(granted(), granted(), granted(), publish_id=publish_id, copy_id=copy_id)
        assert [request.script for request in queue_up.told] == [LEAVE] * left


def test_who_waits_already_is_not_counted_again(queue_up):
    """It was woken in vain, or came by itself, and waits on whoever else does."""
    with pytest.raises(DeliveryOver):
        queue_up(before=Waiting("a", 1.7e9))
    assert queue_up.asked == []
    assert queue_up.events[0].times == 2


def test_any_number_is_asked_of_nobody(queue_up):
    """Without a bound it costs no round."""
    with pytest.raises(DeliveryOver):
        queue_up(most=None)
    assert queue_up.asked == []


# -- what a ticket is good for ---------------------------------------------------------------


def test_a_ticket_is_good_for_one_attempt(monkeypatch):
    """A task that waits for what came before it asks again with a token of its own."""
    tried = []

    def take(_execution, wait, turn=NO_TURN):
        tried.append((wait, turn.token))
        raise LockTaken("a", {}, {"task_id": "me", "execution": "d" * 32, "ttl": 1.0})

    monkeypatch.setattr(begin, "take", take)
    monkeypatch.setattr(begin, "wait_behind", lambda *_: DeliveryOver("aside", Outcome.SET_ASIDE))
    delivery = Delivery(
        "me",
        Envelope(),
        "e" * 32,
        may_be_repeated=True,
        comes_again=True,
        turn=Turn(token_of("t"), 0),
    )
    execution = SimpleNamespace(
        delivery=delivery,
        request=SimpleNamespace(is_eager=False),
        options=SimpleNamespace(wait=0.0, limits=lambda _names: {"a": 1}),
        names=("a",),
    )
    with pytest.raises(DeliveryOver):
        begin.take_in_turn(execution)
    assert tried == [(0.0, token_of("t")), (begin.PREVIOUS_GRACE, None)]
