"""
A running body is told that its lock is lost, in every pool, as far as the pool allows.

The table of `docs/lost-leases.md`, cell by cell: real workers lose the way to three of five
nodes, and a rival whose own network is in order asks for each lock again and again. Where a
body can be interrupted it has ended before the rival gets in. Its twin, which only asked for
a warning, has not: so the rival is quick enough to prove something.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import socket
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError

from celery_redlock import LockLost, LockTaken, QuorumUnavailable, Redlock, RedlockTask
from support.events import body, now, read, record
from support.proxy import proxied
from support.stage import stage
from support.waiting import eventually

#: The first test waits for all workers, and for both rounds of the play.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs" / "lost-leases.md"

#: Short, as leases are lost here [s]. With a wide drift factor a body is told so long before they
#: end that it has ended by then on a loaded machine, too: how soon it does is not what is tried.
TTL = 12.0
DRIFT_FACTOR = 0.45
#: How long a call goes on if nothing stops it [s]: more than two leases.
SECONDS = 30.0
#: Longer than any test waits [s].
VERY_LONG = 600.0
#: Soft limits that come after the loss, and after the rival [s].
LIMIT = 45

POOLS = ["prefork", "solo", "threads", "gevent", "eventlet"]
GREEN = {"gevent", "eventlet"}
HERE = [pool for pool in POOLS if pool not in GREEN or find_spec(pool)]

#: What becomes of a body, in the words of the page.
IN_TIME, RETURNS, GIVES_WAY = "in time", "when the call returns", "when it gives way"
EVERYWHERE = dict.fromkeys(POOLS, IN_TIME)
TABLE = {
    "loop": {**EVERYWHERE, "gevent": GIVES_WAY, "eventlet": GIVES_WAY},
    "sleep": {**EVERYWHERE, "threads": RETURNS},
    "recv": {**EVERYWHERE, "threads": RETURNS},
    "c_call": dict.fromkeys(POOLS, RETURNS),
    "swallow": EVERYWHERE,
}
CELLS = [(pool, kind) for kind, row in TABLE.items() for pool in row]
TOLD_IN_TIME = [cell for cell in CELLS if TABLE[cell[1]][cell[0]] == IN_TIME]
TOLD_LATE = [cell for cell in CELLS if cell not in TOLD_IN_TIME]
#: The page's words for the bodies.
WORDS = {
    "a loop in Python": "loop",
    "`time.sleep`": "sleep",
    "a socket's `recv`": "recv",
    "a call that keeps the interpreter": "c_call",
    "`except Exception: pass` around it all": "swallow",
}

cells = pytest.mark.parametrize(("pool", "kind"), CELLS)


def on_this_machine(cells):
    return [
        pytest.param(
            *cell, marks=pytest.mark.skipif(cell[0] not in HERE, reason=f"{cell[0]} is missing")
        )
        for cell in cells
    ]


# -- the bodies -----------------------------------------------------------------------


def loop(seconds):
    """Compute, and never give way to another greenlet."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        sum(range(1000))


def recv(seconds):
    here, there = socket.socketpair()
    sender = threading.Timer(seconds, there.send, (b"x",))
    sender.daemon = True
    sender.start()
    with here, there:
        here.recv(1)


def c_call(seconds):
    """Call a function in C without letting go of the interpreter."""
    ctypes.PyDLL(None).poll(None, 0, int(seconds * 1000))


