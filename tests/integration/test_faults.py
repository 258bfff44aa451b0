"""
What happens when servers, network and clients fail; and that each protection is needed.

A protection's test has a twin that switches the protection off and must see the harm:
two holders at once, a lock that leaks, or a loss that nobody notices. Otherwise the
first would prove nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

import celery_redlock
from celery_redlock import events
from celery_redlock.errors import LockLost, LockTaken, QuorumUnavailable
from celery_redlock.lock import clock, held
from celery_redlock.lock.algorithm import attempt
from celery_redlock.lock.algorithm.request import LockRequest, MarkerStands
from celery_redlock.lock.algorithm.results import ReleaseOutcome
from celery_redlock.lock.nodes import node
from celery_redlock.lock.nodes.fanout import Fanout
from celery_redlock.lock.nodes.link import Gone
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.nodes.steps import NodeClock
from celery_redlock.lock.records import Keys, marker_key
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts import requests, votes
from celery_redlock.lock.scripts.scripting import CONSTANTS, Script, read_release
from celery_redlock.lock.scripts.scripts import RELEASE_LUA
from celery_redlock.lock.watchdog import Watchdog
from celery_redlock.reading import nodes as reading
from celery_redlock.reading.health import check, probe
from support.stored import RENEWED, ROOMY, clients_of, value_of, wait_until_free, wait_until_taken
from support.waiting import eventually

#: A lease whose end is waited for.
BRIEF = {**ROOMY, "ttl": 3.0, "node_timeout": 1.0}

protection = pytest.mark.parametrize("on", [True, False], ids=["on", "off"])


@pytest.fixture
def paused():
    """Return a function that stops servers until the test ends, or until it is called again."""
    stopped = []

    def pause(*servers):
        for server in stopped:
            server.resume()
        stopped[:] = servers
        for server in servers:
            server.pause()

    yield pause
    pause()


@pytest.fixture
def given_up(monkeypatch):
    calls, give_up = [], Fanout._give_up
    monkeypatch.setattr(
        Fanout, "_give_up", lambda it, *words: (calls.append(words), give_up(it, *words))
    )
    return calls


def grants(lock, name):
    try:
        lock.acquire(name)
    except (LockTaken, QuorumUnavailable):
        return False
    return True


# -- every protection, and what happens without it -----------------------------------------


@protection
def test_a_yes_whose_connection_has_died_does_not_count(five_nodes, locks, paused, monkeypatch, on):
    """Its node may have restarted empty. Counted, it makes a majority of one node that stands."""
    if not on:
        monkeypatch.setattr(Round, "withdraw", lambda *_: None)
    first, second, third = five_nodes[:3]
    lock = locks([first, second, third], node_timeout=6.0)  # all that follows is in one round
    check(lock)
    before = lock.fanout.nodes[0].connection
    paused(second, third)
    with ThreadPoolExecutor(1) as threads, redis.Redis.from_url(first.url) as client:
        granted = threads.submit(grants, lock, "report")
        eventually(lambda: lock.fanout.nodes[0].latency, "the first node's yes")
        client.client_kill_filter(_type="normal", skipme=True)
        eventually(lambda: lock.fanout.nodes[0].connection is not before, "the end of it")
        second.resume()
        assert granted.result(timeout=60) is not on


@protection
def test_a_late_release_does_not_free_the_next_holders_lock(five_nodes, locks, monkeypatch, on):
    """The token is compared. Without that a release by one who lost frees what another holds."""
    if not on:
        source = CONSTANTS + RELEASE_LUA.replace("== ARGV[1]", "~= nil")
        blind = Script(source, read_release, guarded=False, one_way=True)
        monkeypatch.setattr(requests, "RELEASE", blind)
    slow = locks(five_nodes[:3], **BRIEF)
    second, third = (locks(five_nodes[:3], bootstrap=False) for _ in range(2))
    late = slow.acquire("report", wait=60)
    holder = second.acquire("report", wait=60)
    slow.release(late)
    stolen = grants(third, "report")
    assert holder.remaining() > 0
    assert stolen is not on


@pytest.mark.long
@protection
def test_a_node_that_is_behind_reads_what_was_sent_before_the_end(
    redis_nodes, locks, monkeypatch, on
):
    if not on:
        closed = Gone("closed")
        monkeypatch.setattr(node.Node, "finish", lambda it: it.detach(closed))
    monkeypatch.setattr(node, "PATIENCE", 60.0)  # the node may be away for as long as it likes
    servers = redis_nodes(3)
    lock = locks(servers, ttl=300.0, max_ttl=300.0)
    leases = [lock.acquire(f"report {number}", wait=60) for number in range(400)]
    servers[2].pause()
    assert {lock.release(lease) for lease in leases} == {ReleaseOutcome.RELEASED}
    lock.close()
    servers[2].resume()
    with redis.Redis.from_url(servers[2].url) as client:
        try:
            # Its twin has to wait to the end; the leases last longer than both.
            soon = 60 if on else 5
            eventually(lambda: not client.keys("redlock:lock:*"), "every release", timeout=soon)
            is_free = True
        except AssertionError:
            is_free = False
    assert is_free is on


@protection
def test_the_quorum_is_over_the_configured_nodes(
    redis_nodes, proxied_nodes, locks, monkeypatch, on
):
    """Parted clients cannot both have a lock, unless they count the nodes they reach."""
    if not on:
        for module in (votes, attempt):
            monkeypatch.setattr(module, "quorum", lambda reached: 2)
    servers = redis_nodes(5)
    parted = []
    for reached in ((0, 1), (3, 4)):
        links = proxied_nodes(servers)
        for number, link in enumerate(links):
            if number not in reached:
                link.refuse()
        # The restart guard knows nodes by their addresses, which differ here by the proxy.
        parted.append(locks(links, bootstrap=False, restart_guard=False))
    assert [grants(lock, "report") for lock in parted] == [not on, not on]


@protection
def test_a_release_goes_behind_what_it_undoes(five_nodes, proxied_nodes, locks, monkeypatch, on):
    """On one connection a late request is undone; by way of another one it leaves a lock."""
    links = proxied_nodes(five_nodes[:1])
    lock = locks(links, node_timeout=1.0)
    if not on:

        def elsewhere(call, skip=frozenset()):
            request = call.request
            with redis.Redis.from_url(five_nodes[0].url) as client:
                client.eval(request.script.source, 2, *request.keys, *request.arguments)

        monkeypatch.setattr(lock.fanout, "tell", elsewhere)
    _reconnect(lock)
    links[0].blackhole()
    with pytest.raises(QuorumUnavailable):
        lock.acquire("report")
    links[0].pass_through()
    _catch_up(lock)
    assert (value_of(five_nodes[0], "report") is None) is on


def _catch_up(lock):
    def owes_nothing():
        lock.inspect("another")
        return not any(node._owed for node in lock.fanout.nodes if node.connection)

    eventually(owes_nothing, "end of all debts")


def test_a_stopped_server_keeps_nothing_of_an_attempt_that_was_given_up(redis_nodes, locks, paused):
    servers = redis_nodes(1)
    lock = locks(servers, node_timeout=1.0)
    _reconnect(lock)
    paused(*servers)
    for _ in range(5):
        assert not grants(lock, "report")
    paused()
    _catch_up(lock)
    assert value_of(servers[0], "report") is None
    lock.acquire("report", wait=60)


@protection
def test_every_attempt_has_a_token_of_its_own(five_nodes, locks, on):
    """Who shares a token shares the lock: a second client is let in beside the first."""
    one, two = locks(five_nodes[:3]), locks(five_nodes[:3], bootstrap=False)
    if not on:
        one.participant.new_token = two.participant.new_token = lambda: "c" * 40
    holder = one.acquire("report")
    assert grants(two, "report") is not on
    assert holder.remaining() > 0


@protection
def test_a_restarted_majority_does_not_vote_at_once(redis_nodes, locks, on):
    """Empty nodes know of no holder: without quarantine they grant a lock that is held."""
    servers = redis_nodes(3)
    one = locks(servers, restart_guard=on)
    two = locks(servers, bootstrap=False, restart_guard=on)
    assert grants(two, "another")  # connects
    holder = one.acquire("report")
    for server in servers[:2]:
        server.restart()
    _reconnect(two)
    granted = grants(two, "report")
    assert holder.remaining() > 0
    assert granted is not on


def _reconnect(*all_locks):
    for lock in all_locks:
        eventually(
            lambda lock=lock: not any(view.problem for view in lock.inspect("another")),
            "return of all nodes",
        )


STOPPED = textwrap.dedent(
    """
    import os, sys
    from celery_redlock.errors import LockLost
    from celery_redlock.lock import held
    from celery_redlock.lock.redlock import Redlock
    from celery_redlock.lock.watchdog import Watchdog

    Watchdog._start = lambda self: None   # nobody else notices
    *urls, checks = sys.argv[1:]
    if checks == "off":
        held.clock = type("Stopped", (), {"now": staticmethod(lambda: 0.0)})
    lock = Redlock.from_urls(urls, ttl=3.0, max_ttl=60.0, node_timeout=1.0)
    with lock.hold("report", wait=60.0) as mine:
        print("held", flush=True)
        sys.stdin.readline()          # is stopped while it waits here
        try:
            mine.ensure_held()
        except LockLost as lost:
            print("lost", lost.reason, flush=True)
        else:
            print("goes on", flush=True)
        os._exit(0)
    """
)


@protection
def test_a_stopped_client_finds_its_lock_lost_at_once(five_nodes, locks, on):
    """After SIGCONT the clock is looked at before anything else; without that it would go on."""
    rival = locks(five_nodes[:3])
    urls = [server.url for server in five_nodes[:3]]
    with _script(STOPPED, *urls, "on" if on else "off") as client:
        assert client.stdout.readline() == "held\n"
        os.kill(client.pid, signal.SIGSTOP)
        lease = rival.acquire("report", wait=60)
        client.stdin.write("go\n")
        client.stdin.flush()
        os.kill(client.pid, signal.SIGCONT)
        told = client.stdout.readline()
        assert lease.remaining() > 0
    assert told == ("lost deadline\n" if on else "goes on\n")


@contextlib.contextmanager
def _script(source, *arguments):
    path = [str(Path(celery_redlock.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@protection
def test_a_renewal_after_the_deadline_revives_nothing(five_nodes, locks, monkeypatch, on):
    """By our clock it is lost, although every node still has its key and would extend it."""
    lock = locks(five_nodes[:3])
    late = lock.acquire("report")
    assert all(view.holder for view in lock.inspect("report"))
    moment = late.valid_until + (0.1 if on else -0.1)
    monkeypatch.setattr(lock.participant, "now", lambda: moment)
    try:
        lock.extend(late)
        revived = True
    except LockLost:
        revived = False
    assert revived is not on


@protection
def test_a_renewal_that_overtakes_its_release_leaves_no_lock_behind(
    five_nodes, locks, monkeypatch, on
):
    lock = locks(five_nodes[:3])
    begun, go_on, extend = threading.Event(), threading.Event(), lock._watchdog._extend

    def extend_late(leases):
        begun.set()
        go_on.wait(60)
        return extend(leases)

    monkeypatch.setattr(lock._watchdog, "_extend", extend_late)
    if not on:
        monkeypatch.setattr(lock._watchdog, "unwatch", lambda held: None)
    mine = lock.take(LockRequest("report", 60.0))
    renewing = threading.Thread(target=lock._watchdog.renew, args=([mine],))
    renewing.start()
    assert begun.wait(60)
    if on:
        threading.Timer(0.2, go_on.set).start()  # the release waits for the renewal
    lock.give_back(mine)
    go_on.set()  # without the protection the release has been sent by now
    renewing.join()
    _catch_up(lock)
    assert (value_of(five_nodes[0], "report") is None) is on


@protection
def test_a_release_without_a_connection_is_made_up_for(five_nodes, proxied_nodes, locks, on):
    links = proxied_nodes(five_nodes[:3])
    lock = locks(links)
    lease = lock.acquire("report")
    wait_until_taken(five_nodes[:3], "report")
    for link in links:
        link.refuse()
    assert lock.release(lease) is ReleaseOutcome.UNKNOWN
    if not on:
        for one in lock.fanout.nodes:
            one._undelivered.clear()
    for link in links:
        link.pass_through()
    _reconnect(lock)
    assert grants(lock, "report") is on


@protection
def test_nodes_that_were_away_are_taken_back(five_nodes, proxied_nodes, locks, monkeypatch, on):
    """With more to tell than a connection takes at once, as over a network it soon is."""
    attach = node.Node.attach

    def attach_narrow(self, connection, *told):
        connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        attach(self, connection, *told)

    def write_at_once(self, data, now):
        if self.sock.send(data) < len(data):
            raise Gone("takes no more requests")

    monkeypatch.setattr(node.Node, "attach", attach_narrow)
    if not on:
        monkeypatch.setattr(node.Node, "_write", write_at_once)
    links = proxied_nodes(five_nodes[:3])
    lock = locks(links)
    leases = [lock.acquire(f"{'report' * 30}{number}") for number in range(300)]
    for link in links:
        link.refuse()
    for lease in leases:
        assert lock.release(lease) is ReleaseOutcome.UNKNOWN
    began, before = time.monotonic(), [connections_to(server) for server in five_nodes[:3]]
    for link in links:
        link.pass_through()

    def is_back():
        return not any(view.problem for view in lock.inspect("another"))

    if on:
        eventually(is_back, "return of all nodes")
        assert all(grants(lock, lease.name) for lease in leases[::30])
    else:
        with pytest.raises(AssertionError):
            eventually(is_back, "return of all nodes", timeout=4)  # the twin: they do not
    made = [connections_to(server) - was for server, was in zip(five_nodes, before, strict=False)]
    # Two in the first tenth of a second, and from then on ever fewer.
    assert max(made) < 12 + (time.monotonic() - began)


def connections_to(server):
    """Return how many connections a server has accepted; this asks by another one each time."""
    with redis.Redis.from_url(server.url) as client:
        return client.info("stats")["total_connections_received"]


@protection
def test_a_fence_that_somebody_planted_is_nobodys(five_nodes, locks, monkeypatch, on):
    """A number that no clock has been at would be given to all holders from then on."""
    if not on:
        monkeypatch.setattr(Rules, "longest_skew", property(lambda _: 1e13))
    lock = locks(five_nodes[:3])
    key = Keys.of("redlock", "report").fence
    for server in five_nodes[: 1 if on else 2]:  # in each majority, whoever answers first
        with redis.Redis.from_url(server.url) as client:
            client.set(key, 2**53, px=600_000)
    told = []
    for _ in range(3):
        lease = lock.acquire("report")
        told += [lease.fence, lock.extend(lease).fence]
        lock.release(lease)
    latest = int((time.time() + 60) * 1000) << 12
    assert [fence < latest for fence in told] == [on] * 6
    assert (told == sorted(told) and len(set(told)) == 3) is on
    with redis.Redis.from_url(five_nodes[0].url) as client:
        is_refreshed = client.pttl(key) > 600_000  # as what is a fence would be
    assert is_refreshed is not on


@protection
def test_a_marker_that_somebody_planted_ends_nothing(five_nodes, locks, monkeypatch, on):
    """An execution is over where a majority says so; one node's writer cannot have it dropped."""
    if not on:

        def is_marked(ballot):
            return votes.count(ballot, votes.VoteKind.MARKED)

        found = {True: lambda _: votes.Verdict.MARKED, False: votes.judge}
        monkeypatch.setattr(attempt, "judge", lambda ballot: found[is_marked(ballot) > 0](ballot))
        monkeypatch.setattr(attempt, "acquire_is_decided", lambda ballot: is_marked(ballot) > 0)
    lock = locks(five_nodes[:3])
    with redis.Redis.from_url(five_nodes[0].url) as client:
        client.set(marker_key("redlock", "run:1"), b"done", px=60_000)
    with contextlib.nullcontext() if on else pytest.raises(MarkerStands):
        lock.give_back(lock.take(LockRequest("report", 60.0, marker="run:1")))


