"""Many threads, forks, signals, green threads and the end of a process: the lock stays a lock."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import threading
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import redis

from celery_redlock.lock.algorithm.results import ReleaseOutcome
from celery_redlock.lock.records import Keys
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.health import check
from support.script import Script, enrol
from support.stored import RENEWED, ROOMY, clients_of
from support.waiting import eventually

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and signals")


@pytest.fixture
def locks(five_nodes):
    made = Redlock(enrol(five_nodes), Rules(**ROOMY))
    yield made
    made.close()


#: A server that does not answer a script for a few seconds is slow, not down.
PATIENT = """
from celery_redlock.lock.nodes import address, connections, fanout

address.OPTIONS.update(socket_timeout=10.0, socket_connect_timeout=10.0)
connections.FIRST_CONNECT = 10.0
"""


def run(source, urls, *, before="", is_struck=False, **settings):
    """Run a script to its end in a process of its own, and return what it told."""
    with Script(source, urls, before=f"{before}\n{PATIENT}", **settings) as script:
        told = script.all_told()
        # A finaliser can be struck, too.
        assert is_struck or "Traceback" not in script.errors(), script.errors()
        return told


# -- a machine that stands still ----------------------------------------------------------------

#: Of a machine whose clocks all stood still for *lost* seconds, as a virtual one's do.
STOOD_STILL = """
import time
lost, real = 0.0, time.clock_gettime
time.clock_gettime = lambda which: real(which) - lost
"""


@pytest.mark.long
def test_a_machine_that_stood_still_harms_nobody_else(five_nodes, locks):
    """To it all nodes seem to be set forward. It has lost time; they vote on for everybody."""
    urls = [server.url for server in five_nodes]
    with locks.hold("theirs", ttl=RENEWED) as theirs:
        (told,) = run(
            """
            lease = lock.acquire("mine")
            probe(lock)
            before, stood = lease.remaining(), 5.0  # longer than a round
            time.sleep(stood)
            lost = stood
            try:
                lock.acquire("another")
            except QuorumUnavailable:
                counted = False
            else:
                counted = True
            tell(counted=counted, shorter=before - lease.remaining())
            lock.release(lock.acquire("another", wait=60.0))
            """,
            urls,
            before=STOOD_STILL,
        )
        renewals = theirs.renewals
        eventually(lambda: theirs.renewals > renewals or theirs.is_lost, "a renewal")
        theirs.ensure_held()
    assert told["counted"] is False
    assert told["shorter"] > 1.0
    for client in clients_of(five_nodes):
        assert not client.exists(Keys.of("redlock", "").quarantine)


# -- threads -----------------------------------------------------------------------------------


def test_sixteen_threads_never_hold_a_lock_together(locks):
    inside, worst, entered = Counter(), Counter(), Counter()
    guard, failures = threading.Lock(), []
    started = set()

    def work(number):
        name = f"n{number % 4}"
        try:
            for _ in range(15):
                lease = locks.acquire(name, wait=600)
                with guard:
                    inside[name] += 1
                    entered[name] += 1
                    worst[name] = max(worst[name], inside[name])
                    started.update(threading.enumerate())
                with guard:
                    inside[name] -= 1
                locks.release(lease)
        except BaseException as error:  # noqa: BLE001  shown by the test
            failures.append(error)

    before = threading.enumerate()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert worst == dict.fromkeys(["n0", "n1", "n2", "n3"], 1)
    assert sum(entered.values()) == 16 * 15
    # One thread connects each node and one listens to it for those who wait, and more only where
    # a connection was lost; none is started for a lock or a call.
    others = {thread.name for thread in started - {*before, *threads}}
    assert {name.rpartition("-")[0] for name in others} <= {"redlock-connect", "redlock-listen"}


def test_threads_that_do_not_contend_do_not_wait_for_each_other(five_nodes):
    # Whoever waited for the node that is away, or for one who does, would outlast this test.
    rules = Rules(ttl=600.0, max_ttl=600.0, node_timeout=250.0)
    locks = Redlock(enrol(five_nodes, max_ttl=600.0), rules)
    assert check(locks) == {}
    five_nodes[4].pause()
    try:
        failures = []

        def work(number):
            try:
                for cycle in range(25):
                    lease = locks.acquire(f"{number}:{cycle}")
                    assert locks.release(lease) is ReleaseOutcome.RELEASED
            except BaseException as error:  # noqa: BLE001  shown by the test
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        five_nodes[4].resume()
        locks.close()
    assert not failures


@pytest.mark.long
def test_many_cycles_leave_nothing_behind(locks, five_nodes):
    def cycles(count):
        for number in range(count):
            locks.release(locks.acquire(f"n{number}", wait=60), wait=number % 2 == 0)
        eventually(lambda: locks.inspect("x") and not _debts(locks), "end of all debts")

    def kept():
        fanout = locks.fanout
        return {
            "threads": set(threading.enumerate()) - threads,
            "waiters": len(fanout._waiters),
            "news": len(fanout._news),
            "undelivered": [len(node._undelivered) for node in fanout.nodes],
            "watched": len(locks._watchdog._due),
        }

    threads = set()
    cycles(50)
    threads |= set(threading.enumerate())
    before, descriptors = kept(), _descriptors()
    cycles(3000)
    eventually(lambda: kept() == before, f"{before}")
    assert _descriptors() <= descriptors


def _descriptors():
    folder = Path("/dev/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def _debts(locks):
    return sum(len(node._owed) for node in locks.fanout.nodes)


def test_many_held_locks_need_one_thread(locks):
    before = set(threading.enumerate())
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(locks.hold(f"n{number}", ttl=RENEWED)) for number in range(100)]
        started = [thread.name for thread in set(threading.enumerate()) - before]
        others = [name for name in started if not name.startswith("redlock-connect-")]
        assert others == ["redlock-watchdog"]
        eventually(lambda: all(one.renewals >= 2 for one in held), "renewal of all")
        for one in held:
            one.ensure_held()
    assert locks.held == []


# -- fork ----------------------------------------------------------------------------------------


def test_a_lock_is_not_inherited_by_a_child(five_nodes):
    told = run(
        """
        with lock.hold("report", ttl=RENEWED) as held:
            parents = [node.sock.fileno() for node in lock.fanout.nodes]
            if os.fork() == 0:
                try:
                    held.ensure_held()
                except LockLost as lost:
                    reason = lost.reason
                open_ones = [fd for fd in parents if os.path.exists(f"/proc/self/fd/{fd}")]
                names = [t.name for t in threading.enumerate()]
                try:
                    lock.acquire("report")
                    outcome = "granted"
                except LockTaken:
                    outcome = "taken"
                other = lock.acquire("other")
                released = lock.release(other).value
                tell(reason=reason, open_ones=open_ones, threads=names, outcome=outcome,
                     released=released, watched=len(lock.held))
                os._exit(0)
            os.wait()
            while held.renewals < 4:  # longer than the TTL
                held.ensure_held()
            holder = lock.inspect("report")[0].holder["token"]
            tell(same=holder == held.token[:8])
        """,
        enrol(five_nodes),
    )
    child, parent = told
    assert child.pop("open_ones") == [] or sys.platform == "darwin"
    assert child == {
        "reason": "fork",
        "threads": ["MainThread"],
        "outcome": "taken",
        "released": "RELEASED",
        "watched": 0,
    }
    assert parent["same"]


def test_connecting_imports_nothing(five_nodes):
    """A fork in the middle of an import, in another thread, would leave the child half a module."""
    told = run(
        """
        before = set(sys.modules)
        with lock.hold("report"):
            lock.inspect("report")
        tell(imported=sorted(set(sys.modules) - before))
        """,
        enrol(five_nodes),
    )
    assert told == [{"imported": []}]


def test_a_child_that_ends_does_not_release_its_parents_lock(five_nodes):
    told = run(
        """
        with lock.hold("report") as held:
            if os.fork() == 0:
                sys.exit()          # runs through the end of the with, as a worker's child may
            os.wait()
            holders = [view.holder.get("token") for view in lock.inspect("report")]
            tell(lost=held.is_lost, holders=holders, token=held.token[:8])
        """,
        enrol(five_nodes),
    )
    (parent,) = told
    assert not parent["lost"]
    assert parent["holders"] == [parent["token"]] * 5


@pytest.mark.long
def test_forks_in_the_middle_of_rounds_harm_neither_side(five_nodes):
    told = run(
        """
        stop, failures, rounds = threading.Event(), [], [0]
        def work(number):
            while not stop.is_set():
                try:
                    lease = lock.acquire(f"parent:{number}")
                    assert lock.release(lease) is ReleaseOutcome.RELEASED
                    rounds[0] += 1
                except BaseException as error:
                    failures.append(repr(error))
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        codes = []
        while len(codes) < 100 or rounds[0] <= 50:
            number = len(codes)
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    if number % 5 == 0:
                        lease = lock.acquire(f"child:{number}")
                        code = 0 if lock.release(lease) is ReleaseOutcome.RELEASED else 2
                    else:
                        code = 0
                except BaseException as error:
                    tell(child=number, error=repr(error))
                finally:
                    os._exit(code)
            codes.append(os.waitpid(pid, 0)[1])
        stop.set()
        for thread in threads:
            thread.join()
        tell(codes=[code for code in codes if code], failures=failures[:3])
        """,
        enrol(five_nodes),
    )
    *errors, outcome = told
    assert errors == []
    assert outcome["codes"] == []
    assert outcome["failures"] == []


# -- exceptions out of nowhere --------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("verb", ["acquire", "hold"])
def test_exceptions_at_random_moments_leave_the_kernel_sound(five_nodes, verb):
    told = run(
        f"""
        import random
        verb = {verb!r}
        class Soft(Exception):
            pass
        armed = False
        def strike(number, frame):
            if armed:
                raise Soft
        signal.signal(signal.SIGALRM, strike)
        chance, hits, failures = random.Random(5), 0, []
        with lock.hold("warm"):            # starts the watchdog's thread
            pass
        usual = []
        for number in range(50):
            began = time.perf_counter()
            lock.release(lock.acquire("warm"))
            usual.append(time.perf_counter() - began)
        span = sorted(usual)[25]           # a mean may be of a machine that stood still for once
        number = 0
        while number < 500 or hits <= 100:
            number += 1
            name = f"n{{number}}"
            before = hits
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.00001, span))
            try:
                armed = True
                if verb == "hold":
                    with lock.hold(name):
                        pass
                else:
                    lease = lock.acquire(name)
                    lock.release(lease, wait=bool(number % 2))
                armed = False
            except Soft:
                armed = False
                hits += 1
            except RedlockError as error:
                armed = False
                failures.append(repr(error))
            signal.setitimer(signal.ITIMER_REAL, 0)
            # The machine may get quicker or slower; most strikes are to be before the end.
            span *= 1.02 if hits > before else 0.97
            if number % 10 == 0:
                try:
                    lease = lock.acquire(f"check{{number}}", wait=60)
                    views = lock.inspect(f"check{{number}}")
                    views = [view.holder.get("token") for view in views if not view.problem]
                    if views.count(lease.token[:8]) < 3:
                        failures.append(["shifted", number, views])
                    if lock.release(lease) is not ReleaseOutcome.RELEASED:
                        failures.append(["not released", number])
                except RedlockError as error:
                    failures.append(repr(error))
        seconds = []
        for _ in range(20):
            began = time.perf_counter()
            lock.release(lock.acquire("after", wait=60))
            seconds.append(time.perf_counter() - began)
        while any(view.problem for view in lock.inspect("x")):
            time.sleep(0.01)               # until all nodes are back, and have their releases
        waited = sorted(seconds)[10] >= lock.rules.node_timeout  # for a reader that is no more
        tell(hits=hits, failures=failures[:5], waited=waited, held=len(lock.held))
        """,
        enrol(five_nodes),
        is_struck=True,
    )
    (outcome,) = told
    assert outcome["hits"] > 100, outcome
    assert outcome["failures"] == []
    assert not outcome["waited"]
    assert outcome["held"] == 0
    held = Counter(name for server in five_nodes for name in _names_held(server))
    leaked = [name for name, nodes in held.items() if nodes >= 3]
    # An acquire that is struck between its grant and the caller's assignment cannot give back.
    assert len(leaked) <= (10 if verb == "acquire" else 0), leaked


def _names_held(server):
    with redis.Redis.from_url(server.url) as client:
        return list(client.scan_iter(match=Keys.of("redlock", "*").lock))


def test_a_waiter_that_could_not_take_its_leave_stops_nobody(locks, monkeypatch):
    class Soft(Exception):
        pass

    def struck(waiter):
        monkeypatch.undo()
        raise Soft

    locks.release(locks.acquire("first"))
    monkeypatch.setattr(locks.fanout, "_leave", struck)
    with pytest.raises(Soft):
        locks.inspect("report")
    assert locks.fanout._reader is not None
    leases = [locks.acquire(f"n{number}", wait=600) for number in range(20)]
    assert all(locks.release(lease) is ReleaseOutcome.RELEASED for lease in leases)
    eventually(lambda: locks.inspect("x") and not locks.fanout._waiters, "clean list")


# -- green threads ---------------------------------------------------------------------------------

GEVENT = "from gevent import monkey; monkey.patch_all()\nimport gevent\nspawn = gevent.spawn\n"
EVENTLET = "import eventlet; eventlet.monkey_patch()\nspawn = eventlet.spawn\n"

green = pytest.mark.parametrize(
    "before",
    [
        pytest.param(
            source,
            id=name,
            marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed"),
        )
        for name, source in (("gevent", GEVENT), ("eventlet", EVENTLET))
    ],
)


@green
def test_green_threads_exclude_each_other(five_nodes, before):
    told = run(
        """
        inside, worst, done, failures = {}, [0], [0], []
        def work(number):
            name = f"n{number % 5}"
            try:
                for _ in range(2):
                    lease = lock.acquire(name, wait=600)
                    inside[name] = inside.get(name, 0) + 1
                    worst[0] = max(worst[0], inside[name])
                    time.sleep(0.001)
                    inside[name] -= 1
                    lock.release(lease)
                    done[0] += 1
            except BaseException as error:
                failures.append(repr(error))
        jobs = [spawn(work, number) for number in range(50)]
        for job in jobs:
            getattr(job, "join", None) and job.join() or getattr(job, "wait", lambda: None)()
        tell(worst=worst[0], done=done[0], failures=failures[:3])
        """,
        enrol(five_nodes),
        before=before,
    )
    assert told == [{"worst": 1, "done": 100, "failures": []}]


@green
def test_a_green_worker_that_connects_again_looks_no_more_often(five_nodes, before):
    """What its timer returns is over once it has fired, though it goes on to fire."""
    told = run(
        """
        from importlib import import_module
        from types import SimpleNamespace
        from celery_redlock.task.worker import revokes
        looks, pool = [], "gevent" if "gevent" in sys.modules else "eventlet"
        revokes.LOOK_FOR_REVOKES = 0.02
        revokes.let_go_of_revoked = lambda: looks.append(1)
        timer = import_module(f"celery.concurrency.{pool}").Timer()
        step = revokes.NoteRevokes(None)
        for _ in range(3):
            before = len(looks)
            step.start(SimpleNamespace(timer=timer))
            while len(looks) < before + 3:
                time.sleep(0.01)
            step.stop(SimpleNamespace(timer=timer))
        time.sleep(0.1)  # what is on its way comes
        before = len(looks)
        time.sleep(0.5)
        tell(began=before >= 9, more=len(looks) - before)
        """,
        enrol(five_nodes),
        before=before,
    )
    assert told == [{"began": True, "more": 0}]


#: What is appended to `HEAD` for connections that take fifty bytes at a time.
NARROW = """
from celery_redlock.lock.nodes.node import Node

