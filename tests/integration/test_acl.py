"""
What a user of the lock nodes has to be allowed: no less, as every feature is tried, and no more.

The rights are those that the how-to prints; a page that prints too few, or too many, is noticed.
"""

from __future__ import annotations

import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path

import pytest
import redis

from celery_redlock import LockTaken, Redlock
from celery_redlock.beat.slot_records import Claim, Slots
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import Marker
from celery_redlock.lock.scripts.scripting import registered
from celery_redlock.lock.scripts.votes import VoteKind
from celery_redlock.lock.waiting.waiting import InLine, wait_request
from celery_redlock.ops.doctor.nodes import gather_nodes
from celery_redlock.reading.all_locks import AllLocks, AllReservations
from celery_redlock.reading.health import check, probe
from celery_redlock.reading.journal import JournalReader, write_record
from celery_redlock.reading.leaks import Leaks
from celery_redlock.reading.nodes import bootstrap, node_statuses
from celery_redlock.reading.places import read_lock
from celery_redlock.reading.release import release_seen
from celery_redlock.unique.requests import AS_IT_IS, OVER, Start, Trigger
from celery_redlock.unique.reservations import Reservations
from celery_redlock.unique.reserving import Started
from support.stored import ROOMY
from support.waiting import eventually

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "sentinel-tls-acl.md"
RULES = Rules(**ROOMY)
SECRET = "s3cret-of-the-locks"


def rights(user):
    (line,) = re.findall(rf"^user {user} on >\S+ ~redlock:\* (.*)$", PAGE.read_text(), re.MULTILINE)
    return line.split()


WORKER, OPERATOR = rights("worker"), rights("operator")
#: Rights that are made use of where they are there, and not missed.
HARMLESS = ("+client|setinfo", "+config|get")


@pytest.fixture
def admin(contract_node):
    with redis.Redis.from_url(contract_node.url) as client:
        yield client
        client.acl_deluser("shop")
        client.acl_log_reset()


def allow(admin, node, allowed, keys="~redlock:*"):
    admin.execute_command("ACL", "SETUSER", "shop", "reset", "on", f">{SECRET}", keys, *allowed)
    admin.acl_log_reset()
    return node.url.replace("redis://", f"redis://shop:{SECRET}@")


def harmless(admin):
    """Return the right that redis-py makes use of at each connection where the server has it."""
    right, _ = HARMLESS
    try:
        admin.execute_command("ACL", "SETUSER", "shop", right)
    except redis.ResponseError:  # a server that knows no such command
        return []
    return [right]