@protection
def test_a_jump_of_a_nodes_clock_voids_its_vote(five_nodes, locks, paused, monkeypatch, on):
    told = []
    lock = locks(five_nodes[:3], observers=[told.append])
    other = locks(five_nodes[:3], bootstrap=False)
    lock.release(lock.acquire("report"))
    probe(lock)
    paused(five_nodes[2])
    if not on:
        monkeypatch.setattr("celery_redlock.lock.clock.JUMP_TOLERANCE", 1e9)
    _step_clock(monkeypatch, lock, 1000.0)
    assert grants(lock, "report") is not on
    if on:
        _catch_up(lock)
        (jump,) = [event for event in told if isinstance(event, events.NodeClockJump)]
        assert jump.jump == pytest.approx(1000.0, abs=100.0)
        assert [event for event in told if isinstance(event, events.NodeQuarantined)]
        with pytest.raises(QuorumUnavailable, match="quarantined"):
            other.acquire("report")


def test_one_node_alone_is_in_doubt_for_the_client_that_sees_it_jump(
    five_nodes, locks, monkeypatch
):
    """Its clock or ours: nothing tells. Whoever sees it waits; it is written nowhere."""
    lock = locks(five_nodes[:1])
    other = locks(five_nodes[:1], bootstrap=False)
    lock.release(lock.acquire("report"))
    _step_clock(monkeypatch, lock, 1000.0)
    assert not grants(lock, "report")
    assert not grants(lock, "report")
    other.release(other.acquire("report"))


