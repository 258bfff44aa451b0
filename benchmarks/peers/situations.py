"""
What is done in each row, the same to every column, and what is seen of it.

A situation returns plain numbers and words; `benchmarks.peers.verdicts` says what they mean.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery import chord

from benchmarks.peers.rows import AMPLE, BY_KEY, INTERVAL, LONGEST, OURS, SHORT
from benchmarks.peers.scene import Scene
from support.events import now

Seen = dict[str, Any]
READY = {"SUCCESS", "FAILURE", "REVOKED"}
#: How long a lock is waited for that should lapse, and what should run [s].
PATIENCE = AMPLE + 4.0
#: For how many intervals the runs of two beats are counted.
SLOTS = 3


def at_once(there: Scene, name: str = "job x") -> int:
    """Return how many bodies of one name ran at the same time, at most."""
    found = [
        (one.started, one.ended if one.finished else float("inf")) for one in there.bodies(name)
    ]
    return max((sum(b <= begun < e for b, e in found) for begun, _ in found), default=0)


def killed(there: Scene) -> Seen:
    """Kill the worker that runs the task, with another one idle, and call it again."""
    first = there.worker(queue="first", concurrency=1)
    there.worker()
    called = now()
    there.call("job", queue="first")
    there.started()
    time.sleep(1)  # the task is in the middle of its work
    first.kill()
    at = now()
    return {**there.silence(at, PATIENCE), "held": at - called, "ttl": ttl(there)}


def outlasted(there: Scene) -> Seen:
    """Call the task a second time when the TTL has passed since it began."""
    there.worker()
    there.call("job")
    first = there.started()
    time.sleep(SHORT + 1)  # what was not renewed has lapsed
    there.call("job")
    there.wait(lambda: len(there.bodies()) > 1, 2)
    there.wait(lambda: there.bodies()[0].finished, PATIENCE)
    ended = there.bodies()[0].ended
    return {"at_once": at_once(there), "took": ended - first.started}


def redelivered(there: Scene) -> Seen:
    """Let the visibility timeout pass while the task runs, with two workers to take copies."""
    with ThreadPoolExecutor() as starters:
        list(starters.map(lambda _: there.worker(), range(2)))
    called = there.call("job")
    there.started()
    answer = there.answer(called["id"], PATIENCE)
    there.wait(lambda: all(one.finished for one in there.bodies()), PATIENCE)
    return {"at_once": at_once(there), "answer": answer}


def retried(there: Scene) -> Seen:
    """Make the same call while a task waits for its retry, and look for the retry."""
    there.worker()
    called = there.call("again")
    there.started(name="again x")
    there.wait(lambda: there.state(called["id"]) == "RETRY", 10)
    there.call("again")
    there.wait(lambda: retries(there), 7)
    there.wait(lambda: all(one.finished for one in there.bodies("again x")), 8)
    return {
        "retries": len(retries(there)),
        "at_once": at_once(there, "again x"),
        "bodies": len(there.bodies("again x")),
    }


def retries(there: Scene) -> list[Any]:
    """Return the starts that were retries."""
    return [one for one in there.events() if one["kind"] == "start" and one["retries"]]


def revoked(there: Scene) -> Seen:
    """Revoke a task that waits behind another one, and call it again when its turn has come."""
    there.worker(concurrency=1)
    busy = there.call("busy")["id"]
    there.started(name="busy x")
    called = now()
    victim = there.call("job")["id"]
    there.app.control.revoke(victim)
    assert there.wait(lambda: there.state(victim) == "REVOKED", 10), "not revoked"
    assert there.wait(lambda: there.state(busy) == "SUCCESS", 10), "nothing was before it"
    at = now()
    return {**there.silence(at, PATIENCE), "held": at - called, "ttl": ttl(there)}


def limited(there: Scene) -> Seen:
    """Let the task exceed its hard time limit, and call it again."""
    there.worker()
    called = now()
    victim = there.call("job")["id"]
    there.started()
    assert there.wait(lambda: there.state(victim) == "FAILURE", 10), "not ended"
    at = now()
    return {**there.silence(at, PATIENCE), "held": at - called, "ttl": ttl(there)}


def chord_(there: Scene) -> Seen:
    """Start a chord of three, two of which are the same call."""
    there.worker()
    work, total = there.app.tasks["work"], there.app.tasks["total"]
    try:
        result = chord([work.s("job"), work.s("job"), work.s("other")])(total.s())
        raised = None
    except Exception as error:  # noqa: BLE001  what is raised is what is looked at
        result, raised = None, type(error).__name__
    answer = there.answer(result.id, LONGEST + 3) if result else None
    return {"raised": raised, "answer": answer, "at_once": at_once(there)}


def down(there: Scene) -> Seen:
    """Kill the lock server, or two of our five, and call the task twice."""
    there.worker()
    for node in there.nodes[: 2 if there.cell.column == OURS else 1]:
        node.kill()
    calls = [there.call("job") for _ in range(2)]
    ids = sorted({one["id"] for one in calls if one["id"]})
    there.wait(lambda: all(there.state(one) in READY for one in ids), PATIENCE)
    return {
        "raised": calls[0]["raised"],
        "published": len(ids),
        "states": sorted({there.state(one) for one in ids}),
        "failed": [there.answer(one, 1) for one in ids if there.state(one) == "FAILURE"],
        "bodies": len(there.bodies()),
        "at_once": at_once(there),
        "down": 2 if there.cell.column == OURS else 1,
        "of": len(there.nodes),
    }


def spelt(there: Scene) -> Seen:
    """Call the task in three spellings, and another one that is not the same call."""
    there.worker(concurrency=4)
    there.call(1)
    there.call(a=1)
    there.call(1, b="x")
    there.call(1, b="y")
    there.started(name="1 x")
    there.wait(lambda: there.bodies("1 y") and len(there.bodies("1 x")) > 2, 8.0)
    return {"at_once": at_once(there, "1 x"), "other": len(there.bodies("1 y"))}


def late(there: Scene) -> Seen:
    """Pause a worker until its lock has lapsed; resume it when another one runs the task."""
    with ThreadPoolExecutor() as starters:
        slow, _ = starters.map(lambda queue: there.worker(queue=queue), ("slow", "celery"))
    older = there.call("job", queue="slow")["id"]
    there.started()
    time.sleep(0.5)  # its worker knows that it runs
    os.killpg(slow.pid, signal.SIGSTOP)
    time.sleep(SHORT + 1)  # its lock has lapsed
    there.call("job")
    newer = there.started(2)
    os.killpg(slow.pid, signal.SIGCONT)
    # By its own end, or by LockLost where it is told in time that it runs without its lock.
    assert there.wait(lambda: there.state(older) in READY, 15), "the late one has no result"
    time.sleep(1)  # what it does after that: give its lock back
    there.call("job")
    there.wait(lambda: len(there.bodies()) > 2, 1.5)
    later = [one for one in there.bodies() if one.started > newer.started]
    assert not there.bodies()[1].finished, "the newer one has ended too early"
    return {"beside": len(later)}


def beats(there: Scene) -> Seen:
    """Run two beats, half an interval out of step, and count runs for some intervals."""
    there.worker()
    there.beat("one")
    two = there.beat("two")
    # Machines do not start in step. A beat that is overdue sends at once when it is resumed, and
    # has its turn at that moment from then on.
    two.signal(signal.SIGSTOP)
    step = runs_since(there, now(), 2)
    there.wait(lambda: now() >= step + INTERVAL / 2, INTERVAL)
    two.signal(signal.SIGCONT)
    begin = runs_since(there, step + INTERVAL * 0.75, 1)
    end = begin + (SLOTS - 0.25) * INTERVAL
    there.wait(lambda: now() > end + 0.1, (SLOTS + 1) * INTERVAL)
    runs = [one for one in there.bodies("tick x") if begin <= one.started <= end]
    return {"runs": len(runs), "slots": SLOTS}


def runs_since(there: Scene, since: float, times: int) -> float:
    """Return when the entry's run number *times* after *since* starts, waiting for it."""

    def starts() -> list[float]:
        return [one.started for one in there.bodies("tick x") if one.started > since]

    assert there.wait(lambda: len(starts()) >= times, 30), "no beat sends"
    return starts()[times - 1]


def ttl(there: Scene) -> int:
    """Return the TTL of the column's lock [s]."""
    return SHORT if there.cell.column == OURS else BY_KEY[there.cell.row].ttl


SITUATIONS: dict[str, Callable[[Scene], Seen]] = {
    "killed": killed,
    "outlasted": outlasted,
    "redelivered": redelivered,
    "retried": retried,
    "revoked": revoked,
    "limited": limited,
    "chord": chord_,
    "down": down,
    "spelt": spelt,
    "late": late,
    "beats": beats,
}
