"""What runs inside a node does what its replies say, on every server there is."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import redis

from celery_redlock.lock.lease import Lease
from celery_redlock.lock.nodes.guard import boot_marker
from celery_redlock.lock.records import Keys, marker_key, ms, shorten
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts import requests
from celery_redlock.lock.scripts.requests import Marker
from celery_redlock.lock.scripts.scripting import BOOT_RETENTION, NO_VOTE
from celery_redlock.lock.scripts.scripts import ENROL
from celery_redlock.lock.scripts.votes import VoteKind
from support.eviction import evict, evicting
from support.script_bench import ScriptBench
from support.waiting import eventually

RULES = Rules(ttl=200, max_ttl=300)
NAME = "report:7"
A, B = "a" * 40, "b" * 40
LARGEST = 2**53 - 1


class Bench(ScriptBench):
    def __init__(self, server, rules=RULES):
        super().__init__(server, rules)

    def acquire(self, token=A, *, fence=0, name=NAME, ttl=200.0, marker=None, **how):
        lease = Lease(name, token, fence, ttl, 0.0, 0.0, {"task_id": f"id-{token[0]}"})
        return self.ask(requests.acquire_request(self.rules, lease, marker), **how)

    def renew(self, token=A, *, fence=0, ttl=200.0, repair=True, **how):
        lease = Lease(NAME, token, fence, ttl, 0.0, 0.0, {"task_id": f"id-{token[0]}"})
        return self.ask(requests.renew_request(self.rules, lease, repair=repair), **how)

    def release(self, token=A, **how):
        return self.ask(requests.release_request(self.rules, NAME, token, **how))

    def inspect(self):
        return self.ask(requests.inspect_request(self.rules, NAME))

    def enrol(self, mode="bootstrap", boot=None, *left):
        """Ask for the enrolment, or change it; returns state, quarantine [ms] and the marker."""
        keys = Keys.of(self.rules.prefix, "")
        numbers = (boot or self.boot, ms(self.rules.quarantine), mode, *left)
        state, _, left, found = self.client.evalsha(
            ENROL.sha, 2, keys.boot, keys.quarantine, *numbers
        )
        return state.decode(), left, found

    def get(self, key):
        return self.client.get(getattr(Keys.of(self.rules.prefix, NAME), key))

    def pttl(self, key):
        return self.client.pttl(getattr(Keys.of(self.rules.prefix, NAME), key))


# -- acquire -----------------------------------------------------------------------


def test_a_free_lock_is_granted_and_stored_with_what_the_holder_tells(bench):
    vote = bench.acquire(fence=4096)
    assert (vote.kind, vote.fence) == (VoteKind.GRANTED, 4096)
    assert bench.is_of_now(vote.node_now)
    stored = bench.get("lock")
    assert stored[:40] == A.encode()
    assert json.loads(stored[40:])["task_id"] == "id-a"
    assert bench.near(bench.pttl("lock"), 200)
    assert bench.get("fence") == b"4096"


def test_a_held_lock_is_refused_with_holder_rest_and_fence(bench):
    bench.acquire(A, fence=9)
    vote = bench.acquire(B, fence=5000)
    assert (vote.kind, vote.fence) == (VoteKind.REFUSED, 9)
    assert bench.near(vote.ttl * 1000, 200)
    assert vote.value == bench.get("lock")
    assert vote.value.startswith(A.encode())
    assert bench.get("fence") == b"9"


def test_only_the_whole_token_opens_a_lock(bench):
    bench.acquire(A)
    near = A[:-1] + "b"
    assert bench.acquire(near).kind is VoteKind.REFUSED
    assert bench.renew(near).kind is VoteKind.REFUSED
    assert bench.release(near).kind is VoteKind.REFUSED


def test_the_own_token_is_granted_again_with_a_larger_fence(bench):
    bench.acquire(A, fence=100, ttl=100.0)
    vote = bench.acquire(A, fence=100)
    assert (vote.kind, vote.fence) == (VoteKind.GRANTED, 101)
    assert bench.near(bench.pttl("lock"), 200)


def test_a_grant_can_be_asked_for_without_a_fence(bench):
    assert bench.acquire(fence=0).fence == 0
    assert bench.get("fence") is None


@pytest.mark.parametrize(
    ("stored", "proposed", "given"),
    [
        (None, 1, 1),
        (None, 7205759403792793, 7205759403792793),
        (5, 3, 6),
        (5, 5, 6),
        (5, 6, 6),
        (5, 7, 7),
        (99_999_999_999_999, 1, 100_000_000_000_000),
        (999_999_999_999_999, 1, 1_000_000_000_000_000),
        (LARGEST - 1, 1, LARGEST),
    ],
)
def test_a_fence_grows_and_keeps_all_its_digits(bench, stored, proposed, given):
    """A grant's fence is the proposal or the stored one plus one, whichever is larger, exactly."""
    if stored is not None:
        bench.client.set(Keys.of("redlock", NAME).fence, stored, px=60_000)
    # The clamp has a test of its own; the largest numbers are years ahead of the clock.
    wide = replace(requests.acquire_request(RULES, Lease(NAME, A, proposed, 20, 0, 0), None))
    arguments = list(wide.arguments)
    arguments[5] = b"%d" % 10**13
    vote = bench.ask(replace(wide, arguments=tuple(arguments)))
    assert vote.fence == given
    assert bench.get("fence") == b"%d" % given


