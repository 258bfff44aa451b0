"""Who waits for a lock on real nodes: told when it is free, in turn, and gone without a trace."""

from __future__ import annotations

import gc
import itertools
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from importlib.util import find_spec

import pytest

from celery_redlock import LockTaken, Redlock
from celery_redlock.lock.algorithm import acquiring
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.records import channel
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.waiting import listener
from celery_redlock.lock.waiting.room import Room
from celery_redlock.lock.waiting.waiting import NO_CHANNEL
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.task.messages.envelope import fresh_publish_id
from support.stored import ROOMY, clients_of
from support.waiting import eventually

#: Most releases that one who waits may see go by: those under way when it came, those after which
#: a newcomer was quicker, and what a loaded machine makes of a hint that was missed.
BOUND = 30
RULES = Rules(**ROOMY)
ARRIVALS = 1000
#: How often one waits in a storm.
LOOKS = 60


@pytest.fixture
def nodes(five_nodes):
    bootstrap([node.url for node in five_nodes], RULES)
    return five_nodes


@pytest.fixture
def locks(nodes):
    locks = Redlock([node.url for node in nodes], RULES)
    locks.release(locks.acquire("warm up", wait=60), wait=True)
    yield locks
    locks.close()


def keys(nodes, pattern):
    return {key for client in clients_of(nodes) for key in client.keys(pattern)}


def in_line(nodes, name):
    return [client.zcard(f"redlock:line:{name}") for client in clients_of(nodes)]


def hear_nodes(nodes, locks):
    own = channel(RULES.prefix, locks.listener.channel())
    for client in clients_of(nodes):
        eventually(lambda it=client: it.pubsub_numsub(own)[0][1], "ears")


def test_a_hint_is_all_that_one_needs_who_waits(locks, nodes, monkeypatch):
    monkeypatch.setattr(acquiring, "pause_before", lambda client, tries, left, *_: left)
    others, got = Redlock([node.url for node in nodes], RULES), []
    first = others.acquire("hint", wait=60)
    waiting = threading.Thread(target=lambda: got.append(locks.acquire("hint", wait=600)))
    waiting.start()
    eventually(lambda: in_line(nodes, "hint") == [1] * 5, "one that waits")
    hear_nodes(nodes, locks)
    others.release(first)
    waiting.join(timeout=60)
    assert got[0].fence > first.fence
    locks.release(got[0], wait=True)
    eventually(lambda: not keys(nodes, "redlock:*:hint") & traces("hint"), "no trace")
    others.close()


def test_threads_that_wait_are_woken_in_turn(locks, nodes):
    got, waiting = [], []
    first = locks.acquire("line")

    def wait(number):
        lease = locks.acquire("line", wait=600)
        got.append((number, lease.fence))
        locks.release(lease)

    for number in range(10):
        waiting.append(threading.Thread(target=wait, args=(number,)))
        waiting[-1].start()
        eventually(lambda n=number: in_line(nodes, "line") == [n + 1] * 5, "one more")
    locks.release(first)
    for thread in waiting:
        thread.join(timeout=60)
    assert sorted(number for number, _ in got) == list(range(10))
    overtaken = sum(b < a for (a, _), (b, _) in itertools.pairwise(got))
    assert overtaken <= 1, got
    fences = [first.fence, *(fence for _, fence in got)]
    assert fences == sorted(set(fences))
    eventually(lambda: not keys(nodes, "redlock:*:line") & traces("line"), "no trace")


def longest_pause(locks, nodes, name):
    """Return for how long nobody had a lock, at most, that 20 threads came for at once [s]."""
    held, spans = locks.acquire(name), []

    def come():
        lease = locks.acquire(name, wait=600)
        began = time.monotonic()
        time.sleep(0.002)  # stands for what the lock is held for
        spans.append((began, time.monotonic()))
        locks.release(lease)

    threads = [threading.Thread(target=come) for _ in range(20)]
    for thread in threads:
        thread.start()
    eventually(lambda: in_line(nodes, name) == [20] * 5, "all in line")
    locks.release(held)
    for thread in threads:
        thread.join(timeout=60)
    return max(after - before for (_, before), (after, _) in itertools.pairwise(sorted(spans)))


