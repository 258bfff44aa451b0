"""
What is planted is seen by every tool, and rightly: one trouble after the other, one test a tool.

On the stage: a task that runs and holds its lock, another that was skipped for it, a dead node, a
quarantined node, and a key that leaked. In what the task was called with is a secret.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest
import redis

from celery_redlock import RedlockTask
from celery_redlock.observers.names import FILES
from support.metrics import kept_port, serve_as_shown
from support.stage import stage
from support.waiting import eventually

pytestmark = pytest.mark.long

SECRET = "s3cr3t-argument"
WEB_TOKEN = "sixteen-letters-and-more"
LEAKED = "f" * 40
JOURNAL = "redlock:journal"
TTL = 120.0
MAX_TTL = 900.0  # a quarantine that outlasts the tests


def declare(app):
    if "METRICS_PORT" in os.environ:  # in the worker
        serve_as_shown(os.environ["METRICS_PORT"])

    @app.task(base=RedlockTask, name="shop.bill", unique_on=("number",), shared=False)
    def bill(number, secret, until):
        while not Path(until).exists():
            time.sleep(0.05)


class Planted:
    def __init__(self, it, port, until):
        self.it = it
        self.port = port
        self.until = until
        self.said = []
        self.name = it.task("shop.bill").lock_name((7, SECRET, until))
        self.env = {
            **os.environ,
            "STAGE": json.dumps([__file__, it.conf]),
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "NO_COLOR": "1",
        }
        self.labels = [f"127.0.0.1:{node.port}/0" for node in it.nodes]

    def celery(self, *words):
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "support.stage", *words],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        self.said.append(done.stdout + done.stderr)
        return done.returncode, done.stdout

    def asked(self, *words):
        code, out = self.celery("redlock", *words, "--json")
        return code, json.loads(out)

    def fetched(self, url):
        with urllib.request.urlopen(url, timeout=100) as answer:
            text = answer.read().decode()
        self.said.append(text)
        return text


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    until = str(folder / "until")
    observers = ["logging", "journal", "celery", "prometheus"]
    with (
        kept_port() as port,
        stage(
            __file__,
            folder,
            redlock_ttl=TTL,
            redlock_max_ttl=MAX_TTL,
            redlock_node_timeout=1.0,
            redlock_observers=observers,
            redlock_web_token=WEB_TOKEN,
        ) as it,
    ):
        (folder / "metrics").mkdir()
        it.worker(concurrency=2, env={"METRICS_PORT": str(port), FILES: str(folder / "metrics")})
        it.nodes[0].kill()
        it.nodes[1].restart()
        planted = Planted(it, port, until)
        planted.result = it.task("shop.bill").delay(7, SECRET, until)
        with redis.Redis.from_url(it.nodes[2].url) as client:
            eventually(lambda: client.exists(f"redlock:lock:{planted.name}"), "lock", timeout=100)
        planted.skipped = it.task("shop.bill").delay(7, SECRET, until)
        assert planted.skipped.get(timeout=100)["skipped"] == "conflict"
        for node in it.nodes[2:]:
            with redis.Redis.from_url(node.url) as client:
                # Nobody waits for these two when a lock is granted, or a task is skipped.
                for wanted in (
                    lambda client=client: client.exists(f"redlock:lock:{planted.name}"),
                    lambda client=client: planted.skipped.id in str(client.xrange(JOURNAL)),
                ):
                    eventually(wanted, "lock and skip on each node")
                client.set("redlock:lock:leaky", LEAKED + '{"task_id": "long gone"}')
        yield planted
        Path(until).touch()
        planted.result.get(timeout=100)


def test_status(planted):
    """The dead node is down, the forgetful one quarantined, and three of five are enough."""
    code, told = planted.asked("status")
    assert code == 0
    assert (told["quorum"], told["voting"], told["needed"]) == (True, 3, 3)
    down, quarantined, *up = told["nodes"]
    assert [node["node"] for node in told["nodes"]] == planted.labels
    assert (down["state"], quarantined["state"]) == ("down", "quarantined")
    assert [node["state"] for node in up] == ["up"] * 3
    assert 0 < quarantined["quarantine"] < 1.1 * MAX_TTL
    told_of_each = {"node", "state", "version", "uptime", "quarantine", "problem", "latency"}
    assert set(down) == told_of_each
    assert down["latency"] is None


def test_ls(planted):
    """The held lock with its holder, and the leaked key as one that never ends."""
    code, told = planted.asked("ls")
    assert code == 0
    assert told["down"] == planted.labels[:1]
    locks = {lock["name"]: lock for lock in told["locks"]}
    assert set(locks) == {planted.name, "leaky"}
    held, leaky = locks[planted.name], locks["leaky"]
    assert held["task_id"] == planted.result.id
    assert (held["task"], held["held"]) == ("shop.bill", True)
    assert held["host"] == socket.gethostname()
    assert 0 < held["ttl"] <= TTL
    assert set(planted.labels[2:]) <= set(held["votes"])
    assert held["fence"] > 0
    assert held["age"] > 0
    assert (leaky["ttl"], leaky["task_id"], leaky["votes"]) == (
        None,
        "long gone",
        planted.labels[2:],
    )
    assert leaky["token"] == LEAKED[:8]


def test_why(planted):
    """Who holds it, and what would become of another call; with the one that was skipped."""
    arguments = json.dumps([7, SECRET, planted.until])
    code, told = planted.asked("why", "shop.bill", arguments)
    assert code == 1
    assert told["state"] == "held"
    assert told["lock"] == planted.name
    assert planted.result.id in json.dumps(told["holder"])
    assert planted.skipped.id in json.dumps(told["recent"])
    code, words = planted.celery("redlock", "why", "shop.bill", arguments)
    assert code == 1
    assert planted.result.id in words
    assert "skip" in words
    code, told = planted.asked("why", "--name", "leaky")
    assert (code, told["state"]) == (1, "held")
    code, told = planted.asked("why", "shop.bill", json.dumps([8, SECRET, planted.until]))
    assert (code, told["state"]) == (0, "free")


def test_doctor(planted):
    """Each trouble by its code, at its place, with what to do."""
    code, told = planted.asked("doctor")
    assert code == 1
    found = {(finding["code"], finding["where"]) for finding in told["findings"]}
    down, quarantined, *up = planted.labels
    assert {("node-down", down), ("node-quarantined", quarantined)} <= found
    assert {("leaked-keys", node) for node in up} <= found
    assert all(finding["fix"] for finding in told["findings"])
    assert set(told["findings"][0]) == {"level", "code", "where", "what", "fix"}


def test_inspect(planted):
    """The worker lists the one lock that it holds, and sees the nodes as they are."""

    def answer(what):
        def told():  # a worker that is late has not answered at all
            code, out = planted.celery("inspect", "--timeout", "5", f"redlock_{what}", "--json")
            return json.loads(out) if code == 0 else None

        (of_worker,) = eventually(told, "answer of the worker", timeout=100).values()
        return of_worker[what]

    found = [(lock["name"], lock["task_id"]) for lock in answer("locks")]
    assert found == [(planted.name, planted.result.id)]

    def states():
        return [node["state"] for node in answer("nodes")]

    eventually(lambda: states() == ["down", "quarantined", "up", "up", "up"], "states")


def test_tail(planted):
    """The skip, with who held the lock."""
    code, out = planted.celery("redlock", "tail", "--no-follow", "--json")
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    (skip,) = [record for record in records if record["event"] == "TaskSkipped"]
    assert (skip["task_id"], skip["name"]) == (planted.skipped.id, planted.name)
    assert skip["holder"]["task_id"] == planted.result.id


def samples(text, metric):
    """Return the samples of *metric* in an exposition: labels as text -> value."""
    lines = re.findall(rf"^{metric}(?:\{{(.*?)\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in lines}


def test_metrics(planted):
    """Nodes by their state, and the skip in its counter."""
    url = f"http://127.0.0.1:{planted.port}/metrics"

    def read():
        try:
            return planted.fetched(url)
        except OSError:  # not yet
            return ""

    def shows():
        text = read()
        ups, quarantined = (samples(text, f"redlock_node_{it}") for it in ("up", "quarantined"))
        told = [
            [it.get(f'node="{label}"') for label in planted.labels] for it in (ups, quarantined)
        ]
        return text if told == [[0, 1, 1, 1, 1], [0, 1, 0, 0, 0]] else None

    text = eventually(shows, "nodes up and down", timeout=100, every=0.2)
    (skipped,) = [it for it in samples(text, "redlock_skipped_total").items() if it[1]]
    assert 'task="shop.bill"' in skipped[0]
    assert 'cause="conflict"' in skipped[0]
    assert skipped[1] == 1


@contextmanager
def served(planted):
    command = [sys.executable, "-m", "celery", "-A", "support.stage", "redlock", "web"]
    with (
        kept_port() as port,
        subprocess.Popen(
            [*command, "--port", str(port)],
            env=planted.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process,
    ):
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.terminate()


def test_web(planted):
    """All of it on one page; a task and a lock have pages of their own that say more."""
    with served(planted) as url:

        def shows(path, *words):
            def page():
                try:
                    text = planted.fetched(f"{url}{path}")
                except OSError:  # not yet
                    return None
                return text if all(word in text for word in words) else None

            return eventually(page, f"page /{path} with {words}", timeout=100, every=0.2)

        ids = (planted.result.id, planted.skipped.id)
        quorum = "Quorum: yes, without a node to spare. 3 of 5"
        text = shows(
            "", *planted.labels, planted.name, *ids, "leaky", "quarantined", "down", quorum
        )
        assert "never" in text.lower()
        shows("task?name=shop.bill", planted.name, *ids, "1 attempt: 1 skipped")
        held = (*ids, "This lock is held.", "is skipped", *planted.labels)
        shows(f"lock?{urlencode({'name': planted.name})}", *held)
        shows("lock?name=leaky", "never expires", LEAKED[:8])


def test_what_was_secret_stayed_so(planted):
    test_ls(planted)
    with redis.Redis.from_url(planted.it.nodes[2].url) as client:
        token = client.get(f"redlock:lock:{planted.name}")[:40].decode()
        journal = json.dumps([str(fields) for _, fields in client.xrange(JOURNAL)])
    arguments = "".join(planted.said) + planted.it.log() + journal
    for secret in (SECRET, token, LEAKED, WEB_TOKEN):
        assert secret not in arguments
