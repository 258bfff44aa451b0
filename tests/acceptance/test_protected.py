"""
Tasks that nobody wrote for us, protected by ``redlock_protect``, with real workers and a real beat.

Two stages play the same: one has the setting, the other is the twin without it. In whatever form
tasks are written is in `test_user_classes`, how workflows end in `test_workflows`.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from celery import shared_task

from celery_redlock.task.base import takes_lock
from support.beats import stage_beat
from support.events import body, overlaps, read
from support.redelivery import redelivered_after
from support.stage import stage
from support.waiting import eventually

#: Not longer, as the task of a killed worker waits for the end of its lease.
TTL = 8.0
#: After which a message is delivered again [s].
VISIBILITY = 5.0
#: How long a run of the task takes that is due every second [s].
NAP = 2.2
SETTING = {
    "vendor.once": {"unique_on": ["order"], "unique_until": "finished"},
    "vendor.next": {"lock_key": "{order}", "lock_wait": 100.0},
    "vendor.ping": None,
    "vendor.*": {"lock_key": "{order}"},
}


#: Orders that are worked on until the test says that all has come that they are to meet.
GATED = ("shared", "ping", "once", "late", "killed", "revoked")


def gate_of(events, order):
    return Path(events).with_name(f"open {order}")


def work(order, seconds=0.0):
    events = os.environ["EVENTS"]
    first = not any(e["name"] == order for e in read(events, "start"))
    with body(events, order):
        time.sleep(seconds)
        while order in GATED and first and not gate_of(events, order).exists():
            time.sleep(0.02)
    return f"worked on {order}"


def again(self, order):
    with body(os.environ["EVENTS"], order, retries=self.request.retries):
        if self.request.retries < 2:
            raise self.retry(countdown=0)
    return self.request.retries


def declare(app):
    if "STAGE" in os.environ:
        shared_task(name="vendor.shared")(work)
    for name in ("once", "next", "ping", "nap"):
        app.task(name=f"vendor.{name}", shared=False)(work)
    app.task(name="vendor.late", acks_late=True, shared=False)(work)
    app.task(name="vendor.again", bind=True, shared=False)(again)


class Scene:
    def __init__(self, it):
        self.it, self.results = it, {}

    def overlaps(self, order):
        return overlaps(e for e in read(self.it.events) if e.get("name") == order)

    def deliveries(self, order):
        return self.it.log().count(f"[{self.results[order][0].id}] received")


def set_up(folder, setting):
    return stage(
        __file__,
        folder,
        nodes=3,
        redlock_ttl=TTL,
        redlock_max_ttl=TTL,
        redlock_node_timeout=1.0,
        redlock_protect=setting,
        **redelivered_after(VISIBILITY),
        beat_schedule={
            "nap": {"task": "vendor.nap", "schedule": 1.0, "args": ["nap", NAP]},
        },
    )


def publish(it):
    def send(name, *args, queue="q_both"):
        return it.task(f"vendor.{name}").apply_async(args, queue=queue)

    def send_shared(*args):
        return it.app.send_task("vendor.shared", args, queue="q_both")

    results = {
        "killed": [send("late", "killed", queue="q_killed")],
        "again": [send("again", "again")],
        "late": [send("late", "late")],
        "revoked": [send("nap", "revoked")],
        "shared": [send_shared("shared")],
        "ping": [send("ping", "ping")],
    }
    for order in ("killed", "revoked", "shared", "ping"):
        it.started(order)
    results["shared"].append(send_shared("shared"))
    results["ping"].append(send("ping", "ping"))
    results["once"] = [send("once", "once") for _ in range(2)]
    it.workers[-1].kill()
    it.worker(name="heir", concurrency=1, args=["-Q", "q_killed"])
    it.app.control.revoke(results["revoked"][0].id, terminate=True)
    results["revoked"].append(send("next", "revoked"))
    return results


def wait_for_meetings(scene, *, is_protected):
    it = scene.it
    it.started("ping", 2)
    eventually(lambda: scene.deliveries("late") >= 2, "another delivery", timeout=100)
    if is_protected:
        scene.results["shared"][1].get(timeout=100)
        it.started("nap", 2)
    else:
        for order in ("shared", "late", "once"):
            it.started(order, 2)
        eventually(lambda: scene.overlaps("nap"), "slots that overlap", timeout=100)
    for order in GATED:
        gate_of(it.events, order).touch()


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    found = {}
    with ExitStack() as stack:
        for name, setting in (("protected", SETTING), ("plain", None)):
            it = stack.enter_context(set_up(tmp_path_factory.mktemp(name), setting))
            it.start_workers(
                {"name": f"w{n}", "concurrency": size, "args": ["-Q", queue]}
                for n, (queue, size) in enumerate((("q_both,celery", 9), ("q_killed", 1)))
            )
            it.workers.sort(key=lambda worker: "q_killed" in worker.command)
            found[name] = Scene(it)
        for scene in found.values():
            beat = stage_beat(scene.it, "beat")
            scene.results = publish(scene.it)
            wait_for_meetings(scene, is_protected=scene is found["protected"])
            beat.stop()
        yield found


@pytest.fixture
def protected(scenes):
    return scenes["protected"]


@pytest.fixture
def plain(scenes):
    """The twin."""
    return scenes["plain"]


def test_a_shared_task_runs_once(protected):
    first, second = (result.get(timeout=100) for result in protected.results["shared"])
    assert first == "worked on shared"
    assert second["skipped"] == "conflict"
    assert len(protected.it.bodies("shared")) == 1


def test_a_task_that_the_setting_leaves_out_runs_as_usual(protected):
    """Although a later pattern matches it."""
    assert [r.get(timeout=100) for r in protected.results["ping"]] == ["worked on ping"] * 2
    assert protected.it.bodies("ping")
    assert not takes_lock(protected.it.task("vendor.ping"))


def test_retries_run_under_the_lock(protected, plain):
    for scene in (protected, plain):
        assert scene.results["again"][0].get(timeout=100) == 2
        assert len(scene.it.bodies("again")) == 3
    assert protected.overlaps("again") == []


def test_a_second_publish_is_joined(protected):
    first, second = protected.results["once"]
    assert (second.duplicate, second.id) == (True, first.id)
    assert second.get(timeout=100) == "worked on once"
    assert len(protected.it.bodies("once")) == 1


def test_a_message_delivered_again_does_not_run_again(protected):
    """Although its first delivery runs for longer than a visibility timeout."""
    assert protected.results["late"][0].get(timeout=100) == "worked on late"
    protected.it.wait_until_quiet()
    assert len(protected.it.bodies("late")) == 1
    assert protected.deliveries("late") > 1, "not delivered again: this shows nothing"


def test_the_task_of_a_killed_worker_is_done_by_another(protected):
    assert protected.results["killed"][0].get(timeout=100) == "worked on killed"
    first, *_, last = protected.it.bodies("killed")
    assert (first.finished, last.finished) == (False, True)
    assert protected.overlaps("killed") == []


def test_the_lock_of_a_revoked_task_is_free_for_the_next(protected):
    assert protected.results["revoked"][1].get(timeout=100) == "worked on revoked"
    assert protected.overlaps("revoked") == []


def test_beat_publishes_no_slot_while_an_earlier_one_runs(protected):
    assert protected.overlaps("nap") == []


def test_without_the_setting_they_meet(plain):
    """The twin: calls, redeliveries and slots overlap, and every publish is a message."""
    for results in plain.results.values():
        for result in results[-1:]:
            result.get(timeout=100)
    for order in ("shared", "late", "nap"):
        eventually(lambda order=order: plain.overlaps(order), f"overlap of {order}")
    assert len(plain.it.bodies("once")) == 2
