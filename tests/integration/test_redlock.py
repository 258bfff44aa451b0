"""
The lock as DESIGN section 4 has it, on real servers: one, three and five of them.

What a caller of `Redlock` sees, whoever awaits `AsyncRedlock` sees, too: these tests run over both.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from dataclasses import replace

import pytest
import redis

from celery_redlock.errors import (
    ConfigurationError,
    LockKeyError,
    LockLost,
    LockTaken,
    QuorumUnavailable,
)
from celery_redlock.events import (
    LeaseLost,
    LockAcquired,
    LockConflict,
    LockEvent,
    LockReleased,
    LockRenewed,
    LockUnavailable,
    NodeQuarantined,
)
from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.participant import new_owner
from celery_redlock.lock.algorithm.request import LockRequest, MarkerStands
from celery_redlock.lock.algorithm.results import ReleaseOutcome
from celery_redlock.lock.nodes import connector, guard
from celery_redlock.lock.nodes.node import Node
from celery_redlock.lock.records import Keys
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import Marker
from celery_redlock.reading import nodes as reading
from celery_redlock.reading.all_locks import AllLocks
from celery_redlock.reading.health import check
from celery_redlock.testing.servers import servers as start_servers
from celery_redlock.words import is_forgotten
from support.clients import hang_up
from support.in_loop import in_loop
from support.stored import (
    RENEWED,
    ROOMY,
    clients_of,
    holders,
    urls_of,
    value_of,
    wait_until_free,
    wait_until_taken,
)
from support.waiting import eventually

#: Of leases and quarantines whose end is waited for: one lasts 3 s, the other 4.15 s.
BRIEF = {"ttl": 3.0, "max_ttl": 3.0, "node_timeout": 1.0}


@pytest.fixture(params=["sync", "async"])
def locks(request, sync_locks):
    if request.param == "sync":
        yield sync_locks
        return
    with contextlib.ExitStack() as stack:
        yield lambda *servers, **settings: stack.enter_context(
            in_loop(sync_locks(*servers, **settings))
        )


each_size = pytest.mark.parametrize("size", [1, 3, 5])


# -- acquire, extend, release --------------------------------------------------------------


@each_size
def test_a_lock_is_anothers_until_it_is_released(five_nodes, locks, size):
    ours, theirs = locks(five_nodes[:size]), locks(five_nodes[:size], bootstrap=False)
    lease = ours.acquire("report")
    with pytest.raises(LockTaken) as taken:
        theirs.acquire("report")
    assert taken.value.holder["token"] == lease.token[:8]
    assert 0 < taken.value.holder["ttl"] <= 60
    assert set(taken.value.votes) == set(ours.labels)
    assert ours.release(lease) is ReleaseOutcome.RELEASED
    assert theirs.acquire("report").fence > lease.fence


@each_size
def test_a_lease_is_valid_for_a_little_less_than_its_ttl(five_nodes, locks, size):
    lock = locks(five_nodes[:size])
    before = clock.now()
    lease = lock.acquire("report", ttl=40.0)
    after = clock.now()
    assert before <= lease.valid_until - (40.0 * 0.95 - 0.002) <= after
    assert 0 < lease.remaining() <= 38.0
    assert (lease.name, lease.ttl, len(lease.token)) == ("report", 40.0, 40)


@each_size
def test_extending_gives_a_later_lease_with_the_same_token(five_nodes, locks, size):
    lock = locks(five_nodes[:size])
    first = lock.acquire("report", ttl=40.0)
    second = lock.extend(first)
    assert (second.token, second.fence, second.since) == (first.token, first.fence, first.since)
    assert second.valid_until > first.valid_until
    assert first.ttl == 40.0


def test_a_lease_that_has_ended_cannot_be_extended(five_nodes, locks):
    lock = locks(five_nodes[:3], **BRIEF)
    lease = lock.acquire("report", wait=60)
    eventually(lambda: not lease.remaining(), "end of the lease")
    with pytest.raises(LockLost) as lost:
        lock.extend(lease)
    assert lost.value.reason == "deadline"


def test_a_stolen_lease_cannot_be_extended(five_nodes, locks):
    lock = locks(five_nodes[:3])
    lease = lock.acquire("report")
    for client in clients_of(five_nodes[:2]):
        client.set(Keys.of("redlock", "report").lock, b"x" * 40, px=600_000)
    with pytest.raises(LockLost) as lost:
        lock.extend(lease)
    assert lost.value.reason == "stolen"


def test_extending_without_a_quorum_leaves_the_lease_as_it_was(redis_nodes, locks):
    servers = redis_nodes(3)
    lock = locks(servers)
    lease = lock.acquire("report")
    for server in servers[:2]:
        server.kill()
    with pytest.raises(QuorumUnavailable):
        lock.extend(lease)
    assert lease.remaining() > 0


@each_size
def test_a_release_frees_all_nodes_and_says_so(five_nodes, locks, size):
    lock = locks(five_nodes[:size])
    lease = lock.acquire("report")
    wait_until_taken(five_nodes[:size], "report")
    assert lock.release(lease) is ReleaseOutcome.RELEASED
    wait_until_free(five_nodes[:size], "report")


@each_size
def test_a_release_of_an_ended_lease_says_so(five_nodes, locks, size):
    lock = locks(five_nodes[:size])
    lease = lock.acquire("report")
    lock.release(lease)
    assert lock.release(lease) is ReleaseOutcome.EXPIRED
    other = lock.acquire("report")
    assert lock.release(lease) is ReleaseOutcome.EXPIRED
    assert lock.release(other) is ReleaseOutcome.RELEASED


@each_size
def test_a_release_that_is_not_waited_for_arrives(five_nodes, locks, size):
    lock = locks(five_nodes[:size])
    lease = lock.acquire("report")
    assert lock.release(lease, wait=False) is ReleaseOutcome.UNKNOWN
    wait_until_free(five_nodes[:size], "report")


def test_a_release_without_a_quorum_is_unknown(redis_nodes, locks):
    servers = redis_nodes(3)
    lock = locks(servers)
    lease = lock.acquire("report")
    for server in servers[:2]:
        server.kill()
    assert lock.release(lease) is ReleaseOutcome.UNKNOWN
    assert lock.release(lease, wait=False) is ReleaseOutcome.UNKNOWN


def test_a_lease_can_be_released_by_another_process(five_nodes, locks):
    """The token is all it takes."""
    lease = locks(five_nodes[:3]).acquire("report")
    other = locks(five_nodes[:3], bootstrap=False)
    assert other.release(lease) is ReleaseOutcome.RELEASED


def test_a_lock_can_be_released_for_its_owner(five_nodes, locks):
    """A worker's parent knows no token, but what they begin with: nobody else's lock is hit."""
    child, seen = locks(five_nodes[:3]), []
    parent = locks(five_nodes[:3], bootstrap=False, observers=[seen.append])
    owner, other = new_owner(), new_owner()
    first = child.take(LockRequest("report", 60.0, owner=owner))
    assert first.token.startswith(owner)
    assert len(first.token) == 40
    assert parent.release_for("report", other, since=first.since) is ReleaseOutcome.EXPIRED
    assert not first.is_lost
    assert parent.release_for("report", owner, since=first.since) is ReleaseOutcome.RELEASED
    assert [e.name for e in seen if isinstance(e, LockReleased)] == ["report"]
    again = child.take(LockRequest("report", 60.0, owner=owner))
    assert again.token != first.token
    outcome = parent.release_for("report", owner, since=again.since, keep=60.0)
    assert outcome is ReleaseOutcome.RELEASED
    with pytest.raises(LockTaken):
        parent.acquire("report")


def test_a_marker_can_be_waited_for_by_who_never_connected(five_nodes, locks):
    locks(five_nodes[:3]).acquire("report")
    locks(five_nodes[:3], bootstrap=False).mark(Marker("run:1", "done", 60.0), wait=True)
    with pytest.raises(MarkerStands):
        locks(five_nodes[:3], bootstrap=False).take(LockRequest("it", 60.0, marker="run:1"))


@pytest.mark.parametrize("size", [3, 5])
def test_what_has_finished_does_not_run_while_any_minority_is_down(redis_nodes, locks, size):
    """Right after the release, and although the nodes that are down come back without it."""
    servers = redis_nodes(size)
    rules = {"restart_guard": False}
    down = servers[: size // 2]
    for server in down:
        server.kill()
    ours = locks(servers, bootstrap=False, **rules)
    held = ours.take(LockRequest("it", 60.0, marker="run:1"))
    ours.give_back(held, marker=Marker("run:1", "done", 60.0))
    for brought_back in (False, True):
        if brought_back:
            ours.close()
            for server in down:
                server.restart()
        with pytest.raises(MarkerStands) as stands:
            locks(servers, bootstrap=False, **rules).take(
                LockRequest("it", 60.0, 60.0, marker="run:1")
            )
        assert stands.value.state == "done"


@each_size
def test_waiting_ends_when_the_lock_is_free(five_nodes, locks, size):
    ours, theirs = locks(five_nodes[:size]), locks(five_nodes[:size], bootstrap=False)
    lease = ours.acquire("report")
    with pytest.raises(LockTaken):
        theirs.acquire("report")
    threading.Timer(0.3, ours.release, [lease]).start()
    theirs.acquire("report", wait=600)


def test_waiting_ends_when_patience_does(five_nodes, locks):
    ours, theirs = locks(five_nodes[:3]), locks(five_nodes[:3], bootstrap=False)
    ours.acquire("report")
    began = time.monotonic()
    with pytest.raises(LockTaken):
        theirs.acquire("report", wait=0.4)
    assert time.monotonic() - began >= 0.4


def test_a_lock_ends_by_itself(five_nodes, locks):
    ours = locks(five_nodes[:3], **BRIEF)
    theirs = locks(five_nodes[:3], bootstrap=False, **BRIEF)
    lease = ours.acquire("report", wait=60)
    theirs.acquire("report", wait=60)
    assert not lease.remaining()


def test_no_fence_is_given_when_none_is_wanted(five_nodes, locks):
    lock = locks(five_nodes[:3], fence=False)
    lease = lock.acquire("report")
    assert lease.fence is None
    assert lock.extend(lease).fence is None


def test_fences_of_a_name_grow_across_clients(five_nodes, locks):
    clients = [locks(five_nodes[:3], bootstrap=not number) for number in range(3)]
    fences = []
    for number in range(30):
        client = clients[number % 3]
        lease = client.acquire("report", wait=60)
        fences.append(lease.fence)
        client.release(lease)
    assert fences == sorted(set(fences))


def test_locks_of_different_names_or_prefixes_do_not_meet(five_nodes, locks):
    lock = locks(five_nodes[:3])
    other = locks(five_nodes[:3], prefix="shop2")
    lock.acquire("a")
    lock.acquire("b")
    other.acquire("a")


def test_a_very_long_name_is_a_lock_like_any_other(five_nodes, locks):
    lock = locks(five_nodes[:3])
    name = "é" * 1000
    lease = lock.acquire(name)
    lock.acquire(name + "x")
    with pytest.raises(LockTaken):
        lock.acquire(name)
    assert lock.release(lease) is ReleaseOutcome.RELEASED


# -- hold ------------------------------------------------------------------------------------


@each_size
def test_holding_renews_and_releases(five_nodes, locks, size):
    told = []
    lock = locks(five_nodes[:size], observers=[told.append], ttl=RENEWED)
    # It hears of every refusal, also after a stall.
    rival = locks(five_nodes[:size], bootstrap=False, node_timeout=20.0)
    with lock.hold("report", wait=60) as held:  # a machine that stalls grants it too late
        while held.renewals < 4:  # longer than the TTL
            held.ensure_held()
            with pytest.raises(LockTaken):
                rival.acquire("report")
        assert lock.held == [held]
    assert lock.held == []
    rival.acquire("report", wait=60)
    with pytest.raises(LockLost, match="released"):
        held.ensure_held()
    assert [type(event) for event in told if isinstance(event, LockEvent)] == [
        LockAcquired,
        *[LockRenewed] * held.renewals,
        LockReleased,
    ]


def test_the_end_of_a_body_that_lost_its_lock_raises(five_nodes, locks):
    told = []
    lock = locks(five_nodes[:3], observers=[told.append], ttl=RENEWED)
    with pytest.raises(LockLost) as lost, lock.hold("report") as held:
        for client in clients_of(five_nodes[:3]):
            client.set(Keys.of("redlock", "report").lock, b"x" * 40, px=600_000)
        eventually(lambda: held.is_lost, "loss")
    assert lost.value.reason == "stolen"
    assert list(lost.value.votes) == list(lock.labels)
    assert sum(vote.startswith("refused (") for vote in lost.value.votes.values()) >= 2
    assert [e.reason for e in told if isinstance(e, LeaseLost)] == ["stolen"]
    assert value_of(five_nodes[0], "report") == b"x" * 40


def test_an_error_of_the_body_is_not_masked_by_the_loss(five_nodes, locks):
    lock = locks(five_nodes[:3])

    def work():
        with lock.hold("report") as held:
            held.lose("stolen")
            raise ValueError("the body's own")

    with pytest.raises(ValueError, match="the body's own"):
        work()


def test_an_error_of_the_body_releases(five_nodes, locks):
    lock = locks(five_nodes[:3])
    for error in (ValueError, KeyboardInterrupt, SystemExit, GeneratorExit):
        with pytest.raises(error), lock.hold("report"):
            raise error
        assert lock.held == []
    with lock.hold("report", wait=60):
        pass


def test_holding_what_is_taken_never_enters_the_body(five_nodes, locks):
    told = []
    lock = locks(five_nodes[:3], observers=[told.append])
    lease = lock.acquire("report")
    with pytest.raises(LockTaken), lock.hold("report"):
        pytest.fail("the body ran")
    assert value_of(five_nodes[0], "report").startswith(lease.token.encode())
    (conflict,) = [event for event in told if isinstance(event, LockConflict)]
    assert conflict.holder["token"] == lease.token[:8]


def test_the_holder_is_told_of_a_loss_once(five_nodes, locks):
    lock = locks(five_nodes[:3])
    told = []

    def on_lost(held):
        told.append((held.name, threading.current_thread().name))
        raise RuntimeError("a bad callback")

    lost = lock.take(LockRequest("report", RENEWED), on_lost)
    kept = lock.take(LockRequest("other", RENEWED))
    for client in clients_of(five_nodes[:3]):
        client.set(Keys.of("redlock", "report").lock, b"x" * 40, px=600_000)
    eventually(lambda: told, "call back")
    eventually(lambda: kept.renewals >= 2, "renewals of the other lock")
    lock.give_back(kept)
    lock.give_back(lost)
    assert told == [("report", "redlock-watchdog")]


# -- inspect, check ----------------------------------------------------------------------------


@each_size
def test_inspecting_shows_every_nodes_view(five_nodes, locks, size):
    lock = locks(five_nodes[:size])
    lease = lock.acquire("report")
    wait_until_taken(five_nodes[:size], "report")
    views = lock.inspect("report")
    assert [view.node for view in views] == list(lock.labels)
    for view in views:
        assert view.holder["token"] == lease.token[:8]
        assert {"host", "pid", "since"} <= set(view.holder)
        assert 0 < view.ttl <= 60
        assert view.fence == lease.fence
        assert not view.problem
        assert lease.token not in json.dumps(view.holder)
    assert [view.holder for view in lock.inspect("nobody's")] == [{}] * size


def test_inspecting_names_the_node_that_does_not_tell(redis_nodes, locks):
    servers = redis_nodes(3)
    lock = locks(servers)
    lock.acquire("report")
    servers[1].kill()
    problems = [view.problem for view in lock.inspect("report")]
    assert [bool(problem) for problem in problems] == [False, True, False]


def test_checking_tells_who_does_not_answer(redis_nodes, locks):
    servers = redis_nodes(5)
    lock = locks(servers)
    assert check(lock) == {}
    servers[1].kill()
    servers[2].pause()
    lock.inspect("report")
    try:
        problems = check(lock)
    finally:
        servers[2].resume()
    assert set(problems) == {lock.labels[1], lock.labels[2]}
    assert all(problems.values())
    eventually(
        lambda: (lock.inspect("report"), check(lock).keys())[1] == {lock.labels[1]}, "return"
    )


def test_checking_first_waits_for_a_slow_node(five_nodes, proxied_nodes, locks):
    links = proxied_nodes(five_nodes[:3])
    reading.bootstrap(urls_of(links), Rules(**ROOMY))
    links[2].delay(0.1)
    assert check(locks(links, bootstrap=False, node_timeout=0.05)) == {}
    with redis.Redis.from_url(five_nodes[2].url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(ConfigurationError, match="allkeys-lru"):
                check(locks(links, bootstrap=False, node_timeout=0.05))
        finally:
            client.config_set("maxmemory-policy", "noeviction")


def test_two_urls_of_one_server_are_found_out(redis_nodes, proxied_nodes, locks):
    servers = redis_nodes(2)  # that nobody else has ever enrolled
    (link,) = proxied_nodes(servers[:1])
    lock = locks([*servers, link], bootstrap=False)
    with pytest.raises(ConfigurationError, match="same server") as error:
        check(lock)
    assert lock.labels[0] in str(error.value)
    assert lock.labels[2] in str(error.value)


def test_a_node_of_clients_with_other_settings_is_found_out(five_nodes, locks):
    locks(five_nodes[:3])
    with pytest.raises(ConfigurationError, match="redlock_max_ttl"):
        check(locks(five_nodes[:3], bootstrap=False, max_ttl=90.0))
    with pytest.raises(ConfigurationError, match="other lock nodes"):
        check(locks(five_nodes[:1], bootstrap=False))
    with pytest.raises(QuorumUnavailable, match="redlock_max_ttl"):
        locks(five_nodes[:3], bootstrap=False, max_ttl=90.0).acquire("report")


@pytest.mark.parametrize(
    ("old", "new"), [((0, 1, 2), range(7)), ((0, 1, 2), (0, 3, 4))], ids=["grown", "replaced"]
)
def test_nodes_beside_those_of_another_list_are_not_enrolled(redis_nodes, locks, old, new):
    """Or both lists would have a majority: who has changed the list waits for all others."""
    servers = redis_nodes(max(new) + 1)
    ours = locks([servers[position] for position in old], **BRIEF)
    theirs = locks([servers[position] for position in new], bootstrap=False, **BRIEF)
    ours.take(LockRequest("report", 3.0, wait=60.0))
    with pytest.raises(ConfigurationError, match="other lock nodes"):
        check(theirs)
    with pytest.raises(QuorumUnavailable, match="is not enrolled") as refusal:
        theirs.acquire("report", wait=theirs.rules.quarantine + 1.0)
    assert refusal.value.retry_after is None
    states = {status.state for status in reading.node_statuses(theirs.nodes, theirs.rules)}
    assert states == {"unfit", "unmarked"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tll": 3}, "unknown setting 'tll'"),
        ({"ttl": 0}, "redlock_ttl must be > 0, got 0"),
        ({"ttl": "30"}, "redlock_ttl must be a number"),
        ({"ttl": 90}, "redlock_max_ttl"),
        ({"ttl": 0.5, "node_timeout": 0.3}, "twice redlock_node_timeout"),
        ({"drift_factor": 0.5}, "redlock_drift_factor"),
        ({"restart_guard": "yes"}, "redlock_restart_guard must be True or False"),
        ({"prefix": ""}, "redlock_prefix"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_is_connected(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        Redlock.from_urls(["redis://127.0.0.1:1/0"], **settings)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([], "must be a list"),
        ("redis://a", "must be a list"),
        (["redis://a", "redis://b"], "odd number"),
        (["redis://a", "redis://b", "redis://a:6379/0"], "more than once"),
        (["http://a"], "not a URL"),
        ([7], "URL or a Sentinel service"),
        ([{"service": "x"}], "Sentinel node is"),
    ],
)
def test_wrong_nodes_are_refused_before_anything_is_connected(nodes, words):
    with pytest.raises(ConfigurationError, match=words):
        Redlock.from_urls(nodes)


@pytest.mark.parametrize("ttl", [0, -1, 61, "5", True, 4.9])
def test_a_ttl_that_no_lease_may_have_is_refused(five_nodes, locks, ttl):
    lock = locks(five_nodes[:1])
    with pytest.raises(ConfigurationError, match="ttl must be"):
        lock.acquire("report", ttl=ttl)


def test_the_password_of_a_node_is_shown_nowhere():
    lock = Redlock.from_urls(["redis://joe:s3cret@127.0.0.1:1/0"])
    with pytest.raises(QuorumUnavailable) as refusal:
        lock.acquire("report")
    assert "s3cret" not in repr(lock) + str(refusal.value) + str(check(lock))
    lock.close()


# -- the restart guard ----------------------------------------------------------------------


def test_a_node_that_nobody_vouches_for_is_quarantined(five_nodes, locks):
    told = []
    lock = locks(five_nodes[:3], bootstrap=False, observers=[told.append], **BRIEF)
    began = time.monotonic()
    with pytest.raises(QuorumUnavailable) as refusal:
        lock.acquire("report")
    assert "quarantined" in str(refusal.value)
    assert 0 < refusal.value.retry_after <= lock.rules.quarantine
    lock.acquire("report", wait=60)
    assert time.monotonic() - began > refusal.value.retry_after - 0.1
    assert {e.node for e in told if isinstance(e, NodeQuarantined)} == set(lock.labels)
    assert [e for e in told if isinstance(e, LockUnavailable)]


@pytest.fixture(scope="module")
def aging_servers(some_binary):
    """Servers that nobody touches until they look too old to have forgotten a lease."""
    with start_servers(14, binary=some_binary) as farm:
        for server in farm:
            with redis.Redis.from_url(server.url) as client:
                eventually(
                    lambda client=client: client.info("server")["uptime_in_seconds"] >= 6, "uptime"
                )
        yield iter(farm)


def test_a_single_server_is_trusted_at_once(aging_servers, sync_locks):
    """Up for longer than a quarantine, never flushed: the first task runs on the Redis one has."""
    told = []
    lock = sync_locks([next(aging_servers)], bootstrap=False, observers=[told.append], **BRIEF)
    lock.acquire("report")
    assert not [event for event in told if isinstance(event, NodeQuarantined)]


@pytest.mark.parametrize("flaw", ["young", "flushed", "promoted"])
def test_a_single_server_that_may_have_forgotten_is_not_trusted(aging_servers, sync_locks, flaw):
    server, told = next(aging_servers), []
    if flaw == "young":
        server.restart()
    elif flaw == "promoted":
        with redis.Redis.from_url(server.url) as client:
            client.replicaof("127.0.0.1", next(aging_servers).port)
            link = lambda: client.info("replication")["master_link_status"] == "up"  # noqa: E731
            eventually(link, "a replica that has it all")
            client.replicaof("no", "one")
    else:
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
    lock = sync_locks([server], bootstrap=False, observers=[told.append], **BRIEF)
    with pytest.raises(QuorumUnavailable):
        lock.acquire("report")
    assert [event.node for event in told if isinstance(event, NodeQuarantined)] == [lock.labels[0]]


LOSSES = {
    "swapped": ["SWAPDB 0 1"],
    "flushed, and not counted": ["FLUSHALL", "CONFIG RESETSTAT"],
}


@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_is_no_flush_is_none_to_trust(
    aging_servers, sync_locks, monkeypatch, loss, is_guarded
):
    """Somebody holds the lock; who comes next finds no key at all."""
    if not is_guarded:
        monkeypatch.setattr(guard, "FORGETS", (b"flushall:", b"flushdb:"))
    # Old enough for a lease that outlasts this test; that age is what counts is tested above.
    greet = connector.greet
    monkeypatch.setattr(connector, "greet", lambda *it: replace(greet(*it), uptime=600.0))
    server = next(aging_servers)
    lease = sync_locks([server], bootstrap=False).acquire("report")
    with redis.Redis.from_url(server.url) as client:
        for command in LOSSES[loss]:
            client.execute_command(*command.split())
        if "cmdstat_config" in client.info("commandstats"):
            pytest.skip("Redis before 7.0 does not say which CONFIG it ran")
    second = None
    with contextlib.suppress(QuorumUnavailable):
        second = sync_locks([server], bootstrap=False).acquire("report")
    assert clock.now() < lease.valid_until, "too slow to tell"
    assert (second is None) == is_guarded


def test_a_single_server_is_quarantined_from_its_start_on(aging_servers, sync_locks):
    """It has been up for six seconds or more when it is first seen."""
    lock = sync_locks([next(aging_servers)], bootstrap=False, max_ttl=600.0)
    with pytest.raises(QuorumUnavailable) as refusal:
        lock.acquire("report")
    assert 0 < refusal.value.retry_after <= lock.rules.quarantine - 5.0


def test_trust_in_a_single_server_does_not_outlive_a_restart(aging_servers, sync_locks):
    server, told = next(aging_servers), []
    lock = sync_locks([server], bootstrap=False, observers=[told.append], **BRIEF)
    lock.acquire("report")
    server.restart()

    def quarantined():
        lock.inspect("report")
        return [event for event in told if isinstance(event, NodeQuarantined)]

    (event,) = eventually(quarantined, "quarantine")
    assert event.node == lock.labels[0]


def test_several_nodes_are_not_trusted_for_their_age(aging_servers, sync_locks):
    """Uptime is wall clock: nodes that boot with a late one, and are set right, look old."""
    told = []
    servers = [next(aging_servers) for _ in range(3)]
    lock = sync_locks(servers, bootstrap=False, observers=[told.append], **BRIEF)
    with pytest.raises(QuorumUnavailable, match="quarantined") as refusal:
        lock.acquire("report")
    assert 0 < refusal.value.retry_after <= lock.rules.quarantine
    assert {e.node for e in told if isinstance(e, NodeQuarantined)} == set(lock.labels)


def test_restarted_nodes_do_not_vote_until_no_old_lease_can_be_alive(redis_nodes, locks):
    servers = redis_nodes(3)
    ours = locks(servers, **BRIEF)
    theirs = locks(servers, bootstrap=False, **BRIEF)
    lease = ours.acquire("report", wait=60)
    for server in servers[:2]:
        server.restart()
    with pytest.raises(QuorumUnavailable):
        theirs.acquire("report")
    theirs.acquire("report", wait=60)
    assert clock.now() >= lease.valid_until


def test_flushed_nodes_do_not_vote_until_no_old_lease_can_be_alive(five_nodes, locks):
    ours, theirs = locks(five_nodes[:3]), locks(five_nodes[:3], bootstrap=False)
    lease = ours.acquire("report")
    with contextlib.suppress(LockTaken):
        theirs.acquire("report")  # connects
    for client in clients_of(five_nodes[:3]):
        client.flushall()
    with pytest.raises(QuorumUnavailable) as refusal:
        theirs.acquire("report")
    assert 0 < refusal.value.retry_after <= theirs.rules.quarantine
    assert ours.release(lease) is ReleaseOutcome.EXPIRED


def test_a_lock_that_its_node_forgot_is_lost_for_that_reason(five_nodes, locks):
    """It is not called slow: observers, and so doctor and journal, hear what the node said."""
    told = []
    lock = locks(five_nodes[:1], observers=[told.append], **BRIEF)
    held = lock.take(LockRequest("report", 3.0))
    with redis.Redis.from_url(five_nodes[0].url) as client:
        client.flushall()
    (event,) = eventually(lambda: [e for e in told if isinstance(e, LeaseLost)], "the loss")
    assert event.reason == "deadline"
    assert is_forgotten(event.votes)
    with pytest.raises(LockLost, match=r"lost \(deadline\): the node forgot it"):
        held.ensure_held()


def test_a_minority_in_quarantine_costs_nothing(redis_nodes, locks):
    servers = redis_nodes(3)
    lock = locks(servers)
    lock.acquire("first")
    servers[0].restart()
    lock.acquire("second")
    told = lock.inspect("second")
    assert sum(1 for view in told if view.holder) == 2


def test_an_operator_can_vouch_for_all_nodes(five_nodes, locks):
    lock = locks(five_nodes[:3], bootstrap=False)
    with pytest.raises(QuorumUnavailable):
        lock.acquire("report")
    assert reading.bootstrap(lock.nodes, lock.rules) == dict.fromkeys(lock.labels, "enrolled")
    lock.acquire("report")


# -- how nodes are ---------------------------------------------------------------------------


def test_asking_how_nodes_are_changes_nothing(redis_nodes, locks):
    servers = redis_nodes(3)
    rules = Rules(**ROOMY)
    assert [s.state for s in reading.node_statuses(urls_of(servers), rules)] == ["unmarked"] * 3
    lock = locks(servers)
    lock.acquire("report")
    servers[1].restart()
    servers[2].kill()

    def seen():
        lock.inspect("report")
        states = reading.node_statuses(urls_of(servers), rules)
        return [s.state for s in states] == ["up", "quarantined", "down"] and states

    states = eventually(seen, "quarantine")  # by the client, as soon as it has connected again
    assert states[1].quarantine > 0
    assert states[2].problem


def test_all_locks_are_listed(five_nodes, locks):
    lock = locks(five_nodes[:3])
    leases = [lock.acquire(f"report:{number}") for number in range(120)]
    wait_until_taken(five_nodes[:3], "report:119")
    views = list(AllLocks(lock.nodes, lock.rules))
    assert sorted(view.name for view in views) == sorted(lease.name for lease in leases)
    assert {tuple(view.votes) for view in views} == {lock.labels}
    assert {view.holder["token"] for view in views} == {lease.token[:8] for lease in leases}


# -- closing ----------------------------------------------------------------------------------


def test_a_closed_lock_connects_again_when_it_is_used(five_nodes, locks):
    lock = locks(five_nodes[:3])
    lease = lock.acquire("report")
    lock.close()
    with pytest.raises(LockTaken):
        lock.acquire("report")
    assert lock.release(lease) is ReleaseOutcome.RELEASED


@pytest.mark.parametrize("keeps_notes", [True, False])
def test_closing_while_others_ask_harms_none_of_them(five_nodes, locks, monkeypatch, keeps_notes):
    """What they release is free on all nodes, also those they were not connected to again."""
    if not keeps_notes:
        monkeypatch.setattr(Node, "keep_notes_of", lambda *_: None)
    lock = locks(five_nodes[:3])
    stop, names = threading.Event(), itertools.count()
    failures, rounds = [], []

    def work():
        while not stop.is_set():
            try:
                lease = lock.acquire(f"closed:{next(names)}")
                lock.release(lease)
                rounds.append(lease)
            except QuorumUnavailable:
                continue
            except BaseException as error:  # noqa: BLE001  the test's subject
                failures.append(error)
                return

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(25):
        before = len(rounds)
        lock.close()
        eventually(lambda before=before: len(rounds) > before or failures, "another round")
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    # One note for certain, which no connection can take before the next close.
    lease = lock.acquire("closed:last", wait=60)
    with monkeypatch.context() as apart:
        apart.setattr(connector.Connector, "reconnect", lambda *_: None)
        lock.close()
        lock.let_go(lease)
        lock.close()
    lock.fanout.settle_all(60)  # nodes are told once they are connected

    def is_any_left():
        return any(client.keys("*:lock:closed:*") for client in clients_of(five_nodes[:3]))

    # Within half a lease: a key that lapses is not one that was released.
    eventually(
        lambda: is_any_left() is not keeps_notes,
        "no lock is left, but where notes are dropped",
        timeout=30.0,
    )


@pytest.mark.parametrize("fence", [True, False])
def test_a_lease_that_was_given_back_cannot_be_extended(five_nodes, locks, fence):
    lock = locks(five_nodes, fence=fence)
    lease = lock.acquire("report")
    assert lock.release(lease) is ReleaseOutcome.RELEASED
    with pytest.raises(LockLost) as lost:
        lock.extend(lease)
    assert lost.value.reason == "stolen"
    assert set(lost.value.votes) == set(lock.labels)
    eventually(lambda: not any(view.holder for view in lock.inspect("report")), "no key")


def test_a_lease_that_has_ended_is_not_even_asked_for(five_nodes, locks, monkeypatch):
    """Asking would set the keys again, in the way of whoever is next."""
    lock = locks(five_nodes, drift_factor=0.4)
    lease = lock.acquire("report", ttl=RENEWED)
    asked = []
    for way in ("ask", "begin"):
        monkeypatch.setattr(lock.fanout, way, asked.append)
    eventually(lambda: clock.now() >= lease.valid_until, "deadline")
    with pytest.raises(LockLost) as lost:
        lock.extend(lease)
    assert lost.value.reason == "deadline"
    assert not asked


def test_a_lease_that_another_passed_by_is_lost(five_nodes, locks):
    """Once a larger fence was given out, ours is not set again where its key is missing."""
    lock, other = locks(five_nodes), locks(five_nodes, bootstrap=False)
    lease = lock.acquire("report")
    wait_until_taken(five_nodes, "report")
    for client in clients_of(five_nodes):
        client.delete(Keys.of("redlock", "report").lock)
    passing = other.acquire("report")
    other.release(passing)
    assert passing.fence > lease.fence
    with pytest.raises(LockLost):
        lock.extend(lease)


@pytest.mark.parametrize("name", ["", 5, b"x", None])
def test_a_lock_needs_a_name(five_nodes, locks, name):
    lock = locks(five_nodes)
    with pytest.raises(LockKeyError, match="lock name"):
        lock.acquire(name)


def test_a_short_max_ttl_shortens_a_ttl_that_nobody_set():
    """Only an explicit ttl has to fit."""
    assert Redlock.from_urls(["redis://127.0.0.1:1"], max_ttl=5).rules.ttl == 5
    with pytest.raises(ConfigurationError, match="redlock_ttl"):
        Redlock.from_urls(["redis://127.0.0.1:1"], max_ttl=5, ttl=6)


@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_lock_that_a_test_leaves_behind_is_not_renewed_in_the_next(five_nodes, locks, hangs_up):
    """The tests' own clean-up; twin: without it the lock is back on servers that were emptied."""
    lock = locks(five_nodes[:3])
    lock.take(LockRequest("left", RENEWED))
    if hangs_up:
        hang_up()
    for client in clients_of(five_nodes[:3]):
        client.flushall()
    assert set(reading.bootstrap(urls_of(five_nodes[:3]), lock.rules).values()) == {"enrolled"}
    if hangs_up:
        time.sleep(RENEWED / 2)  # more than the third after which it would have been renewed
        assert holders(five_nodes[:3], "left") == 0
    else:
        eventually(lambda: holders(five_nodes[:3], "left") == 3, "a renewal", every=0.001)
