"""A lock node that Sentinels tell: real ones, a real master that dies, and who takes its place."""

from __future__ import annotations

import logging
import uuid

import pytest
import redis

from celery_redlock import LockTaken, QuorumUnavailable, Redlock
from celery_redlock.events import NodeQuarantined
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.health import check, probe
from celery_redlock.reading.nodes import bootstrap, node_statuses
from celery_redlock.testing.servers import servers
from support.certificates import Authority
from support.liar import LIES, in_time, lying
from support.sentinels import NEVER, SentinelServer, service
from support.stored import ROOMY
from support.tls import tls_node
from support.waiting import eventually

pytestmark = pytest.mark.long

#: Of a lease that outlives a failover, also one that Sentinels put off for 30 s, as they do after
#: a stall of more than two [s]; its end is waited for.
PATIENT = 60.0
RULES = Rules(**ROOMY)
SECRET = "s3cret-of-the-locks"
#: Lies about what no Sentinel is asked for.
HONEST = ("circles", "endless to listeners")


@pytest.fixture
def locks():
    opened = []

    def open_locks(nodes, rules=RULES, *observers):
        opened.append(Redlock(nodes, rules, observers))
        return opened[-1]

    yield open_locks
    for one in opened:
        one.close()


@pytest.fixture(scope="module")
def watched(some_binary):
    with service("lock-1", some_binary, down_after=NEVER) as it:
        yield it


@pytest.fixture
def lone(watched):
    with redis.Redis.from_url(watched.master().url) as client:
        client.flushall()
    bootstrap([watched.node()], RULES)
    return watched.node()


def test_locks_by_way_of_sentinels(watched, lone, locks):
    first, second = locks([lone]), locks([lone])
    assert first.labels == ("lock-1@sentinel/0",)
    lease = first.acquire("n")
    with pytest.raises(LockTaken):
        second.acquire("n")
    (status,) = node_statuses([lone], RULES)
    assert (status.node, status.state) == (watched.label, "up")
    with redis.Redis.from_url(watched.master().url) as client:
        assert client.get("redlock:lock:n")
    assert first.release(first.extend(lease)).name == "RELEASED"


def test_a_sentinel_that_is_down_is_passed_over(watched, lone, locks, monkeypatch):
    nobody = SentinelServer([]).url  # never started
    lone["sentinels"] = [nobody, nobody, *lone["sentinels"][:1]]
    pauses = []
    monkeypatch.setattr(redis.retry, "sleep", pauses.append)
    assert locks([lone]).acquire("n").fence
    assert not pauses


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"service": "lock-9"}, "No master found for 'lock-9'"),
        ({"sentinels": ["127.0.0.1:9", "127.0.0.1:10"]}, "127.0.0.1:9"),
        ({"sentinels": [f"redis://:{SECRET}@127.0.0.1:9"]}, "127.0.0.1:9"),
        ({"password": SECRET}, ""),
        ({"username": "shop", "password": SECRET}, ""),
        ({"db": 1000}, "DB index is out of range"),
    ],
)
def test_a_node_that_cannot_be_had_is_named_and_why(watched, lone, locks, change, said, caplog):
    caplog.set_level(logging.DEBUG)
    node = {**lone, **change}
    lock = locks([node])
    (problem,) = check(lock).values()
    with pytest.raises(QuorumUnavailable) as unavailable:
        lock.acquire("n")
    (status,) = node_statuses([node], RULES)
    assert said in problem
    assert status.state == "down"
    assert lock.labels[0] in str(unavailable.value)
    assert SECRET not in f"{problem} {unavailable.value!r} {status} {lock!r} {caplog.text}"


@pytest.mark.parametrize("lie", [lie for lie in LIES if lie not in HONEST])
def test_a_sentinel_that_lies_is_passed_over(watched, lone, locks, lie):
    first, *others = watched.sentinels
    with lying(first.port, LIES[lie]) as liar:
        url = f"{liar.url}?socket_timeout=1"  # as anywhere but in tests
        node = {**lone, "sentinels": [url, *(other.url for other in others)]}
        (status,) = in_time(lambda: node_statuses([node], RULES))
        assert status.state == "up", status
        lock = locks([node])
        lock.release(in_time(lambda: lock.acquire("n", wait=60)))
        (status,) = in_time(lambda: node_statuses([{**node, "sentinels": [url]}], RULES))
        assert status.state == "down", status


def test_sentinels_that_want_a_password(watched, some_binary, locks, caplog):
    """Theirs stands in their URLs, the master's among the options of the node."""
    caplog.set_level(logging.DEBUG)
    with servers(1, binary=some_binary, extra_args=("--requirepass", "")) as (master,):
        with redis.Redis.from_url(master.url) as client:
            client.execute_command("ACL", "SETUSER", "shop", "on", f">{SECRET}", "~*", "+@all")
            client.execute_command("ACL", "SETUSER", "default", "off")
        # The user by which the Sentinel asks needs its own rights; here those of the locks do.
        monitor = f"sentinel monitor lock-1 127.0.0.1 {master.port} 1"
        settings = [
            monitor,
            "sentinel auth-user lock-1 shop",
            f"sentinel auth-pass lock-1 {SECRET}",
        ]
        settings += [f"user asks on >{SECRET} +ping +info +sentinel|masters +auth +client"]
        sentinel = SentinelServer(settings, binary=some_binary)
        try:
            sentinel.start()
            with redis.Redis.from_url(sentinel.url) as client:
                client.execute_command("ACL", "SETUSER", "default", "resetpass", ">other")
            where = f"127.0.0.1:{sentinel.port}"
            master_options = {"service": "lock-1", "username": "shop", "password": SECRET}
            node = {"sentinels": [f"redis://asks:{SECRET}@{where}"], **master_options}
            bootstrap([node], RULES)
            assert locks([node]).acquire("n").fence
            wrong = locks([{**node, "sentinels": [f"redis://asks:wr0ng{SECRET}@{where}"]}])
            (problem,) = check(wrong).values()
            assert where in problem
            assert "username-password pair" in problem
            (problem,) = check(locks([{**node, "sentinels": [where]}])).values()
            assert "Authentication required" in problem
            assert SECRET not in f"{problem} {check(wrong)} {caplog.text}"
        finally:
            sentinel.stop()


