"""What the doctor makes of facts: every finding, and the same facts without its cause."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from celery import Celery, Task

from celery_redlock import ConfigurationError, RedlockTask
from celery_redlock.lock.nodes.address import addresses_of
from celery_redlock.lock.rules import Rules
from celery_redlock.ops.doctor import LEVELS
from celery_redlock.ops.doctor.check_votes import node_cluster
from celery_redlock.ops.doctor.diagnosis import findings, load_the_rest
from celery_redlock.ops.doctor.facts import Facts, NodeFacts, OtherServer, TaskFacts
from celery_redlock.reading.holds import HOLD_BOUNDS, Holds, class_of
from celery_redlock.reading.tally import TaskTally
from celery_redlock.settings import Settings
from celery_redlock.task.messages.broker import detect_quorum_queues
from celery_redlock.task.policies import Fail, Queue, Retry, RunUnlocked, Skip
from celery_redlock.task.unlocked import Unlocked
from support.options import OPTIONS

URLS = [f"redis://lock-{number}/0" for number in (1, 2, 3)]
SETTINGS = Settings(nodes=URLS, rules=Rules())
UNGUARDED = Settings(nodes=URLS, rules=Rules(restart_guard=False))
FSYNC = {"appendonly": "yes", "appendfsync": "always", "save": ""}
NO_DISK = {"appendonly": "no", "appendfsync": "everysec", "save": ""}


def node(number=1, **told):
    info = {
        "role": "master",
        "run_id": f"{number:040x}",
        "maxmemory_policy": "noeviction",
        "redis_mode": "standalone",
        "connected_slaves": "0",
        "used_memory": "1000",
        "maxmemory": "0",
    }
    told["info"] = {**info, **told.pop("info", {})}
    well = {"state": "enrolled", "latencies": [0.001] * 3, "clock_offset": 0.0, "config": NO_DISK}
    return NodeFacts(node=f"lock-{number}:6379/0", **{**well, **told})


def facts(first=None, **known):
    nodes = [first or node(1), node(2), node(3)]
    return Facts(**{"settings": SETTINGS, "nodes": nodes, "now": 1e9, **known})


def task(**known):
    return TaskFacts(**{"name": "shop.bill", "options": OPTIONS, **known})


def told(of):
    return {(finding.level, finding.code) for finding in findings(of)}


def held(longest, ttl=30.0):
    counts = [0] * (len(HOLD_BOUNDS) + 1)
    for length in (1.0, longest):
        counts[class_of(length)] += 1
    return {"shop.bill": TaskTally(holds=Holds(tuple(counts), 1.0 + longest, longest, ttl))}


def replaced(**options):
    return [task(options=replace(OPTIONS, **options))]


def test_of_a_healthy_app_there_is_nothing_to_say():
    """The twin of all that follows: no finding without a cause."""
    well = facts(
        tasks=[task(acks_late=True, time_limit=60.0)],
        visibility_timeout=3600.0,
        others=[OtherServer(role="broker", place="broker:6379", run_id="b" * 40)],
        tally=held(29.0),
    )
    assert findings(well) == []
    kept = [node(number, config=FSYNC) for number in (1, 2, 3)]
    assert findings(replace(well, settings=UNGUARDED, nodes=kept)) == []


@pytest.mark.parametrize(
    ("label", "url"),
    [
        ("lock-1:6379/0", "redis+cluster://lock-1:6379/"),
        ("::1:6379/0", "redis+cluster://[::1]:6379/"),
    ],
)
def test_the_url_that_is_advised_can_be_written(label, url):
    of_cluster = replace(node(info={"cluster_enabled": "1"}), node=label)
    (found,) = node_cluster(of_cluster)
    assert url in found.fix
    assert addresses_of([url], "{redlock}")


NODES = {
    "does not answer": (node(problem="Connection refused"), "warning", "node-down"),
    "takes no writes": (
        node(refuses_writes="takes no writes: MISCONF snapshots fail"),
        "error",
        "node-takes-no-writes",
    ),
    "evicts, and is new": (
        node(info={"maxmemory_policy": "allkeys-lru"}, state="unmarked"),
        "error",
        "node-eviction",
    ),
    "is no Redis": (node(info={"role": "master", "run_id": ""}), None, None),
    "is a replica": (node(info={"role": "slave"}), "error", "node-replica"),
    "is of a cluster": (node(info={"redis_mode": "cluster"}), "error", "node-cluster"),
    "is of an old cluster": (node(info={"cluster_enabled": "1"}), "error", "node-cluster"),
    "is a cluster": (node(info={"cluster_enabled": "1"}, in_cluster=True), None, None),
    "is called one": (node(in_cluster=True), "error", "node-cluster"),
    "evicts": (node(info={"maxmemory_policy": "allkeys-lru"}), "error", "node-eviction"),
    "is of others": (node(state="foreign"), "error", "node-foreign"),
    "is new": (node(state="unmarked"), "warning", "node-unmarked"),
    "is held back": (node(quarantine=12.0), "warning", "node-quarantined"),
    "has leaks": (node(leaked=7, leaked_names=["redlock:lock:a"]), "error", "leaked-keys"),
    "must not": (node(denied=["EVALSHA"]), "error", "no-permission"),
    "must not wake": (
        node(denied_to_wake=["SUBSCRIBE"]),
        "warning",
        "no-permission-to-wake",
    ),
    "must not for us": (node(denied_to_tools=["SCAN"]), "note", "no-permission-for-tools"),
    "is nearly full": (
        node(info={"used_memory": "85", "maxmemory": "100"}),
        "warning",
        "memory-nearly-full",
    ),
    "is full": (
        node(info={"used_memory": "96", "maxmemory": "100"}),
        "error",
        "memory-nearly-full",
    ),
    "has room": (node(info={"used_memory": "79", "maxmemory": "100"}), None, None),
    "is copied": (node(info={"connected_slaves": "1"}), "note", "replicas"),
    "is a copied cluster": (
        node(info={"cluster_enabled": "1", "connected_slaves": "1"}, in_cluster=True),
        "note",
        "replicas",
    ),
    "writes snapshots": (node(config={**NO_DISK, "save": "3600 1"}), "note", "snapshots"),
    "logs and writes snapshots": (node(config={**FSYNC, "save": "3600 1"}), None, None),
    "tells no configuration": (node(config=None), None, None),
    "is slow": (node(latencies=[0.03, 0.03, 0.001]), "warning", "node-slow"),
    "is too slow": (node(latencies=[0.06] * 3), "error", "node-slow"),
    "was slow once": (node(latencies=[0.06, 0.001, 0.001]), None, None),
    "is a second behind": (node(clock_offset=-1.5), "warning", "clock-offset"),
    "is far behind": (node(clock_offset=-5.5), "error", "clock-offset"),
    "is ahead": (node(clock_offset=1.5), "warning", "clock-offset"),
    "is about right": (node(clock_offset=0.9), None, None),
    "tells no time": (node(clock_offset=None), None, None),
}


@pytest.mark.parametrize(
    ("problem", "fix"),
    [
        ("Connection refused", "Start it"),
        ("Timeout connecting to server", "Start it"),
        ("invalid username-password pair or user is disabled.", "redlock_password"),
        ("NOAUTH Authentication required.", "redlock_password"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", "its certificate"),
        ("Error -2 connecting to lock-1:6379. Name or service not known.", "its host name"),
        ("DB index is out of range", "Write another in its URL"),
        ("max number of clients reached", "maxclients"),
        ("LOADING Redis is loading the dataset in memory", "Wait"),
    ],
)
def test_a_node_that_cannot_be_asked_has_the_fix_of_its_cause(problem, fix):
    """A wrong password is no matter of the network."""
    (finding,) = findings(facts(node(problem=problem)))
    assert problem in finding.what
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("says", "fix"),
    [
        ("MISCONF Redis is configured to save RDB snapshots.", "Make room on its disk"),
        ("NOREPLICAS Not enough good replicas to write.", "min-replicas-to-write 0"),
        ("OOM command not allowed", "Raise its maxmemory"),
        ("command not allowed when used memory > 'maxmemory'.", "Raise its maxmemory"),
        ("You can't write against a read only replica.", "Name the master"),
        ("SOMETHING else", "look into its log"),
    ],
)
def test_a_node_that_takes_no_writes_has_the_fix_of_its_cause(says, fix):
    """Whether redis-py has left the server's first word there or not; told as one sentence."""
    (finding,) = findings(facts(node(refuses_writes=f"takes no writes: {says}")))
    assert fix in finding.fix
    assert f"{says.rstrip('.')}. It grants" in finding.what


