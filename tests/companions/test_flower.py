"""Flower: what it shows of workers and tasks, over its API."""

from __future__ import annotations

import json
import urllib.request
from importlib.util import find_spec

import pytest

from companions import shop
from support.rabbitmq import free_ports
from support.stage import stage
from support.waiting import eventually
from support.worker import CeleryProcess

#: Not imported here: it would change this process for other tests.
pytestmark = pytest.mark.skipif(find_spec("flower") is None, reason="not installed")


def declare(app):
    shop.declare(app)


def flower(it, port):
    command = ["--broker", it.broker.url, "flower", "--address=127.0.0.1", f"--port={port}"]
    known = {"FLOWER_UNAUTHENTICATED_API": "yes"}
    return CeleryProcess("support.stage", command, ready="Visit me at", env={**env_of(it), **known})


def env_of(it):
    return {"EVENTS": str(it.events), "STAGE": json.dumps([it._file, it.conf])}


def test_a_day_under_flower(tmp_path):
    (port,) = free_ports(1)

    def ask(what):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/{what}", timeout=60) as answer:
            return json.load(answer)

    with stage(__file__, tmp_path, nodes=3) as it, flower(it, port):
        it.worker(args=["-E"])
        eventually(lambda: ask("workers?refresh=1"), "the worker", every=0.5)
        found = shop.spend_a_day(it)
        names = ["bill", "bill", "again", "broken", "shy", "remind"]
        states = ["SUCCESS", "SUCCESS", "SUCCESS", "FAILURE", "SUCCESS", "SUCCESS"]
        expected = dict(zip(found["ids"], zip(names, states, strict=True), strict=True))

        def shown():
            return {one: (task["name"], task["state"]) for one, task in ask("tasks").items()}

        eventually(lambda: shown() == expected, "all states", every=0.5)
