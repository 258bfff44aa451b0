"""
Three of five lock nodes do not answer: what a real worker does by each policy of DESIGN 2.

One worker serves all these tests. `dead` and `hung` bring its lock nodes into the state
that a test is about, whatever the test before left behind.
"""

from __future__ import annotations

import json
import re
import uuid
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
import redis
from celery import Celery, chain, chord, group

from celery_redlock import QuorumUnavailable
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.servers import servers
from support import events as recording
from support.clients import let_go
from support.versions import CELERY
from support.waiting import eventually
from support.worker import Worker

APP = "support.unavailable_app"
#: Short, as the quarantine of nodes that come back is waited for.
RULES = Rules(ttl=6, max_ttl=6, node_timeout=1.0)
PATIENCE = 1.0  # lock_wait of the task "patient" [s]


class Shop:
    """A broker, five lock nodes, a worker and a client that knows no task but by name."""

    def __init__(self, broker, nodes, folder):
        self.broker, self.nodes, self.lost = broker, nodes, nodes[:3]
        self.events = folder / "events.jsonl"
        self.env = {
            "BROKER": broker.url,
            "NODES": ",".join(node.url for node in nodes),
            "EVENTS": str(self.events),
        }
        self.client = Celery("client", broker=broker.url, backend=broker.url, set_as_current=False)
        self.client.conf.result_extended = True
        self.worker = Worker(APP, env=self.env, cwd=folder, args=["-Q", "celery,special"])

    def task(self, name, value=1, key=None, **options):
        key = key or uuid.uuid4().hex
        return self.client.signature(name, (value, key), options=options), key

    def send(self, name, **options):
        signature, key = self.task(name, **options)
        at = recording.now()
        return SimpleNamespace(result=signature.apply_async(), key=key, at=at)

    def ran(self, key):
        return [e for e in recording.read(self.events, "start") if e["name"] == key]

    def log_of(self, task_id, words):
        lines = self.worker.log().splitlines()
        return [line for line in lines if task_id in line and words in line]

    def was_put_off(self, result, times=1):
        eventually(
            lambda: len(self.log_of(result.id, "Rescheduled task")) >= times,
            f"{times} times 'Rescheduled task' of {result.id}",
        )

    def trust(self):
        told = bootstrap([node.url for node in self.nodes], RULES)
        assert set(told.values()) == {"enrolled"}, told

        def is_granted():
            return self.send("skipping").result.get(timeout=100) == 10

        # More than once, so that both children of the worker have connections to lose.
        eventually(lambda: all(is_granted() for _ in range(4)), "grants from all nodes")

    def bring_back(self):
        began = recording.now()
        for node in self.lost:
            node.restart()
        return began