class Everything:
    """
    Uses all that the library does on a node, each feature by itself.

    Args:
        url: Of the node, as the user in question.
        admin: May do everything.
    """

    def __init__(self, url, admin):
        self.url = url
        self.admin = admin
        self.locks = Redlock([url], RULES)
        self.said = []

    def features(self, names):
        failed = {}
        for name in names:
            try:
                getattr(self, name)()
            except Exception as problem:  # noqa: BLE001  whatever a missing right leads to
                failed[name] = repr(problem)
        self.said.append(str(failed))
        return failed

    def enrolment(self):
        (told,) = bootstrap([self.url], RULES).values()
        assert told == "enrolled", told
        assert not (problems := check(self.locks)), problems

    def locking(self):
        lease = self.locks.acquire("n")
        assert lease.fence
        lease = self.locks.extend(lease)
        (view,) = self.locks.inspect("n")
        assert view.holder, view
        outcome = self.locks.release(lease)
        assert outcome.name == "RELEASED", outcome

    def refusal(self):
        lease = self.locks.acquire("mine")
        with pytest.raises(LockTaken) as taken:
            self.locks.acquire("mine")
        assert taken.value.holder["ttl"] > 0
        self.locks.release(lease)

    def finished_tasks(self):
        held = self.locks.take(LockRequest("marked", 60.0))
        self.locks.give_back(held, keep=30.0, marker=Marker("of a task", "done", 60.0))
        self.locks.inspect("marked")  # answers come in order: now the release has arrived
        assert self.admin.get("redlock:marker:of a task") == b"done"
        assert 0 < self.admin.pttl("redlock:lock:marked") <= 30_000
        self.locks.mark(Marker("of a task", "done", 0.0), wait=True)
        assert not self.admin.exists("redlock:marker:of a task")

    def health(self):
        """A probe writes, too."""
        (health,) = probe(self.locks)
        assert not health.problem, health.problem

    def forgotten_scripts(self):
        self.admin.script_flush()
        self.locks.release(self.locks.acquire("forgotten"))

    def queued_markers(self):
        queued = Reservations.on(self.locks)

        def trigger(task):
            return Trigger("q", 60.0, {"task_id": task}, arguments=b"[]")

        first = queued.reserve(trigger("a"))
        merged = queued.reserve(trigger("b"))
        assert merged.merged == 1, merged
        lease = self.locks.acquire("q")
        begun = Start({"task_id": "a"}, lease.token, "a/0/0", 60.0, 60.0)
        assert isinstance(queued.start("q", first.token, begun, wait=True), Started)
        following = queued.reserve(trigger("c"))
        assert following.before, following
        queued.end("q", first.token, OVER, wait=True)
        self.locks.release(lease)
        lease = self.locks.acquire("q")
        begun = Start({"task_id": "c"}, lease.token, "c/0/0", AS_IT_IS, 60.0)
        assert isinstance(queued.start("q", following.token, begun, wait=True), Started)
        queued.end("q", following.token, "wait", life=60.0, wait=True)
        queued.end("q", following.token, OVER, wait=True)
        self.locks.release(lease)
        assert not self.admin.keys("redlock:queued:*") + self.admin.keys("redlock:next:*")

    def waiting(self):
        """One that waits is told by the release; when one more may not, the node looks who does."""
        lease, room, hints = self.locks.acquire("line"), self.locks.listener.room, []
        hear = room.hear
        room.hear = lambda *words: (hints.append(words), hear(*words))
        with ThreadPoolExecutor() as others:
            waiter = others.submit(self.locks.acquire, "line", wait=60)
            try:
                self.wait_until(lambda: self.admin.zcard("redlock:line:line"), "one that waits")
                self.wait_until(lambda: self.admin.pubsub_channels("redlock:wake:*"), "ears")
                another = InLine("line", "f" * 32, time.time(), {})
                ballot = self.locks.driver.ask(Ask(wait_request(RULES, another, 1)))
                assert ballot[0].kind is VoteKind.REFUSED, ballot
                assert not hints, "told of a lock that is held"
            finally:
                self.locks.release(lease)
            lease = waiter.result()
        eventually(lambda: hints, "hint", timeout=5)  # short: it was sent with the release
        self.locks.release(lease)
        assert not self.locks.inspect("line")[0].holder
        assert self.admin.exists("redlock:line:line", "redlock:waiters:line") == 0

    def wait_until(self, condition, what):
        """Wait for what comes at once if a right for it is not missing, which the server notes."""
        before = self.refusals()
        eventually(lambda: condition() or self.refusals() > before, what)
        eventually(condition, what, timeout=5)  # short: what is refused is asked in vain

    def refusals(self):
        """Return how often the server has noted that a right was missing that is of use."""
        log = self.admin.acl_log()
        return sum(entry["count"] for entry in log if f"+{entry['object']}" not in HARMLESS)

    def slots_of_beat(self):
        due = float(int(time.time()))
        lease = self.locks.acquire("report")

        def claim(due, fence):
            return Claim("shop/report", due, f"{fence:040x}", fence, 60.0, lock="report")

        claimed = Slots.on(self.locks).claim(claim(due - 1, 1))
        assert (claimed.state.name, bool(claimed.holder)) == ("CLAIMED", True), claimed
        Slots.on(self.locks).withdraw(claim(due - 1, 1))
        assert Slots.on(self.locks).look(["shop/report"]) == {}
        assert Slots.on(self.locks).claim(claim(due, 1)).state.name == "CLAIMED"
        Slots.on(self.locks).settle(claim(due, 1))
        assert Slots.on(self.locks).look(["shop/report"])["shop/report"].is_settled
        self.locks.release(lease)

    def journal(self):
        write_record(self.locks, {"id": "1", "event": "x", "at": time.time()})
        probe(self.locks)
        assert self.admin.xlen("redlock:journal") == 1

    def leaked_keys(self):
        """A worker finds keys that never expire, for the metric and its alert."""
        self.admin.set("redlock:lock:leaked", "e" * 40)
        try:
            found = Leaks([self.url], RULES).look(self.locks.labels)
        finally:
            self.admin.delete("redlock:lock:leaked")
        assert list(found.values()) == [1], found

    def status(self):
        (status,) = node_statuses([self.url], RULES)
        assert (status.state, status.problem) == ("up", ""), status

    def listing(self):
        """``redlock ls`` and the web page."""
        lease = self.locks.acquire("listed")
        names = [view.name for view in AllLocks([self.url], RULES)]
        self.locks.release(lease)
        assert "listed" in names, names

    def explanation(self):
        """``redlock why``."""
        lease = self.locks.acquire("why")
        lock = read_lock([self.url], RULES, "why")
        (view,) = lock.views
        self.locks.release(lease)
        assert (lock.silent, bool(view.holder)) == ([], True), lock

    def reading_the_journal(self):
        """``redlock tail`` and ``why``."""
        with ExitStack() as stack:
            reader = JournalReader([self.url], RULES)
            stack.callback(reader.close)
            write_record(self.locks, {"id": "2", "event": "x", "at": time.time()})
            probe(self.locks)
            assert "2" in {record["id"] for record in reader.recent()}
            write_record(self.locks, {"id": "3", "event": "x", "at": time.time()})
            probe(self.locks)
            assert [record["id"] for record in reader.new()] == ["3"]

    def taking_away(self):
        """``redlock release``, of a lock and of a reservation, which ``ls --reserved`` lists."""
        lease = self.locks.acquire("stuck")
        (told,) = release_seen([self.url], RULES, "stuck", lease.token[:8]).values()
        assert told == "released", told
        reserved = Reservations.on(self.locks).reserve(Trigger("stuck", 60.0, {"task_id": "a"}))
        (seen,) = AllReservations([self.url], RULES)
        assert reserved.token.startswith(seen.reservation.seen)
        (told,) = release_seen([self.url], RULES, "stuck", seen.reservation.seen).values()
        assert told == "released", told
        assert list(AllReservations([self.url], RULES)) == []

    def diagnosis(self):
        """``redlock doctor``."""
        (facts,) = gather_nodes([self.url], RULES, lambda _: None)
        denied = (facts.denied, facts.denied_to_wake, facts.denied_to_tools)
        assert (facts.problem, *denied) == ("", [], [], []), facts


