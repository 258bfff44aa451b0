"""
A day compressed: known overlaps, duplicates and copies, reported right to the last one.

What workers refuse happens; what report mode would only report is told as its events.
"""

from __future__ import annotations

import ast
import json
import math
import time

import pytest
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_redlock import RedlockTask, Reschedule, events
from celery_redlock.observers import tally
from celery_redlock.ops.cli import redlock
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.tally import CAUSES
from support.stage import LASTING, stage

DAY = 24 * 3600.0
#: As long as the defaults, which the report advises on.
LEASES = {**LASTING, "redlock_ttl": 30.0, "redlock_max_ttl": 60.0}


def declare(app):
    def done(number):
        return number

    def locked(name, **options):
        app.task(done, base=RedlockTask, name=name, shared=False, **options)

    locked("shop.quick")
    locked("shop.skipped", lock_key="skipped")
    locked("shop.later", lock_key="later", on_conflict=Reschedule(base=1, cap=1))
    locked("shop.once", lock_key="once", unique_until="finished", dedup_ttl=600, acks_late=True)
    locked("shop.watched", unique_on=["number"], lock_ttl=60)


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    with stage(__file__, tmp_path_factory.mktemp("stage"), **LEASES) as it:
        yield it


def report(it, *words):
    context = CLIContext(it.app, no_color=True, workdir=None)
    result = CliRunner().invoke(redlock, ["report", "--json", *words], obj=context)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def duplicates(it):
    results = [it.task("shop.once").delay(1) for _ in range(5)]
    assert [result.duplicate for result in results] == [False, True, True, True, True]
    return results[0]


def overlaps(it, worker):
    with it.held("skipped"), it.held("later"):
        skipped = [it.task("shop.skipped").delay(number) for number in range(3)]
        later = it.task("shop.later").delay(4)
        assert {result.get(timeout=100)["skipped"] for result in skipped} == {"conflict"}
        worker.wait_for_log(r"Rescheduled task shop\.later.*attempt 2", timeout=100)
    return later


def only_reported(it, monkeypatch):
    """Tell what happens to a task in report mode: eight runs, of which five would not have been."""
    notify, who = plugin_for(it.app).notify, {"task": "shop.watched", "task_id": "me"}
    with monkeypatch.context() as patch:  # the first of them was yesterday
        yesterday = time.time() - DAY
        patch.setattr(tally.time, "time", lambda: yesterday)
        notify(events.LockAcquired("a", None, 0.001, report=True, **who))
        plugin_for(it.app).flush()
    for _ in range(2):
        notify(events.LockAcquired("a", None, 0.001, report=True, **who))
        notify(events.LockReleased("a", 0.2, ttl=60.0, report=True, **who))
    holder = {"task": "shop.watched", "task_id": "first", "host": "w1", "pid": 7, "token": "x"}
    for cause in ("conflict", "conflict", "redelivered", "finished", "unavailable"):
        notify(events.TaskSkipped("a", cause=cause, holder=holder, report=True, **who))
    notify(events.DuplicatePublished("a", "shop.watched", "first", "join", report=True))
    notify(events.LeaseLost("a", "deadline", report=True, **who))


def test_a_day_compressed(it, monkeypatch):
    first = duplicates(it)
    worker = it.worker(concurrency=2, args=["--max-tasks-per-child", "3"])
    quick = [it.task("shop.quick").delay(number) for number in range(10)]
    later = overlaps(it, worker)
    assert [result.get(timeout=100) for result in (*quick, later, first)] == [*range(10), 4, 1]
    only_reported(it, monkeypatch)
    worker.terminate()
    plugin_for(it.app).flush()

    found = report(it, "--since", "48h")
    tasks = {task["task"]: task for task in found["tasks"]}
    refused = {
        "shop.quick": {},
        "shop.skipped": {"conflict": 3},
        "shop.later": {"conflict": 1},
        "shop.once": {"duplicate": 4},
        "shop.watched": {},
    }
    ran = {"shop.quick": 10, "shop.skipped": 0, "shop.later": 1, "shop.once": 1, "shop.watched": 8}
    assert {name: task["refused"] for name, task in tasks.items()} == refused
    assert {name: task["ran"] for name, task in tasks.items()} == ran
    # For a task whose arguments make no name there would be no entry.
    told = set(CAUSES) - {"unnamed", "rate", "deliveries", "debounced"}
    reported = {**dict.fromkeys(told, 1), "conflict": 2}
    assert tasks["shop.watched"]["reported"] == reported
    modes = {name: task["mode"] for name, task in tasks.items()}
    assert modes == {**dict.fromkeys(ran, "enforce"), "shop.watched": "report"}
    assert {name: task["holds"]["count"] for name, task in tasks.items()} == {
        **{name: ran[name] for name in ran if name != "shop.watched"},
        "shop.watched": 2,
    }
    assert tasks["shop.quick"]["holds"]["ttl"] == 30.0
    assert tasks["shop.once"]["examples"]["duplicate"]["holder_id"] == first.id
    holder = {"task": "shop.watched", "task_id": "first", "host": "w1", "pid": 7}
    assert tasks["shop.watched"]["examples"]["redelivered"]["holder"] == holder

    assert found["watched"] == pytest.approx(DAY, abs=600)
    advised = {it["option"]: it["value"] for it in tasks["shop.once"]["advice"]}
    needed = math.ceil(3600.0 + tasks["shop.once"]["holds"]["longest"])
    assert advised == {"lock_ttl": None, "dedup_ttl": 3600.0, "unique_for": needed}
    entries = ast.literal_eval(found["redlock_protect"])
    assert list(entries.pop("shop.later")) == ["lock_key", "lock_wait"]
    del advised["lock_ttl"]
    assert entries == {
        "shop.once": {"lock_key": "once", "unique_until": "finished", **advised},
        "shop.watched": {"unique_on": ["number"], "lock_ttl": 60, "lock_mode": "enforce"},
    }

    in_code = {name: task["in_code"] for name, task in tasks.items() if task["in_code"]}
    assert in_code == {"shop.once": ["dedup_ttl"]}  # its code says another one, which wins

    now = report(it, "--task", "shop.wat*", "--since", "1h")
    (task,) = now["tasks"]
    assert task["ran"] == 7
    assert "too short to advise" in task["too_short"]
    assert (task["advice"], now["redlock_protect"]) == ([], "")
