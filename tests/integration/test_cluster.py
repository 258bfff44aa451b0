"""A cluster as a lock node: a real one, whose servers fail and whose slots move."""

from __future__ import annotations

import itertools
import random
import threading
import time
from dataclasses import replace

import pytest
import redis

from celery_redlock import LockLost, LockTaken, QuorumUnavailable, Redlock
from celery_redlock.events import NodeQuarantined
from celery_redlock.lock.nodes import connector
from celery_redlock.lock.nodes.cluster import with_hash_tag
from celery_redlock.lock.rules import Rules
from celery_redlock.ops.doctor.nodes import gather_nodes
from celery_redlock.reading.health import check, probe, risks
from celery_redlock.reading.nodes import bootstrap, node_statuses
from support.clusters import ask, cluster
from support.everything import TASKS, TOOLS, Everything
from support.liar import LIES, in_time, lying
from support.stored import ROOMY
from support.waiting import eventually

pytestmark = pytest.mark.long

#: So short that a test may wait for a quarantine [s], and longer than a stall.
TTL = 6.0
BRIEF = {"ttl": TTL, "max_ttl": TTL, "node_timeout": 1.0}


@pytest.fixture(scope="module")
def clustered(some_binary):
    """A cluster whose roles and slots the tests of this file move about."""
    with cluster(some_binary) as it:
        yield it


@pytest.fixture
def empty(clustered):
    """The same without any key."""
    clustered.come_home()
    for server in clustered.servers:
        if ask(server, "ROLE")[0] == "master":
            ask(server, "FLUSHALL")
    return clustered


@pytest.fixture
def locks():
    """Open locks on a cluster: ``locks(cluster, observer, **rules)``."""
    opened = []

    def open_locks(it, *observers, **settings):
        one = Redlock([it.url()], Rules(**{**BRIEF, **settings}), observers)
        opened.append(one)
        if len(opened) == 1:
            enrolled = {"enrolled"}  # of one that was down for a moment, at another try
            eventually(
                lambda: {*bootstrap([it.url()], one.rules).values()} == enrolled, "enrolment"
            )
        eventually(lambda: check(one) == {}, "a connection")
        return one

    yield open_locks
    for one in opened:
        one.close()


def granted(lock, name):
    """Return a lease, or nothing."""
    try:
        return lock.acquire(name)
    except (LockTaken, QuorumUnavailable):
        return None


# -- all that there is, on one master -----------------------------------------------------


def test_everything_works_on_a_cluster(empty):
    """Each feature, and all operator's tools; every key is in one slot."""
    with redis.Redis.from_url(empty.home().url) as admin:
        used = Everything(empty.url(), admin, Rules(**ROOMY))
        try:
            assert used.features((*TASKS, *TOOLS)) == {}
        finally:
            used.locks.close()
    keys = {server.port: ask(server, "KEYS", "*") for server in empty.masters}
    assert [port for port, found in keys.items() if found] == [empty.home().port]
    slots = {ask(empty.home(), "CLUSTER", "KEYSLOT", key) for key in keys[empty.home().port]}
    assert slots == {empty.slot}


def test_a_user_of_our_keys_and_without_cluster_commands_may_do_all(empty):
    """Who asks a server without our keys is sent on by the key's name alone."""
    rights = ["reset", "on", ">s3cret", "~{redlock}:*", "&{redlock}:*", "+@all", "-cluster"]
    for server in empty.servers:
        ask(server, "ACL", "SETUSER", "shop", *rights)
    try:
        with redis.Redis.from_url(empty.home().url) as admin:
            used = Everything(empty.url(login="shop:s3cret@", first=3), admin, Rules(**ROOMY))
            try:
                assert used.features((*TASKS, *TOOLS)) == {}
            finally:
                used.locks.close()
    finally:
        for server in empty.servers:
            ask(server, "ACL", "DELUSER", "shop")


@pytest.mark.parametrize("first", range(4))
def test_whoever_is_asked_tells_who_has_the_keys(empty, locks, first):
    """A master of other slots, the replica, and the master itself."""
    mine = locks(empty)
    one = Redlock([empty.url(first=first)], mine.rules)
    only = one.fanout.nodes[0].address
    try:
        connection = only.connection()
        assert connection.port == empty.home().port
        connection.disconnect()
    finally:
        one.close()