TASKS = ("enrolment", "locking", "refusal", "finished_tasks", "health")
TASKS += ("queued_markers", "waiting", "slots_of_beat", "journal", "leaked_keys")
TASKS += ("forgotten_scripts",)
TOOLS = ("status", "listing", "explanation", "reading_the_journal", "taking_away", "diagnosis")


@pytest.fixture
def everything(admin):
    used = []

    def use(url):
        used.append(Everything(url, admin))
        return used[-1]

    yield use
    for one in used:
        one.locks.close()


def is_refused(right, admin):
    refused = {entry["object"] for entry in admin.acl_log()}
    if right.startswith("&"):
        return any(fnmatch(name, right[1:]) for name in refused)
    return right.removeprefix("+") in refused


def without(rights, right):
    return [other for other in rights if other != right]


def test_a_worker_needs_no_more(admin, contract_node, everything):
    used = everything(allow(admin, contract_node, [*WORKER, *harmless(admin)]))
    assert used.features(TASKS) == {}
    assert admin.acl_log() == []


def test_an_operator_needs_no_more(admin, contract_node, everything):
    allowed = [*OPERATOR, *harmless(admin), "+config|get"]
    used = everything(allow(admin, contract_node, allowed))
    assert used.features(TASKS + TOOLS) == {}
    assert admin.acl_log() == []


def test_what_only_makes_a_line_in_the_log_is_not_needed(admin, contract_node, everything):
    used = everything(allow(admin, contract_node, OPERATOR))
    assert used.features(TASKS + TOOLS) == {}
    refused = {entry["object"] for entry in admin.acl_log()}
    assert refused == {"config|get"} | {right.removeprefix("+") for right in harmless(admin)}


@pytest.mark.parametrize("right", WORKER)
def test_a_worker_needs_every_right(admin, contract_node, everything, right, caplog):
    caplog.set_level(logging.DEBUG)
    used = everything(allow(admin, contract_node, without(WORKER, right)))
    failed = used.features(TASKS)
    assert failed
    assert is_refused(right, admin)
    said = f"{failed}\n{used.said}\n{caplog.text}\n{used.locks!r}"
    assert SECRET not in said
    assert contract_node.url.removeprefix("redis://") in said


@pytest.mark.parametrize("right", OPERATOR)
def test_an_operator_needs_every_right(admin, contract_node, everything, right):
    used = everything(allow(admin, contract_node, without(OPERATOR, right)))
    assert used.features(TASKS + TOOLS)
    assert is_refused(right, admin)


@pytest.mark.parametrize(
    ("right", "missing"),
    [
        ("+subscribe", ["SUBSCRIBE"]),
        ("+publish", ["PUBLISH"]),
        ("+zadd", ["ZADD"]),
        ("+zrange", ["ZRANGE"]),
        ("+zrem", ["ZREM"]),
        ("+hgetall", ["HGETALL"]),
        ("+hlen", ["HLEN"]),
        ("&redlock:*", ["PUBLISH", "SUBSCRIBE"]),
    ],
)
def test_the_doctor_says_who_cannot_be_woken(admin, contract_node, right, missing):
    """Rights that only waking needs are a finding of their own; the twin has them all."""
    url = allow(admin, contract_node, without(OPERATOR, right))
    (facts,) = gather_nodes([url], RULES, lambda _: None)
    assert (facts.problem, facts.denied, facts.denied_to_wake) == ("", [], missing)


def test_only_our_keys_have_to_be_allowed(admin, contract_node, everything):
    used = everything(allow(admin, contract_node, WORKER, keys="~elsewhere:*"))
    failed = used.features(TASKS)
    assert "enrolment" in failed
    assert "key" in failed["enrolment"]


def test_the_page_knows_every_command_of_the_scripts():
    called = {
        name.lower()
        for script in registered()
        for name in re.findall(rb"redis\.p?call\('([A-Z]+)'", script.source)
    }
    assert {name.decode() for name in called} <= {right.removeprefix("+") for right in WORKER}


@pytest.mark.parametrize("password", ["wr0ng-pass", ""])
def test_a_wrong_password(admin, contract_node, everything, password, caplog):
    caplog.set_level(logging.DEBUG)
    url = allow(admin, contract_node, WORKER).replace(SECRET, password)
    used = everything(url)
    failed = used.features(TASKS)
    assert "enrolment" in failed
    said = f"{failed}\n{caplog.text}\n{used.locks!r}\n{node_statuses([url], RULES)}"
    assert "username-password pair" in said
    assert SECRET not in said
    assert "wr0ng-pass" not in said
