"""The header of ours that a message carries."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from kombu import Exchange

from celery_redlock.task.messages.delivery import Delivery
from celery_redlock.task.messages.delivery_info import hide
from celery_redlock.task.messages.envelope import MOST_RESCHEDULES, Envelope
from celery_redlock.task.messages.reservation import Reservation
from celery_redlock.task.messages.slot import Slot
from celery_redlock.task.publish.message import envelope_of

FULL = Envelope(
    publish_id="0" * 32,
    previous="1" * 32,
    reschedules=7,
    reservation=Reservation("report:1", "a" * 40, "finished"),
    slot=Slot("hourly", 1_772_368_215.25, "buffer_one"),
    worker="w1@here",
)
QUEUES = {
    "jobs": SimpleNamespace(exchange=Exchange("jobs", "direct")),
    "bcast": SimpleNamespace(exchange=Exchange("all", "fanout")),
    "none": SimpleNamespace(exchange=None),
}
TASK = SimpleNamespace(name="shop.bill", app=SimpleNamespace(amqp=SimpleNamespace(queues=QUEUES)))
HEADER = {
    "v": 1,
    "task_id": "me",
    "id": "0" * 32,
    "previous": "1" * 32,
    "reschedules": 7,
    "reservation": ["report:1", "a" * 40, "finished"],
    "slot": ["hourly", "2026-03-01T12:30:15.250+00:00", "buffer_one"],
    "worker": "w1@here",
}


def test_it_is_one_header_and_plain_to_read():
    assert FULL.header("me") == {"redlock": HEADER}
    assert Envelope().header("me") == {"redlock": {"v": 1, "task_id": "me"}}
    assert Envelope.of(json.loads(json.dumps(HEADER)), "me") == FULL


@pytest.mark.parametrize("task_id", ["id-2", "", None, "ME", "me ", 7, ["me"]])
def test_one_that_was_handed_on_says_nothing(task_id):
    """A task that inherits the headers of another is not that one's copy."""
    assert Envelope.of(HEADER, task_id) == Envelope()


@pytest.mark.parametrize(
    ("field", "broken", "default"),
    [
        ("id", [None, 7, "x" * 32, "0" * 37, "0" * 32 + "\n", ["0"]], None),
        ("previous", [None, 7, "0" * 31, "F" * 32, {}], None),
        ("reschedules", [None, "7", -1, True, 1.5, 10**4300, MOST_RESCHEDULES + 1], 0),
        ("reservation", [None, 7, [], ["n", "t", "finished"], "abc", {}], None),
        ("worker", [None, 7, "", "w" * 256, "w\n@h", ["w"]], None),
        ("slot", [None, 7, [], ["n", "now", "skip"], "abc", {}], None),
    ],
)
def test_what_is_malformed_counts_as_absent_by_itself(field, broken, default):
    """Anybody can publish; the rest of the header stays what it is."""
    attribute = {"id": "publish_id"}.get(field, field)
    for value in broken:
        found = Envelope.of({**HEADER, field: value}, "me")
        assert getattr(found, attribute) == default
        others = {"publish_id", "previous", "reschedules", "reservation", "slot", "worker"} - {
            attribute
        }
        assert all(getattr(found, other) == getattr(FULL, other) for other in others)


@pytest.mark.parametrize("version", [None, "1", True, 1.0, []])
def test_one_without_a_version_says_nothing(version):
    """It is somebody else's header of the same name."""
    assert Envelope.of({**HEADER, "v": version}, "me") == Envelope()


@pytest.mark.parametrize(
    ("header", "redelivered", "may_be_repeated", "of_copy"),
    [
        (HEADER, False, True, "0" * 32),
        (HEADER, True, True, "0" * 32),
        (None, True, True, ""),
        (None, False, False, ""),
        ({**HEADER, "id": ""}, False, True, ""),
    ],
)
def test_which_deliveries_may_have_run_before(header, redelivered, may_be_repeated, of_copy):
    fields = {"id": "me", "redlock": header, "delivery_info": {"redelivered": redelivered}}
    delivery = Delivery.of(TASK, fields, "w@h")
    assert delivery.may_be_repeated is may_be_repeated
    assert delivery.copy.publish_id == of_copy
    again = {**fields, **delivery.copy.header("me")}
    assert Delivery.of(TASK, again, "w@h").execution == delivery.execution


@pytest.mark.parametrize("redelivered", [False, True])
def test_a_copy_of_what_was_delivered_again_says_so_and_a_retry_does_not(redelivered):
    """Or a copy, which the broker delivers once, would be taken for one that has never begun."""
    fields = {"id": "me", "redlock": HEADER, "delivery_info": {"redelivered": redelivered}}
    copy = {"id": "me", **Delivery.of(TASK, fields, "w@h").copy.header("me")}
    for _ in range(2):
        delivery = Delivery.of(TASK, copy, "w@h")
        assert delivery.is_redelivered is redelivered
        copy = {"id": "me", **delivery.copy.header("me")}
    assert not delivery.retry.again
    again = envelope_of({"redlock": {**copy["redlock"], "id": None}}, "me")
    assert not again.again  # its body has published it under its own id


@pytest.mark.parametrize(("exchange", "is_apart"), [("", False), ("jobs", False), ("all", True)])
def test_each_worker_of_a_broadcast_runs_an_execution_of_its_own(exchange, is_apart):
    """What came by a fanout exchange came to others as well."""
    fields = {"id": "me", "redlock": HEADER, "delivery_info": {"exchange": exchange}}
    ids = {Delivery.of(TASK, fields, worker).execution for worker in ("w1@h", "w2@h")}
    assert (len(ids) == 2) is is_apart


@pytest.mark.parametrize(
    ("headers", "seen"),
    [
        (None, None),
        ({"redlock": {"v": 1, "task_id": "me", "id": "0" * 32}}, None),
        ({"redlock": 7, "tenant": "acme"}, {"tenant": "acme"}),
        ({"tenant": "acme"}, {"tenant": "acme"}),
        ({"redlock": HEADER}, {"redlock": {k: v for k, v in HEADER.items() if k != "id"}}),
    ],
)
def test_a_body_sees_the_headers_of_its_caller(headers, seen):
    """Of ours only where there is a slot to read, and never the publish id."""
    request = SimpleNamespace(headers=headers, delivery_info=None)
    hide(request)
    assert request.headers == seen