def test_whoever_a_node_takes_out_of_its_line_is_woken(locks, nodes, monkeypatch):
    """A burst reaches each node in another order; twin: a process wakes its oldest for it."""
    seen = [longest_pause(locks, nodes, f"burst {number}") for number in range(5)]
    monkeypatch.setattr(Room, "_known_as", lambda *_: None)
    twin = [longest_pause(locks, nodes, f"twin {number}") for number in range(5)]
    assert statistics.median(seen) < statistics.median(twin) / 2, (seen, twin)


def traces(name):
    return {f"redlock:{kind}:{name}".encode() for kind in ("line", "waiters", "lock")}


@pytest.mark.skipif(not find_spec("gevent"), reason="gevent is not installed")
def test_greenlets_that_wait_are_woken(nodes):
    source = """
    from gevent import monkey; monkey.patch_all()
    import gevent, sys
    import redis
    from celery_redlock import Redlock
    from celery_redlock.lock.records import channel
    from celery_redlock.lock.waiting.room import Room
    locks = Redlock.from_urls(sys.argv[1:], node_timeout=2.5, ttl=60)
    hints, hear = [], Room.hear
    Room.hear = lambda *words: (hints.append(1), hear(*words))
    first, got = locks.acquire("green", wait=60), []
    def wait(number):
        lease = locks.acquire("green", wait=600)
        got.append(number)
        locks.release(lease)
    waiting = []
    for number in range(10):
        waiting.append(gevent.spawn(wait, number))
        gevent.sleep(0.1)
    own = channel("redlock", locks.listener.channel())
    for url in sys.argv[1:]:  # a hint is lost while nobody listens
        while not redis.Redis.from_url(url).pubsub_numsub(own)[0][1]:
            gevent.sleep(0.1)
    locks.release(first)
    gevent.joinall(waiting, timeout=60)
    print(sorted(got) == list(range(10)), len(hints) >= 10)
    """
    command = [sys.executable, "-c", textwrap.dedent(source), *(node.url for node in nodes)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert ended.stdout.split() == ["True", "True"], ended.stderr


def test_a_url_that_asks_for_another_protocol_is_woken(nodes, monkeypatch):
    hints, hear = [], Room.hear
    monkeypatch.setattr(Room, "hear", lambda *words: (hints.append(1), hear(*words)))
    urls = [f"{node.url}?protocol=3&decode_responses=true" for node in nodes]
    locks = Redlock(urls, RULES)
    first = locks.acquire("third", wait=60)
    waiting = threading.Thread(target=lambda: locks.release(locks.acquire("third", wait=60)))
    waiting.start()
    eventually(lambda: in_line(nodes, "third") == [1] * 5, "one that waits")
    hear_nodes(nodes, locks)
    locks.release(first)
    waiting.join(timeout=60)
    eventually(lambda: len(hints) >= 5, "hints of all nodes")
    locks.close()
    eventually(lambda: not listening(nodes), "end of the threads")


def listening(nodes):
    ports = [node.url.rpartition(":")[2].partition("/")[0] for node in nodes]
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if "-listen-" in name and any(port in name for port in ports)]