class Narrow:
    def __init__(self, sock):
        self.sock = sock
    def __getattr__(self, name):
        return getattr(self.sock, name)
    def send(self, data):
        return self.sock.send(data[:50])

attach = Node.attach
def attach_narrow(node, *args):
    attach(node, *args)
    node.sock = Narrow(node.sock)
Node.attach = attach_narrow
"""


@green
def test_requests_that_go_out_bit_by_bit_are_answered(five_nodes, before):
    """Greenlets are told, too, when a connection takes more of what waits to be sent."""
    told = run(
        NARROW
        + textwrap.dedent(
            """
        done, failures = [], []
        def work(number):
            try:
                lock.release(lock.acquire(f"n{number}", wait=600))
                done.append(number)
            except BaseException as error:
                failures.append(repr(error))
        for job in [spawn(work, number) for number in range(20)]:
            getattr(job, "join", None) and job.join() or getattr(job, "wait", lambda: None)()
        tell(done=len(done), failures=failures[:3])
        """
        ),
        enrol(five_nodes),
        before=before,
    )
    assert told == [{"done": 20, "failures": []}]


@green
def test_answers_that_nobody_waited_for_make_no_node_late(five_nodes, before):
    """A release is not waited for; its answers have come long before the next request is sent."""
    told = run(
        """
        fanout.QUIET = 600.0  # connections are not looked at for their own sake
        connect(lock, 60.0)
        states = []
        def work(number):
            for _ in range(3):
                with lock.hold(f"n{number}"):
                    time.sleep(0.005)
        for _ in range(3):
            for job in [spawn(work, number) for number in range(4)]:
                getattr(job, "join", None) and job.join() or getattr(job, "wait", lambda: None)()
            time.sleep(1.1 * lock.rules.node_timeout)  # longer than a node may take
            states += [node.problem for node in probe(lock) if node.state != "up"]
        tell(problems=states)
        """,
        enrol(five_nodes),
        before=before,
    )
    assert told == [{"problems": []}]


@green
def test_other_green_threads_run_while_one_waits_for_nodes(five_nodes, redis_nodes, before):
    servers = redis_nodes(3)
    urls = enrol(servers)
    told = run(
        """
        lock.release(lock.acquire("first"))
        for pid in PIDS:
            os.kill(pid, signal.SIGSTOP)
        ticks, stop = [0], []
        def tick():
            while not stop:
                time.sleep(0.01)
                ticks[0] += 1
        spawn(tick)
        outcomes = []
        def work(number):
            try:
                lock.acquire(f"report:{number}")
                outcomes.append("granted")
            except BaseException as error:
                outcomes.append(type(error).__name__)
        for number in range(5):
            spawn(work, number)
        work(5)
        seen = ticks[0]
        try:
            lock.acquire("report", wait=5.0)
        except QuorumUnavailable:
            pass
        stop.append(True)
        for pid in PIDS:
            os.kill(pid, signal.SIGCONT)
        tell(outcomes=outcomes, in_round=seen, in_all=ticks[0])
        """.replace("PIDS", repr([server.pid for server in servers[:2]])),
        urls,
        before=before,
    )
    (outcome,) = told
    assert outcome["outcomes"] == ["QuorumUnavailable"] * 6
    assert outcome["in_round"] >= 10
    assert outcome["in_all"] >= outcome["in_round"] + 5


@green
def test_the_watchdog_renews_among_green_threads(five_nodes, before):
    told = run(
        """
        refused, sleeps = [], []
        rival = new()
        with lock.hold("report", ttl=RENEWED) as held:
            while held.renewals < 4:  # longer than the TTL
                began = time.monotonic()
                time.sleep(0.1)
                sleeps.append(time.monotonic() - began)
                held.ensure_held()
                try:
                    rival.acquire("report")
                except LockTaken:
                    refused.append(True)
        tell(refused=len(refused), tries=len(sleeps), shortest=min(sleeps))
        """,
        enrol(five_nodes),
        before=before,
    )
    (outcome,) = told
    assert outcome["refused"] == outcome["tries"] >= 20
    assert outcome["shortest"] > 0.09  # nothing of ours wakes a body up


# -- the end of a process ---------------------------------------------------------------------


#: Whatever could be waited for at the end would be waited for longer than a test may take.
PATIENT_END = """
from celery_redlock.lock.nodes import link, node
address.OPTIONS.update(socket_timeout=600.0, socket_connect_timeout=600.0)
connections.FIRST_CONNECT = 1.0
link.PATIENCE = node.PATIENCE = 600.0
lock = new()
def bye():
    object.__setattr__(lock.rules, "node_timeout", 600.0)
    tell(said="bye")
