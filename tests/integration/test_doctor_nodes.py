"""What the doctor learns from real servers: a fault is planted, found, and gone with its cause."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import redis
from celery import Celery

from celery_redlock import RedlockTask
from celery_redlock.lock.rules import Rules
from celery_redlock.ops.doctor.diagnosis import findings, gather
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.settings import Settings
from support.clients import let_go
from support.clusters import in_cluster_mode
from support.eviction import evict, evicting
from support.stored import ROOMY, do, label
from support.waiting import eventually

RULES = Rules(**ROOMY)
#: What a worker has to be allowed; the tools want more.
WORKER = "+info +script|load +eval +evalsha +time +set +get +mget +pttl +exists +pexpire +del"
WORKER += " +hset +hget +hmget +hdel +rename +xadd +ping +client|setname +client|setinfo +select"
WORKER += " +zadd +zrem +zrange +hgetall +hlen +publish +subscribe &redlock:*"
TOOLS = f"{WORKER} +scan +xrevrange +xrange +config|get"


@pytest.fixture
def app():
    app = Celery("doctored", broker="memory://", set_as_current=False)
    yield app
    let_go(app)


def urls(nodes):
    return [getattr(node, "url", node) for node in nodes]


def found(app, nodes, rules=RULES):
    """Return code -> where of what the doctor finds on these nodes."""
    settings = Settings(nodes=urls(nodes), rules=rules)
    plugin_for(app)._settings = settings
    facts = gather(app, settings, lambda _: None)
    return {finding.code: finding.where for finding in findings(facts)}


def test_healthy_nodes_have_no_findings(app, redis_nodes):
    """The twin of all that follows."""
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    assert found(app, nodes) == {}


def test_keys_without_an_expiry(app, redis_nodes):
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    with redis.Redis.from_url(nodes[1].url) as client, client.pipeline() as pipe:
        for number in range(1200):
            pipe.set(f"redlock:lock:well:{number}", "x", px=60_000)
        pipe.set("redlock:lock:leaked", "hunter2")
        pipe.set("elsewhere", "not ours")
        pipe.execute()
    assert found(app, nodes) == {"leaked-keys": label(nodes[1])}
    settings = plugin_for(app).settings
    facts = gather(app, settings, lambda _: None)
    (node,) = [node for node in facts.nodes if node.leaked]
    assert (node.leaked, node.leaked_names) == (1, ["redlock:lock:leaked"])
    assert "hunter2" not in repr(facts)


def test_down_unmarked_quarantined_and_foreign_nodes(app, redis_nodes):
    nodes = redis_nodes(5)
    others = Rules(ttl=30, max_ttl=30)
    bootstrap(urls(nodes), RULES)
    nodes[0].kill()
    nodes[1].restart()
    nodes[2].restart()
    bootstrap([nodes[2].url], others)
    codes = found(app, nodes)
    assert codes["node-down"] == label(nodes[0])
    assert codes["node-unmarked"] == label(nodes[1])
    assert codes["node-foreign"] == label(nodes[2])
    assert "no-quorum" in codes
    do(nodes[3], "SET", "redlock:node:quarantine", "1", "PX", "600000")
    assert found(app, nodes)["node-quarantined"] == label(nodes[3])


def test_servers_that_must_not_be_lock_nodes(app, redis_nodes):
    nodes = redis_nodes(3)
    (cluster,) = redis_nodes(1, extra_args=in_cluster_mode())
    bootstrap(urls(nodes), RULES)
    do(nodes[0], "REPLICAOF", "127.0.0.1", str(nodes[1].port))
    do(nodes[2], "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    eventually(
        lambda: redis.Redis.from_url(nodes[1].url).info("replication")["connected_slaves"],
        "a replica",
    )
    again = nodes[1].url.replace("/0", "/1")
    codes = found(app, [*nodes, cluster, again])
    assert codes["node-replica"] == label(nodes[0])
    assert codes["node-eviction"] == label(nodes[2])
    assert codes["node-cluster"] == label(cluster)
    assert codes["same-server"] == again.removeprefix("redis://")
    assert codes["replicas"] == codes["same-server"]  # the last one that says so


def test_the_only_node_may_evict_keys(app, redis_nodes):
    """It votes, with a warning that counts those that it has evicted; also those of others."""
    (node,) = redis_nodes(1)
    client = evicting(node)
    bootstrap([node.url], RULES)
    evict(client)
    settings = Settings(nodes=[node.url], rules=RULES)
    plugin_for(app)._settings = settings
    told = {finding.code: finding for finding in findings(gather(app, settings, lambda _: None))}
    assert {"node-eviction", "node-quarantined", "no-quorum"} <= set(told)
    mine = told["node-eviction"]
    assert mine.level == "warning"
    count = client.info("stats")["evicted_keys"]
    assert f"has evicted {count} key" in mine.what
    assert "evicts what expires soonest first" in mine.what
    bootstrap([node.url], RULES)
    codes = found(app, [node])
    assert "node-eviction" in codes
    assert "node-quarantined" not in codes


@pytest.mark.parametrize(("database", "is_told"), [("0", True), ("1", False)])
def test_a_cache_in_the_database_of_a_node(app, redis_nodes, monkeypatch, database, is_told):
    """By whatever name of its server; in another database it is nobody's concern."""
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    where = f"redis://127.1:{nodes[1].port}/{database}"
    conf = SimpleNamespace(configured=True, CACHES={"pages": {"LOCATION": ["redis://[", where]}})
    monkeypatch.setitem(sys.modules, "django.conf", SimpleNamespace(settings=conf))
    assert found(app, nodes) == ({"cache-on-node": label(nodes[1])} if is_told else {})


