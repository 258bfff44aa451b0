"""What operators' tools stand on: whose lock an event is about, probes, and taking a lock away."""

from __future__ import annotations

import time
from collections import deque

import pytest
import redis

from celery_redlock import LockTaken, QuorumUnavailable, Redlock
from celery_redlock.events import (
    LeaseLost,
    LockAcquired,
    LockConflict,
    LockReleased,
    LockRenewed,
    LockUnavailable,
)
from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.nodes.address import addresses_of
from celery_redlock.lock.nodes.node import Node
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.all_locks import AllLocks
from celery_redlock.reading.health import probe
from celery_redlock.reading.nodes import bootstrap, node_statuses
from celery_redlock.reading.release import release_seen
from celery_redlock.testing.servers import servers
from support.stored import RENEWED, ROOMY, clients_of, urls_of, wait_until_free, wait_until_taken
from support.waiting import eventually

RULES = Rules(**ROOMY)
WHO = {"task": "shop.bill", "task_id": "me"}


def wanted(name):
    """Return what a task asks for; short, as renewals are looked for."""
    return LockRequest(name, RENEWED, info={**WHO, "execution": "me/0/0"})


@pytest.fixture
def heard():
    return []


@pytest.fixture
def locks(five_nodes, heard):
    bootstrap(urls_of(five_nodes), RULES)
    locks = Redlock(urls_of(five_nodes), RULES, [heard.append])
    probe(locks)
    yield locks
    locks.close()


def of(heard, kind):
    return [event for event in heard if isinstance(event, kind)]


# -- events ----------------------------------------------------------------------------------------


def test_every_event_of_a_lock_says_whose_it_is(locks, heard):
    held, taken = locks.take(wanted("name")), clock.now()
    with pytest.raises(LockTaken):
        locks.take(wanted("name"))
    eventually(lambda: len(of(heard, LockRenewed)) >= 2, "two renewals")
    at_least = clock.now() - taken
    locks.give_back(held)
    for kind in (LockAcquired, LockConflict, LockRenewed, LockReleased):
        event = of(heard, kind)[0]
        assert (event.name, event.task, event.task_id) == ("name", "shop.bill", "me")
    renewed = of(heard, LockRenewed)[1]
    assert 0 < renewed.margin < RENEWED
    assert renewed.ttl == RENEWED
    assert renewed.lag >= 0
    (released,) = of(heard, LockReleased)
    assert (released.ttl, released.lost) == (RENEWED, "")
    assert released.held >= at_least > 0


def test_a_holder_tells_how_often_it_renewed_and_how_narrowly(locks, five_nodes, heard):
    held = locks.take(wanted("name"))
    eventually(lambda: len(of(heard, LockRenewed)) >= 2, "two renewals")

    def holder():
        """Return what the nodes tell; the first to answer may not have the last renewal yet."""
        (view,) = AllLocks(urls_of(five_nodes), RULES)
        return view.holder if view.holder["renewals"] >= 2 else None

    assert 0 < eventually(holder, "two renewals on the nodes")["margin"] < RENEWED
    assert held.lease.renewals >= 2
    locks.give_back(held)


def test_a_lock_without_a_task_says_so(locks, heard):
    with locks.hold("script"):
        pass
    (acquired,) = of(heard, LockAcquired)
    assert (acquired.task, acquired.task_id) == ("", "")


def test_a_release_says_that_the_lock_was_lost_before(locks, five_nodes, heard):
    held = locks.take(wanted("name"))
    wait_until_taken(five_nodes, "name")
    told = release_seen(urls_of(five_nodes), RULES, "name", held.token[:8])
    assert set(told.values()) == {"released"}
    eventually(lambda: of(heard, LeaseLost), "the loss")
    assert of(heard, LeaseLost)[0].task == "shop.bill"
    locks.give_back(held)
    assert of(heard, LockReleased)[0].lost == "stolen"


def test_without_a_quorum_too(redis_nodes, heard):
    """Who asked in vain is named."""
    nodes = redis_nodes(3)
    bootstrap(urls_of(nodes), RULES)
    nodes[0].kill()
    nodes[1].kill()
    locks = Redlock(urls_of(nodes), RULES, [heard.append])
    with pytest.raises(QuorumUnavailable):
        locks.take(wanted("name"))
    assert of(heard, LockUnavailable)[0].task == "shop.bill"
    locks.close()


# -- probes ----------------------------------------------------------------------------------------


def test_a_probe_tells_the_states_apart(redis_nodes):
    nodes = redis_nodes(5)
    bootstrap(urls_of(nodes), RULES)
    locks = Redlock(urls_of(nodes), RULES)
    probe(locks)
    nodes[0].kill()
    nodes[1].restart()

    def states():
        return [health.state for health in probe(locks)]

    eventually(lambda: states() == ["down", "quarantined", "up", "up", "up"], "states")
    down, quarantined, up, *_ = probe(locks)
    assert (down.latency, down.clock_offset) == (None, None)
    assert down.problem
    assert 0 < quarantined.quarantine <= RULES.quarantine
    assert up.problem == ""
    locks.close()


def test_a_node_that_hangs_is_down_for_a_probe_and_up_again_after(redis_nodes):
    """It is waited for no longer than in any round, or this would not end."""
    nodes = redis_nodes(3)
    bootstrap(urls_of(nodes), RULES)
    locks = Redlock(urls_of(nodes), RULES)
    probe(locks)
    nodes[0].pause()
    # Not late yet by a hair's breadth, it is waited for once more.
    eventually(
        lambda: [health.state for health in probe(locks)] == ["down", "up", "up"], "a node down"
    )
    nodes[0].resume()
    eventually(lambda: probe(locks)[0].state == "up", "the node again")
    locks.close()


