"""A server that may evict keys, as the only lock node: what it costs when it does."""

from __future__ import annotations

import contextlib

import pytest
import redis
from celery import Celery

from celery_redlock import LockLost, QuorumUnavailable, RedlockTask
from celery_redlock.errors import ConfigurationError
from celery_redlock.events import LeaseLost
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.nodes import guard
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.plugin import plugin_for
from celery_redlock.reading import nodes as reading
from celery_redlock.reading.health import check, probe
from simulation.guards import switched_off
from support.eviction import POLICY, evict, evicting
from support.stored import RENEWED
from support.waiting import eventually

#: Leases that lapse within a test but outlast a stall, and a quarantine of seven seconds.
BRIEF = {"ttl": RENEWED, "max_ttl": RENEWED}


@pytest.fixture
def node(redis_nodes):
    """A server of the test's own."""
    (server,) = redis_nodes(1)
    return server


@pytest.fixture
def locks():
    """Return a function that makes a `Redlock` on servers, which enrols them first."""
    with contextlib.ExitStack() as stack:

        def make(servers, *, bootstrap=True, observers=(), **settings):
            urls, rules = [server.url for server in servers], Rules(node_timeout=2.5, **settings)
            if bootstrap:
                assert set(reading.bootstrap(urls, rules).values()) == {"enrolled"}
            made = Redlock(urls, rules, observers)
            stack.callback(made.close)
            return made

        yield make


def test_as_the_only_node_it_is_accepted_with_one_warning(node, caplog):
    """It names risk, setting and price; each eviction until then has a price of its own."""
    evicting(node, "allkeys-lru")
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(redlock_nodes=[node.url], redlock_node_timeout=1.0)
    app.Task = RedlockTask
    plugin_for(app).check()
    (warning,) = [told for told in caplog.messages if "evict" in told]
    assert "maxmemory-policy allkeys-lru" in warning
    assert "none is granted for 1 min 4 s; set maxmemory-policy noeviction" in warning


def test_of_several_it_is_refused(redis_nodes, locks):
    servers = redis_nodes(3)
    evicting(servers[1], "allkeys-lru")
    lock = locks(servers, bootstrap=False)
    with pytest.raises(ConfigurationError, match=r"allkeys-lru.*noeviction"):
        check(lock)
    found = reading.node_statuses([server.url for server in servers], lock.rules)
    assert [one.state for one in found].count("unfit") == 1
    assert "allkeys-lru" in reading.bootstrap([s.url for s in servers], lock.rules)[lock.labels[1]]


def test_one_that_does_not_count_what_it_evicts_is_refused(node, locks, monkeypatch):
    """As a provider may hide it; else nobody would notice."""
    evicting(node)
    read = guard.read_info

    def without_count(reply):
        return {name: value for name, value in read(reply).items() if name != "evicted_keys"}

    monkeypatch.setattr(guard, "read_info", without_count)
    with pytest.raises(ConfigurationError, match="does not say how many keys it has evicted"):
        check(locks([node], bootstrap=False))


def evict_under_a_holder(node, locks):
    """Have the node evict a lock that is held; return its client's locks, and another's."""
    client = evicting(node)
    ours, theirs = locks([node]), locks([node], bootstrap=False)
    theirs.release(theirs.acquire("another"))  # connects
    lease = ours.acquire("report", ttl=30)
    evict(client)
    assert not client.exists("redlock:lock:report")
    assert client.exists("redlock:node:boot")
    return lease, theirs


def test_after_an_eviction_nobody_is_granted_a_lock_that_may_be_held(node, locks):
    """The very next request notices, over whatever connection, and says why."""
    _, theirs = evict_under_a_holder(node, locks)
    with pytest.raises(QuorumUnavailable, match=f"may evict keys.*{POLICY}") as refusal:
        theirs.acquire("report")
    assert 0 < refusal.value.retry_after <= theirs.rules.quarantine


@pytest.mark.parametrize("off", ["every-vote-looks", "evicted-keys"])
def test_without_the_look_two_hold_it(node, locks, off):
    with switched_off([off]):
        lease, theirs = evict_under_a_holder(node, locks)
        theirs.acquire("report")
        assert lease.remaining() > 0


def test_the_holder_of_a_lock_that_was_evicted_is_told(node, locks):
    """It loses its lock before anybody else is granted it, for the reason that there was."""
    client, told = evicting(node), []
    lock = locks([node], observers=[told.append], **BRIEF)
    held = lock.take(LockRequest("report", RENEWED))
    evict(client)
    (event,) = eventually(lambda: [e for e in told if isinstance(e, LeaseLost)], "the loss")
    assert POLICY in str(event.votes)
    with pytest.raises(LockLost, match=r"the node forgot it .*evicted keys"):
        held.ensure_held()
    assert lock.acquire("report", wait=60).fence > held.fence


def test_a_marker_that_was_evicted_is_a_memory_that_was_lost(node, locks):
    """Nor is a server then trusted at once for its age: it may have evicted locks, too."""
    client = evicting(node)
    ours, theirs = locks([node]), locks([node], bootstrap=False)
    ours.acquire("report", ttl=30)
    evict(client, expires=60 * 24 * 3600 * 1000)
    assert not client.exists("redlock:node:boot")
    with pytest.raises(QuorumUnavailable, match="quarantined"):
        theirs.acquire("report")
    with pytest.raises(QuorumUnavailable, match="quarantined"):
        ours.acquire("another")


def test_a_policy_that_is_set_later_is_met_by_workers_looks(node, locks):
    """Who connected before does not look with every vote; a worker does every ten seconds."""
    lock = locks([node])
    lock.release(lock.acquire("report"))
    client = evicting(node)
    assert [one.state for one in probe(lock)] == ["up"]
    evict(client)
    assert [one.state for one in probe(lock)] == ["quarantined"]


def test_what_was_evicted_before_costs_nothing_more(node, locks):
    """Who vouches for a server takes its count as it is; so does who has waited."""
    client = evicting(node)
    client.set("cache:1", 1, px=1000)
    evict(client)
    lock = locks([node])
    assert client.get("redlock:node:boot").endswith(b"+%d" % client.info("stats")["evicted_keys"])
    lock.release(lock.acquire("report"))
    client.config_resetstat()  # it may have evicted as many since
    with pytest.raises(QuorumUnavailable, match="quarantined"):
        lock.acquire("report")


def test_evictions_of_others_cost_as_much(node, locks):
    """Which keys were evicted, no server says."""
    client = evicting(node)
    lock = locks([node], **BRIEF)
    lock.release(lock.acquire("report"))
    client.set("cache:1", 1, px=1)
    evict(client, expires=500)
    with pytest.raises(QuorumUnavailable):
        lock.acquire("report")
    assert lock.acquire("report", wait=60)


def test_flushed_by_a_cache(node, locks):
    """FLUSHDB, as ``cache.clear()`` does, is noticed by the next request, and named."""
    lock = locks([node], **BRIEF)
    held = lock.take(LockRequest("report", RENEWED))
    with redis.Redis.from_url(node.url) as client:
        client.flushdb()
    eventually(lambda: held.is_lost, "the loss")
    with pytest.raises(LockLost, match=r"the node forgot it \(it was restarted or flushed"):
        held.ensure_held()
