"""
What is raised in a body from outside is raised in the body and nowhere else.

In a main thread, another thread, and in greenlets of gevent and eventlet: each in a process of
its own, without lock nodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

import celery_redlock

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals")

#: How each kind of thread is made: `run` calls a function in one, and returns at its end.
SETUPS = {
    "main": "def run(work): work()\n",
    "thread": """
import threading
def run(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
""",
    "gevent": """
from gevent import monkey; monkey.patch_all()
import gevent
def run(work): gevent.spawn(work).get()
""",
    "eventlet": """
import eventlet; eventlet.monkey_patch()
def run(work): eventlet.spawn(work).wait()
""",
}

HEAD = """
import contextlib, json, os, random, socket, sys, threading, time
from celery_redlock.task.execution.interrupt import Interrupt, LockInterrupt, here, defer_interrupts

LONG = 600  # [s], longer than a test may take

def tell(**what):
    os.write(1, json.dumps(what).encode() + b"\\n")

def later(seconds, *works):
    def wait():
        time.sleep(seconds)
        for work in works:
            work()
    threading.Thread(target=wait, daemon=True).start()

def busy(seconds):
    # In Python, and giving way: can be interrupted in every setup.
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(0.001)
"""

everywhere = pytest.mark.parametrize("setup", sorted(SETUPS))
green = pytest.mark.parametrize("setup", ["eventlet", "gevent"])


def run(setup, source):
    if setup in ("gevent", "eventlet") and not find_spec(setup):
        pytest.skip(f"{setup} is not installed")
    whole = f"{SETUPS[setup]}\n{HEAD}\n{textwrap.dedent(source)}"
    root = str(Path(celery_redlock.__file__).parents[1])
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", whole],
        cwd=root,  # so that it imports what the test imports
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert b"Traceback" not in ended.stderr, ended.stderr.decode()
    return [json.loads(line) for line in ended.stdout.splitlines()]


@everywhere
def test_it_is_raised_once_where_it_was_armed(setup):
    (told,) = run(
        setup,
        """
        def work():
            mine, caught, fired = Interrupt(), [], []
            def until_fired_twice():
                while not fired:
                    busy(0.01)
                busy(0.1)  # for what might come yet
            with mine:
                later(0.05, mine.fire, mine.fire, lambda: fired.append(True))
                for work in (lambda: busy(LONG), until_fired_twice):
                    try:
                        work()
                    except LockInterrupt as error:
                        caught.append(error.interrupt is mine)
            mine.fire()
            busy(0.1)
            tell(caught=caught, armed=here.interrupt is not None)
        run(work)
        """,
    )
    assert told == {"caught": [True], "armed": False}


@everywhere
def test_nothing_is_raised_before_or_after(setup):
    (told,) = run(
        setup,
        """
        def work():
            early = Interrupt()
            early.fire()
            with early:
                busy(0.05)
            inside = outside = rounds = 0
            span = 0.002  # of a body; follows the machine, so that half of them end before
            while rounds < 300 or min(inside, rounds - inside) <= 5:
                rounds += 1
                mine = Interrupt()
                try:
                    try:
                        with mine:
                            later(random.uniform(0.0, 0.004), mine.fire)
                            busy(span)
                        span *= 1.1
                    except LockInterrupt:
                        inside += 1
                        span *= 0.9
                    for _ in range(100):
                        sum(range(10))
                    time.sleep(0)
                except LockInterrupt:
                    outside += 1
            busy(0.1)
            tell(inside=inside, outside=outside, late=rounds - inside)
        run(work)
        """,
    )
    assert told["outside"] == 0
    assert told["inside"] > 5
    assert told["late"] > 5


@everywhere
@pytest.mark.parametrize("order", ["outer first", "inner first"])
def test_two_that_are_lost_at_once_are_both_raised(setup, order):
    (told,) = run(
        setup,
        f"""
        def work():
            outer, inner, caught = Interrupt(), Interrupt(), []
            fire = [outer.fire, inner.fire]
            if {order!r} == "inner first":
                fire.reverse()
            try:
                with outer:
                    try:
                        with inner:
                            later(0.02, *fire)
                            busy(LONG)
                    except LockInterrupt as error:
                        caught.append("inner" if error.interrupt is inner else "outer")
                    busy(0.0 if "outer" in caught else LONG)
            except LockInterrupt as error:
                caught.append("inner" if error.interrupt is inner else "outer")
            busy(0.1)
            tell(caught=caught, armed=here.interrupt is not None)
        run(work)
        """,
    )
    # Raised for the outer one, it ends the inner body too; nothing is left to raise there then.
    assert told["armed"] is False
    assert "outer" in told["caught"]
    assert len(set(told["caught"])) == len(told["caught"])


@everywhere
def test_our_own_io_in_a_nested_task_is_not_disturbed(setup):
    (told,) = run(
        setup,
        """
        def work():
            broken = raised = 0
            for n in range(150):
                outer, done = Interrupt(), []
                try:
                    with outer:
                        later(random.uniform(0.0, 0.004), outer.fire)
                        for _ in range(3):
                            done.append("began")
                            try:
                                with defer_interrupts():
                                    done[-1] = "inside"
                                    busy(0.0015)
                                    done[-1] = "whole"
                            except LockInterrupt:
                                broken += done[-1] == "inside"
                                raise
                        busy(LONG)
                except LockInterrupt:
                    raised += 1
            tell(broken=broken, raised=raised, armed=here.interrupt is not None)
        run(work)
        """,
    )
    assert told == {"broken": 0, "raised": 150, "armed": False}


@green
@pytest.mark.parametrize(
    "waits",
    [
        "time.sleep(LONG)",
        "here.recv(1)",
        "queue.get()",
        "lock.acquire()",
        "event.wait()",
        "event.wait(LONG)",
        "thread.join()",
    ],
)
def test_a_greenlet_is_woken_from_whatever_it_waits_for(setup, waits):
    (told,) = run(
        setup,
        f"""
        import queue as queues
        def work():
            mine, queue, event = Interrupt(), queues.Queue(), threading.Event()
            here, there = socket.socketpair()
            lock = threading.Lock()
            lock.acquire()
            thread = threading.Thread(target=time.sleep, args=(LONG,), daemon=True)
            thread.start()
            woken = False
            try:
                with mine:
                    later(0.05, mine.fire)
                    {waits}
            except LockInterrupt:
                woken = True
            there.send(b"x")
            queue.put("x")
            event.set()
            lock.release()
            sleeps = []
            for _ in range(5):
                began = time.monotonic()
                time.sleep(0.1)
                sleeps.append(time.monotonic() - began)
            tell(woken=woken, shortest=min(sleeps), left=[here.recv(1) == b"x", queue.get()],
                 free=lock.acquire(timeout=60))
        run(work)
        """,
    )
    assert told["woken"]
    assert told["shortest"] > 0.09
    assert told["left"] == [True, "x"]
    assert told["free"]


@green
def test_a_greenlet_that_never_gives_way_is_told_when_it_does(setup):
    (told,) = run(
        setup,
        """
        def work():
            mine, said, hogs = Interrupt(), [], []
            def fire():
                while not hogs:
                    time.sleep(0.001)
                mine.fire()
            try:
                with mine:
                    threading.Thread(target=fire, daemon=True).start()
                    time.sleep(0)
                    hogs.append(True)
                    ends = time.monotonic() + 0.5
                    while time.monotonic() < ends:
                        pass
                    said.append("hogged")
                    time.sleep(LONG)
                    said.append("slept")
            except LockInterrupt:
                said.append("told")
            tell(said=said)
        run(work)
        """,
    )
    assert told == {"said": ["hogged", "told"]}


def test_nothing_green_is_imported():
    (told,) = run(
        "main",
        """
        with Interrupt():
            pass
        tell(loaded=[name for name in ("gevent", "eventlet") if name in sys.modules])
        """,
    )
    assert told == {"loaded": []}