@pytest.mark.parametrize("says", ["MISCONF", "NOREPLICAS", "OOM", "READONLY", "SOMETHING"])
def test_a_node_that_takes_no_writes_does_not_vote(says):
    """What it says is told, with what to do about it; of three such nodes there is no quorum."""
    broken = [node(number, refuses_writes=f"takes no writes: {says} ...") for number in (1, 2, 3)]
    found = findings(facts(nodes=broken))
    assert {finding.code for finding in found} >= {"node-takes-no-writes", "no-quorum"}
    assert all(says in it.what for it in found if it.code == "node-takes-no-writes")


@pytest.mark.parametrize("case", NODES)
def test_of_a_node(case):
    first, level, code = NODES[case]
    found = told(facts(first)) - {("error", "clock-spread")}
    assert found == ({(level, code)} if code else set())


def test_a_server_of_another_kind_is_no_node():
    """What answers INFO without a role is told once, and not asked further."""
    other = replace(node(), info={"server": "something"}, state="")
    assert ("error", "node-unknown") in told(facts(other))


def test_replicas_and_clusters_are_not_told_of_what_follows_from_that():
    """A replica has no standing, and its data are its master's."""
    replica = node(info={"role": "slave"}, state="", leaked=3, config=None)
    assert told(facts(replica)) == {("error", "node-replica")}