def _step_clock(monkeypatch, lock, step):
    first, take = lock.fanout.nodes[0].clock, NodeClock.take

    def stepped(clock, reading):
        if clock is first:
            late, soon = reading.earliest + step, reading.latest + step
            reading = reading._replace(earliest=late, latest=soon)
        return take(clock, reading)

    monkeypatch.setattr(NodeClock, "take", stepped)


def test_a_backward_jump_is_told_and_costs_one_vote_only(five_nodes, locks, monkeypatch):
    """Keys live too long then, which is no danger: no quarantine, and the next vote counts."""
    told = []
    lock = locks(five_nodes[:1], observers=[told.append])
    lock.release(lock.acquire("report"))
    _step_clock(monkeypatch, lock, -1000.0)
    assert not grants(lock, "report")
    assert grants(lock, "report")
    (jump,) = [event for event in told if isinstance(event, events.NodeClockJump)]
    assert jump.jump == pytest.approx(-1000.0, abs=100.0)
    assert not [event for event in told if isinstance(event, events.NodeQuarantined)]


def test_a_slow_reply_is_no_jump(five_nodes, proxied_nodes, locks):
    told = []
    links = proxied_nodes(five_nodes[:1])
    lock = locks(links, observers=[told.append], node_timeout=20.0)  # slow, not late
    for delay in (0.0, 0.15, 0.0, 0.3, 0.0):
        links[0].delay(delay)
        lock.release(lock.acquire("report"))
    assert not [event for event in told if isinstance(event, events.NodeClockJump)]