@pytest.fixture(scope="module")
def shop(some_binary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unavailable")
    with servers(6, binary=some_binary) as (broker, *nodes):
        bootstrap([node.url for node in nodes], RULES)
        made = Shop(broker, nodes, folder)
        try:
            with made.worker:
                yield made
                print(made.worker.log())  # noqa: T201  pytest shows it if a test failed
        finally:
            let_go(made.client)


@pytest.fixture
def dead(shop):
    for node in shop.lost:
        node.kill()
    return shop


@pytest.fixture
def hung(shop):
    """The shop with three of its five lock nodes stopped while the worker is connected to them."""
    shop.bring_back()
    shop.trust()
    for node in shop.lost:
        node.pause()
    yield shop
    for node in shop.lost:
        node.kill()


@pytest.fixture(params=["dead", "hung"])
def silent(request):
    """The shop with three of its five lock nodes dead, and then with three that hang."""
    return request.getfixturevalue(request.param)


def test_skip_ends_the_task_with_a_value_that_says_unavailable(silent):
    task = silent.send("skipping")
    outcome = task.result.get(timeout=100)
    assert type(outcome) is dict
    assert outcome["skipped"] == "unavailable"
    assert outcome["holder"] == {}
    assert outcome["lock"].startswith("skipping")
    assert task.result.state == "SUCCESS"
    assert silent.ran(task.key) == []
    (line,) = silent.log_of(task.result.id, "Skipped task")
    assert "INFO" in line
    assert "no quorum of lock nodes" in line


def test_fail_ends_the_task_with_the_vote_of_every_node(silent):
    task = silent.send("failing")
    with pytest.raises(QuorumUnavailable) as caught:
        task.result.get(timeout=100)
    assert task.result.state == "FAILURE"
    votes = caught.value.votes
    assert caught.value.name.startswith("failing")
    assert [str(node.port) for node in silent.nodes] == [x.rpartition(":")[2][:5] for x in votes]
    said = list(votes.values())
    assert all(vote.startswith("unreachable (") for vote in said[:3]), votes
    assert said[3:] == ["granted", "granted"], "a vote of two is no lock, and was told as it was"
    assert silent.ran(task.key) == []


def test_lock_wait_is_tried_to_its_end_and_no_longer(dead):
    task = dead.send("patient")
    assert task.result.get(timeout=100)["skipped"] == "unavailable"
    assert recording.now() - task.at >= PATIENCE
    found = dead.worker.wait_for_log(r"No quorum for lock 'patient\S*' after ([\d.]+) s")
    assert float(found[1]) > 0.95 * PATIENCE


def test_retry_counts_toward_max_retries_and_ends_in_failure(dead):
    task = dead.send("retrying_twice")
    with pytest.raises(QuorumUnavailable) as caught:
        task.result.get(timeout=100)
    assert len(caught.value.votes) == 5
    assert task.result.state == "FAILURE"
    assert task.result.retries == 2
    assert len(dead.log_of(task.result.id, "received")) == 3
    assert dead.ran(task.key) == []


def test_retry_shows_the_state_and_runs_once_the_nodes_are_back(dead):
    task = dead.send("retrying")
    eventually(lambda: task.result.state == "RETRY", "state RETRY")
    assert isinstance(task.result.info, QuorumUnavailable)
    dead.bring_back()
    dead.trust()
    assert task.result.get(timeout=100) == 10
    (ran,) = dead.ran(task.key)
    assert ran["retries"] >= 1
    assert ran["lock"] == "HeldLock"


def test_the_default_puts_tasks_off_until_the_nodes_may_vote_again(dead):
    tasks = [dead.send(name) for name in ("by_default", "by_default", "coming_again")]
    for task in tasks:
        dead.was_put_off(task.result)
        assert task.result.state == "PENDING", "a task that was put off has no state of its own"
    began = dead.bring_back()
    for task in tasks:
        assert task.result.get(timeout=100) == 10
        assert task.result.retries == 0
    for task in tasks:
        (ran,) = dead.ran(task.key)
        assert ran["retries"] == 0, "the body saw a retry that never was"
        assert ran["lock"] == "HeldLock"
        assert ran["fence"] > 0
        assert ran["at"] - began > RULES.max_ttl, "ran before old leases were sure to be over"


def test_max_reschedules_ends_in_failure(dead):
    task = dead.send("coming_twice")
    with pytest.raises(QuorumUnavailable):
        task.result.get(timeout=100)
    assert len(dead.log_of(task.result.id, "] in 1 s")) == 2
    assert len(dead.log_of(task.result.id, "received")) == 3
    assert task.result.state == "FAILURE"
    assert task.result.retries == 0
    assert dead.ran(task.key) == []


def test_run_unlocked_runs_the_body_and_says_so(dead):
    task = dead.send("unlocked")
    assert task.result.get(timeout=100) == 10
    (ran,) = dead.ran(task.key)
    assert (ran["lock"], ran["fence"]) == ("NotLocked", None)
    (line,) = dead.log_of(task.result.id, "WITHOUT its lock")
    assert "WARNING" in line
    assert "could not be decided by a quorum" in line


def test_what_was_put_off_keeps_its_place_in_a_workflow(dead):
    keys = [uuid.uuid4().hex for _ in range(5)]

    def late(value, key):
        return dead.task("coming_again", value, key)[0]

    def plain(*args):
        return dead.client.signature("plain", args)

    chorded = chord([late(1, keys[0]), plain(20), late(3, keys[1])], plain(), app=dead.client)
    grouped = group([plain(40), late(5, keys[2]), plain(60)], app=dead.client)
    rest = dead.client.signature("coming_again", (), {"key": keys[4]})
    chained = chain(plain(7), rest.clone(kwargs={"key": keys[3]}), rest, plain(), app=dead.client)
    of_chord, of_group, of_chain = (flow.apply_async() for flow in (chorded, grouped, chained))
    header = of_chord.parent
    for result in (header[0], header[2], of_group[1], of_chain.parent.parent):
        dead.was_put_off(result)
    eventually(lambda: header[1].ready() and of_group[2].ready(), "end of the members without lock")
    assert not of_chord.ready(), "the chord did not wait for its members"
    assert not of_group.ready()
    assert not of_chain.ready()
    dead.bring_back()
    dead.trust()
    assert of_chord.get(timeout=100) == [10, 20, 30]
    assert of_group.get(timeout=100) == [40, 50, 60]
    assert of_chain.get(timeout=100) == 700
    assert [len(dead.ran(key)) for key in keys] == [1] * 5


def test_what_was_put_off_keeps_headers_priority_queue_and_expiry(dead):
    expires = datetime.now(timezone.utc) + timedelta(minutes=20)
    task = dead.send(
        "coming_again",
        headers={"tenant": "acme", "nested": {"a": [1, None]}},
        priority=6,
        queue="special",
        expires=expires,
    )
    dead.was_put_off(task.result, times=2)
    dead.bring_back()
    dead.trust()
    assert task.result.get(timeout=100) == 10
    (ran,) = dead.ran(task.key)
    own = {name: value for name, value in ran["headers"].items() if "redlock" not in name}
    assert own == {"tenant": "acme", "nested": {"a": [1, None]}}
    assert (ran["priority"], ran["queue"]) == (6, "special")
    assert datetime.fromisoformat(ran["expires"]) == expires


def test_what_was_put_off_expires_when_its_time_is_over(dead):
    task = dead.send("coming_again", expires=10.0)
    dead.was_put_off(task.result)
    eventually(lambda: task.result.state == "REVOKED", "state REVOKED")
    assert recording.now() - task.at > 9.5
    assert dead.ran(task.key) == []


def test_a_worker_without_lock_nodes_shuts_down_soon_and_keeps_its_messages(dead, start_worker):
    # Before Celery 5.7 a pool of processes now and then waits for one for ever, whatever its tasks.
    pool = "prefork" if CELERY >= (5, 7) else "threads"
    leaving = start_worker(APP, env=dead.env, name="leaving", pool=pool, args=["-Q", "leaving"])
    task = dead.send("retrying", queue="leaving")
    eventually(lambda: task.result.state == "RETRY", "state RETRY")
    leaving.terminate(timeout=100)
    with redis.Redis.from_url(dead.broker.url) as client:
        (message,) = client.lrange("leaving", 0, -1)
        client.delete("leaving")
    assert json.loads(message)["headers"]["id"] == task.result.id


def test_a_wrong_setting_ends_the_start_with_the_right_one(dead, tmp_path):
    env = {**dead.env, "MORE": json.dumps({"redlock_tll": 5})}
    worker = Worker(APP, name="wrong", env=env, cwd=tmp_path)
    with pytest.raises(AssertionError, match="has ended") as caught, worker:
        pass
    assert re.search(
        r"CRITICAL.*unknown setting redlock_tll; did you mean redlock_ttl\?", str(caught.value)
    )
    assert worker.process.returncode > 0


def test_a_worker_on_a_single_node_warns_of_it(dead, start_worker):
    env = {**dead.env, "NODES": ""}
    worker = start_worker(APP, env=env, name="alone", args=["-Q", "alone"])
    line = worker.wait_for_log(r"WARNING.*redlock_nodes is not set.*")[0]
    assert f"127.0.0.1:{dead.broker.port}" in line
    assert "three or five independent servers" in line