def test_fences_of_later_grants_are_larger_whatever_is_proposed(bench):
    chance = random.Random(7)
    base = bench.now_ms() * 4096
    given = []
    for number in range(200):
        token = f"{number:040d}"
        given.append(bench.acquire(token, fence=max(1, base + chance.randrange(-999, 999))).fence)
        bench.release(token)
    assert given == sorted(set(given))


def test_a_proposal_ahead_of_the_nodes_clock_is_refused(bench):
    allowed = RULES.longest_skew * 1000
    with bench.unchanged():
        far = int((bench.now_ms() + allowed + 600_000) * 4096)
        vote = bench.acquire(fence=far)
        assert vote.kind is VoteKind.UNREACHABLE
        assert "clock" in vote.reason
    near = int((bench.now_ms() + allowed - 2000) * 4096)
    assert bench.acquire(fence=near).fence == near


#: What stands for a fence that somebody has set by hand, or that is of before a clock was set back.
FAR = ["9007199254740992", "1e300", "inf", "nan"]


@pytest.mark.parametrize("planted", FAR)
def test_a_fence_that_no_clock_can_have_made_grants_nothing(bench, planted):
    """One write on one node would else be counted on from, and given to whoever asks."""
    key = Keys.of("redlock", NAME).fence
    bench.client.set(key, planted, px=60_000)
    vote = bench.acquire(fence=bench.now_ms() * 4096)
    assert (vote.kind, vote.reason) == (VoteKind.UNREACHABLE, NO_VOTE[-7])
    assert (bench.get("lock"), bench.get("fence")) == (None, planted.encode())
    assert bench.acquire(fence=0).kind is VoteKind.GRANTED  # for which it does not matter
    bench.release(A)
    bench.client.delete(key)
    assert bench.acquire(fence=4096).fence == 4096


@pytest.mark.parametrize("planted", FAR)
def test_a_fence_that_no_clock_can_have_made_is_not_refreshed(bench, planted):
    key, fence = Keys.of("redlock", NAME).fence, bench.now_ms() * 4096
    bench.acquire(A, fence=fence, ttl=100.0)
    bench.client.set(key, planted, px=50_000)
    for _ in range(2):
        vote = bench.renew(A, fence=fence)
        assert (vote.kind, vote.reason) == (VoteKind.UNREACHABLE, NO_VOTE[-7])
        assert bench.get("fence") == planted.encode()
        assert bench.pttl("fence") <= 50_000
        assert bench.pttl("lock") <= 100_000
        bench.client.delete(Keys.of("redlock", NAME).lock)
    assert bench.renew(A, fence=0).kind is VoteKind.REPAIRED