# -- nodes that fail --------------------------------------------------------------------------


def _cycle(lock, name="report"):
    lease = lock.acquire(name)
    assert lock.release(lease) is ReleaseOutcome.RELEASED


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_failed_minority_is_never_waited_for(redis_nodes, locks, paused, given_up, how):
    servers = redis_nodes(5)
    lock = locks(servers, node_timeout=20.0)  # a slow server is none that has failed
    hears_all = locks(servers, bootstrap=False)  # asked nothing until the end, so nothing is owed
    _reconnect(lock)
    _reconnect(hears_all)
    if how == "killed":
        for server in servers[:2]:
            server.kill()
    else:
        paused(*servers[:2])
    for _ in range(100):
        _cycle(lock)
    assert not given_up
    hears_all.inspect("report")  # the twin: who wants to hear all nodes
    assert len(given_up) == (how == "stopped")


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_node_that_returns_is_used_again(redis_nodes, locks, paused, how):
    servers = redis_nodes(3)
    told = []
    lock = locks(servers, observers=[told.append])
    _cycle(lock)
    first = lock.labels[0]
    if how == "killed":
        servers[0].kill()
    else:
        paused(servers[0])

    def told_of(kind):
        lock.inspect("another")  # asks all; a lock would need both others to be in time
        return [event for event in told if isinstance(event, kind) and event.node == first]

    eventually(lambda: told_of(events.NodeDown), "NodeDown")
    ups = len(told_of(events.NodeUp))
    if how == "killed":
        servers[0].start()
    else:
        paused()
    eventually(lambda: len(told_of(events.NodeUp)) > ups, "NodeUp")
    reading.bootstrap(lock.nodes, lock.rules)
    servers[1].kill()
    _cycle(lock)


