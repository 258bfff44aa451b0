"""The policy ``"queue"``: what it may be, how many may wait, and what wakes those who do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from celery.app.task import Context

from celery_redlock import ConfigurationError, Fail, LockTaken, Queue, Skip
from celery_redlock.events import TaskRefused
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.waiting.waiting import LEAVE, NO_CHANNEL, WAIT
from celery_redlock.task.execution import delay as delaying
from celery_redlock.task.execution import refused as refusing
from celery_redlock.task.execution.begun import Refused
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.execution.outcome import DeliveryOver, Outcome
from celery_redlock.task.execution.plan import Situation
from celery_redlock.task.execution.refused import refuse
from celery_redlock.task.messages.delivery import Delivery
from celery_redlock.task.messages.envelope import Envelope
from celery_redlock.task.messages.waiting import Waiting, Wakes
from celery_redlock.task.policies import policy_of
from support.fakes import granted, refused, unreachable
from support.options import OPTIONS


@pytest.mark.parametrize("value", ["queue", Queue, Queue()])
def test_a_task_may_queue_behind_a_holder(value):
    assert policy_of("shop.bill: on_conflict", value) == Queue(max_waiting=None, then="fail")


@pytest.mark.parametrize("value", ["queue", Queue, Queue(max_waiting=3)])
@pytest.mark.parametrize("option", ["shop.bill: on_unavailable", "redlock_on_unavailable"])
def test_nobody_queues_where_there_is_nobody_to_wait_for(option, value):
    """A release wakes those who wait, and no quorum could decide; the error says what to use."""
    with pytest.raises(ConfigurationError, match=r"on_conflict only, use 'reschedule'"):
        policy_of(option, value)


@pytest.mark.parametrize("most", [0, -1, 1.0, True, "3", float("inf")])
def test_so_many_cannot_wait(most):
    with pytest.raises(ConfigurationError, match="max_waiting"):
        Queue(max_waiting=most)


@pytest.mark.parametrize("then", ["retry", "Skip", None, Skip(), "queue"])
def test_too_many_end_at_once(then):
    with pytest.raises(ConfigurationError, match="then"):
        Queue(then=then)


def test_too_many_end_as_the_policy_says():
    assert Queue(max_waiting=1).overflow == Fail()
    assert Queue(max_waiting=1, then="skip").overflow == Skip()


# -- how many may wait ------------------------------------------------------------------


EARS = object()


@pytest.fixture
def queue_up(monkeypatch):
    def requeue(_claim, later):
        queue_up.copies.append((later.envelope, later.after))
        return DeliveryOver("waits", Outcome.REQUEUED, float(later.after))

    monkeypatch.setattr(refusing, "requeue", requeue)
    monkeypatch.setattr(delaying, "longest_countdown", lambda _app: 600.0)
    monkeypatch.setattr(delaying, "delays_in_broker", lambda _app: False)

    def queue_up(*ballot, before=None, most=2, publish_id="0" * 32, copy_id="", listener=EARS):
        asked, told = [], []
        driver = SimpleNamespace(
            ask=lambda ask: asked.append(ask) or list(ballot), tell=told.append
        )
        locks = SimpleNamespace(driver=driver, rules=Rules(), listener=listener)
        claim = Claim(
            SimpleNamespace(name="bill", app=None),
            Context(id="me"),
            Delivery(
                "me",
                Envelope(publish_id, waiting=before),
                "e" * 32,
                may_be_repeated=False,
                copy_id=copy_id,
            ),
            lock=None,
            plugin=SimpleNamespace(locks=locks, notify=queue_up.events.append),
            names=("a",),
        )
        vars(claim)["options"] = replace(OPTIONS, on_conflict=Queue(max_waiting=most))
        queue_up.asked, queue_up.told = asked, told
        return refuse(Refused(claim, LockTaken("a", {}, {}), Situation.TAKEN))

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
    with pytest.raises(LockTaken):
        queue_up(granted(), refused(), refused())
    assert queue_up.copies == []
    assert [type(event) for event in queue_up.events] == [TaskRefused]
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


def test_who_says_that_it_waits_already_is_asked_about_as_well(queue_up):
    """The nodes know those who do, and let them wait on; anybody can forge a header."""
    with pytest.raises(DeliveryOver):
        queue_up(*[granted()] * 3, before=Waiting("a", 1.7e9))
    assert queue_up.events[0].times == 2
    with pytest.raises(LockTaken):
        queue_up(*[refused()] * 3, before=Waiting("a", 1.7e9))


def test_any_number_is_asked_of_nobody(queue_up):
    """Without a bound it costs no round."""
    with pytest.raises(DeliveryOver):
        queue_up(most=None)
    assert queue_up.asked == []


# -- what wakes it --------------------------------------------------------------------------


@pytest.mark.parametrize("before", list(Wakes))
def test_who_queues_is_woken_by_a_free_lock(queue_up, before):
    """Whatever it waited for before: it has just been refused this lock."""
    with pytest.raises(DeliveryOver):
        queue_up(before=Waiting("a", 1.7e9, 3, before))
    ((copy, _),) = queue_up.copies
    assert copy.waiting == Waiting("a", 1.7e9, 4, Wakes.FREE)


def test_where_nothing_can_wake_it_it_comes_as_often_as_if_it_were_rescheduled(queue_up):
    """In a minute it would be late for its lock, as it is in no line."""
    with pytest.raises(DeliveryOver):
        queue_up(most=None, listener=None)
    ((_, countdown),) = queue_up.copies
    assert countdown <= 2


def test_a_task_that_asks_whether_it_may_wait_is_in_no_line_yet(queue_up):
    """It is a message on its way, and nothing hears a hint: one would be lost on it."""
    with pytest.raises(DeliveryOver):
        queue_up(granted(), granted(), granted())
    (asked,) = queue_up.asked
    assert asked.request.script is WAIT
    assert asked.request.arguments[1] == NO_CHANNEL.encode()
    assert asked.request.arguments[4] == b"2"