def test_a_renewal_with_a_fence_that_no_clock_can_have_made_is_not_stored(bench):
    """Whoever was given it elsewhere does not spread it."""
    bench.acquire(A, fence=5)
    vote = bench.renew(A, fence=2**53)
    assert (vote.kind, vote.reason) == (VoteKind.UNREACHABLE, NO_VOTE[-7])
    assert bench.get("fence") == b"5"


def test_a_holder_outlives_a_clock_that_is_set_back(bench):
    """The fence is ahead of the clock then, but it is the holder's own, and nobody's else."""
    fence = (bench.now_ms() + 3_600_000) * 4096
    bench.acquire(A, fence=5)
    bench.client.set(Keys.of("redlock", NAME).fence, fence, px=60_000)
    vote = bench.renew(A, fence=fence)
    assert (vote.kind, vote.fence) == (VoteKind.GRANTED, fence)


def test_a_fence_as_far_ahead_as_clocks_may_differ_is_counted_on_from(bench):
    """As it is when a node's clock was set back by less than that."""
    stored = int((bench.now_ms() + RULES.longest_skew * 1000 - 2000) * 4096)
    bench.client.set(Keys.of("redlock", NAME).fence, stored, px=60_000)
    assert bench.acquire(fence=4096).fence == stored + 1
    assert bench.renew(fence=stored + 1).fence == stored + 1


def test_a_marker_makes_the_lock_needless(bench):
    bench.ask(requests.mark_request(RULES, Marker("done:7", "done", 60.0)))
    with bench.unchanged():
        vote = bench.acquire(marker="done:7")
        assert (vote.kind, vote.value) == (VoteKind.MARKED, b"done")
    assert bench.acquire(marker="done:8").kind is VoteKind.GRANTED


def test_a_marker_can_be_taken_away(bench):
    """By its name and state: what it says may have changed."""
    bench.ask(requests.mark_request(RULES, Marker("done:7", "finishing", 60.0)))
    bench.ask(requests.mark_request(RULES, Marker("done:7", "another", 0.0)))
    assert bench.acquire(marker="done:7").kind is VoteKind.MARKED
    bench.ask(requests.mark_request(RULES, Marker("done:7", "finishing", 0.0)))
    assert bench.acquire(marker="done:7").kind is VoteKind.GRANTED


# -- the restart guard -----------------------------------------------------------------


def test_a_node_that_was_another_process_is_quarantined_for_everybody(bench):
    """A run id other than the enrolled one means lost memory: nobody gets a vote for a while."""
    restarted = boot_marker("1" * 40, "f" * 16)
    vote = bench.acquire(boot=restarted)
    assert vote.kind is VoteKind.QUARANTINED
    assert bench.near(vote.ttl * 1000, RULES.quarantine)
    assert bench.get("lock") is None
    assert bench.acquire(B, boot=restarted).kind is VoteKind.QUARANTINED


def test_a_flushed_node_is_quarantined(bench):
    """A node without its boot marker has lost its memory."""
    bench.acquire(A)
    bench.client.flushall()
    assert bench.acquire(B).kind is VoteKind.QUARANTINED


def test_a_quarantine_ends_by_itself_and_is_not_prolonged_by_asking(fresh):
    left = []

    def granted():
        vote = fresh.acquire(quarantine=300)
        left.append(vote.ttl)
        return vote.kind is VoteKind.GRANTED

    eventually(granted, "vote")
    waits = left[:-1]
    assert waits == sorted(waits, reverse=True)
    assert max(waits) <= 0.3