@pytest.mark.parametrize(
    ("first", "level", "code"),
    [
        (node(config=NO_DISK), "error", "restart-forgets"),
        (node(config={**FSYNC, "appendfsync": "everysec"}), "error", "restart-forgets"),
        (node(config={**NO_DISK, "save": "3600 1"}), "error", "restart-forgets"),
        (node(config=None), "warning", "persistence-unknown"),
        (node(config=FSYNC, info={"connected_slaves": "1"}), "error", "replicas"),
    ],
)
def test_without_the_guard_a_node_has_to_keep_every_write(first, level, code):
    """With the guard none of these is worth a warning."""
    others = [node(number, config=FSYNC) for number in (2, 3)]
    found = told(facts(settings=UNGUARDED, nodes=[first, *others]))
    assert found == {(level, code)}
    assert not {level for level, _ in told(facts(first))} & {"error", "warning"}


def test_nodes_that_are_one_server():
    assert told(facts(node(2))) == {("error", "same-server")}


def test_without_a_majority_there_is_no_quorum():
    nodes = [node(1, problem="no answer"), node(2, quarantine=3.0), node(3)]
    assert ("error", "no-quorum") in told(facts(nodes=nodes))
    assert ("error", "no-quorum") not in told(facts(nodes[0]))


@pytest.mark.parametrize(
    ("held_back", "left"), [({"state": "unmarked"}, "64 s"), ({"quarantine": 41.3}, "41 s")]
)
def test_a_node_that_does_not_vote_yet_says_what_ends_that(held_back, left):
    (finding,) = findings(facts(node(**held_back)))
    assert left in finding.what
    assert "redlock bootstrap" in finding.fix


def test_clocks_of_nodes_that_are_apart():
    """Each may be near to ours, and still be too far from the other."""
    nodes = [node(1, clock_offset=-2.6), node(2, clock_offset=2.6), node(3)]
    found = told(facts(nodes=nodes))
    assert ("error", "clock-spread") in found
    nodes[1] = node(2, clock_offset=2.0)
    assert ("error", "clock-spread") not in told(facts(nodes=nodes))


def test_one_healthy_node_is_worth_a_note():
    """The server that people have, whether or not they name it; the twin has two jobs of three."""
    single = Settings(nodes=URLS[:1], rules=Rules())
    broker = OtherServer(role="broker", place="lock-1:6379", run_id="")
    one = {"nodes": [node()], "others": [broker]}
    assert told(facts(settings=single, **one)) == {("note", "single-node")}
    fallback = replace(single, is_fallback=True)
    assert told(facts(settings=fallback, **one)) == {("note", "fallback-node")}
    kept = {**one, "nodes": [node(config={"save": "60 1", "appendonly": "no"})]}
    assert told(facts(settings=fallback, **kept)) == {("note", "fallback-node")}
    assert ("note", "snapshots") in told(facts(settings=single, **kept))
    three = facts(nodes=[node(n) for n in (1, 2, 3)], others=[broker])
    assert told(three) == {("warning", "shared-server")}


