"""
A day compressed: a workload with known overlaps, redeliveries, late copies and duplicates.

In report mode all of it happens and ``redlock report`` counts it, right to the last one. The twin
enforces: none of it happens, and what was refused is counted.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_redlock import RedlockTask
from celery_redlock.ops.cli import redlock
from celery_redlock.plugin import plugin_for
from support.events import body, overlaps, read
from support.stage import LASTING, copied_message, stage
from support.waiting import eventually

MODES = ["report", "enforce"]
#: What the workload does to one task: overlaps, copies beside the original, and after its end.
KNOWN = {"conflict": 4, "redelivered": 1, "finished": 2}
#: And to another one, at publish.
DUPLICATES = {"duplicate": 3}


def declare(app):
    path = os.environ.get("EVENTS")

    def work(self, key, is_gated=False):  # noqa: FBT002  as a message carries it
        name = f"{self.name} {key}"
        is_first = not any(e["name"] == name for e in read(path, "start"))
        with body(path, name):
            while is_gated and is_first and not Path(path).with_name(f"open {name}").exists():
                time.sleep(0.01)

    for mode in MODES:
        ours = {"base": RedlockTask, "bind": True, "shared": False, "lock_mode": mode}
        app.task(name=f"day {mode}", unique_on=["key"], acks_late=True, **ours)(work)
        app.task(name=f"once {mode}", unique_on=["key"], unique_until="finished", **ours)(work)


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    # In report mode a child's first task has one node timeout to connect, too.
    patient = {**LASTING, "redlock_node_timeout": 10.0}
    with stage(__file__, tmp_path_factory.mktemp("day"), **patient) as it:
        yield it


def overlap_and_deliver_again(it, mode):
    task = it.task(f"day {mode}")
    task.delay("overlap", is_gated=True)
    it.started(f"day {mode} overlap")
    others = [task.delay("overlap") for _ in range(KNOWN["conflict"])]
    for other in others:
        other.get(timeout=100)
    copy = copied_message()
    again = task.apply_async(("again",), {"is_gated": True}, **copy)
    it.started(f"day {mode} again")
    for _ in range(KNOWN["redelivered"]):
        task.apply_async(("again",), {"is_gated": True}, **copy)
    if mode == "report":
        it.started("day report again", 1 + KNOWN["redelivered"])
    else:
        it.wait_for_log(rf"day enforce\[{again.id}\] for \d+ s:")
    for key in ("overlap", "again"):
        it.events.with_name(f"open day {mode} {key}").touch()


def run_a_day(it):
    for mode in MODES:  # one process runs them, one after the other: they overlap nowhere else
        for _ in range(1 + DUPLICATES["duplicate"]):
            it.task(f"once {mode}").apply_async(("k",), queue="once")
    one, many = {"concurrency": 1, "args": ["-Q", "once"]}, {"concurrency": 8}
    it.start_workers([{"name": "one", **one}, {"name": "many", **many}])
    for mode in MODES:
        overlap_and_deliver_again(it, mode)
    for mode in MODES:
        task, copy = it.task(f"day {mode}"), copied_message()
        for number in range(1 + KNOWN["finished"]):
            result = task.apply_async(("late",), **copy)
            if mode == "report":  # each runs; an enforced one ends without a word
                it.started("day report late", number + 1)
            result.get(timeout=100)
            eventually(lambda: not it.keys("redlock*:lock:day * late*"), "a release")
    it.wait_until_quiet()
    for worker in it.workers:
        worker.terminate()
    plugin_for(it.app).flush()


def report(it):
    context = CLIContext(it.app, no_color=True, workdir=None)
    result = CliRunner().invoke(redlock, ["report", "--json"], obj=context)
    assert result.exit_code == 0, result.output
    return {task["task"]: task for task in json.loads(result.stdout)["tasks"]}


def test_a_day_is_reported_right_to_the_last_one(it):
    run_a_day(it)
    tasks = report(it)
    bodies = {
        mode: [e for e in read(it.events) if e["name"].startswith(f"day {mode}")] for mode in MODES
    }
    assert overlaps(bodies["report"])
    assert overlaps(bodies["enforce"]) == []
    day, twin, once, joined = (tasks[f"{it} {mode}"] for it in ("day", "once") for mode in MODES)
    assert (day["reported"], day["refused"], day["mode"]) == (KNOWN, {}, "report")
    assert (once["reported"], once["refused"], once["mode"]) == (DUPLICATES, {}, "report")
    assert (day["ran"], once["ran"]) == (3 + sum(KNOWN.values()), 4)
    assert (twin["reported"], twin["refused"]) == ({}, {"conflict": KNOWN["conflict"]})
    assert (joined["reported"], joined["refused"]) == ({}, DUPLICATES)
    assert (twin["ran"], joined["ran"]) == (3, 1)
    assert [len(it.bodies(f"day enforce {key}")) for key in ("again", "overlap", "late")] == [1] * 3