def test_a_node_of_other_clients_does_not_vote(bench):
    with bench.unchanged():
        foreign = boot_marker(bench.run_id, "e" * 16)
        vote = bench.acquire(boot=foreign)
        assert (vote.kind, vote.reason) == (VoteKind.UNREACHABLE, NO_VOTE[-6])
    assert bench.get("boot") == bench.boot
    assert bench.acquire().kind is VoteKind.GRANTED


def test_evicted_keys_are_a_memory_that_was_lost(redis_nodes, contract_server):
    """To whoever looks; the marker then has their count, which others do not mind."""
    (server,) = redis_nodes(1, binary=contract_server.binary)
    bench, client = Bench(server, RULES), evicting(server)
    bench.enrol("bootstrap")
    looking = bench.boot + b"+"
    assert bench.acquire(A, boot=looking).kind is VoteKind.GRANTED
    evict(client)
    assert bench.get("lock") is None
    assert bench.acquire(B).kind is VoteKind.GRANTED  # who does not look
    vote = bench.acquire(B, boot=looking)
    assert vote.kind is VoteKind.QUARANTINED
    assert bench.near(vote.ttl * 1000, RULES.quarantine)
    assert bench.get("boot") == bench.boot + b"+%d" % client.info("stats")["evicted_keys"]
    client.delete(Keys.of(RULES.prefix, "").quarantine)
    assert bench.renew(B).kind is bench.renew(B, boot=looking).kind is VoteKind.GRANTED
    foreign = boot_marker(bench.run_id, "e" * 16)
    for boot in (foreign, foreign + b"+"):
        assert bench.acquire(B, boot=boot).reason == NO_VOTE[-6]
        assert bench.enrol("look", foreign)[0] == "foreign"


def test_without_the_guard_nothing_is_enrolled(contract_node):
    rules = Rules(ttl=200, max_ttl=300, restart_guard=False)
    bench = Bench(contract_node, rules)
    assert bench.acquire(fence=1).kind is VoteKind.GRANTED
    assert bench.renew().kind is VoteKind.GRANTED
    keys = Keys.of(rules.prefix, NAME)
    assert set(bench.everything()) == {keys.lock, keys.fence}
    bench.client.close()


def test_an_enrolment_is_refreshed_by_every_grant(bench):
    bench.client.pexpire(Keys.of("redlock", "").boot, 60_000)
    bench.acquire()
    assert bench.near(bench.pttl("boot"), BOOT_RETENTION / 1000)


def test_a_probe_keeps_a_node_enrolled(bench):
    """Workers that take no lock for a month must not find their nodes forgotten."""
    bench.client.pexpire(Keys.of("redlock", "").boot, 60_000)
    bench.ask(requests.probe_request(bench.rules))
    assert bench.near(bench.pttl("boot"), BOOT_RETENTION / 1000)


# -- a node that was a replica -----------------------------------------------------------


def demote_and_promote(bench):
    """Have the server be a replica for a moment, and then a master again: the same process."""
    bench.client.replicaof("127.0.0.1", 1)
    bench.client.replicaof("NO", "ONE")
    assert bench.client.info("server")["run_id"] == bench.run_id


def test_a_node_that_was_a_replica_is_quarantined_by_whoever_connects(bench):
    """It has what its master had, which may lack the newest locks, and is the same process."""
    demote_and_promote(bench)
    assert bench.enrol("look")[1] > 0
    assert bench.acquire().kind is VoteKind.QUARANTINED


def test_a_node_that_was_a_replica_is_quarantined_by_whoever_probes(bench):
    """Connections last through it; workers look at each node every few seconds."""
    demote_and_promote(bench)
    vote = bench.ask(requests.probe_request(bench.rules))
    assert vote.kind is VoteKind.QUARANTINED
    assert bench.renew().kind is VoteKind.QUARANTINED