def test_options_of_tasks_without_a_lock(app, redis_nodes):
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)

    @app.task(name="forgotten", lock_key="a")
    def forgotten():
        pass

    assert found(app, nodes) == {"option-without-lock": "forgotten"}


def test_a_node_that_is_nearly_full(app, redis_nodes):
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    used = redis.Redis.from_url(nodes[0].url).info("memory")["used_memory"]
    do(nodes[0], "CONFIG", "SET", "maxmemory", str(int(used * 1.1)))
    assert found(app, nodes)["memory-nearly-full"] == label(nodes[0])


def test_persistence_counts_where_the_guard_is_off(app, redis_nodes):
    nodes = redis_nodes(3)
    unguarded = Rules(**ROOMY, restart_guard=False)
    assert "restart-forgets" in found(app, nodes, unguarded)
    for node in nodes:
        do(node, "CONFIG", "SET", "appendonly", "yes")
        do(node, "CONFIG", "SET", "appendfsync", "always")
    assert found(app, nodes, unguarded) == {}


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (TOOLS, set()),
        (WORKER, {"no-permission-for-tools"}),
        (TOOLS.replace("+hset", ""), {"no-permission"}),
        (TOOLS.replace("+pexpire", ""), {"no-permission"}),
        (TOOLS.replace("+xadd", ""), {"no-permission"}),
        (TOOLS.replace("+zrange", ""), {"no-permission-to-wake"}),
        (TOOLS.replace("+publish", ""), {"no-permission-to-wake"}),
        (TOOLS.replace("&redlock:*", ""), {"no-permission-to-wake"}),
        (TOOLS.replace("+info", ""), {"no-permission", "node-x"}),
        (TOOLS.replace("+evalsha", ""), {"no-permission", "node-x"}),
        (TOOLS.replace("+config|get", ""), set()),
    ],
)
def test_what_the_user_must_not_do_is_found(app, redis_nodes, allowed, expected):
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    user = ["ACL", "SETUSER", "shop", "on", ">s3cret", "~redlock:*", *allowed.split()]
    do(nodes[0], *user)
    keys = set(do(nodes[0], "KEYS", "*"))
    url = nodes[0].url.replace("redis://", "redis://shop:s3cret@")
    settings = Settings(nodes=[url, *urls(nodes[1:])], rules=RULES)
    plugin_for(app)._settings = settings
    told = findings(gather(app, settings, lambda _: None))
    assert {finding.code for finding in told} == expected - {"node-x"}
    assert {finding.where for finding in told} <= {label(nodes[0])}
    assert "s3cret" not in repr(told)
    eventually(lambda: set(do(nodes[0], "KEYS", "*")) == keys, "end of the probe")


