"""What a worker tells over remote control: the locks it holds, and how it sees the nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from celery_redlock import RedlockTask
from celery_redlock.ops import why
from celery_redlock.ops.why import explain
from celery_redlock.plugin import plugin_for
from support.stage import LASTING, stage
from support.waiting import eventually

pytestmark = pytest.mark.long

#: So short that a test may wait for two renewals, and longer than a stall [s].
TTL = 9.0


def declare(app):
    @app.task(base=RedlockTask, name="hold", lock_key="{name}", bind=True, shared=False)
    def hold(self, name, secret, until):
        while not Path(until).exists():
            time.sleep(0.05)


@pytest.fixture(scope="module", params=["prefork", "threads", "gevent"])
def it(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with stage(
        __file__, folder, redlock_ttl=TTL, redlock_max_ttl=TTL, redlock_node_timeout=1.0
    ) as it:
        it.worker(pool=request.param, concurrency=2)
        yield it


@pytest.fixture
def until(tmp_path):
    """File whose coming ends the bodies."""
    file = tmp_path / "until"
    yield file
    file.touch()


def ask(it, command):
    inspect = it.app.control.inspect(
        timeout=20, limit=1
    )  # a worker that is about to listen has not
    answers = eventually(lambda: inspect._request(command), "an answer", timeout=100)
    assert len(answers) == 1, answers
    return next(iter(answers.values()))


def test_a_worker_lists_the_locks_it_holds(it, until):
    results = [it.task("hold").delay(name, "s3cr3t", str(until)) for name in ("one", "two")]

    def renewed():
        locks = {lock["name"]: lock for lock in ask(it, "redlock_locks")["locks"]}
        done = len(locks) == 2 and all(lock["renewals"] >= 2 for lock in locks.values())
        return locks if done else None

    locks = eventually(renewed, "two renewals of both locks", timeout=100)
    assert {lock["task_id"] for lock in locks.values()} == {result.id for result in results}
    for lock in locks.values():
        assert lock["task"] == "hold"
        assert isinstance(lock["pid"], int)
        assert lock["fence"] > 0
        assert lock["age"] > TTL / 3
        assert lock["ttl"] == TTL
        assert 0 < lock["left"] <= TTL
        assert 0 < lock["margin"] < TTL
        assert lock["lost"] is None
        assert "token" not in lock
    assert "s3cr3t" not in json.dumps(locks)
    until.touch()
    for result in results:
        result.get(timeout=100)
    eventually(lambda: ask(it, "redlock_locks")["locks"] == [], "an empty list")


def test_a_lock_of_another_is_not_listed(it, until):
    with it.held("taken"):
        result = it.task("hold").delay("taken", "", str(until))
        assert result.get(timeout=100)["skipped"] == "conflict"
        assert ask(it, "redlock_locks")["locks"] == []


def test_a_worker_tells_how_it_sees_the_nodes(it):
    def are_all_up():
        nodes = ask(it, "redlock_nodes")["nodes"]
        # An answer that was late says little about a clock; the next look is better.
        well = [n for n in nodes if n["state"] == "up" and abs(n["clock_offset"]) < 1]
        return len(well) == 5 and nodes

    for node in eventually(are_all_up, "a look at all nodes", timeout=100):
        assert node["latency"] > 0
        assert not node["problem"]


def test_the_commands_work_from_the_command_line(it, tmp_path):
    env = {**os.environ, "STAGE": json.dumps([__file__, it.conf])}
    celery = [sys.executable, "-m", "celery", "-A", "support.stage", "inspect"]
    for command, key in (("redlock_locks", "locks"), ("redlock_nodes", "nodes")):
        done = subprocess.run(
            [*celery, "--timeout", "20", "-d", "w1@localhost", command, "--json"],
            env={**env, "PYTHONPATH": str(Path(__file__).parents[1])},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (answer,) = json.loads(done.stdout).values()
        assert key in answer


def test_a_dead_and_a_quarantined_node_are_told_as_such(tmp_path):
    with stage(__file__, tmp_path, redlock_ttl=TTL, redlock_max_ttl=60.0) as it:
        it.worker(pool="solo")
        eventually(lambda: len(ask(it, "redlock_nodes")["nodes"]) == 5, "look", timeout=100)
        it.nodes[0].kill()
        it.nodes[1].restart()

        def told():
            nodes = ask(it, "redlock_nodes")["nodes"]
            states = [node["state"] for node in nodes]
            return nodes if states == ["down", "quarantined", "up", "up", "up"] else None

        # Of one answer: in another a node may be late.
        down, quarantined, *_ = eventually(told, "states", timeout=100)
        assert down["problem"]
        assert 0 < quarantined["quarantine"] <= 64


def test_a_holder_whose_worker_is_killed_is_no_workers_own(tmp_path, until, monkeypatch):
    """So `redlock why` tells it from one that works, of which its worker says that it has it."""
    monkeypatch.setattr(why, "ANSWERS", 10.0)
    monkeypatch.setattr(why, "PATIENCE", 60.0)
    with stage(__file__, tmp_path, **LASTING) as it:
        worker = it.worker(name="killed", concurrency=1, args=["-Q", "killed"])
        it.worker(name="other", concurrency=1)
        it.task("hold").apply_async(("a", "", str(until)), queue="killed")
        settings = plugin_for(it.app).settings

        def workers():
            return explain(it.app, settings, {"a": 1}).workers

        both = {"killed@localhost": True, "other@localhost": False}
        eventually(lambda: workers() == both, "answers of both", timeout=100)
        worker.kill()
        assert workers() == {"other@localhost": False}