def in_database(commits="durable", **told):
    return node(in_database=True, info={"redlock_commits": commits}, config=None, **told)


GUARDED = Settings(nodes=["sqlite:////locks.db"], rules=Rules())
LEFT_OPEN = Settings(nodes=["sqlite:////locks.db"], rules=Rules(restart_guard=False))


@pytest.mark.parametrize(
    ("settings", "database", "expected"),
    [
        (GUARDED, in_database(), ("note", "database-commits")),
        (LEFT_OPEN, in_database(), ("note", "database-commits")),
        (GUARDED, in_database("async"), ("note", "database-commits")),
        (LEFT_OPEN, in_database("async"), ("error", "database-commits")),
        (GUARDED, in_database("unsafe"), ("warning", "database-commits")),
        (LEFT_OPEN, in_database("unsafe"), ("error", "database-commits")),
        (GUARDED, in_database(leaked=1, leaked_names=["a"]), ("error", "leaked-keys")),
        (GUARDED, in_database(latencies=[2.0]), ("error", "node-slow")),
        (GUARDED, in_database(clock_offset=2.0), ("warning", "clock-offset")),
        (GUARDED, in_database(state="unmarked"), ("warning", "node-unmarked")),
    ],
)
def test_a_database_has_findings_of_its_own(settings, database, expected):
    """None of them speaks of Redis, nor of what only Redis has."""
    found = findings(facts(settings=settings, nodes=[database]))
    assert expected in {(it.level, it.code) for it in found}
    text = " ".join(f"{it.what} {it.fix}" for it in found)
    assert not re.search("Redis|appendonly|snapshot|CONFIG|ACL|INFO|maxmemory|DEL ", text)


@pytest.mark.parametrize(
    ("problem", "code", "said"),
    [
        ("has no tables for locks; make them: celery", "database-unfit", "It has no tables"),
        ('FATAL: password authentication failed for user "x"', "database-down", "let us in"),
        ("server does not support SSL, but it was required", "database-down", "No secure"),
        ("could not translate host name", "database-down", "Its name is not known"),
        ("FATAL: sorry, too many clients already", "database-down", "no more connections"),
        ("connection refused", "database-down", "It does not answer"),
        ("/locks.db: unable to open database file", "database-down", "cannot be opened"),
        ("/l.db: attempt to write a readonly database", "database-down", "may not be written"),
        ("/l.db: file is not a database", "database-down", "is not SQLite's"),
        ("/l.db: database or disk is full", "database-down", "Its disk is full"),
        ("could not extend file: No space left on device", "database-down", "Its disk is full"),
        ("canceling statement due to lock timeout", "database-down", "to themselves"),
    ],
)
def test_a_database_that_cannot_be_asked(problem, code, said):
    database = NodeFacts(node="a", in_database=True, problem=problem, unfit="unfit" in code)
    found = {it.code: it for it in findings(facts(settings=GUARDED, nodes=[database]))}
    assert said in found[code].what
    assert found[code].level == ("error" if database.unfit else "warning")


def test_a_healthy_database_is_worth_notes_alone():
    notes = {("note", "database-commits")}
    of_backend = replace(GUARDED, is_fallback=True)
    assert told(facts(settings=GUARDED, nodes=[in_database()])) == notes | {("note", "single-node")}
    assert told(facts(settings=of_backend, nodes=[in_database()])) == (
        notes | {("note", "fallback-node")}
    )


@pytest.mark.parametrize(
    ("server", "is_same"),
    [
        (OtherServer(role="broker", place="elsewhere:1", run_id=f"{1:040x}"), True),
        (OtherServer(role="result backend", place="lock-1:6379", run_id=""), True),
        (OtherServer(role="broker", place="lock-1:6379", run_id="f" * 40), False),
        (OtherServer(role="broker", place="broker:6379", run_id=""), False),
    ],
)
def test_a_node_that_is_broker_or_backend(server, is_same):
    assert told(facts(others=[server])) == ({("warning", "shared-server")} if is_same else set())


