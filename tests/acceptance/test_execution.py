"""One execution from its delivery to its end, with real workers, and all that comes in between."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest
import redis
from celery import chain, chord, group
from celery.exceptions import Ignore, Reject, TaskRevokedError

from celery_redlock import LockLost, LockTaken, QuorumUnavailable, RedlockTask, current_lock
from support.events import body, now, overlaps, read, record
from support.proxy import proxied
from support.stage import stage
from support.stored import clients_of
from support.versions import CELERY
from support.waiting import eventually

READY = {"SUCCESS", "FAILURE", "REVOKED"}
#: Longer than a test waits, where a lock is to be kept or given back [s].
TTL = 120.0
#: Short enough to wait for renewals, and longer than a stall [s].
RENEWED = 9.0
#: Short, for locks that are to be lost [s]. With the drift factor a body is told so long before the
#: lease ends that it has ended by then on a loaded machine, too.
LOST, LONGEST, DRIFT_FACTOR = 12.0, 14.0, 0.45
#: A soft limit, so long that the body has begun by then [s].
LIMIT = 4


def declare(app):
    declare_short(app)
    declare_waiting(app)
    declare_ends(app)
    declare_losing(app)


def wait_at_the_gate(name):
    gate = Path(os.environ["EVENTS"]).with_name(f"{name}.open")
    eventually(gate.exists, f"word to go on for {name!r}", timeout=100)


def open_gate(it, name):
    it.events.with_name(f"{name}.open").touch()


def uncounted(self, name, down_to):
    """Retry, each time with the number of retries lowered to the next of *down_to*."""
    with body(os.environ["EVENTS"], name):
        done = sum(event["name"] == name for event in read(os.environ["EVENTS"], "start"))
        if done <= len(down_to):
            self.request.retries = down_to[done - 1]
            raise self.retry(countdown=0)
    return done


def declare_short(app):
    @app.task(name="nap", base=RedlockTask, shared=False, lock_key="{lock}")
    def nap(lock, seconds=0.0, value=None):
        with body(os.environ["EVENTS"], lock, fence=current_lock().fence):
            time.sleep(seconds)
        return {"value": value}

    @app.task(name="again", base=RedlockTask, bind=True, shared=False, max_retries=None)
    def again(self, times):
        with body(os.environ["EVENTS"], "again"):
            if self.request.retries < times:
                raise self.retry(countdown=0)
        return self.request.retries

    @app.task(name="link", base=RedlockTask, shared=False, unique_on=())
    def link(count):
        with body(os.environ["EVENTS"], "link"):
            return count + 1

    @app.task(name="recurse", base=RedlockTask, bind=True, shared=False, unique_on=())
    def recurse(self, times):
        mine = current_lock().fence
        return [mine, *(self(times - 1) if times else [])]

    for policy in ("stop", "continue"):

        @app.task(
            name=f"skip_{policy}",
            base=RedlockTask,
            shared=False,
            lock_key="{lock}",
            chain_on_skip=policy,
        )
        def skipped(lock):
            return lock

    @app.task(name="follow", shared=False)
    def follow(*values):
        record(os.environ["EVENTS"], "follow", values=values)
        return list(values)


def declare_waiting(app):
    @app.task(name="gated", base=RedlockTask, shared=False, lock_key="{lock}")
    def gated(lock):
        with body(os.environ["EVENTS"], lock):
            wait_at_the_gate(lock)
        return {}

    @app.task(name="long", base=RedlockTask, shared=False, lock_key="long", lock_ttl=RENEWED)
    def long(renewals):
        with body(os.environ["EVENTS"], "long"):
            enough = lambda: current_lock().renewals >= renewals  # noqa: E731
            eventually(enough, f"{renewals} renewals", timeout=100)

    @app.task(
        name="parent",
        base=RedlockTask,
        bind=True,
        shared=False,
        unique_on=(),
        on_conflict="fail",
    )
    def parent(self, is_first):
        with body(os.environ["EVENTS"], "parent"):
            child = self.delay(False).id if is_first else None
            if is_first:
                record(os.environ["EVENTS"], "child", id=child)
                wait_at_the_gate("parent")
        return child


def declare_ends(app):
    def ends(self, way):
        if way == "replace":
            raise self.replace(self.app.tasks["nap"].si(f"instead of {self.request.id}"))
        error = {
            "error": ValueError("no"),
            "ignore": Ignore(),
            "reject": Reject("no", requeue=False),
            "exit": SystemExit(1),
        }[way]
        raise error

    def run(self, lock, way, seconds=0.0):
        again = any(e.get("name") == lock for e in read(os.environ["EVENTS"], "start"))
        with body(os.environ["EVENTS"], lock):
            if way == "requeue" and not again:
                raise Reject("not now", requeue=True)
            if way == "sleep":
                time.sleep(seconds)
            elif way not in ("return", "requeue"):
                ends(self, way)

    for name, late in (("uncounted", False), ("uncounted_late", True)):
        app.task(name=name, base=RedlockTask, bind=True, shared=False, acks_late=late)(uncounted)
    app.task(name="forgets", base=RedlockTask, shared=False, acks_late=True, dedup_ttl=0)(ends)
    for name, late in (("end", False), ("end_late", True)):
        app.task(
            name=name, base=RedlockTask, bind=True, shared=False, lock_key="{lock}", acks_late=late
        )(run)


def declare_losing(app):
    def hold(self, lock, how):
        with body(os.environ["EVENTS"], lock):
            ends = time.monotonic() + 120
            while time.monotonic() < ends:
                with contextlib.suppress(Exception):  # as many a body does
                    if how == "sleep":
                        time.sleep(120)
                    sum(range(1000))
                if how == "warn" and self.lock.is_lost:
                    time.sleep(0.5)
                    return self.lock.lost_reason
        return "was never told"

    options = {"base": RedlockTask, "bind": True, "shared": False, "lock_key": "{lock}"}
    app.task(name="lose", **options)(hold)
    app.task(name="lose_and_warn", on_lock_lost="warn", **options)(hold)


# -- a busy worker --------------------------------------------------------------------


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    conf = {"redlock_ttl": TTL, "redlock_max_ttl": TTL, "redlock_node_timeout": 1.0}
    with stage(__file__, tmp_path_factory.mktemp("busy"), **conf) as it:
        it.worker(concurrency=4)
        yield it


@pytest.mark.timeout(600)
def test_a_thousand_tasks_of_fifty_names_never_meet(it):
    nap = it.task("nap")
    names = [f"busy {n // 4 % 50}" for n in range(1000)]
    # All are there before the first one runs: who publishes slowly would have none of them meet.
    results = [nap.apply_async((name, 0.004, n), queue="busy") for n, name in enumerate(names)]
    assert it.app.control.add_consumer("busy", reply=True, timeout=100, limit=1)
    ended = eventually(
        lambda: all(it.meta(r.id).get("status") in READY for r in results[::-1]),
        "end of every task",
        timeout=400,
        every=0.5,
    )
    assert ended
    metas = [it.meta(r.id) for r in results]
    assert Counter(meta["status"] for meta in metas) == {"SUCCESS": 1000}
    ran = [n for n, meta in enumerate(metas) if meta["result"].get("value") == n]
    skipped = [meta["result"] for meta in metas if "skipped" in meta["result"]]
    assert len(ran) + len(skipped) == 1000
    assert {s["skipped"] for s in skipped} == {"conflict"}
    assert len(skipped) >= 20, "too few met to prove anything"
    events = [e for e in read(it.events) if e.get("name", "").startswith("busy")]
    assert overlaps(events) == []
    assert sum(len(it.bodies(name)) for name in set(names)) == len(ran)
    for name in set(names):
        fences = [e["fence"] for e in events if (e["kind"], e["name"]) == ("start", name)]
        assert fences == sorted(set(fences))
    it.wait_until_free()


def test_a_lock_is_kept_while_a_minority_of_nodes_dies(it):
    locks, granted = it.locks(), []
    result = it.task("long").delay(4)
    (running,) = it.started("long")
    for node in it.nodes[3:]:
        node.kill()
    try:
        while not result.ready():
            with contextlib.suppress(LockTaken, QuorumUnavailable):
                lease = locks.acquire("long")
                granted.append(now())
                locks.release(lease)  # others look whether any lock is left
                break
            time.sleep(0.05)
    finally:
        locks.close()
        for node in it.nodes[3:]:
            node.start()
    result.get(timeout=100)
    (ran,) = it.bodies("long")
    assert ran.finished
    assert ran.ended - running.started > RENEWED
    assert all(at > ran.ended for at in granted)  # a moment later the result is stored


def test_a_retry_is_never_refused_by_its_own_lock(it):
    """``retry(countdown=0)`` comes back while its predecessor is still on its way out."""
    assert it.task("again").delay(30).get(timeout=200) == 30
    bodies = it.bodies("again")
    assert len(bodies) == 31
    assert overlaps(e for e in read(it.events) if e.get("name") == "again") == []


@pytest.mark.parametrize("task", ["uncounted", "uncounted_late"])
@pytest.mark.parametrize("down_to", [[-1], [-1, -1, -1], [0, 1, 0, 0], [0, 1, -1]])
def test_a_retry_that_is_not_to_count_runs(it, task, down_to):
    """A body that lowers ``request.retries`` publishes an execution that was there before."""
    name = f"{task} {down_to}"
    assert it.task(task).delay(name, down_to).get(timeout=100) == len(down_to) + 1


def test_a_chain_of_tasks_of_one_name_runs_to_its_end(it):
    link = it.task("link")
    workflow = chain(link.s(0), *(link.s() for _ in range(19)))
    assert workflow.apply_async().get(timeout=200) == 20
    assert len(it.bodies("link")) == 20


def test_a_recursion_in_a_worker_runs_under_one_lock(it):
    assert len(set(it.task("recurse").delay(5).get(timeout=100))) == 1


def test_a_child_never_loses_to_the_parent_that_published_it(it):
    """It is waited for, however long it goes on, where a stranger would be a conflict."""
    first = it.task("parent").delay(True)
    (child,) = eventually(lambda: read(it.events, "child"), "child", timeout=100)
    it.wait_for_log(rf"parent\[{child['id']}\] for \d+ s:", timeout=60)
    open_gate(it, "parent")
    assert first.get(timeout=100) == child["id"]
    assert it.app.AsyncResult(child["id"]).get(timeout=100) is None
    first, second = it.bodies("parent")
    assert second.started >= first.ended


def test_a_message_that_was_put_back_runs_again(it):
    """``Reject(requeue=True)`` is no end: what comes again is not taken for a copy."""
    result = it.task("end_late").delay("put back", "requeue")
    eventually(lambda: result.state == "SUCCESS", "end of the second run", timeout=100)
    assert len(it.bodies("put back")) == 2


def test_a_chord_with_equal_members_ends(it):
    members = [it.task("gated").si("twin") for _ in range(4)]
    end = chord(members, it.task("follow").s()).apply_async()
    skipped = lambda: sum(member.ready() for member in end.parent.results) == 3  # noqa: E731
    eventually(skipped, "three that were skipped", timeout=100)
    open_gate(it, "twin")
    (values,) = end.get(timeout=100)
    assert sorted("skipped" in value for value in values) == [False, True, True, True]
    assert len(it.bodies("twin")) == 1


@pytest.mark.parametrize("shape", ["task", "group", "chord"])
def test_a_skip_stops_the_chain(it, shape):
    follow = it.task("follow")
    rest = {
        "task": [follow.s("stopped")],
        "group": [group(follow.s("stopped"), follow.s("stopped"))],
        "chord": [group(follow.s("stopped"), follow.s("stopped")), follow.s("stopped")],
    }[shape]
    with it.held("stop"):
        result = chain(it.task("skip_stop").si("stop"), *rest).apply_async()
        with pytest.raises(TaskRevokedError, match=r"skip_stop.*was skipped: conflict"):
            result.get(timeout=100)
    first = result
    while first.parent is not None:
        first = first.parent
    assert first.get(timeout=100)["skipped"] == "conflict"
    assert not [e for e in read(it.events, "follow") if "stopped" in e["values"]]


def test_a_skip_may_be_passed_on(it):
    with it.held("continue"):
        workflow = chain(it.task("skip_continue").si("continue"), it.task("follow").s("went on"))
        skipped, word = workflow.apply_async().get(timeout=100)
    assert (skipped["skipped"], word) == ("conflict", "went on")


ENDS = {
    "return": "SUCCESS",
    "error": "FAILURE",
    "ignore": "STARTED",
    # Before Celery 5.7 nobody says how these two ended.
    "reject": "FAILURE" if CELERY >= (5, 7) else "STARTED",
    "exit": "FAILURE" if CELERY >= (5, 7) else "STARTED",
    "replace": "SUCCESS",
}


@pytest.mark.parametrize("task", ["end", "end_late"])
def test_no_way_out_of_a_body_leaves_a_lock_behind(it, task):
    ways = {way: f"{task} by {way}" for way in ENDS}
    results = {way: it.task(task).delay(lock, way) for way, lock in ways.items()}
    limit = f"{task} by limit"
    limited = it.task(task).apply_async((limit, "sleep", 120), soft_time_limit=LIMIT)
    assert type(limited.get(timeout=100, propagate=False)).__name__ == "SoftTimeLimitExceeded"
    for way, result in results.items():
        eventually(
            lambda r=result, s=ENDS[way]: r.state == s, f"{way} ends {ENDS[way]}", timeout=100
        )
    it.wait_until_free(*ways.values(), limit, "instead*")
    for lock in (*ways.values(), limit):
        assert len(it.bodies(lock)) == 1, lock


@pytest.mark.long
def test_soft_limits_at_any_moment_leave_no_lock_behind(it):
    rng, hits = random.Random(7), 0
    while hits < 20:  # a loaded machine may need more rounds than one
        for n in range(240):
            # Without results: a signal may break redis-py's connection to the result backend.
            it.task("end_late").apply_async(
                (f"limit {n % 40}", "sleep", rng.uniform(0, 0.02)),
                soft_time_limit=rng.uniform(0.001, 0.03),
                ignore_result=True,
            )
        it.wait_until_quiet()
        it.wait_until_free()
        hits = len(re.findall(r"end_late\[\S+\] raised unexpected: SoftTimeLimit", it.log()))
    assert overlaps(e for e in read(it.events) if e.get("name", "").startswith("limit")) == []
    assert it.task("nap").delay("after all limits").get(timeout=100)


# -- a lock that is lost --------------------------------------------------------------


@pytest.fixture(scope="module")
def losing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("losing")
    conf = {"redlock_ttl": LOST, "redlock_max_ttl": LONGEST}
    conf["redlock_drift_factor"] = DRIFT_FACTOR
    with stage(__file__, folder, nodes=5, redlock_nodes=[], **conf) as it:  # noqa: SIM117
        with proxied([node.port for node in it.nodes]) as links:
            it.conf["redlock_nodes"] = [link.url for link in links]
            it.app.conf.redlock_nodes = [link.url for link in links]
            it.bootstrap()
            it.links = links
            pools = [("prefork", 4), ("threads", 3), ("solo", 1), ("solo", 1)]
            it.start_workers(worker_options(pools))
            yield it


def worker_options(pools):
    for number, (pool, concurrency) in enumerate(pools):
        name = f"{pool}{number}"
        yield {
            "pool": pool,
            "concurrency": concurrency,
            "name": name,
            "args": ["-Q", name],
        }


BODIES = [
    ("lose", "prefork0", "sleep"),
    ("lose", "prefork0", "spin"),
    ("lose", "threads1", "spin"),
    ("lose", "solo2", "sleep"),
    ("lose", "solo3", "spin"),
    ("lose_and_warn", "prefork0", "warn"),
    ("lose_and_warn", "threads1", "warn"),
]


@pytest.fixture(scope="module", params=["partitioned", "flushed"])
def lost(request, losing):
    it, how = losing, request.param
    results = {}
    for task, queue, kind in BODIES:
        lock = f"{how} {queue} {kind}"
        results[lock] = it.task(task).apply_async((lock, kind), queue=queue)
    for lock in results:
        it.started(lock)
    time.sleep(LOST / 3 + 0.2)  # so that most were renewed
    if how == "partitioned":
        for link in it.links[:3]:
            link.blackhole()
        # The rival's network is in order. It knows the nodes by other names than the workers
        # do, so it must not look at how they are enrolled.
        urls, guard = [node.url for node in it.nodes], False
    else:
        for client in clients_of(it.nodes[:3]):
            client.flushall()
        urls, guard = [link.url for link in it.links], True
    granted = rival_grants(it, results, urls, guard)
    for link in it.links:
        link.pass_through()
    it.results, it.granted, it.how = results, granted, how
    return it


def rival_grants(it, locks, urls, guard):
    from celery_redlock import Redlock

    rival = Redlock.from_urls(
        urls,
        ttl=5.0,
        max_ttl=LONGEST,
        drift_factor=DRIFT_FACTOR,
        node_timeout=1.0,
        restart_guard=guard,
    )
    granted, deadline = {}, time.monotonic() + 100
    while len(granted) < len(locks) and time.monotonic() < deadline:
        for lock in set(locks) - set(granted):
            with contextlib.suppress(LockTaken, QuorumUnavailable):
                lease = rival.acquire(lock)
                granted[lock] = now()
                rival.release(lease)
        time.sleep(0.005)
    rival.close()
    return granted


@pytest.mark.parametrize(
    ("queue", "kind"), [(queue, kind) for task, queue, kind in BODIES if task == "lose"]
)
def test_a_body_ends_before_its_lock_is_granted_elsewhere(lost, queue, kind):
    lock = f"{lost.how} {queue} {kind}"
    with pytest.raises(LockLost, match=lock) as caught:
        lost.results[lock].get(timeout=100)
    assert caught.value.reason == "deadline" or lost.how == "flushed"
    (ran,) = lost.bodies(lock)
    assert ran.finished
    assert ran.ended < lost.granted[lock]


@pytest.mark.parametrize(
    ("queue", "kind"), [(queue, kind) for task, queue, kind in BODIES if task != "lose"]
)
def test_a_body_that_wants_a_warning_runs_on(lost, queue, kind):
    lock = f"{lost.how} {queue} {kind}"
    assert lost.results[lock].get(timeout=100) in ("deadline", "stolen")
    lost.wait_for_log(rf"ERROR.*Lock '{lock}' is lost")


# -- starting and stopping --------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    with stage(__file__, tmp_path, nodes=0, redlock_nodes=None) as it:
        yield it


DEAD = ["redis://127.0.0.1:1/0", "redis://127.0.0.1:2/0", "redis://127.0.0.1:3/0"]


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"redlock_tll": 5}, "CRITICAL.*unknown setting redlock_tll; did you mean redlock_ttl"),
        ({"redlock_ttl": 90.0}, "redlock_ttl must be at most redlock_max_ttl"),
        ({"redlock_on_conflict": "skipp"}, "redlock_on_conflict = 'skipp'; did you mean 'skip'"),
        ({"redlock_nodes": DEAD[:2]}, "redlock_nodes must be an odd number"),
        ({"task_annotations": {"nap": {"lock_ttl": 90.0}}}, "nap: lock_ttl must be at most"),
        (
            {"result_backend": "cache+memory://", "broker_url": "memory://"},
            "redlock_nodes is not set",
        ),
    ],
)
def test_a_worker_does_not_start_with_a_mistake(alone, conf, words):
    alone.conf.update({"redlock_nodes": DEAD, **conf})
    if "broker_url" in conf:
        del alone.conf["redlock_nodes"]
    with pytest.raises(AssertionError, match="has ended") as ended:
        alone.worker(pool="solo")
    assert re.search(words.replace("; ", ".*"), str(ended.value))
    assert "ready." not in str(ended.value)
    assert alone.workers[-1].process.returncode > 0


def test_one_server_is_enough(alone):
    del alone.conf["redlock_nodes"]
    worker = alone.worker(concurrency=2)
    (line,) = re.findall(r"INFO.*redlock: (.*)", worker.log())
    said = r"(\d+) tasks take a lock, on (\S+) \(one node: no lock while it is away\): (.+)"
    count, node, tasks = re.fullmatch(said, line).groups()
    assert int(count) > 1
    assert node == alone.broker.url
    assert "nap" in worker.log().partition("[tasks]")[2]
    assert " and " in tasks
    assert "redlock_nodes" not in worker.log()


def test_a_worker_says_that_it_remembers_too_little(alone):
    """A message may come again after its execution was forgotten: the log says for which task."""
    alone.conf.update(redlock_nodes=DEAD, redlock_dedup_ttl=60.0)
    worker = alone.worker(pool="solo")
    assert re.search(
        r"WARNING.* end_late: dedup_ttl \(60 s\).*visibility timeout \(3600 s\)", worker.log()
    )
    assert "nap: dedup_ttl" not in worker.log()
    assert "forgets: dedup_ttl" not in worker.log()


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_worker_whose_nodes_are_dead_ends_in_time(alone, pool):
    alone.conf.update(redlock_nodes=DEAD)
    worker = alone.worker(pool=pool)
    assert re.search(r"WARNING.*Lock node 127\.0\.0\.1:1/0 does not answer", worker.log())
    put_off = alone.task("nap").delay("anything")
    worker.wait_for_log(r"Rescheduled task \S*nap\[")
    worker.terminate(timeout=100)
    assert worker.process.wait() == 0
    with redis.Redis.from_url(alone.broker.url) as client:
        (message,) = client.lrange("celery", 0, -1)
    assert json.loads(message)["headers"]["id"] == put_off.id