def test_a_node_is_quarantined_once_for_having_been_a_replica(bench):
    for _ in range(2):
        demote_and_promote(bench)
        assert bench.enrol("look")[1] > 0
        bench.client.delete(Keys.of("redlock", "").quarantine)
        assert bench.enrol("look")[1] == 0
        assert bench.ask(requests.probe_request(bench.rules)).kind is VoteKind.GRANTED


def test_an_operator_may_say_that_nothing_is_held_there(bench):
    demote_and_promote(bench)
    assert bench.enrol("bootstrap")[1] == 0
    assert bench.enrol("look")[1] == 0


def test_a_replica_that_copies_from_a_node_is_no_reason_for_quarantine(redis_nodes):
    """The node has another replication id then, and has forgotten nothing."""
    server, replica = redis_nodes(2)
    bench = Bench(server)
    bench.enrol("bootstrap")
    before = bench.client.info("replication")["master_replid"]
    with redis.Redis.from_url(replica.url) as copy:
        copy.replicaof("127.0.0.1", server.port)
        eventually(lambda: bench.client.info("replication")["connected_slaves"], "a replica")
        copy.replicaof("NO", "ONE")
    assert bench.client.info("replication")["master_replid"] != before
    assert bench.ask(requests.probe_request(bench.rules)).kind is VoteKind.GRANTED
    assert bench.enrol("look")[1] == 0
    bench.client.close()


def test_looking_at_an_unknown_node_changes_nothing(fresh):
    assert fresh.enrol("look") == ("unmarked", 0, b"")
    assert fresh.everything() == {}


def test_a_node_can_be_trusted_only_while_it_is_unknown(fresh):
    assert fresh.enrol("trust")[:2] == ("enrolled", 0)
    fresh.client.flushall()
    assert fresh.enrol("quarantine")[1] > 0
    assert fresh.enrol("trust")[1] > 0
    assert fresh.acquire().kind is VoteKind.QUARANTINED


def test_a_part_of_a_quarantine_is_for_a_node_that_is_unknown_and_shortens_none(fresh):
    """One that was enrolled as another process has the whole of it before it, as has a replica."""
    assert 0 < fresh.enrol("quarantine", None, 500)[1] <= 500
    assert fresh.get("boot") == fresh.boot
    assert fresh.acquire().kind is VoteKind.QUARANTINED
    assert fresh.enrol("quarantine", boot_marker("1" * 40, "f" * 16), 500)[1] > 500
    fresh.client.delete(Keys.of(fresh.rules.prefix, "").boot)
    assert fresh.enrol("quarantine", None, 500)[1] > 500


def test_looking_at_a_restarted_node_quarantines_it(bench):
    state, left, _ = bench.enrol("look", boot_marker("1" * 40, "f" * 16))
    assert state == "enrolled"
    assert left > 0
    assert bench.get("boot") == boot_marker("1" * 40, "f" * 16)


def test_looking_at_other_clients_node_says_foreign(bench):
    foreign = boot_marker(bench.run_id, "e" * 16)
    for mode in ("look", "trust", "quarantine"):
        assert bench.enrol(mode, foreign)[0] == "foreign"
    assert bench.get("boot") == bench.boot


def test_an_operators_word_ends_a_quarantine(fresh):
    fresh.acquire()
    assert fresh.acquire().kind is VoteKind.QUARANTINED
    assert fresh.enrol("bootstrap")[0] == "enrolled"
    assert fresh.acquire().kind is VoteKind.GRANTED


# -- renew -------------------------------------------------------------------------------


def test_a_renewal_extends_and_raises_the_fence(bench):
    bench.acquire(A, fence=100, ttl=100.0)
    vote = bench.renew(A, fence=500)
    assert (vote.kind, vote.fence) == (VoteKind.GRANTED, 500)
    assert bench.near(bench.pttl("lock"), 200)
    assert bench.renew(A, fence=300).fence == 500
    assert bench.get("fence") == b"500"