TASKS = {
    "makes no sense": ([task(options=None, problem="no")], "error", "task-options"),
    "retries a conflict": (
        [task(options=replace(OPTIONS, on_conflict=Retry()), max_retries=0)],
        "warning",
        "retry-without-retries",
    ),
    "retries without a quorum": (
        [task(options=replace(OPTIONS, on_unavailable=Retry()), max_retries=0)],
        "warning",
        "retry-without-retries",
    ),
    "retries without end": (
        [task(options=replace(OPTIONS, on_conflict=Retry()), max_retries=None)],
        None,
        None,
    ),
    "has no retries and needs none": ([task(max_retries=0)], None, None),
    "is killed while it waits": (
        [task(options=replace(OPTIONS, wait=60.0), time_limit=60.0)],
        "warning",
        "wait-over-time-limit",
    ),
    "waits within its limit": (
        [task(options=replace(OPTIONS, wait=59.0), time_limit=60.0)],
        None,
        None,
    ),
    "forgets early": (
        [task(options=replace(OPTIONS, dedup_ttl=10.0), acks_late=True)],
        "warning",
        "dedup-too-short",
    ),
    "never remembers": (
        [task(options=replace(OPTIONS, dedup_ttl=0.0), acks_late=True)],
        "warning",
        "dedup-too-short",
    ),
    "forgets early what is acknowledged": (replaced(dedup_ttl=10.0), None, None),
    "runs unlocked": (replaced(on_unavailable=RunUnlocked()), "note", "runs-unlocked"),
    "fails": (replaced(on_unavailable=Fail()), None, None),
}


@pytest.mark.parametrize("case", TASKS)
def test_of_a_task(case):
    tasks, level, code = TASKS[case]
    found = told(facts(tasks=tasks, visibility_timeout=60.0))
    assert found == ({(level, code)} if code else set())


@pytest.mark.parametrize(
    ("aborts", "longest", "expected"),
    [
        (True, 31.0, {("note", "holds-outlast-ttl")}),
        (False, 31.0, {("warning", "holds-outlast-ttl")}),
        (False, 29.0, set()),
    ],
)
def test_holds_that_outlast_their_ttl(aborts, longest, expected):
    """That is what the watchdog is for; it is risky where a body goes on without its lock."""
    known = facts(tasks=replaced(aborts_on_loss=aborts), tally=held(longest))
    assert told(known) == expected
    for finding in findings(known):
        assert f"for {longest:g} s" in finding.what
        assert "of 2 holds in a day, 99 % took up to" in finding.what


def test_one_node_of_others_keeps_new_ones_out():
    nodes = [node(1, state="foreign"), node(2, state="unmarked"), node(3, state="enrolled")]
    by_code = {finding.code: finding for finding in findings(facts(nodes=nodes))}
    assert "DEL redlock:node:boot on this node alone" in by_code["node-foreign"].fix
    assert "not enrolled while another node" in by_code["node-unmarked"].what
    nodes = [node(number, state="foreign") for number in (1, 2, 3)]
    assert not any("DEL" in finding.fix for finding in findings(facts(nodes=nodes)))


def test_options_without_a_lock():
    """Of a base that was forgotten each is an error; what a library owns is a note on that."""
    stray = [Unlocked("shop.bill", ("lock_key",)), Unlocked("shop.b", ("unique_on",), "singleton")]
    error, note = findings(facts(unlocked=[*stray, stray[1]._replace(task="shop.c")]))
    assert (error.level, error.code, error.where) == ("error", "option-without-lock", "shop.bill")
    assert error.fix.startswith("Declare it with base=RedlockTask")
    assert (note.level, note.code, note.where) == ("note", "option-without-lock", "singleton")
    assert "unique_on of its own: its tasks take no lock (shop.b, shop.c)" in note.what


def test_the_only_node_that_may_evict_is_a_warning():
    """It votes, so its enrolment is looked at as well; several are refused."""
    one = node(1, info={"maxmemory_policy": "volatile-ttl", "evicted_keys": "7"}, quarantine=9.0)
    alone = {finding.code: finding for finding in findings(facts(nodes=[one]))}
    assert alone["node-eviction"].level == "warning"
    assert "has evicted 7 keys" in alone["node-eviction"].what
    assert "node-quarantined" in alone
    assert ("error", "node-eviction") in told(facts(one))