def test_a_cluster_may_have_replicas(empty, locks):
    """A worker warns of none, as a cluster has them; the doctor says what a failover costs."""
    mine = locks(empty)
    assert list(risks(mine, {})) == []
    (facts,) = gather_nodes([empty.url()], mine.rules, lambda _: None)
    assert (facts.in_cluster, facts.state, facts.problem) == (True, "enrolled", "")
    assert facts.info["connected_slaves"] == "1"


def test_a_login_that_is_refused_names_the_servers(empty, locks, caplog):
    """And no password."""
    locks(empty)
    url = empty.url(login="shop:s3cret-of-the-locks@")
    (status,) = node_statuses([url], with_hash_tag(Rules(**BRIEF), [url]))
    assert status.state == "down"
    assert f"127.0.0.1:{empty.masters[0].port}" in status.problem
    assert "s3cret" not in f"{status} {caplog.text}"


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_passed_over(empty, locks, lie):
    """Whatever it answers, the next one is asked, and each in bounded time."""
    mine = locks(empty)
    hosts = empty.url().partition("//")[2]
    other = next(server for server in empty.masters if server is not empty.home())
    with lying(other.port, LIES[lie]) as liar:
        url = f"redis+cluster://{liar.url.partition('//')[2].partition('/')[0]},{hosts}"
        (status,) = in_time(lambda: node_statuses([url], mine.rules))
    assert status.state in ("up", "unfit"), status  # its name differs, so it is foreign
    assert "enrolled by clients" in status.problem or status.state == "up"


# -- another master -----------------------------------------------------------------------

MOVES = {
    "failover by force": lambda it: it.fail_over(),
    "slot that moves": lambda it: it.migrate(),
}


@pytest.mark.parametrize("move", MOVES)
def test_who_holds_a_lock_loses_it_and_nobody_gets_it_meanwhile(empty, locks, move):
    """
    The next master is another process than the one that granted the lock: it is quarantined.

    Its memory may lack a lock, so neither a grant nor a renewal counts. Then all goes on.
    """
    heard = []
    # So long that a failover, seen by all, takes less, also on a machine that stalls.
    longer = {"ttl": 2 * TTL, "max_ttl": 2 * TTL}
    mine, theirs = locks(empty, **longer), locks(empty, heard.append, **longer)
    before = empty.home().port
    with pytest.raises(LockLost), mine.hold("n") as held:
        MOVES[move](empty)
        fence, refused = held.fence, 0
        while not held.is_lost:
            assert granted(theirs, "n") is None
            refused += 1
            time.sleep(0.05)
    assert refused
    lease = eventually(lambda: granted(theirs, "n"), "a vote after quarantine")
    assert lease.fence > fence
    assert empty.home().port != before
    assert NodeQuarantined in {type(event) for event in heard}
    theirs.release(lease)


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_failover_counts_as_a_loss_of_memory(empty, locks, is_guarded):
    """A lock that the replica lacks is given to no second holder; without the guard it is."""
    # Nobody waits for its end: so long that no failover is too slow to tell.
    settings = {"ttl": 60.0, "max_ttl": 60.0, "restart_guard": is_guarded}
    mine, theirs = locks(empty, **settings), locks(empty, **settings)
    held = mine.acquire("n")
    with redis.Redis.from_url(empty.fail_over().url) as client:
        client.delete("{redlock}:lock:n")  # as if the replica had not got it in time
    eventually(lambda: probe(theirs) and not check(theirs), "way to the new master")
    second = granted(theirs, "n")
    assert time.time() < held.since + held.ttl, "too slow to tell"
    assert (second is None) == is_guarded