def test_a_stopped_node_is_used_again_however_long_it_was_away(redis_nodes, locks, paused):
    servers = redis_nodes(3)
    lock = locks(servers)
    _cycle(lock)
    paused(servers[0])
    first = lock.fanout.nodes[0]

    def given_up():
        lock.inspect("another")  # asks all; a lock would need both others to be in time
        return first.connection is None

    eventually(given_up, "end of patience")
    paused()
    eventually(lambda: (lock.inspect("another"), first.connection)[1], "return of the node")
    servers[1].kill()
    _cycle(lock)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_without_a_majority_it_is_said_soon_that_nobody_can_decide(
    redis_nodes, locks, paused, given_up, how
):
    servers = redis_nodes(5)
    # Only one that is stopped is waited for; of the others nobody is to be late.
    lock = locks(servers, node_timeout=1.0 if how == "stopped" else 20.0)
    _reconnect(lock)
    if how == "killed":
        for server in servers[:3]:
            server.kill()
    else:
        paused(*servers[:3])
    for _ in range(10):
        with pytest.raises(QuorumUnavailable) as refusal:
            lock.acquire("report")
        votes_told = list(refusal.value.votes.values())
        assert sum(vote.startswith("unreachable") for vote in votes_told) >= 3
    # Not late yet by a hair's breadth, a node is waited for once more.
    assert len(given_up) <= (2 if how == "stopped" else 0)
    wait_until_free(servers[3:], "report")


