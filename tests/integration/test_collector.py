"""What the collector runs: finalisers and generators that hold locks, amid our own work."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest

from celery_redlock import QuorumUnavailable, Redlock
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from support.stored import ROOMY, clients_of, holders
from support.waiting import eventually

RULES = Rules(**ROOMY)
#: Takes locks in generators that are abandoned in cycles, and others meanwhile; the collector
#: looks for such as often as it can. A process of its own, as it may hang.
ABANDONS = """
import gc, json, sys
from celery_redlock import Redlock
from celery_redlock.lock.rules import Rules

urls, rules = json.loads(sys.argv[1])
locks = Redlock(urls, Rules(**rules))
locks.release(locks.acquire("first", wait=20))

def holding(name):
    with locks.hold(name, wait=20):
        yield

class Cycle:
    pass

gc.set_threshold(1, 1, 1)
for number in range(200):
    cycle = Cycle()
    cycle.itself, cycle.generator = cycle, holding(f"cycle {number}")
    next(cycle.generator)
    del cycle
    locks.release(locks.acquire(f"other {number}", wait=20))
gc.collect()
locks.close()
print("done")
"""


@pytest.fixture
def nodes(five_nodes):
    urls = [node.url for node in five_nodes[:3]]
    assert set(bootstrap(urls, RULES).values()) == {"enrolled"}
    return five_nodes[:3]


@pytest.fixture
def locks(nodes):
    with contextlib.closing(Redlock([node.url for node in nodes], RULES)) as locks:
        yield locks


def test_abandoned_generators_end_and_release(nodes):
    told = json.dumps([[node.url for node in nodes], ROOMY])
    ended = subprocess.run(
        [sys.executable, "-c", ABANDONS, told],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stdout == "done\n", ended.stderr
    assert ended.stderr == ""
    left = [f"cycle {number}" for number in range(200)]
    eventually(lambda: not any(holders(nodes, name) for name in left[-5:]), "releases")
    assert not any(holders(nodes, name) for name in left)


#: Holds a lock in a generator that is closed as the interpreter ends: threads stand still by then,
#: and one has a mutex, as the watchdog's where it has just begun.
ENDS = """
import json, operator, socket, sys, threading
from celery_redlock import Redlock
from celery_redlock.lock.rules import Rules

urls, rules, way, part, is_off = json.loads(sys.argv[1])
if is_off:
    from celery_redlock.lock import watchdog
    from celery_redlock.lock.nodes import connections
    # A function of this module would keep it alive, and the generator with it.
    watchdog.is_stuck = connections.is_stuck = operator.not_
locks = Redlock(urls, Rules(**rules))
generator = locks.hold("guard", wait=20) if way == "hold" else locks.lead("guard")
next(generator.gen if way == "hold" else generator)
if part == "hung up":
    for node in locks.fanout.nodes:
        node.sock.shutdown(socket.SHUT_RDWR)
elif part:  # what is a thread that never runs again
    busy = locks._watchdog if part == "watchdog" else locks.fanout
    thread = threading.Thread(target=busy._mutex.acquire)
    thread.start()
    thread.join()
"""
#: Within this a process that does not hang has ended [s].
ENDED = 60.0


def ends(nodes, way, part="", *, is_off=False, timeout=ENDED):
    """Return whether a process ends that holds the lock."""
    told = json.dumps([[node.url for node in nodes], ROOMY, way, part, is_off])
    try:
        subprocess.run([sys.executable, "-c", ENDS, told], timeout=timeout, check=True)
    except subprocess.TimeoutExpired:
        return False
    else:
        return True
    finally:
        for client in clients_of(nodes):  # it may stand for its lease
            client.delete("redlock:lock:guard")


@pytest.mark.parametrize("part", ["", "watchdog", "fanout"])
@pytest.mark.parametrize("way", ["hold", "lead"])
def test_a_process_that_holds_a_lock_to_its_end_ends(nodes, way, part):
    assert ends(nodes, way, part)


def test_it_ends_though_a_node_has_hung_up_meanwhile(nodes):
    """No thread that is to connect it begins any more."""
    assert ends(nodes, "hold", "hung up")


@pytest.mark.parametrize("part", ["watchdog", "fanout"])
def test_one_that_waits_for_a_thread_that_stands_still_does_not(nodes, part):
    assert not ends(nodes, "hold", part, is_off=True, timeout=10.0)


def test_a_release_amid_our_own_work_waits_for_nothing_and_is_sent(locks, nodes):
    """The thread that is to wait for the nodes holds what their answers need."""
    held, lease = locks.take(LockRequest("held", 60.0)), locks.acquire("lease", wait=20)
    for mutex in (locks.fanout._mutex, locks._watchdog._mutex):
        with mutex:
            locks.give_back(held)
    with locks.fanout._mutex:
        locks.release(lease)
    eventually(lambda: not holders(nodes, "held") + holders(nodes, "lease"), "releases")
    assert locks.held == []


def test_a_close_amid_our_own_work_is_done_soon(locks):
    """Not at once: who works in this thread goes through the connections that it would drop."""
    locks.release(locks.acquire("warm up", wait=20))
    with locks.fanout._mutex:
        locks.fanout.close()
        assert locks.fanout.is_connected
    eventually(lambda: not locks.fanout.is_connected, "close")


def test_an_acquire_amid_our_own_work_is_unavailable(locks, nodes):
    locks.release(locks.acquire("warm up", wait=20))
    with locks.fanout._mutex, pytest.raises(QuorumUnavailable, match="a finaliser cannot wait"):
        locks.acquire("a")
    locks.release(locks.acquire("a"))
    assert holders(nodes, "a") == 0