@pytest.mark.parametrize("is_believed", [False, True])
def test_a_slot_that_comes_without_its_keys_is_not_trusted(empty, locks, monkeypatch, is_believed):
    """
    A server that has been up for long, with no key of ours, may be the node only since now.

    By itself such a server is trusted at once; if it were here, a second holder got the lock.
    """
    greet = connector.greet
    known = {"flushed": False} | ({"succeeded": False} if is_believed else {})
    monkeypatch.setattr(connector, "greet", lambda *it: replace(greet(*it), **known))
    # The twin ends with its grant, however late that comes; the other case waits to the end.
    ttl = 20.0 if is_believed else 8.0
    settings = {"ttl": ttl, "max_ttl": ttl}
    mine, theirs = locks(empty, **settings), locks(empty, **settings)
    quarantine = mine.rules.quarantine
    for server in empty.masters:
        uptime = lambda server=server: int(info(server, "uptime_in_seconds")) > quarantine  # noqa: E731
        eventually(uptime, "a server that has been up for long")
    held = mine.acquire("n")
    empty.migrate(keys=False)
    second = None
    while time.time() < held.since + held.ttl - 0.1 and not second:
        second = granted(theirs, "n")
    assert (second is not None) == is_believed


def info(server, name):
    """Return a field of INFO."""
    with redis.Redis.from_url(server.url) as client:
        return client.info()[name]


def test_who_waits_is_told_by_the_next_master(empty, locks):
    """Who listens to the server of before, still up as a replica, listens to the new one soon."""
    mine, theirs = locks(empty), locks(empty)
    lease = mine.acquire("n")
    with threading_waiter(theirs, "n") as waiter:
        before = empty.home()
        eventually(lambda: ask(before, "PUBSUB", "CHANNELS"), "ears")
        after = empty.fail_over()
        eventually(lambda: probe(theirs)[0].state == "quarantined", "way to the new master")
        eventually(lambda: ask(after, "PUBSUB", "CHANNELS"), "ears at the new master", timeout=60)
        assert not ask(before, "PUBSUB", "CHANNELS")
        mine.release(lease)
        assert waiter.result() is not None


class threading_waiter:  # noqa: N801  as a function
    """Somebody who waits for a lock in a thread: its ``result()``."""

    def __init__(self, lock, name):
        self.lock, self.name, self.lease = lock, name, None
        self.thread = threading.Thread(target=self.run)

    def run(self):
        self.lease = self.lock.acquire(self.name, wait=60)

    def result(self):
        self.thread.join(90)
        return self.lease

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.thread.join(90)
        if self.lease:
            self.lock.release(self.lease)


# -- during load --------------------------------------------------------------------------


class Load:
    """Clients that contend for a lock, and when each of them trusted it."""

    def __init__(self, it, **settings):
        self.locks = [Redlock([it.url()], Rules(**{**BRIEF, **settings})) for _ in range(4)]
        self.trusted = []
        self.ends = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(one,)) for one in self.locks]

    def run(self, lock):
        chance = random.Random(id(lock))
        while not self.ends.is_set():
            try:
                with lock.hold("n", wait=0.1) as held:
                    begun, works = time.monotonic(), chance.expovariate(1 / 0.03)
                    while time.monotonic() < begun + works and not held.is_lost:
                        time.sleep(0.005)
                    self.trusted.append((begun, time.monotonic(), held.fence))
            except (LockTaken, QuorumUnavailable):
                self.ends.wait(0.02)
            except LockLost:
                pass

    def grants(self):
        """Return how many there were."""
        return len(self.trusted)

    def overlaps(self):
        """Return the pairs that trusted the lock at the same time."""
        spans = sorted(self.trusted)
        return [(a, b) for a, b in itertools.pairwise(spans) if b[0] < a[1]]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.ends.set()
        for thread in self.threads:
            thread.join()
        for lock in self.locks:
            lock.close()


def test_under_load_nobody_overlaps_and_all_goes_on(some_binary):
    """Failover by force, a slot that moves, a master that is killed; fences grow all the while."""
    with cluster(some_binary) as it:
        rules = with_hash_tag(Rules(**BRIEF), [it.url()])
        bootstrap([it.url()], rules)
        with Load(it, **BRIEF) as load:
            for move in (*MOVES.values(), lambda it: it.fail_over(kill=True)):
                before = load.grants()
                eventually(lambda before=before: load.grants() > before + 20, "load")
                move(it)
                after = load.grants()
                eventually(lambda after=after: load.grants() > after + 20, "locks granted again")
    assert load.overlaps() == []
    fences = [fence for *_, fence in sorted(load.trusted)]
    assert fences == sorted(set(fences))
