"""Flower: what it shows of workers and tasks, over its API."""

from __future__ import annotations

import json
import urllib.request
from contextlib import closing, suppress
from importlib.util import find_spec

import pytest

from celery_redlock.testing.ports import reserved
from companions import shop
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
    # Kept until the end: nobody else is given it, and Flower may be bound beside it.
    with closing(reserved()) as place:
        spend_a_day_under_flower(tmp_path, place.getsockname()[1])


def spend_a_day_under_flower(tmp_path, port):
    def ask(what):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/{what}", timeout=60) as answer:
            return json.load(answer)

    def workers():
        with suppress(OSError):  # it says 503 where it could not ask the worker
            return ask("workers?refresh=1")
        return None

    with stage(__file__, tmp_path, nodes=3) as it, flower(it, port):
        it.worker(args=["-E"])
        eventually(workers, "the worker", every=0.5)
        found = shop.spend_a_day(it)
        names = ["bill", "bill", "again", "broken", "shy", "remind"]
        states = ["SUCCESS", "SUCCESS", "SUCCESS", "FAILURE", "SUCCESS", "SUCCESS"]
        expected = dict(zip(found["ids"], zip(names, states, strict=True), strict=True))

        def shown():
            return {one: (task["name"], task["state"]) for one, task in ask("tasks").items()}

        eventually(lambda: shown() == expected, "all states", every=0.5)
