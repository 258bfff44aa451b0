"""One node of three lies: all that is asked of the others works, soon and in little memory."""

from __future__ import annotations

import contextlib
import resource
import time

import pytest
from redis._parsers import _RESP2Parser

from celery_redlock import LockLost, LockTaken, Redlock
from celery_redlock.lock.lease import fence_proposal
from celery_redlock.lock.nodes import address
from celery_redlock.lock.rules import Rules
from celery_redlock.ops.doctor.nodes import gather_nodes
from celery_redlock.reading.all_locks import AllLocks, AllReservations
from celery_redlock.reading.journal import JournalReader
from celery_redlock.reading.leaks import Leaks
from celery_redlock.reading.nodes import bootstrap, node_statuses
from celery_redlock.reading.places import read_lock
from celery_redlock.reading.release import release_seen
from celery_redlock.reading.tally_reader import TallyReader
from support.liar import LIES, far_fences, in_time, late, lying
from support.stored import ROOMY

# A node that drips costs each question the few seconds that an exchange may last.
pytestmark = pytest.mark.long

RULES = Rules(**ROOMY)
#: How much more memory a process may take for what a node sends [KiB]: some exchanges' worth.
MEMORY = 200 * 1024


@pytest.fixture(params=LIES)
def nodes(request, redis_nodes):
    servers = redis_nodes(3)
    bootstrap([server.url for server in servers], RULES)
    others = [server.url for server in servers[1:]]
    with lying(servers[0].port, LIES[request.param]) as liar:
        yield [
            f"{liar.url}?socket_timeout=1",
            *others,
        ]  # as users have it; tests have more patience


def test_it_costs_no_more_than_its_vote(nodes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bootstrap(nodes, RULES)  # for this list of nodes, in which the liar stands
    locks = Redlock(nodes, RULES)
    try:
        with contextlib.suppress(LockLost), locks.hold("a", wait=60):  # it is released in the end
            assert len(in_time(lambda: node_statuses(nodes, RULES))) == 3
            found = in_time(lambda: list(AllLocks(nodes, RULES)))
            assert [view.name for view in found if view.is_held(3)] == ["a"]
            assert in_time(lambda: list(AllReservations(nodes, RULES, longest=5.0))) == []
            assert in_time(lambda: read_lock(nodes, RULES, "a")).views[0].is_held(3)
            in_time(lambda: JournalReader(nodes, RULES).recent())
            now = time.time()
            in_time(lambda: TallyReader(nodes, RULES).read(now - 3600, now))
            in_time(lambda: Leaks(nodes, RULES).look(locks.labels))
            assert len(in_time(lambda: gather_nodes(nodes, RULES, lambda _: None))) == 3
            seen = read_lock(nodes, RULES, "a").views[0].holder["token"]
            results = in_time(lambda: release_seen(nodes, RULES, "a", seen))
            assert list(results.values())[1:] == ["released", "released"]
    finally:
        in_time(lambda: locks.close() is None)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY


def is_taken(locks):
    """Return whether somebody else has the lock, after a second in which it is waited for."""
    try:
        locks.acquire("taken", wait=1.0)
    except LockTaken:
        return True
    return False


@pytest.mark.parametrize("has_hiredis", [True, False])
@pytest.mark.parametrize("lie", ["endless after its greeting", "endless to listeners"])
def test_what_never_ends_takes_bounded_memory(redis_nodes, monkeypatch, lie, has_hiredis):
    if not has_hiredis:
        monkeypatch.setitem(address.OPTIONS, "parser_class", _RESP2Parser)
    servers = redis_nodes(3)
    with lying(servers[0].port, LIES[lie]) as liar:
        urls = [liar.url, *(server.url for server in servers[1:])]
        bootstrap(urls, RULES)
        with contextlib.closing(Redlock(urls, RULES)) as locks, locks.hold("taken", wait=60):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(5):
                assert in_time(lambda: is_taken(locks))
                locks.release(in_time(lambda: locks.acquire("free", wait=60)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY


def test_nodes_that_stand_still_hide_no_others(redis_nodes):
    servers = redis_nodes(5)
    urls = [f"{server.url}?socket_timeout=2" for server in servers]
    bootstrap(urls, RULES)
    with contextlib.closing(Redlock(urls, RULES)) as locks, locks.hold("a", wait=60):
        everywhere = AllLocks(urls, RULES)
        inherited = everywhere._views

        def views(names):
            for server in servers[:2]:
                server.pause()
            return inherited(names)

        everywhere._views = views
        try:
            found = in_time(lambda: list(everywhere))
        finally:
            for server in servers[:2]:
                server.resume()
        assert {view.name for view in found if view.is_held(5)} == {"a"}
        assert len(everywhere.silent) == 2


def test_a_fence_that_no_clock_has_made_costs_one_vote(redis_nodes):
    servers = redis_nodes(3)
    with contextlib.ExitStack() as stack:
        lies = (far_fences, late, late)
        liars = [
            stack.enter_context(lying(server.port, lie))
            for server, lie in zip(servers, lies, strict=True)
        ]
        urls = [liar.url for liar in liars]
        bootstrap(urls, RULES)
        locks = stack.enter_context(contextlib.closing(Redlock(urls, RULES)))
        fences = []
        for _ in range(10):
            lease = locks.acquire("a", wait=0.0)
            fences.append(lease.fence)
            locks.release(lease)
    assert fences == sorted(set(fences))
    assert fences[-1] < fence_proposal(int(time.time() * 1000), 0)