def test_a_renewal_repairs_a_missing_key_only_when_told(bench):
    vote = bench.renew(A, fence=50, repair=False)
    assert (vote.kind, vote.value) == (VoteKind.REFUSED, b"")
    assert bench.get("lock") is None
    vote = bench.renew(A, fence=50, repair=True)
    assert (vote.kind, vote.fence) == (VoteKind.REPAIRED, 50)
    assert bench.get("lock").startswith(A.encode())


def test_a_renewal_never_takes_another_holders_lock(bench):
    bench.acquire(B, fence=70)
    for repair in (True, False):
        vote = bench.renew(A, fence=90, repair=repair)
        assert (vote.kind, vote.fence) == (VoteKind.REFUSED, 70)
        assert vote.value.startswith(B.encode())
    assert bench.get("fence") == b"70"


def test_a_quarantined_node_stores_a_renewal_but_does_not_count(bench):
    bench.acquire(A, fence=10)
    bench.client.flushall()
    vote = bench.renew(A, fence=10)
    assert vote.kind is VoteKind.QUARANTINED
    assert vote.ttl > 0
    assert bench.get("lock").startswith(A.encode())
    assert bench.get("fence") == b"10"
    assert bench.acquire(B).kind is VoteKind.QUARANTINED
    assert bench.renew(A, fence=10).kind is VoteKind.QUARANTINED


# -- release -----------------------------------------------------------------------------


def test_a_release_deletes_only_its_own_token(bench):
    bench.acquire(A, fence=10)
    assert bench.release(B).kind is VoteKind.REFUSED
    assert bench.get("lock").startswith(A.encode())
    assert bench.release(A).kind is VoteKind.GRANTED
    assert bench.get("lock") is None
    assert bench.release(A).kind is VoteKind.REFUSED
    assert bench.get("fence") == b"10"


def test_an_owner_can_release_what_any_of_its_tokens_holds(bench):
    bench.acquire(A)
    for stranger in (B[:32], A[:31], "", A[:31] + B[:1]):
        assert bench.release(stranger).kind is VoteKind.REFUSED
    assert bench.release(A[:32]).kind is VoteKind.GRANTED
    assert bench.get("lock") is None


def test_a_release_can_keep_the_key_for_a_while(bench):
    bench.acquire(A)
    assert bench.release(A, keep=50.0).kind is VoteKind.GRANTED
    assert bench.near(bench.pttl("lock"), 50)
    assert bench.acquire(B).kind is VoteKind.REFUSED


def test_a_release_sets_its_marker_whoever_holds_the_lock(bench):
    bench.acquire(B)
    bench.release(A, marker=Marker("run:1", "finishing", 50.0))
    assert bench.client.get(marker_key("redlock", "run:1")) == b"finishing"
    assert bench.near(bench.client.pttl(marker_key("redlock", "run:1")), 50)
    assert bench.get("lock").startswith(B.encode())


def test_what_is_done_stays_done(bench):
    """A child that was killed while it finished may speak last; its parent has said the word."""
    key = marker_key("redlock", "run:1")
    bench.ask(requests.mark_request(bench.rules, Marker("run:1", "done", 60.0)))
    bench.release(A, marker=Marker("run:1", "finishing", 50.0))
    assert bench.client.get(key) == b"done"
    assert bench.near(bench.client.pttl(key), 60)
    bench.ask(requests.mark_request(bench.rules, Marker("run:1", "finishing", 0.0)))
    assert bench.client.get(key) == b"done"
    bench.release(A, marker=Marker("run:1", "done", 90.0))
    assert bench.near(bench.client.pttl(key), 90)


# -- inspect -----------------------------------------------------------------------------


def test_inspecting_tells_and_changes_nothing(bench):
    vote = bench.inspect()
    assert (vote.value, vote.ttl, vote.fence) == (b"", 0.0, 0)
    bench.acquire(A, fence=10)
    with bench.unchanged():
        vote = bench.inspect()
        assert (vote.value[:40], vote.fence) == (A.encode(), 10)
        assert bench.near(vote.ttl * 1000, 200)
    bench.release(A)
    assert bench.inspect().fence == 10


