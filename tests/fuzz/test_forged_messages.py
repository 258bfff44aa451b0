"""
Some hundred forged messages for one real worker, while another holds the lock that they are after.

Whatever they carry, the worker lives on and takes what is well, no body runs beside the holder,
and the holder's lock and the marker of one who waits are there, with the tokens they had.
"""

from __future__ import annotations

import json
import os
import random

import pytest
from celery.utils import uuid
from kombu.utils.json import dumps

from celery_redlock import RedlockTask
from celery_redlock.task.execution import calls
from celery_redlock.task.messages.envelope import HEADER, PARSERS, Envelope
from support.events import body, overlaps, read
from support.stage import stage
from support.stored import clients_of
from support.waiting import eventually

TTL = 60.0
PRECIOUS = "precious"
MESSAGES = 450


def declare(app):
    if "BROKEN" in os.environ:
        calls.is_execution = lambda _, request, __: "lock" not in vars(request)
    options = {"base": RedlockTask, "shared": False}

    @app.task(name="guarded", lock_key=PRECIOUS, acks_late=True, **options)
    def guarded(name):
        with body(os.environ["EVENTS"], PRECIOUS):
            return name

    @app.task(name="waiting", lock_key="waiting", unique_until="finished", **options)
    def waiting(name):
        with body(os.environ["EVENTS"], "waiting"):
            return name

    @app.task(name="free", **options)
    def free(name):
        with body(os.environ["EVENTS"], name):
            return name


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    with stage(
        __file__, tmp_path_factory.mktemp("forged"), nodes=3, redlock_ttl=TTL, redlock_max_ttl=TTL
    ) as it:
        it.worker()
        it.task("free").delay("warm").get(timeout=100)
        yield it


def values(it, key):
    found = []
    for client in clients_of(it.nodes):
        kind = client.type(key)
        found.append(client.hgetall(key) if kind == b"hash" else client.get(key))
    return found


def headers_to_try(token, wrong, task_id, others_id):
    """Return headers that are after the lock of *token* and another's marker, and broken ones."""
    owner = token[:32]
    own = {"v": 1, "task_id": task_id}
    reservation = {**own, "reservation": [PRECIOUS, wrong, "finished"]}
    waiting = {until: ["waiting", wrong, until] for until in ("finished", "success", "expired")}
    odd = [None, True, 0, -1, 1e308, "", "x", "\ud800", [], {}, [[[[[]]]]], {"a": {"b": [1]}}]
    odd += ["f" * 40, "x" * 20_000, [None] * 4, ["a"] * 500, 2**70, -(2**70), "redlock", [owner]]
    ours = ["v", "task_id", *PARSERS]
    fields = ["redlock", "redlock_owner"]
    fields += ["_redlock", "_protected", "headers", "replaced_task_nesting", "lock", "merged"]
    aimed = [
        {"redlock_owner": owner},
        {"redlock_owner": token, "delivery_info": {"redlock_owner": owner}},
        {"headers": {"redlock": reservation}, "redlock": reservation},
        {"redlock": {**own, "task_id": others_id, "reservation": waiting["finished"]}},
        {"redlock": {**own, "reservation": waiting["success"]}},
        {"redlock": {**own, "reservation": waiting["expired"]}},
        {"redlock": {**own, "names": [PRECIOUS, "waiting"]}},
        {"redlock": {**own, "slot": ["e", "2026-03-01T12:30:15.250+00:00", "buffer_one"]}},
        {"redlock": {**own, "slot": ["e", "9999-12-31T23:59:59.999+00:00", "allow"]}},
        {"_redlock": {"name": PRECIOUS, "token": token}},
        {"is_eager": True},
        {"called_directly": True},
        {"parent_id": others_id, "root_id": others_id},
        {"redlock": {**own, "reschedules": -(10**30)}, "replaced_task_nesting": -1},
    ]
    aimed += [{"redlock": {**own, field: value}} for field in ours for value in odd]
    return aimed + [{field: value} for field in fields for value in odd]


def send(it, task, headers, task_id, queue="celery"):
    """Put a message into the queue as Celery does, but with any *headers* it would refuse."""
    message = it.app.amqp.as_task_v2(task_id, task, args=("forged",), kwargs={})
    with it.app.producer_pool.acquire(block=True) as producer:
        producer.publish(
            message.body,
            exchange="",
            routing_key=queue,
            serializer="json",
            headers={**message.headers, **headers},
            correlation_id=task_id,
            reply_to=uuid(),
        )


def is_sendable(headers):
    try:
        dumps(headers).encode()
    except ValueError:
        return False
    return True


def send_all(it, tried):
    chance, sent = random.Random(8), {}
    while len(sent) < MESSAGES:
        one = tried[len(sent) % len(tried)]
        if len(sent) >= len(tried):
            one = {**one, **chance.choice(tried), **chance.choice(tried)}
        task_id = uuid()
        headers = json.loads(json.dumps(one).replace("{me}", task_id))
        if is_sendable(headers):
            send(it, "guarded", headers, task_id)
            sent[task_id] = headers
        else:
            tried.remove(one)
    return sent


@pytest.mark.timeout(600)  # hundreds of messages for one worker
def test_a_worker_bears_hundreds_of_forged_messages(it):
    before = it.bodies(PRECIOUS)
    waiting = it.task("waiting").apply_async(("first",), queue="nobody")
    locks = it.locks()
    with locks.hold(PRECIOUS, wait=60.0) as held:
        lock, marker = f"redlock:lock:{PRECIOUS}", "redlock:queued:waiting"
        token = values(it, marker)[0][b"token"]
        sent = send_all(it, headers_to_try(held.token, "0" * 40, "{me}", waiting.id))
        # A run that waits for the one before it comes again until it can have its turn, and a
        # message that says that it is for another worker ends unsaid.
        ending = [
            task_id
            for task_id, told in sent.items()
            if "buffer_one" not in str(told)
            and Envelope.of(told.get(HEADER), task_id).worker is None
        ]
        eventually(
            lambda: all(it.meta(task_id) for task_id in ending), "ends", timeout=300, every=0.3
        )
        assert it.bodies(PRECIOUS) == before
        found = values(it, lock)
        assert {value[:40].decode() for value in found if value is not None} == {held.token}
        assert sum(value is not None for value in found) >= 2
        held.ensure_held()
        assert [value[b"token"] for value in values(it, marker)] == [token] * 3
    locks.close()
    states = [it.meta(task_id)["status"] for task_id in ending]
    assert states.count("SUCCESS") > 0.9 * len(states), it.log()
    assert it.workers[0].alive
    assert it.task("guarded").delay("well").get(timeout=100) == "well"
    assert overlaps(read(it.events)) == []


def test_a_worker_that_believes_a_header_is_seen(it):
    """The twin: one that takes a header's word that it needs no lock."""
    it.worker(args=["-Q", "broken"], env={"BROKEN": "believes"}, concurrency=1)
    before, task_id = len(it.bodies(PRECIOUS)), uuid()
    with it.held(PRECIOUS):
        send(it, "guarded", {"lock": None}, task_id, queue="broken")
        eventually(lambda: it.meta(task_id), "its end", timeout=100)
    assert len(it.bodies(PRECIOUS)) == before + 1
