"""What they can do who write to one lock node of three, or to two, as SECURITY.md says."""

from __future__ import annotations

import contextlib
import re
import threading
import time

import pytest
import redis

from celery_redlock import LockLost, LockTaken, QuorumUnavailable, Redlock
from celery_redlock.lock.records import channel
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap, node_statuses
from support.stored import ROOMY, wait_until_taken
from support.waiting import eventually

RULES = Rules(**ROOMY)
#: With a quarantine that a test can wait for.
BRIEF = Rules(ttl=3.0, max_ttl=3.0, node_timeout=1.0)
#: A process of the attacker's that listens.
EARS = "e" * 16

either = pytest.mark.parametrize("count", [1, 2], ids=["one", "two"])


@pytest.fixture
def clients(five_nodes):
    nodes = five_nodes[:3]
    bootstrap([node.url for node in nodes], RULES)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(redis.Redis.from_url(node.url)) for node in nodes]


@pytest.fixture
def locks(clients, five_nodes):
    urls = [node.url for node in five_nodes[:3]]
    made = [Redlock(urls, RULES) for _ in range(2)]
    for lock in made:
        lock.release(lock.acquire("warm up", wait=60))
    yield made
    for lock in made:
        lock.close()


def gets(lock, name):
    try:
        lock.release(lock.acquire(name))
    except (LockTaken, QuorumUnavailable):
        return False
    return True


def test_who_enrols_one_node_for_others_keeps_new_nodes_out_until_it_is_undone(redis_nodes):
    """Two of three votes are away: what the doctor says brings the quorum back."""
    nodes = redis_nodes(3)
    urls = [node.url for node in nodes]
    bootstrap(urls, BRIEF)
    bootstrap([nodes[0].url], BRIEF)  # a list of one: another one's
    nodes[1].restart()
    with contextlib.closing(Redlock(urls, BRIEF)) as fresh:
        time.sleep(BRIEF.quarantine)  # for which a node that was restarted waits
        assert not gets(fresh, "a")
        (text,) = [s.problem for s in node_statuses(urls, BRIEF) if "enrolled by" in s.problem]
        key = re.search(r"DEL (\S+) there", text).group(1)
        with redis.Redis.from_url(nodes[0].url) as client:
            assert client.delete(key) == 1
        eventually(lambda: gets(fresh, "a"), "quorum", timeout=60, every=0.2)


@either
def test_who_deletes_a_lock_frees_it_on_a_majority_only(clients, locks, five_nodes, count):
    mine, other = locks
    lease = mine.acquire("invoice:7")
    wait_until_taken(five_nodes[:3], "invoice:7")
    for client in clients[:count]:
        assert client.delete("redlock:lock:invoice:7")
    assert gets(other, "invoice:7") is (count > 1)
    if count == 1:
        mine.extend(lease)
        return
    with pytest.raises(LockLost):
        mine.extend(lease)


@either
def test_who_writes_into_the_line_delays_others_by_one_look(clients, locks, count):
    mine, other = locks
    lease, granted = mine.acquire("line"), []
    forged = {f"{'1' * 32}{EARS}0001": 0}
    with contextlib.ExitStack() as stack:
        for client in clients[:count]:
            ears = stack.enter_context(client.pubsub())
            ears.subscribe(channel("redlock", EARS))
            assert eventually(ears.get_message, "ears")["type"] == "subscribe"
            client.zadd("redlock:line:line", forged)
        waiter = threading.Thread(target=lambda: granted.append(other.acquire("line", wait=60)))
        waiter.start()
        for number, client in enumerate(clients):
            many = 2 if number < count else 1
            eventually(lambda it=client, m=many: it.zcard("redlock:line:line") == m, "who waits")
        mine.release(lease)
        waiter.join(30)
    assert granted


def test_who_wakes_somebody_too_early_grants_them_nothing(clients, locks):
    """On all nodes: whoever is woken asks for the lock, like everybody."""
    mine, other = locks
    lease, granted = mine.acquire("line"), []
    waiter = threading.Thread(target=lambda: granted.append(other.acquire("line", wait=60)))
    waiter.start()
    for client in clients:
        eventually(lambda it=client: it.zcard("redlock:line:line"), "who waits")
    (member,) = clients[0].zrange("redlock:line:line", 0, -1)
    woken = channel("redlock", member[32:48].decode())
    for number, client in enumerate(3 * clients):
        eventually(lambda it=client: it.pubsub_numsub(woken)[0][1], "ears")
        release = b"%08d" % (number // len(clients))
        client.publish(woken, release + member[:32] + b"redlock:line:line")
    time.sleep(0.5)  # it asks in vain meanwhile
    assert not granted
    mine.extend(lease)
    mine.release(lease)
    waiter.join(60)
    assert granted[0].fence > lease.fence
    other.release(granted[0])
