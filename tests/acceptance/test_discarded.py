"""A unique task whose message a worker discards before it is a request: its name is free."""

from __future__ import annotations

import base64
import json
import os

import pytest
import redis
from celery.exceptions import NotRegistered

from celery_redlock import RedlockTask
from support.stage import LASTING, stage
from support.waiting import eventually


def declare(app):
    """Declare two unique tasks; one worker knows but the first, as before a deployment."""

    def job(name):
        return name

    ours = {"base": RedlockTask, "shared": False, "unique_until": "finished", "unique_for": 600}
    app.task(name="old", **ours)(job)
    if "OLD" not in os.environ:
        app.task(name="new", **ours)(job)
    if "BROKEN" in os.environ:
        from celery_redlock.task.worker import discarded

        discarded.end_reservation_of = lambda app, message: None


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    """A stage with a worker of yesterday, and one that ends no reservation of what it discards."""
    with stage(__file__, tmp_path_factory.mktemp("discarded"), **LASTING) as it:
        it.start_workers(
            {"name": queue, "args": ["-Q", queue], "env": {"OLD": "1", **env}}
            for queue, env in {"q_old": {}, "q_broken": {"BROKEN": "1"}}.items()
        )
        yield it


def published(it, task, name, **options):
    result = it.task(task).apply_async((name,), queue="nobody", **options)
    with redis.Redis.from_url(it.broker.url) as client:
        messages = [json.loads(raw) for raw in client.lrange("nobody", 0, -1)]
    (message,) = [m for m in messages if m["headers"]["id"] == result.id]
    return result, message


def hand(it, queue, message):
    with redis.Redis.from_url(it.broker.url) as client:
        info = message["properties"]["delivery_info"]
        info["routing_key"] = queue
        client.lpush(queue, json.dumps(message))


def is_duplicate(it, task, name):
    return it.task(task).apply_async((name,), queue="nobody").duplicate


def unreadable(message):
    body = base64.b64decode(message["body"])
    message["body"] = base64.b64encode(body[: len(body) // 2]).decode()


def of_another_serializer(message):
    message["content-type"] = "application/x-python-serialize"


def without_an_id(message):
    """Say of which task it is, but give it an empty id; the header has the right one."""
    message["headers"]["id"] = ""


def of_no_moment(message):
    message["headers"]["eta"] = "in a while"


def due_after_time(message):
    message["headers"]["eta"] = "9999-12-31T23:59:59.999999-12:00"


SPOILT = [unreadable, of_another_serializer, without_an_id, of_no_moment, due_after_time]


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_message_that_a_worker_refuses_stands_for_no_name(it, spoil):
    name = spoil.__name__
    _, message = published(it, "old", name)
    assert is_duplicate(it, "old", name)
    spoil(message)
    hand(it, "q_old", message)
    eventually(lambda: not is_duplicate(it, "old", name), "end of the reservation")


def test_a_task_that_a_worker_does_not_know_stands_for_no_name(it):
    """As while a deployment is under way: who joined it is told, and the next one is published."""
    result, message = published(it, "new", "unknown")
    joined = it.task("new").apply_async(("unknown",), queue="nobody")
    assert (joined.duplicate, joined.id) == (True, result.id)
    hand(it, "q_old", message)
    with pytest.raises(NotRegistered):
        joined.get(timeout=100)
    eventually(lambda: not is_duplicate(it, "new", "unknown"), "end of the reservation")
    it.wait_for_log("Lock name .* is free: its message is discarded")


def test_a_worker_that_ends_no_reservation_leaves_the_name_taken(it):
    """The twin: everybody else joins a task that is never going to run."""
    result, message = published(it, "new", "for ever")
    hand(it, "q_broken", message)
    with pytest.raises(NotRegistered):
        result.get(timeout=100)
    assert is_duplicate(it, "new", "for ever")


def test_a_copy_that_is_discarded_leaves_the_one_that_runs_alone(it):
    _, message = published(it, "old", "forged")
    message["headers"]["redlock"]["reservation"][1] = "0" * 40
    message["headers"]["task"] = "new"
    hand(it, "q_old", message)
    it.wait_for_log(r"Received unregistered task of type 'new'[\s\S]*" + message["headers"]["id"])
    assert is_duplicate(it, "old", "forged")


def test_a_message_of_others_that_carries_a_copy_of_our_header_ends_nothing(it):
    """As where a library passes headers on; the worker deletes it, for it is no task."""
    result, message = published(it, "old", "copied")
    copy = {name: message["headers"][name] for name in ("redlock", "argsrepr")}
    message["properties"]["correlation_id"] = "of another"
    hand(it, "q_old", {**message, "headers": copy})
    it.wait_for_log(r"Received and deleted unknown message[\s\S]*" + result.id)
    hand(it, "q_old", published(it, "old", "after it")[1])  # what the worker does now is later
    it.wait_for_log(r"after it")
    assert is_duplicate(it, "old", "copied")
