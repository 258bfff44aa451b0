"""A process that holds a lock is forked: the lock stays its own, and the child begins anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.script import Script, enrol

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

#: What a child does with what it inherits, and tells; ``held`` is its parent's.
CHILD = """
LEASE = 15.0  # outlasts a stall of nine seconds; it is renewed every five
def child(number):
    told = {"pid": os.getpid(), "reason": held.lost_reason, "watched": len(lock.held)}
    told["open"] = [fd for fd in sockets if is_ours(fd)]
    told["threads"] = [thread.name for thread in threading.enumerate()]
    told["inherited"] = [node.connection for node in lock.fanout.nodes if node.connection]
    try:
        lock.acquire("report")
        told["rival"] = "granted"
    except LockTaken:
        told["rival"] = "taken"
    with lock.hold(f"own:{number}", ttl=LEASE) as own:
        began = time.monotonic()
        while own.renewals < 1 and time.monotonic() - began < 60:
            own.ensure_held()
            time.sleep(0.01)
        told["renewed"] = own.renewals >= 1
    tell(**told)

def is_ours(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == links[fd]
    except OSError:
        return False
"""
#: How a process has a child run a function to its end, and waits for it.
WAYS = {
    "os.fork": """
def have_child(function, *args):
    pid = os.fork()
    if pid == 0:
        try:
            function(*args)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
""",
    "multiprocessing": """
import multiprocessing
def have_child(function, *args):
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    process.join()
""",
    "billiard": """
import billiard
def have_child(function, *args):
    process = billiard.get_context("fork").Process(target=function, args=args)
    process.start()
    process.join()
""",
}
PARENT = """
with lock.hold("report", ttl=LEASE) as held:
    sockets = [node.sock.fileno() for node in lock.fanout.nodes]
    links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in sockets}
    before = [node.sock.getsockname()[1] for node in lock.fanout.nodes]
    RUN
    renewals = held.renewals
    began = time.monotonic()
    while held.renewals < renewals + 2 and time.monotonic() - began < 60:
        held.ensure_held()
        time.sleep(0.01)
    holders = [view.holder for view in lock.inspect("report")]
    tell(pid=os.getpid(), renewals=held.renewals - renewals, lost=held.is_lost,
         same=before == [node.sock.getsockname()[1] for node in lock.fanout.nodes],
         tokens=[holder.get("token") == held.token[:8] for holder in holders],
         pids=[holder.get("pid") for holder in holders])
"""
needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")


def child_is_sound(child):
    child.pop("pid")
    return child == {
        "reason": "fork",
        "watched": 0,
        "open": [],
        "threads": ["MainThread"],
        "inherited": [],
        "rival": "taken",
        "renewed": True,
    }


def parent_is_sound(parent):
    return (
        parent["renewals"] >= 2
        and not parent["lost"]
        and parent["same"]
        and parent["tokens"] == [True] * 5
        and parent["pids"] == [parent["pid"]] * 5
    )


@needs_proc
@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_child_has_nothing_of_its_parents_lock(five_nodes, way):
    run = PARENT.replace("RUN", "have_child(child, 1)")
    with Script(WAYS[way] + CHILD + run, enrol(five_nodes)) as script:
        child, parent = script.told(), script.told()
        assert child_is_sound(child), child
        assert parent_is_sound(parent), parent


@needs_proc
def test_a_grandchild_has_nothing_of_it_either(five_nodes):
    source = """
def middle():
    global held, sockets, links
    inherited = held.lost_reason
    with lock.hold("middle", ttl=LEASE) as held:
        sockets = [node.sock.fileno() for node in lock.fanout.nodes]
        links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in sockets}
        have_child(child, 2)
        held.ensure_held()
        holders = [view.holder.get("token") == held.token[:8] for view in lock.inspect("middle")]
        tell(inherited=inherited, holders=holders)