def test_what_is_forbidden_inside_a_script_is_not_laid_to_evalsha(app, redis_nodes):
    """The user may run that, and to allow it again would not help."""
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    do(nodes[0], "SET", "redlock:lock:a", "b")
    allowed = TOOLS.replace("+pttl", "").replace("+hset", "").split()
    do(nodes[0], "ACL", "SETUSER", "shop", "on", ">x", "~redlock:*", *allowed)
    url = nodes[0].url.replace("redis://", "redis://shop:x@")
    settings = Settings(nodes=[url, *urls(nodes[1:])], rules=RULES)
    plugin_for(app)._settings = settings
    (told,) = [
        finding
        for finding in findings(gather(app, settings, lambda _: None))
        if finding.code == "no-permission"
    ]
    assert "PTTL" in told.what
    assert "HSET" in told.what
    assert "EVALSHA" not in told.what


def test_only_our_keys_have_to_be_allowed(app, redis_nodes):
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    do(nodes[0], "ACL", "SETUSER", "shop", "on", ">s3cret", "~other:*", *TOOLS.split())
    url = nodes[0].url.replace("redis://", "redis://shop:s3cret@")
    assert found(app, [url, *nodes[1:]])["no-permission"] == label(nodes[0])


def test_a_wrong_password_is_a_node_that_does_not_answer(app, redis_nodes):
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    url = nodes[0].url.replace("redis://", "redis://shop:wr0ng@")
    assert found(app, [url, *nodes[1:]]) == {"node-down": label(nodes[0])}


@pytest.mark.parametrize("setting", ["broker_url", "result_backend"])
def test_a_node_that_is_also_something_else(app, redis_nodes, setting):
    *nodes, other = redis_nodes(4)
    bootstrap(urls(nodes), RULES)
    app.conf[setting] = nodes[0].url.replace("/0", "/7").replace("127.0.0.1", "localhost")
    assert found(app, nodes) == {"shared-server": label(nodes[0])}
    app.conf[setting] = other.url
    plugin_for(app).refresh()
    assert found(app, nodes) == {}


def test_tasks_of_the_app_are_looked_at(app, redis_nodes, caplog):
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)

    @app.task(base=RedlockTask, name="long", lock_ttl=90.0)
    def long():
        pass

    @app.task(base=RedlockTask, name="late", acks_late=True, dedup_ttl=5.0)
    def late():
        pass

    @app.task(base=RedlockTask, name="well")
    def well():
        pass

    app.conf.broker_url = "redis://127.0.0.1:1/0"
    codes = found(app, nodes)
    assert codes == {"task-options": "long", "dedup-too-short": "late"}
    assert not caplog.records


def test_a_declaration_that_makes_no_sense_is_a_finding(app, redis_nodes):
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)

    @app.task(base=RedlockTask, name="wrong", lock_key="a:{nothing}")
    def wrong(something):
        pass

    app.conf.redlock_observers = ["promtheus"]
    settings = Settings(nodes=urls(nodes), rules=RULES, observers=["promtheus"])
    plugin_for(app)._settings = settings
    told = {f.code: f.what for f in findings(gather(app, settings, lambda _: None))}
    assert set(told) == {"task-declared", "observers"}
    assert "nothing" in told["task-declared"]
    assert "did you mean 'prometheus'" in told["observers"]


def test_the_clock_of_a_node_is_compared_with_ours(app, redis_nodes, monkeypatch):
    """Ours is moved, as those of the nodes cannot be."""
    from celery_redlock.ops.doctor import nodes as gathering

    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    real = gathering.time.time

    class Ahead:
        perf_counter = staticmethod(gathering.time.perf_counter)

        @staticmethod
        def time():
            return real() + 20.0

    monkeypatch.setattr(gathering, "time", Ahead)
    settings = Settings(nodes=urls(nodes), rules=RULES)
    plugin_for(app)._settings = settings
    facts = gather(app, settings, lambda _: None)
    assert all(-21 < node.clock_offset < -19 for node in facts.nodes)
    assert {f.code for f in findings(facts)} == {"clock-offset"}