def test_a_hung_majority_is_waited_for_once_and_not_in_every_round(
    redis_nodes, locks, paused, given_up
):
    servers = redis_nodes(3)
    lock = locks(servers, node_timeout=1.0)
    _reconnect(lock)
    paused(*servers[:2])
    for _ in range(10):
        assert not grants(lock, "report")
    assert 1 <= len(given_up) <= 2
    paused()
    eventually(lambda: grants(lock, "report"), "return of the quorum")


def test_nodes_that_hung_up_while_nobody_asked_are_back_before_the_next_round(
    five_nodes, locks, monkeypatch
):
    """A server may close idle connections; the first request afterwards still finds a quorum."""
    monkeypatch.setattr("celery_redlock.lock.nodes.fanout.QUIET", 0.0)
    lock = locks(five_nodes[:3], node_timeout=20.0)  # for as long it may take to be back
    for _ in range(3):
        _cycle(lock)
        for client in clients_of(five_nodes[:3]):
            client.client_kill_filter(_type="normal", skipme=True)
            eventually(lambda client=client: len(client.client_list()) == 1, "hanging up")
    _cycle(lock)


def test_a_connection_that_breaks_in_the_middle_of_a_round_costs_nothing(
    five_nodes, proxied_nodes, locks
):
    links = proxied_nodes(five_nodes[:3])
    lock = locks(links, node_timeout=20.0)  # a node that breaks off is not waited for
    for number in range(30):
        _reconnect(lock)
        link = links[number % 3]
        breaker = threading.Timer(number * 0.0001, link.reset)
        breaker.start()
        for part in range(5):
            _cycle(lock, f"n{number}:{part}")
        breaker.join()
        link.pass_through()
    _reconnect(lock)
    _catch_up(lock)


def test_dropped_replies_do_not_shift_those_that_follow(redis_nodes, locks, paused):
    servers = redis_nodes(3)
    lock = locks(servers, node_timeout=20.0)  # the one that is paused is not waited for
    for number in range(6):
        _reconnect(lock)
        paused(servers[number % 3])
        leases = [lock.acquire(f"lock:{number}:{i}") for i in range(3)]
        paused()
        for lease in leases:
            views = lock.inspect(lease.name)
            told = {view.holder.get("token") for view in views if not view.problem}
            assert told <= {lease.token[:8], None}
            assert lease.token[:8] in told
        for lease in leases:
            lock.release(lease)
    _catch_up(lock)