def test_locks_that_were_lost_lately():
    lost = {"event": "LeaseLost", "name": "a", "task": "shop.bill", "at": 1e9 - 3600}
    (finding,) = findings(facts(records=[lost, {**lost, "at": 1e9 - 60}]))
    assert (finding.code, finding.where) == ("leases-lost", "shop.bill")
    assert finding.what.startswith("2 locks lost")
    assert findings(facts(records=[{**lost, "at": 1e9 - 90_000}, {"event": "LeaseLost"}, {}])) == []


@pytest.mark.parametrize(
    ("votes", "helps"),
    [
        ({"a": "quarantined (3.0 s left)"}, False),
        ({"a": "quarantined (3.0 s left)", "b": "granted", "c": "granted"}, True),
        ({"a": "unreachable (no answer in time)"}, True),
        ({}, True),
        (["a"], True),
    ],
)
def test_a_longer_lease_survives_no_flush(votes, helps):
    """Where the nodes had forgotten the lock, the doctor says so, and does not advise it."""
    lost = {"event": "LeaseLost", "task": "shop.bill", "at": 1e9 - 60, "votes": votes}
    (finding,) = findings(facts(records=[lost, {**lost, "at": 1e9 - 50}]))
    assert ("larger lock_ttl helps" in finding.fix) is helps
    assert ("appendonly yes" in finding.fix) is not helps


def test_losses_of_several_causes_are_counted_apart():
    """Each has its own fix: those that nodes forgot, and the others."""
    lost = {"event": "LeaseLost", "task": "shop.bill", "at": 1e9 - 60}
    forgotten = {**lost, "votes": {"a": "quarantined (3.0 s left)"}}
    (finding,) = findings(facts(records=[lost, forgotten, forgotten]))
    assert finding.what.startswith("3 locks lost")
    assert "larger lock_ttl helps" in finding.fix
    assert "Of 2 the nodes had forgotten the lock" in finding.fix


def test_nothing_comes_later_in_eager_mode():
    assert told(facts(is_eager=True, tasks=[task()])) == {("warning", "always-eager")}
    now = replaced(on_conflict=Skip(), on_unavailable=Fail())
    assert told(facts(is_eager=True, tasks=now)) == set()


DEAF = {"denied_to_wake": ["PUBLISH"]}


@pytest.mark.parametrize("is_fallback", [True, False])
@pytest.mark.parametrize(
    "trouble",
    [{"connected_slaves": "1"}, {"role": "slave"}, {"maxmemory_policy": "allkeys-lru"}],
)
def test_no_finding_speaks_of_other_nodes_to_who_has_one(is_fallback, trouble):
    settings = Settings(nodes=URLS[:1], rules=Rules(), is_fallback=is_fallback)
    alone = node(info=trouble, state="unmarked", **DEAF)
    found = findings(facts(settings=settings, nodes=[alone], tasks=replaced(on_conflict=Queue())))
    assert len(found) > 3
    for it in found:
        said = f"{it.where} {it.what} {it.fix}"
        assert not re.search("redlock_nodes|other nodes|the others", said), said


@pytest.mark.parametrize(
    ("options", "known", "where"),
    [
        ({"on_conflict": Queue()}, {"delays_in_broker": True}, "broker_url"),
        ({"on_conflict": Skip()}, {"delays_in_broker": True}, None),
        ({"on_conflict": Queue()}, {}, None),
        ({"on_conflict": Queue()}, {"nodes": [node(1, **DEAF), node(2, **DEAF)]}, ""),
        ({"on_conflict": Queue()}, {"nodes": [node(1, **DEAF), node(2), node(3)]}, None),
        ({"on_conflict": Skip()}, {"nodes": [node(1, **DEAF), node(2, **DEAF)]}, None),
    ],
)
def test_a_task_that_queues_where_nothing_wakes_it(options, known, where):
    found = findings(facts(tasks=replaced(**options), **known))
    queues = [it for it in found if it.code == "queue-not-woken"]
    assert [it.where for it in queues] == ([] if where is None else [where])
    assert all("shop.bill" in it.what for it in queues)