"""
ENDS = {
    "unavailable": f"""{PATIENT_END}
try:
    lock.acquire("report")
except QuorumUnavailable:
    bye()
""",
    "hold": f"""{PATIENT_END}
connections.FIRST_CONNECT = 60.0  # a quorum is there, and is waited for no longer than it takes
with lock.hold("report"):
    pass
bye()
""",
}


@pytest.mark.parametrize("how", ["refused", "hung"])
@pytest.mark.parametrize("last", ["unavailable", "hold"])
def test_a_process_ends_at_once_whatever_its_nodes_do(redis_nodes, how, last):
    servers = redis_nodes(5)
    urls = enrol(servers)
    bad = servers[:3] if last == "unavailable" else servers[:2]
    try:
        if how == "refused":
            for server in bad:
                server.kill()
        else:
            for server in bad:
                server.pause()
        assert run(ENDS[last], urls) == [{"said": "bye"}]
    finally:
        if how == "hung":
            for server in bad:
                server.resume()
    if last == "hold":
        eventually(lambda: not any(_names_held(server) for server in servers[2:]), "release")


def test_a_lock_can_be_given_back_while_the_interpreter_ends(five_nodes, redis_nodes):
    """At exit no thread can be started any more: releasing works, also with a dead node."""
    servers = redis_nodes(3)
    urls = enrol(servers)
    told = run(
        """
        import atexit
        lease = lock.acquire("report")
        held = lock.take(LockRequest("other", 60.0))
        os.kill(PID, signal.SIGKILL)
        time.sleep(0.1)

        def end():
            lock.give_back(held)
            tell(outcome=lock.release(lease).value)

        atexit.register(end)
        """.replace("PID", str(servers[0].pid)),
        urls,
    )
    assert told == [{"outcome": "RELEASED"}]
    eventually(lambda: not any(_names_held(server) for server in servers[1:]), "release")