def swallow(seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        with contextlib.suppress(Exception):
            time.sleep(0.005)
            sum(range(1000))


BODIES = {"loop": loop, "sleep": time.sleep, "recv": recv, "c_call": c_call, "swallow": swallow}


def begin(lock, me):
    go = Path(os.environ["EVENTS"]).with_name("go")
    # A bystander goes on before the one that hogs its process.
    while not go.exists() and not lock.startswith("bystander"):
        time.sleep(0.02)
    record(os.environ["EVENTS"], "begin", name=lock, body=me)


OPTIONS = {"base": RedlockTask, "bind": True, "shared": False, "lock_key": "{lock}"}


def declare(app):
    declare_losing(app)
    declare_short(app)


def declare_losing(app):
    @app.task(name="lose", **OPTIONS)
    def lose(self, lock, kind, seconds):
        with body(os.environ["EVENTS"], lock) as me:
            begin(lock, me)
            BODIES[kind](seconds)
            said = None
            try:
                self.lock.ensure_held()
            except LockLost as error:
                said = error.reason
            record(os.environ["EVENTS"], "back", name=lock, body=me, said=said)
            swallow(VERY_LONG)
        return "was never told"

    @app.task(name="lose_and_warn", on_lock_lost="warn", **OPTIONS)
    def lose_and_warn(self, lock, kind, seconds):
        with body(os.environ["EVENTS"], lock) as me:
            begin(lock, me)
            try:
                BODIES[kind](seconds)
            except SoftTimeLimitExceeded:
                record(os.environ["EVENTS"], "limit", name=lock, lost=self.lock.lost_reason)
                raise
        return self.lock.lost_reason

    @app.task(name="clean_up_for_long", **OPTIONS)
    def clean_up_for_long(self, lock):
        with body(os.environ["EVENTS"], lock) as me:
            begin(lock, me)
            try:
                time.sleep(VERY_LONG)
            finally:
                record(os.environ["EVENTS"], "cleaning", name=lock, body=me)
                time.sleep(VERY_LONG)


def declare_short(app):
    @app.task(name="short", lock_ttl=120.0, **OPTIONS)
    def short(self, lock, lasts, lost_after):
        held = self.lock

        def lose():
            time.sleep(lost_after)
            held.lose("stolen")

        threading.Thread(target=lose, daemon=True).start()
        ends = time.perf_counter() + lasts
        while time.perf_counter() < ends:
            time.sleep(0.0003)
        return "returned"

    @app.task(name="plain", shared=False)
    def plain(lasts):
        ends = time.perf_counter() + lasts
        while time.perf_counter() < ends:
            time.sleep(0.0003)
        return "plain"


# -- the play ---------------------------------------------------------------------------


def queue_of(pool, kind):
    """Return the worker for a cell: a body that stops its whole process has one to itself."""
    if pool == "solo":
        return f"solo-{kind}"
    stops_all = kind == "c_call" or (pool in GREEN and kind == "loop")
    return f"{pool}-hog" if stops_all and pool != "prefork" else pool


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    # A lease may be longer for what is not to be lost.
    conf = {"redlock_ttl": TTL, "redlock_max_ttl": 120.0, "redlock_drift_factor": DRIFT_FACTOR}
    folder = tmp_path_factory.mktemp("lost")
    with stage(__file__, folder, nodes=5, redlock_nodes=[], **conf) as it:  # noqa: SIM117
        with proxied([node.port for node in it.nodes]) as links:
            it.links = links
            it.conf["redlock_nodes"] = it.app.conf.redlock_nodes = [link.url for link in links]
            it.bootstrap()
            queues = {queue_of(pool, kind): pool for pool, kind in CELLS if pool in HERE}
            it.start_workers(
                {
                    "pool": pool,
                    "concurrency": 1 if pool == "solo" else 6,
                    "name": queue,
                    "args": ["-Q", queue],
                    "start_timeout": 150.0,
                }
                for queue, pool in queues.items()
            )
            yield it


def begun(it):
    return {event["name"] for event in read(it.events, "begin")}


class Play:
    """
    What was played, and what came of it.

    Attributes:
        results: Result of each body, by the name of its lock.
        granted: When the rival got each lock [s].
    """

    def __init__(self, it):
        self.it = it
        self.results = {}
        self.granted = {}

    def publish(self, task, lock, queue, *args, **options):
        signature = self.it.task(task).si(lock, *args)
        self.results[lock] = signature.apply_async(queue=queue, **options)
        return lock

    def lose_the_way_to_the_nodes(self, locks):
        for lock in locks:
            self.it.started(lock)
        time.sleep(TTL / 3 + 0.2)  # so that most were renewed
        go = self.it.events.with_name("go")
        go.touch()
        eventually(lambda: {*locks} <= begun(self.it), "begin of all", timeout=100)
        go.unlink()
        stop = threading.Event()
        # It knows the nodes by other names than the workers do, so it must not look at how they
        # are enrolled.
        urls = [node.url for node in self.it.nodes]
        rival = Redlock.from_urls(
            urls, ttl=5.0, max_ttl=120.0, drift_factor=0.25, node_timeout=1.0, restart_guard=False
        )
        hands = [
            threading.Thread(target=self._ask, args=(rival, locks[n::3], stop)) for n in range(3)
        ]
        for hand in hands:
            hand.start()
        for link in self.it.links[:3]:
            link.blackhole()
        for hand in hands:
            hand.join(timeout=100)
        stop.set()
        rival.close()

    def _ask(self, rival, locks, stop):
        left = set(locks)
        while left and not stop.is_set():
            for lock in sorted(left):
                with contextlib.suppress(LockTaken, QuorumUnavailable):
                    lease = rival.acquire(lock)
                    self.granted[lock] = now()
                    rival.release(lease)
                    left.remove(lock)
            time.sleep(0.02)

    def all_ended(self):
        for lock, result in self.results.items():
            eventually(result.ready, f"end of {lock!r}", timeout=100, every=0.05)
        for link in self.it.links:
            link.pass_through()


@pytest.fixture(scope="module")
def play(it):
    play = Play(it)
    first = [
        play.publish("lose", f"bystander of {pool}", f"{pool}-hog", "sleep", VERY_LONG)
        for pool in HERE
        if pool in GREEN
    ]
    for lock in first:
        it.started(lock)
    first += [
        play.publish("lose", f"{pool} {kind}", queue_of(pool, kind), kind, SECONDS)
        for pool, kind in CELLS
        if pool in HERE and not (pool in GREEN and kind == "c_call")
    ]
    first += [play.publish("clean_up_for_long", "cleaning", "prefork", soft_time_limit=LIMIT)]
    play.lose_the_way_to_the_nodes(first)
    play.all_ended()
    second = [
        play.publish("lose", f"{pool} c_call", f"{pool}-hog", "c_call", SECONDS)
        for pool in HERE
        if pool in GREEN
    ]
    second += [
        play.publish("lose_and_warn", f"{pool} {kind} warned", queue_of(pool, kind), kind, SECONDS)
        for pool, kind in TOLD_IN_TIME
        if pool in HERE
    ]
    for lock, options in (("limited", {"soft_time_limit": LIMIT}), ("revoked", {})):
        second += [play.publish("lose_and_warn", lock, "prefork", "sleep", VERY_LONG, **options)]
    play.lose_the_way_to_the_nodes(second)
    it.app.control.revoke(play.results["revoked"].id, terminate=True)
    play.all_ended()
    return play


# -- the table ------------------------------------------------------------------------


def test_the_page_says_what_is_tested():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    start = next(n for n, row in enumerate(rows) if row[1:] == POOLS)
    told = {
        WORDS[row[0]]: dict(zip(POOLS, row[1:], strict=True))
        for row in rows[start + 2 : start + 2 + len(WORDS)]
    }
    assert told == TABLE
    assert set(TOLD_IN_TIME) | set(TOLD_LATE) == set(CELLS)


@pytest.mark.parametrize(("pool", "kind"), on_this_machine(TOLD_IN_TIME))
def test_a_body_ends_before_another_gets_its_lock(play, pool, kind):
    lock = f"{pool} {kind}"
    with pytest.raises(LockLost, match=lock):
        play.results[lock].get(timeout=100)
    (ran,) = play.it.bodies(lock)
    assert ran.finished
    assert ran.ended < play.granted[lock]


@pytest.mark.parametrize(("pool", "kind"), on_this_machine(TOLD_IN_TIME))
def test_a_body_that_is_not_told_runs_on_beside_the_rival(play, pool, kind):
    """The twin of the test above: without ``abort`` the rival is in while the body still runs."""
    lock = f"{pool} {kind} warned"
    assert play.results[lock].get(timeout=100) == "deadline"
    (ran,) = play.it.bodies(lock)
    assert play.granted[lock] < ran.ended


@pytest.mark.parametrize(("pool", "kind"), on_this_machine(TOLD_LATE))
def test_a_body_that_cannot_be_told_is_told_as_soon_as_it_can(play, pool, kind):
    lock = f"{pool} {kind}"
    with pytest.raises(LockLost, match=lock) as failure:
        play.results[lock].get(timeout=100)
    assert failure.value.reason == "deadline"
    (ran,) = play.it.bodies(lock)
    assert play.granted[lock] < ran.ended
    assert ran.ended - ran.started > SECONDS - 0.1
    back = [e["said"] for e in read(play.it.events, "back") if e["name"] == lock]
    assert back in ([], ["deadline"])
    if pool in GREEN:
        assert back, "it asked for itself before it could be told"


# -- a starved watchdog ---------------------------------------------------------------


@pytest.mark.parametrize("pool", [pool for pool in HERE if pool in GREEN])
def test_a_greenlet_that_hogs_the_process_loses_the_leases_of_all_loudly(play, pool):
    with pytest.raises(LockLost, match="bystander"):
        play.results[f"bystander of {pool}"].get(timeout=100)
    (hog,) = play.it.bodies(f"{pool} loop")
    (bystander,) = play.it.bodies(f"bystander of {pool}")
    assert play.granted[f"bystander of {pool}"] < bystander.ended
    assert bystander.ended > hog.started + SECONDS - 0.1
    (worker,) = [w for w in play.it.workers if f"{pool}-hog" in w.command]
    told = re.findall(r"WARNING.*The watchdog ran (\S+) s late for (\d+) lease", worker.log())
    for_long = [int(leases) for seconds, leases in told if float(seconds) > TTL]
    # The loop stopped two leases, its own and the bystander's; the call in C its own.
    assert (sum(for_long), len(for_long) <= 3) == (3, True), told
    assert "time.sleep(0)" in worker.log()


def test_a_call_that_keeps_the_interpreter_is_told_of_in_every_pool(play):
    """It stops all threads of its process, and so the watchdog."""
    for worker in play.it.workers:
        if worker.command[-1] in ("prefork", "solo-c_call", "threads-hog"):
            told = re.findall(r"The watchdog ran (\S+) s late for 1 lease ", worker.log())
            assert max(map(float, told)) > SECONDS - TTL


# -- what else may end a body -----------------------------------------------------------


def test_a_soft_limit_ends_the_clean_up_of_a_body_that_was_told(play):
    """What the lost lock has interrupted is as subject to its time limit as before."""
    with pytest.raises(SoftTimeLimitExceeded):
        play.results["cleaning"].get(timeout=100)
    (cleaning,) = read(play.it.events, "cleaning")
    (ran,) = play.it.bodies("cleaning")
    assert cleaning["at"] < play.granted["cleaning"] < ran.ended


def test_a_soft_limit_ends_a_body_whose_lock_is_lost(play):
    with pytest.raises(SoftTimeLimitExceeded):
        play.results["limited"].get(timeout=100)
    (limit,) = [e for e in read(play.it.events, "limit") if e["name"] == "limited"]
    assert limit["lost"] == "deadline"


def test_a_body_whose_lock_is_lost_can_be_revoked(play):
    with pytest.raises(TaskRevokedError):
        play.results["revoked"].get(timeout=100)
    (ran,) = play.it.bodies("revoked")
    assert play.granted["revoked"] < ran.ended


# -- never after the body ---------------------------------------------------------------


@pytest.fixture(scope="module")
def storm(it, play):
    chance, pairs = random.Random(7), {pool: [] for pool in HERE}
    logged = {worker.command[-1]: len(worker.log()) for worker in it.workers}
    for number in range(10):  # rounds, until there is enough of both ends
        proves_little = [pool for pool in HERE if fewest(pairs[pool]) < ENOUGH]
        for n in range(120):
            for pool in proves_little:
                queue = queue_of(pool, "swallow")
                args = (f"{pool} short {number}.{n}", 0.003, chance.uniform(0.0, 0.009))
                short = it.task("short").apply_async(args, queue=queue)
                pairs[pool].append((short, it.task("plain").apply_async((0.002,), queue=queue)))
        for pool in proves_little:
            for short, plain in pairs[pool][-120:]:
                eventually(lambda r=short: r.ready(), f"end of a body in {pool}", timeout=60)
                eventually(lambda r=plain: r.ready(), f"end of the next in {pool}", timeout=60)
    return pairs, logged


#: How often a short body has to end well, and how often with a lost lock, to prove something.
ENOUGH = 5


def fewest(pairs):
    """Return how often the short bodies of *pairs* ended well or badly, whichever is less."""
    states = [short.state for short, _ in pairs]
    return min(states.count(state) for state in ("SUCCESS", "FAILURE"))


@pytest.mark.parametrize("pool", HERE)
def test_a_lock_lost_at_the_end_of_its_body_hits_nothing_else(it, storm, pool):
    pairs, logged = storm
    assert [plain.state for _, plain in pairs[pool]] == ["SUCCESS"] * len(pairs[pool])
    for short, _ in pairs[pool]:
        assert short.state == "SUCCESS" or isinstance(short.result, LockLost), short.result
    assert fewest(pairs[pool]) >= ENOUGH, "that proves little"
    (worker,) = [w for w in it.workers if w.command[-1] == queue_of(pool, "swallow")]
    assert "LockInterrupt" not in worker.log()[logged[worker.command[-1]] :]
    released = lambda: not it.keys(f"redlock:lock:{pool} short *")  # noqa: E731
    eventually(released, "release of all, long before their leases end", timeout=60)