@pytest.mark.parametrize(
    ("policy", "known", "is_found"),
    [
        (Queue(), {"eta_task_limit": 10}, True),
        (Queue(max_waiting=1000), {"eta_task_limit": 10}, True),
        (Queue(max_waiting=999), {"eta_task_limit": 10}, False),
        (Queue(), {"eta_task_limit": 10, "delays_in_broker": True}, False),
        (Queue(), {}, False),
        (Skip(), {"eta_task_limit": 10}, False),
    ],
)
def test_tasks_that_wait_and_fill_a_worker(policy, known, is_found):
    found = findings(facts(tasks=replaced(on_conflict=policy), **known))
    fills = [it for it in found if it.code == "queue-fills-worker"]
    assert bool(fills) is is_found
    for it in fills:
        assert "worker_eta_task_limit is 10" in it.what
        assert "max_waiting" in it.fix


def test_whether_the_broker_delays_is_known_without_asking_it():
    from celery_redlock.ops.doctor.diagnosis import is_delayed_in_broker

    for broker in ("redis://nowhere/0", "amqp://nowhere", "strange://nowhere"):
        app = Celery("shop", broker=broker, set_as_current=False)
        assert is_delayed_in_broker(app) is False
    app = Celery("shop", broker="amqp://nowhere", set_as_current=False)
    app.conf.task_default_queue_type = "quorum"
    assert is_delayed_in_broker(app) is (detect_quorum_queues is not None)


def test_pools_in_which_a_lost_lock_is_heard_of_late():
    """A note for those whose bodies are to be aborted."""
    assert told(facts(pool="threads", tasks=[task()])) == {("note", "late-interrupt")}
    assert told(facts(pool="threads", tasks=replaced(aborts_on_loss=False))) == set()
    assert told(facts(pool="prefork", tasks=[task()])) == set()


def test_without_hiredis_there_is_a_note():
    assert told(facts(has_hiredis=False)) == {("note", "no-hiredis")}


def test_what_could_not_be_read_is_a_finding():
    problems = {"observers": "no such observer", "task-declared": "no such option"}
    found = told(facts(problems=problems))
    assert found == {("error", "observers"), ("error", "task-declared")}


def test_the_worst_comes_first_and_every_finding_says_what_to_do():
    everything = [*NODES.values(), *TASKS.values()]
    assert everything
    found = findings(
        facts(
            node(leaked=1, leaked_names=["redlock:lock:a"], quarantine=3.0),
            tasks=[found for tasks, *_ in TASKS.values() for found in tasks],
            visibility_timeout=60.0,
            is_eager=True,
            has_hiredis=False,
        )
    )
    levels = [LEVELS.index(finding.level) for finding in found]
    assert levels == sorted(levels)
    assert len(set(levels)) == 3
    for finding in found:
        assert finding.what
        assert finding.fix
        assert finding.code.replace("-", "").isalpha()


def test_facts_of_tasks_are_those_of_celery():
    from celery_redlock.ops.doctor.diagnosis import task_facts

    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(redlock_nodes=URLS, task_time_limit=50)

    @app.task(base=RedlockTask, name="a", shared=False)
    def a():
        pass

    task = app.tasks["a"]
    task.soft_time_limit = 40
    assert task_facts(app, "a", task).time_limit == 40.0
    task.soft_time_limit = None
    assert task_facts(app, "a", task).time_limit == 50.0
    task.time_limit = app.conf.task_time_limit = None
    assert task_facts(app, "a", task).time_limit is None


def test_a_task_with_invalid_options_does_not_hide_the_others():
    """Celery stops at the first one; findings are about all, whatever else fails."""
    broken = type("Broken", (Task,), {"abstract": True, "on_bound": lambda *_: {}["no key"]})
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = URLS

    def body():
        """Do nothing."""

    app.task(body, base=RedlockTask, name="first", shared=False, lock_expiry=60)
    app.task(body, base=broken, name="second", shared=False)
    app.task(body, base=RedlockTask, name="third", shared=False)
    with pytest.raises(ConfigurationError, match="first: unknown option lock_expiry"):
        app.finalize()
    load_the_rest(app)
    assert "third" in app.tasks
