"""Sentry monitors of schedules: a check-in is begun for what a task will end, and no other."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec

import pytest
from celery.schedules import crontab

from celery_redlock import RedlockTask
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.task.messages.slot import Slot
from companions.test_sentry import begin, sent_in
from support.beats import stage_beat
from support.stage import stage
from support.waiting import eventually

# A crontab is due by the minute: Sentry monitors no shorter intervals.
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("sentry_sdk") is None, reason="not installed"),
]


def declare(app):
    if "STAGE" in os.environ:
        begin(monitor_beat_tasks=True)

    @app.task(name="nightly", base=RedlockTask, shared=False, lock_key="nightly")
    def nightly():
        return "done"

    app.conf.beat_schedule = {"nightly": {"task": "nightly", "schedule": crontab()}}


def check_ins(folder):
    """Return the check-ins that were sent, id -> its states."""
    found = {}
    for one in sent_in(folder):
        if "check_in_id" in one:
            found.setdefault(one["check_in_id"], []).append(one["status"])
    return found


@pytest.fixture
def it(tmp_path):
    with stage(__file__, tmp_path, nodes=3, redlock_beat_name="stage") as it:
        it.folder = tmp_path
        it.worker()
        yield it


def test_a_slot_that_is_published_ends_its_check_in(it):
    """The task that it is published for does."""
    stage_beat(it, "beat")
    eventually(
        lambda: ["in_progress", "ok"] in check_ins(it.folder).values(), "a check-in", timeout=100
    )


def test_a_slot_that_is_skipped_begins_none(it):
    locks = it.locks()
    info = {"task": "nightly", "task_id": "earlier", **Slot("nightly", time.time() - 60).info}
    held = locks.take(LockRequest("nightly", locks.rules.max_ttl, 60.0, info=info))
    beat = stage_beat(it, "beat")
    beat.wait_for_log(r"Skipped slot 'nightly'", timeout=100)
    assert check_ins(it.folder) == {}
    locks.give_back(held)
    locks.close()