# -- all of them ---------------------------------------------------------------------------


class Model:
    def __init__(self):
        self.holder, self.fence = None, 0

    def acquire(self, token, proposed):
        if self.holder not in (None, token):
            return VoteKind.REFUSED, self.fence
        self.holder, self.fence = token, max(self.fence + 1, proposed)
        return VoteKind.GRANTED, self.fence

    def renew(self, token, fence, repair):
        passed = 0 < fence < self.fence
        if self.holder != token and not (self.holder is None and repair and not passed):
            return VoteKind.REFUSED, self.fence
        kind = VoteKind.GRANTED if self.holder == token else VoteKind.REPAIRED
        self.holder, self.fence = token, max(self.fence, fence)
        return kind, self.fence

    def release(self, token):
        mine = self.holder == token
        self.holder = None if mine else self.holder
        return (VoteKind.GRANTED if mine else VoteKind.REFUSED), 0


def test_the_scripts_agree_with_a_model_over_long_random_runs(bench):
    chance, model = random.Random(20), Model()
    for _ in range(600):
        token = chance.choice("abc") * 40
        fence = chance.randrange(1, 10**6)
        verb = chance.choice(["acquire", "renew", "release", "expire"])
        if verb == "acquire":
            vote, expected = bench.acquire(token, fence=fence), model.acquire(token, fence)
        elif verb == "renew":
            repair = chance.random() < 0.5
            vote = bench.renew(token, fence=fence, repair=repair)
            expected = model.renew(token, fence, repair)
        elif verb == "release":
            vote, expected = bench.release(token), model.release(token)
        else:
            bench.client.delete(Keys.of("redlock", NAME).lock)
            model.holder = None
            continue
        assert (vote.kind, vote.fence) == expected, verb


def test_every_write_carries_an_expiry(fresh):
    seen = set()
    for mode in ("look", "trust", "bootstrap", "quarantine"):
        fresh.enrol(mode)
        fresh.acquire(A, fence=3, marker="m:1")
        fresh.renew(A, fence=3)
        fresh.release(A, keep=50.0, marker=Marker("m:2", "done", 90.0))
        fresh.ask(requests.mark_request(RULES, Marker("m:3", "queued", 90.0)))
        fresh.acquire(B, fence=3)
        keys = fresh.everything()
        seen |= {key.split(b":")[1] for key in keys}
        assert all(fresh.client.pttl(key) > 0 for key in keys), mode
    assert seen == {b"lock", b"fence", b"marker", b"node"}


@pytest.mark.parametrize(
    "name", ["x" * 5000, "é" * 500, "\U0001f512" * 300, "x" + "é" * 120, "a:b\n\r\0c" * 40]
)
def test_keys_of_very_long_names_are_short_and_work(bench, name):
    longest_prefix = "p" * 40
    for key in (*Keys.of(longest_prefix, name), marker_key(longest_prefix, name)):
        assert len(key) < 200
        key.decode()
    assert bench.acquire(A, name=name + "1").kind is VoteKind.GRANTED
    assert bench.acquire(B, name=name + "2").kind is VoteKind.GRANTED
    assert bench.acquire(B, name=name + "1").kind is VoteKind.REFUSED


def test_a_short_name_is_its_own_key():
    """What an operator sees in the node is the name, as long as it is short enough."""
    assert Keys.of("redlock", NAME).lock == b"redlock:lock:report:7"
    assert shorten("x" * 110) == "x" * 110
    assert len(shorten("x" * 111)) == 110


def test_no_key_of_one_kind_is_a_key_of_another():
    names = ["boot", "node:boot", "", ":", "lock:x", "x"]
    keys = [key for name in names for key in (*Keys.of("p", name)[:2], marker_key("p", name))]
    assert len(set(keys) | {*Keys.of("p", "")[2:]}) == 3 * len(names) + 2
