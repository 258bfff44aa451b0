"""Going through all locks on real nodes, whatever stands there, however many there are."""

from __future__ import annotations

import json
import time

import pytest
import redis

from celery_redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.all_locks import SCAN_COUNT, AllLocks, escape
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.reading.read_script import PAGE
from support.stored import ROOMY, urls_of

RULES = Rules(**ROOMY)
HOLDER = {"task": "shop.bill", "task_id": "id-1", "host": "web-1", "pid": 7}


def plant(node, names, *, value=None, px=600_000):
    """Write locks past the library; a *value* of None is one of ours."""
    ours = "a1" * 20 + json.dumps({**HOLDER, "since": time.time()})
    with redis.Redis.from_url(node.url) as client, client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.set(f"redlock:lock:{name}", ours if value is None else value, px=px)
        pipe.execute()


def test_pages_are_merged_over_all_nodes(five_nodes):
    for index, node in enumerate(five_nodes):
        plant(node, [f"all:{i}" for i in range(3 * PAGE)])
        plant(node, [f"only:{index}:{i}" for i in range(PAGE // 2)])
    views = list(AllLocks(urls_of(five_nodes), RULES))
    votes = {view.name: len(view.votes) for view in views}
    assert len(votes) == len(views) == 3 * PAGE + 5 * (PAGE // 2)
    assert {votes[f"all:{i}"] for i in range(3 * PAGE)} == {5}
    assert {count for name, count in votes.items() if name.startswith("only:")} == {1}


def test_nodes_that_do_not_answer_are_named(redis_nodes):
    nodes = redis_nodes(3)
    for node in nodes:
        plant(node, [f"a:{i}" for i in range(5 * PAGE)])
    nodes[0].kill()
    locks = AllLocks(urls_of(nodes), RULES)
    coming = iter(locks)
    first = [next(coming) for _ in range(PAGE // 2)]
    nodes[1].kill()
    rest = list(coming)
    assert {view.name for view in (*first, *rest)} >= {f"a:{i}" for i in range(5 * PAGE)}
    assert locks.silent == [f"127.0.0.1:{node.port}/0" for node in nodes[:2]]


@pytest.mark.parametrize(
    ("like", "names"),
    [
        (b"*" + escape(b"[x]*?") + b"*", {"a[x]*?b"}),
        (b"a*", {"a", "a[x]*?b", "ab"}),
        (b"a?", {"ab"}),
        (b"", set()),
    ],
)
def test_names_can_be_picked(five_nodes, like, names):
    plant(five_nodes[0], ["a", "ab", "b", "a[x]*?b"])
    assert {view.name for view in AllLocks(urls_of(five_nodes), RULES, like)} == names


def test_what_others_wrote_does_not_hide_our_locks(five_nodes):
    node = five_nodes[0]
    plant(node, ["ours"])
    plant(node, ["foreign"], value="hunter2")
    plant(node, ["leaked"], px=None)
    with redis.Redis.from_url(node.url) as client:
        client.hset("redlock:lock:hash", "a", "1")
        client.set("redlock:fence:ours", "much")
        client.rpush("redlock:fence:leaked", "a")
        client.set("redlock:queued:ours", "no hash")
    views = {view.name: view for view in AllLocks(urls_of(five_nodes), RULES)}
    assert set(views) == {"ours", "foreign", "leaked"}
    assert views["foreign"].is_foreign
    assert "hunter2" not in repr(views)
    assert views["leaked"].ttl is None
    assert (views["ours"].fence, views["ours"].waiting) == (0, 0)
    assert 0 < views["ours"].ttl <= 600


def test_no_command_keeps_a_node_from_its_work(five_nodes):
    node = five_nodes[0]
    plant(node, [f"a:{i}" for i in range(20 * PAGE)])
    with redis.Redis.from_url(node.url) as client:
        client.config_resetstat()
        assert sum(1 for _ in AllLocks(urls_of(five_nodes), RULES)) == 20 * PAGE
        stats = client.info("commandstats")
    assert "cmdstat_keys" not in stats
    assert stats["cmdstat_evalsha"]["calls"] >= 20
    assert stats["cmdstat_scan"]["calls"] >= 20 * PAGE // SCAN_COUNT


def test_a_real_lock_is_told_like_a_planted_one(five_nodes):
    """The twin: what the library writes itself is ours, with its fence."""
    bootstrap(urls_of(five_nodes), RULES)
    locks = Redlock(urls_of(five_nodes), RULES)
    try:
        lease = locks.acquire("real")
        (view,) = AllLocks(urls_of(five_nodes), RULES)
    finally:
        locks.close()
    assert (view.name, view.is_foreign, view.fence) == ("real", False, lease.fence)
    assert view.holder["token"] == lease.token[:8]