"""
    run = PARENT.replace("RUN", "have_child(middle)")
    with Script(WAYS["os.fork"] + CHILD + source + run, enrol(five_nodes)) as script:
        grandchild, middle, parent = script.told(), script.told(), script.told()
        assert child_is_sound(grandchild), grandchild
        assert middle == {"inherited": "fork", "holders": [True] * 5}
        assert parent_is_sound(parent), parent


LEAVES = """
with contextlib.ExitStack() as stack:
    held = stack.enter_context(lock.hold("report"))
    lock.inspect("report")
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(LockLost):
            stack.close()               # the child leaves the body, and lives on
        lock.fanout.settle_all(5.0)     # what it has to say has been said when this is over
        lock.release(lock.acquire("own"))
        lock.release(lock.acquire("own"))
        os._exit(0)
    os.waitpid(pid, 0)
    tell(tokens=[view.holder.get("token") == held.token[:8] for view in lock.inspect("report")])
"""


def test_a_child_that_leaves_the_body_releases_nothing(five_nodes):
    with Script(LEAVES, enrol(five_nodes)) as script:
        assert script.told() == {"tokens": [True] * 5}


def test_a_body_that_forks_and_returns_in_both_ends_its_lock_once(five_nodes):
    source = """
held = lock.take(LockRequest("report", 60.0))
if os.fork() == 0:
    lock.give_back(held)
    lock.inspect("report")
    tell(taken=sum(bool(view.holder) for view in lock.inspect("report")))
    os._exit(0)
os.wait()
lock.give_back(held)
lock.inspect("report")
tell(taken=sum(bool(view.holder) for view in lock.inspect("report")))
"""
    with Script(source, enrol(five_nodes)) as script:
        assert [script.told(), script.told()] == [{"taken": 5}, {"taken": 0}]


def test_forks_while_another_thread_holds_the_mutexes(five_nodes):
    source = """
def stands_still(frame, event, _arg):
    # Held at each of these lines in turn: the mutex of the connections or of the watchdog.
    if event == "line" and (frame.f_code.co_name, "at") in WANTED and not paused.is_set():
        if lock.fanout._mutex._is_owned() or lock._watchdog._mutex._is_owned():
            seen.append(frame.f_code.co_name)
            WANTED.discard((frame.f_code.co_name, "at"))
            paused.set()
            go_on.wait(60)
    return stands_still if frame.f_globals["__name__"].startswith("celery_redlock") else None

def work():
    sys.settrace(stands_still)
    while WANTED and not stop.is_set():
        with lock.hold("other", wait=60):
            pass

with lock.hold("report") as held:
    WANTED = {(name, "at") for name in ("_send", "_leave", "_read", "_schedule", "unwatch")}
    seen, codes, stop = [], [], threading.Event()
    paused, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(5):
        if not paused.wait(60):
            break
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with lock.hold("own", wait=60):
                    code = 0
            finally:
                os._exit(code)
        codes.append(os.waitpid(pid, 0)[1])
        paused.clear()
        go_on.set()
        go_on = threading.Event()
    stop.set()
    go_on.set()
    thread.join()
    held.ensure_held()
    tell(seen=sorted(seen), codes=codes)
"""
    with Script(source, enrol(five_nodes)) as script:
        told = script.told()
    assert told["seen"] == ["_leave", "_read", "_schedule", "_send", "unwatch"]
    assert told["codes"] == [0] * 5


def test_a_task_whose_body_forks_and_returns_in_both_is_ended_by_the_parent(five_nodes):
    source = """
from celery import Celery
from celery_redlock import RedlockTask

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.update(redlock_nodes=sys.argv[1:], **{f"redlock_{k}": v for k, v in SETTINGS.items()})
child = None

@app.task(base=RedlockTask, name="bill", lock_key="report")
def bill():
    global child
    child = os.fork()
    if child:
        os.waitpid(child, 0)

def kept():
    lock.inspect("report")  # what was written before has been read when this is answered
    return sum(bool(view.holder) for view in lock.inspect("report"))

bill.apply(task_id="one").get()
tell(taken=kept())
if child == 0:
    os._exit(0)
"""
    with Script(source, enrol(five_nodes)) as script:
        assert [script.told(), script.told()] == [{"taken": 5}, {"taken": 0}]