def test_sentinels_and_master_behind_tls(redis_nodes, locks, tmp_path):
    authority = Authority(tmp_path)
    pair = authority.vouch("lock-node", "127.0.0.1")
    master = tls_node(redis_nodes, authority, pair)
    files = [f"tls-ca-cert-file {authority.file}", f"tls-cert-file {pair.certificate}"]
    files += [f"tls-key-file {pair.key}", "tls-auth-clients no", "tls-replication yes"]
    other = SentinelServer([]).port
    settings = [f"sentinel monitor lock-1 127.0.0.1 {master.port} 1", f"tls-port {other}", *files]
    sentinel = SentinelServer(settings, binary=master.server.binary)
    try:
        sentinel.start()
        ca = {"ssl_ca_certs": str(authority.file)}
        node = {
            "sentinels": [f"rediss://127.0.0.1:{other}?ssl_ca_certs={authority.file}"],
            "service": "lock-1",
            "ssl": True,
            **ca,
        }
        assert set(bootstrap([node], RULES).values()) == {"enrolled"}
        lock = locks([node])
        assert lock.acquire("n").fence
        with redis.Redis.from_url(master.server.url) as client:
            ours = [c for c in client.client_list() if c["name"] == "celery-redlock"]
        assert {c["laddr"].rpartition(":")[2] for c in ours} == {str(master.port)}
        stranger = Authority(tmp_path, "other")
        for change in (
            {"sentinels": [f"rediss://127.0.0.1:{other}?ssl_ca_certs={stranger.file}"]},
            {"ssl_ca_certs": str(stranger.file)},
        ):
            (problem,) = check(locks([{**node, **change}])).values()
            assert "certificate verify failed" in problem.lower()
    finally:
        sentinel.stop()


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_failover_counts_as_a_loss_of_memory(some_binary, redis_nodes, locks, is_guarded):
    """
    Who takes the master's place does not vote until no lock can be held that it may lack.

    A lock that stands on two of three nodes, one of which is replaced by a replica that lacks it,
    is not given to a second holder; without the restart guard it is.
    """
    rules = Rules(ttl=PATIENT, max_ttl=PATIENT, node_timeout=2.5, restart_guard=is_guarded)
    plain = redis_nodes(2)
    heard = []
    with service("lock-1", some_binary) as watched:
        nodes = [watched.node(), *(node.url for node in plain)]
        bootstrap(nodes, rules)
        mine, theirs = locks(nodes, rules), locks(nodes, rules, heard.append)
        assert check(theirs) == check(mine) == {}
        plain[1].kill()
        with mine.hold("n", ttl=PATIENT) as held:
            master = watched.fail_over()
            with redis.Redis.from_url(master.url) as client:
                client.delete("redlock:lock:n")  # as if the replica had not got it in time
            eventually(lambda: probe(theirs) and not check(theirs).get(watched.label), "way")
            if is_guarded:
                with pytest.raises((LockTaken, QuorumUnavailable)) as refusal:
                    theirs.acquire("n")
                assert "quarantined" in refusal.value.votes[watched.label]
                assert not held.is_lost
                assert NodeQuarantined in {type(event) for event in heard}
        lease = eventually(lambda: granted(theirs, "n"), "a vote after quarantine", timeout=120.0)
        assert lease.fence > held.fence


def granted(lock, name):
    try:
        return lock.acquire(name)
    except (LockTaken, QuorumUnavailable):
        return None


def test_a_master_that_has_lost_its_replicas_does_not_vote(watched, lone, locks):
    """
    With ``min-replicas-to-write 1``, as the how-to wants it.

    So one that was cut off from the Sentinels, and replaced, does not go on voting for those who
    are still connected to it.
    """
    replica = next(server for server in watched.servers if server is not watched.master())
    lock = locks([lone])
    with redis.Redis.from_url(watched.master().url) as client:
        client.config_set("min-replicas-max-lag", 1)
        client.config_set("min-replicas-to-write", 1)
        try:
            lock.release(lock.acquire("n", wait=60))  # once the replica has caught up
            replica.pause()
            problem = eventually(lambda: refused(lock), "refusal")
            assert "NOREPLICAS" in problem
        finally:
            replica.resume()
            client.config_set("min-replicas-to-write", 0)


def refused(lock):
    try:  # another each time: if its release is what is refused first, it stays taken for long
        lock.release(lock.acquire(f"n{uuid.uuid4()}"))
    except QuorumUnavailable as problem:
        return str(problem)
    return ""