# -- taking a lock away ----------------------------------------------------------------------------


@pytest.mark.parametrize("seen", ["", "0", "0123456", "zzzzzzzz", "*" * 8])
def test_only_the_holder_that_was_seen_is_released(locks, five_nodes, seen):
    lease = locks.acquire("name")
    wait_until_taken(five_nodes, "name")
    part = lease.token[: len(seen)] if seen.startswith("0") else seen
    told = release_seen(urls_of(five_nodes), RULES, "name", part)
    assert set(told.values()) == {"held by another"}
    locks.extend(lease)


def test_a_lock_that_is_free_by_now_is_told_as_free(locks, five_nodes):
    first = locks.acquire("name")
    wait_until_taken(five_nodes, "name")
    locks.release(first)
    wait_until_free(five_nodes, "name")
    told = release_seen(urls_of(five_nodes), RULES, "name", first.token[:8])
    assert set(told.values()) == {"free"}
    second = locks.acquire("name")
    wait_until_taken(five_nodes, "name")
    told = release_seen(urls_of(five_nodes), RULES, "name", first.token[:8])
    assert set(told.values()) == {"held by another"}
    locks.extend(second)


def test_a_leaked_key_can_be_taken_away(locks, five_nodes):
    """One that never expires would keep its name locked for ever."""
    lease = locks.acquire("name")
    wait_until_taken(five_nodes, "name")
    for client in clients_of(five_nodes):
        client.persist("redlock:lock:name")
    (view,) = AllLocks(urls_of(five_nodes), RULES)
    assert view.ttl is None
    assert set(release_seen(urls_of(five_nodes), RULES, "name", lease.token[:8]).values()) == {
        "released"
    }
    locks.release(locks.acquire("name"))


def test_a_dead_node_does_not_keep_the_others_from_releasing(redis_nodes):
    nodes = redis_nodes(3)
    bootstrap(urls_of(nodes), RULES)
    locks = Redlock(urls_of(nodes), RULES)
    lease = locks.acquire("name")
    wait_until_taken(nodes, "name")
    nodes[0].kill()
    dead, *others = release_seen(urls_of(nodes), RULES, "name", lease.token[:8]).values()
    assert others == ["released", "released"]
    assert "refused" in dead.lower()
    locks.close()


def test_what_somebody_else_wrote_is_not_taken_away(locks, five_nodes):
    """It may be anything, and is none of ours to delete."""
    for client in clients_of(five_nodes):
        client.set("redlock:lock:theirs", "somebody-else's value, which is long enough for one")
    told = release_seen(urls_of(five_nodes), RULES, "theirs", "somebody-else's"[:8])
    assert set(told.values()) == {"not written by us"}
    assert [view.name for view in AllLocks(urls_of(five_nodes), RULES)] == ["theirs"]


# -- all locks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_node_that_dies_in_the_middle_costs_no_lock(redis_nodes, dead):
    nodes = redis_nodes(3)
    names = {f"n{number}" for number in range(2000)}
    for client in clients_of(nodes):
        client.mset({f"redlock:lock:{name}": "0" * 40 + "{}" for name in names})
    views = iter(AllLocks(urls_of(nodes), RULES))
    seen = [next(views)]
    nodes[dead].kill()
    seen += views
    assert {view.name for view in seen} == names


# -- nodes that answer and do not vote -------------------------------------------------------------


def test_a_node_that_takes_no_writes_is_not_up(redis_nodes):
    """Full memory: it answers whatever is only read, and refuses every lock."""
    nodes = redis_nodes(3)
    bootstrap(urls_of(nodes), RULES)
    locks = Redlock(urls_of(nodes), RULES)
    assert [health.state for health in probe(locks)] == ["up"] * 3
    with redis.Redis.from_url(nodes[0].url) as client:
        client.config_set("maxmemory", 1)
        unfit, *others = probe(locks)
        assert (unfit.state, [health.state for health in others]) == ("unfit", ["up", "up"])
        assert "maxmemory" in unfit.problem
        full, *others = node_statuses(urls_of(nodes), RULES)
        assert (full.state, [status.state for status in others]) == ("unfit", ["up", "up"])
        assert full.problem.startswith("takes no writes: ")
        client.config_set("maxmemory", 0)
    assert probe(locks)[0].state == "up"
    locks.close()


def test_the_offset_of_a_clock_has_its_sign(locks, monkeypatch):
    monkeypatch.setattr(clock, "wall", lambda: time.time() - 10_000.0)
    assert all(9_900 < health.clock_offset < 10_100 for health in probe(locks))


def test_a_server_that_repeats_a_password_is_not_quoted(monkeypatch):
    """As Redis does with the arguments of a command that it does not know."""
    from redis.exceptions import ResponseError

    from celery_redlock.reading import nodes as reading

    said = "unknown command 'AUTH', with args beginning with: 'hunter2' "
    monkeypatch.setattr(reading, "greet", lambda *_: (_ for _ in ()).throw(ResponseError(said)))
    with servers(1) as (node,):
        (status,) = reading.node_statuses([node.url], RULES)
    assert status.problem == "unknown command 'AUTH'"
    node = Node(0, addresses_of([node.url])[0], RULES, news := deque())
    node.fail(ResponseError(said))
    assert news.pop().reason == "unknown command 'AUTH'"
    assert "hunter2" not in str(node.problem)