def upper_quartile(numbers):
    """Of a median, beside load, most often both are the same: one or two."""
    return numbers[3 * len(numbers) // 4]


def releases_that_go_by(nodes, name, *, is_woken):
    """Return how many others have the lock while one waits for it among those who never wait."""
    urls = [node.url for node in nodes]
    crowd = [Redlock(urls, RULES) for _ in range(2)]
    one = Redlock(urls, RULES)
    if not is_woken:
        one.participant.listener = None
    grants, over = [0], threading.Event()

    def storm(locks):
        while not over.is_set():
            try:
                lease = locks.acquire(name)
            except LockTaken:
                continue
            grants[0] += 1
            locks.release(lease)

    for locks in (*crowd, one):
        locks.release(locks.acquire(f"{name}, warm up", wait=60), wait=True)
    threads = [threading.Thread(target=storm, args=(locks,)) for locks in crowd]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: grants[0] > 20, "a storm")
        seen = []
        while sum(seen) < BOUND * LOOKS and len(seen) < (LOOKS if is_woken else LOOKS // 3):
            before = grants[0]
            lease = one.acquire(name, wait=60)
            seen.append(grants[0] - before)
            one.release(lease, wait=True)
            time.sleep(0.02)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        for locks in (*crowd, one):
            locks.close()
    return sorted(seen)


def test_newcomers_do_not_starve_one_that_waits(nodes, monkeypatch):
    """Each release tells it to try; twin: one that nobody wakes sees many more go by."""
    # Both as it pauses in the end: in a first, short pause a busy machine has no release go by.
    monkeypatch.setattr(acquiring, "SHORTEST_PAUSE", acquiring.LONGEST_PAUSE)
    seen = releases_that_go_by(nodes, "storm", is_woken=True)
    assert len(seen) == LOOKS
    assert seen[len(seen) // 2] <= BOUND, seen
    twin = releases_that_go_by(nodes, "storm, twin", is_woken=False)
    assert upper_quartile(twin) > upper_quartile(seen), (seen, twin)


def passed_by(nodes, name, *, waited):
    """Return how many newcomers have the lock while one waits that has *waited* before [s]."""
    urls = [node.url for node in nodes]
    crowd, one = [Redlock(urls, RULES) for _ in range(2)], Redlock(urls, RULES)
    grants, over = [0], threading.Event()

    def arrive(locks):
        while not over.is_set():
            lease = locks.acquire(name, wait=60)
            grants[0] += 1
            time.sleep(0.005)  # stands for what the lock is held for
            locks.release(lease)
            time.sleep(0.005)  # or whoever releases is always the first to ask again

    threads = [threading.Thread(target=arrive, args=(locks,)) for locks in crowd for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: grants[0] > 20, "arrivals")
        seen = []
        while (grants[0] < ARRIVALS or len(seen) < 10) and len(seen) < 40:
            since = time.time() - waited
            known_as = fresh_publish_id() if waited else None
            if known_as:  # as the nodes have it of a message that is on its way
                times = f"{since * 1000:013.0f}{time.time() * 1000:013.0f}"
                known = f"{NO_CHANNEL}0001{times}{{}}"
                for client in clients_of(nodes):
                    client.hset(f"redlock:waiters:{name}", known_as, known)
            wanted = LockRequest(name, 60.0, wait=60, queued_since=since, known_as=known_as)
            before = grants[0]
            held = one.take(wanted)
            seen.append(grants[0] - before)
            one.give_back(held)
            time.sleep(0.05)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        for locks in (*crowd, one):
            locks.close()
    return sorted(seen)


def test_who_has_waited_before_is_not_passed_by_newcomers(nodes):
    """Each release tells it first; twin: one that came just now lets others pass."""
    seen = passed_by(nodes, "before", waited=60.0)
    twin = passed_by(nodes, "just now", waited=0.0)
    assert seen[len(seen) // 2] <= 4, seen
    assert upper_quartile(twin) > upper_quartile(seen), (seen, twin)


# -- several at once ----------------------------------------------------------------------


def both(wait=0.0):
    return [LockRequest(name, 60.0, wait) for name in ("first", "second")]


def test_the_first_is_free_while_the_second_is_waited_for(locks, nodes):
    lease, got = locks.acquire("second"), []
    waiting = threading.Thread(target=lambda: got.append(locks.take_all(both(600.0))))
    waiting.start()
    eventually(lambda: in_line(nodes, "second") == [1] * 5, "one that waits")
    other = locks.acquire("first", wait=60)
    locks.release(lease)
    eventually(lambda: in_line(nodes, "first") == [1] * 5, "one that waits for the other")
    left = {f"redlock:{kind}:second".encode() for kind in ("line", "waiters")}
    assert not keys(nodes, "redlock:*:second") & left
    locks.release(other)
    waiting.join(timeout=60)
    for name in ("first", "second"):  # on the same connections, so after all that it said
        with pytest.raises(LockTaken):
            locks.acquire(name, wait=0)
    for held in got[0].values():
        locks.give_back(held)
    for name in ("first", "second"):
        eventually(lambda n=name: not keys(nodes, f"redlock:*:{n}") & traces(n), "no trace")


def test_those_who_want_names_that_cross_all_get_them(nodes):
    urls = [node.url for node in nodes]
    crowd = [Redlock(urls, RULES) for _ in range(3)]
    wanted = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "a")]
    inside, together, done = dict.fromkeys("abc", 0), [], []

    def work(number):
        locks = crowd[number % 3]
        for turn in range(10):
            names = wanted[(number + turn) % len(wanted)]
            held = locks.take_all([LockRequest(name, 60.0, 600.0) for name in names])
            for name in names:
                inside[name] += 1
            together.extend(name for name in names if inside[name] > 1)
            for name in names:
                inside[name] -= 1
            for one in held.values():
                locks.give_back(one)
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert sorted(done) == list(range(6))
    assert together == []
    for name in "abc":
        eventually(lambda n=name: not keys(nodes, f"redlock:*:{n}") & traces(n), "no trace")
    for locks in crowd:
        locks.close()


class Interrupted(Exception):
    """Raised by a signal."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no such signals here")
def test_who_is_interrupted_leaves_no_trace(locks, nodes):
    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    first = locks.acquire("interrupted")
    try:
        with pytest.raises(Interrupted):
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            locks.acquire("interrupted", wait=600)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    left = {f"redlock:{kind}:interrupted".encode() for kind in ("line", "waiters")}
    eventually(lambda: not keys(nodes, "redlock:*:interrupted") & left, "no trace")
    locks.release(first, wait=True)
    locks.release(locks.acquire("interrupted"), wait=True)


def test_who_may_not_use_channels_waits_as_ever(nodes):
    for client in clients_of(nodes):
        user = "ACL SETUSER mute reset on >secret ~redlock:* +@all resetchannels"
        client.execute_command(*user.split())
    urls = [node.url.replace("redis://", "redis://mute:secret@") for node in nodes]
    locks = Redlock(urls, RULES)
    try:
        first = locks.acquire("mute", wait=60)
        threading.Timer(0.5, locks.release, args=(first,)).start()
        second = locks.acquire("mute", wait=60)
        assert second.fence > first.fence
        assert locks.release(second, wait=True).name == "RELEASED"
        eventually(lambda: not keys(nodes, "redlock:*:mute") & traces("mute"), "no trace")
    finally:
        locks.close()
        for client in clients_of(nodes):
            client.acl_deluser("mute")


def ears():
    return sum("redlock-listen" in thread.name for thread in threading.enumerate())


def test_locks_that_are_dropped_listen_to_nobody(locks, nodes, monkeypatch):
    monkeypatch.setattr(listener, "LOOK_EVERY", 0.1)
    eventually(lambda: not ears(), "end of what others left")
    dropped = Redlock([node.url for node in nodes], RULES)
    # Connected: one whose first try takes longer than it waits listens to nobody.
    dropped.release(dropped.acquire("warm up too", wait=60), wait=True)
    with locks.hold("n", wait=60), pytest.raises(LockTaken):
        dropped.acquire("n", wait=2.0)
    assert ears()
    del dropped
    eventually(lambda: gc.collect() is None or not ears(), "end of all that listen")