# -- the watchdog -----------------------------------------------------------------------------


def test_the_watchdog_keeps_a_lock_while_a_minority_dies(redis_nodes, locks):
    servers = redis_nodes(5)
    lock, rival = locks(servers, ttl=RENEWED), locks(servers, bootstrap=False)
    with lock.hold("report") as mine:
        doomed = list(servers[:2])
        while mine.renewals < 6:
            mine.ensure_held()
            assert not grants(rival, "report")
            if doomed and mine.renewals >= 2 * (3 - len(doomed)):
                doomed.pop().kill()


def test_the_watchdog_keeps_a_lock_while_a_minority_hangs(redis_nodes, locks, paused):
    servers = redis_nodes(3)
    lock = locks(servers, ttl=RENEWED)
    with lock.hold("report") as mine:
        paused(servers[0])
        while mine.renewals < 4:  # over more than a TTL
            mine.ensure_held()
            time.sleep(0.01)


def test_a_lock_without_a_majority_is_lost_at_its_deadline_and_not_before(redis_nodes, locks):
    servers = redis_nodes(3)
    lock = locks(servers, ttl=RENEWED)
    lost_at = []
    mine = lock.take(LockRequest("report", RENEWED), lambda held: lost_at.append(clock.now()))
    for server in servers[:2]:
        server.kill()
    deadline = mine.lease.valid_until
    eventually(lambda: lost_at, "loss")
    assert mine.lost_reason == "deadline"
    assert deadline <= lost_at[0]
    with pytest.raises(LockLost):
        mine.ensure_held()


@protection
def test_a_lock_is_lost_by_the_clock_even_if_the_watchdog_never_runs(
    five_nodes, locks, monkeypatch, on
):
    """The holder looks at the clock itself; one who relied on the thread would go on for ever."""
    monkeypatch.setattr(Watchdog, "_start", lambda self: None)
    if not on:
        monkeypatch.setattr(held.HeldLock, "lost_reason", None)
    lock, rival = locks(five_nodes[:3], **BRIEF), locks(five_nodes[:3], bootstrap=False, **BRIEF)
    mine = lock.take(LockRequest("report", 3.0, wait=60.0))
    rival.acquire("report", wait=60)
    try:
        mine.ensure_held()
        noticed = False
    except LockLost as lost:
        noticed = lost.reason == "deadline"
    assert noticed is on


def test_a_lost_lock_ends_before_anybody_else_can_have_it(five_nodes, locks, monkeypatch):
    """The holder's last good moment is before the next holder's first, by the drift."""
    monkeypatch.setattr(Watchdog, "_start", lambda self: None)
    lock, rival = locks(five_nodes[:3], **BRIEF), locks(five_nodes[:3], bootstrap=False, **BRIEF)
    last_good = []

    def use():
        with contextlib.suppress(LockLost):
            while True:
                mine.ensure_held()
                last_good[:] = [clock.now()]

    turns = 0
    while turns < 2 or not last_good:  # a machine that stalls may never come to use it
        turns += 1
        mine = lock.take(LockRequest("report", 3.0, wait=60.0))
        user = threading.Thread(target=use)
        user.start()
        lease = rival.acquire("report", wait=60)
        granted = clock.now()
        user.join()
        assert not last_good or last_good[0] < granted
        assert mine.lease.valid_until < granted
        rival.release(lease)


@pytest.mark.long
def test_a_thread_that_had_to_wait_to_send_makes_no_node_late(five_nodes, locks):
    """What counts is when the bytes went out, not when somebody wanted to send them."""
    told = []
    lock = locks(five_nodes, observers=[told.append])
    lock.release(lock.acquire("report"))
    mutex, timeout = lock.fanout._mutex, lock.rules.node_timeout
    for number in range(4):  # either of two that wait may have it first
        lease = lock.acquire(f"report {number}")
        with ThreadPoolExecutor() as pool:
            with mutex:
                released = pool.submit(lock.release, lease, wait=False)
                time.sleep(1.2 * timeout)
                asked = pool.submit(lock.acquire, f"another {number}")
                time.sleep(0.1 * timeout)
            released.result()
            lock.release(asked.result())
    assert not [event for event in told if isinstance(event, events.NodeDown)]
